# SPDX-License-Identifier: Apache-2.0
"""The kinds of cells. A new one is a folder here, with a `KIND` in it, and a line in this table."""

from __future__ import annotations

import importlib
from typing import Any

from harness.judging.metrics import Metric
from harness.kinds.kind import Kind

_FOLDERS = (
    "parity",
    "parser",
    "smoke",
    "speed",
    "soak",
)

KINDS: dict[str, Kind[Any, Any]] = {
    name: importlib.import_module(f"harness.kinds.{name}").KIND for name in _FOLDERS
}
"""Every kind by its name, which is its folder's."""

METRICS: dict[str, Metric] = {
    name: metric for kind in KINDS.values() for name, metric in kind.metrics.items()
}
"""Every summary figure, in the order in which reports show them."""
