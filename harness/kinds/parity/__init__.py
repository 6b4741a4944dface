# SPDX-License-Identifier: Apache-2.0
"""Parity: vLLM's engine on a checkpoint that is made here, token by token against the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from harness.evidence.record import Record
from harness.evidence.verdict import Verdict
from harness.judging import sameness
from harness.judging.agreement import metrics_of
from harness.judging.metrics import TPOT_MS, TTFT_MS, Metric
from harness.kinds.kind import Child, Kind, Plot, Table, Workshop, Written
from harness.kinds.parity import explain, judge, plots
from harness.kinds.parity.observation import EngineObservation
from harness.kinds.parity.settings import ParitySettings
from harness.prompts import corpus


class Parity(Kind[ParitySettings, EngineObservation]):
    """An engine in the child; prompts are frozen, and tokens scored, by the reference child."""

    name = "parity"
    summary = "an engine against the reference"
    settings = ParitySettings
    observations = (EngineObservation,)
    metrics = {
        "greedy_mismatches": Metric("tokens", "lower"),
        **metrics_of("decode"),
        **sameness.METRICS,
        "reloads": Metric("kernels", "lower"),
        "near_ties": Metric("tokens", "lower", 2.0, 4.0),
        "sqnr_db": Metric("dB", "higher", 1.0, 6.0),
        "cached_tokens": Metric("tokens", "none"),
        "ttft_ms": TTFT_MS,
        "tpot_ms": TPOT_MS,
    }
    headlines = ("decode_logprob_error_max", "rows_of_other_bits")
    made_by = (
        "engine.py",
        "generated_code.py",
        "repetition.py",
        "checkpoints",
        "prompts",
        "reference",
        "scoring",
    )

    def child_config(
        self, settings: ParitySettings, written: Written, group: str, workshop: Workshop
    ) -> dict[str, Any]:
        if settings.against == "itself":
            drawn = settings.checkpoint.model_dump(include={"shape", "dtype", "seed"})
            return {"drawn": drawn, "cache": str(workshop.cache), "args": settings.engine.args}
        checkpoint = workshop.reference.checkpoint(written["checkpoint"])
        return {"model": checkpoint.served, "args": settings.engine.args}

    def gather(
        self, settings: ParitySettings, child: Child, workshop: Workshop
    ) -> Iterator[tuple[str, Any]]:
        reference = workshop.reference
        checkpoint = None
        if settings.against == "reference":
            checkpoint = reference.checkpoint(settings.checkpoint.model_dump())

        def render(chat: dict[str, Any]) -> list[int]:
            if checkpoint is None:
                raise corpus.CorpusError(
                    "against `itself`, prompts are random tokens: found a chat"
                )
            return reference.render(checkpoint.source, chat)

        frozen = corpus.freeze(
            workshop.prompts,
            settings.prompt_names,
            block_size=child.facts["block_size"],
            vocab_size=checkpoint.vocab_size if checkpoint else child.facts["vocab_size"],
            longest=child.facts["max_model_len"] - settings.sampling.max_tokens,
            render=render,
        )
        yield "corpus", frozen
        observation: EngineObservation = child.ask(EngineObservation, token_ids=frozen.token_ids)
        yield "observation", observation
        if checkpoint is None:
            return
        sequences = observation.sequences(frozen.token_ids)
        with workshop.timed("reference"):
            yield "reference", reference.score(settings.precision, checkpoint, sequences)

    def judge(self, settings: ParitySettings, record: Record[EngineObservation]) -> Verdict:
        return judge.judge(settings, record)

    def figures(self, record: Record[EngineObservation]) -> Iterator[tuple[str, float]]:
        return explain.figures(record)

    def deviations(self, record: Record[EngineObservation]) -> list[str]:
        again = record.observation.repetitions if record.observation else []
        return [*sameness.described(again), *explain.deviations(record)]

    def circumstances(self, record: Record[EngineObservation]) -> list[str]:
        return explain.circumstances(record)

    def tables(self, record: Record[EngineObservation]) -> list[Table]:
        return explain.tables(record)

    def plots(self, records: Sequence[Record[EngineObservation]]) -> list[Plot]:
        return plots.plots(records)


KIND = Parity()
