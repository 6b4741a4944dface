# SPDX-License-Identifier: Apache-2.0
"""Children that are forked after the imports are as those that import for themselves."""

import contextlib
import os
import signal
import sys

import psutil
import pytest

from harness.process import nursery
from harness.process.worker import Worker, WorkerError
from tests import evidence

CHILD = (sys.executable, "-m", "tests.without_vllm.fake_child", "engine")


@pytest.fixture
def worker(tmp_path):
    """A function that makes a worker; what it started is gone at the end."""
    made = []

    def make(name="engine", forked=True, **env):
        config = {"model": str(tmp_path), "args": {"dtype": "float32"}}
        made.append(Worker(CHILD, config, tmp_path, name, env, forked=forked))
        return made[-1]

    yield make
    for one in made:
        one.kill()


@pytest.fixture(autouse=True)
def _no_nursery_left():
    yield
    while nursery._nurseries:
        nursery._nurseries.popitem()[1].close()


def job(name):
    rounds = [{"schedule": "alone", "cached": "none", "prompts": [name]}]
    settings = evidence.settings(workload={"rounds": rounds})
    return {"settings": settings, "token_ids": {name: [1, 2, 3]}}


def test_it_answers_as_one_that_was_started_afresh(worker, tmp_path):
    answers = []
    for forked in (True, False):
        one = worker(f"forked-{forked}", forked)
        facts = one.start(30)
        answers.append((facts, one.run(job("fine"), tmp_path / "out.json", 30)))
        one.stop()
    assert answers[0] == answers[1]


def test_one_process_imports_for_all(worker):
    first, second = worker("first"), worker("second", ANY="value")
    for one in (first, second):
        one.start(30)
    (own,) = nursery._nurseries.values()
    parents = {psutil.Process(one._child.pid).parent().ppid() for one in (first, second)}
    assert parents == {own._process.pid}


def test_what_an_import_reads_asks_for_a_process_of_its_own(worker):
    for number in range(nursery._STANDING + 1):
        worker(f"engine{number}", OMP_NUM_THREADS=str(number + 1)).start(30)
    assert len(nursery._nurseries) == nursery._STANDING


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("crash", "the child ended without an answer: exit status 7"),
        ("killed", "killed by SIGKILL; out of memory?"),
        ("raise", "ValueError: the engine could not do it"),
    ],
)
def test_how_it_ended_is_told(worker, tmp_path, name, message):
    one = worker()
    one.start(30)
    with pytest.raises(WorkerError, match=message.replace("?", "[?]")):
        one.run(job(name), tmp_path / "out.json", 30)
    assert not one.running


def test_its_output_goes_to_its_log(worker, tmp_path):
    one = worker()
    one.start(30)
    with pytest.raises(WorkerError) as lost:
        one.run(job("crash"), tmp_path / "out.json", 30)
    assert "something terrible happened" in lost.value.log_tail


def test_it_is_killed_with_what_it_started(worker, tmp_path):
    fifo = tmp_path / "pids"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    one = worker(FAKE_FIFO=str(fifo))
    one.start(30)
    with pytest.raises(WorkerError, match="no answer within 1 s"):
        one.run(job("hang"), tmp_path / "out.json", 1)
    pids = [int(pid) for pid in os.read(reader, 100).split()]
    os.close(reader)
    assert len(pids) == 2
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(10)
        assert not psutil.pid_exists(pid)


def test_a_start_that_is_refused_says_why(worker):
    with pytest.raises(WorkerError, match="pipeline parallelism is not supported"):
        worker(FAKE_START="refuse").start(30)


def test_a_child_whose_imports_touch_a_card_is_started_afresh(worker, tmp_path):
    one = worker(TORCH_FAKE_CUDA="1")
    one.start(30)
    assert isinstance(one.run(job("fine"), tmp_path / "out.json", 30), str)
    (own,) = nursery._nurseries.values()
    assert psutil.Process(one._child.pid).ppid() == os.getpid()
    assert own.alive
    assert "started afresh instead of forked: its imports initialize CUDA" in one.log.read_text()


def test_imports_that_take_too_long_are_a_late_start(worker):
    one = worker()
    with pytest.raises(WorkerError, match="nothing was imported within 0 s") as late:
        one.start(0)
    assert late.value.kind == "start_timeout"


def test_a_nursery_that_ends_while_it_imports_is_a_crash(worker, monkeypatch):
    send = nursery.socket.send_fds

    def send_and_kill(*arguments):
        (own,) = nursery._nurseries.values()
        os.kill(own._process.pid, signal.SIGSTOP)
        send(*arguments)
        os.kill(own._process.pid, signal.SIGKILL)

    monkeypatch.setattr(nursery.socket, "send_fds", send_and_kill)
    with pytest.raises(WorkerError, match="the process that forks children is gone") as crash:
        worker().start(30)
    assert crash.value.kind == "crashed"


def test_its_id_is_no_other_process_until_it_is_let_go(worker):
    one = worker()
    one.start(30)
    child = psutil.Process(one._child.pid)
    child.kill()
    assert one._child.wait(10)
    assert child.status() == psutil.STATUS_ZOMBIE
    one.kill()
    child.wait(10)
    assert not psutil.pid_exists(child.pid)


def test_a_nursery_that_is_gone_is_told_and_replaced(worker):
    worker("first").start(30)
    (own,) = nursery._nurseries.values()
    os.kill(own._process.pid, signal.SIGKILL)
    own._process.wait()
    worker("second").start(30)
