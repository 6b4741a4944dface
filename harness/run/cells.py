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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.checkpoints.folder import fingerprint
from harness.evidence.record import Failure, Identity, Record, Run
from harness.files import digest
from harness.kinds import KINDS
from harness.kinds.kind import Workshop
from harness.matrices.expand import Cell, Matrix
from harness.process.worker import Worker, WorkerError
from harness.prompts.corpus import CorpusError
from harness.records import store
from harness.records.judge import judge
from harness.run import environment
from harness.scoring.client import ReferenceChild

CHILD_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_CACHE_AUTOTUNING": "1",  # what one engine found is read by the next
}
CHILDREN: dict[str, Sequence[str]] = {
    **{name: (sys.executable, "-m", f"harness.kinds.{name}.child") for name in KINDS},
    "reference": (sys.executable, "-m", "harness.scoring.child"),
}
"""What runs the children, by kind."""

_LOGS = "logs"


@dataclass
class _Group:
    """An engine configuration: its child, and why it could not be started."""

    worker: Worker | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    refused: WorkerError | None = None


@dataclass(frozen=True)
class _CellChild:
    """The child of one cell, as its kind asks it."""

    facts: Mapping[str, Any]
    worker: Worker
    cell: Cell
    out: Path

    def ask(self, reply: Any, **job: Any) -> Any:
        timeout_s = self.cell.settings.timeout.cell_s
        return self.worker.ask({"settings": self.cell.written, **job}, self.out, timeout_s, reply)


class CellRunner:
    """Runs cells of one matrix.

    Args:
        matrix: the matrix.
        folder: the run folder; its name is the run's.
        threads: OpenMP threads of each child, or None to leave them alone.
        children: commands by kind, replaced in tests.
        model: folder of the model that the cells run, for a kind that makes none.
        logits: file of its logits, where they were computed elsewhere.
    """

    def __init__(
        self,
        matrix: Matrix,
        folder: Path,
        threads: int | None = None,
        children: Mapping[str, Sequence[str]] | None = None,
        model: Path | None = None,
        logits: Path | None = None,
    ):
        self._matrix, self._kind = matrix, matrix.kind
        self._fingerprint = fingerprint(model) if model is not None else None
        self._folder = folder.resolve()
        self._env = {**CHILD_ENV, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
        self._children = {**CHILDREN, **(children or {})}
        self._environment = environment.gather()
        self._versions = environment.versions_sha256(self._environment, self._kind)
        self._groups: dict[str, _Group] = {}
        self._timings: dict[str, float] = {}
        cache, logs = self._folder / "cache", self._folder / _LOGS
        self._reference = ReferenceChild(self._children["reference"], cache, logs, self._env)
        stored = cache / f"logits-{self._fingerprint}.safetensors"
        self._workshop = Workshop(
            prompts=matrix.prompts,
            matrix=matrix.path.resolve(),
            cache=cache,
            logs=logs,
            on_card=bool(self._environment.cards),
            reference=self._reference,
            model=model,
            logits=logits or stored,
            timed=self._timed,
        )

    def open(self, cells: Sequence[str], started: str, matrix_path: str) -> None:
        """Write the header that names the cells to expect; a resumed run keeps those it had."""
        had: list[str] = []
        if (self._folder / store.RUN_FILE).exists():
            had = store.load_header(self._folder).cells
        chosen = {*had, *cells}
        header = Run(
            run=self._folder.name,
            matrix=self._matrix.name,
            matrix_path=matrix_path,
            question=self._matrix.question,
            cells=[cell.id for cell in self._matrix.cells if cell.id in chosen],
            started=started,
            environment=self._environment,
        )
        store.save_header(header, self._folder)

    def saved(self, cell: Cell) -> Record[Any] | None:
        """The record of an earlier run of the same cell, versions and corpus, judged anew.

        A record without evidence (an error) is none: it is what resuming is for.
        """
        try:
            record = store.load(store.record_path(self._folder, cell.id))
        except store.RecordError:
            return None
        if record.failure is not None or record.identity != self._identity(cell):
            return None
        return record.model_copy(update={"verdict": judge(record)})

    def run(self, cell: Cell) -> Record[Any]:
        """Run a cell and save its record, judged.

        Raises:
            OSError: when the record itself cannot be written.
        """
        started = time.monotonic()
        self._timings = {}
        evidence: dict[str, Any] = {}
        try:
            child = self._child(cell)
            for part, value in self._kind.gather(cell.settings, child, self._workshop):
                evidence[part] = value
        except WorkerError as error:
            evidence["failure"] = Failure(
                kind=error.kind, message=str(error), log_tail=error.log_tail
            )
        except CorpusError as error:
            evidence["failure"] = Failure(kind="failed", message=str(error))
        except OSError as error:
            evidence["failure"] = Failure(kind="system", message=str(error))
        timings = self._timings
        timings["cell"] = time.monotonic() - started - timings.get("engine_start", 0.0)
        record: Record[Any] = store.AnyRecord(
            run=self._folder.name,
            matrix=self._matrix.name,
            kind=self._kind.name,
            cell=cell.id,
            axes=cell.axes,
            engine_group=cell.group,
            settings=cell.written,
            identity=self._identity(cell),
            environment=self._environment,
            seeds=self._seeds(cell),
            timings_s={name: round(seconds, 3) for name, seconds in timings.items()},
            log=f"{_LOGS}/{cell.group}.log",
            **evidence,
        )
        record = record.model_copy(update={"verdict": judge(record)})
        store.save(record, self._folder)
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

    def _child(self, cell: Cell) -> _CellChild:
        """Return the running child of a cell's group, started where it is not."""
        group = self._groups.setdefault(cell.group, _Group())
        if group.refused is not None:
            raise group.refused
        if group.worker is None or not group.worker.running:
            self._start(group, cell)
        assert group.worker is not None
        out = self._folder / _LOGS / f"{cell.id}.reply.json"
        return _CellChild(group.facts, group.worker, cell, out)

    def _start(self, group: _Group, cell: Cell) -> None:
        config = self._kind.child_config(cell.settings, cell.written, cell.group, self._workshop)
        own = self._kind.child_environment(self._workshop)
        group.worker = Worker(
            self._children[self._kind.name],
            config,
            self._folder / _LOGS,
            cell.group,
            {**self._env, **own, **cell.settings.environment},
            forked=True,
        )
        with self._timed("engine_start"):
            try:
                group.facts = group.worker.start(cell.settings.timeout.start_s)
            except WorkerError as error:
                group.refused = error
                raise

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Take the time of the running cell that something within it costs, where it ends well."""
        began = time.monotonic()
        yield
        self._timings[name] = time.monotonic() - began

    def _identity(self, cell: Cell) -> Identity:
        sha256 = digest([cell.sha256, self._fingerprint]) if self._fingerprint else cell.sha256
        return Identity(cell_sha256=sha256, versions_sha256=self._versions)

    def _seeds(self, cell: Cell) -> dict[str, int]:
        seeds = {"PYTHONHASHSEED": 0}
        for name, section in cell.written.items():
            if isinstance(section, dict) and "seed" in section:
                seeds[name] = section["seed"]
        for name in cell.settings.prompt_names:
            for index, part in enumerate(self._matrix.prompts[name]):
                if part.random is not None:
                    seeds[f"prompt {name}.{index}"] = part.random.seed
        return seeds
