# SPDX-License-Identifier: Apache-2.0
"""`python -m harness quantize SRC DST`: a BF16 checkpoint to an FP8 compressed-tensors one.

Routed experts, Mamba in_proj and attention qkv and out become E4M3 with one FP32 scale per
output channel (amax / 448); activations are quantized per token at run time. Everything else
is copied bit by bit. Tensors are read, quantized and written one at a time, so a checkpoint
of any size needs the memory of its largest tensor.

Source: docs/model.md, "FP8 checkpoints".
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from tabulate import tabulate
from tqdm import tqdm

from harness.judging.metrics import decibels

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448

KINDS = {
    "experts": r"\.(?:local_)?experts\.(?:\d+\.)?(?:gate_up|down|gate_proj|up_proj|down_proj)",
    "Mamba in_proj": r"\.mixer\..*\bin_proj",
    "attention qkv": r"\.mixer\.(?:qkv|[qkv]_proj|qkv_proj)",
    "attention out": r"\.mixer\.(?:out|o_proj)",
}
"""Kinds of modules that are quantized, and their names in every spelling of a release."""

OUT_PROJ = {"Mamba out_proj": r"\.mixer\..*\bout_proj"}
"""Kept as trained by the release; quantized on request, to measure what that costs."""


@dataclass
class KindReport:
    """What quantization did to one kind of module.

    Attributes:
        signal, noise: Sums of squares of the weights and of their errors.
        worst_sqnr_db: Of the single tensor that suffered most.
    """

    tensors: int = 0
    signal: float = 0.0
    noise: float = 0.0
    worst_sqnr_db: float = float("inf")
    worst: str = ""

    def add(self, name: str, weight: torch.Tensor, restored: torch.Tensor) -> None:
        signal = weight.float().square().sum().item()
        noise = (weight.float() - restored).square().sum().item()
        self.tensors += 1
        self.signal += signal
        self.noise += noise
        sqnr = decibels(signal, noise)
        if sqnr < self.worst_sqnr_db:
            self.worst_sqnr_db, self.worst = sqnr, name


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight to FP8 with one scale per output channel.

    Args:
        weight: (..., out, in), any float dtype.

    Returns:
        The weight (..., out, in), float8_e4m3fn, and the scales (..., out, 1), float32.
    """
    wide = weight.float()
    # A channel of zeros keeps zeros whatever its scale, which must not be zero.
    scale = (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def kind_of(name: str, kinds: dict[str, str]) -> str | None:
    """Return the kind of a tensor that is to be quantized, None for one to copy."""
    end = r"(?:\.weight)?$"
    return next((kind for kind, at in kinds.items() if re.search(at + end, name)), None)


@dataclass
class FileLayout:
    """The tensors of one output file, in order: where they lie and how they are made."""

    source: Path
    header: dict[str, dict[str, Any]] = field(default_factory=dict)
    size: int = 0

    def add(self, name: str, dtype: str, shape: list[int], nbytes: int) -> None:
        end = self.size + nbytes
        self.header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [self.size, end]}
        self.size = end


def weight_name(name: str) -> str:
    """Return the name of the scale beside a weight, stored with or without `.weight`."""
    return f"{name}_scale" if name.endswith(".weight") else f"{name}.weight_scale"


