# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: a matrix is a test file, an engine group a collector, a cell a test.

    pytest matrices/cpu_parity.yaml -k 'bf16 and chunk64' -x --junitxml=cells.xml

Filters, dry run, last-failed, JUnit and durations are pytest's own. An engine starts with the first
cell of its group and ends when pytest leaves the group; under xdist the cells of a group go to one
process, because their ids share a scope. A run in which no cell ran fails, and so does one in which
a cell did not reach what it names.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints.folder import MODEL_VARIABLE, ModelError, model_folder
from harness.matrices.expand import Cell, Matrix, load_matrix
from harness.matrices.select import SelectionError, groups, select
from harness.records import store
from harness.records.explain import describe, headline
from harness.run import environment, sharing
from harness.run.cells import CellRunner
from harness.run.terminal import CellReporter, shown
from harness.strict_yaml import YamlError

_STAMP = pytest.StashKey[str]()
_SHARE = pytest.StashKey[sharing.Share]()


class CellFailed(Exception):
    """A cell's verdict is not `pass`; the message is what a person needs to act."""


class MatrixFile(pytest.File):
    """A matrix; holds what its cells share while they run."""

    matrix: Matrix
    runner: CellRunner | None = None

    def collect(self) -> Iterable[pytest.Collector]:
        """One collector for each engine group."""
        try:
            self.matrix = load_matrix(self.path)
        except YamlError as error:
            raise self.CollectError(str(error)) from error
        for name, cells in groups(self.matrix.cells).items():
            yield EngineGroup.from_parent(self, name=name, cells=cells)

    @property
    def run_folder(self) -> Path:
        """Where the records of this matrix go."""
        return _run_folder(self.config, self.path)

    def setup(self) -> None:
        """Open the run folder with the cells that this session selected."""
        cells = [
            item.cell.id
            for item in self.session.items
            if isinstance(item, CellItem) and item.parent.parent is self
        ]
        model, logits = _model(self.config, self.matrix)
        self.runner = CellRunner(
            self.matrix, self.run_folder, threads=_threads(), model=model, logits=logits
        )
        path = os.path.relpath(self.path, self.config.invocation_params.dir)
        self.runner.open(cells, self.config.stash[_STAMP], path)

    def teardown(self) -> None:
        """Stop every child that is left."""
        if self.runner is not None:
            self.runner.close()


class EngineGroup(pytest.Collector):
    """The cells that share one engine process."""

    parent: MatrixFile

    def __init__(self, *, cells: list[Cell], **kwargs: Any):
        super().__init__(**kwargs)
        self._cells = cells

    def collect(self) -> Iterable[pytest.Item]:
        """One test for each cell."""
        for cell in self._cells:
            yield CellItem.from_parent(self, name=cell.id, cell=cell)

    def teardown(self) -> None:
        """Stop the engine: pytest calls this when no later test belongs to the group."""
        if self.parent.runner is not None:
            self.parent.runner.finish_group(self.name)


