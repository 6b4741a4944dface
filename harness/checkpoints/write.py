# SPDX-License-Identifier: Apache-2.0
"""`python -m harness checkpoint OUT`: a checkpoint laid out like the release, tiny or full size.

Its weights are random (`layout.py`) or taught a set of conversations (`taught.py`), its names are
the training runtime's or any that a release may use (`spelling.py`). The folder is complete: sizes,
generation defaults, tokenizer, chat template and remote code. Whatever the size, no more than one
shard is held in memory.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from harness.checkpoints.layout import ReleasedTensor, draw, release_layout
from harness.checkpoints.shapes import SHAPES, SHARED
from harness.checkpoints.spelling import (
    AXES,
    Spelling,
    SpellingError,
    StoredTensor,
    respell,
    respell_config,
)
from harness.checkpoints.taught import TeachingError, taught_weights
from harness.checkpoints.tokenizer import write_tokenizer
from harness.reference import configuration_metis16, modeling_metis16, sublayers_metis16
from harness.reference.configuration_metis16 import CONSTANTS, Metis16Config

SHARD_BYTES = 2**30
# Teaching trains every weight on the CPU.
TEACHABLE = ("tiny",)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_GENERATION = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "eos_token_id": [0, 4],
    "pad_token_id": 1,
}
# The remote code: the reference's own files, under the names that `auto_map` gives them.
_REMOTE_CODE = {
    "configuration_metis16.py": configuration_metis16,
    "sublayers_metis16.py": sublayers_metis16,
    "modeling_metis16.py": modeling_metis16,
}
_AUTO_MAP = {
    "AutoConfig": "configuration_metis16.Metis16Config",
    "AutoModelForCausalLM": "modeling_metis16.Metis16ForCausalLM",
}


class UnwritableError(ValueError):
    """A checkpoint that cannot be written as it is asked for; the message says what can."""


def config_of(shape: str) -> dict[str, Any]:
    """Return the sizes of a shape, as config.json names them."""
    if shape not in SHAPES:
        raise UnwritableError(f"unknown shape {shape}: allowed are {', '.join(SHAPES)}")
    return CONSTANTS | SHARED | SHAPES[shape]


def write_checkpoint(
    folder: Path | str,
    shape: str = "tiny",
    dtype: str = "float32",
    seed: int = 0,
    spelling: Spelling | None = None,
    taught: bool = False,
    overwrite: bool = False,
    *,
    cache: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint and return its folder; the same seed is the same model in every spelling.

    Args:
        folder: appears only once complete.
        dtype: of what is not FP32 always; the values are BF16's in both, so the model is the same.
        spelling: the training runtime's where left out.
        taught: overfitted on the scripted conversations instead of random; minutes, then cached.
        cache: the folder of taught weights; METIS_CACHE or ~/.cache/vllm-metis where left out.
        shard_bytes: a larger checkpoint is split into shards of at most this (one tensor at least).
    Raises:
        UnwritableError: the folder is not empty and not to be overwritten, or an unknown shape or
            one too large to be taught.
        TeachingError: the model did not learn its script.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        raise UnwritableError(f"{folder} is not empty; pass --overwrite to replace it")
    values = config_of(shape)
    config = Metis16Config(**values)
    spelling = spelling or Spelling()
    source = _taught_source(shape, seed, cache) if taught else partial(draw, seed=seed)
    tensors = _stored_tensors(config, DTYPES[dtype], source)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        _write_weights(scratch, list(respell(tensors, config, spelling)), shard_bytes)
        _write_companions(scratch, values, dtype, spelling)
        scratch.chmod(0o755)
        _replace(folder, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _taught_source(shape: str, seed: int, cache: Path | None) -> Callable[[ReleasedTensor], Tensor]:
    if shape not in TEACHABLE:
        raise UnwritableError(f"{shape} is too large to be taught: use {' or '.join(TEACHABLE)}")
    weights = taught_weights(config_of(shape), seed, cache)
    return lambda spec: weights[spec.name]


def _stored_tensors(
    config: Metis16Config, dtype: torch.dtype, source: Callable[[ReleasedTensor], Tensor]
) -> Iterator[StoredTensor]:
    def stored(spec: ReleasedTensor) -> StoredTensor:
        kept = torch.float32 if spec.fp32 else dtype
        return StoredTensor(spec.name, spec.shape, kept, lambda: source(spec).to(kept))

    for spec in release_layout(config):
        tensor = stored(spec)
        yield tensor
        if spec.name == "embedding.weight":
            # A copy, as the release stores it; safetensors refuses tensors that share memory.
            yield tensor.rows("lm_head.weight", 0, config.vocab_size)


def _write_weights(folder: Path, tensors: list[StoredTensor], shard_bytes: int) -> None:
    shards = list(_shards(tensors, shard_bytes))
    total = sum(tensor.nbytes for tensor in tensors)
    weight_map: dict[str, str] = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc=folder.name, disable=None) as progress:
        for number, shard in enumerate(shards, start=1):
            name = "model.safetensors"
            if len(shards) > 1:
                name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            made = {}
            for tensor in shard:
                made[tensor.name] = tensor.make().contiguous()
                progress.update(tensor.nbytes)
            save_file(made, folder / name, metadata={"format": "pt"})
            (folder / name).chmod(0o644)  # safetensors lets only the owner read
            weight_map |= dict.fromkeys(made, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _shards(tensors: Iterable[StoredTensor], shard_bytes: int) -> Iterator[list[StoredTensor]]:
    shard: list[StoredTensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.nbytes
    yield shard


def _write_companions(folder: Path, values: dict[str, Any], dtype: str, spelling: Spelling) -> None:
    head = {"architectures": ["Metis16ForCausalLM"], "model_type": "metis16"}
    rest = {
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": _GENERATION["eos_token_id"],
        "pad_token_id": _GENERATION["pad_token_id"],
        "auto_map": _AUTO_MAP,
    }
    _write_json(folder / "config.json", head | respell_config(values, spelling) | rest)
    _write_json(folder / "generation_config.json", _GENERATION)
    for name, module in _REMOTE_CODE.items():
        shutil.copyfile(inspect.getfile(module), folder / name)
    write_tokenizer(folder, values["vocab_size"])


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _replace(folder: Path, complete: Path) -> None:
    """Put a complete folder in another's place; what was there is gone only afterwards."""
    if not folder.exists():
        os.rename(complete, folder)
        return
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-old-") as aside:
        os.rename(folder, Path(aside) / folder.name)
        os.rename(complete, folder)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    axes = "; ".join(f"{axis}={'|'.join(values)}" for axis, values in AXES.items())
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of what is not FP32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--spelling", default="", metavar="AXIS=VALUE,…", help=f"the first is the default: {axes}"
    )
    parser.add_argument(
        "--taught", action="store_true", help="overfitted on scripted conversations, not random"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="taught weights; $METIS_CACHE or ~/.cache/vllm-metis where left out",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a folder that has files")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and print its folder.

    Returns:
        0, 1 where the model does not learn its script, 2 where this cannot be written.
    """
    try:
        folder = write_checkpoint(
            args.out,
            args.shape,
            args.dtype,
            args.seed,
            Spelling.parse(args.spelling),
            args.taught,
            args.overwrite,
            cache=args.cache,
        )
    except (UnwritableError, SpellingError, TeachingError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, TeachingError) else 2
    print(folder)
    return 0
