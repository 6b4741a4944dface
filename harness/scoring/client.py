# SPDX-License-Identifier: Apache-2.0
"""The runner's side of the reference child (harness/scoring/child.py): started when first asked, and
asked for the same checkpoint or rendering only once.

It sees no card, so that every cell is held against the same arithmetic.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from harness.evidence.scores import Reference
from harness.files import digest, kept_folder
from harness.process.worker import Worker
from harness.scoring.replies import Checkpoint, Rendering, Scored

_START_S = 120.0
_JOB_S = 600.0  # building a taught checkpoint is the longest job

_Reply = TypeVar("_Reply", bound=BaseModel)


class ReferenceChild:
    """Builds checkpoints, renders chats and scores tokens in a process of its own.

    Args:
        command: what to run.
        cache: folder of the checkpoints that it makes; passes outlive the run, in `kept_folder`.
        logs: folder of its log and answers.
        env: environment variables laid over this process's own.
    """

    def __init__(
        self, command: Sequence[str], cache: Path, logs: Path, env: Mapping[str, str]
    ) -> None:
        self._command, self._cache, self._logs, self._env = command, cache, logs, env
        self._worker: Worker | None = None
        self._checkpoints: dict[str, Checkpoint] = {}
        self._renderings: dict[str, list[int]] = {}

    def checkpoint(self, wanted: dict[str, Any]) -> Checkpoint:
        """Return the checkpoint that a cell's `checkpoint` settings describe."""
        key = digest(wanted)
        if key not in self._checkpoints:
            job = {"do": "checkpoint", "checkpoint": wanted}
            self._checkpoints[key] = self._ask(job, Checkpoint)
        return self._checkpoints[key]

    def render(self, folder: str, chat: dict[str, Any]) -> list[int]:
        """Return a chat as the token ids that the checkpoint's template makes of it."""
        key = digest([folder, chat])
        if key not in self._renderings:
            job = {"do": "render", "folder": folder, "chat": chat}
            self._renderings[key] = self._ask(job, Rendering).token_ids
        return self._renderings[key]

    def score(
        self, precision: str, checkpoint: Checkpoint, sequences: Sequence[Mapping[str, Any]]
    ) -> Reference:
        """Return the scores of sequences, in their order.

        Args:
            sequences: of each, `prompt_token_ids`, the candidate's `token_ids` (T,) and its
                `top_token_ids` (T, K).
        """
        job = {
            "do": "score",
            "folder": checkpoint.source,
            "sha256": checkpoint.sha256,
            "precision": precision,
            "sequences": [dict(one) for one in sequences],
        }
        scores = self._ask(job, Scored).scores
        return Reference(checkpoint_sha256=checkpoint.sha256, requests=scores)

    def stop(self) -> None:
        """Stop the child if it was started."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _ask(self, job: dict[str, Any], model: type[_Reply]) -> _Reply:
        name = f"reference-{os.getpid()}"  # each of xdist's processes has one
        if self._worker is None or not self._worker.running:
            self._worker = Worker(
                self._command,
                {"cache": str(self._cache), "passes": str(kept_folder() / "passes")},
                self._logs,
                name,
                {**self._env, "CUDA_VISIBLE_DEVICES": ""},
            )
            self._worker.start(_START_S)
        return self._worker.ask(job, self._logs / f"{name}.reply.json", _JOB_S, model)