def plan(source: Path, kinds: dict[str, str], scale_axes: int) -> FileLayout:
    """Return the layout of the quantized copy of one safetensors file."""
    layout = FileLayout(source)
    with safe_open(source, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            part = tensors.get_slice(name)
            shape, dtype = part.get_shape(), part.get_dtype()
            count = torch.Size(shape).numel()
            if kind_of(name, kinds) is None:
                width = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}[dtype]
                layout.add(name, dtype, shape, count * width)
                continue
            scale = shape[:-1] + [1] * (scale_axes - 1)
            layout.add(name, "F8_E4M3", shape, count)
            layout.add(weight_name(name), "F32", scale, count // shape[-1] * 4)
    return layout


def pieces(
    layout: FileLayout, kinds: dict[str, str], report: dict[str, KindReport]
) -> Iterator[torch.Tensor]:
    """Yield the tensors of a layout in its order, one in memory at a time."""
    with safe_open(layout.source, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            tensor = tensors.get_tensor(name)
            kind = kind_of(name, kinds)
            if kind is None:
                yield tensor
                continue
            weight, scale = quantize(tensor)
            report[kind].add(name, tensor, weight.float() * scale)
            yield weight
            yield scale


def write(
    file: BinaryIO, layout: FileLayout, tensors: Iterator[torch.Tensor], progress: "tqdm[Any]"
) -> None:
    """Write one safetensors file as its tensors arrive."""
    raw = json.dumps({"__metadata__": {"format": "pt"}, **layout.header}).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little") + raw)
    for tensor in tensors:
        data = (
            tensor.contiguous().view(torch.uint8).numpy().tobytes()
            if tensor.dim()
            else (tensor.reshape(1).view(torch.uint8).numpy().tobytes())
        )
        file.write(data)
        progress.update(len(data))


def quantization_config(kept: list[str]) -> dict[str, Any]:
    """Return what compressed-tensors calls this scheme, with the modules that are kept."""
    eight_bit = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**eight_bit, "strategy": "channel", "dynamic": False},
                "input_activations": {**eight_bit, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": kept,
    }


def quantize_checkpoint(
    source: Path, target: Path, with_out_proj: bool = False, scale_axes: int = 2
) -> dict[str, KindReport]:
    """Write the FP8 copy of a checkpoint; the target appears only when it is whole.

    Args:
        scale_axes: 2 for scales of shape [out, 1], 1 for [out].

    Returns:
        What quantization did, by kind of module.
    """
    kinds = KINDS | (OUT_PROJ if with_out_proj else {})
    report: dict[str, KindReport] = defaultdict(KindReport)
    layouts = [plan(path, kinds, scale_axes) for path in sorted(source.glob("*.safetensors"))]
    names = [name for layout in layouts for name in layout.header]
    kept = sorted(
        name.removesuffix(".weight")
        for layout in layouts
        for name, entry in layout.header.items()
        if name.endswith(".weight") and len(entry["shape"]) == 2 and entry["dtype"] != "F8_E4M3"
    )
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        folder = Path(scratch) / target.name
        folder.mkdir()
        for path in source.iterdir():
            if path.is_file() and path.suffix != ".safetensors":
                shutil.copy2(path, folder)
        total = sum(layout.size for layout in layouts)
        with tqdm(total=total, unit="B", unit_scale=True, desc=target.name, disable=None) as bar:
            for layout in layouts:
                with (folder / layout.source.name).open("wb") as file:
                    write(file, layout, pieces(layout, kinds, report), bar)
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = quantization_config(kept)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = {name: lay.source.name for lay in layouts for name in lay.header}
            values = {"metadata": {"total_size": total}, "weight_map": files}
            index.write_text(json.dumps(values, indent=2) + "\n")
        folder.rename(target)
    assert len(set(names)) == len(names)
    return dict(report)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SRC", help="an unquantized checkpoint")
    parser.add_argument("target", type=Path, metavar="DST", help="folder to write, not there yet")
    parser.add_argument(
        "--with-out-proj", action="store_true", help="quantize Mamba's out_proj too"
    )
    parser.add_argument(
        "--scale-axes", type=int, choices=(1, 2), default=2, help="scales as [out] or [out, 1]"
    )


def run(args: argparse.Namespace) -> int:
    """Quantize and print the error of each kind; 2 where source or target will not do."""
    if not (args.source / "config.json").is_file() or not list(args.source.glob("*.safetensors")):
        print(f"{args.source}: expected config.json and *.safetensors", file=sys.stderr)
        return 2
    if args.target.exists():
        print(f"{args.target}: exists; name a folder that does not", file=sys.stderr)
        return 2
    report = quantize_checkpoint(args.source, args.target, args.with_out_proj, args.scale_axes)
    rows = [
        (kind, row.tensors, decibels(row.signal, row.noise), row.worst_sqnr_db, row.worst)
        for kind, row in report.items()
    ]
    heads = ("kind", "tensors", "SQNR dB", "worst dB", "worst tensor")
    print(tabulate(rows, heads, floatfmt=".1f"))
    return 0
