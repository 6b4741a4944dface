# SPDX-License-Identifier: Apache-2.0
"""Comparing runs: direction by metric, what came and went, refusals, baselines on purpose."""

import argparse

import pytest

from harness.evidence.record import Corpus, Failure, Identity
from harness.records import baseline, compare
from harness.records import store as records
from harness.records.judge import judge
from harness.records.summary import summarise_run
from tests import evidence


def summary(*found, matrix="demo", **environment):
    return summarise_run(list(found), matrix, "today", evidence.environment(**environment))


def wrong_by(error: float, **changes):
    """A judged record whose worst logprob is off by `error`."""
    request = evidence.request("p")
    request.logprobs[1] += error
    record = evidence.record(observation=evidence.observation(requests=[request]), **changes)
    return record.model_copy(update={"verdict": judge(record)})


def moved(before, after):
    moves = compare.compare(before, after).moves
    return [(move.cell, move.metric, move.direction) for move in moves]


def test_equal_runs_do_not_move():
    assert compare.compare(summary(wrong_by(5e-5)), summary(wrong_by(5e-5))).moves == []


def test_a_larger_error_is_worse_and_a_smaller_one_better():
    small, large = summary(wrong_by(3e-5)), summary(wrong_by(9e-5))
    assert ("fp32-alone", "decode_logprob_error_max", "worse") in moved(small, large)
    assert ("fp32-alone", "decode_logprob_error_max", "better") in moved(large, small)


def test_sqnr_is_better_when_higher():
    assert ("fp32-alone", "sqnr_db", "better") in moved(
        summary(wrong_by(9e-5)), summary(wrong_by(3e-5))
    )


def test_changes_within_what_correct_runs_differ_by_are_no_move():
    assert moved(summary(wrong_by(5e-5)), summary(wrong_by(8e-5))) == []
    assert moved(summary(wrong_by(1e-6)), summary(wrong_by(9e-6))) == [
        ("fp32-alone", "sqnr_db", "worse")
    ]


def test_a_changed_verdict_is_a_move_without_any_figure():
    failed = evidence.record(
        observation=None, reference=None, failure=Failure(kind="crashed", message="gone")
    )
    failed = failed.model_copy(update={"verdict": judge(failed)})
    assert moved(summary(wrong_by(0)), summary(failed)) == [("fp32-alone", "verdict", "worse")]


CARD = {"cards": [evidence.CARD]}


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        (CARD, CARD, True),
        (CARD, {"cards": []}, False),
        ({"cards": []}, {"cards": []}, False),
        (CARD | {"processes": 16}, CARD | {"processes": 16}, False),
        (CARD, CARD | {"processes": None}, False),
    ],
    ids=["card", "another", "cpu", "shared", "unknown"],
)
def test_times_are_compared_on_one_kind_of_card_that_a_run_had_to_itself(before, after, worse):
    def timed(ttft_ms, machine):
        requests = [evidence.request("p", ttft_ms=ttft_ms, e2el_ms=ttft_ms + 20)]
        record = evidence.record(observation=evidence.observation(requests=requests))
        return summary(record.model_copy(update={"verdict": judge(record)}), **machine)

    expected = [("fp32-alone", "ttft_ms", "worse")] if worse else []
    assert moved(timed(10, before), timed(30, after)) == expected


def test_cells_that_appear_and_vanish_are_named():
    result = compare.compare(
        summary(wrong_by(0, cell="a"), wrong_by(0, cell="b")),
        summary(wrong_by(0, cell="b"), wrong_by(0, cell="c")),
    )
    assert (result.appeared, result.vanished, result.common) == (["c"], ["a"], 1)
    text = compare.describe(result)
    assert "1 cells in both: none moved" in text
    assert "appeared: c" in text
    assert "vanished: a" in text


def test_another_measurement_is_refused_with_every_difference():
    unlike = wrong_by(
        0,
        identity=Identity(cell_sha256="d" * 64, versions_sha256="b" * 64),
        corpus=Corpus(sha256="e" * 64, token_ids={}),
    )
    with pytest.raises(compare.UnlikeError) as caught:
        compare.compare(summary(wrong_by(0)), summary(unlike))
    assert str(caught.value).splitlines() == [
        "fp32-alone: cell differs; it is not the same measurement",
        "fp32-alone: corpus differs; it is not the same measurement",
    ]
    with pytest.raises(compare.UnlikeError, match="A is a run of demo, B of other"):
        compare.compare(summary(), summary(matrix="other"))


