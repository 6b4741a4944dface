# SPDX-License-Identifier: Apache-2.0
"""What may be the beginning of a tag is held back, so a text reads the same however it is split."""

import itertools
import re
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parser.strategies import SETTINGS, SPLITS
from vllm_metis.parser.call import FUNCTION_END, PARAMETER, PARAMETER_END
from vllm_metis.parser.engine import GRAMMAR
from vllm_metis.parser.reasoning import THINK_END
from vllm_metis.parser.tag_beginnings import beginning_finder
from vllm_metis.parser.token_text import TextWithMarkers, TokenTexts

SPELLINGS = tuple(GRAMMAR.token_id_terminals.values())
TAGS = {
    "think end": ("\n" + THINK_END, THINK_END),
    "tags in a value": (
        *("\n" + PARAMETER_END, PARAMETER_END),
        *("\n" + PARAMETER, "\n" + FUNCTION_END),
    ),
    "spellings of special tokens": SPELLINGS,
}
FRAGMENTS = sorted({tag[:n] for tags in TAGS.values() for tag in tags for n in range(len(tag) + 1)})
TEXT = st.lists(st.sampled_from(FRAGMENTS) | st.text("a<\n>/|", max_size=3), max_size=8).map(
    "".join
)


def pieces(text: str, split: list[int]) -> Iterator[str]:
    start = 0
    for size in itertools.cycle(split):
        if start >= len(text):
            return
        yield text[start : start + size]
        start += size


def read(texts: Iterable[str], tags: tuple[str, ...]) -> list[str]:
    """Return the text before, between and after the tags, and the tags, in their order."""
    beginning, tag = beginning_finder(tags), re.compile("|".join(map(re.escape, tags)))
    found, held = [""], ""
    for text in texts:
        held += text
        while match := tag.search(held):
            found[-1] += held[: match.start()]
            found += [match[0], ""]
            held = held[match.end() :]
        kept = len(held) - beginning(held)
        found[-1] += held[:kept]
        held = held[kept:]
    found[-1] += held
    return found


@pytest.mark.parametrize("tags", TAGS.values(), ids=TAGS)
@given(text=TEXT, split=SPLITS)
@SETTINGS
def test_any_split_of_any_text_reads_as_the_whole(
    tags: tuple[str, ...], text: str, split: list[int]
):
    whole = re.split(f"({'|'.join(map(re.escape, tags))})", text)
    assert read(pieces(text, split), tags) == whole


@pytest.mark.parametrize("tags", TAGS.values(), ids=TAGS)
@given(text=TEXT)
@SETTINGS
def test_nothing_is_held_back_but_the_longest_beginning_of_a_tag(tags: tuple[str, ...], text: str):
    beginnings = {tag[:n] for tag in tags for n in range(1, len(tag))}
    lengths = [len(one) for one in beginnings if text.endswith(one)]
    assert beginning_finder(tags)(text) == max(lengths, default=0)


@given(text=TEXT, split=SPLITS)
@SETTINGS
def test_where_no_ids_are_given_special_tokens_are_told_by_their_spelling(
    text: str, split: list[int]
):
    special = dict(enumerate(SPELLINGS))

    def read_text(texts: Iterable[str]) -> list[str | int]:
        reader = TextWithMarkers(TokenTexts(None), special)
        found: list[str | int] = []
        for piece in (*(p for text in texts for p in reader.feed(text, [])), *reader.finish()):
            if isinstance(piece, str) and found and isinstance(found[-1], str):
                found[-1] += piece
            else:
                found.append(piece)
        return found

    whole = read_text([text])
    assert read_text(pieces(text, split)) == whole
    assert "".join(special[one] if isinstance(one, int) else one for one in whole) == text
    assert not any(
        spelling in one for one in whole if isinstance(one, str) for spelling in SPELLINGS
    )
