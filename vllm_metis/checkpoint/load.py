# SPDX-License-Identifier: Apache-2.0
"""From checkpoint tensors to parameters, and the audit that nothing is lost on the way.

What the release's files are called is only partly known, so every spelling of docs/model.md is
accepted: `MAPPER` renames, `LAYOUTS` brings tensors into one shape, and vLLM's loader does
the rest. `Audit` holds every tensor against the table that the configuration implies. It
runs while the weights stream in, and over safetensors headers alone in
`python -m vllm_metis check`.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.platforms import current_platform

from vllm_metis.checkpoint.specs import Tensor, checkpoint_tensors, padded_expert_width, parts_of
from vllm_metis.config import Metis16Config

FP8 = torch.float8_e4m3fn
FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_END = r"(?=\.|$)"

MAPPER = WeightsMapper(
    orig_to_new_regex={
        re.compile(pattern): new
        for pattern, new in {
            # Heads for adaptive depth and k, and n-gram memory: not used by Metis-1.6.
            r"(?:^|\.)depth_budget\.": None,
            r"\.moe\.(?:k_router|k_budget)\.": None,
            r"(?:^|\.)ngram_memory\.": None,
            r"^(?:model\.)?": "model.",
            r"^model\.lm_head" + _END: "lm_head",
            r"^model\.(?:embedding|embed_tokens|embeddings)" + _END: "model.embed_tokens",
            r"\.mixer\.(?:impl\.)?(?:mixer\.)?"
            r"(in_proj|conv1d|norm|out_proj|dt_bias|A_log|D)" + _END: r".mixer.mamba.\1",
            r"\.A_log$": ".A",
            r"\.mixer\.qkv" + _END: ".mixer.qkv_proj",
            r"\.mixer\.out" + _END: ".mixer.o_proj",
            r"\.local_experts" + _END: ".experts",
            r"\.gate_up" + _END: ".gate_up_proj",
            r"(\.experts(?:\.\d+)?|\.shared_expert)\.down" + _END: r"\1.down_proj",
            # Stacked experts are parameters, which may be stored without `.weight`.
            r"(\.experts\.(?:gate_up|gate|up|down)_proj)(_scale)?$": r"\1.weight\2",
            r"^model\.depth_memory\.route_projection\.": "model.depth_memory.route_",
        }.items()
    }
)
"""Renames only: also applied to the module names of a quantization config."""

STACKED = WeightsMapper(
    orig_to_new_stacked={
        ".q_proj": (".qkv_proj", "q"),
        ".k_proj": (".qkv_proj", "k"),
        ".v_proj": (".qkv_proj", "v"),
        ".shared_expert.gate_proj": (".shared_expert.gate_up_proj", 0),
        ".shared_expert.up_proj": (".shared_expert.gate_up_proj", 1),
    }
)

STACKED_EXPERTS = re.compile(r"(.*\.experts)\.((?:gate_up|gate|up|down)_proj\.weight(?:_scale)?)")
EXPERT = re.compile(r".*\.(?:experts\.\d+|shared_expert)\.(?:gate_up|gate|up|down)_proj\.weight")
SCALE = "_scale"


class CheckpointError(ValueError):
    """A checkpoint that does not hold this model; the message lists every fault."""


@dataclass
class Audit:
    """Holds each tensor of a checkpoint against what the configuration implies.

    Feed every tensor to `admit`, then call `faults`.
    """

    config: Metis16Config
    expected: dict[str, Tensor] = field(init=False)
    parts: dict[str, dict[str, Tensor]] = field(init=False)
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
            spec = Tensor((spec.shape[0], 1))
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


def unstacked(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the experts of a stacked tensor [E, out, in] one by one; anything else as it is."""
    match = STACKED_EXPERTS.fullmatch(name)
    if match is None or tensor.dim() == 0:
        yield name, tensor
        return
    for expert, piece in enumerate(tensor.unbind(0)):
        yield f"{match[1]}.{expert}.{match[2]}", piece


