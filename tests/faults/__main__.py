# SPDX-License-Identifier: Apache-2.0
"""The engine child with a fault; see the package."""

import sys
from typing import Any

from harness import engine, job_loop
from tests.faults import caches, forward_pass

FAULTS = {**forward_pass.FAULTS, **caches.FAULTS}


def main() -> None:
    seed = FAULTS[sys.argv.pop(1)]

    def build(config: dict[str, Any]) -> tuple[dict[str, Any], job_loop.Handler]:
        seed()
        return engine.build(config)

    job_loop.main(build)


if __name__ == "__main__":
    main()
