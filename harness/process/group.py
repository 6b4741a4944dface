# SPDX-License-Identifier: Apache-2.0
"""One process in a group of its own: its log, how it ended, and an end for everything it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

_TAIL_LINES = 40


class Process(Protocol):
    """What a group needs of its first process: as much of `subprocess.Popen`."""

    pid: int
    stdin: IO[bytes] | None

    def poll(self) -> int | None:
        """Return its exit status, minus the signal's number where one ended it; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return that status when it has ended; subprocess.TimeoutExpired where it has not."""


class ProcessGroup:
    """A process that was started, and whatever it starts.

    Args:
        process: the first one, whose id is the group's.
        log: file of its stdout and stderr.
    """

    def __init__(self, process: Process, log: Path) -> None:
        self._process = process
        self.log = log

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        *,
        append: bool = False,
        cwd: Path | None = None,
        listens: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> ProcessGroup:
        """Start a process in a group of its own.

        Args:
            command: what to run.
            log: file of its stdout and stderr.
            env: its whole environment.
            append: go on with the log instead of replacing it.
            cwd: its working directory; None for this process's.
            listens: whether it gets a pipe as stdin; else it finds nothing there.
            pass_fds: file descriptors that it inherits.
        """
        with log.open("ab" if append else "wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if listens else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
            )
        return cls(process, log)

    @property
    def pid(self) -> int:
        """The process id, which is its group's too."""
        return self._process.pid

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe to a process that listens."""
        assert self._process.stdin is not None, "started without a pipe"
        return self._process.stdin

    @property
    def alive(self) -> bool:
        """Whether the process itself runs."""
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to end; return whether it did."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return not self.alive

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every process of the group."""
        with contextlib.suppress(ProcessLookupError):  # all of them are gone
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill every process of the group and reap the first one."""
        self.send(signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            # What is still buffered has no reader any more.
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        status = self._process.poll()
        if status is None:
            return "it goes on running"
        if status < 0:
            hint = "; out of memory?" if -status == signal.SIGKILL else ""
            return f"killed by {signal.Signals(-status).name}{hint}"
        return f"exit status {status}"

    def tail(self) -> str:
        """Return the end of the log."""
        return tail_of(self.log)


def tail_of(log: Path) -> str:
    """Return the end of a log, nothing where there is none."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
