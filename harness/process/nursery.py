# SPDX-License-Identifier: Apache-2.0
"""Children forked from a process that has imported what they import.

Importing vLLM takes 17 s of a slow core, two thirds of a tiny engine's start, and a run starts dozens.
A nursery imports a child's module once; each child is a fork of it that runs that module as `python -m`
does, in a session of its own, with the environment, files and arguments that it was given. One nursery
serves the children whose environment is the same as far as imports read it.

CUDA does not survive a fork, so a nursery whose imports touched a card says so instead of forking;
vLLM's own do not, as its engines are forked too.

    this process ──arguments, environment, files──> nursery ──fork──> keeper ──fork──> child
                 <───────────── the child's pid, how it ended ────────── keeper
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from harness.process.group import ProcessGroup

_READ_AT_IMPORT = (
    *("HOME", "PATH", "PYTHON", "LD_", "TMPDIR", "XDG_", "OMP_", "MKL_", "OPENBLAS_"),
    *("CUDA_", "NCCL_", "HF_", "PYTORCH_", "TORCH", "TRITON_", "VLLM_"),
)
"""Beginnings of the names of variables that a library reads when it is imported."""
_STANDING = 2  # nurseries at once; one takes 500 MB
_LONGEST = 1 << 20  # bytes of a request
_NUMBER = 4  # bytes of what a keeper tells
_NO_CHILD = 0  # told instead of its pid
_CUDA_ERROR_NOT_INITIALIZED = 3  # of the driver's interface
REPOSITORY = Path(__file__).resolve().parents[2]
"""Where children run."""


class UnforkableError(Exception):
    """What was imported cannot be shared by a fork."""


class ForkedGroup(ProcessGroup):
    """A child of a nursery, under the interface of one that was started afresh."""

    def __init__(self, process: _ForkedProcess, log: Path) -> None:
        super().__init__(process, log)
        self._forked = process

    def kill(self) -> None:
        """Kill every process of the group, and let the first one's id go."""
        super().kill()
        self._forked.release()


class _ForkedProcess:
    """As much of `subprocess.Popen` as a process group needs, for what another process has forked.

    Args:
        pid: its process id, and its group's.
        status: pipe on which its keeper tells how it ended.
        stdin: pipe to it.
    """

    def __init__(self, pid: int, status: int, stdin: int) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = os.fdopen(stdin, "wb")
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            told = _told(self._status)
            self.returncode = -signal.SIGKILL if told is None else told  # its keeper was killed
        return self.returncode

    def release(self) -> None:
        """Have it reaped: until then no other process gets its id."""
        os.close(self._status)


class Nursery:
    """A process that has imported a module, and forks children that run it.

    Args:
        module: what `python -m` would be given.
        environment: its own; a child's may differ in what no import reads.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what imports say; a child that cannot import says it again
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                cwd=REPOSITORY,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def spawn(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        reply: tuple[str, int],
        timeout_s: float,
    ) -> ForkedGroup:
        """Fork a child; the first one waits for the imports.

        Args:
            arguments: what follows the module on the command line.
            log: file that its stdout and stderr are appended to.
            reply: a variable of its environment, and the file descriptor that it is to name there.

        Raises:
            TimeoutError: the imports take longer.
            ConnectionError: the nursery is gone.
            UnforkableError: the imports touched a card.
        """
        stdin, to_child = os.pipe()
        from_keeper, status = os.pipe()
        wanted = {"arguments": list(arguments), "environment": dict(environment), "reply": reply[0]}
        try:
            try:
                with log.open("ab") as output:
                    files = [stdin, output.fileno(), reply[1], status]
                    socket.send_fds(self._socket, [json.dumps(wanted).encode()], files)
            finally:
                os.close(stdin)
                os.close(status)
            if not select.select([from_keeper], [], [], timeout_s)[0]:
                raise TimeoutError(f"nothing was imported within {timeout_s:g} s")
            if (pid := _told(from_keeper)) is None:
                raise ConnectionError("the process that forks children is gone")
            if pid == _NO_CHILD:
                raise UnforkableError("its imports initialize CUDA, which no fork survives")
        except BaseException:
            os.close(from_keeper)
            os.close(to_child)  # a child that comes all the same finds nobody, and ends
            raise
        return ForkedGroup(_ForkedProcess(pid, from_keeper, to_child), log)

    @property
    def alive(self) -> bool:
        """Whether it can fork."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the nursery; the children that it forked go on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


_nurseries: dict[tuple[str, frozenset[tuple[str, str]]], Nursery] = {}


def nursery(module: str, environment: Mapping[str, str]) -> Nursery:
    """Return the nursery of a module's children with that environment, started where there is none."""
    read = {name: v for name, v in environment.items() if name.startswith(_READ_AT_IMPORT)}
    key = module, frozenset(read.items())
    found = _nurseries.pop(key, None)
    if found is None or not found.alive:
        found = Nursery(module, read)
    _nurseries[key] = found  # the last that was used
    while len(_nurseries) > _STANDING:
        _nurseries.pop(next(iter(_nurseries))).close()
    return found


def _main(module: str, fd: int) -> None:
    """Import, then fork a keeper for each request until the parent is gone."""
    _load(module)
    forks = not _cuda_is_initialized()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers leave nothing behind
    with socket.socket(fileno=fd) as requests:
        while True:
            wanted, files, _, _ = socket.recv_fds(requests, _LONGEST, 4)
            if not wanted:
                return
            if not forks:
                _tell(files[-1], _NO_CHILD)
            elif os.fork() == 0:
                requests.close()
                _keep(module, json.loads(wanted), files)
            for file in files:
                os.close(file)


def _load(module: str) -> None:
    """Import what `python -m MODULE` runs; one that cannot be imported says so in its child."""
    with contextlib.suppress(Exception):
        package = hasattr(importlib.import_module(module), "__path__")
        if package:
            importlib.import_module(f"{module}.__main__")


def _cuda_is_initialized() -> bool:
    """Whether this process has initialized CUDA, by the driver: PyTorch knows only of its own part."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no card
        return False
    count = ctypes.c_int()
    return driver.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_ERROR_NOT_INITIALIZED


def _keep(module: str, wanted: dict[str, Any], files: list[int]) -> NoReturn:
    """Fork the child and tell its pid, then how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *theirs, status = files
    child = os.fork()
    if child == 0:
        os.close(status)
        _be(module, wanted, *theirs)
    for file in theirs:
        os.close(file)
    _tell(status, child)
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    _tell(status, code)
    released = select.poll()
    released.register(status, 0)  # the other end is closed
    released.poll()
    os._exit(0)


def _tell(pipe: int, number: int) -> None:
    """Write a number to a pipe; whoever asked may have gone since."""
    with contextlib.suppress(BrokenPipeError):
        os.write(pipe, number.to_bytes(_NUMBER, "little", signed=True))


def _told(pipe: int) -> int | None:
    """Return the next number from a pipe; None at its end."""
    told = os.read(pipe, _NUMBER)
    return int.from_bytes(told, "little", signed=True) if told else None


def _be(module: str, wanted: dict[str, Any], stdin: int, output: int, reply: int) -> NoReturn:
    """Become the child: run the module as `python -m` does."""
    os.setsid()
    for file, standard in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(file, standard)
    os.close(stdin)
    os.close(output)
    os.environ.clear()
    os.environ.update(wanted["environment"], **{wanted["reply"]: str(reply)})
    sys.argv = [module, *wanted["arguments"]]
    for name in (module, f"{module}.__main__"):
        sys.modules.pop(name, None)  # it is run, not imported
    code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:  # noqa: BLE001 - it ends here, and its log says why
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
