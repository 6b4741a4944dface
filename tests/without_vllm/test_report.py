# SPDX-License-Identifier: Apache-2.0
"""Reports: every cell and reason is in them, they stand alone, and they come from records only."""

import argparse
import re

import pytest

from harness.evidence.record import Failure
from harness.records import store as records
from harness.records.judge import judge
from harness.report import page as report
from tests import evidence
from tests.pages import Balanced, squeezed


def judged(**changes):
    record = evidence.record(**changes)
    return record.model_copy(update={"verdict": judge(record)})


@pytest.fixture
def found():
    wrong = evidence.request("p")
    wrong.logprobs[1] += 0.5
    tie = evidence.scores(argmax=[10, 60, 12], argmax_logprobs=[-0.35, -0.3, -0.35])
    return [
        judged(),
        judged(
            cell="bf16-wrong",
            axes={"dtype": "bf16", "mode": "wrong"},
            observation=evidence.observation(requests=[wrong]),
            reference=evidence.reference(evidence.pair(tie)),
        ),
        judged(
            cell="fp32-lost",
            axes={"dtype": "fp32", "mode": "lost"},
            observation=None,
            reference=None,
            failure=Failure(kind="crashed", message="<gone> & away", log_tail="last words"),
        ),
    ]


@pytest.fixture
def header(found):
    environment = evidence.environment(git={"commit": "abc", "dirty": False})
    return evidence.header(*(record.cell for record in found), environment=environment)


def test_the_page_is_well_formed_and_fetches_nothing(header, found):
    page = Balanced()
    text = report.html(header, found, [], None)
    page.feed(text)
    assert page.open == []
    assert page.fetched == []
    assert "@import" not in text
    assert "url(http" not in text


def test_the_page_has_every_cell_and_reason_and_escapes_them(header, found):
    text = report.html(header, found, ["fp32-half: no record"], "1 worse")
    for expected in (
        "fp32-alone",
        "bf16-wrong",
        "&lt;gone&gt; &amp; away",
        "fp32-half: no record",
        "1 worse",
    ):
        assert expected in text
    assert "<gone>" not in text


def test_rows_can_be_filtered_by_each_axis_and_sorted_by_numbers(header, found):
    text = report.html(header, found, [], None)
    assert 'data-axis-dtype="bf16" data-axis-mode="wrong"' in text
    assert re.search(r'<select data-key="axis-mode".*<option>lost</option>', text)
    assert '<td class="n" data-value="1.0">1</td>' in text


def test_cells_that_need_a_look_come_first(header, found):
    text = report.html(header, found, [], None)
    places = [
        text.index(f'<tr class="cell" id="{cell}"')
        for cell in ("fp32-lost", "bf16-wrong", "fp32-alone")
    ]
    assert places == sorted(places)


def test_plots_are_drawn_for_light_and_dark_pages(header, found):
    pytest.importorskip("matplotlib")
    text = report.html(header, found, [], None)
    titles = re.findall(r"<figure><h3>(.*?)</h3>", text)
    assert titles == [
        "Share of the budget used",
        "Top-20 KL per cell",
        "Decode logprob error along the position",
        "Latency",
    ]
    assert text.count("<svg") == 2 * len(titles)


def test_the_page_is_written_without_matplotlib_too(header, found, monkeypatch):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert "<svg" not in report.html(header, found, [], None)


def test_markdown_is_a_table_with_failures_folded(header, found):
    text = squeezed(report.markdown(header, found, ["fp32-half: no record"], None))
    assert text.startswith("### demo: 1 pass, 1 fail, 2 error")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len({line.count("|") for line in rows}) == 1
    assert (
        "| fp32-alone | pass | decode_logprob_error_max | 0 | 0.0001 | 2.5e-05 | 0.0001 | 0 |"
        in rows
    )
    assert "<details><summary>bf16-wrong</summary>" in text
    assert "run it alone: pytest matrices/demo.yaml --cell bf16-wrong" in text
    assert "<details><summary>fp32-alone" not in text


def test_the_command_writes_both_files(tmp_path, header, found, capsys):
    records.save_header(header, tmp_path)
    for record in found:
        records.save(record, tmp_path)
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    assert report.run(parser.parse_args([str(tmp_path)])) == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "report.md"),
        str(tmp_path / "report.html"),
    ]
    assert report.run(parser.parse_args([str(tmp_path / "absent")])) == 2
