# SPDX-License-Identifier: Apache-2.0
"""From checkpoint tensors to vLLM's parameters: cut, padded and expanded to what these take.

vLLM's own loader stacks and splits; what it cannot know of this model is done before it. Every
tensor passes through the audit, and nothing is served of a checkpoint that is at fault.
"""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.platforms import current_platform

from vllm_metis.checkpoint.audit import FP8, Audit, CheckpointError, fault_report
from vllm_metis.checkpoint.names import SCALE
from vllm_metis.checkpoint.specs import padded_expert_width
from vllm_metis.config import Metis16Config

STACKED = WeightsMapper(
    orig_to_new_stacked={
        ".q_proj": (".qkv_proj", "q"),
        ".k_proj": (".qkv_proj", "k"),
        ".v_proj": (".qkv_proj", "v"),
        ".shared_expert.gate_proj": (".shared_expert.gate_up_proj", 0),
        ".shared_expert.up_proj": (".shared_expert.gate_up_proj", 1),
    }
)

EXPERT = re.compile(r".*\.(?:experts\.\d+|shared_expert)\.(?:gate_up|gate|up|down)_proj\.weight")


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
