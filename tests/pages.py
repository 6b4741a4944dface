# SPDX-License-Identifier: Apache-2.0
"""Reports as tests read them."""

import re
from html.parser import HTMLParser

VOID = {"meta", "input", "br", "hr", "img", "link", "path", "use", "rect"}


class Balanced(HTMLParser):
    """Checks that every tag is closed in order, and collects addresses that a page would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched = [], []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [
            v for k, v in attributes if k in {"src", "href", "xlink:href"} and v[0] != "#"
        ]

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def squeezed(markdown: str) -> str:
    """Markdown without the white space and dashes that only align its tables."""
    return re.sub(r" +", " ", re.sub(r"-{3,}", "---", markdown))
