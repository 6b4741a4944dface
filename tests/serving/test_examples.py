# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/ run against the server, as the README shows them."""

import subprocess
import sys

import pytest

from tests.serving.service import Service
from tests.shown_commands import EXAMPLES, REPOSITORY, shown_outputs

PRINTED = {
    command.removeprefix("python "): lines
    for command, lines in shown_outputs(REPOSITORY / "README.md").items()
    if command.startswith("python examples/")
}


def test_the_readme_shows_every_example():
    assert {f"examples/{path.name}" for path in EXAMPLES} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_the_readme_shows(service: Service, name: str):
    result = subprocess.run(
        [sys.executable, str(REPOSITORY / name), f"{service.base_url}/v1"],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    if service.taught:
        assert result.stdout.splitlines() == PRINTED[name]
