# SPDX-License-Identifier: Apache-2.0
"""Smoke: a model that was not made here, in an engine against its own code, and behind a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.evidence.base import Observation
from harness.evidence.record import Record
from harness.evidence.verdict import Verdict
from harness.judging import sameness
from harness.judging.agreement import metrics_of
from harness.judging.metrics import DECODE_TOK_S, TPOT_MS, TTFT_MS, Metric
from harness.kinds.kind import Kind, Table, Workshop, Written, settings_table
from harness.kinds.smoke.judge import judge
from harness.kinds.smoke.observation import (
    PromptObservation,
    ServedObservation,
    TimingObservation,
)
from harness.kinds.smoke.settings import SmokeSettings
from harness.serving.server import CPU_ENVIRONMENT


class Smoke(Kind[SmokeSettings, Observation]):
    """An engine or a server in the child; either gives all evidence at once."""

    name = "smoke"
    summary = "an engine and a server on a model named by --model"
    settings = SmokeSettings
    observations = (PromptObservation, ServedObservation, TimingObservation)
    metrics = {
        **metrics_of("prompt"),
        **sameness.METRICS,
        "answer_faults": Metric("answers", "lower"),
        "ttft_ms": TTFT_MS,
        "tpot_ms": TPOT_MS,
        "decode_tok_s": DECODE_TOK_S,
    }
    headlines = ("prompt_logprob_error_max", "answer_faults", "decode_tok_s")
    made_by = (
        "engine.py",
        "generated_code.py",
        "repetition.py",
        "checkpoints",
        "prompts",
        "scoring",
        "serving",
    )
    needs_model = True

    def child_config(
        self, settings: SmokeSettings, written: Written, group: str, workshop: Workshop
    ) -> dict[str, Any]:
        return {
            "settings": written,
            "model": str(workshop.model),
            "logits": str(workshop.logits),
            "matrix": str(workshop.matrix),
            "on_card": workshop.on_card,
            "server_log": str(workshop.logs / f"{group}-server.log"),
        }

    def child_environment(self, workshop: Workshop) -> Mapping[str, str]:
        return {} if workshop.on_card else CPU_ENVIRONMENT

    def judge(self, settings: SmokeSettings, record: Record[Observation]) -> Verdict:
        return judge(settings, record)

    def deviations(self, record: Record[Observation]) -> list[str]:
        seen = record.observation
        return sameness.described(seen.repetitions if isinstance(seen, PromptObservation) else [])

    def tables(self, record: Record[Observation]) -> list[Table]:
        seen = record.observation
        return [settings_table(seen.settings)] if isinstance(seen, PromptObservation) else []


KIND = Smoke()
