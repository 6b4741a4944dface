# SPDX-License-Identifier: Apache-2.0
"""Repetitions: what differs is found to the bit and named, and only what was asked again counts."""

import math
import struct
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from harness.kinds.parity import KIND
from harness.kinds.parity.settings import ParitySettings
from harness.kinds.settings import Round
from harness.records.judge import judge
from harness.repetition import Repeated
from tests import evidence

PROMPT = [7, 8, 9]
LAST_BIT = struct.unpack("f", struct.pack("I", struct.unpack("I", struct.pack("f", -1.0))[0] + 1))[
    0
]
TIMES = 20


def output(changed=None, tokens=(20, 21, 22, 23), cached=0, prompts=True, name="0.0-p"):
    """A finished request of three prompt tokens; `changed` has other logprobs by row."""
    changed = changed or {}
    following = [*PROMPT[1:], *tokens]

    def top(row):
        logprob = SimpleNamespace(logprob=changed.get(row, -1.0))
        return {following[row]: logprob, 60: SimpleNamespace(logprob=-2.0)}

    first = len(PROMPT) - 1
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=PROMPT,
        prompt_logprobs=[None, *map(top, range(first))] if prompts else None,
        outputs=[
            SimpleNamespace(
                token_ids=list(tokens),
                logprobs=[top(first + position) for position in range(len(tokens))],
            )
        ],
        num_cached_tokens=cached,
    )


def repeated(*outputs, steps=None):
    asked = Repeated(0)
    for time, one in enumerate(outputs):
        asked.add([one], steps[time] if steps else "steps")
    return asked.found()


def test_the_same_bits_each_time_are_no_finding():
    found = repeated(*[output()] * 3)
    assert (found.times, found.rows, found.other_rows, found.others) == (3, 6, 0, [])
    assert (found.same_steps, found.same_hits, found.spread_nats) == (3, 3, 0.0)


def test_a_last_bit_is_found_at_its_row_and_time():
    found = repeated(output(), output(), output({1: LAST_BIT}))
    (other,) = found.others
    assert (other.time, other.request, other.count, other.rows) == (2, "0.0-p", 1, [1])
    assert other.spread_nats == pytest.approx(1.2e-7, rel=0.01)


def test_a_first_time_that_went_wrong_is_one_of_many():
    found = repeated(output({3: -1.5}), *[output()] * 4)
    assert (found.other_times, found.other_rows, found.others[0].time) == (1, 1, 0)


def test_rows_of_the_prefill_are_told_from_those_of_decoding():
    # Three prompt tokens: rows 0 and 1 predict the prompt, row 2 the first token that is generated.
    found = repeated(output(), output(), output({0: -1.1, 2: -1.1, 3: -1.1, 4: -1.1}))
    assert (found.other_rows, found.other_prefill_rows) == (4, 2)


def test_without_the_prompts_logprobs_generated_rows_alone_are_compared():
    found = repeated(*[output(prompts=False)] * 2, output({3: -1.5}, prompts=False))
    assert (found.rows, found.others[0].rows) == (4, [3])


def test_what_follows_another_token_is_not_compared():
    other = output({2: -1.2, 3: -9.0, 4: -9.0}, tokens=(30, 31, 32, 33))
    found = repeated(output(), output(), other)
    assert (found.other_rows, found.others[0].rows) == (1, [2])
    assert found.spread_nats == 0.0  # of token 60, which both have


def test_rows_that_share_no_token_are_infinitely_far_apart():
    other = output()
    other.outputs[0].logprobs[0] = {40: SimpleNamespace(logprob=-1.0)}
    assert repeated(output(), output(), other).spread_nats == math.inf


def test_a_number_that_becomes_none_is_infinitely_far_off():
    assert repeated(output(), output(), output({1: math.nan})).spread_nats == math.inf


def test_steps_and_hits_of_their_own_are_counted():
    found = repeated(*[output()] * 2, output(cached=16), steps=["a", "b", "a"])
    assert (found.same_steps, found.same_hits) == (2, 2)


def test_the_record_stays_small_and_keeps_the_worst():
    wrong = [output(dict.fromkeys(range(6), -1.0 - time / 100)) for time in range(60)]
    found = repeated(*[output()] * 61, *wrong)
    assert found.other_times == 59  # the first of them is right
    assert len(found.others) == 20
    assert found.others[0].spread_nats == found.spread_nats == pytest.approx(0.59)


# The verdict.


def settings(times=TIMES, **changes):
    round_ = {"schedule": "alone", "cached": "none", "prompts": ["p"], "times": times}
    return evidence.settings(workload={"rounds": [round_], **changes})


def judged(found, cell=None):
    """The record of a cell that was asked 20 times, judged; the reference agrees with it."""
    record = evidence.record(
        settings=cell or settings(), observation=evidence.observation(repetitions=[found])
    )
    return record.model_copy(update={"verdict": judge(record)})


