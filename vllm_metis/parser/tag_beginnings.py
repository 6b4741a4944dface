# SPDX-License-Identifier: Apache-2.0
"""How much at the end of a text may be the beginning of a tag, and so has to be held back."""

from collections.abc import Callable, Iterable


def beginning_finder(tags: Iterable[str]) -> Callable[[str], int]:
    """Return a function that gives the length of the longest beginning of a tag that ends a text.

    It is asked for every token of an output, so it looks at the end of the text alone. A whole tag
    is no beginning: whoever asks has looked for tags before.

    Args:
        tags: each with its only "<" first, or second after a line break.
    """
    beginnings = frozenset(tag[:length] for tag in tags for length in range(1, len(tag)))
    longest = max(map(len, beginnings))
    has_line_break = "\n" in beginnings

    def beginning_at_end(text: str) -> int:
        tail = text[-longest:]
        if "<" in tail:  # hardly ever
            at = tail.rfind("<")
            for start in (at - 1, at) if at else (at,):
                if tail[start:] in beginnings:
                    return len(tail) - start
        return has_line_break and tail.endswith("\n")

    return beginning_at_end
