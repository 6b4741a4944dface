# SPDX-License-Identifier: Apache-2.0
"""Verdicts follow from the evidence; NaN, clear differences and absent evidence never pass."""

import argparse
import math

import pytest

from harness import exit_codes
from harness.evidence.record import Failure
from harness.evidence.verdict import Verdict
from harness.kinds.parser.observation import ParserObservation
from harness.records import judge as judging
from harness.records import store as records
from harness.records.judge import judge
from tests import evidence


def parity(request=None, scores=None, port=None, inside=0.0, **changes):
    """A record of one request against its scores."""
    pair = evidence.pair(scores, port, inside)
    return evidence.record(
        observation=evidence.observation(requests=[request or evidence.request("p")], **changes),
        reference=evidence.reference(pair),
    )


def bf16(record):
    settings = evidence.settings(
        precision="bf16", engine={"args": {"dtype": "bfloat16"}, "env": {}}
    )
    facts = evidence.engine_facts({"dtype": "bfloat16"})
    observation = record.observation.model_copy(update={"facts": facts})
    return record.model_copy(update={"settings": settings, "observation": observation})


def finding(verdict, metric):
    return next(found for found in verdict.findings if found.metric == metric)


def test_agreement_passes():
    verdict = judge(evidence.record())
    assert (verdict.verdict, verdict.reasons) == ("pass", [])
    assert finding(verdict, "decode_logprob_error_max").observed == 0


def test_an_earlier_verdict_is_not_looked_at():
    record = evidence.record(verdict=Verdict(verdict="fail", reasons=["old"]))
    assert judge(record) == judge(evidence.record())


@pytest.mark.parametrize(("error", "verdict"), [(0.9e-4, "pass"), (1.1e-4, "fail")])
def test_fp32_is_limited_at_its_worst_position(error, verdict):
    request = evidence.request("p")
    request.logprobs[2] += error
    found = judge(parity(request))
    assert found.verdict == verdict
    assert found.worst[0].position == 2


def test_a_logprob_that_is_no_number_fails_and_is_the_worst_position():
    request = evidence.request("p", logprobs=[-0.35, math.nan, -0.35])
    verdict = judge(parity(request))
    assert verdict.verdict == "fail"
    assert verdict.worst[0].position == 1


def test_another_token_in_fp32_fails_however_close():
    scores = evidence.scores(argmax=[10, 60, 12], argmax_logprobs=[-0.35, -0.3566, -0.35])
    verdict = judge(parity(scores=scores))
    assert verdict.verdict == "fail"
    assert "0.0-p position 1: token 11, but the reference prefers 60" in verdict.reasons[-1]


def with_error(scores, error):
    return scores.model_copy(update={"logprobs": [value + error for value in scores.logprobs]})


@pytest.mark.parametrize(("error", "verdict"), [(0.20, "pass"), (0.25, "fail")])
def test_bf16_may_be_off_by_twice_its_floor_and_one_step(error, verdict):
    # Floor 0.1, logits of 4: a step of bfloat16 is 4 * 2**-7 = 0.03125, so the budget is 0.23125.
    request = evidence.request("p")
    request.logprobs[2] -= error
    record = bf16(parity(request, port=with_error(evidence.scores(), 0.1), inside=0.1))
    found = judge(record)
    assert finding(found, "decode_logprob_error_max").budget == pytest.approx(0.23125)
    assert found.verdict == verdict


def test_the_floor_is_taken_inside_the_prompt_too():
    request = evidence.request("p", logprobs=[v - 0.9 for v in evidence.request("p").logprobs])
    quiet = judge(bf16(parity(request, port=evidence.scores())))
    assert not finding(quiet, "decode_logprob_error_max").passed
    loud = judge(bf16(parity(request, port=evidence.scores(), inside=0.5)))
    assert finding(loud, "decode_logprob_error_max").floor == 0.5
    assert finding(loud, "decode_logprob_error_max").passed


def test_a_divergence_may_be_four_times_its_floor_being_quadratic_in_the_error():
    verdict = judge(bf16(parity(port=evidence.scores(), inside=0.01)))
    step = 0.03125**2 / 8
    assert finding(verdict, "top20_kl_max").budget == pytest.approx(4 * 0.01 + step)
    assert finding(verdict, "total_variation_max").budget == pytest.approx(2 * 0.01 + 0.03125 / 4)


