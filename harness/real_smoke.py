# SPDX-License-Identifier: Apache-2.0
"""The child of a smoke matrix: one model that was not made here, in an engine or behind a server.

Run as `python -m harness.real_smoke CONFIG` by harness/run_cells.py. An engine gives the logprobs of
prompts, and scores them with the logits of the model's own Transformers code, which runs in a process
of its own before the engine takes the machine. A server answers chats, and holds streams open for
their times, as clients see them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from pydantic import BaseModel

from harness import job_loop, served
from harness.corpus import FIRST_ORDINARY_TOKEN
from harness.matrix import digest
from harness.measurements import PromptObservation, ServedObservation, TimingObservation
from harness.model_folder import configuration, fingerprint, vocab_size
from harness.records import Corpus, Reference
from harness.server import started_for_cells

_TOP = 20  # likeliest tokens of a position


class Evidence(BaseModel):
    """What a cell's record holds of it."""

    observation: PromptObservation | ServedObservation | TimingObservation
    corpus: Corpus | None = None
    reference: Reference | None = None


def build(config: dict[str, Any]) -> tuple[dict[str, Any], job_loop.Handler]:
    """Start what a group of cells shares, an engine or a server.

    Args:
        config: `settings` of one of the cells, `model` (its folder), `logits` (a file, written where
            it is not there), `matrix`, `on_card` and `server_log`.
    """
    serve = config["settings"]["engine"]["serve"]
    return _build_server(config) if serve else _build_engine(config)


def _build_engine(config: dict[str, Any]) -> tuple[dict[str, Any], job_loop.Handler]:
    folder, file = Path(config["model"]), Path(config["logits"])
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "harness", "logits", str(folder), "--out", str(file)]
        subprocess.run([*command, "--matrix", config["matrix"]], check=True)
    from harness.logits import LogitsError, StoredLogits

    stored = StoredLogits(file)
    # The logits of a quantized checkpoint are those of the one that it was made of.
    quantized = "quantization_config" in configuration(folder)
    if not quantized and stored.model != fingerprint(folder):
        raise LogitsError(f"{file} holds the logits of another checkpoint than {folder}")
    from harness.own_engine import OwnEngine

    engine = OwnEngine(str(folder), config["settings"]["engine"]["args"])

    def handle(job: dict[str, Any]) -> BaseModel:
        started = time.monotonic()
        ids = stored.prompts(job["prompts"])
        prompts = engine.prompt_logprobs(ids, _TOP)
        run_s = time.monotonic() - started
        return Evidence(
            observation=PromptObservation(settings=engine.settings, prompts=prompts, run_s=run_s),
            corpus=Corpus(sha256=digest(ids), token_ids=ids),
            reference=Reference(
                checkpoint_sha256=stored.model,
                requests=[stored.scores(prompt) for prompt in prompts],
            ),
        )

    return {}, handle


def _build_server(config: dict[str, Any]) -> tuple[dict[str, Any], job_loop.Handler]:
    server = started_for_cells(config)  # it is left by the end of this process
    service = served.Service(server.base_url, server.model)
    size = vocab_size(Path(config["model"]))

    def handle(job: dict[str, Any]) -> BaseModel:
        smoke = job["settings"]["smoke"]
        if smoke["check"] == "generation":
            chats = {name: parts[0]["chat"] for name, parts in job["prompts"].items()}
            return Evidence(observation=service.answer(chats, smoke["max_tokens"]))
        draw = Random(smoke["seed"])
        rounds = [
            [_random_ids(draw, smoke["prompt_tokens"], size) for _ in range(smoke["streams"])]
            for _ in range(smoke["rounds"])
        ]
        return Evidence(observation=service.hold_streams(rounds, smoke["max_tokens"]))

    return {}, handle


def _random_ids(draw: Random, length: int, vocab_size: int) -> list[int]:
    """Return a prompt that begins like no other: none hits the prefix cache."""
    return [draw.randrange(FIRST_ORDINARY_TOKEN, vocab_size) for _ in range(length)]


if __name__ == "__main__":
    job_loop.main(build)
