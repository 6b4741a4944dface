# SPDX-License-Identifier: Apache-2.0
"""The child's end of the line protocol that harness/process/worker.py speaks.

A child is started with the path of its configuration. It builds what it serves, then answers jobs
one after another. Jobs arrive as JSON lines on stdin; answers leave as JSON lines on a pipe of
their own, so nothing that a library prints can be taken for an answer. What a job produced is
written to the file that the job names, whole or not at all.

When stdin ends without a farewell the parent is gone, and the child takes its whole process group
with it: an engine must not keep a card's memory because a terminal was closed.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from harness.files import write_atomic

REPLY_FD = "METIS_HARNESS_REPLY_FD"

Handler = Callable[[dict[str, Any]], BaseModel]
Build = Callable[[dict[str, Any]], tuple[dict[str, Any], Handler]]


def main(build: Build) -> None:
    """Serve jobs until the parent says farewell; never returns.

    Args:
        build: takes the configuration; returns facts to report once ready, and the function that
            answers a job.
    """
    answers = os.fdopen(int(os.environ.pop(REPLY_FD)), "w", encoding="utf-8", buffering=1)
    jobs = _read_jobs()

    def answer(event: str, **fields: Any) -> None:
        answers.write(json.dumps({"event": event, **fields}) + "\n")

    try:
        facts, handle = build(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
        traceback.print_exc()
        answer("refused", message=_last_line(error))
        _leave(1)
    answer("ready", facts=facts)
    while (job := jobs.get()) is not None:
        try:
            write_atomic(Path(job["out"]), handle(job).model_dump_json())
        except BaseException as error:  # noqa: BLE001 - as above
            # What raised may have left the engine half way through a step: never go on with it.
            traceback.print_exc()
            answer("failed", message=_last_line(error))
            _leave(1)
        answer("done", out=job["out"])
    _leave(0)


def _read_jobs() -> queue.Queue[dict[str, Any] | None]:
    """A queue that a thread fills from stdin; None is the farewell."""
    jobs: queue.Queue[dict[str, Any] | None] = queue.Queue()
    # A library that asks a question on stdin would take a job for the answer: it finds nothing.
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)

    def read() -> None:
        for line in lines:
            job = json.loads(line)
            jobs.put(job or None)
            if not job:
                return
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=read, name="jobs", daemon=True).start()
    return jobs


def _last_line(error: BaseException) -> str:
    """The type and text of the error that began it: vLLM wraps a fault in several others.

    One without a text, as a bare assertion is, is told by the line that raised it.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip() or _place(error)}"


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "no message, and no line that raised it"
    last = frames[-1]
    return (
        f"no message; raised at {_module(last.filename)}:{last.lineno} in {last.name}: {last.line}"
    )


def _module(file: str) -> str:
    """A source file as it is imported, so that the machine's folders are left out."""
    roots = [os.path.join(path, "") for path in sys.path if path and file.startswith(path)]
    return file.removeprefix(max(roots, key=len, default=""))


def _leave(code: int) -> None:
    """Exit without waiting for threads that an engine may have left behind."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
