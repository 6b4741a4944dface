# SPDX-License-Identifier: Apache-2.0
"""The scripted conversations, and the model that has learned them."""

import json
from collections import Counter

import pytest
import torch

from harness.checkpoints import taught
from harness.checkpoints import write as checkpoint
from harness.checkpoints.layout import draw, release_layout
from harness.checkpoints.taught import SETTINGS, TeachingError, lessons_of, margins, taught_weights
from harness.checkpoints.tokenizer import read_tokenizer, write_tokenizer
from harness.checkpoints.write import UnwritableError, write_checkpoint
from harness.prompts.conversations import conversations, turn
from harness.reference.configuration_metis16 import Metis16Config
from harness.reference.modeling_metis16 import load_reference
from tests.micro import MICRO

END_OF_TURN = 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 1024)
    return read_tokenizer(folder)


@pytest.fixture
def micro(monkeypatch):
    """The sizes of a model that teaches, badly, in a second."""
    monkeypatch.setitem(checkpoint.SHAPES, "micro", MICRO)
    monkeypatch.setattr(checkpoint, "TEACHABLE", ("micro",))
    monkeypatch.setattr(taught, "_EPOCHS", 1)
    script = [turn("sum"), turn("sum-direct")]
    monkeypatch.setattr(taught, "conversations", lambda: script)
    return checkpoint.config_of("micro")


def test_turn_ids_are_unique():
    assert max(Counter(one.id for one in conversations()).values()) == 1


def test_an_unknown_turn_is_refused_with_those_that_exist():
    with pytest.raises(KeyError, match=r"no turn summ; there are sum, sum-direct,"):
        turn("summ")


def test_the_script_holds_every_kind_of_answer():
    turns = conversations()
    kinds = {
        "thinking": any(one.reasoning and one.content for one in turns),
        "direct": any(not one.enable_thinking and one.content for one in turns),
        "call after thinking": any(one.reasoning and one.tool_calls for one in turns),
        "call without thinking": any(not one.enable_thinking and one.tool_calls for one in turns),
        "several calls": any(len(one.tool_calls) > 1 for one in turns),
        "text before a call": any(one.content and one.tool_calls for one in turns),
        "answer to a result": any(one.messages[-1]["role"] == "tool" for one in turns),
        "JSON": any(one.reasoning and (one.content or "").startswith("{") for one in turns),
        "three turns of tools": turn("loop/3").content is not None,
    }
    assert not [kind for kind, held in kinds.items() if not held]


def test_messages_are_those_of_a_chat_completions_client():
    history = turn("loop/3").messages
    assert [message["role"] for message in history] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    call = history[1]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"path": "a.txt", "content": "one"}
    assert history[1]["reasoning"] == "First write it."
    assert history[2]["tool_call_id"] == call["id"]
    assert turn("two-cities/2").messages[3]["tool_call_id"] == "call_two-cities_1"


@pytest.mark.parametrize("one", conversations(), ids=lambda one: one.id)
def test_a_turn_has_the_same_answer_in_every_setting(one, tokenizer):
    lessons = lessons_of(one, tokenizer)
    answers = {tuple(lesson.answer) for lesson in lessons}
    assert len(lessons) == len(SETTINGS)
    assert len(answers) == 1
    answer = answers.pop()
    assert answer[-1] == END_OF_TURN
    assert END_OF_TURN not in answer[:-1]
    assert len({tuple(lesson.prompt) for lesson in lessons}) == (len(SETTINGS) if one.tools else 2)
    text = tokenizer.decode(answer)
    assert one.text in (None, text)
    for part in (one.reasoning, one.content, *(call.name for call in one.tool_calls)):
        assert part is None or part in text


def test_the_prompt_says_whether_the_model_thinks(tokenizer):
    thinking, direct = (lessons_of(turn(name), tokenizer)[0] for name in ("sum", "sum-direct"))
    assert tokenizer.decode(thinking.prompt).endswith("<think>\n")
    assert tokenizer.decode(direct.prompt).endswith("<think>\n\n</think>\n")


