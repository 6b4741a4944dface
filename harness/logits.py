# SPDX-License-Identifier: Apache-2.0
"""`python -m harness logits DIR --out FILE`: what a model's own Transformers code computes.

The file holds the prompts of a matrix as token ids and the logits after each token in FP32, so that
an engine elsewhere can be held against them, and those of the same code in BF16, in which the model
is served: their distance is the noise floor that budgets are made of.

The arithmetic of the reference is FP32 always. Where memory does not allow its weights in FP32 they
rest in BF16, in which they are stored, and each module widens its own while it runs.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
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

from harness import corpus, metrics
from harness.judge import EXIT_PASSED, EXIT_USAGE
from harness.matrix import SCHEMA_PATH, Matrix, load_matrix, prompt_names
from harness.measurements import PromptLogprobs
from harness.model_folder import MODEL_VARIABLE, ModelError, fingerprint, model_folder
from harness.records import PromptFloor, RequestScores, Scores
from harness.strict_yaml import MatrixError
from harness.tokenizer import read_tokenizer

MATRIX = SCHEMA_PATH.parent / "real_smoke.yaml"
FORMAT = "metis-logits-1"

_LONGEST_PROMPT = 4096
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


def frozen_prompts(matrix: Matrix, folder: Path) -> dict[str, list[int]]:
    """Return the prompts of a matrix's `parity` cells as token ids.

    Raises:
        CorpusError: a prompt is empty or too long.
    """
    tokenizer = read_tokenizer(folder)

    def render(chat: dict[str, Any]) -> list[int]:
        text = tokenizer.apply_chat_template(
            chat["messages"],
            tools=chat.get("tools"),
            enable_thinking=chat["enable_thinking"],
            add_generation_prompt=True,
            tokenize=False,
        )
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    cells = [cell for cell in matrix.cells if cell.settings["smoke"]["check"] == "parity"]
    return corpus.freeze(
        matrix.prompts,
        {name for cell in cells for name in prompt_names(cell.settings)},
        block_size=1,
        vocab_size=len(tokenizer),
        longest=_LONGEST_PROMPT,
        render=render,
    ).token_ids


def write_logits(folder: Path, out: Path, prompts: Mapping[str, list[int]]) -> None:
    """Compute the logits of every prompt and write them; the file appears when it is whole."""
    weights = torch.float32 if _fits(folder) else torch.bfloat16
    tensors = {f"{name}.token_ids": torch.tensor(ids) for name, ids in prompts.items()}
    model = _load(folder, weights)
    widen_while_running(model)
    tensors |= _logits(model, prompts, "logits", f"FP32, weights at rest in {weights}")
    del model  # before the next one is loaded
    tensors |= _logits(_load(folder, torch.bfloat16), prompts, "bf16_logits", "BF16")
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
    """Return `<prompt>.<kind>`, (n, V), float32: row i is the distribution after token i."""
    progress = tqdm(prompts.items(), desc=f"logits in {precision}", disable=None)
    return {
        f"{name}.{kind}": model(torch.tensor([ids])).logits[0].float().contiguous()
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
        nothing = dict.fromkeys(metrics.FLOORED, 0.0)
        return RequestScores(
            reference=self._scores(observed, "logits"),
            port=self._scores(observed, "bf16_logits"),
            prompt_floor=PromptFloor(positions=0, maximum=nothing, mean=nothing),
        )

    def _scores(self, observed: PromptLogprobs, kind: str) -> Scores:
        logits = self._file.get_tensor(f"{observed.prompt}.{kind}")[:-1].double()  # (T, V)
        logprobs = logits.log_softmax(-1)
        best = logprobs.max(-1)
        own = torch.tensor(observed.token_ids)[:, None]
        return Scores(
            logprobs=logprobs.gather(-1, own)[:, 0].tolist(),
            top_logprobs=logprobs.gather(-1, torch.tensor(observed.top_token_ids)).tolist(),
            argmax=best.indices.tolist(),
            argmax_logprobs=best.values.tolist(),
            max_abs_logit=logits.abs().amax(-1).tolist(),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m harness logits`."""
    parser.add_argument(
        "folder", type=Path, nargs="?", metavar="DIR", help=f"a checkpoint; or ${MODEL_VARIABLE}"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="*.safetensors")
    parser.add_argument(
        "--matrix", type=Path, default=MATRIX, help="whose prompts; default real_smoke.yaml"
    )


def run(args: argparse.Namespace) -> int:
    """Write the file and print its name; 2 where folder or matrix will not do."""
    try:
        folder = model_folder(args.folder, "logits DIR")
        prompts = frozen_prompts(load_matrix(args.matrix), folder)
        write_logits(folder, args.out, prompts)
    except (ModelError, MatrixError, corpus.CorpusError) as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    print(args.out)
    return EXIT_PASSED
