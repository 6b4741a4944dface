# SPDX-License-Identifier: Apache-2.0
"""`python -m harness score`: a saved run is held against the references of today."""

import sys
from pathlib import Path

import pytest

from harness import exit_codes
from harness.__main__ import main
from harness.records import store
from harness.run import score
from tests import evidence
from tests.without_vllm.fake_matrix import CHILDREN


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run of three cells: one as it is scored today, one without what budgets are
    made of, and one whose checkpoint the reference finds otherwise."""
    monkeypatch.setattr(score, "CHILDREN", CHILDREN)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    folder = tmp_path / "run"
    folder.mkdir()
    good, old, other = (evidence.record(cell=cell) for cell in ("good", "old", "other"))
    (scores,) = old.reference.requests
    without = old.reference.model_copy(
        update={"requests": [scores.model_copy(update={"roundings": None})]}
    )
    old = old.model_copy(update={"reference": without})
    other.reference.requests[0].reference.logprobs[1] -= 0.5
    store.save_header(evidence.header("good", "old", "other"), folder)
    for record in (good, old, other):
        store.save(record, folder)
    return folder


def test_cells_get_references_of_today_and_their_verdicts(run, tmp_path, capsys):
    out = tmp_path / "out"
    code = main(["score", str(run), str(out), "--cell", "good", "--cell", "old"])
    assert code == exit_codes.PASSED
    header, found, faults = store.load_run(out)
    assert (header.cells, faults) == (["good", "old"], [])
    for record in found:
        assert record.verdict.verdict == "pass"
        assert record.reference.requests[0].roundings is not None
    assert store.load(run / "old.json").reference.requests[0].roundings is None
    assert "good pass\nold pass\n" in capsys.readouterr().out


def test_a_cell_whose_checkpoint_comes_out_otherwise_is_named_and_left_out(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["score", str(run), str(out)]) == exit_codes.INFRASTRUCTURE
    assert [record.cell for record in store.load_run(out)[1]] == ["good", "old"]
    told = capsys.readouterr().err
    assert (
        "other: its checkpoint does not come out as it was: FP32 gives logprobs up to 0.5" in told
    )


def test_a_cell_that_the_reference_cannot_score_is_named(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(score, "CHILDREN", {"reference": (sys.executable, "-c", "import none")})
    assert main(["score", str(run), str(tmp_path / "out"), "--cell", "good"]) == (
        exit_codes.INFRASTRUCTURE
    )
    assert "error: good: the child ended without an answer" in capsys.readouterr().err


def test_a_folder_that_holds_a_run_is_not_written_to(run, capsys):
    assert main(["score", str(run), str(run)]) == exit_codes.USAGE
    assert "holds a run already: name a new folder" in capsys.readouterr().err