def test_the_mean_is_judged_beside_the_worst_position():
    # Every position as wrong as the port's single worst one: the worst passes, the mean does not.
    port = evidence.scores()
    port.logprobs[0] += 0.3
    request = evidence.request("p", logprobs=[v - 0.3 for v in evidence.request("p").logprobs])
    verdict = judge(bf16(parity(request, port=port)))
    assert finding(verdict, "decode_logprob_error_max").passed
    assert not finding(verdict, "decode_logprob_error_mean").passed
    assert verdict.verdict == "fail"


# Floor 0.2 at the position itself, so 2 * 0.2 and a step of 0.03125; or that of the others, which is
# what the references are off there on average, 0.2 / 3.
@pytest.mark.parametrize(
    ("margin", "floor_at", "verdict"),
    [(0.43, 0, "pass"), (0.44, 0, "fail"), (0.43, 1, "fail"), (0.15, 1, "pass")],
)
def test_a_bf16_token_may_differ_only_where_references_doubt_that_very_margin(
    margin, floor_at, verdict
):
    preferred = evidence.scores().logprobs[0] + margin
    other = {"argmax": [60, 11, 12], "argmax_logprobs": [preferred, -0.35, -0.35]}
    scores, port = evidence.scores(**other), evidence.scores(**other)
    port.top_logprobs[floor_at][1] -= 0.2
    found = judge(bf16(parity(scores=scores, port=port)))
    assert found.verdict == verdict
    assert len(found.near_ties) == (verdict == "pass")


def test_a_token_that_the_port_in_the_served_precision_prefers_too_is_a_tie():
    preferred = evidence.scores().logprobs[0] + 2.0
    scores = evidence.scores(argmax=[60, 11, 12], argmax_logprobs=[preferred, -0.35, -0.35])
    found = judge(bf16(parity(scores=scores, port=evidence.scores())))
    assert [tie.margin_nats for tie in found.near_ties] == [0.0]


def test_a_position_with_a_wide_floor_widens_no_other_positions_budget():
    # Ten positions; the references doubt the first by 1 nat, the candidate is 0.8 off at four others.
    exact = evidence.scores(10)
    port = evidence.scores(10)
    port.logprobs[0] += 1.0
    request = evidence.request("p", tokens=10)
    for position in range(1, 5):
        request.logprobs[position] -= 0.8
    settings = {"max_tokens": 10, "temperature": 0.0, "ignore_eos": True, "logprobs": evidence.TOP}
    record = bf16(parity(request, exact, port=port))
    record = record.model_copy(update={"settings": record.settings | {"sampling": settings}})
    verdict = judge(record)
    assert finding(verdict, "decode_logprob_error_max").passed
    shares = finding(verdict, "share_past_budget")
    assert (shares.observed, shares.floor, shares.budget) == (0.4, 0.0, 0.2)
    assert verdict.verdict == "fail"
    assert {place.position for place in verdict.worst} < {1, 2, 3, 4}


def test_a_record_of_before_asks_to_be_scored_again():
    pair = evidence.pair(port=evidence.scores()).model_copy(update={"roundings": None})
    record = evidence.record(reference=evidence.reference(pair))
    verdict = judge(bf16(record))
    assert verdict.verdict == "error"
    assert "score the run again with `python -m harness score RUN OUT`" in verdict.reasons[0]


def test_evidence_of_something_else_is_not_reached_however_well_it_agrees():
    record = evidence.record(
        observation=evidence.observation(steps=[evidence.prefill_step(10)] * 2)
    )
    verdict = judge(record)
    assert verdict.verdict == "not_reached"
    assert verdict.reasons == ["round 0: prefill chunks: expected [20], found [10, 10]"]


@pytest.mark.parametrize(("error", "verdict"), [(0.5, "pass"), (math.nan, "fail")])
def test_what_has_no_floor_is_measured_but_must_be_a_number(error, verdict):
    request = evidence.request("p")
    request.logprobs[0] += error
    settings = evidence.settings(measure_only="the port keeps its state in FP32")
    found = judge(parity(request).model_copy(update={"settings": settings}))
    assert found.verdict == verdict
    assert not finding(found, "decode_logprob_error_max").passed
    if verdict == "pass":
        assert found.reasons[0] == "measured only: the port keeps its state in FP32"


