# SPDX-License-Identifier: Apache-2.0
"""A file of what a model's own Transformers code computes, for engines elsewhere.

It holds the prompts of a matrix as token ids and the logits after each token in FP32, so that an
engine elsewhere can be held against them, and those of the same code in BF16, in which the model is
served, plain and with jitter (harness/scoring/rounding.py): their distances are the noise floors that
budgets are made of.

The arithmetic of the reference is FP32 always. Where memory does not allow its weights in FP32 they
rest in BF16, in which they are stored, and each module widens its own while it runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from harness.checkpoints.folder import fingerprint
from harness.evidence.engine import PromptLogprobs
from harness.evidence.scores import RequestScores, Scores
from harness.scoring import rounding
from harness.scoring.scores import prompt_floor, roundings, score

FORMAT = "metis-logits-2"  # 1 had no references with jitter

_HEADROOM = 1.2  # of the weights' size: activations and a copy of the largest tensor while loading


class LogitsError(ValueError):
    """A file of logits that does not hold what is asked of it; the message says how to write one."""


def widen_while_running(model: nn.Module, at_rest: int = 2**20) -> None:
    """Make a BF16 model compute in FP32; large weights stay BF16 but while their module runs.

    Args:
        at_rest: values of the largest weight that is FP32 from here on.
    """

    narrow_at_rest: dict[nn.Module, list[nn.Parameter]] = {}

    def widen(module: nn.Module, _: Any) -> None:
        for parameter in narrow_at_rest[module]:
            parameter.data = parameter.data.float()

    def narrow(module: nn.Module, *_: Any) -> None:
        for parameter in narrow_at_rest[module]:
            parameter.data = parameter.data.bfloat16()  # exact: it was widened from that

    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.dtype == torch.bfloat16]
        narrow_at_rest[module] = [p for p in own if p.numel() > at_rest]
        if narrow_at_rest[module]:
            module.register_forward_pre_hook(widen)
            module.register_forward_hook(narrow)
        for parameter in own:
            if parameter.numel() <= at_rest:
                parameter.data = parameter.data.float()


def write_logits(folder: Path, out: Path, prompts: Mapping[str, list[int]]) -> None:
    """Compute the logits of every prompt and write them; the file appears when it is whole."""
    weights = torch.float32 if _fits(folder) else torch.bfloat16
    tensors = {f"{name}.token_ids": torch.tensor(ids) for name, ids in prompts.items()}
    model = _load(folder, weights)
    widen_while_running(model)
    tensors |= _logits(model, prompts, "logits", f"FP32, weights at rest in {weights}")
    del model  # before the next one is loaded
    served = _load(folder, torch.bfloat16)
    tensors |= _logits(served, prompts, "bf16_logits.0", "BF16")
    draw = rounding.jitter(served)
    for number in range(1, rounding.JITTERED + 1):
        draw.manual_seed(number)
        what = f"BF16 with jitter, {number} of {rounding.JITTERED}"
        tensors |= _logits(served, prompts, f"bf16_logits.{number}", what)
    metadata = {
        "format": FORMAT,
        "model": fingerprint(folder),
        "weights": str(weights).removeprefix("torch."),
    }
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        save_file(tensors, part, metadata=metadata)
        part.chmod(0o644)  # safetensors lets only the owner read
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def _fits(folder: Path) -> bool:
    """Whether memory allows the weights in FP32, beside what they take on their way from disk."""
    values = 0
    for path in folder.glob("*.safetensors"):
        tensors: Any = safe_open(path, framework="pt")
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
        values += sum(math.prod(shape) for shape in shapes)
    return bool(psutil.virtual_memory().available > _HEADROOM * 4 * values)


def _load(folder: Path, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype)
    return model.eval()


@torch.inference_mode()
def _logits(
    model: Any, prompts: Mapping[str, list[int]], kind: str, precision: str
) -> dict[str, Tensor]:
    """Return `<prompt>.<kind>`, (n, V): row i is the distribution after token i.

    Logits that a BF16 head gave are kept in BF16, which holds them as they are.
    """
    progress = tqdm(prompts.items(), desc=f"logits in {precision}", disable=None)
    dtype = torch.float32 if kind == "logits" else torch.bfloat16
    return {
        f"{name}.{kind}": model(torch.tensor([ids])).logits[0].to(dtype).contiguous()
        for name, ids in progress
    }


class StoredLogits:
    """A file that `write_logits` wrote.

    Attributes:
        model: fingerprint of the checkpoint that computed it.

    Raises:
        LogitsError: it is no such file.
    """

    def __init__(self, path: Path):
        file: Any = safe_open(path, framework="pt")
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise LogitsError(
                f"{path}: format {metadata.get('format')}, expected {FORMAT}; "
                "write it with `python -m harness logits DIR --out FILE`"
            )
        self.model: str = metadata["model"]
        self._file = file
        self._prompts: dict[str, list[int]] = {
            name.removesuffix(".token_ids"): file.get_tensor(name).tolist()
            for name in sorted(file.keys())
            if name.endswith(".token_ids")
        }

    def prompts(self, names: Iterable[str]) -> dict[str, list[int]]:
        """Return the token ids of prompts.

        Raises:
            LogitsError: naming those that the file lacks.
        """
        names = list(names)
        if missing := [name for name in names if name not in self._prompts]:
            raise LogitsError(
                f"no logits of prompt {', '.join(missing)}, but of {', '.join(self._prompts)}; "
                "write the file again, with this matrix"
            )
        return {name: self._prompts[name] for name in names}

    def scores(self, observed: PromptLogprobs) -> RequestScores:
        """Return the reference's scores of a prompt's own tokens, after its first."""
        nothing = torch.empty(0, 1)  # every position is scored: none is left for a floor of its own
        reference = self._scores(observed, "logits")
        others = [
            self._scores(observed, f"bf16_logits.{number}")
            for number in range(rounding.JITTERED + 1)
        ]
        return RequestScores(
            reference=reference,
            port=others[0],
            prompt_floor=prompt_floor(nothing, [nothing]),
            roundings=roundings(reference, others),
        )

    def _scores(self, observed: PromptLogprobs, kind: str) -> Scores:
        logits = self._file.get_tensor(f"{observed.prompt}.{kind}")[:-1]  # (T, V)
        return score(logits.float(), observed.token_ids, observed.top_token_ids)
