# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_metis check DIR`: would this checkpoint load, without reading a weight.

Reads config.json and the headers of the safetensors files, runs the checkpoint's audit
over them, then builds the model on the meta device and loads the headers' tensors into it
through the same code as the server. Seconds for a checkpoint of any size.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from tabulate import tabulate

if TYPE_CHECKING:
    from vllm_metis.config import Metis16Config

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of the safetensors format."""

PARTS = (
    ("routed experts", r"\.experts\."),
    ("shared experts", r"\.shared_expert\."),
    ("latent projections", r"\.latent_(up|down)\."),
    ("routers", r"\.(expert_router|selection_bias|expert_embeddings)"),
    ("attention", r"\.mixer\.(qkv|[qkv]_proj|o_proj|pass_)"),
    ("Mamba", r"\.mixer\.mamba\."),
    ("hyper-connections", r"_connection\."),
    ("depth memory", r"\.(depth_memory|continuation)\."),
    ("embedding and head", r"(embed_tokens|lm_head)\."),
    ("other", r""),
)
"""Rows of the printed table and the tensors that belong to each, first match."""


def read_header(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of one safetensors file on the meta device, by name.

    Raises:
        ValueError: The file is not safetensors, is cut short, or has an unknown dtype.
    """
    try:
        # As for NumPy, it maps the file alone; for PyTorch it would reserve memory of that size.
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in list(file.keys())}
            header = {name: (one.get_shape(), one.get_dtype()) for name, one in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {_what_is_wrong(path, str(error))}") from error
    unknown = {dtype for _, dtype in header.values()} - set(DTYPES)
    if unknown:
        raise ValueError(f"{path.name}: unknown dtypes {', '.join(sorted(unknown))}")
    return {
        name: torch.empty(shape, dtype=DTYPES[dtype], device="meta")
        for name, (shape, dtype) in header.items()
    }


def _what_is_wrong(path: Path, error: str) -> str:
    """Say what a user can do about a file that safetensors rejects."""
    if "not fully covered" not in error:
        return (
            f"expected a safetensors file, found no readable header ({error}); "
            "if it is one, it is cut short, download it again"
        )
    # The header is sound, and the file ends elsewhere than its last tensor: the one figure that
    # the library does not give is where that is.
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return (
        f"expected {8 + length + max(ends, default=0)} bytes by its header, found "
        f"{path.stat().st_size}; the file is cut short, download it again"
    )


def read_headers(folder: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return every tensor of a checkpoint on the meta device, and what is wrong with its files."""
    faults = []
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())["weight_map"]
        named = sorted(set(index.values()))
        faults += [
            f"{name}: named by {INDEX} and not in the folder; download it again"
            for name in named
            if not (folder / name).is_file()
        ]
        files = [folder / name for name in named if (folder / name).is_file()]
    if not files and not faults:
        faults.append(f"no *.safetensors in {folder}")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= read_header(file)
        except ValueError as error:
            faults.append(str(error))
    return tensors, faults


def part_of(name: str) -> str:
    """Return the row of `PARTS` that a mapped tensor name belongs to."""
    return next(part for part, pattern in PARTS if re.search(pattern, name))


def describe(
    folder: Path, config: Metis16Config, tensors: dict[str, torch.Tensor]
) -> Iterator[str]:
    """Yield the lines of the report: geometry, then bytes and dtypes by part of the model."""
    from vllm_metis.checkpoint.names import MAPPER

    kinds = config.layers_block_type
    yield f"{folder.name}: {config.num_hidden_layers} layers x {config.num_passes} passes"
    yield (
        f"  {kinds.count('mamba')} Mamba-2 ({config.mamba_num_heads} heads of "
        f"{config.mamba_head_dim}, {config.mamba_n_groups} groups, state {config.mamba_d_state}), "
        f"{kinds.count('attention')} attention at {config.attention_layer_indices} "
        f"({config.num_attention_heads} query and {config.num_key_value_heads} KV heads of "
        f"{config.head_dim})"
    )
    yield (
        f"  width {config.hidden_size}, {config.num_streams} streams, latent "
        f"{config.moe_latent_size}, {config.num_experts} experts of {config.moe_intermediate_size} "
        f"(top {config.num_experts_per_tok}), {config.num_shared_experts} shared, vocabulary "
        f"{config.vocab_size}, context {config.max_position_embeddings}"
    )
    size: Counter[str] = Counter()
    dtypes: dict[str, Counter[str]] = {}
    for name, tensor in tensors.items():
        mapped = MAPPER.map_name(name)
        part = "unused heads" if mapped is None else part_of(mapped)
        size[part] += tensor.nbytes
        dtypes.setdefault(part, Counter())[str(tensor.dtype).removeprefix("torch.")] += 1
    rows = [
        (part, size[part], ", ".join(f"{n} {dtype}" for dtype, n in sorted(dtypes[part].items())))
        for part in [*(name for name, _ in PARTS), "unused heads"]
        if part in size
    ]
    rows.append(("all", sum(size.values()), ""))
    table = tabulate(rows, ("part", "bytes", "tensors by dtype"), tablefmt="plain", intfmt=",")
    yield f"\n{textwrap.indent(table, '  ')}"


def load_on_meta(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Build the model on the meta device and load `tensors` as the server would.

    Raises:
        ValueError: Whatever the server would refuse, e.g. `CheckpointError`.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    arguments = EngineArgs(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True
    )
    vllm_config = arguments.create_engine_config()
    vllm_config.model_config.maybe_untie_word_embeddings()
    with tempfile.TemporaryDirectory() as scratch, set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, f"file://{scratch}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(vllm_config.model_config.dtype), torch.device("meta"):
            model = initialize_model(vllm_config)
            model.load_weights(tensors.items())


def check(folder: Path) -> list[str]:
    """Print what a checkpoint holds; return everything that would stop it from loading."""
    from vllm_metis.checkpoint.audit import Audit
    from vllm_metis.config import Metis16Config

    if not (folder / "config.json").is_file():
        return [f"no config.json in {folder}; expected the folder of a checkpoint"]
    try:
        values = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        return [f"config.json: not JSON: {error}"]
    if values.get("model_type") != "metis16":
        return [f"config.json: model_type {values.get('model_type')!r}, expected 'metis16'"]
    config = Metis16Config(**values)
    faults = config.faults()
    tensors, broken = read_headers(folder)
    if faults:
        return faults + broken
    for line in describe(folder, config, tensors):
        print(line)
    audit = Audit(config)
    for name, tensor in tensors.items():
        for _ in audit.admit(name, tensor):
            pass
    if audit.unused:
        print(
            f"\n  unused by name: {', '.join(sorted(audit.unused)[:4])}, ... "
            f"({len(audit.unused)} tensors of heads that Metis-1.6 does not run)"
        )
    faults = broken + audit.faults()
    if not faults:
        try:
            load_on_meta(folder, tensors)
        except ValueError as error:
            faults.append(str(error))
    return faults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of a checkpoint")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 when the checkpoint would load, 1 with every fault printed when it would not."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    faults = check(arguments.folder)
    if faults:
        print(f"\nWould not load, {len(faults)} fault(s):")
        for fault in faults:
            print(f"  - {fault}")
        return 1
    print("\nWould load: every tensor is read or unused by name, every parameter is set.")
    return 0
