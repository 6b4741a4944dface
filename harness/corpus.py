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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from harness.matrix import digest
from harness.records import Corpus

FIRST_ORDINARY_TOKEN = 7  # ids 0 to 6 are the special tokens

Part = dict[str, Any]
Render = Callable[[dict[str, Any]], list[int]]


class CorpusError(ValueError):
    """A prompt cannot be made for this engine; the message names prompt and reason."""


def freeze(
    prompts: Mapping[str, list[Part]],
    names: Iterable[str],
    *,
    block_size: int,
    vocab_size: int,
    longest: int,
    render: Render,
) -> Corpus:
    """The named prompts as token ids.

    Args:
        prompts: parts by prompt name, as in `matrices/schema.json`.
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


def _tokens(part: Part, *, block_size: int, vocab_size: int, render: Render) -> list[int]:
    if "chat" in part:
        return render(part["chat"])
    if "token_ids" in part:
        return list(part["token_ids"])
    length = part["random"]["length"]
    if isinstance(length, dict):
        length = length["blocks"] * block_size + length["plus"]
    draw = random.Random(part["random"]["seed"])
    return [draw.randrange(FIRST_ORDINARY_TOKEN, vocab_size) for _ in range(length)]