def test_reasoning_is_kept_since_the_last_user_message_only(tokenizer):
    loop = tokenizer.decode(lessons_of(turn("loop/3"), tokenizer)[0].prompt)
    assert "First write it." in loop
    later = tokenizer.decode(lessons_of(turn("second-turn/2"), tokenizer)[0].prompt)
    assert "Seven is prime." not in later


def test_margins_are_those_of_one_forward_a_lesson(tmp_path, tokenizer):
    model = load_reference(write_checkpoint(tmp_path / "random", "tiny"))
    lessons = [lesson for name in ("sum", "lagos") for lesson in lessons_of(turn(name), tokenizer)]
    together = margins(model, lessons)
    assert list(together) == [lesson.name for lesson in lessons]
    for lesson in lessons:
        with torch.no_grad():
            logits = model(torch.tensor([lesson.prompt + lesson.answer])).logits[0]
        leads = []
        for position, token in enumerate(lesson.answer, start=len(lesson.prompt) - 1):
            right = logits[position, token].item()
            logits[position, token] = -torch.inf
            leads.append(right - logits[position].max().item())
        assert together[lesson.name] == pytest.approx(min(leads), abs=1e-3)


def test_a_model_that_did_not_learn_is_refused_with_its_lessons(micro, tmp_path):
    with pytest.raises(TeachingError, match=r"8 of 8 lessons lead by less than 1\.0") as error:
        taught_weights(micro, cache=tmp_path)
    assert "\n  sum-direct (strict): -" in str(error.value)
    assert not list(tmp_path.glob("*.safetensors"))


def test_teaching_happens_once_for_what_it_depends_on(micro, tmp_path, monkeypatch):
    monkeypatch.setattr(taught, "MIN_MARGIN", -torch.inf)
    first = taught_weights(micro, cache=tmp_path)
    monkeypatch.setattr(taught, "_EPOCHS", 0)  # teaching again would give other weights
    again = taught_weights(micro, cache=tmp_path)
    other_seed = taught_weights(micro, seed=1, cache=tmp_path)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other_seed["embedding.weight"])


def test_taught_weights_are_a_checkpoint_in_any_spelling(micro, tmp_path, monkeypatch):
    monkeypatch.setattr(taught, "MIN_MARGIN", -torch.inf)
    folder = write_checkpoint(tmp_path / "taught", "micro", taught=True, cache=tmp_path / "cache")
    model = load_reference(folder)
    weights = taught_weights(micro, cache=tmp_path / "cache")
    assert weights.keys() == {spec.name for spec in release_layout(Metis16Config(**micro))}
    state = model.state_dict()
    assert all(
        torch.equal(state[name], weights[name]) for name in state if name != "lm_head.weight"
    )
    spec = next(iter(release_layout(model.config)))
    assert not torch.equal(state[spec.name], draw(spec, 0))


def test_a_large_shape_is_not_taught(tmp_path):
    with pytest.raises(UnwritableError, match="logos is too large to be taught: use tiny"):
        write_checkpoint(tmp_path / "taught", "logos", taught=True)


@pytest.fixture(scope="module")
def taught_folder(tmp_path_factory):
    """The real one: minutes when its cache is cold."""
    return write_checkpoint(tmp_path_factory.mktemp("taught") / "tiny", "tiny", taught=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_lesson_is_known_with_a_margin(taught_folder, tokenizer, dtype):
    lessons = [lesson for one in conversations() for lesson in lessons_of(one, tokenizer)]
    found = margins(load_reference(taught_folder, dtype), lessons)
    assert min(found.values()) > taught.MIN_MARGIN


@pytest.mark.parametrize("name", ["sum-direct", "storm-direct", "alarm", "two-cities", "loop/3"])
def test_greedy_generation_writes_the_turn(taught_folder, name):
    tokenizer, model = read_tokenizer(taught_folder), load_reference(taught_folder)
    lesson = lessons_of(turn(name), tokenizer)[0]
    written = model.generate(
        torch.tensor([lesson.prompt]), max_new_tokens=len(lesson.answer) + 8, do_sample=False
    )
    assert written[0, len(lesson.prompt) :].tolist() == lesson.answer
