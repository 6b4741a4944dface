# SPDX-License-Identifier: Apache-2.0
"""Parser: turns of the script, replayed through vLLM's serving layer whole and in every delta size."""

from __future__ import annotations

from typing import Any

from harness.evidence.record import Record
from harness.evidence.verdict import Verdict
from harness.judging.metrics import Metric
from harness.kinds.kind import Kind, Workshop, Written
from harness.kinds.parser.judge import judge
from harness.kinds.parser.observation import ParserObservation
from harness.kinds.parser.settings import ParserSettings


class Parser(Kind[ParserSettings, ParserObservation]):
    """The serving layer in the child, without an engine."""

    name = "parser"
    summary = "the parsers against renderings"
    settings = ParserSettings
    observations = (ParserObservation,)
    metrics = {"parser_faults": Metric("cases", "lower")}
    headlines = ("parser_faults",)
    made_by = ("checkpoints", "prompts", "reference", "serving")

    def child_config(
        self, settings: ParserSettings, written: Written, group: str, workshop: Workshop
    ) -> dict[str, Any]:
        return {"model": workshop.reference.checkpoint(written["checkpoint"]).served}

    def judge(self, settings: ParserSettings, record: Record[ParserObservation]) -> Verdict:
        assert record.observation is not None
        return judge(record.observation)


KIND = Parser()
