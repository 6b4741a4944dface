# SPDX-License-Identifier: Apache-2.0
"""The soak: what its clients ask and see, with a server that goes wrong, and each verdict."""

import asyncio
import json
import sys
from pathlib import Path

import psutil
import pytest

from harness.evidence.record import Record
from harness.evidence.verdict import Verdict
from harness.kinds.soak.child import __main__ as soak
from harness.kinds.soak.child import clients, monitor
from harness.kinds.soak.child.requests import bad_requests, good_requests
from harness.kinds.soak.judge import judge as judge_soak
from harness.kinds.soak.observation import (
    Difference,
    Minute,
    Percentiles,
    RequestCounts,
    Sample,
    SoakObservation,
)
from harness.kinds.soak.settings import GOOD_KINDS, Clients, SoakSettings
from harness.matrices.expand import load_matrix
from harness.records import store as records
from harness.records.judge import judge
from harness.report import page as report
from harness.serving.server import Server
from harness.strict_yaml import YamlError
from tests import evidence
from tests.fake_chat_server import MAX_MODEL_LEN
from tests.pages import squeezed

FAKE = Path(__file__).with_name("fake_chat_server.py")
REPOSITORY = FAKE.parents[1]
VOCABULARY = 512
MIX = ("chat", "tools", "structured", "prefix", "long", "disconnect", "abort", "bad")

SOAK = {
    "seed": 3,
    "duration_s": 2.4,
    "concurrency": 12,
    "pause_s": 0.01,
    "distinct": 2,
    "max_tokens": 8,
    "streamed": 0.5,
    "mix": dict.fromkeys(MIX, 1),
    "sample_s": 0.01,
    "at_least": {
        "in_flight": 6,
        "running": 1,
        "of_a_kind": 2,
        "preemptions": 1,
        "hits": 1,
        "engines": 1,
    },
    # Short intervals on a busy machine say nothing of latency; memory does grow or does not.
    "limits": {"rss_growth": 1.2, "card_growth": 1.2, "ttft_growth": 50.0, "itl_growth": 50.0},
}
SETTINGS = {
    "checkpoint": evidence.settings()["checkpoint"],
    "engine": {"args": {"max_model_len": MAX_MODEL_LEN}, "env": {}},
    "soak": SOAK,
    "timeout": {"start_s": 5, "cell_s": 5},
}
CLIENTS = Clients.model_validate(SOAK)


def record_of(observation: SoakObservation, limits: dict) -> Record:
    settings = SETTINGS | {"soak": SOAK | {"limits": limits}}
    return evidence.record(
        kind="soak", settings=settings, observation=observation, corpus=None, reference=None
    )


# With a server.


class Clock:
    """Time that passes with what the clients do, so that a busy machine sees the same traffic."""

    _TICK_S = 0.004

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._TICK_S
        return self._now


