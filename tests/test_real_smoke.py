# SPDX-License-Identifier: Apache-2.0
"""matrices/real_smoke.yaml, on a model that knows its answers, and the verdicts on what it observes."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.__main__ import main
from harness.evidence.engine import PromptLogprobs
from harness.evidence.record import Record
from harness.evidence.verdict import Verdict
from harness.kinds.smoke.observation import (
    FunctionCall,
    ServedAnswer,
    ServedObservation,
    ServedStream,
    TimingObservation,
)
from harness.matrices.expand import load_matrix
from harness.prompts.conversations import turn
from harness.records import store as records
from harness.records.judge import judge
from harness.reference.modeling_metis16 import load_reference
from harness.scoring.logits import LogitsError, StoredLogits, widen_while_running
from harness.strict_yaml import YamlError
from tests import evidence

REPOSITORY = Path(__file__).parents[1]
MATRIX = "matrices/real_smoke.yaml"


def pytest_run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", MATRIX, "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1200, check=False
    )


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory) -> Path:
    """The run folder of the whole matrix on the taught checkpoint: one engine, one server."""
    folder = tmp_path_factory.mktemp("smoke") / "run"
    done = pytest_run("--model", str(checkpoint(taught=True)), "--results", str(folder))
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture
def observed(run):
    """Return a function that gives the record of a cell."""
    return lambda cell: records.load(run / f"{cell}.json")


def test_every_cell_passes_and_is_judged_again_without_an_engine(run):
    header, found, faults = records.load_run(run)
    assert faults == []
    assert len(found) == len(header.cells) == 7
    for record in found:
        assert record.verdict.verdict == "pass", record.verdict.reasons
        assert judge(record) == record.verdict


def test_no_process_of_the_run_is_left(run):
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(run) in file.path for file in process.open_files()):  # a log of the run
                left.append(process)
    _, alive = psutil.wait_procs(left, timeout=10)  # a server has a moment to say farewell
    assert alive == []


@pytest.mark.parametrize(
    ("cell", "prompt", "scripted"),
    [
        ("server-thinking", "sum", "sum"),
        ("server-thinking", "prime", "second-turn/2"),
        ("server-thinking", "tide", "tide"),
        ("server-direct", "sum_direct", "sum-direct"),
        ("server-thinking_tools", "alarm", "alarm"),
        ("server-thinking_tools", "faro_result", "faro/2"),
        ("server-direct_tools", "lagos_direct", "lagos-direct"),
    ],
)
def test_the_answers_are_those_that_the_model_was_taught(observed, cell, prompt, scripted):
    right = turn(scripted)
    answers = [one for one in observed(cell).observation.answers if one.prompt == prompt]
    assert [one.streamed for one in answers] == [False, True]
    for answer in answers:
        assert (answer.reasoning or None) == right.reasoning
        assert (answer.content or None) == right.content
        calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
        assert calls == right.calls


def test_parity_is_judged_by_the_floor_of_the_models_own_code(observed):
    record = observed("engine-parity")
    (finding,) = [f for f in record.verdict.findings if f.metric == "prompt_logprob_error_max"]
    assert 0 < finding.floor < finding.budget
    prompts = record.observation.prompts
    assert {prompt.prompt for prompt in prompts} == set(record.corpus.token_ids)
    assert all(p.token_ids == record.corpus.token_ids[p.prompt][1:] for p in prompts)
    assert all(len(row) == 20 for prompt in prompts for row in prompt.top_token_ids)


def test_prompts_that_the_engine_scores_otherwise_fail(observed):
    record = observed("engine-parity")
    first, *others = record.observation.prompts
    # As if each position were scored by what belongs to the next one.
    moved = first.model_copy(update={"logprobs": [*first.logprobs[1:], first.logprobs[0]]})
    wrong = record.observation.model_copy(update={"prompts": [moved, *others]})
    verdict = judge(record.model_copy(update={"observation": wrong}))
    assert verdict.verdict == "fail"
    assert "prompt_logprob_error_max" in verdict.reasons[0]


def test_a_quantized_engine_is_measured_against_the_floor_of_bf16(observed):
    record = observed("engine-parity")
    settings = record.observation.settings.model_copy(update={"quantization": "compressed-tensors"})
    quantized = record.observation.model_copy(update={"settings": settings})
    verdict = judge(record.model_copy(update={"observation": quantized}))
    assert verdict.verdict == "pass"
    assert verdict.reasons[0].startswith("measured only: the floor is BF16's")


@pytest.mark.parametrize(("cell", "streams"), [("server-stream1", 1), ("server-batch32", 32)])
def test_streams_are_timed(observed, cell, streams):
    record = observed(cell)
    figures = {finding.metric: finding.observed for finding in record.verdict.findings}
    assert set(figures) == {"decode_tok_s", "tpot_ms", "ttft_ms"}
    assert all(value > 0 for value in figures.values())
    assert len(record.observation.streams) == 3 * streams


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model is named: pass --model DIR, or set METIS_MODEL_DIR"),
        (["--model", "/nowhere"], "/nowhere is no checkpoint: expected config.json and"),
        (["--model", "FOLDER", "--logits", "/nowhere"], "--logits /nowhere: no such file"),
    ],
)
def test_without_its_model_the_matrix_is_an_error_and_never_a_skip(
    checkpoint, monkeypatch, arguments, message
):
    monkeypatch.delenv("METIS_MODEL_DIR", raising=False)
    folder = str(checkpoint())
    done = pytest_run(*(folder if word == "FOLDER" else word for word in arguments))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr


def test_a_dry_run_needs_no_model(monkeypatch):
    monkeypatch.delenv("METIS_MODEL_DIR", raising=False)
    done = pytest_run("--collect-only")
    assert done.returncode == 0
    assert "<CellItem server-batch32>" in done.stdout


@pytest.mark.parametrize(
    ("smoke", "faults"),
    [
        ("{check: timing, streams: 2}", ["prompt_tokens", "max_tokens", "rounds", "seed"]),
        ("{check: generation}", ["max_tokens"]),
    ],
)
def test_a_cell_without_what_its_check_needs_is_a_fault_of_the_matrix(tmp_path, smoke, faults):
    path = tmp_path / "demo.yaml"
    path.write_text(
        "schema_version: 1\nkind: smoke\nquestion: Is it right?\n"
        "prompts: {p: [{token_ids: [8, 9]}]}\n"
        "base:\n  engine: {args: {}, env: {}, serve: true}\n"
        "  workload: {rounds: [{schedule: alone, cached: any, prompts: [p]}]}\n"
        f"  timeout: {{start_s: 5, cell_s: 5}}\n  smoke: {smoke}\naxes: {{a: {{b: {{}}}}}}\n"
    )
    with pytest.raises(YamlError) as error:
        load_matrix(path)
    assert all(f"`smoke.{name}` is missing in b" in str(error.value) for name in faults)
    assert str(error.value).count("is missing") == len(faults)


# Stored logits.


@pytest.fixture(scope="module")
def stored(checkpoint, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("logits") / "logits.safetensors"
    assert main(["logits", str(checkpoint()), "--out", str(file)]) == 0
    return file


def test_stored_logits_are_those_of_the_models_own_code(checkpoint, stored):
    tensors = load_file(stored)
    prompts = {name.split(".")[0] for name in tensors}
    assert prompts == {"sum", "prime", "sum_direct", "tomar", "n300"}
    ids = tensors["tomar.token_ids"]
    with torch.inference_mode():
        for kind, dtype in (("logits", torch.float32), ("bf16_logits.0", torch.bfloat16)):
            expected = load_reference(checkpoint(), dtype)(ids[None]).logits[0]
            assert torch.equal(tensors[f"tomar.{kind}"], expected)


def test_weights_that_rest_in_bf16_compute_the_same(checkpoint):
    ids = torch.arange(7, 107)[None]
    narrow = load_reference(checkpoint(), torch.bfloat16)
    before = narrow.layers[0].moe.latent_down.weight.clone()
    widen_while_running(narrow, at_rest=1000)
    with torch.inference_mode():
        expected = load_reference(checkpoint())(ids).logits
        # Where the weights lie changes the order of sums; arithmetic in BF16 is off by 0.5.
        torch.testing.assert_close(narrow(ids).logits, expected, rtol=0, atol=1e-4)
    assert torch.equal(narrow.layers[0].moe.latent_down.weight, before)
    assert narrow.layers[0].moe.latent_down.weight.dtype == torch.bfloat16


def test_stored_logits_score_a_prompts_own_tokens(stored):
    tensors = load_file(stored)
    ids = tensors["sum.token_ids"].tolist()
    top = [[1, 2, 3] for _ in ids[1:]]
    observed = PromptLogprobs(
        prompt="sum",
        token_ids=ids[1:],
        logprobs=[0.0] * len(top),
        top_token_ids=top,
        top_logprobs=[[0.0] * 3 for _ in top],
    )
    scores = StoredLogits(stored).scores(observed)
    expected = tensors["sum.logits"].double().log_softmax(-1)
    assert scores.reference.logprobs[4] == expected[4, ids[5]].item()
    assert scores.reference.top_logprobs[4] == expected[4, [1, 2, 3]].tolist()
    assert scores.reference.argmax[4] == expected[4].argmax().item()
    assert scores.port.logprobs[4] != scores.reference.logprobs[4]


def test_a_file_that_holds_no_logits_or_other_prompts_is_refused(stored, tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(LogitsError, match="expected metis-logits-2; write it with"):
        StoredLogits(tmp_path / "other.safetensors")
    with pytest.raises(LogitsError, match="no logits of prompt absent, but of n300, prime, sum"):
        StoredLogits(stored).prompts(["sum", "absent"])


def test_logits_of_another_checkpoint_are_refused(checkpoint, stored):
    from harness.kinds.smoke.child.__main__ import build

    settings = evidence.smoke_settings(check="parity")
    settings["engine"]["serve"] = False
    config = {"settings": settings, "model": str(checkpoint(seed=1)), "logits": str(stored)}
    with pytest.raises(LogitsError, match="holds the logits of another checkpoint"):
        build(config)


# Verdicts on what a client got.

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
SPOKEN = {
    "prompt": "p",
    "streamed": True,
    "enable_thinking": True,
    "tools": [],
    "after_tool_result": False,
    "reasoning": "I think.",
    "content": "So it is.",
    "tool_calls": [],
    "finish_reason": "stop",
    "completion_tokens": 9,
}
CALLED = SPOKEN | {
    "tools": [TOOL],
    "content": None,
    "tool_calls": [FunctionCall(name="get_weather", arguments='{"city": "Faro", "days": 2}')],
    "finish_reason": "tool_calls",
}


def served(observation: ServedObservation) -> Record:
    settings = evidence.smoke_settings(check="generation", max_tokens=9)
    return evidence.record(kind="smoke", settings=settings, observation=observation)


def verdict_on(answer: dict) -> Verdict:
    observation = ServedObservation(answers=[ServedAnswer(**answer)], run_s=1.0)
    return judge(served(observation))


@pytest.mark.parametrize(
    "answer",
    [
        SPOKEN,
        CALLED,
        CALLED | {"content": "I look."},
        SPOKEN | {"enable_thinking": False, "reasoning": None},
        SPOKEN | {"tools": [TOOL], "after_tool_result": True},
    ],
)
def test_an_answer_of_the_right_form_passes(answer):
    assert verdict_on(answer).verdict == "pass"


def call(name: str, arguments: str) -> dict:
    return CALLED | {"tool_calls": [FunctionCall(name=name, arguments=arguments)]}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (SPOKEN | {"reasoning": None}, "p, streamed: no reasoning in thinking mode"),
        (SPOKEN | {"enable_thinking": False}, "p, streamed: reasoning in direct mode: 'I think.'"),
        (SPOKEN | {"content": "</think>So."}, "p, streamed: </think> in the content"),
        (SPOKEN | {"reasoning": "<|tool_call|>"}, "p, streamed: <| in the reasoning"),
        (SPOKEN | {"content": None}, "p, streamed: no content"),
        (
            SPOKEN | {"finish_reason": "length"},
            "p, streamed: finish_reason length after 9 tokens, expected stop",
        ),
        (CALLED | {"tool_calls": []}, "p, streamed: no tool call"),
        (
            CALLED | {"after_tool_result": True, "content": "x", "finish_reason": "stop"},
            "p, streamed: an unexpected call of get_weather",
        ),
        (call("look", "{}"), "p, streamed: call of look, which is none of get_weather"),
        (
            call("get_weather", '{"city": "Faro", "days": "2"}'),
            "p, streamed: arguments of get_weather do not fit the schema: '2' is not of type 'integer'",
        ),
        (
            call("get_weather", "{}"),
            "p, streamed: arguments of get_weather do not fit the schema: 'city' is a required property",
        ),
    ],
)
def test_an_answer_of_another_form_fails_with_what_is_wrong(answer, reason):
    verdict = verdict_on(answer)
    assert (verdict.verdict, verdict.reasons) == ("fail", [reason])


def test_arguments_that_are_no_json_fail():
    verdict = verdict_on(call("get_weather", '{"city": '))
    assert verdict.verdict == "fail"
    assert "arguments of get_weather are not JSON" in verdict.reasons[0]


def test_no_answer_proves_nothing():
    observation = ServedObservation(answers=[], run_s=1.0)
    assert judge(served(observation)).verdict == "not_reached"


def timing(*streams: ServedStream) -> Verdict:
    settings = evidence.smoke_settings(
        check="timing", streams=2, prompt_tokens=8, max_tokens=5, rounds=1, seed=1
    )
    observation = TimingObservation(streams=streams)
    return judge(evidence.record(kind="smoke", settings=settings, observation=observation))


def stream(first_ms: float, last_ms: float, tokens: int = 5) -> ServedStream:
    return ServedStream(
        round=0,
        prompt_tokens=8,
        completion_tokens=tokens,
        sent_ms=1.0,
        first_token_ms=first_ms,
        last_token_ms=last_ms,
    )


def test_times_of_streams_are_medians_and_their_tokens_add_up():
    verdict = timing(stream(11.0, 51.0), stream(31.0, 111.0))
    figures = {finding.metric: finding.observed for finding in verdict.findings}
    assert figures["ttft_ms"] == 20.0
    assert figures["tpot_ms"] == 15.0
    assert figures["decode_tok_s"] == pytest.approx(8 / 0.1)


@pytest.mark.parametrize(
    "streams", [[stream(11.0, 51.0)], [stream(11.0, 51.0), stream(11.0, 51.0, tokens=4)]]
)
def test_streams_that_are_missing_or_short_are_not_reached(streams):
    assert timing(*streams).verdict == "not_reached"
