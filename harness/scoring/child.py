# SPDX-License-Identifier: Apache-2.0
"""The reference child: builds checkpoints, renders chats, scores tokens with the port.

Run as `python -m harness.scoring.child CONFIG` by harness/scoring/client.py, so that neither torch
nor a model lives in the process of pytest. Scoring is teacher-forced: a forward pass of the port over the
candidate's tokens, from the state after the prompt, gives the distribution after the same prefix for
each generated position. References that differ in rounding only (harness/scoring/rounding.py) say what
the served precision errs by there, and inside the prompt. Passes are kept on disk by what determines
them, their code too, because most cells of a matrix generate the same tokens, as does the next run;
where a near tie is decided otherwise, the prompt at least has been read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
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
from harness.files import digest, sources_sha256
from harness.judging.tolerance import precision
from harness.process import child_loop
from harness.reference.modeling_metis16 import (
    Metis16Cache,
    Metis16ForCausalLM,
    load_reference,
)
from harness.scoring import rounding
from harness.scoring.replies import Checkpoint, Rendering, Scored
from harness.scoring.scores import prompt_floor, roundings, score

_SEED = 1
_JITTERED_CHUNK = 64  # a sixth less work than with 256
_KEPT_S = 7 * 86400  # passes that no run has read for a week go
_TOKENS_AT_ONCE = 4096  # of rows of one pass: a scan holds (heads, 256, 256) values a row
_PROMPTS = 40  # whose states are kept, of `tiny` with 1000 tokens 22 MB each

PASSES_MADE_BY = [
    Path(__file__).parents[1] / name
    for name in (
        *("reference", "scoring", "judging/metrics.py", "judging/tolerance.py"),
        *("evidence/base.py", "evidence/scores.py"),
    )
]
"""The code that decides what a pass is, and the floor that is kept beside it."""


class Scorer:
    """Answers jobs.

    Args:
        cache: folder of checkpoints, shared by all children of a run.
        passes: folder of passes, shared by all runs of a user.
    """

    def __init__(self, cache: Path, passes: Path):
        self._cache, self._passes = cache, passes
        passes.mkdir(parents=True, exist_ok=True)
        for file in passes.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another child was first
                if time.time() - file.stat().st_mtime > _KEPT_S:
                    file.unlink()

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
        made_by = [torch.__version__, torch.backends.cpu.get_cpu_capability(), _code_sha256()]
        key = digest([job["sha256"], job["precision"], prompt, tokens, made_by])
        file = self._passes / f"{key}.safetensors"
        with FileLock(f"{file}.lock"):  # whoever else needs the same passes waits for them
            if file.exists():
                file.touch()
            else:
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


class _Reader:
    """A reference that reads a prompt: sequences that begin with it go on from there.

    Args:
        rows: of a batch whose rows differ by what jitter draws.
        draw, seed: what jitter is drawn from, and how it begins.
    """

    def __init__(
        self,
        model: Metis16ForCausalLM,
        rows: int = 1,
        draw: torch.Generator | None = None,
        seed: int = _SEED,
    ):
        self._model, self._rows, self._draw, self._seed = model, rows, draw, seed
        self._cache = Metis16Cache()

    def read(self, prompt: list[int]) -> Tensor:
        """Return the logits before each token of the prompt but the first, (rows, n - 1, V), FP32."""
        logits = self._logits(prompt, self._cache)
        self._last = logits[:, -1:].clone()
        for state in self._cache.states.values():  # views of what was computed on the way
            state |= {name: tensor.clone() for name, tensor in state.items()}
        return logits[:, :-1]

    def before(self, tokens: list[int]) -> Tensor:
        """Return the logits before each of these tokens, (rows, T, V), FP32."""
        if len(tokens) == 1:
            return self._last
        cache = Metis16Cache()
        cache.states = {place: dict(state) for place, state in self._cache.states.items()}
        return torch.cat([self._last, self._logits(tokens[:-1], cache)], dim=1)

    @torch.inference_mode()
    def _logits(self, token_ids: list[int], cache: Metis16Cache) -> Tensor:
        if self._draw is not None:
            self._draw.manual_seed(self._seed)
        ids = torch.tensor(token_ids).expand(self._rows, -1)
        logits: Tensor = self._model(ids, past_key_values=cache).logits
        return logits


@functools.lru_cache(maxsize=_PROMPTS)
def _read(
    folder: str, precision_name: str, prompt: tuple[int, ...]
) -> tuple[list[_Reader], PromptFloor]:
    """Return the FP32 reference and those that differ in rounding, after a prompt, and its floor."""
    token_ids = list(prompt)
    readers = [_Reader(_port(folder, "fp32"))]
    if precision(precision_name).has_ties:
        readers.append(_Reader(_port(folder, precision_name)))
        model, draw = _jittered(folder, precision_name)
        rows = max(1, min(rounding.JITTERED, _TOKENS_AT_ONCE // len(token_ids)))
        for first in range(0, rounding.JITTERED, rows):
            batch = min(rows, rounding.JITTERED - first)
            readers.append(_Reader(model, batch, draw, _SEED + first))
    else:
        readers += [_Reader(_reordered(folder, *order)) for order in rounding.ORDERS]
    reference, *others = (row for reader in readers for row in reader.read(token_ids))
    return readers, prompt_floor(reference, others)


def _passes(
    folder: str, precision_name: str, prompt: list[int], tokens: list[int]
) -> tuple[dict[str, Tensor], str]:
    """Return logits before each generated token, (T, V), FP32, and the prompt's floor.

    Returns:
        `reference`, and by their number those that differ in rounding only; the floor as JSON.
    """
    readers, floor = _read(folder, precision_name, tuple(prompt))
    reference, *others = torch.cat([reader.before(tokens) for reader in readers])
    passes = {"reference": reference, **{str(n): other for n, other in enumerate(others)}}
    return {name: one.contiguous() for name, one in passes.items()}, floor.model_dump_json()


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
    rounding.scan_in_chunks(model, _JITTERED_CHUNK)
    if precision(precision_name).fp8_scale == "tensor":
        rounding.in_company(model, draw)
    return model, draw


def _load(folder: str, precision_name: str) -> Metis16ForCausalLM:
    wanted = precision(precision_name)
    model = load_reference(folder, dtype=getattr(torch, wanted.dtype))
    model.simulate_fp8(wanted.fp8_scale)
    return model


@functools.cache
def _code_sha256() -> str:
    return sources_sha256(PASSES_MADE_BY)


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
    """Make the scorer of a run; `config` has the folders `cache` and `passes`."""
    scorer = Scorer(Path(config["cache"]), Path(config["passes"]))
    return {"torch": torch.__version__}, scorer.handle


if __name__ == "__main__":
    child_loop.main(build)
