# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` as a context manager: a real server process on loopback, watched and cleaned up.

The server runs in a process group of its own, so that no engine outlives the test that
started it, and writes to a log whose tail is in every error.
"""

import contextlib
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

START_S = 300.0
"""Longest start that is waited for. On two cores a tiny model is ready in 25 s."""

STOP_S = 30.0
TAIL_LINES = 40

CPU_ARGUMENTS = (
    "--enforce-eager",
    "--max-model-len=4096",
    "--max-num-seqs=8",
    "--kv-cache-memory-bytes=536870912",  # vLLM would take most of the machine's memory
)
CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two servers at once would share one core
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # logprobs would compile a helper: seconds, and g++ needed
}
METIS_ARGUMENTS = (
    "--reasoning-parser=metis",
    "--enable-auto-tool-choice",
    "--tool-call-parser=metis",
    "--enable-prompt-tokens-details",
)


class ServerError(RuntimeError):
    """The server did not start or died; the message ends with the tail of its log."""


def serve_command() -> list[str]:
    """Return `vllm serve`, or what stands for it in the CPU distribution.

    The command line of vLLM looks up the version of a distribution named `vllm`, which the
    CPU build is not; its API server module starts the same server.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A running server; `base_url` and `model` are what a client needs.

    Args:
        model: Folder of a checkpoint.
        log: File that the server's output goes to, replaced.
        arguments: Command-line options after the defaults of a CPU and of Metis-1.6.
        environment: Variables on top of this process's.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        arguments: Sequence[str] = (*CPU_ARGUMENTS, *METIS_ARGUMENTS),
        environment: Mapping[str, str] = CPU_ENVIRONMENT,
    ) -> None:
        self.model = "metis"
        self.log = log
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._command = [
            *serve_command(),
            str(model),
            "--host=127.0.0.1",
            f"--port={self.port}",
            f"--served-model-name={self.model}",
            *arguments,
        ]
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self._await_health()
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

    def tail(self) -> str:
        """Return the last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def healthy(self) -> bool:
        """Whether the process lives and answers its health check."""
        assert self._process is not None
        if self._process.poll() is not None:
            return False
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _await_health(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_S
        while not self.healthy():
            if self._process.poll() is not None:
                raise ServerError(
                    f"the server exited with code {self._process.returncode}; end of {self.log}:\n"
                    f"{self.tail()}"
                )
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the server was not ready after {START_S:.0f} s; end of {self.log}:\n"
                    f"{self.tail()}"
                )
            # Nothing tells a parent that a server is ready: poll, as vLLM's own tools do.
            time.sleep(0.2)

    def stop(self) -> None:
        """Stop the server and every process it started."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # the whole group is gone
            os.killpg(self._process.pid, number)