def normalized(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the axes that vLLM's parameter has."""
    if name.endswith(".conv1d.weight") and tensor.dim() == 2:
        return tensor.unsqueeze(1)
    if name.endswith(SCALE) and tensor.dim() == 1:
        return tensor.unsqueeze(1)
    return tensor


def fitted(config: Metis16Config, tp_size: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return what vLLM's parameter takes of a sound tensor.

    Tables per pass are cut to the passes that run; experts are padded with zeros (scales
    with ones) where tensor parallelism does not divide their width.
    """
    if name.endswith(("pass_embeddings", ".pass_gates")):
        return tensor[: config.num_passes]
    width = config.moe_intermediate_size
    extra = padded_expert_width(config, tp_size) - width
    if extra == 0 or EXPERT.match(name) is None:
        return tensor
    if ".shared_expert." in name:
        width, extra = width * config.num_shared_experts, extra * config.num_shared_experts
    is_scale = name.endswith(SCALE)
    if ".down_proj." in name:
        return tensor if is_scale else _padded(tensor, (0, extra))
    halves = tensor.split(width, dim=0)
    return torch.cat([_padded(half, (0, 0, 0, extra), 1.0 if is_scale else 0.0) for half in halves])


def dequantized(
    pieces: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Expand FP8 experts to FP32, exactly; scale and weight may come in either order.

    For the CPU, where vLLM has no FP8 experts without AMX. Other modules pass unchanged.
    """
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in pieces:
        is_scale = name.endswith(SCALE)
        if ".experts." not in name or not (is_scale or tensor.dtype == FP8):
            yield name, tensor
            continue
        weight = name.removesuffix(SCALE)
        if weight not in waiting:
            waiting[weight] = tensor
        else:
            yield weight, tensor.float() * waiting.pop(weight).float()


def _padded(tensor: torch.Tensor, pad: tuple[int, ...], value: float = 0.0) -> torch.Tensor:
    # F.pad has no FP8: pad the bytes, where zero is zero too.
    if tensor.dtype == FP8:
        return nn.functional.pad(tensor.view(torch.uint8), pad).view(FP8)
    return nn.functional.pad(tensor, pad, value=value)


def load(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Load `weights` into a `Metis16ForCausalLM`; return the parameters that were set.

    Raises:
        CheckpointError: Anything was unread, unset, misshapen or in the wrong dtype; the
            message lists all of it. Nothing can be served then.
    """
    config: Metis16Config = model.config
    audit = Audit(config)
    tp_size = get_tensor_model_parallel_world_size()

    def sound() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            for unit, piece in audit.admit(name, tensor):
                yield unit, fitted(config, tp_size, unit, piece)

    pieces = dequantized(sound()) if current_platform.is_cpu() else sound()
    loaded = AutoWeightsLoader(model).load_weights(pieces, mapper=STACKED)
    # MoERunner reports the parameters of its expert container without the container's name.
    loaded = {re.sub(r"\.experts\.(w13|w2)_", r".experts.routed_experts.\1_", n) for n in loaded}
    faults = audit.faults()
    if not faults:
        unset = {name for name, _ in model.named_parameters()} - loaded
        if not hasattr(config, "quantization_config"):
            # Quantizing on load makes its scales out of the weights.
            unset = {name for name in unset if not name.endswith(SCALE)}
        faults = [f"{name}: a parameter that no tensor was loaded into" for name in sorted(unset)]
    if faults:
        raise CheckpointError(fault_report(faults))
    return loaded


def fault_report(faults: list[str]) -> str:
    """Return the message of a `CheckpointError`."""
    return (
        f"The checkpoint does not hold this model, {len(faults)} fault(s):\n  - "
        + "\n  - ".join(faults)
        + "\nCheck that config.json belongs to these weights and that every shard is there; "
        "`python -m vllm_metis check DIR` lists the same in seconds."
    )
