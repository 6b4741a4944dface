# SPDX-License-Identifier: Apache-2.0
"""A run is a folder of records beside `run.json`, which names the cells that were selected, so that a
missing record shows. Saving is atomic, and `load(save(record)) == record`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from harness.evidence.record import Record, Run
from harness.files import write_atomic
from harness.kinds import KINDS
from harness.kinds.kind import any_of

RUN_FILE = "run.json"

AnyRecord: Any = Record[any_of([one for kind in KINDS.values() for one in kind.observations])]  # type: ignore[misc]
"""A record of a cell of any kind."""
_Loaded = TypeVar("_Loaded", bound=BaseModel)


class RecordError(ValueError):
    """A record or run folder cannot be read; the message holds one fault a line."""


def record_path(run: Path, cell: str) -> Path:
    """Return the file of one cell."""
    return run / f"{cell}.json"


def save(record: Record[Any], run: Path) -> Path:
    """Write a record into its run folder and return the file."""
    path = record_path(run, record.cell)
    write_atomic(path, record.model_dump_json(indent=1) + "\n")
    return path


def load(path: Path) -> Record[Any]:
    """Read one record.

    Raises:
        RecordError: with every fault of the file, when it is missing, cut short or of another
        schema.
    """
    record: Record[Any] = _load(path, AnyRecord)
    return record


def save_header(header: Run, run: Path) -> None:
    """Write the header of a run folder."""
    write_atomic(run / RUN_FILE, header.model_dump_json(indent=1) + "\n")


def load_header(run: Path) -> Run:
    """Read the header of a run folder.

    Raises:
        RecordError: the folder has no readable one.
    """
    if not run.is_dir():
        raise RecordError(f"{run}: not a folder; expected a run folder such as results/<run>")
    return _load(run / RUN_FILE, Run)


def load_run(run: Path) -> tuple[Run, list[Record[Any]], list[str]]:
    """Read a run folder.

    Returns:
        The header, the readable records in the order of the matrix, and one sentence for each cell
        whose record is missing or unreadable.

    Raises:
        RecordError: when the folder has no readable header.
    """
    header = load_header(run)
    records, faults = [], []
    for cell in header.cells:
        path = record_path(run, cell)
        if not path.exists():
            faults.append(f"{cell}: no record; the cell was selected but did not finish")
            continue
        try:
            records.append(load(path))
        except RecordError as error:
            faults.append(f"{cell}: {error}")
    return header, records, faults


def _load(path: Path, model: type[_Loaded]) -> _Loaded:
    try:
        return model.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise RecordError(f"{path}: {'; '.join(_faults(error))}") from error


def _faults(error: ValidationError) -> Iterator[str]:
    for fault in error.errors(include_url=False, include_input=False):
        place = ".".join(str(part) for part in fault["loc"])
        yield f"{place}: {fault['msg']}" if place else fault["msg"]
