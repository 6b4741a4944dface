# SPDX-License-Identifier: Apache-2.0
"""Runs that were recorded earlier: read whole, judged the same, and written back as they were."""

import json
from pathlib import Path

import pytest

from harness.kinds import KINDS
from harness.records.judge import judge
from harness.records.store import load_run, save
from harness.report import page

RUNS = sorted(path.parent for path in (Path(__file__).parent / "recorded").glob("*/run.json"))
RENAMED = {"memory_limit_share": "mbu"}
"""Metrics that have another name since."""


def named_as_now(verdict):
    findings = [
        one.model_copy(update={"metric": RENAMED.get(one.metric, one.metric)})
        for one in verdict.findings
    ]
    return verdict.model_copy(update={"findings": findings})


@pytest.fixture(params=RUNS, ids=lambda run: run.name)
def recorded(request):
    header, found, faults = load_run(request.param)
    assert faults == []
    return request.param, header, found


def test_a_recorded_verdict_is_reached_again(recorded):
    _, _, found = recorded
    for record in found:
        assert judge(record) == named_as_now(record.verdict), record.cell


def test_judging_again_leaves_the_evidence_as_it_was_written(recorded, tmp_path):
    folder, _, found = recorded
    for record in found:
        saved = save(record.model_copy(update={"verdict": judge(record)}), tmp_path)
        before = json.loads((folder / saved.name).read_text())
        after = json.loads(saved.read_text())
        assert {**after, "verdict": None} == {**before, "verdict": None}


def test_a_report_shows_every_recorded_cell(recorded):
    _, header, found = recorded
    judged = [record.model_copy(update={"verdict": judge(record)}) for record in found]
    text = page.html(header, judged, [], None)
    assert all(f'<tr class="cell" id="{record.cell}"' in text for record in judged)


def test_the_cell_with_the_row_that_a_race_spoiled_fails_and_the_same_prompts_beside_it_pass():
    _, found, _ = load_run(Path(__file__).parent / "recorded" / "race")
    spoiled, right = (judge(record) for record in found)
    assert (spoiled.verdict, right.verdict) == ("fail", "pass")
    assert spoiled.reasons[-1].startswith("0.6-n33 position 0: token 711")
    place = spoiled.worst[0]
    assert (place.request, place.position) == ("0.6-n33", 0)
    # The position is good to 0.06 nats; the worst one of the cell to 1.4, which is why it has its own budget.
    worst = next(one for one in spoiled.findings if one.metric == "decode_logprob_error_max")
    assert worst.budget > 10 * place.budget
    assert worst.observed > 10 * place.budget


def test_every_kind_and_verdict_is_among_them():
    found = [record for run in RUNS for record in load_run(run)[1]]
    assert {record.kind for record in found} == set(KINDS)
    seen = {type(record.observation) for record in found if record.observation}
    assert seen == {one for kind in KINDS.values() for one in kind.observations}
    assert {record.verdict.verdict for record in found} >= {"pass", "error", "not_reached"}
