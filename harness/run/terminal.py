# SPDX-License-Identifier: Apache-2.0
"""What pytest prints about cells: a line as each begins and ends, and a table at the end.

Under xdist this runs in the controlling process, which knows test ids and reports but no items.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.judging.numbers import number
from harness.matrices.expand import load_matrix
from harness.records import agree, store
from harness.records.explain import table, text_table
from harness.report.figures import run_tables
from harness.run.progress import Progress
from harness.strict_yaml import YamlError


class CellReporter:
    """Shows cells, and fails a session in which none ran.

    Args:
        config: of the session.
        run_folder: the run folder of a matrix file.
    """

    def __init__(self, config: pytest.Config, run_folder: Callable[[Path], Path]):
        self._config = config
        self._run_folder = run_folder
        self._progress: Progress | None = None
        self._matrices: set[Path] = set()
        self._ran = 0
        self._odd: dict[Path, list[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the cells of a session that runs in this process."""
        self._begin([item.nodeid for item in session.items], processes=1)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Count the cells of a session in xdist's processes; each of them collects all."""
        if self._progress is None:
            self._begin(ids, processes=self._config.getoption("numprocesses") or 1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Show the cell, its engine and the time left."""
        cell = self._cell(nodeid)
        if cell is not None and self._progress is not None:
            self._write(self._progress.start(*cell))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Show the verdict and the figure that decided it."""
        cell = self._cell(report.nodeid)
        if cell is None or self._progress is None or not _decides(report):
            return
        seen: dict[str, Any] = dict(report.user_properties)
        start_s = seen.get("engine_start_s")
        self._progress.finish(*cell, report.duration - (start_s or 0.0), start_s)
        self._ran += not report.skipped
        verdict = str(seen.get("verdict", report.outcome))
        figure = ""
        if "metric" in seen:
            limit = f" of {number(seen['budget'])}" if seen["budget"] is not None else ""
            figure = f"{seen['metric']} {number(seen['observed'])}{limit}, "
        spent = "as recorded" if seen.get("resumed") else f"{report.duration:.1f} s"
        markup = {"green": True} if report.passed else {"red": True}
        self._write(f"    {verdict:<11} {cell[1]}: {figure}{spent}", **markup)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Count a cell without pytest's dot: its own line is there."""
        if self._cell(report.nodeid) is None or not _decides(report):
            return None
        category = report.outcome if report.when == "call" or report.skipped else "error"
        return category, "", category.upper()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail where cells were selected and none ran, or where they disagree among themselves."""
        selected = self._matrices and not self._config.option.collectonly
        if selected and not self._ran and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            self._write("no cell ran: that proves nothing, so the run fails", red=True)
        if selected and self._ran:
            for matrix in self._matrices:
                folder = self._run_folder(matrix)
                if (folder / store.RUN_FILE).exists():
                    self._odd[matrix] = agree.sentences(store.load_run(folder)[1])
            if any(self._odd.values()) and exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self) -> None:
        """Print each run's table and where its records are."""
        for matrix in sorted(self._matrices):
            folder = self._run_folder(matrix)
            if self._config.option.collectonly or not (folder / store.RUN_FILE).exists():
                continue
            header, found, faults = store.load_run(folder)
            self._write(f"\n{header.matrix}: {header.question}\n\n{table(found)}\n")
            for beside in run_tables(found):
                self._write(f"{beside.title}\n\n{text_table(beside.heads, beside.rows)}\n")
            for fault in [*faults, *self._odd.get(matrix, ())]:
                self._write(f"  {fault}", red=True)
            self._write(
                f"records: {shown(folder)}   report: python -m harness report {shown(folder)}"
            )

    def _begin(self, ids: list[str], processes: int) -> None:
        cells = [cell for cell in map(self._cell, ids) if cell]
        if not cells:
            return
        self._matrices = {self._path(nodeid) for nodeid in ids if self._cell(nodeid)}
        estimate = None
        if len(self._matrices) == 1:
            with contextlib.suppress(YamlError):  # collecting says what is wrong with it
                estimate = load_matrix(*self._matrices).estimate
        self._progress = Progress(cells, estimate, processes)
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.showfspath = False  # the cells' own lines take the place of files and dots

    def _path(self, nodeid: str) -> Path:
        return self._config.rootpath / nodeid.split("::")[0]

    @staticmethod
    def _cell(nodeid: str) -> tuple[str, str] | None:
        """Engine group and cell of a test id, or None where it is no cell."""
        path, *names = nodeid.split("::")
        return (names[0], names[1]) if path.endswith(".yaml") and len(names) == 2 else None

    def _write(self, text: str, **markup: bool) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(text, **markup)


def _decides(report: pytest.TestReport) -> bool:
    """Whether a report is its cell's outcome: that of the call, or what went wrong beside it."""
    return report.when == "call" or not report.passed


def shown(path: Path) -> Path:
    """A path as one would type it here."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else Path(relative)
