# SPDX-License-Identifier: Apache-2.0
"""The audit of a checkpoint: nothing is lost on the way to the model, and nothing is made up.

`Audit` holds every tensor against the table that the configuration implies. It runs while the
weights stream in, and over safetensors headers alone in `python -m vllm_metis check`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from vllm_metis.checkpoint.names import MAPPER, SCALE, normalized, unstacked
from vllm_metis.checkpoint.specs import TensorSpec, checkpoint_tensors, parts_of
from vllm_metis.config import Metis16Config

FP8 = torch.float8_e4m3fn
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class CheckpointError(ValueError):
    """A checkpoint that does not hold this model; the message lists every fault."""


@dataclass
class Audit:
    """Holds each tensor of a checkpoint against what the configuration implies.

    Feed every tensor to `admit`, then call `faults`.
    """

    config: Metis16Config
    expected: dict[str, TensorSpec] = field(init=False)
    parts: dict[str, dict[str, TensorSpec]] = field(init=False)
    seen: dict[str, torch.dtype] = field(default_factory=dict, init=False)
    unused: list[str] = field(default_factory=list, init=False)
    unread: list[str] = field(default_factory=list, init=False)
    wrong: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.expected = checkpoint_tensors(self.config)
        self.parts = {
            name: parts
            for name, tensor in self.expected.items()
            if (parts := parts_of(self.config, name, tensor))
        }
        self._accepted = dict(self.expected)
        for parts in self.parts.values():
            self._accepted |= parts

    def admit(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what `tensor` holds under the names that the loader knows; nothing if at fault.

        Args:
            name: As in the checkpoint.
            tensor: May be on the meta device: only shape and dtype are looked at.
        """
        known = MAPPER.map_name(name)
        if known is None:
            self.unused.append(name)
            return
        for unit, piece in unstacked(known, tensor):
            piece = normalized(unit, piece)
            if self._is_sound(name, unit, piece):
                self.seen[unit] = piece.dtype
                yield unit, piece

    def _is_sound(self, name: str, unit: str, piece: torch.Tensor) -> bool:
        is_scale = unit.endswith(".weight" + SCALE)
        spec = self._accepted.get(unit.removesuffix(SCALE) if is_scale else unit)
        if spec is None or (is_scale and not spec.quantizable):
            if name not in self.unread:
                self.unread.append(name)
            return False
        if is_scale:
            spec = TensorSpec((spec.shape[0], 1))
        if unit in self.seen:
            self.wrong.append(f"{name}: stored twice, in different spellings of {unit}")
            return False
        shape = tuple(piece.shape)
        if not spec.accepts(shape):
            at_least = "at least " if spec.rows_at_least else ""
            self.wrong.append(
                f"{name}: shape {list(shape)}, where config.json implies {at_least}"
                f"{list(spec.shape)}"
            )
            return False
        allowed = (torch.float32,) if spec.fp32 else FLOATS
        if spec.quantizable:
            allowed = (*allowed, FP8)
        if piece.dtype not in allowed:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            self.wrong.append(
                f"{name}: {str(piece.dtype).removeprefix('torch.')}, where the model has {names}"
            )
            return False
        return True

    def missing(self) -> list[str]:
        """Return every tensor that was not there, whole or in parts, and every missing scale."""
        absent = []
        for name in self.expected:
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            if name in self.seen:
                continue
            parts = [part for part in self.parts.get(name, ()) if part not in self.seen]
            absent += parts if parts and len(parts) < len(self.parts[name]) else []
            if not self.parts.get(name) or len(parts) == len(self.parts[name]):
                absent.append(name)
        scaled = [n for n, dtype in self.seen.items() if dtype == FP8]
        absent += [n + SCALE for n in scaled if n + SCALE not in self.seen]
        return absent

    def faults(self) -> list[str]:
        """Return every fault, a sentence each."""
        faults = list(self.wrong)
        faults += [
            f"{name}: not a tensor of this model, so it would be unread" for name in self.unread
        ]
        faults += [f"{name}: missing, so it would be unset" for name in self.missing()]
        quantized = getattr(self.config, "quantization_config", None)
        scaled = [name for name, dtype in self.seen.items() if dtype == FP8]
        if scaled and not quantized:
            faults.append(
                f"{len(scaled)} tensors are FP8 (the first is {scaled[0]}), but config.json has "
                "no quantization_config that says so"
            )
        faults += [
            f"{name}: a scale, but {name.removesuffix(SCALE)} is not FP8"
            for name in self.seen
            if name.endswith(SCALE) and self.seen.get(name.removesuffix(SCALE)) != FP8
        ]
        return faults


def fault_report(faults: list[str]) -> str:
    """Return the message of a `CheckpointError`."""
    return (
        f"The checkpoint does not hold this model, {len(faults)} fault(s):\n  - "
        + "\n  - ".join(faults)
        + "\nCheck that config.json belongs to these weights and that every shard is there; "
        "`python -m vllm_metis check DIR` lists the same in seconds."
    )
