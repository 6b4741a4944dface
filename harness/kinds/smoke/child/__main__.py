# SPDX-License-Identifier: Apache-2.0
"""The child of a smoke matrix: one model that was not made here, in an engine or behind a server.

Run as `python -m harness.kinds.smoke.child CONFIG` by harness/run/cells.py. An engine gives the
logprobs of prompts, and scores them with the logits of the model's own Transformers code, which runs
in a process of its own before the engine takes the machine. A server answers chats, and holds streams
open for their times, as clients see them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from pydantic import BaseModel

from harness.checkpoints.folder import configuration, fingerprint, vocab_size
from harness.evidence.record import Corpus, Gathered
from harness.evidence.scores import Reference
from harness.files import digest
from harness.kinds.smoke.child.served import Client
from harness.kinds.smoke.observation import (
    PromptObservation,
    ServedObservation,
    TimingObservation,
)
from harness.kinds.smoke.settings import GenerationCheck, SmokeSettings, TimingCheck
from harness.process import child_loop
from harness.prompts.corpus import random_tokens
from harness.prompts.parts import PromptPart
from harness.serving.server import started_for_cells

_TOP = 20  # likeliest tokens of a position


def build(config: dict[str, Any]) -> tuple[dict[str, Any], child_loop.Handler]:
    """Start what a group of cells shares, an engine or a server.

    Args:
        config: `settings` of one of the cells, `model` (its folder), `logits` (a file, written where
            it is not there), `matrix`, `on_card` and `server_log`.
    """
    settings = SmokeSettings.model_validate(config["settings"])
    if settings.engine.serve:
        return _build_server(config, settings)
    return _build_engine(config, settings)


def _build_engine(
    config: dict[str, Any], settings: SmokeSettings
) -> tuple[dict[str, Any], child_loop.Handler]:
    folder, file = Path(config["model"]), Path(config["logits"])
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "harness", "logits", str(folder), "--out", str(file)]
        subprocess.run([*command, "--matrix", config["matrix"]], check=True)
    from harness.scoring.logits import LogitsError, StoredLogits

    stored = StoredLogits(file)
    # The logits of a quantized checkpoint are those of the one that it was made of.
    quantized = "quantization_config" in configuration(folder)
    if not quantized and stored.model != fingerprint(folder):
        raise LogitsError(f"{file} holds the logits of another checkpoint than {folder}")
    from harness.engine import Engine, for_any_machine
    from harness.kinds.smoke.child.again import asked_again

    engine = Engine(str(folder), for_any_machine(settings.engine.args))

    def handle(job: dict[str, Any]) -> BaseModel:
        started = time.monotonic()
        ids = stored.prompts(job["prompts"])
        prompts = engine.prompt_logprobs(ids, _TOP)
        asked = SmokeSettings.model_validate(job["settings"])
        return Gathered[PromptObservation](
            observation=PromptObservation(
                settings=engine.facts,
                prompts=prompts,
                repetitions=asked_again(engine, asked, ids, _TOP),
                run_s=time.monotonic() - started,
            ),
            corpus=Corpus(sha256=digest(ids), token_ids=ids),
            reference=Reference(
                checkpoint_sha256=stored.model,
                requests=[stored.scores(prompt) for prompt in prompts],
            ),
        )

    return {}, handle


def _build_server(
    config: dict[str, Any], settings: SmokeSettings
) -> tuple[dict[str, Any], child_loop.Handler]:
    server = started_for_cells(  # it is left by the end of this process
        Path(config["model"]),
        Path(config["server_log"]),
        settings.engine.args,
        settings.timeout.start_s,
        config["on_card"],
    )
    client = Client(server.base_url, server.model)
    size = vocab_size(Path(config["model"]))

    def handle(job: dict[str, Any]) -> BaseModel:
        check = SmokeSettings.model_validate(job["settings"]).smoke
        if isinstance(check, GenerationCheck):
            chats = {name: _chat(parts) for name, parts in job["prompts"].items()}
            answered = client.answer(chats, check.max_tokens)
            return Gathered[ServedObservation](observation=answered)
        assert isinstance(check, TimingCheck)
        draw = Random(check.seed)
        rounds = [
            [random_tokens(draw, check.prompt_tokens, size) for _ in range(check.streams)]
            for _ in range(check.rounds)
        ]
        held = client.hold_streams(rounds, check.max_tokens)
        return Gathered[TimingObservation](observation=held)

    return {}, handle


def _chat(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the chat that a prompt is."""
    chat = PromptPart.model_validate(parts[0]).chat
    if chat is None or len(parts) > 1:
        raise ValueError(f"a server is asked chats, and this prompt is {parts}")
    return chat.as_written()


if __name__ == "__main__":
    child_loop.main(build)
