# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/ run against the server, as the README shows them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.service import Service

EXAMPLES = Path(__file__).parents[2] / "examples"

PRINTED = {
    "thinking.py": [
        "Reasoning: 17 plus 25 is 42.",
        "Answer: 17 + 25 = 42.",
        "At once: 42.",
    ],
    "tool_loop.py": [
        "Reasoning: Need the forecast for Faro.",
        "Calling get_weather('Faro', 1)",
        "Reasoning: It is dry.",
        "Answer: No rain in Faro: 24 C.",
    ],
    "structured.py": ["Reasoning: The ball is 5 cents.", "Cents: 5"],
}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_its_reader_expects(service: Service, name: str):
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), f"{service.base_url}/v1"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    if service.taught:
        assert result.stdout.splitlines() == PRINTED[name]
