# SPDX-License-Identifier: Apache-2.0
"""Every way in which a release may spell its checkpoint, so that the loader can be tested on each.

The first value of an axis is the training runtime's spelling, which the reference reads. Respelling
is lazy: what a tensor is called and how large it is are known before any of it is made.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from harness.reference.configuration_metis16 import KEY_SPELLINGS, Metis16Config

AXES: dict[str, tuple[str, ...]] = {
    "prefix": ("none", "model"),
    "mamba": ("mixer.impl.mixer", "mixer.impl", "mixer"),
    "experts": ("local_experts", "experts"),
    "expert_layout": ("each", "stacked"),
    "gate_up": ("fused", "apart"),
    "qkv": ("fused", "apart"),
    "pass_rows": ("all", "used"),
    "conv1d": ("three_axes", "two_axes"),
    "lm_head": ("present", "absent"),
    "config": ("mixed", *KEY_SPELLINGS),
}


class SpellingError(ValueError):
    """An axis or a value that does not exist; the message lists those that do."""


@dataclass(frozen=True)
class Spelling:
    """One value of every axis.

    Attributes:
        prefix: `model.` before every name but the head's, or nothing.
        mamba: what the training runtime calls mixer.impl.mixer.
        experts: what it calls local_experts.
        expert_layout: a tensor for each expert, or all of a layer stacked as [E, out, in].
        gate_up: gate and up rows in one tensor, or apart as gate_proj and up_proj.
        qkv: one tensor, or apart as q_proj, k_proj and v_proj.
        pass_rows: tables per pass with a row for every pass of training, or only those used.
        conv1d: the convolution's weight with its middle axis of one, or without.
        lm_head: the copy of the embedding is stored, or left to be tied.
        config: keys as the golden vectors mix them, all as Transformers' models usually call
            them, or all as the training manifest does.
    """

    prefix: str = "none"
    mamba: str = "mixer.impl.mixer"
    experts: str = "local_experts"
    expert_layout: str = "each"
    gate_up: str = "fused"
    qkv: str = "fused"
    pass_rows: str = "all"
    conv1d: str = "three_axes"
    lm_head: str = "present"
    config: str = "mixed"

    def __post_init__(self) -> None:
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        faults = [
            f"{axis}={value}: allowed are {', '.join(AXES[axis])}"
            for axis, value in chosen.items()
            if value not in AXES[axis]
        ]
        if faults:
            raise SpellingError("unknown spelling: " + "; ".join(faults))

    @classmethod
    def parse(cls, text: str) -> Spelling:
        """Return the spelling that `axis=value,axis=value` changes from the training runtime's."""
        pairs = [item.partition("=") for item in text.split(",") if item.strip()]
        chosen = {axis.strip(): value.strip() for axis, _, value in pairs}
        unknown = [axis for axis in chosen if axis not in AXES]
        if unknown or len(chosen) < len(pairs):
            what = ", ".join(unknown) or "one axis twice"
            raise SpellingError(f"unknown spelling: {what}; the axes are {', '.join(AXES)}")
        return cls(**chosen)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint that is made only when it is written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def rows(self, name: str, start: int, stop: int) -> StoredTensor:
        """Return a copy of rows start to stop under another name."""

        def make() -> Tensor:
            return self.make()[start:stop].clone()

        return replace(self, name=name, shape=(stop - start, *self.shape[1:]), make=make)


def respell(
    tensors: Iterable[StoredTensor], config: Metis16Config, spelling: Spelling
) -> Iterator[StoredTensor]:
    """Yield the training runtime's tensors as the spelling stores them."""
    if spelling.lm_head == "absent":
        tensors = (tensor for tensor in tensors if tensor.name != "lm_head.weight")
    if spelling.pass_rows == "used":
        tensors = (_trim_pass_table(tensor, config) for tensor in tensors)
    if spelling.conv1d == "two_axes":
        tensors = (_drop_middle_axis(tensor) for tensor in tensors)
    if spelling.qkv == "apart":
        tensors = _split(tensors, r"(.*\.mixer)\.qkv\.weight", _qkv_parts(config))
    if spelling.gate_up == "apart":
        width = config.expert_intermediate_dim
        parts = {"gate_proj": width, "up_proj": width}
        tensors = _split(tensors, r"(.*expert.*)\.gate_up\.weight", parts)
    if spelling.expert_layout == "stacked":
        tensors = _stack_experts(tensors)
    for tensor in tensors:
        yield replace(tensor, name=_rename(tensor.name, spelling))


def respell_config(values: dict[str, Any], spelling: Spelling) -> dict[str, Any]:
    """Return config.json's values, named as in the golden vectors, under the spelling's keys."""
    keys = KEY_SPELLINGS.get(spelling.config, {})
    return {keys.get(key, key): value for key, value in values.items()}


def _rename(name: str, spelling: Spelling) -> str:
    name = name.replace(".mixer.impl.mixer.", f".{spelling.mamba}.")
    name = name.replace(".local_experts.", f".{spelling.experts}.")
    in_model = spelling.prefix == "model" and not name.startswith("lm_head.")
    return f"model.{name}" if in_model else name


def _trim_pass_table(tensor: StoredTensor, config: Metis16Config) -> StoredTensor:
    if not tensor.name.endswith(("pass_embeddings", "pass_gates")):
        return tensor
    return tensor.rows(tensor.name, 0, config.num_passes)


def _drop_middle_axis(tensor: StoredTensor) -> StoredTensor:
    if not tensor.name.endswith("conv1d.weight"):
        return tensor
    channels, _, taps = tensor.shape
    return replace(tensor, shape=(channels, taps), make=lambda: tensor.make().squeeze(1))


def _qkv_parts(config: Metis16Config) -> dict[str, int]:
    kv = config.num_key_value_heads * config.head_dim
    return {"q_proj": config.num_attention_heads * config.head_dim, "k_proj": kv, "v_proj": kv}


def _split(
    tensors: Iterable[StoredTensor], pattern: str, parts: dict[str, int]
) -> Iterator[StoredTensor]:
    """Yield each tensor whose name matches as its parts: their names and numbers of rows."""
    for tensor in tensors:
        match = re.fullmatch(pattern, tensor.name)
        if match is None:
            yield tensor
            continue
        start = 0
        for part, rows in parts.items():
            yield tensor.rows(f"{match[1]}.{part}.weight", start, start + rows)
            start += rows


def _stack_experts(tensors: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
    """Yield the rest, then one tensor for all experts of a layer and projection."""
    stacks: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in tensors:
        match = re.fullmatch(r"(.*\.local_experts)\.\d+(\..*)", tensor.name)
        if match is None:
            yield tensor
        else:
            stacks[match[1] + match[2]].append(tensor)
    for name, experts in stacks.items():
        yield _stack(name, experts)


def _stack(name: str, experts: list[StoredTensor]) -> StoredTensor:
    def make() -> Tensor:
        return torch.stack([expert.make() for expert in experts])

    return replace(experts[0], name=name, shape=(len(experts), *experts[0].shape), make=make)
