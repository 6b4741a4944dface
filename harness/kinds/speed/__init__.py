# SPDX-License-Identifier: Apache-2.0
"""Speed: an engine with random weights, timed beside the limit that memory sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.evidence.record import Record
from harness.evidence.verdict import Verdict
from harness.judging.metrics import DECODE_TOK_S, TPOT_MS, TTFT_MS, Metric
from harness.judging.numbers import number
from harness.kinds.kind import Kind, Table, Workshop, Written, settings_table
from harness.kinds.speed.judge import judge
from harness.kinds.speed.observation import SpeedObservation
from harness.kinds.speed.settings import SpeedSettings
from harness.kinds.speed.twins import twins_table
from harness.serving.server import CPU_ENVIRONMENT

# An instance of a template has a thousand characters, and a table is as wide as its widest cell.
_NAME_WIDTH = 100


class Speed(Kind[SpeedSettings, SpeedObservation]):
    """An engine in the child, in the child's own process."""

    name = "speed"
    summary = "an engine with random weights, timed"
    settings = SpeedSettings
    observations = (SpeedObservation,)
    metrics = {
        "ttft_ms": TTFT_MS,
        "tpot_ms": TPOT_MS,
        "decode_tok_s": DECODE_TOK_S,
        "prefill_tok_s": Metric("tokens/s", "higher", 1.1, 50.0, of_machine=True),
        "memory_limit_ms": Metric("ms", "none"),
        "mbu": Metric("", "none"),
        "memory_gib": Metric("GiB", "lower", 1.05, 0.2, of_machine=True),
        "startup_s": Metric("s", "lower", 1.5, 10.0, of_machine=True),
        "copy_tb_s": Metric("TB/s", "none"),
    }
    headlines = ("decode_tok_s", "prefill_tok_s")
    made_by = ("engine.py", "generated_code.py", "checkpoints", "prompts", "reference")

    def child_config(
        self, settings: SpeedSettings, written: Written, group: str, workshop: Workshop
    ) -> dict[str, Any]:
        return {"settings": written, "cache": str(workshop.cache)}

    def child_environment(self, workshop: Workshop) -> Mapping[str, str]:
        return {} if workshop.on_card else CPU_ENVIRONMENT

    def judge(self, settings: SpeedSettings, record: Record[SpeedObservation]) -> Verdict:
        assert record.observation is not None
        return judge(settings, record.observation)

    def tables(self, record: Record[SpeedObservation]) -> list[Table]:
        if record.observation is None:
            return []
        heads = ["kernel", "calls a step", "µs a step"]
        rows = [
            [_shown(kernel.name), number(kernel.calls), number(kernel.total_us)]
            for kernel in record.observation.kernels
        ]
        kernels = Table("Kernels of a decode step", heads, rows, in_summary=True)
        return [*([kernels] if rows else []), settings_table(record.observation.settings)]

    def run_tables(self, records: Sequence[Record[SpeedObservation]]) -> list[Table]:
        table = twins_table(records)
        return [table] if table.rows else []


def _shown(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 1] + "…"


KIND = Speed()
