# SPDX-License-Identifier: Apache-2.0
"""The reference child: builds checkpoints, renders chats, scores tokens with the port.

Run as `python -m harness.scorer CONFIG` by harness/run_cells.py, so that neither torch nor a model
lives in the process of pytest. Scoring is teacher-forced: one forward pass of the port over the
prompt and the candidate's tokens gives, for each generated position, the distribution after the
same prefix, and what the served precision errs by inside the prompt. Passes are kept on disk by the
content that determines them, because most cells of a matrix generate the same tokens.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock
from pydantic import BaseModel
from transformers import PreTrainedTokenizerFast

from harness import job_loop, metrics
from harness.checkpoint import write_checkpoint
from harness.matrix import digest
from harness.quantize import quantize_checkpoint
from harness.records import PromptFloor, RequestScores, Scores
from harness.reference import Metis16ForCausalLM, load_reference
from harness.tolerance import precision

_TOP = 20  # tokens of a position inside a prompt, as many as cells ask of generated ones


class CheckpointReply(BaseModel):
    """A checkpoint: what the engine serves, and the unquantized one that the reference reads."""

    served: str
    source: str
    sha256: str
    vocab_size: int


class RenderReply(BaseModel):
    """A rendered chat."""

    token_ids: list[int]


class ScoreReply(BaseModel):
    """Scores in the order of the sequences asked for."""

    scores: list[RequestScores]


class Scorer:
    """Answers jobs; everything it makes lies under one cache folder.

    Args:
        cache: folder shared by all children of a run.
    """

    def __init__(self, cache: Path):
        self._cache = cache

    def handle(self, job: dict[str, Any]) -> BaseModel:
        """Answer one job by its `do`."""
        if job["do"] == "checkpoint":
            return self._checkpoint(job["checkpoint"])
        if job["do"] == "render":
            return _render(job["folder"], job["chat"])
        return ScoreReply(scores=[self._score(job, sequence) for sequence in job["sequences"]])

    def _checkpoint(self, wanted: dict[str, Any]) -> CheckpointReply:
        plain = {key: value for key, value in wanted.items() if key != "quantize"}
        source = self._cache / "checkpoints" / f"{wanted['shape']}-{digest(plain)[:12]}"
        source.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{source}.lock"):
            if not source.exists():
                write_checkpoint(source, **plain)
        served = source
        if wanted["quantize"] != "none":
            served = source.with_name(f"{source.name}-{wanted['quantize']}")
            with FileLock(f"{served}.lock"):
                if not served.exists():
                    with_out_proj = wanted["quantize"] == "fp8_with_out_proj"
                    quantize_checkpoint(source, served, with_out_proj)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        return CheckpointReply(
            served=str(served),
            source=str(source),
            sha256=_weights_sha256(served),
            vocab_size=config["vocab_size"],
        )

    def _score(self, job: dict[str, Any], sequence: dict[str, Any]) -> RequestScores:
        """Scores of one sequence, from the disk where the same passes were made before."""
        prompt, tokens = sequence["prompt_token_ids"], sequence["token_ids"]
        key = digest([job["sha256"], job["precision"], prompt, tokens])
        file = self._cache / "passes" / f"{key}.npz"
        if not file.exists():
            passes = _passes(job["folder"], job["precision"], prompt, tokens)
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}.part")
            with part.open("wb") as out:
                np.savez(out, **passes)
            part.replace(file)
        with np.load(file) as passes:
            floor = str(passes["floor"])
            return RequestScores(
                reference=_scores(passes["reference"], sequence),
                port=_scores(passes["port"], sequence) if "port" in passes else None,
                prompt_floor=PromptFloor.model_validate_json(floor) if floor else None,
            )


def _passes(
    folder: str, precision_name: str, prompt: list[int], tokens: list[int]
) -> dict[str, Any]:
    """Logits before each generated token, (T, V), of the FP32 port and of the one in the precision.

    Returns:
        `reference` and, where the precision has a floor, `port`; `floor` is the prompt's as JSON,
        or "".
    """
    inside = len(prompt) - 1  # positions whose next token belongs to the prompt
    reference = _logits(folder, "fp32", prompt + tokens[:-1])
    if not precision(precision_name).has_floor:
        return {"reference": reference[inside:], "floor": ""}
    port = _logits(folder, precision_name, prompt + tokens[:-1])
    floor = _prompt_floor(reference[:inside], port[:inside])
    return {
        "reference": reference[inside:],
        "port": port[inside:],
        "floor": floor.model_dump_json(),
    }


def _logits(folder: str, precision_name: str, token_ids: list[int]) -> npt.NDArray[np.float32]:
    with torch.inference_mode():
        logits = _port(folder, precision_name)(torch.tensor([token_ids])).logits[0]
    exact: npt.NDArray[np.float32] = logits.float().numpy()
    return exact


def _prompt_floor(reference: npt.NDArray[np.float32], port: npt.NDArray[np.float32]) -> PromptFloor:
    """What the port errs by inside a prompt, on its own best tokens, as if it generated there."""
    if not len(reference):
        nothing = dict.fromkeys(metrics.FLOORED, 0.0)
        return PromptFloor(positions=0, maximum=nothing, mean=nothing)
    exact, rounded = _log_softmax(reference), _log_softmax(port)
    best = np.argsort(-rounded, axis=-1)[:, :_TOP]
    exact, rounded = (np.take_along_axis(x, best, axis=-1) for x in (exact, rounded))
    errors = {
        name: function(exact[:, 0], rounded[:, 0])
        if field == "logprobs"
        else function(exact, rounded)
        for name, (function, field) in metrics.FLOORED.items()
    }
    return PromptFloor(
        positions=len(exact),
        maximum={name: float(values.max()) for name, values in errors.items()},
        mean={name: float(values.mean()) for name, values in errors.items()},
    )


def _scores(logits: npt.NDArray[np.float32], sequence: dict[str, Any]) -> Scores:
    logprobs = _log_softmax(logits)
    rows = np.arange(len(logits))
    argmax = logits.argmax(axis=-1)
    top = np.asarray(sequence["top_token_ids"])
    return Scores(
        logprobs=logprobs[rows, sequence["token_ids"]].tolist(),
        top_logprobs=np.take_along_axis(logprobs, top, axis=-1).tolist(),
        argmax=argmax.tolist(),
        argmax_logprobs=logprobs[rows, argmax].tolist(),
        max_abs_logit=np.abs(logits).max(axis=-1).tolist(),
    )


@functools.lru_cache(maxsize=4)
def _port(folder: str, precision_name: str) -> Metis16ForCausalLM:
    wanted = precision(precision_name)
    model = load_reference(folder, dtype=getattr(torch, wanted.dtype))
    model.simulate_fp8(wanted.simulate_fp8)
    return model


@functools.lru_cache(maxsize=4)
def _tokenizer(folder: str) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder)  # AutoTokenizer would want remote code


def _render(folder: str, chat: dict[str, Any]) -> RenderReply:
    tokenizer = _tokenizer(folder)
    text = tokenizer.apply_chat_template(
        chat["messages"],
        tools=chat.get("tools"),
        enable_thinking=chat["enable_thinking"],
        add_generation_prompt=True,
        tokenize=False,
    )
    return RenderReply(token_ids=tokenizer.encode(text, add_special_tokens=False))


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _weights_sha256(folder: Path) -> str:
    total = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as data:
            while block := data.read(1 << 24):
                total.update(block)
    return total.hexdigest()


def build(config: dict[str, Any]) -> tuple[dict[str, Any], job_loop.Handler]:
    """Make the scorer of a run; `config` has the `cache` folder."""
    return {"torch": torch.__version__}, Scorer(Path(config["cache"])).handle


if __name__ == "__main__":
    job_loop.main(build)
