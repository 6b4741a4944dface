# SPDX-License-Identifier: Apache-2.0
"""The engine child with the fault that SEEDED_FAULT names; see the package."""

import os
from typing import Any

from harness.kinds.parity import child
from harness.process import child_loop
from tests.faults import caches, forward_pass, repetition

FAULTS = {**forward_pass.FAULTS, **caches.FAULTS, **repetition.FAULTS}


def main() -> None:
    seed = FAULTS[os.environ["SEEDED_FAULT"]]

    def build(config: dict[str, Any]) -> tuple[dict[str, Any], child_loop.Handler]:
        seed()
        return child.build(config)

    child_loop.main(build)


if __name__ == "__main__":
    main()
