# SPDX-License-Identifier: Apache-2.0
"""Each speed beside its limit and its twin's: vLLM's own hybrid with the same matrices."""

from __future__ import annotations

from collections.abc import Sequence

from harness.evidence.record import Record
from harness.judging.numbers import number
from harness.kinds.kind import Table
from harness.kinds.speed.observation import SpeedObservation
from harness.kinds.speed.settings import SpeedSettings

_HEADS = ["speed", "ms", "limit, ms", "MBU", "twin, ms", "of the twin's"]

_Key = tuple[str, str, str, int, int]


def twins_table(records: Sequence[Record[SpeedObservation]]) -> Table:
    """Return a row for each cell of the plugin: its time, and what its twin takes in this run.

    The last column is the time as a share of the twin's: below 1 is ahead. A cell without a twin
    in the run, or one that did not pass, has no figure there.
    """
    times: dict[bool, dict[_Key, dict[str, float]]] = {False: {}, True: {}}
    for record in records:
        if record.verdict is None or not record.verdict.findings:
            continue
        asked = SpeedSettings.model_validate(record.settings)
        times[asked.checkpoint.twin][_key(asked)] = {
            finding.metric: finding.observed for finding in record.verdict.findings
        }
    rows = []
    for key, found in times[False].items():
        took, beside = _took(found), times[True].get(key)
        twin = _took(beside) if beside else None
        cells = [took, found["memory_limit_ms"], found["mbu"], twin, took / twin if twin else None]
        rows.append([_label(key), *map(number, cells)])
    return Table("Beside the limit of memory, and the twin", _HEADS, rows)


def _took(figures: dict[str, float]) -> float:
    return figures["tpot_ms"] if "tpot_ms" in figures else figures["ttft_ms"]


def _key(asked: SpeedSettings) -> _Key:
    """What a cell and its twin have in common."""
    dtype = asked.engine.args.get("quantization") or asked.checkpoint.dtype
    load = asked.speed
    return asked.checkpoint.shape, str(dtype), load.phase, load.streams, load.prompt_tokens


def _label(key: _Key) -> str:
    shape, dtype, phase, streams, tokens = key
    load = f"decode, {streams} stream{'s' if streams > 1 else ''}"
    if phase == "prefill":
        load = f"prefill of {tokens} tokens"
    return f"{shape}, {dtype}: {load}"
