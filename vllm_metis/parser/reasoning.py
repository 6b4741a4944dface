# SPDX-License-Identifier: Apache-2.0
"""Where a turn's reasoning starts and ends, told from token ids.

Whether a turn starts inside a think block is read from its prompt, which any template or client may
have written. `<think>` and `</think>` are ordinary text that shares tokens with its neighbours, so
both are looked for in the text of the tokens, never among their ids.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from vllm.parser.engine.parser_engine_config import ParserState

from vllm_metis.parser.token_text import TokenTexts

THINK_START, THINK_END = "<think>", "</think>"
# What a template writes after `</think>`, and the blank line that often follows it.
LINE_BREAKS_AFTER_REASONING = 2


@dataclass(frozen=True)
class Opening:
    """How a turn starts."""

    state: ParserState
    may_think: bool = False  # the prompt has no think block: the model may open one itself
    line_breaks: int = 0  # of the template, at most, that are still to come


THINKING = Opening(ParserState.REASONING)
DIRECT = Opening(ParserState.CONTENT)


def opening_of(
    prompt: Sequence[int], texts: TokenTexts, special: AbstractSet[int]
) -> Opening | None:
    """Return how the turn after this prompt starts; None if it is not the prompt of a turn.

    Only the open turn counts, which is what follows the last special token: earlier turns and the
    user's words may hold think tags of their own.
    """
    start = next((n for n in range(len(prompt), 0, -1) if prompt[n - 1] in special), 0)
    text = texts.decode(prompt[start:])
    written = text.rstrip()
    breaks = text[len(written) :].count("\n")
    thinks = text.find(THINK_START)
    closed = text.find(THINK_END, max(thinks, 0)) >= 0
    if written.endswith(THINK_END):
        return Opening(
            ParserState.CONTENT, line_breaks=0 if breaks else LINE_BREAKS_AFTER_REASONING
        )
    if written.endswith(THINK_START):
        return Opening(ParserState.REASONING, line_breaks=0 if breaks else 1)
    if closed:
        return DIRECT
    if thinks >= 0:
        return THINKING
    return Opening(ParserState.CONTENT, may_think=True) if start else None


class ReasoningEnd:
    """Finds the token with which reasoning ends: the one that completes `</think>`, or the marker.

    Args:
        texts: the text of each token.
        special: the special tokens.
        call: the marker of a call, one of them.
    """

    def __init__(self, texts: TokenTexts, special: AbstractSet[int], call: int) -> None:
        self._texts = texts
        self._special = special
        self._call = call
        self._matched = 0  # characters of `</think>`
        self.glued = ""  # what the last token holds after `</think>`

    def feed(self, token_id: int) -> bool:
        if token_id in self._special:
            self._matched = 0
            return token_id == self._call
        text = self._texts[token_id]
        if not self._matched and "<" not in text:
            return False
        for n, character in enumerate(text, start=1):
            if character == THINK_END[self._matched]:
                self._matched += 1
            else:
                self._matched = int(character == THINK_END[0])
            if self._matched == len(THINK_END):
                self._matched = 0
                self.glued = text[n:]
                return True
        return False

    def first(self, token_ids: Iterable[int]) -> int | None:
        """Return the index of the first token with which reasoning ends, or None."""
        for n, token_id in enumerate(token_ids):
            if self.feed(token_id):
                return n
        return None
