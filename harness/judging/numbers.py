# SPDX-License-Identifier: Apache-2.0
"""Figures as people read them."""

from __future__ import annotations


def number(value: float | None) -> str:
    """Return a figure with three significant digits, or a dash."""
    return "-" if value is None else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return seconds as a person says them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
