# SPDX-License-Identifier: Apache-2.0
"""Texts that a model might write and ways to cut them, for the parsers' property tests."""

from hypothesis import settings
from hypothesis import strategies as st

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True)
"""The same examples in every run, and no limit of time, which a busy machine would miss."""

# U+FFFD is what the detokenizer holds back itself; U+E000 and U+E001 are stand-ins in tests.parser.turns.
CHARACTERS = st.characters(
    exclude_categories=["Cs"], exclude_characters="\N{REPLACEMENT CHARACTER}\ue000\ue001"
)
FRAGMENTS = [
    *("<think>", "</think>", "</thi", "<", "</", ">", "</b>", "<|tool_call|>", "<|fim_suffix|>"),
    *("<function=f>", "</function>", "<parameter=x>", "</parameter>", "</parameter>\n", "<|tool"),
    *("\n", "\n\n", " ", "  ", "\t", "\r\n", "{", "}", '"', "\\", "'", '{"a": 1}', "[1, 2]"),
    *("null", "true", "None", "007", "1e3", "3.0", "é", "👩‍🚀", "\u00a0", "\u2028", "Ω", "&amp;"),
    *("Oslo", "."),
]
TEXT = st.lists(st.sampled_from(FRAGMENTS) | st.text(CHARACTERS, max_size=4), max_size=12).map(
    "".join
)
SPLITS = st.lists(st.integers(1, 9), min_size=1, max_size=5)
