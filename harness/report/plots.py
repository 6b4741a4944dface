# SPDX-License-Identifier: Apache-2.0
"""Draws the plots of a run: SVG text, each once for a light page and once for a dark one.

What a plot shows is its kind's to say (`Kind.plots`). Text stays text, so a report can be searched
and stays small.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from harness.evidence.record import Record
from harness.kinds import KINDS
from harness.kinds.kind import Plot
from harness.records.explain import kind_of

_STYLES = {
    "light": {"ink": "#1c2128", "grid": "#d8dde3", "limit": "#b42318"},
    "dark": {"ink": "#dfe3e8", "grid": "#3a4048", "limit": "#ff8a7a"},
}
_ROW_INCHES = 0.21
_WIDTH_INCHES = 8.6


@dataclass(frozen=True)
class Drawing:
    """One plot in both styles."""

    title: str
    caption: str
    light: str
    dark: str


def draw(found: Sequence[Record[Any]]) -> list[Drawing]:
    """Return the plots of a run, without those that it has no data for."""
    return [
        _in_both_styles(plot)
        for kind in KINDS.values()
        for plot in kind.plots([record for record in found if kind_of(record) is kind])
        if plot.records
    ]


def _in_both_styles(plot: Plot) -> Drawing:
    """Draw a plot twice; without a height it gets a row for each record."""
    svgs = {}
    for name, style in _STYLES.items():
        settings: Any = {
            "svg.fonttype": "none",
            "svg.hashsalt": f"{plot.title} {name}",
            "font.family": "sans-serif",
            "font.size": 9,
            "text.color": style["ink"],
            "axes.edgecolor": style["grid"],
            "axes.labelcolor": style["ink"],
            "xtick.color": style["ink"],
            "ytick.color": style["ink"],
            "grid.color": style["grid"],
            "legend.frameon": False,
        }
        with mpl.rc_context(settings):
            height = plot.inches or max(2.4, 0.9 + _ROW_INCHES * len(plot.records))
            figure = Figure(figsize=(_WIDTH_INCHES, height))
            axes = figure.subplots()
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_axisbelow(True)
            plot.draw(axes, plot.records, style)
            figure.tight_layout()
            out = io.StringIO()
            figure.savefig(
                out, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
            )
        text = out.getvalue()
        svgs[name] = text[text.index("<svg") :]
    return Drawing(plot.title, plot.caption, svgs["light"], svgs["dark"])
