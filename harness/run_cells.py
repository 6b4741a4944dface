# SPDX-License-Identifier: Apache-2.0
"""Runs the cells of one matrix into one run folder: evidence, then verdict, then record.

    cell ──> engine child (one a group) ──> observation ─┐
         └─> reference child (one a run) ─> scores ──────┴─> verdict ─> RUN/<cell>.json

Nothing a child does ends the run. A start that failed is remembered, so that the other cells of its
group say so at once instead of failing slowly; a child lost in the middle of a cell is started
again for the next one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from harness import corpus, environment, records
from harness.judge import judge
from harness.matrix import Cell, Matrix, digest, prompt_names
from harness.model_folder import fingerprint
from harness.records import (
    Corpus,
    EngineObservation,
    Failure,
    Identity,
    Observation,
    Record,
    Reference,
)
from harness.reference_child import ReferenceChild
from harness.server import CPU_ENVIRONMENT
from harness.worker import Worker, WorkerError

CHILD_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
CHILDREN = {
    "parity": (sys.executable, "-m", "harness.engine"),
    "parser": (sys.executable, "-m", "harness.replay_cells"),
    "smoke": (sys.executable, "-m", "harness.real_smoke"),
    "speed": (sys.executable, "-m", "harness.speed"),
    "soak": (sys.executable, "-m", "harness.soak"),
    "reference": (sys.executable, "-m", "harness.scorer"),
}
_LOGS = "logs"


class _Measured(BaseModel):
    observation: Observation
    corpus: Corpus | None
    reference: Reference | None


@dataclass
class _Group:
    """An engine configuration: its child, and why it could not be started."""

    worker: Worker | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    refused: WorkerError | None = None


class CellRunner:
    """Runs cells of one matrix.

    Args:
        matrix: the matrix.
        folder: the run folder; its name is the run's.
        threads: OpenMP threads of each child, or None to leave them alone.
        children: commands by kind, replaced in tests.
        model: folder of the model that the cells of a smoke matrix run.
        logits: file of its logits, where they were computed elsewhere.
    """

    def __init__(
        self,
        matrix: Matrix,
        folder: Path,
        threads: int | None = None,
        children: dict[str, Sequence[str]] | None = None,
        model: Path | None = None,
        logits: Path | None = None,
    ):
        self._matrix = matrix
        self._model, self._logits = model, logits
        self._fingerprint = fingerprint(model) if model is not None else None
        self._folder = folder.resolve()
        self._env = {**CHILD_ENV, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
        self._children: dict[str, Sequence[str]] = {**CHILDREN, **(children or {})}
        self._environment = environment.gather()
        self._versions = environment.versions_sha256(self._environment)
        self._groups: dict[str, _Group] = {}
        self._reference = ReferenceChild(
            self._children["reference"], self._folder / "cache", self._folder / _LOGS, self._env
        )

    def open(self, cells: Sequence[str], started: str, matrix_path: str) -> None:
        """Write the header that names the cells to expect; a resumed run keeps those it had."""
        had: list[str] = []
        if (self._folder / records.RUN_FILE).exists():
            had = records.load_run(self._folder)[0].cells
        chosen = {*had, *cells}
        header = records.Run(
            run=self._folder.name,
            matrix=self._matrix.name,
            matrix_path=matrix_path,
            question=self._matrix.question,
            cells=[cell.id for cell in self._matrix.cells if cell.id in chosen],
            started=started,
            environment=self._environment,
        )
        records.save_run(header, self._folder)

    def saved(self, cell: Cell) -> Record | None:
        """The record of an earlier run of the same cell, versions and corpus, judged anew.

        A record without evidence (an error) is none: it is what resuming is for.
        """
        try:
            record = records.load(records.record_path(self._folder, cell.id))
        except records.RecordError:
            return None
        if record.failure is not None or record.identity != self._identity(cell):
            return None
        return record.model_copy(update={"verdict": judge(record)})

    def run(self, cell: Cell) -> Record:
        """Run a cell and save its record, judged.

        Raises:
            OSError: when the record itself cannot be written.
        """
        started = time.monotonic()
        timings: dict[str, float] = {}
        evidence: dict[str, Any] = {}
        try:
            run_kind = {
                "parity": self._run_parity,
                "parser": self._run_parser,
                "smoke": self._run_measured,
                "speed": self._run_measured,
                "soak": self._run_measured,
            }
            run_kind[self._matrix.kind](cell, evidence, timings)
        except WorkerError as error:
            evidence["failure"] = Failure(
                kind=error.kind, message=str(error), log_tail=error.log_tail
            )
        except corpus.CorpusError as error:
            evidence["failure"] = Failure(kind="failed", message=str(error))
        except OSError as error:
            evidence["failure"] = Failure(kind="system", message=str(error))
        timings["cell"] = time.monotonic() - started - timings.get("engine_start", 0.0)
        record = Record(
            run=self._folder.name,
            matrix=self._matrix.name,
            kind=self._matrix.kind,
            cell=cell.id,
            axes=cell.axes,
            engine_group=cell.group,
            settings=cell.settings,
            identity=self._identity(cell),
            environment=self._environment,
            seeds=self._seeds(cell),
            timings_s={name: round(seconds, 3) for name, seconds in timings.items()},
            log=f"{_LOGS}/{cell.group}.log",
            **evidence,
        )
        record = record.model_copy(update={"verdict": judge(record)})
        records.save(record, self._folder)
        return record

    def finish_group(self, name: str) -> None:
        """Stop the engine of a group; the next one starts on a free machine."""
        group = self._groups.pop(name, None)
        if group is not None and group.worker is not None:
            group.worker.stop()

    def close(self) -> None:
        """Stop every child."""
        for name in list(self._groups):
            self.finish_group(name)
        self._reference.stop()

    def _run_parity(self, cell: Cell, evidence: dict[str, Any], timings: dict[str, float]) -> None:
        settings = cell.settings
        checkpoint = self._reference.checkpoint(settings["checkpoint"])
        config = {"model": checkpoint.served, "args": settings["engine"]["args"]}
        group = self._group(cell, config, timings)
        assert group.worker is not None
        frozen = corpus.freeze(
            self._matrix.prompts,
            prompt_names(settings),
            block_size=group.facts["block_size"],
            vocab_size=checkpoint.vocab_size,
            longest=group.facts["max_model_len"] - settings["sampling"]["max_tokens"],
            render=lambda chat: self._reference.render(checkpoint.source, chat),
        )
        evidence["corpus"] = frozen
        job = {"settings": settings, "token_ids": frozen.token_ids}
        observation = self._job(group.worker, job, cell, settings["timeout"]["cell_s"])
        if not isinstance(observation, EngineObservation):
            raise WorkerError(
                "garbage", f"expected an engine's observation, found {observation.kind}"
            )
        evidence["observation"] = observation
        began = time.monotonic()
        evidence["reference"] = self._reference.score(
            settings["precision"], checkpoint, frozen, observation
        )
        timings["reference"] = time.monotonic() - began

    def _run_parser(self, cell: Cell, evidence: dict[str, Any], timings: dict[str, float]) -> None:
        checkpoint = self._reference.checkpoint(cell.settings["checkpoint"])
        group = self._group(cell, {"model": checkpoint.served}, timings)
        assert group.worker is not None
        job = {"settings": cell.settings}
        evidence["observation"] = self._job(
            group.worker, job, cell, cell.settings["timeout"]["cell_s"]
        )

    def _run_measured(
        self, cell: Cell, evidence: dict[str, Any], timings: dict[str, float]
    ) -> None:
        """Run a cell whose child gives all evidence at once."""
        settings = cell.settings
        group = self._group(cell, self._measured_config(cell), timings)
        assert group.worker is not None
        prompts = {name: self._matrix.prompts[name] for name in prompt_names(settings)}
        out = self._folder / _LOGS / f"{cell.id}.evidence.json"
        job = {"settings": settings, "prompts": prompts}
        reply: _Measured = group.worker.ask(job, out, settings["timeout"]["cell_s"], _Measured)
        evidence |= {name: getattr(reply, name) for name in _Measured.model_fields}

    def _measured_config(self, cell: Cell) -> dict[str, Any]:
        cache = self._folder / "cache"
        model: object = self._model
        if self._matrix.kind == "soak":
            model = self._reference.checkpoint(cell.settings["checkpoint"]).served
        stored = cache / f"logits-{self._fingerprint}.safetensors"
        return {
            "settings": cell.settings,
            "on_card": bool(self._environment["cards"]),
            "model": str(model),
            "logits": str(self._logits or stored),
            "matrix": str(self._matrix.path.resolve()),
            "cache": str(cache),
            "server_log": str(self._folder / _LOGS / f"{cell.group}-server.log"),
        }

    def _group(self, cell: Cell, config: dict[str, Any], timings: dict[str, float]) -> _Group:
        """The group of a cell with its child running."""
        group = self._groups.setdefault(cell.group, _Group())
        if group.refused is not None:
            raise group.refused
        if group.worker is None or not group.worker.running:
            # A matrix of one's own checkpoints says for which machine it is; these run on any.
            any_machine = self._matrix.kind in ("smoke", "speed", "soak")
            for_cpu = CPU_ENVIRONMENT if any_machine and not self._environment["cards"] else {}
            group.worker = Worker(
                self._children[self._matrix.kind],
                config,
                self._folder / _LOGS,
                cell.group,
                {**self._env, **for_cpu, **cell.settings.get("engine", {}).get("env", {})},
            )
            began = time.monotonic()
            try:
                group.facts = group.worker.start(cell.settings["timeout"]["start_s"])
            except WorkerError as error:
                group.refused = error
                raise
            timings["engine_start"] = time.monotonic() - began
        return group

    def _job(
        self, worker: Worker, job: dict[str, Any], cell: Cell, timeout_s: float
    ) -> Observation:
        out = self._folder / _LOGS / f"{cell.id}.observation.json"
        observation: Observation = worker.ask(job, out, timeout_s, Observation)
        return observation

    def _identity(self, cell: Cell) -> Identity:
        sha256 = digest([cell.sha256, self._fingerprint]) if self._fingerprint else cell.sha256
        return Identity(cell_sha256=sha256, versions_sha256=self._versions)

    def _seeds(self, cell: Cell) -> dict[str, int]:
        seeds = {"PYTHONHASHSEED": 0}
        for name in ("checkpoint", "smoke", "speed", "soak"):
            if "seed" in cell.settings.get(name, {}):
                seeds[name] = cell.settings[name]["seed"]
        for name in prompt_names(cell.settings):
            for index, part in enumerate(self._matrix.prompts[name]):
                if "random" in part:
                    seeds[f"prompt {name}.{index}"] = part["random"]["seed"]
        return seeds
