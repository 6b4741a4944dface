# SPDX-License-Identifier: Apache-2.0
"""Soak: a server under mixed traffic of many clients, who each must get the answer they get alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.evidence.record import Record
from harness.evidence.verdict import Verdict
from harness.judging.metrics import Metric
from harness.kinds.kind import Kind, Workshop, Written
from harness.kinds.soak.judge import judge
from harness.kinds.soak.observation import SoakObservation
from harness.kinds.soak.settings import SoakSettings
from harness.serving.server import CPU_ENVIRONMENT


class Soak(Kind[SoakSettings, SoakObservation]):
    """A server in the child, and its clients beside it."""

    name = "soak"
    summary = "a server under mixed traffic of many clients"
    settings = SoakSettings
    observations = (SoakObservation,)
    metrics = {
        "different_answers": Metric("", "lower"),
        "soak_errors": Metric("", "lower"),
        "orphans": Metric("", "lower"),
        "rss_growth": Metric("", "lower", 1.05, 0.01),
        "card_growth": Metric("", "lower", 1.05, 0.01),
        "ttft_growth": Metric("", "none"),
        "itl_growth": Metric("", "none"),
        "completed": Metric("answers", "none"),
        "in_flight": Metric("requests", "none"),
        "preemptions": Metric("", "none"),
        "served_tok_s": Metric("tokens/s", "higher", 1.25, 5.0, of_machine=True),
        "ttft_p99_ms": Metric("ms", "lower", 1.5, 50.0, of_machine=True),
        "itl_p99_ms": Metric("ms", "lower", 1.5, 10.0, of_machine=True),
    }
    headlines = ("different_answers",)
    made_by = ("checkpoints", "prompts", "reference", "serving")
    across_cells = True

    def child_config(
        self, settings: SoakSettings, written: Written, group: str, workshop: Workshop
    ) -> dict[str, Any]:
        return {
            "settings": written,
            "model": workshop.reference.checkpoint(written["checkpoint"]).served,
            "on_card": workshop.on_card,
            "server_log": str(workshop.logs / f"{group}-server.log"),
        }

    def child_environment(self, workshop: Workshop) -> Mapping[str, str]:
        return {} if workshop.on_card else CPU_ENVIRONMENT

    def judge(self, settings: SoakSettings, record: Record[SoakObservation]) -> Verdict:
        assert record.observation is not None
        return judge(record.observation, settings.soak)


KIND = Soak()
