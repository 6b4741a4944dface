# SPDX-License-Identifier: Apache-2.0
"""Prompts of a cell as frozen token ids.

A prompt is a list of parts, joined as ids: a chat rendered by the checkpoint's own template, tokens
drawn at random, or ids as they are. Random parts may be as long as the engine's blocks, because
prefix caching goes wrong at `k * block_size` and its neighbours; so a corpus is resolved after the
engine has said its block size. The record keeps the ids: a later change of the tokenizer or the
template cannot move a run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from harness.evidence.record import Corpus
from harness.files import digest
from harness.prompts.parts import PromptPart

FIRST_ORDINARY_TOKEN = 7  # ids 0 to 6 are the special tokens

Render = Callable[[dict[str, Any]], list[int]]


class CorpusError(ValueError):
    """A prompt cannot be made for this engine; the message names prompt and reason."""


def freeze(
    prompts: Mapping[str, Sequence[PromptPart]],
    names: Iterable[str],
    *,
    block_size: int,
    vocab_size: int,
    longest: int,
    render: Render,
) -> Corpus:
    """The named prompts as token ids.

    Args:
        prompts: parts by prompt name.
        names: the prompts that are used.
        block_size: the engine's resolved block size, tokens.
        vocab_size: tokens of the checkpoint's vocabulary.
        longest: most prompt tokens that the engine takes, generated ones left room for.
        render: turns a chat part into ids with the checkpoint's template.

    Raises:
        CorpusError: naming every prompt that is empty or longer than `longest`.
    """
    token_ids = {
        name: [
            token
            for part in prompts[name]
            for token in _tokens(part, block_size=block_size, vocab_size=vocab_size, render=render)
        ]
        for name in sorted(set(names))
    }
    faults = [
        f"prompt {name} has {len(ids)} tokens; "
        f"the engine takes 1 to {longest} (block size {block_size})"
        for name, ids in token_ids.items()
        if not 1 <= len(ids) <= longest
    ]
    if faults:
        raise CorpusError("; ".join(faults))
    return Corpus(sha256=digest(token_ids), token_ids=token_ids)


def random_tokens(draw: random.Random, length: int, vocab_size: int) -> list[int]:
    """Return ordinary tokens drawn evenly: a prompt that begins like hardly any other."""
    return [draw.randrange(FIRST_ORDINARY_TOKEN, vocab_size) for _ in range(length)]


def _tokens(part: PromptPart, *, block_size: int, vocab_size: int, render: Render) -> list[int]:
    if part.chat is not None:
        return render(part.chat.as_written())
    if part.random is None:
        return list(part.token_ids or ())
    length = part.random.length
    if not isinstance(length, int):
        length = length.blocks * block_size + length.plus
    return random_tokens(random.Random(part.random.seed), length, vocab_size)
