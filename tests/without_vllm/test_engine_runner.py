# SPDX-License-Identifier: Apache-2.0
"""The runner with a child that passes, fails, hangs, crashes, is killed, or writes garbage.

Whatever the child does, the cell's record says what happened, the next cell runs, and no process is
left.
"""

import contextlib
import errno
import os
import sys
from pathlib import Path

import psutil
import pytest

from harness import files
from harness.evidence.record import Record
from harness.matrices.expand import load_matrix
from harness.process.worker import Worker, WorkerError
from harness.records import store as records
from harness.run.cells import CellRunner
from tests import evidence
from tests.without_vllm.fake_matrix import CHILD, CHILDREN, matrix_text


@pytest.fixture
def run_all(tmp_path, monkeypatch):
    """Return a function that runs every cell of a matrix and gives verdicts and the run folder."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def run(*names: str, **options: object) -> tuple[dict[str, Record], Path]:
        path = tmp_path / "demo.yaml"
        path.write_text(matrix_text(*names, **options))
        matrix = load_matrix(path)
        folder = tmp_path / "run"
        runner = CellRunner(matrix, folder, children=CHILDREN)
        try:
            runner.open([cell.id for cell in matrix.cells], "now", str(path))
            for cell in matrix.cells:
                runner.run(cell)
        finally:
            runner.close()
        _, found, faults = records.load_run(folder)
        assert faults == []
        assert children_of(tmp_path) == []
        return {record.cell: record for record in found}, folder

    return run


def children_of(folder: Path) -> list[psutil.Process]:
    """Fake children that run with a configuration below a folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if CHILD in line and any(str(folder) in part for part in line):
                found.append(process)
    return found


def starts(folder: Path) -> int:
    return (folder / "cache" / "starts").read_text().count("start")


def test_cells_of_a_group_share_one_engine(run_all):
    found, folder = run_all("fine", "wrong_token", "nan")
    assert {cell: record.verdict.verdict for cell, record in found.items()} == {
        "fine": "pass",
        "wrong_token": "fail",
        "nan": "fail",
    }
    assert starts(folder) == 1
    assert "engine_start" in found["fine"].timings_s
    assert "engine_start" not in found["nan"].timings_s


@pytest.mark.parametrize(
    ("child", "kind", "message"),
    [
        ("raise", "failed", "ValueError: the engine could not do it"),
        ("crash", "crashed", "the child ended without an answer: exit status 7"),
        ("killed", "crashed", "killed by SIGKILL; out of memory?"),
        ("garbage", "garbage", "this is no answer"),
        ("half", "garbage", "Invalid JSON: EOF"),
        ("empty", "garbage", "Invalid JSON: EOF"),
        ("toolong", "failed", "prompt toolong has 500 tokens; the engine takes 1 to 125"),
    ],
)
def test_a_cell_that_goes_wrong_is_an_error_and_the_next_one_runs(run_all, child, kind, message):
    found, folder = run_all(child, "fine")
    assert found[child].verdict.verdict == "error"
    assert found[child].failure.kind == kind
    assert message in found[child].failure.message
    assert found["fine"].verdict.verdict == "pass"
    assert starts(folder) == (1 if child == "toolong" else 2)


def test_a_cell_that_hangs_is_killed_with_what_it_started(run_all, tmp_path, monkeypatch):
    fifo = tmp_path / "pids"
    os.mkfifo(fifo)
    monkeypatch.setenv("FAKE_FIFO", str(fifo))
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    found, _ = run_all("hang", "fine", cell_s=3)
    assert found["hang"].failure.kind == "timeout"
    assert found["hang"].failure.message == "no answer within 3 s"
    assert found["fine"].verdict.verdict == "pass"
    for pid in os.read(reader, 100).split():
        assert _gone(int(pid))
    os.close(reader)


def test_a_child_that_closes_its_answers_and_lives_on_is_killed(run_all, monkeypatch):
    monkeypatch.setattr("harness.process.worker._END_S", 0.2)
    found, _ = run_all("silent")
    assert found["silent"].failure.kind == "crashed"
    assert "goes on running" in found["silent"].failure.message


def test_the_end_of_the_log_is_kept(run_all):
    found, folder = run_all("crash")
    assert "something terrible happened" in found["crash"].failure.log_tail
    assert "something terrible happened" in (folder / found["crash"].log).read_text()


@pytest.mark.parametrize(
    ("start", "kind", "message"),
    [
        ("refuse", "refused", "ValueError: pipeline parallelism is not supported"),
        ("assert", "refused", " in engine: assert not start"),
        ("crash", "crashed", "exit status 3"),
        ("hang", "start_timeout", "no answer within 3 s"),
    ],
)
def test_an_engine_that_does_not_start_is_tried_once(run_all, start, kind, message):
    found, folder = run_all("fine", "wrong_token", start=start, start_s=3)
    for record in found.values():
        assert record.failure.kind == kind
        assert message in record.failure.message
    assert starts(folder) == 1


def test_a_full_disk_while_running_is_an_error_of_that_cell(run_all, monkeypatch):
    real, fulls = files.write_atomic, iter([True])

    def full_once(path, text):
        if path.name == "parity.config.json" and next(fulls, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, text)

    monkeypatch.setattr("harness.process.worker.write_atomic", full_once)
    found, _ = run_all("fine", "wrong_token")
    assert found["fine"].failure.kind == "system"
    assert "No space left" in found["fine"].failure.message
    assert found["wrong_token"].verdict.verdict == "fail"


def test_a_record_that_cannot_be_written_is_raised_and_leaves_no_process(
    run_all, tmp_path, monkeypatch
):
    real = files.write_atomic

    def full(path, text):
        if path.name == "fine.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, text)

    monkeypatch.setattr(records, "write_atomic", full)
    with pytest.raises(OSError, match="No space left"):
        run_all("fine")
    assert children_of(tmp_path) == []


def test_the_record_holds_what_was_asked_and_where(run_all):
    found, folder = run_all("fine")
    record = found["fine"]
    assert len(record.corpus.token_ids["fine"]) == 20
    assert all(7 <= token < evidence.VOCABULARY for token in record.corpus.token_ids["fine"])
    assert record.seeds == {"checkpoint": 1, "PYTHONHASHSEED": 0, "prompt fine.0": 1}
    assert record.environment.versions["python"]
    assert not list((folder / "logs").glob("*.reply.json"))


def test_a_child_whose_parent_is_gone_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (tmp_path / "model").mkdir()
    config = {"model": str(tmp_path / "model"), "args": {}}
    worker = Worker(CHILDREN["parity"], config, tmp_path, "engine", {})
    worker.start(20)
    child = worker._child
    child.stdin.close()  # what the end of the parent does
    assert child.wait(20)
    assert child.ending == "killed by SIGKILL; out of memory?"
    worker.kill()


def test_a_worker_that_was_not_started_says_so(tmp_path):
    worker = Worker(CHILDREN["parity"], {}, tmp_path, "engine", {})
    with pytest.raises(RuntimeError, match="call start"):
        worker.run({}, tmp_path / "out", 1)
    worker.stop()


def test_a_command_that_does_not_exist_is_an_error(tmp_path):
    worker = Worker(("/no/such/program",), {}, tmp_path, "engine", {})
    with pytest.raises(OSError, match="No such file"):
        worker.start(5)
    with pytest.raises(WorkerError, match="exit status"):
        Worker((sys.executable, "-c", "0"), {}, tmp_path, "engine", {}).start(20)


def _gone(pid: int) -> bool:
    """Whether a process has ended; a zombie that waits for its reaper has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