@pytest.fixture
def soaked(tmp_path, monkeypatch):
    """Return a function that soaks a fake server of a mode and gives the evidence and verdict."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    processes: list[psutil.Process] = []

    def run(mode: str, **changes: float) -> tuple[SoakObservation, Verdict]:
        settings = SoakSettings.model_validate(SETTINGS | {"soak": SOAK | changes})
        pace = clients.Pace(patience_s=0.02, linger_s=1.0, clock=Clock())  # as fast as its answers
        command = [sys.executable, str(FAKE), mode]
        with Server(tmp_path, tmp_path / "log", command=command) as server:
            processes.extend(monitor.group_members(server.pid))
            observation = asyncio.run(soak.observe(server, VOCABULARY, settings, pace))
        # So little traffic has time for few samples.
        return observation, judge_soak(observation, settings.soak, fewest_samples=2)

    yield run
    assert processes
    assert monitor.survivors(processes, linger_s=1.0) == []  # what was killed is gone by then


def test_a_steady_server_passes_and_every_kind_of_client_came(soaked):
    observation, verdict = soaked("steady")
    assert (verdict.verdict, verdict.reasons) == ("pass", [])
    assert set(observation.requests) == set(MIX)
    for kind, counts in observation.requests.items():
        assert counts.failed == 0
        assert counts.sent == counts.completed + counts.refused + counts.left
        assert (counts.refused > 0) == (kind == "bad")
    assert observation.completion_tokens == 3 * sum(
        counts.completed for counts in observation.requests.values()
    )
    assert sum(minute.streams for minute in observation.minutes) > 10
    assert observation.run_s >= SOAK["duration_s"]


def test_each_thing_that_goes_wrong_in_company_is_seen(soaked):
    observation, verdict = soaked("faulty")
    assert verdict.verdict == "fail"
    for reason in (
        "different_answers",
        "500",
        "rss_growth",
        "the server was not healthy when the traffic was over",
        "outlived the server: ",
    ):
        assert any(reason in one for one in verdict.reasons), (reason, verdict.reasons)
    (first, *_) = observation.differences
    assert "in traffic, " in first.when
    assert first.alone != first.found
    assert observation.unstable == 0  # alone, the answers are right again
    assert observation.stopped


def test_a_server_that_dies_ends_the_traffic_and_fails(soaked):
    observation, verdict = soaked("dies", duration_s=600)
    assert verdict.verdict == "fail"
    assert "the server was not healthy when the traffic was over" in verdict.reasons
    assert any("APIConnectionError" in one for one in observation.errors)
    assert observation.run_s < 600


# Requests.


def test_requests_are_the_same_for_a_seed_and_bounded_in_number():
    other = CLIENTS.model_copy(update={"seed": 4})
    made = good_requests("metis", VOCABULARY, CLIENTS)
    assert set(made) == set(GOOD_KINDS)
    assert all(len(found) == SOAK["distinct"] for found in made.values())
    assert made == good_requests("metis", VOCABULARY, CLIENTS)
    assert made != good_requests("metis", VOCABULARY, other)
    names = [one.name for found in made.values() for one in found]
    assert len(set(names)) == len(names)
    assert all(one.body["temperature"] == 0.0 for found in made.values() for one in found)


def test_all_bad_requests_differ_and_expect_a_client_error():
    found = bad_requests("metis", MAX_MODEL_LEN)
    assert len({json.dumps(one.body) for one in found}) == len(found) > 10
    assert all(400 <= one.status < 500 for one in found)


def test_metrics_are_summed_over_engines_and_histograms_left_out():
    text = (
        "# TYPE vllm:num_preemptions_total counter\n"
        'vllm:num_preemptions_total{engine="0"} 3\nvllm:num_preemptions_total{engine="1"} 4\n'
        "# TYPE vllm:num_preemptions_created gauge\n"
        'vllm:num_preemptions_created{engine="1"} 1e9\n'
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.5\n'
        "# TYPE vllm:request_success_total counter\n"
        'vllm:request_success_total{engine="1",finished_reason="stop"} 2\n'
        'vllm:request_success_total{engine="1",finished_reason="length"} 5\n'
        "# TYPE vllm:ttft histogram\n"
        'vllm:ttft_bucket{le="1"} 1\nvllm:ttft_count 1\nvllm:ttft_sum 1\n'
    )
    found = monitor.parse_metrics(text)
    assert found.total("vllm:num_preemptions") == 7
    assert found.largest("vllm:kv_cache_usage_perc") == 0.5
    assert found.finished == {"1": 7}
    assert found.total("vllm:ttft") == found.total("absent") == 0


# Verdicts.


def sample(t_s: float, **changes: object) -> Sample:
    fields = {
        "t_s": t_s,
        "rss_bytes": 1000,
        "card_bytes": None,
        "running": 8,
        "waiting": 1,
        "kv_cache_usage": 0.9,
        "preemptions": 2,
        "completed": 3,
        "ttft_ms": 20.0,
        "itl_ms": 4.0,
    }
    return Sample(**(fields | changes))


def samples(**last_third: object) -> list[Sample]:
    """Ten samples a third; the first third is twice as large and slow as it settles."""
    first = [sample(0.08 * n, rss_bytes=2000, ttft_ms=40.0, itl_ms=8.0) for n in range(10)]
    second = [sample(0.801 + 0.079 * n) for n in range(10)]
    return [*first, *second, *(sample(1.601 + 0.079 * n, **last_third) for n in range(10))]


def observation(**changes: object) -> SoakObservation:
    times = Percentiles(p50=4.0, p90=5.0, p99=9.0)
    requests = {
        kind: RequestCounts(
            sent=5,
            completed=5 if kind in GOOD_KINDS else 0,
            refused=5 if kind == "bad" else 0,
            left=5 if kind in ("disconnect", "abort") else 0,
            failed=0,
        )
        for kind in MIX
    }
    fields = {
        "run_s": 2.5,
        "peak_in_flight": 12,
        "requests": requests,
        "different": 0,
        "unstable": 0,
        "differences": [],
        "error_count": 0,
        "errors": [],
        "minutes": [Minute(minute=0, streams=50, ttft_ms=times, itl_ms=times)],
        "samples": samples(),
        "counters": dict.fromkeys(monitor.COUNTERS, 7.0),
        "finished_by_engine": {"0": 60},
        "completion_tokens": 300,
        "healthy": True,
        "stopped": True,
        "orphans": [],
    }
    return SoakObservation(**(fields | changes))


TIGHT = {"rss_growth": 1.03, "card_growth": 1.01, "ttft_growth": 1.5, "itl_growth": 1.25}


def verdict_on(**changes: object) -> Verdict:
    return judge(record_of(observation(**changes), TIGHT))


def test_what_is_as_it_should_be_passes_and_its_figures_are_found():
    verdict = verdict_on()
    assert (verdict.verdict, verdict.reasons) == ("pass", [])
    figures = {finding.metric: finding.observed for finding in verdict.findings}
    assert figures["rss_growth"] == figures["ttft_growth"] == 1.0
    assert "card_growth" not in figures  # there is no card
    assert figures["served_tok_s"] == 120
    assert figures["completed"] == 25
    assert figures["itl_p99_ms"] == 9.0


DIFFERENCE = Difference(request="tide", when="in traffic", alone={"a": 1}, found={"a": 2})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"different": 1, "differences": [DIFFERENCE]}, "tide, in traffic: another answer"),
        ({"unstable": 1}, "different_answers 1, expected none"),
        ({"error_count": 2, "errors": ["chat tide: timed out"]}, "chat tide: timed out"),
        ({"healthy": False}, "the server was not healthy when the traffic was over"),
        ({"stopped": False}, "the server did not stop in time"),
        ({"orphans": ["77 python"]}, "outlived the server: 77 python"),
        ({"samples": samples(rss_bytes=1040)}, "rss_growth 1.04 is past its limit 1.03"),
        ({"samples": samples(ttft_ms=31.0)}, "ttft_growth 1.55 is past its limit 1.5"),
        ({"samples": samples(itl_ms=5.2)}, "itl_growth 1.3 is past its limit 1.25"),
        (
            {"samples": [one.model_copy(update={"card_bytes": 1000 + 20 * (one.t_s >= 1.6)})
                         for one in samples()]},
            "card_growth 1.02 is past its limit 1.01",
        ),
    ],
)  # fmt: skip
def test_each_fault_fails_by_itself_with_its_reason(changes, reason):
    verdict = verdict_on(**changes)
    assert verdict.verdict == "fail"
    assert reason in verdict.reasons


def without(kind: str, **counts: int) -> dict:
    found = observation().requests
    return found | {kind: found[kind].model_copy(update=counts)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run_s": 2.3}, "seconds of traffic: expected at least 2.4, found 2.3"),
        ({"peak_in_flight": 5}, "requests open at once: expected at least 6, found 5"),
        ({"requests": without("tools", completed=1)}, "tools: completed: expected at least 2"),
        ({"requests": without("abort", left=0)}, "abort: left: expected at least 2"),
        ({"requests": without("bad", refused=0)}, "bad: refused: expected at least 2"),
        (
            {"counters": dict.fromkeys(monitor.COUNTERS, 0.0)},
            "preemptions: expected at least 1, found 0",
        ),
        (
            {"finished_by_engine": {"0": 0, "1": 0}},
            "engines that finished requests: expected at least 1, found 0",
        ),
        ({"samples": samples()[:-6]}, "rss_growth: samples of the last third: expected at least 5"),
        (
            {"samples": samples(ttft_ms=None)},
            "ttft_growth: samples of the last third: expected at least 5, found 0",
        ),
    ],
)
def test_traffic_that_was_not_what_it_claims_proves_nothing(changes, reason):
    verdict = verdict_on(**changes)
    assert verdict.verdict == "not_reached"
    assert any(one.startswith(reason) for one in verdict.reasons), verdict.reasons


def test_a_record_is_kept_judged_again_and_reported(tmp_path):
    record = record_of(observation(different=2), TIGHT)
    record = record.model_copy(update={"verdict": judge(record)})
    again = records.load(records.save(record, tmp_path))
    assert again == record
    assert judge(again) == record.verdict
    text = squeezed(report.markdown(evidence.header(record.cell), [record], [], None))
    assert f"| {record.cell} | **fail** | different_answers | 2 | 0 |" in text
    assert "| cell | different answers | soak errors |" in text  # the table of figures


# Matrices.


@pytest.mark.parametrize("name", ["soak", "replicas"])
def test_a_shipped_matrix_claims_what_its_settings_can_reach(name):
    for cell in load_matrix(REPOSITORY / f"matrices/{name}.yaml").cells:
        found = cell.settings.soak
        assert set(found.mix) == set(MIX)
        assert found.at_least.in_flight <= found.concurrency
        assert found.at_least.running <= cell.settings.engine.args["max_num_seqs"]
        assert found.duration_s / found.sample_s >= 30
        assert cell.settings.checkpoint.taught
        assert cell.settings.engine.args["dtype"] == "float32"


def test_a_soak_cell_without_its_settings_is_a_fault_of_the_matrix(tmp_path):
    path = tmp_path / "demo.yaml"
    path.write_text(
        "schema_version: 1\nkind: soak\nquestion: Is it right?\n"
        "base:\n"
        "  checkpoint: {shape: tiny, dtype: float32, seed: 0, taught: true, quantize: none}\n"
        "  engine: {args: {}, env: {}}\n  soak: {seed: 1}\n  timeout: {start_s: 5, cell_s: 5}\n"
        "axes: {a: {b: {}}}\n"
    )
    with pytest.raises(YamlError) as error:
        load_matrix(path)
    assert "`soak.limits` is missing in b" in str(error.value)
    assert "`engine.args.max_model_len` is missing in b" in str(error.value)
