# SPDX-License-Identifier: Apache-2.0
"""The server's context manager, with a program that stands in for vLLM's."""

import importlib.metadata
import json
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.serving import server
from harness.serving.server import Server, ServerError, flags, serve_command

FAKE = Path(__file__).with_name("fake_server.py")
LONGEST_S = 30


class Witness:
    """Sees what the fake server was started with, and when it and its child are gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)
        self._reader = os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK)

    def server(self, mode: str, **options: Any) -> Server:
        command = [sys.executable, str(FAKE), mode, str(self.fifo)]
        return Server(self._folder / "model", self._folder / "log", command=command, **options)

    def arguments(self) -> list[str]:
        return json.loads(self._read())

    def all_gone(self) -> bool:
        """Whether nobody holds the other end any more, within the time that killing takes."""
        while self._read():
            pass
        return True

    def close(self) -> None:
        os.close(self._reader)

    def _read(self) -> bytes:
        assert select.select([self._reader], [], [], LONGEST_S)[0], "a process lives on"
        return os.read(self._reader, 1 << 16)


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Witness]:
    seen = Witness(tmp_path)
    yield seen
    seen.close()


def test_a_server_runs_within_its_block_and_is_gone_after_it(witness: Witness):
    with witness.server("serve", arguments=["--dtype=float32"]) as running:
        assert running.healthy()
        model, host, port, name, *others = witness.arguments()
        assert model.endswith("/model")
        assert host == "--host=127.0.0.1"
        assert running.base_url == f"http://127.0.0.1:{port.removeprefix('--port=')}"
        assert name == f"--served-model-name={running.model}"
        assert others == ["--dtype=float32"]
        assert "loading the model" in running.tail()
    assert not running.healthy()
    assert witness.all_gone()


def test_the_defaults_make_a_server_of_the_parsers(witness: Witness):
    with witness.server("serve"):
        assert {"--reasoning-parser=metis", "--tool-call-parser=metis"} < set(witness.arguments())


def test_a_failing_block_ends_the_server_too(witness: Witness):
    with pytest.raises(ZeroDivisionError), witness.server("serve"):
        raise ZeroDivisionError
    assert witness.all_gone()


def test_a_server_that_does_not_end_is_killed(witness: Witness, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "STOP_S", 0.1)
    with witness.server("stubborn"):
        pass
    assert witness.all_gone()


@pytest.mark.parametrize(
    ("mode", "ending"),
    [
        ("refuse", "the server ended: exit status 3; end of"),
        ("crash", r"the server ended: killed by SIGKILL; out of memory\?; end of"),
    ],
)
def test_a_server_that_dies_at_its_start_is_reported_with_its_log(
    witness: Witness, mode: str, ending: str
):
    with pytest.raises(ServerError, match=ending) as error, witness.server(mode):
        pass
    assert "loading the model" in str(error.value)
    assert mode == "crash" or str(error.value).endswith("ValueError: no such model")
    assert witness.all_gone()


def test_a_server_that_is_never_ready_is_reported_and_gone(witness: Witness):
    late = witness.server("unhealthy", start_s=1)
    with pytest.raises(ServerError, match=r"not ready after 1 s; end of .*log:\nloading"), late:
        pass
    assert witness.all_gone()


def test_arguments_of_the_engine_become_options_of_the_server():
    args = {"max_model_len": 64, "enforce_eager": True, "enable_prefix_caching": False}
    assert flags(args | {"compilation_config": {"cudagraph_mode": "FULL"}}) == [
        "--max-model-len=64",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        '--compilation-config={"cudagraph_mode": "FULL"}',
    ]


def test_a_server_can_be_asked_to_stop_and_watched(witness: Witness):
    with witness.server("serve") as running:
        assert running.alive
        assert os.getpgid(running.pid) == running.pid
        assert running.ask_to_stop()
        assert not running.alive
    with pytest.raises(RuntimeError, match="not running"):
        _ = running.pid


def test_the_command_is_vllms_own_or_what_stands_for_it(monkeypatch: pytest.MonkeyPatch):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.31.0")
    assert serve_command()[1:] == ["-m", "vllm.entrypoints.cli.main", "serve"]
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert serve_command()[1:] == ["-m", "vllm.entrypoints.openai.api_server", "--model"]
