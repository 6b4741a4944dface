# SPDX-License-Identifier: Apache-2.0
"""The plugin in vLLM's engine against what the model's training runtime computed."""

import subprocess
import sys

from tests.conftest import GOLDEN


def test_the_engine_meets_the_golden_vectors():
    done = subprocess.run(
        [sys.executable, "-m", "harness", "golden", "--engine", GOLDEN / "tiny", GOLDEN / "tiny16"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    verdicts = [line.split()[0] for line in done.stdout.splitlines() if "logprob error" in line]
    assert verdicts == ["pass"] * 4