class CellItem(pytest.Item):
    """One cell."""

    parent: EngineGroup

    def __init__(self, *, cell: Cell, **kwargs: Any):
        super().__init__(**kwargs)
        self.cell = cell

    def runtest(self) -> None:
        """Run the cell, or take its unchanged record with `--resume`; fail unless it passed."""
        file = self.parent.parent
        assert file.runner is not None
        record = file.runner.saved(self.cell) if self.config.getoption("--resume") else None
        resumed = record is not None
        record = record or file.runner.run(self.cell)
        verdict = record.verdict
        assert verdict is not None
        finding = headline(record)
        self.user_properties += [
            ("verdict", verdict.verdict),
            ("resumed", resumed),
            ("engine_start_s", record.timings_s.get("engine_start")),
        ]
        if finding is not None:
            self.user_properties += [
                ("metric", finding.metric),
                ("observed", finding.observed),
                ("budget", finding.budget),
                ("floor", finding.floor),
            ]
        if verdict.verdict != "pass":
            header = store.load_header(file.run_folder)
            raise CellFailed(describe(record, header, shown(file.run_folder)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """A failed cell explains itself; a traceback of the harness would say nothing."""
        if isinstance(excinfo.value, CellFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """The name above a failure."""
        return self.path, 0, f"{self.cell.id} [engine {self.cell.group}]"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the matrices."""
    group = parser.getgroup("matrix", "matrices of the Metis harness")
    group.addoption(
        "--cell", action="append", default=[], metavar="GLOB", help="only cells whose id matches"
    )
    group.addoption(
        "--axis",
        action="append",
        default=[],
        metavar="AXIS=VALUE",
        help="only cells with this value",
    )
    group.addoption("--results", metavar="DIR", help="run folder; default results/<time>-<matrix>")
    group.addoption(
        "--overwrite", action="store_true", help="let --results name a folder with records"
    )
    group.addoption(
        "--resume",
        metavar="RUN",
        help="run folder to go on with: unchanged cells are not run again",
    )
    group.addoption(
        "--model",
        metavar="DIR",
        help=f"checkpoint that a smoke matrix runs; or {MODEL_VARIABLE} in the environment",
    )
    group.addoption(
        "--logits",
        metavar="FILE",
        help="its logits from `python -m harness logits`, where they were computed elsewhere",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check what was asked before anything is collected, and keep groups together under xdist."""
    given = getattr(config, "workerinput", {}).get("metis_stamp")
    config.stash[_STAMP] = given or datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    if given:
        return
    paths = _matrices_named(config)
    _check_selection(config, paths)
    if not config.option.collectonly:
        _check_folders(config, paths)
        _check_model(config, paths)
    if paths and config.getoption("dist", "no") == "load":
        config.option.dist = "loadscope"
        config.option.loadscopereorder = False  # they come in order
    show = CellReporter(config, run_folder=lambda path: _run_folder(config, path))
    config.pluginmanager.register(show, "metis-cells")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Say what `-n auto` means for matrices: as many engines as card and cores carry."""
    paths = _matrices_named(config)
    if not paths or "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    _check_selection(config, paths)
    globs, axes = config.getoption("--cell"), config.getoption("--axis")
    matrices = [load_matrix(path) for path in paths]
    count = sum(len(groups(select(matrix, globs, axes))) for matrix in matrices)
    found = config.stash[_SHARE] = sharing.share(matrices, count)
    return found.processes


def pytest_report_header(config: pytest.Config) -> str | None:
    """Tell how many processes `-n auto` came to, and why."""
    found = config.stash.get(_SHARE, None)
    if found is None:
        return None
    return f"engines at once: {found.processes} ({found.why}); -n NUMBER overrides"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the time stamp to an xdist process: all write one run folder."""
    node.workerinput["metis_stamp"] = node.config.stash[_STAMP]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """A YAML file is a matrix when it is named on the command line or lies in `matrices`."""
    if file_path.suffix != ".yaml":
        return None
    if parent.session.isinitpath(file_path) or file_path.parent.name == "matrices":
        node: pytest.Collector = MatrixFile.from_parent(parent, path=file_path)
        return node
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Apply --cell and --axis."""
    files = {item.parent.parent for item in items if isinstance(item, CellItem)}
    globs, axes = config.getoption("--cell"), config.getoption("--axis")
    try:
        chosen = {(file, cell.id) for file in files for cell in select(file.matrix, globs, axes)}
    except SelectionError as error:
        raise pytest.UsageError(str(error)) from error
    left_out = [
        item
        for item in items
        if isinstance(item, CellItem) and (item.parent.parent, item.name) not in chosen
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    processes = getattr(config, "workerinput", {}).get("workercount")
    if processes:
        _order(items, processes)


def _order(items: list[pytest.Item], processes: int) -> None:
    """Put the cells of each matrix in the order in which processes should take their groups."""
    cells: dict[MatrixFile, list[Cell]] = {}
    for item in items:
        if isinstance(item, CellItem):
            cells.setdefault(item.parent.parent, []).append(item.cell)
    files = list(cells)
    places = {
        (file, name): place
        for file in files
        for place, name in enumerate(sharing.ordered(file.matrix, groups(cells[file]), processes))
    }

    def place(item: pytest.Item) -> tuple[int, int]:
        if not isinstance(item, CellItem):
            return -1, 0
        file = item.parent.parent
        return files.index(file), places[file, item.cell.group]

    items.sort(key=place)


def _matrices_named(config: pytest.Config) -> list[Path]:
    files = {
        Path(config.invocation_params.dir, argument.partition("::")[0]) for argument in config.args
    }
    return sorted(file for file in files if file.suffix == ".yaml" and file.is_file())


def _check_selection(config: pytest.Config, paths: list[Path]) -> None:
    try:
        for path in paths:
            select(load_matrix(path), config.getoption("--cell"), config.getoption("--axis"))
    except (YamlError, SelectionError) as error:
        raise pytest.UsageError(str(error)) from error


def _check_folders(config: pytest.Config, paths: list[Path]) -> None:
    results, resume = config.getoption("--results"), config.getoption("--resume")
    if results and resume:
        raise pytest.UsageError("--results and --resume both name the run folder; give one of them")
    if (results or resume) and len(paths) != 1:
        raise pytest.UsageError(
            f"{results or resume} holds one run: name one matrix, not {len(paths)}"
        )
    if resume and not (Path(resume) / store.RUN_FILE).exists():
        raise pytest.UsageError(f"--resume {resume}: no run is there ({store.RUN_FILE} is missing)")
    if (
        results
        and (Path(results) / store.RUN_FILE).exists()
        and not config.getoption("--overwrite")
    ):
        raise pytest.UsageError(
            f"--results {results}: a run is there; pass --resume or --overwrite"
        )


def _check_model(config: pytest.Config, paths: list[Path]) -> None:
    """Refuse to begin without the model, and the logits, that a matrix asks for."""
    try:
        for path in paths:
            _model(config, load_matrix(path))
    except ModelError as error:
        raise pytest.UsageError(str(error)) from error
    logits = config.getoption("--logits")
    if logits and not Path(logits).is_file():
        raise pytest.UsageError(f"--logits {logits}: no such file")


def _model(config: pytest.Config, matrix: Matrix) -> tuple[Path | None, Path | None]:
    """The model, and the file of its logits, of a matrix that makes none itself."""
    if not matrix.kind.needs_model:
        return None, None
    logits = config.getoption("--logits")
    model = model_folder(config.getoption("--model"), "--model DIR")
    return model, Path(logits).resolve() if logits else None


def _run_folder(config: pytest.Config, matrix: Path) -> Path:
    named = config.getoption("--results") or config.getoption("--resume")
    folder = Path(named) if named else Path("results") / f"{config.stash[_STAMP]}-{matrix.stem}"
    return Path(config.invocation_params.dir, folder)


def _threads() -> int | None:
    """OpenMP threads of a child: xdist's processes share the cores, and spinning threads clash."""
    processes = environment.processes()
    if processes == 1 or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, len(os.sched_getaffinity(0)) // processes)
