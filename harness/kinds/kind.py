# SPDX-License-Identifier: Apache-2.0
"""What a kind of cell is: how it is described, run, judged and shown.

A kind is a folder here with `settings`, `observation`, `child` and `judge`, and a line in the table
of `harness/kinds/__init__.py`. The runner, the judge and the reports know this class alone.

Its `child` is a module, or a package, that answers jobs (harness/process/child_loop.py) in a process
of its own: it may import torch and vLLM, what stands beside it may not.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import Field

from harness.evidence.base import Observation
from harness.evidence.engine import EngineFacts
from harness.evidence.record import Gathered, Record
from harness.evidence.verdict import Verdict
from harness.judging.metrics import Metric
from harness.kinds.settings import CellSettings
from harness.prompts.parts import PromptPart
from harness.scoring.client import ReferenceChild

Written = Mapping[str, Any]
"""Settings as the matrix has them, after all patches."""

S = TypeVar("S", bound=CellSettings)
O = TypeVar("O", bound=Observation)
_Reply = TypeVar("_Reply")


class Child(Protocol):
    """The running child of a cell.

    Attributes:
        facts: what it reported once it was ready.
    """

    @property
    def facts(self) -> Mapping[str, Any]: ...

    def ask(self, reply: type[_Reply] | Any, **job: Any) -> _Reply:
        """Have it do the cell's job, the settings of which it is told, and return its reply."""


@dataclass(frozen=True)
class Workshop:
    """What a run offers its cells.

    Attributes:
        prompts: of the matrix, by name.
        matrix: its file.
        cache: a folder for what is made once.
        logs: the folder of logs.
        on_card: whether the machine has a card.
        reference: builds checkpoints, renders chats and scores tokens.
        model: folder of the model that is not made here, for kinds that need one.
        logits: file of its logits, written where it is not there.
        timed: measures what is done within it as a time of the cell.
    """

    prompts: Mapping[str, Sequence[PromptPart]]
    matrix: Path
    cache: Path
    logs: Path
    on_card: bool
    reference: ReferenceChild
    model: Path | None
    logits: Path | None
    timed: Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Table:
    """A table of a report.

    Attributes:
        heads: the first of them names the row.
        texts: columns from the left that hold text; the others hold figures.
        in_summary: shown in the Markdown summary too, folded.
    """

    title: str
    heads: list[str]
    rows: list[list[str]]
    texts: int = 1
    in_summary: bool = False


def settings_table(facts: EngineFacts) -> Table:
    """Return an engine's resolved settings as a table."""
    rows = [[name, str(value)] for name, value in facts]
    return Table("Resolved engine settings", ["setting", "value"], rows, texts=2)


@dataclass(frozen=True)
class Plot:
    """A plot of a report.

    Attributes:
        draw: puts the records on a matplotlib `Axes`, in the colours of a style, by name.
        records: those that it shows.
        inches: its height; None for a row a record.
    """

    title: str
    caption: str
    draw: Callable[[Any, list[Record[Any]], Mapping[str, str]], None]
    records: list[Record[Any]]
    inches: float | None = None


def any_of(observations: Sequence[type[Observation]]) -> Any:
    """Return the type of any of these observations, told apart by their `kind`."""
    if len(observations) == 1:
        return observations[0]
    return Annotated[reduce(or_, observations), Field(discriminator="kind")]


class Kind(abc.ABC, Generic[S, O]):
    """One kind of cell.

    Attributes:
        name: of its folder, and `kind` in a matrix.
        summary: what runs its cells, for the schema.
        settings: the model of a cell's settings.
        observations: the types of what a cell observes.
        metrics: every figure that its verdicts and `figures` give.
        headlines: metrics one of which stands for a cell in a table.
        made_by: files and folders of `harness` that make its evidence beside its child; an edit there
            asks for a new run.
        needs_model: whether its cells run a model that is not made here (`--model`).
        across_cells: whether its figures are read side by side even where a budget decides.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    settings: type[S]
    observations: tuple[type[O], ...]
    metrics: ClassVar[Mapping[str, Metric]]
    headlines: ClassVar[tuple[str, ...]] = ()
    made_by: ClassVar[tuple[str, ...]] = ()
    needs_model: ClassVar[bool] = False
    across_cells: ClassVar[bool] = False

    # Running

    @abc.abstractmethod
    def child_config(
        self, settings: S, written: Written, group: str, workshop: Workshop
    ) -> dict[str, Any]:
        """Return what the child of an engine group is started with.

        Args:
            settings, written: of the cell that starts it; others of its group share the engine.
        """

    def child_environment(self, workshop: Workshop) -> Mapping[str, str]:
        """Return variables of the child's environment, below those that its cells set."""
        del workshop
        return {}

    def gather(self, settings: S, child: Child, workshop: Workshop) -> Iterator[tuple[str, Any]]:
        """Run a cell; yield the parts of its evidence (`observation`, `corpus`, `reference`).

        What is yielded is kept, whatever happens after.
        """
        prompts = {
            name: [part.model_dump(exclude_unset=True) for part in workshop.prompts[name]]
            for name in settings.prompt_names
        }
        reply: Any = Gathered[any_of(self.observations)]  # type: ignore[misc] # made at run time
        found: Gathered[O] = child.ask(reply, prompts=prompts)
        for part in ("corpus", "observation", "reference"):
            yield part, getattr(found, part)

    # Deciding

    @abc.abstractmethod
    def judge(self, settings: S, record: Record[Any]) -> Verdict:
        """Return the verdict on a record that holds an observation of this kind."""

    def figures(self, record: Record[Any]) -> Iterator[tuple[str, float]]:
        """Yield figures that a record holds beside its findings."""
        del record
        yield from ()

    # Showing

    def deviations(self, record: Record[Any]) -> list[str]:
        """Return lines that say where a cell that did not pass deviates."""
        del record
        return []

    def circumstances(self, record: Record[Any]) -> list[str]:
        """Return lines that say what a cell that did not pass met."""
        del record
        return []

    def tables(self, record: Record[Any]) -> list[Table]:
        """Return tables of a record that a report shows."""
        del record
        return []

    def run_tables(self, records: Sequence[Record[Any]]) -> list[Table]:
        """Return tables of a run that set its records side by side; shown where it ends, too."""
        del records
        return []

    def plots(self, records: Sequence[Record[Any]]) -> list[Plot]:
        """Return plots of a run; those without records are left out."""
        del records
        return []
