# SPDX-License-Identifier: Apache-2.0
"""The reference child: builds checkpoints, renders chats, scores tokens with the port.

Run as `python -m harness.scoring.child CONFIG` by harness/scoring/client.py, so that neither torch
nor a model lives in the process of pytest. Scoring is teacher-forced: one forward pass of the port
over the prompt and the candidate's tokens gives, for each generated position, the distribution after
the same prefix. References that differ in rounding only (harness/scoring/rounding.py) say what the
served precision errs by there, and inside the prompt. Passes are kept on disk by the content that
determines them, because most cells of a matrix generate the same tokens.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from pydantic import BaseModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from harness.checkpoints.folder import configuration
from harness.checkpoints.quantize import quantize_checkpoint
from harness.checkpoints.tokenizer import read_tokenizer, render
from harness.checkpoints.write import write_checkpoint
from harness.evidence.scores import PromptFloor, RequestScores
from harness.files import digest
from harness.judging.tolerance import precision
from harness.process import child_loop
from harness.reference.modeling_metis16 import Metis16ForCausalLM, load_reference
from harness.scoring import rounding
from harness.scoring.replies import Checkpoint, Rendering, Scored
from harness.scoring.scores import prompt_floor, roundings, score

_SEED = 1
_PASSES = [_SEED, rounding.JITTERED, rounding.ORDERS, "FP8 on load: a scale a tensor"]
"""What else decides what is on the disk."""
_TOKENS_AT_ONCE = 4096  # of rows of one pass: a scan holds (heads, 256, 256) values a row


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
            return Rendering(token_ids=render(_tokenizer(job["folder"]), job["chat"]))
        return Scored(scores=[self._score(job, sequence) for sequence in job["sequences"]])

    def _checkpoint(self, wanted: dict[str, Any]) -> Checkpoint:
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
        return Checkpoint(
            served=str(served),
            source=str(source),
            sha256=_weights_sha256(served),
            vocab_size=configuration(source)["vocab_size"],
        )

    def _score(self, job: dict[str, Any], sequence: dict[str, Any]) -> RequestScores:
        """Return the scores of one sequence, from the disk where the same passes were made before."""
        prompt, tokens = sequence["prompt_token_ids"], sequence["token_ids"]
        key = digest([job["sha256"], job["precision"], prompt, tokens, _PASSES])
        file = self._cache / "passes" / f"{key}.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):  # whoever else needs the same passes waits for them
            if not file.exists():
                passes, floor = _passes(job["folder"], job["precision"], prompt, tokens)
                part = file.with_suffix(f".{os.getpid()}.part")
                save_file(passes, part, metadata={"floor": floor})
                part.replace(file)
        stored: Any = safe_open(file, framework="pt")
        reference, *others = (
            score(stored.get_tensor(name), tokens, sequence["top_token_ids"])
            for name in ("reference", *map(str, range(len(stored.keys()) - 1)))
        )
        return RequestScores(
            reference=reference,
            port=others[0] if precision(job["precision"]).has_ties else None,
            prompt_floor=PromptFloor.model_validate_json(stored.metadata()["floor"]),
            roundings=roundings(reference, others),
        )


def _passes(
    folder: str, precision_name: str, prompt: list[int], tokens: list[int]
) -> tuple[dict[str, Tensor], str]:
    """Return logits before each generated token, (T, V), FP32, and the prompt's floor.

    Returns:
        `reference`, and by their number those that differ in rounding only; the floor as JSON.
    """
    inside = len(prompt) - 1  # positions whose next token belongs to the prompt
    token_ids = torch.tensor(prompt + tokens[:-1])
    reference = _logits(_port(folder, "fp32"), token_ids[None])[0]
    others = _others(folder, precision_name, token_ids)
    floor = prompt_floor(reference[:inside], [other[:inside] for other in others])
    passes = {"reference": reference, **{str(n): other for n, other in enumerate(others)}}
    passes = {name: logits[inside:].contiguous() for name, logits in passes.items()}
    return passes, floor.model_dump_json()


def _others(folder: str, precision_name: str, token_ids: Tensor) -> list[Tensor]:
    """Return logits (T, V) of the references that differ in rounding only, the plain port first."""
    if not precision(precision_name).has_ties:
        return [
            _logits(_reordered(folder, *order), token_ids[None])[0] for order in rounding.ORDERS
        ]
    port = _logits(_port(folder, precision_name), token_ids[None])
    model, draw = _jittered(folder, precision_name)
    draw.manual_seed(_SEED)
    rows = max(1, min(rounding.JITTERED, _TOKENS_AT_ONCE // len(token_ids)))
    batches = torch.zeros(rounding.JITTERED).split(rows)
    jittered = [_logits(model, token_ids.expand(len(batch), -1)) for batch in batches]
    return list(torch.cat([port, *jittered]))


@torch.inference_mode()
def _logits(model: Metis16ForCausalLM, token_ids: Tensor) -> Tensor:
    """Return logits (B, T, V), FP32, of sequences (B, T)."""
    logits: Tensor = model(token_ids).logits
    return logits.float()


@functools.lru_cache(maxsize=4)
def _port(folder: str, precision_name: str) -> Metis16ForCausalLM:
    return _load(folder, precision_name)


@functools.lru_cache(maxsize=4)
def _reordered(folder: str, parts: int, chunk: int) -> Metis16ForCausalLM:
    model = _load(folder, "fp32")
    rounding.reorder(model, parts, chunk)
    return model


@functools.lru_cache(maxsize=2)
def _jittered(folder: str, precision_name: str) -> tuple[Metis16ForCausalLM, torch.Generator]:
    model = _load(folder, precision_name)
    draw = rounding.jitter(model)
    if precision(precision_name).fp8_scale == "tensor":
        rounding.in_company(model, draw)
    return model, draw


def _load(folder: str, precision_name: str) -> Metis16ForCausalLM:
    wanted = precision(precision_name)
    model = load_reference(folder, dtype=getattr(torch, wanted.dtype))
    model.simulate_fp8(wanted.fp8_scale)
    return model


@functools.lru_cache(maxsize=4)
def _tokenizer(folder: str) -> Any:
    return read_tokenizer(folder)


def _weights_sha256(folder: Path) -> str:
    total = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as data:
            while block := data.read(1 << 24):
                total.update(block)
    return total.hexdigest()


def build(config: dict[str, Any]) -> tuple[dict[str, Any], child_loop.Handler]:
    """Make the scorer of a run; `config` has the `cache` folder."""
    return {"torch": torch.__version__}, Scorer(Path(config["cache"])).handle


if __name__ == "__main__":
    child_loop.main(build)
