# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` as a context manager: a real server process on loopback, watched and cleaned up.

The server runs in a process group of its own, so that no engine outlives the test that started it,
and writes to a log whose end is in every error.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from harness.process.group import ProcessGroup, tail_of

START_S = 300.0
"""Longest start that is waited for. On two cores a tiny model is ready in 25 s."""

STOP_S = 30.0
"""Longest end that is waited for. A server without requests stops in 0.3 s."""

_POLL_S = 0.2  # nothing tells a parent that a server is ready, so it is asked again and again
_HEALTH_S = 5.0  # longest wait for the answer to a health check

CPU_ARGUMENTS = (
    "--enforce-eager",
    "--max-model-len=4096",
    "--max-num-seqs=8",
    "--kv-cache-memory-bytes=536870912",  # vLLM would take most of the machine's memory
    # The worker in the engine's process, as on a card. vLLM would put it into one of its own, and the
    # engine spins while it waits: a second core for nothing.
    "--distributed-executor-backend=uni",
)
CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two servers at once would share one core
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # logprobs would compile a helper: seconds, and g++ needed
    # Without it vLLM takes no `uni` on a CPU. A server's engine has its own process all the same.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
METIS_ARGUMENTS = (
    "--reasoning-parser=metis",
    "--enable-auto-tool-choice",
    "--tool-call-parser=metis",
    "--enable-prompt-tokens-details",
)
# Before a command: the kernel stops it when the process that started it ends, however it ends.
_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM", "--")


class ServerError(RuntimeError):
    """The server did not start; the message ends with the end of its log."""


def serve_command() -> list[str]:
    """Return `vllm serve`, or what stands for it in the CPU distribution.

    The command line of vLLM looks up the version of a distribution named `vllm`, which the CPU build
    is not; its API server module starts the same server.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


def flags(args: Mapping[str, Any]) -> list[str]:
    """Return EngineArgs as options of `vllm serve`."""
    found = []
    for name, value in args.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{option}" if value else f"--no-{option}")
        else:
            text = json.dumps(value) if isinstance(value, dict) else value
            found.append(f"--{option}={text}")
    return found


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server that runs within a `with` block.

    Args:
        model: folder of a checkpoint.
        log: file that the server's output goes to, replaced.
        arguments: command-line options after the address and the name.
        environment: variables on top of this process's.
        command: what to run; the model and the options are appended.
        start_s: longest start that is waited for.

    Attributes:
        base_url, model: what a client needs.
        log: as given.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        arguments: Sequence[str] = (*CPU_ARGUMENTS, *METIS_ARGUMENTS),
        environment: Mapping[str, str] = CPU_ENVIRONMENT,
        command: Sequence[str] | None = None,
        start_s: float = START_S,
    ) -> None:
        self.model = "metis"
        self.log = log
        self._port = free_port()
        self.base_url = f"http://127.0.0.1:{self._port}"
        self._command = [
            *(serve_command() if command is None else command),
            str(model),
            "--host=127.0.0.1",
            f"--port={self._port}",
            f"--served-model-name={self.model}",
            *arguments,
        ]
        self._environment = {**os.environ, **environment}
        self._start_s = start_s
        self._group: ProcessGroup | None = None

    def __enter__(self) -> Self:
        """Start the server and wait until it is ready.

        Raises:
            ServerError: it died or was not ready in time; everything that it started is gone.
        """
        self._group = ProcessGroup.start(self._command, self.log, self._environment)
        try:
            self._await_health(self._group)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def healthy(self) -> bool:
        """Whether the process lives and answers its health check."""
        if not self.alive:
            return False
        # Not through the proxy that this process's environment may name.
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_HEALTH_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    @property
    def alive(self) -> bool:
        """Whether the process runs, healthy or not."""
        return self._group is not None and self._group.alive

    @property
    def pid(self) -> int:
        """The process id, which is its group's too.

        Raises:
            RuntimeError: it does not run.
        """
        if self._group is None:
            raise RuntimeError("the server is not running")
        return self._group.pid

    def ask_to_stop(self) -> bool:
        """Send SIGTERM to the server's process group; return whether the server ended in time.

        What it leaves behind can be looked at before `stop` removes it.
        """
        if self._group is None or not self._group.alive:
            return True
        self._group.send(signal.SIGTERM)
        return self._group.wait(STOP_S)

    def tail(self) -> str:
        """Return the end of the log."""
        return tail_of(self.log)

    def stop(self) -> None:
        """Stop the server and every process that it started; one that has stopped stays so."""
        group = self._group
        if group is None:
            return
        try:
            self.ask_to_stop()
        finally:
            self._group = None
            group.kill()

    def _await_health(self, group: ProcessGroup) -> None:
        deadline = time.monotonic() + self._start_s
        while not self.healthy():
            if group.wait(_POLL_S):
                raise ServerError(f"the server ended: {group.ending}; {self._end_of_log()}")
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the server was not ready after {self._start_s:g} s; {self._end_of_log()}"
                )

    def _end_of_log(self) -> str:
        return f"end of {self.log}:\n{self.tail()}"


def started_for_cells(
    model: Path, log: Path, args: Mapping[str, Any], start_s: float, on_card: bool
) -> Server:
    """Return a running server with the engine that a matrix's cells share; `stop` ends it.

    It ends with this process too, whose environment it takes.

    Args:
        model: folder of a checkpoint.
        log: file that the server's output goes to.
        args: the cells' engine arguments; on a CPU, over what one needs.
        start_s: longest start that is waited for.

    Raises:
        ServerError: it did not start.
    """
    server = Server(
        model,
        log,
        (*METIS_ARGUMENTS, *(() if on_card else CPU_ARGUMENTS), *flags(args)),
        environment={},
        command=(*_WITH_PARENT, *serve_command()),
        start_s=start_s,
    )
    return server.__enter__()