@pytest.mark.parametrize("missing", ["observation", "reference"])
def test_absent_evidence_is_an_error(missing):
    assert judge(evidence.record(**{missing: None})).verdict == "error"


def test_a_failure_is_an_error_that_keeps_its_message():
    failure = Failure(kind="timeout", message="no answer within 5 s")
    verdict = judge(evidence.record(failure=failure, observation=None, reference=None))
    assert (verdict.verdict, verdict.reasons) == ("error", ["timeout: no answer within 5 s"])


@pytest.mark.parametrize(
    ("failure", "verdict"),
    [
        (
            Failure(kind="refused", message="ValueError: pipeline parallelism is not supported"),
            "pass",
        ),
        (Failure(kind="refused", message="RuntimeError: CUDA out of memory"), "fail"),
        (Failure(kind="crashed", message="pipeline parallelism killed it"), "error"),
        (None, "fail"),
    ],
)
def test_an_expected_refusal_passes_only_with_its_sentence(failure, verdict):
    settings = evidence.settings(expect={"refusal": "pipeline parallelism is not"})
    assert judge(evidence.record(settings=settings, failure=failure)).verdict == verdict


@pytest.mark.parametrize(
    ("comparisons", "faults", "verdict"),
    [(8, [], "pass"), (8, ["case a: text after a call is lost"], "fail"), (0, [], "not_reached")],
)
def test_a_parser_cell_passes_with_comparisons_and_without_faults(comparisons, faults, verdict):
    observation = ParserObservation(cases=2, comparisons=comparisons, faults=faults, run_s=0.1)
    record = evidence.record(
        kind="parser", settings=evidence.PARSER, observation=observation, reference=None
    )
    assert judge(record).verdict == verdict


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (["pass", "pass"], 0),
        (["pass", "fail"], 1),
        (["fail", "not_reached", "error"], 3),
        (["fail", "not_reached"], 4),
        (["skip"], 4),
        ([], 4),
    ],
)
def test_exit_codes(verdicts, code):
    assert exit_codes.of_verdicts(verdicts) == code


def test_the_command_judges_a_saved_run_again_and_writes_the_verdicts(tmp_path, capsys):
    records.save_header(evidence.header("fp32-alone"), tmp_path)
    wrong = evidence.request("p")
    wrong.logprobs[0] += 1.0
    records.save(parity(wrong), tmp_path)
    assert run(tmp_path) == 1
    printed = capsys.readouterr().out
    for text in (
        "decode_logprob_error_max",
        "0.0-p[0] token 10: reference -0.356675, candidate 0.643325",
        "cached tokens: 0.0-p 0/20",
        f"log: {tmp_path}/logs/fp32.log",
        "run it alone: pytest matrices/demo.yaml --cell fp32-alone",
        f"judge it again: python -m harness judge {tmp_path} --cell fp32-alone",
    ):
        assert text in printed
    assert records.load(tmp_path / "fp32-alone.json").verdict.verdict == "fail"


def test_a_selected_cell_without_a_record_is_an_infrastructure_failure(tmp_path, capsys):
    records.save_header(evidence.header("fp32-alone", "fp32-lost"), tmp_path)
    records.save(evidence.record(), tmp_path)
    assert run(tmp_path) == 3
    assert "fp32-lost: no record" in capsys.readouterr().err
    assert run(tmp_path, "--cell", "fp32-alone") == 0


@pytest.mark.parametrize("arguments", [["absent"], [".", "--cell", "unknown"]])
def test_wrong_usage_is_exit_code_2(tmp_path, monkeypatch, arguments):
    records.save_header(evidence.header("fp32-alone"), tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2


def run(*arguments) -> int:
    parser = argparse.ArgumentParser()
    judging.add_arguments(parser)
    return judging.run(parser.parse_args([str(argument) for argument in arguments]))


def test_a_generated_kernel_that_loads_what_it_stored_fails_a_right_cell():
    facts = {"generated_kernels": 2, "reloading_kernels": ["triton_red_1 in x.py: out_ptr0"]}
    observation = evidence.observation(facts=evidence.engine_facts({}, **facts))
    found = judge(evidence.record(observation=observation))
    assert found.verdict == "fail"
    assert found.reasons == [
        "generated kernel triton_red_1 in x.py: out_ptr0 is loaded after a store to it"
    ]
    assert finding(found, "reloads").observed == 1
