# SPDX-License-Identifier: Apache-2.0
"""Every spelling of a checkpoint's tensors, brought to one.

What the release's files are called is only partly known, so every spelling of docs/model.md is
accepted: `MAPPER` renames, `unstacked` and `normalized` bring what has a name into one layout.
"""

import re
from collections.abc import Iterator

import torch
from vllm.model_executor.models.utils import WeightsMapper

SCALE = "_scale"
"""What the name of a weight's scales has after the weight's own."""

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

STACKED_EXPERTS = re.compile(r"(.*\.experts)\.((?:gate_up|gate|up|down)_proj\.weight(?:_scale)?)")


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
