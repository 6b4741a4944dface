# SPDX-License-Identifier: Apache-2.0
"""A child that stands in for the engine, or for the reference, in tests of what runs them.

As the engine it does what the first prompt of a job's first round is called: `fine`, `wrong_token`,
`nan`, `raise`, `hang`, `crash`, `killed`, `garbage`, `half`, `silent`. How it starts is in the
environment variable FAKE_START. With FAKE_FIFO it writes its own and a grandchild's process id
there before it hangs. With TORCH_FAKE_CUDA its import has initialized a card's driver.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

from harness.process import child_loop
from tests.evidence import VOCABULARY, engine_facts, fake_observation, fake_scores

if os.environ.get("TORCH_FAKE_CUDA"):
    ctypes.CDLL = lambda name: SimpleNamespace(cuDeviceGetCount=lambda count: 0)  # type: ignore


class Reply(BaseModel, extra="allow"):
    """Any JSON object."""


def _hang() -> None:
    if fifo := os.environ.get("FAKE_FIFO"):
        grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        Path(fifo).write_text(f"{os.getpid()} {grandchild.pid}\n")
    threading.Event().wait()


def _misbehave(name: str, job: dict[str, Any]) -> None:
    if name == "raise":
        raise ValueError("the engine could not do it")
    if name == "hang":
        _hang()
    if name == "crash":
        print("something terrible happened", flush=True)
        os._exit(7)
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "garbage":
        os.write(int(os.environ["FAKE_REPLY_FD"]), b"this is no answer\n")
        _hang()
    if name in {"half", "empty"}:
        whole = fake_observation(job["settings"], job["token_ids"]).model_dump_json()
        Path(job["out"]).write_text(whole[: len(whole) // 2] if name == "half" else "")
        os.write(int(os.environ["FAKE_REPLY_FD"]), _done(job))
        _hang()
    if name == "silent":
        os.close(int(os.environ["FAKE_REPLY_FD"]))
        time.sleep(60)


def _done(job: dict[str, Any]) -> bytes:
    return (json.dumps({"event": "done", "out": job["out"]}) + "\n").encode()


def engine(config: dict[str, Any]) -> tuple[dict[str, Any], child_loop.Handler]:
    """Build a fake engine."""
    start = os.environ.get("FAKE_START", "fine")
    with Path(config["model"], "starts").open("a") as file:
        file.write("start\n")
    if start == "refuse":
        raise ValueError("pipeline parallelism is not supported")
    if start == "assert":
        assert not start
    if start == "crash":
        os._exit(3)
    if start == "hang":
        _hang()

    def handle(job: dict[str, Any]) -> BaseModel:
        name = job["settings"]["workload"]["rounds"][0]["prompts"][0]
        _misbehave(name, job)
        return fake_observation(job["settings"], job["token_ids"])

    return engine_facts(config["args"]).model_dump(), handle


def reference(config: dict[str, Any]) -> tuple[dict[str, Any], child_loop.Handler]:
    """Build a fake reference: its checkpoint is the folder above the run's cache."""
    folder = Path(config["cache"])
    folder.mkdir(parents=True, exist_ok=True)

    def handle(job: dict[str, Any]) -> BaseModel:
        if job["do"] == "checkpoint":
            return Reply(
                served=str(folder), source=str(folder), sha256="0" * 64, vocab_size=VOCABULARY
            )
        if job["do"] == "render":
            return Reply(token_ids=[10, 11, 12])
        return Reply(scores=[fake_scores(s).model_dump() for s in job["sequences"]])

    return {}, handle


if __name__ == "__main__":
    os.environ["FAKE_REPLY_FD"] = os.environ[child_loop.REPLY_FD]
    child_loop.main({"engine": engine, "reference": reference}[sys.argv.pop(1)])
