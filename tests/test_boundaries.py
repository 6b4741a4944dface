# SPDX-License-Identifier: Apache-2.0
"""What a module may pull in: judging and showing records needs neither torch nor vLLM."""

import subprocess
import sys
from pathlib import Path

import pytest

LIGHT = [
    "baseline",
    "collect",
    "compare",
    "corpus",
    "environment",
    "explain",
    "job_loop",
    "judge",
    "judge_soak",
    "list_cells",
    "matrix",
    "metrics",
    "progress",
    "reach",
    "records",
    "reference_child",
    "report",
    "run_cells",
    "summary",
    "terminal",
    "tolerance",
    "worker",
]
HEAVY = ("torch", "vllm", "transformers", "matplotlib")


@pytest.mark.parametrize("module", LIGHT)
def test_importing_a_light_module_imports_nothing_heavy(module):
    code = f"import sys, harness.{module}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.stdout.strip() == "[]"


def test_only_what_runs_an_engine_a_server_or_a_parser_imports_vllm():
    importing = {
        path.name
        for path in (Path(__file__).parents[1] / "harness").glob("*.py")
        if any(
            line.lstrip().startswith(("import vllm", "from vllm ", "from vllm."))
            for line in path.read_text().splitlines()
        )
    }
    assert importing <= {
        "engine.py",
        "server.py",
        "replay.py",
        "cases.py",
        "bench_parsers.py",
        "golden.py",
        "loaded_weights.py",
        "own_engine.py",
    }
