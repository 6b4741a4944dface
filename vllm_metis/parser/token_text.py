# SPDX-License-Identifier: Apache-2.0
"""Where a turn's special tokens stand in its text.

vLLM hands its parsers pieces of text beside the token ids that were sampled, and the two do not run
level: the detokenizer holds back the bytes of an unfinished character, and a request with stop
strings holds back more. A marker is a marker by its id alone, because a model may quote its spelling
in ordinary tokens; so its place in the text is found by counting the characters of the tokens before
it. Where no ids are given, the spelling is all there is.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_metis.parser.tag_beginnings import beginning_finder

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike

_REPLACEMENT = "\ufffd"
# Characters by which the count may be off after bytes that are no UTF-8.
_SLACK = 16


class TokenTexts(dict[int, str]):
    """The text of each token alone, decoded once."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self.decode([token_id])
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


@functools.lru_cache(maxsize=8)
def token_texts(tokenizer: TokenizerLike) -> TokenTexts:
    """Return the tokenizer's one table, which its requests share."""
    return TokenTexts(tokenizer)


class TextWithMarkers:
    """Turns pieces of text and token ids into text and special tokens, in their order.

    Args:
        texts: the text of each token.
        special: the spelling of each special token, by id.
    """

    def __init__(self, texts: TokenTexts, special: Mapping[int, str]) -> None:
        self._texts = texts
        self._special = special
        self._id_of = {spelling: token_id for token_id, spelling in special.items()}
        self._spelling = re.compile("|".join(map(re.escape, self._id_of)))
        self._beginning_of_spelling = beginning_finder(self._id_of)
        self.reset()

    def reset(self) -> None:
        self._text = ""  # received and not yet passed on
        self._markers: deque[tuple[int, int]] = deque()  # (characters before it, token id)
        self._owed = 0  # characters of the tokens after the last marker that are not passed on yet
        self._unfinished: list[int] = []  # tokens that end inside a character
        self._has_ids = False
        self._is_exact = True  # no bytes came that are no UTF-8, of which nobody counts characters

    def feed(self, text: str, token_ids: Sequence[int]) -> Iterable[str | int]:
        """Return the text and the ids of special tokens of which the order is now certain."""
        if token_ids:
            self._has_ids = True
            self._count(token_ids)
        elif not self._has_ids:
            return self._split_by_spelling(text, whole=False)
        if not self._markers:
            self._owed = max(0, self._owed - len(text))
            return (text,) if text else ()
        self._text += text
        return self._split_by_place(whole=False)

    def finish(self) -> Iterable[str | int]:
        """Return what is left: no more text is coming."""
        if self._has_ids:
            return self._split_by_place(whole=True)
        return self._split_by_spelling("", whole=True)

    def _count(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if token_id in self._special:
                self._is_exact &= not self._unfinished
                self._owed += len(self._texts.decode(self._unfinished))
                self._unfinished.clear()
                self._markers.append((self._owed, token_id))
                self._owed = 0
                continue
            text = self._texts[token_id]
            if self._unfinished or text.endswith(_REPLACEMENT):
                self._unfinished.append(token_id)
                text = self._texts.decode(self._unfinished)
                if text.endswith(_REPLACEMENT) and len(self._unfinished) < 4:
                    continue
                self._is_exact &= _REPLACEMENT not in text
                self._unfinished.clear()
            self._owed += len(text)

    def _split_by_place(self, whole: bool) -> Iterable[str | int]:
        pieces: list[str | int] = []
        while self._markers:
            place, token_id = self._markers[0]
            spelling = self._special[token_id]
            if len(self._text) < place + len(spelling) and not whole:
                return pieces
            if len(self._text) < place and self._is_exact:
                self._markers.clear()  # a stop string cut the text before these
                break
            start, end = self._find(spelling, place)
            pieces += [self._text[:start], token_id] if start else [token_id]
            self._text = self._text[end:]
            self._markers.popleft()
        if self._text:
            pieces.append(self._text)
            self._owed = max(0, self._owed - len(self._text))
            self._text = ""
        return pieces

    def _find(self, spelling: str, place: int) -> tuple[int, int]:
        """Return where the marker starts and ends; the turn's end leaves no trace in the text."""
        if self._text.startswith(spelling, place):
            return place, place + len(spelling)
        found = -1
        if not self._is_exact:
            near = max(0, place - _SLACK)
            found = self._text.find(spelling, near, place + _SLACK + len(spelling))
        return (place, place) if found < 0 else (found, found + len(spelling))

    def _split_by_spelling(self, text: str, whole: bool) -> Iterable[str | int]:
        pieces: list[str | int] = []
        text, start = self._text + text, 0
        for match in self._spelling.finditer(text):
            pieces += [text[start : match.start()], self._id_of[match.group()]]
            start = match.end()
        text = text[start:]
        kept = len(text) if whole else len(text) - self._beginning_of_spelling(text)
        pieces.append(text[:kept])
        self._text = text[kept:]
        return [piece for piece in pieces if piece != ""]
