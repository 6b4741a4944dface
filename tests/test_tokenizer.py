# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoints' tokenizer is like the release's, and their chat template renders every turn."""

from pathlib import Path
from typing import Any

import jinja2
import pytest

from harness.checkpoints.tokenizer import (
    MIN_VOCAB_SIZE,
    SPECIAL_TOKENS,
    read_tokenizer,
    write_tokenizer,
)

QUESTION = {"role": "user", "content": "Rain in Faro?"}
CALL = {
    "role": "assistant",
    "content": None,
    "reasoning": "Need the forecast.",
    "tool_calls": [
        {
            "function": {
                "name": "get_weather",
                "arguments": {"city": "Faro\n", "days": 1, "x": None},
            }
        },
        {"function": {"name": "now", "arguments": {}}},
    ],
}
RESULT = {"role": "tool", "content": "dry, 24 C"}
TOOLS = [{"type": "function", "function": {"name": "now", "description": "the time"}}]
CALL_TEXT = (
    "<think>\nNeed the forecast.\n</think>\n<|tool_call|><function=get_weather>\n"
    "<parameter=city>\nFaro\n\n</parameter>\n<parameter=days>\n1\n</parameter>\n"
    "<parameter=x>\nnull\n</parameter>\n</function><|tool_call|><function=now>\n</function>"
    "<|fim_suffix|>"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 1024)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return read_tokenizer(folder)


@pytest.fixture(scope="module")
def render(tokenizer: Any) -> Any:
    def render(*messages: dict[str, Any], **options: Any) -> str:
        options = {"add_generation_prompt": True, "tokenize": False, **options}
        return tokenizer.apply_chat_template(list(messages), **options)

    return render


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE, 512, 1024, 65536])
def test_every_id_is_used_and_the_special_tokens_are_the_first(tmp_path: Path, vocab_size: int):
    write_tokenizer(tmp_path, vocab_size)
    vocabulary = read_tokenizer(tmp_path).get_vocab()
    assert sorted(vocabulary.values()) == list(range(vocab_size))
    assert [vocabulary[token] for token in SPECIAL_TOKENS] == list(range(7))


def test_a_vocabulary_depends_on_its_size_alone(tmp_path: Path, folder: Path):
    write_tokenizer(tmp_path, 1024)
    for file in folder.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE - 1, 1 << 20])
def test_a_size_that_cannot_be_made_is_refused_with_the_sizes_that_can(
    tmp_path: Path, vocab_size: int
):
    with pytest.raises(ValueError, match=rf"vocab_size is {vocab_size}; .*at (least|most)"):
        write_tokenizer(tmp_path, vocab_size)
    assert list(tmp_path.iterdir()) == []


def test_think_tags_are_ordinary_text_that_shares_tokens_with_its_neighbours(tokenizer: Any):
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("Yes.</think>\n\nTwelve")]
    assert pieces[1:4] == [".</", "think", ">\n\n"]
    assert len(tokenizer.encode("<think>")) > 1
    assert not set(tokenizer.encode("<think></think>")) & set(range(7))


def test_markers_are_single_tokens_and_no_token_is_put_before_a_text(tokenizer: Any):
    assert tokenizer.encode("<|tool_call|>a") == [5, *tokenizer.encode("a")]


@pytest.mark.parametrize("text", ["Évora 👩‍🚀 \u00a0 ひ", "\r\n\t x  \n\n\n", "<|tool_call|>", "�"])
def test_text_comes_back(tokenizer: Any, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_transformers_and_vllm_find_it(folder: Path, checkpoint: Any):
    from transformers import AutoTokenizer
    from vllm.tokenizers import get_tokenizer

    text = "<think>\nYes.</think>\n<|tool_call|>"
    expected = read_tokenizer(folder).encode(text)
    assert AutoTokenizer.from_pretrained(folder).encode(text) == expected
    assert get_tokenizer(str(checkpoint())).encode(text) == expected


def test_thinking_is_the_default(render: Any):
    assert render(QUESTION).endswith("<think>\n")


def test_direct_mode_puts_an_empty_think_block_in_the_prompt(render: Any):
    assert render(QUESTION, enable_thinking=False).endswith("<think>\n\n</think>\n")


def test_calls_and_results_are_rendered_in_the_models_format(render: Any):
    text = render(QUESTION, CALL, RESULT)
    assert CALL_TEXT + "<|tool_result|>dry, 24 C<|fim_suffix|>" in text


def test_reasoning_is_kept_since_the_last_user_message_and_dropped_before_it(render: Any):
    assert "Need the forecast." in render(QUESTION, CALL, RESULT)
    later = render(QUESTION, CALL, RESULT, {"role": "assistant", "content": "Dry."}, QUESTION)
    assert "Need the forecast." not in later
    assert later.count("<think>") == 1


def test_reasoning_may_be_sent_back_under_either_name(render: Any):
    renamed = {**CALL, "reasoning_content": CALL["reasoning"]}
    both = render(QUESTION, renamed, RESULT)
    del renamed["reasoning"]
    assert render(QUESTION, renamed, RESULT) == both == render(QUESTION, CALL, RESULT)


def test_content_may_be_text_parts(render: Any):
    parts = [{"type": "text", "text": "dry, 24 C"}]
    assert render(QUESTION, CALL, {**RESULT, "content": parts}) == render(QUESTION, CALL, RESULT)


def test_system_messages_and_tools_are_declared_first(render: Any):
    text = render({"role": "system", "content": "Be kind."}, QUESTION, tools=TOOLS)
    assert text.index('"description": "the time"') < text.index("Be kind.") < text.index("Rain")


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ({"role": "critic", "content": "x"}, "role 'critic'"),
        ({"role": "user", "content": [{"type": "image"}]}, "type 'image'"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            "'f' must be an object",
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused_by_name(render: Any, message: dict, fault: str):
    with pytest.raises(jinja2.TemplateError, match=fault):
        render(QUESTION, message)
