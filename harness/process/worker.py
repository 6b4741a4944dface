# SPDX-License-Identifier: Apache-2.0
"""A child that answers jobs: started, asked, timed out, and killed with everything it started.

Its answers come on a pipe of their own (harness/process/child_loop.py); its stdout and stderr go to a
log whose end is shown when it fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from harness.evidence.record import FailureKind
from harness.files import write_atomic
from harness.process.child_loop import REPLY_FD
from harness.process.group import ProcessGroup, tail_of
from harness.process.nursery import REPOSITORY, UnforkableError, nursery

_LONGEST_ANSWER = 1 << 20  # bytes; answers name files, what is longer is not an answer
_END_S = 20.0
"""Longest that an idle child may take to end by itself."""
# How often a silent child is looked at: one killed from outside may leave its pipe open in a
# process that it forked, so the pipe's end alone does not tell.
_POLL_S = 0.5

_Reply = TypeVar("_Reply")


class WorkerError(RuntimeError):
    """A child did not do its job; `kind` says how, `log_tail` is the end of its log."""

    def __init__(self, kind: FailureKind, message: str, log_tail: str = ""):
        super().__init__(message)
        self.kind: FailureKind = kind
        self.log_tail = log_tail


class Worker:
    """One child process and the files of its jobs.

    Args:
        command: what to run; the path of the configuration is appended.
        config: the configuration, written as JSON beside the log.
        folder: where configuration, log and job outputs go.
        name: the stem of those files.
        env: environment variables laid over this process's own.
        forked: fork it from a process that has done its imports, where it is a `python -m` and they
            can be shared.
    """

    def __init__(
        self,
        command: Sequence[str],
        config: Mapping[str, Any],
        folder: Path,
        name: str,
        env: Mapping[str, str],
        forked: bool = False,
    ):
        self.log = folder / f"{name}.log"
        self._command = [*command, str(folder / f"{name}.config.json")]
        self._config = config
        self._env = {**os.environ, **env}
        self._forked = forked and self._command[:2] == [sys.executable, "-m"]
        self._child: ProcessGroup | None = None
        self._answers: int | None = None
        self._pending = b""
        self._busy = False

    @property
    def running(self) -> bool:
        """Whether the child has been started and not been stopped or lost."""
        return self._child is not None

    def start(self, timeout_s: float) -> dict[str, Any]:
        """Start the child and return the facts that it reports once ready.

        Raises:
            WorkerError: refused (it said why), crashed, start_timeout or garbage; the child is
            gone.
        """
        write_atomic(Path(self._command[-1]), json.dumps(self._config, indent=1))
        self._busy = True  # until its answer is here: one left in the middle is killed, not asked
        read_end, write_end = os.pipe()
        try:
            self._child = self._begin(write_end, timeout_s)
        except (TimeoutError, ConnectionError) as error:  # of what was to fork it
            os.close(read_end)
            kind: FailureKind = "start_timeout" if isinstance(error, TimeoutError) else "crashed"
            raise WorkerError(kind, str(error), tail_of(self.log)) from error
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._answers, self._pending = read_end, b""
        answer = self._answer(timeout_s, "start_timeout")
        if answer.get("event") == "refused":
            raise self._lost("refused", str(answer.get("message")))
        if answer.get("event") != "ready" or not isinstance(answer.get("facts"), dict):
            raise self._lost("garbage", f"expected a line that says it is ready, found {answer}")
        facts: dict[str, Any] = answer["facts"]
        return facts

    def run(self, job: Mapping[str, Any], out: Path, timeout_s: float) -> str:
        """Have one job done and return what the child wrote to `out`.

        Raises:
            WorkerError: failed (it said why), crashed, timeout or garbage; the child is gone.
        """
        out.unlink(missing_ok=True)
        child = self._started()
        self._busy = True
        try:
            self._send({**job, "out": str(out)})
        except BrokenPipeError:
            raise self._lost("crashed", f"the child is gone: {child.ending}") from None
        answer = self._answer(timeout_s, "timeout")
        if answer.get("event") == "failed":
            raise self._lost("failed", str(answer.get("message")))
        if answer != {"event": "done", "out": str(out)}:
            raise self._lost(
                "garbage", f"expected a line that names {out.name} as done, found {answer}"
            )
        try:
            return out.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise self._lost(
                "garbage", f"{out.name} was announced but cannot be read: {error}"
            ) from error

    def ask(
        self, job: Mapping[str, Any], out: Path, timeout_s: float, model: type[_Reply] | Any
    ) -> _Reply:
        """Have one job done and return its answer as `model`, any type that pydantic validates.

        Raises:
            WorkerError: as `run`, and garbage where the answer is of another form; the child is
            gone and `out` left to look at.
        """
        text = self.run(job, out, timeout_s)
        try:
            reply: _Reply = TypeAdapter(model).validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise self._lost(
                "garbage",
                f"{out.name}: {error.error_count()} faults, "
                f"the first at {place or 'the top'}: {first['msg']}",
            ) from error
        out.unlink()
        return reply

    def stop(self) -> None:
        """Say farewell to an idle child and wait; kill what is left of the process group."""
        if self._child is None:
            return
        try:
            if not self._busy:
                with contextlib.suppress(BrokenPipeError):
                    self._send({})
                    self._child.wait(_END_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the process group and reap the child."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        if self._answers is not None:
            os.close(self._answers)
            self._answers = None

    def _begin(self, reply: int, timeout_s: float) -> ProcessGroup:
        if self._forked:
            _, _, module, *arguments = self._command
            found = nursery(module, self._env)
            try:
                return found.spawn(arguments, self.log, self._env, (REPLY_FD, reply), timeout_s)
            except UnforkableError as error:
                with self.log.open("a") as log:
                    print(f"started afresh instead of forked: {error}", file=log)
        return ProcessGroup.start(
            self._command,
            self.log,
            {**self._env, REPLY_FD: str(reply)},
            append=True,
            cwd=REPOSITORY,
            listens=True,
            pass_fds=(reply,),
        )

    def _send(self, message: Mapping[str, Any]) -> None:
        stdin = self._started().stdin
        stdin.write(json.dumps(message).encode() + b"\n")
        stdin.flush()

    def _answer(self, timeout_s: float, late: FailureKind) -> dict[str, Any]:
        """Return the next line from the child, as JSON."""
        child, answers = self._started(), self._answers
        assert answers is not None
        self._busy = True  # until it is here: a child left in the middle is not said goodbye
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(answers, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._lost(late, f"no answer within {timeout_s:g} s")
                dead = not child.alive
                if selector.select(0 if dead else min(left, _POLL_S)):
                    piece = os.read(answers, 65536)
                    self._pending += piece
                    if piece and len(self._pending) <= _LONGEST_ANSWER:
                        continue
                    if piece:
                        raise self._lost(
                            "garbage", f"an answer of more than {_LONGEST_ANSWER} bytes"
                        )
                    # It closed its answers: give it the time to exit, so that its status can be told.
                    child.wait(_END_S)
                    dead = True
                if dead:
                    how = child.ending
                    raise self._lost("crashed", f"the child ended without an answer: {how}")
        self._busy = False
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._lost("garbage", f"expected a JSON object, found {line[:200]!r}")
        return answer

    def _started(self) -> ProcessGroup:
        if self._child is None:
            raise RuntimeError("the child is not running: call start() first")
        return self._child

    def _lost(self, kind: FailureKind, message: str) -> WorkerError:
        self.kill()
        return WorkerError(kind, message, tail_of(self.log))
