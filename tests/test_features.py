# SPDX-License-Identifier: Apache-2.0
"""matrices/features.yaml and matrices/two_gpus.yaml, as far as an engine without a card can go.

Refusals need no engine: what each refused cell asks is configured here, and its sentence must come.
What a CPU runs is run through the matrices themselves, on the same cells as on a card.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import records
from harness.judge import judge
from harness.matrix import load_matrix
from tests.test_refusals import configure

REPOSITORY = Path(__file__).parents[1]
CELLS = {cell.id: cell for cell in load_matrix(REPOSITORY / "matrices/features.yaml").cells}
REFUSED = {name: cell for name, cell in CELLS.items() if "expect" in cell.settings}
ON_A_CPU = ("eager-plain", "eager-kvfp8")


def run_matrix(name: str, folder: Path, cells: tuple[str, ...]) -> list[records.Record]:
    """Run cells of a shipped matrix on this machine's CPU; return their records."""
    command = [sys.executable, "-m", "pytest", f"matrices/{name}.yaml", "-p", "no:cacheprovider"]
    command += [word for cell in cells for word in ("--cell", cell)]
    environment = {
        "TORCH_COMPILE_DISABLE": "1",  # logprobs would compile a helper
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",  # a core for each rank
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, "--results", str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    _, found, faults = records.load_run(folder)
    assert faults == []
    assert {record.cell for record in found} == set(cells)
    return found


def test_every_cell_works_or_is_refused_with_words():
    features = {cell.axes["feature"] for cell in CELLS.values()}
    assert features == {
        "async", "batchinvariant", "cacheall", "fp8block", "kvfp8", "lora", "ngram", "plain",
        "prefixunit", "reload", "replayssm", "sleep", "sleepdeep", "ssmbf16",
    }  # fmt: skip
    assert {cell.axes["feature"] for cell in REFUSED.values()} == {
        "batchinvariant", "cacheall", "fp8block", "lora", "ngram", "prefixunit", "replayssm",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_a_cell_expects_to_be_refused_is_refused_in_those_words(checkpoint, monkeypatch, name):
    engine = REFUSED[name].settings["engine"]
    for variable, value in engine["env"].items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=REFUSED[name].settings["expect"]["refusal"]):
        configure(checkpoint("tiny"), **engine["args"])


def test_a_cpu_engine_agrees_with_the_reference_with_each_feature_that_it_has(tmp_path):
    for record in run_matrix("features", tmp_path / "run", ON_A_CPU):
        assert judge(record) == record.verdict
        if record.axes["feature"] != "kvfp8":
            mismatches = record.verdict.findings[0]
            assert (mismatches.metric, mismatches.observed) == ("greedy_mismatches", 0)


def test_a_reload_brings_back_every_weight_and_what_is_computed_of_them(checkpoint):
    done = subprocess.run(
        [sys.executable, "-m", "tests.reloading_engine", str(checkpoint("tiny"))],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "refused: weights cannot be reloaded on a CPU" in done.stdout
    found = re.search(r"(\d+) of (\d+) tensors spoiled, wrong after the reload: (.*)", done.stdout)
    assert found, done.stdout
    assert int(found[1]) > 100
    assert found[3] == "[]"


def test_two_ranks_agree_with_the_reference(tmp_path):
    (record,) = run_matrix("two_gpus", tmp_path / "run", ("fp32-eager-tp2-chats-tiny16",))
    assert record.observation.facts.tensor_parallel_size == 2
    assert record.verdict.findings[0].observed == 0


def test_the_sessions_of_these_matrices_are_those_that_the_workflow_offers():
    nox = (REPOSITORY / "noxfile.py").read_text()
    workflow = (REPOSITORY / ".github/workflows/gpu.yml").read_text()
    (options,) = re.findall(r"options: \[(.*)\]", workflow)
    for name in options.split(", "):
        assert f"def {name}(session" in nox
        assert f"matrices/{name}.yaml" in nox
