# SPDX-License-Identifier: Apache-2.0
"""What a parser cell sees of the parsers."""

from __future__ import annotations

from typing import Literal

from harness.evidence.base import Observation


class ParserObservation(Observation):
    """Counts, and each case that went wrong in words."""

    kind: Literal["parser"] = "parser"
    cases: int
    comparisons: int
    faults: list[str]
    run_s: float
