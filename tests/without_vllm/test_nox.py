# SPDX-License-Identifier: Apache-2.0
"""What a session of noxfile.py does, with a nox that is played: nox itself is not installed here."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from harness.evidence.verdict import Verdict
from harness.records import store
from tests import evidence

REPOSITORY = Path(__file__).parents[2]


class CommandFailed(Exception):
    """What nox raises when a command exits with another code than 0."""


class SessionError(Exception):
    """What `session.error` raises."""


class Session:
    """Runs the commands of a session with this interpreter, and keeps what it was asked to install."""

    def __init__(self, *posargs: str) -> None:
        self.posargs = list(posargs)
        self.installed: list[tuple[str, ...]] = []

    def install(self, *arguments: str) -> None:
        self.installed.append(arguments)

    def run(self, program: str, *arguments: str) -> None:
        assert program == "python"
        done = subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, check=False)
        if done.returncode:
            raise CommandFailed

    def error(self, text: str) -> None:
        raise SessionError(text)


@pytest.fixture
def noxfile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    played = ModuleType("nox")
    played.options = SimpleNamespace()
    played.session = lambda **_: lambda function: function
    played.Session = Session
    played.command = SimpleNamespace(CommandFailed=CommandFailed)
    played.project = SimpleNamespace(load_toml=lambda _: {}, python_versions=lambda *_, **__: [])
    monkeypatch.setitem(sys.modules, "nox", played)
    spec = importlib.util.spec_from_file_location("noxfile", REPOSITORY / "noxfile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_run(folder: Path, logprob_error: float) -> Path:
    """Write a run of one cell whose verdict, from before, says `pass` whatever the error is."""
    request = evidence.request("p")
    request.logprobs[2] += logprob_error
    record = evidence.record(
        observation=evidence.observation(requests=[request]),
        verdict=Verdict(verdict="pass", reasons=[]),
    )
    store.save_header(evidence.header(record.cell), folder)
    store.save(record, folder)
    return folder


def test_reports_tell_the_verdicts_that_judging_again_came_to(noxfile, tmp_path):
    wrong, right = write_run(tmp_path / "wrong", 0.1), write_run(tmp_path / "right", 0.0)
    session = Session(str(wrong), str(right))
    with pytest.raises(SessionError) as told:
        noxfile.judge(session)
    assert str(told.value) == f"judge {wrong} did not pass"
    assert "1 fail" in (wrong / "report.md").read_text()
    assert "1 pass" in (right / "report.md").read_text()


def test_judging_installs_no_engine(noxfile, tmp_path):
    session = Session(str(write_run(tmp_path / "run", 0.0)))
    noxfile.judge(session)
    assert session.installed == [("--quiet", "--group", "records")]


def test_judging_nothing_is_told(noxfile):
    with pytest.raises(SessionError, match="name the runs"):
        noxfile.judge(Session())