def asked(*wrong, tokens=(20, 21, 22)):
    """What 20 times gave, the last ones as told, of a prompt of 20 tokens and 3 generated."""
    right = [output(prompts=False, tokens=tokens)] * (TIMES - len(wrong))
    return repeated(*right, *[output(one, prompts=False, tokens=tokens) for one in wrong])


def test_the_same_bits_pass():
    record = judged(asked())
    assert record.verdict.verdict == "pass"
    assert [one.observed for one in record.verdict.findings[-2:]] == [0.0, 0.0]
    assert KIND.deviations(record) == []


def test_other_bits_fail_and_their_place_is_named():
    record = judged(asked({3: -1.5, 4: -1.25}))
    assert record.verdict.verdict == "fail"
    (reason,) = record.verdict.reasons
    assert reason == (
        "0.0-p, time 20 of 20: 2 rows came back with other bits than usual, by up to 0.5 nats: "
        "token [1], token [2]"
    )
    failed = [one for one in record.verdict.findings if not one.passed]
    assert [(one.metric, one.observed, one.budget) for one in failed] == [
        ("rows_of_other_bits", 2, 0)
    ]


@pytest.mark.parametrize(
    ("wrong", "pattern"),
    [
        ([{3: -1.5}], "in that time alone"),
        ([{2: -1.5}, {3: -1.5}, {4: -1.5}], "other ones each time, as of a race"),
        ([{3: -1.5}] * 3, "the same ones each time"),
        ([{2: -1.5, 3: -1.5}, {3: -1.5}, {3: -1.5}, {3: -1.5}], "some of them again and again"),
    ],
)
def test_a_race_is_told_from_a_state_that_is_left_behind(wrong, pattern):
    (line,) = KIND.deviations(judged(asked(*wrong)))
    assert f", {pattern}, by up to 0.5 nats" in line
    assert f"of 20 times that round 0 was asked, {len(wrong)} differ" in line


KERNEL = {"kernel": "moe_sum: adds as its blocks come", "spread_nats": 0.1}


@pytest.mark.parametrize(("logprob", "verdict"), [(-1.09, "pass"), (-1.11, "fail")])
def test_a_kernel_that_is_named_has_a_spread_and_no_more(logprob, verdict):
    record = judged(asked({3: logprob}), settings(same=KERNEL))
    assert record.verdict.verdict == verdict
    rows, spread = record.verdict.findings[-2:]
    assert (rows.observed, rows.budget, spread.budget) == (1, None, 0.1)
    if verdict == "fail":
        assert "more than 0.1 of moe_sum: adds as its blocks come" in record.verdict.reasons[0]


def test_what_is_measured_only_must_come_back_the_same_all_the_same():
    cell = settings() | {"measure_only": "the port keeps its state in FP32"}
    assert judged(asked({3: LAST_BIT}), cell).verdict.verdict == "fail"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"times": 1}, "round 0: times asked: expected 20, found 1"),
        ({"rows": 2}, "round 0: rows compared each time: expected 3, found 2"),
        ({"same_steps": 19}, "round 0: times in the first one's steps: expected 20, found 19"),
        (
            {"same_hits": 1},
            "round 0: times with the first one's cached tokens: expected 20, found 1",
        ),
    ],
)
def test_times_that_did_not_run_alike_prove_nothing(changes, reason):
    verdict = judged(asked().model_copy(update=changes)).verdict
    assert (verdict.verdict, verdict.reasons) == ("not_reached", [reason])


def test_a_round_that_was_not_asked_again_proves_nothing():
    record = evidence.record(settings=settings())
    assert judge(record).reasons == ["round 0: times asked: expected 20, found 1"]


def test_without_a_reference_the_repetitions_alone_are_judged():
    cell = settings() | {"against": "itself"}

    def verdict(found, **changes):
        seen = evidence.observation(repetitions=[found], **changes)
        return judge(evidence.record(settings=cell, observation=seen, reference=None))

    assert verdict(asked()).verdict == "pass"
    assert verdict(asked({3: LAST_BIT})).verdict == "fail"
    no_number = evidence.request("p", logprobs=[-0.3, math.nan, -0.3])
    assert verdict(asked(), requests=[no_number]).reasons == [
        "0.0-p: a logprob is no finite number"
    ]


# What a matrix may ask.

ROUND = {"schedule": "batched", "cached": "none", "prompts": ["p"], "times": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_rows": True, "times": 1}, "`times` must be above 1"),
        ({"prompt_rows": True, "cached": "repeat"}, "expected `cached: none`, found repeat"),
        ({"times": 0}, "greater than or equal to 1"),
    ],
)
def test_a_round_that_could_compare_nothing_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        Round.model_validate(ROUND | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": {"rounds": [ROUND | {"times": 1}], "same": KERNEL}}, "there is none"),
        ({"against": "itself"}, "a round must have `times` above 1"),
        (
            {
                "against": "itself",
                "workload": {"rounds": [ROUND]},
                "checkpoint": evidence.settings()["checkpoint"] | {"quantize": "fp8"},
            },
            "no checkpoint to teach or to quantize",
        ),
    ],
)
def test_a_claim_about_nothing_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        ParitySettings.model_validate(evidence.settings(**changes))