def test_other_versions_are_what_comparing_is_for():
    newer = wrong_by(0, identity=Identity(cell_sha256="a" * 64, versions_sha256="f" * 64))
    assert compare.compare(summary(wrong_by(0)), summary(newer)).moves == []


MATRIX = """\
schema_version: 1
kind: parser
question: Is it right?
base:
  checkpoint: {shape: tiny, dtype: float32, seed: 1, taught: false, quantize: none}
  parser: {delta_size: 1, history: none, mode: direct, tool_choice: auto, truncation: none}
  timeout: {start_s: 1, cell_s: 1}
axes:
  dtype: {fp32: {}}
  mode: {alone: {}}
"""


@pytest.fixture
def write_run(tmp_path):
    matrix = tmp_path / "demo.yaml"
    matrix.write_text(MATRIX)

    def write(name: str, *found, cells=None):
        folder = tmp_path / name
        names = cells or [record.cell for record in found]
        records.save_header(evidence.header(*names, matrix_path=str(matrix)), folder)
        for record in found:
            records.save(record, folder)
        return folder

    return write


def command(module, *arguments) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args([str(argument) for argument in arguments]))


def test_the_compare_command_exits_by_what_moved(write_run, capsys):
    small, large = write_run("small", wrong_by(3e-5)), write_run("large", wrong_by(9e-5))
    assert command(compare, small, small) == 0
    assert command(compare, large, small) == 0
    assert command(compare, small, large) == 1
    assert "decode_logprob_error_max" in capsys.readouterr().out


def test_runs_without_a_common_cell_compare_nothing(write_run):
    assert command(compare, write_run("a", wrong_by(0)), write_run("b", wrong_by(0, cell="x"))) == 4


def test_an_incomplete_run_is_not_compared(write_run, capsys):
    whole = write_run("whole", wrong_by(0))
    half = write_run("half", wrong_by(0), cells=["fp32-alone", "fp32-lost"])
    assert command(compare, whole, half) == 2
    assert "fp32-lost: no record" in capsys.readouterr().err


def test_a_baseline_is_written_once_and_renewed_on_purpose_only(write_run, tmp_path, capsys):
    folder = tmp_path / "baselines"
    first, better = write_run("first", wrong_by(9e-5)), write_run("better", wrong_by(3e-5))
    assert command(baseline, first, "--folder", folder) == 0
    path = folder / "cpu" / "demo.json"
    assert compare.load(path) == (compare.load(first)[0], True)
    before = path.read_bytes()
    assert command(baseline, better, "--folder", folder) == 2
    assert path.read_bytes() == before
    assert "better" in capsys.readouterr().out
    assert command(baseline, better, "--folder", folder, "--renew") == 0
    assert path.read_bytes() != before


def test_an_improvement_on_a_baseline_fails_until_it_is_renewed(write_run, tmp_path, capsys):
    first, better = write_run("first", wrong_by(9e-5)), write_run("better", wrong_by(3e-5))
    command(baseline, first, "--folder", tmp_path / "baselines")
    path = tmp_path / "baselines" / "cpu" / "demo.json"
    assert command(compare, path, better) == 1
    assert "renew it with" in capsys.readouterr().out


@pytest.mark.parametrize("problem", ["failed", "missing", "unselected"])
def test_only_a_run_that_passed_whole_becomes_a_baseline(write_run, tmp_path, problem):
    records_of = {
        "failed": ([wrong_by(1.0)], None),
        "missing": ([wrong_by(0)], ["fp32-alone", "fp32-lost"]),
        "unselected": ([wrong_by(0, cell="other")], None),
    }
    found, cells = records_of[problem]
    run = write_run("run", *found, cells=cells)
    assert command(baseline, run, "--folder", tmp_path / "baselines") == 1
    assert not (tmp_path / "baselines").exists()


def test_what_is_no_run_and_no_baseline_is_a_usage_error(write_run, tmp_path):
    (tmp_path / "wrong.json").write_text("{}")
    good = write_run("run", wrong_by(0))
    assert command(compare, tmp_path / "wrong.json", good) == 2
    assert command(compare, tmp_path / "absent.json", good) == 2
    assert command(baseline, tmp_path / "absent") == 2
