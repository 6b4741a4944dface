# SPDX-License-Identifier: Apache-2.0
r"""The tokenizer of the tiny checkpoints: what Metis-1.6's is like, at any vocabulary size.

Byte-level BPE with the seven special tokens at ids 0 to 6, no BOS, and every id used. As in the
release, `<think>` and `</think>` are ordinary text of several tokens, and merges glue neighbours
onto their first and last (`.</`, `>\n`), so a reader that looks for whole tokens fails here too.
The merges are trained on the text below: the vocabulary depends on nothing but its size.
The chat template beside this file holds the turn's format; its role markers are its own.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|padding|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|tool_call|>",
    "<|tool_result|>",
)
END_OF_TURN = "<|fim_suffix|>"
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")

# A run of punctuation takes the line ends after it along: that is what makes `>\n` one token.
_PRE_TOKEN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_PROSE = (
    "The tide comes in and the tide goes out. Light travels faster than sound, so we see the storm "
    "before we hear it. First I compare the two numbers, then I add the digits one by one. "
    "They ask about the weather in the city; I should call the tool and read the result. "
    "Is it right? Yes: the answer is twelve. Let me think about this again, step by step. "
    "You can open a file, write a line, and close it. Ask me for an example when you need one! "
)
# Repetition is weight: these lines make the markup's pieces, and the glued ones, early merges.
_MARKUP = (
    "<think>\nWe need the sum.</think>\n\nTwelve.",
    "<think>\nIs it?</think>\nYes!</think>",
    "<think>\n\n</think>\n",
    "They ask, so\n</think>\n(a)</think>\n\n",
    "<function=get_weather>\n<parameter=city>\nLisbon\n</parameter>\n</function>",
    "<function=write_file>\n<parameter=path>\na.txt\n</parameter>\n</function><function=",
    '{"name": "get_weather", "parameters": {"type": "object", "properties": {}}}',
    '{"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}',
    "system\nYou are a helpful assistant.\nuser\nassistant\n",
)
_TRAINING_TEXT = (_PROSE,) * 2 + _MARKUP * 8


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into an existing folder.

    Raises:
        ValueError: the vocabulary cannot hold the special tokens and all bytes, or not be filled.
    """
    backend = _backend(vocab_size)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TURN,
        pad_token="<|padding|>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
    )
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tokenizer-") as scratch:
        tokenizer.save_pretrained(scratch)
        for file in sorted(Path(scratch).iterdir()):
            os.replace(file, folder / file.name)


def read_tokenizer(folder: Path | str) -> PreTrainedTokenizerFast:
    """Return a checkpoint's tokenizer, without a look at its model code."""
    return PreTrainedTokenizerFast.from_pretrained(folder)


def render(tokenizer: PreTrainedTokenizerBase, chat: dict[str, Any]) -> list[int]:
    """Return a chat as the ids that the tokenizer's template makes of it, generation prompt included.

    Args:
        chat: `messages`, `enable_thinking` and perhaps `tools`.
    """
    text = tokenizer.apply_chat_template(
        chat["messages"],
        tools=chat.get("tools"),
        enable_thinking=chat["enable_thinking"],
        add_generation_prompt=True,
        tokenize=False,
    )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _backend(vocab_size: int) -> Tokenizer:
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size is {vocab_size}; {len(SPECIAL_TOKENS)} special tokens and 256 bytes "
            f"need at least {MIN_VOCAB_SIZE}"
        )
    trained = _pipeline(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(_TRAINING_TEXT, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
    _fill(vocab, merges, vocab_size)
    backend = _pipeline(Tokenizer(models.BPE(vocab=vocab, merges=merges)))
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return backend


def _pipeline(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRE_TOKEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _fill(vocab: dict[str, int], merges: list[tuple[str, str]], vocab_size: int) -> None:
    """Add pairs of bytes, printable ones first, until every id of the vocabulary has a token."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    for left in characters:
        for right in characters:
            if len(vocab) == vocab_size:
                return
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
    if len(vocab) < vocab_size:
        raise ValueError(
            f"vocab_size is {vocab_size}; at most {len(vocab)} distinct tokens can be made"
        )
