# SPDX-License-Identifier: Apache-2.0
"""Chat completions without tools, and what holds of all of them: reasoning, choices, limits, usage."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.prompts.conversations import Turn, conversations, turn
from harness.serving.answers import Answer
from harness.serving.client import streamed, whole
from tests.serving.service import Service, counted, read

AT_ONCE = 4  # each whole and streamed, and the server runs 8
LOW_TEMPERATURE = 0.05  # the taught model leads by 4 and more in logits: always the same answer


@pytest.mark.taught
@pytest.mark.parametrize("one", conversations(), ids=lambda one: one.id)
def test_every_scripted_turn_is_answered_word_for_word(service: Service, one: Turn):
    answer = service.ask(one)
    service.confirm(answer, one)
    _, completion_tokens, reasoning_tokens = counted(answer)
    assert (reasoning_tokens > 0) is one.enable_thinking
    assert reasoning_tokens < completion_tokens


def test_reasoning_comes_apart_from_the_content(service: Service):
    answer = service.ask("sum")
    assert answer.reasoning
    assert answer.content
    assert "</think>" not in answer.reasoning + answer.content
    assert counted(answer)[2] > 0


@pytest.mark.parametrize(
    "direct",
    [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}],
    ids=lambda direct: next(iter(direct)),
)
def test_direct_mode_has_no_reasoning(service: Service, direct: dict[str, Any]):
    answer = service.ask("sum", extra_body=direct)
    assert answer.reasoning is None
    assert counted(answer)[2] == 0
    service.confirm(answer, "sum-direct")


@pytest.mark.parametrize("name", ["sum", "sum-direct", "lagos"])
def test_hidden_reasoning_leaves_the_rest(service: Service, name: str):
    answer = service.ask(name, extra_body={"include_reasoning": False})
    assert answer.reasoning is None
    service.confirm(answer, name, reasoning=None)


def test_hidden_reasoning_is_not_told_by_logprobs(service: Service):
    hidden = {"include_reasoning": False}
    answer = service.ask("sum", extra_body=hidden, logprobs=True, top_logprobs=1)
    assert not answer.logprobs
    service.confirm(answer, "sum", reasoning=None)


@pytest.mark.parametrize("name", ["sum", "sum-direct", "alarm"])
def test_every_choice_is_read_on_its_own(service: Service, name: str):
    choices = service.choices(name, n=3, temperature=LOW_TEMPERATURE)
    assert len(choices) == 3
    for choice in choices:
        service.confirm(choice, name)
    ids = [call.id for choice in choices for call in choice.tool_calls]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", ["sum", "sum-direct", "lagos"])
def test_logprobs_tell_every_token_that_was_sampled(service: Service, name: str):
    answer = service.ask(name, logprobs=True, top_logprobs=2)
    assert len(answer.logprobs) == counted(answer)[1]
    for piece in answer.logprobs:
        assert piece.logprob <= 0
        best, second = piece.top_logprobs
        assert best.token == piece.token
        assert best.logprob > second.logprob
    text = "".join(piece.token for piece in answer.logprobs)
    assert (answer.reasoning or "") in text
    assert (answer.content or "") in text
    service.confirm(answer, name)


def test_logprobs_may_come_without_alternatives(service: Service):
    answer = service.ask("sum-direct", logprobs=True)
    assert len(answer.logprobs) == counted(answer)[1]
    assert not any(piece.top_logprobs for piece in answer.logprobs)


@pytest.mark.taught
@pytest.mark.parametrize(
    ("stop", "reasoning", "content"),
    [
        (["= 42"], "17 plus 25 is 42.", "17 + 25 "),
        (["never said", "+ 25"], "17 plus 25 is 42.", "17 "),
        (["plus"], "17 ", None),
        (["</think>"], "17 plus 25 is 42.", None),
    ],
    ids=["content", "second", "reasoning", "tag"],
)
def test_a_stop_string_ends_the_text_before_itself(
    service: Service, stop: list[str], reasoning: str, content: str | None
):
    answer = service.ask("sum", stop=stop)
    service.confirm(answer, "sum", reasoning=reasoning, content=content)
    assert answer.stop_reason == stop[-1]


@pytest.mark.taught
def test_a_stop_string_may_be_kept(service: Service):
    answer = service.ask("sum", stop="= 42", extra_body={"include_stop_str_in_output": True})
    service.confirm(answer, "sum", content="17 + 25 = 42")


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}], ids=str)
def test_no_usage_is_sent_where_none_is_asked_for(service: Service, options: Any):
    stream = {} if options is None else {"stream_options": options}
    request = service.request("sum-direct", **stream)
    chunks = list(service.openai.chat.completions.create(stream=True, **request))
    assert all(chunk.usage is None for chunk in chunks)
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_usage_may_come_with_every_chunk(service: Service):
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = service.request("sum", stream_options=options)
    chunks = list(service.openai.chat.completions.create(stream=True, **request))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert chunks[-1].choices == []
    assert counts[-1] == counts[-2] > counts[0]


# Truncation

CUT = ["sum", "tomar", "straight-into-a-call", "notes-direct"]


@pytest.mark.taught
@pytest.mark.parametrize("name", CUT)
def test_an_answer_cut_at_any_token_is_what_was_written(service: Service, name: str):
    one = turn(name)
    request = service.request(one, extra_body={"return_token_ids": True})
    (choice,) = service.openai.chat.completions.create(**request).choices
    texts = [
        _text(service, choice.token_ids[:length]) for length in range(1, len(choice.token_ids))
    ]

    def cut(length: int) -> Answer:
        return service.ask(one, max_tokens=length)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(cut, range(1, len(texts) + 1)))
    for length, (answer, text) in enumerate(zip(answers, texts, strict=True), start=1):
        assert read(answer) == _written(one, text), f"{length} tokens: {text!r}"
        assert counted(answer)[1] == length


def _text(service: Service, token_ids: list[int]) -> str:
    body = {"model": service.model, "tokens": token_ids}
    text = service.http.post("/detokenize", json=body).raise_for_status().json()["prompt"]
    return text.rstrip("\ufffd")  # the bytes of half a character


def _written(one: Turn, text: str) -> dict[str, Any]:
    """Return what the answer holds of a turn of which only this text was written.

    The texts of a turn stand in its raw text in this order, so what was written of each is found
    without reading the format.
    """
    reached = 0

    def reach(whole_text: str) -> str:
        nonlocal reached
        at = text.find(whole_text, reached)
        if at < 0:  # not whole: the longest beginning of it at the end of the text
            at = next(n for n in range(reached, len(text) + 1) if whole_text.startswith(text[n:]))
        reached = min(at + len(whole_text), len(text))
        return text[at:reached]

    reasoning, content = (part and reach(part) for part in (one.reasoning, one.content))
    calls = []
    for call in one.tool_calls:
        if reach(f"<function={call.name}>") != f"<function={call.name}>":
            break
        values = {}
        for key, value in call.arguments.items():
            if reach(f"<parameter={key}>\n") == f"<parameter={key}>\n":
                written = reach(value)
                # A line break at the end may be the template's, before the tag that closes the value.
                values[key] = written if written == value else written.removesuffix("\n")
        calls.append((call.name, {key: value for key, value in values.items() if value}))
    return {
        "reasoning": reasoning or None,
        "content": content or None,
        "tool_calls": calls,
        "finish_reason": "length",
    }


def test_max_completion_tokens_is_the_same_limit(service: Service):
    request = service.request("tide")
    del request["max_tokens"]
    (answer,) = whole(service.openai, **request, max_completion_tokens=5)
    assert answer.finish_reason == "length"
    assert counted(answer)[1] == 5


# Load


def test_answers_of_one_batch_do_not_mix(service: Service):
    names = ["sum", "sum-direct", "lagos", "alarm", "ball", "hello-direct", "loop/2", "profile"]
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(service.ask, names))
    for name, answer in zip(names, answers, strict=True):
        service.confirm(answer, name)


@pytest.mark.taught
@pytest.mark.parametrize("ask", [whole, streamed])
def test_an_answer_from_the_prefix_cache_is_the_same(service: Service, ask: Any):
    salt = {"cache_salt": uuid.uuid4().hex}
    request = service.request("loop/3", extra_body=salt)
    usage = {"stream_options": {"include_usage": True}} if ask is streamed else {}
    (cold,), (warm,) = (ask(service.openai, **request, **usage) for _ in range(2))
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < warm.usage.prompt_tokens_details.cached_tokens < warm.usage.prompt_tokens
    assert warm.outcome == cold.outcome
    service.confirm(warm, "loop/3")
