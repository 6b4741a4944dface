# SPDX-License-Identifier: Apache-2.0
"""Faults of what the model computes: wrong from the first token that comes out of a prefill."""

import itertools
from typing import Any

import torch

from vllm_metis.checkpoint import load
from vllm_metis.model import depth_memory, metis16, router


def swapped_epsilons() -> None:
    """The RMSNorms take the gated group norm's epsilon, and the other way round."""
    real = metis16.Metis16ForCausalLM.__init__

    def faulty(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        epsilons = config.mamba_norm_eps, config.rms_norm_eps
        config.rms_norm_eps, config.mamba_norm_eps = epsilons
        real(self, vllm_config=vllm_config, prefix=prefix)

    metis16.Metis16ForCausalLM.__init__ = faulty


def swapped_passes() -> None:
    """The first pass runs with the second one's embeddings and gates, and the other way round."""
    real = load.fitted

    def faulty(config: Any, tp_size: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = real(config, tp_size, name, tensor)
        return tensor.flip(0) if name.endswith(("pass_embeddings", ".pass_gates")) else tensor

    load.fitted = faulty


def dropped_selection_bias() -> None:
    """The router chooses experts by the logits that it weighs them with."""
    real = router.select

    def faulty(logits: torch.Tensor, selection_bias: torch.Tensor, top_k: int) -> Any:
        return real(logits, torch.zeros_like(selection_bias), top_k)

    router.select = faulty


def swapped_x_and_z() -> None:
    """The first two blocks of `in_proj`'s rows are taken for x and z, not for z and x."""
    real = load.fitted

    def faulty(config: Any, tp_size: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = real(config, tp_size, name, tensor)
        if not name.endswith(".in_proj.weight"):
            return tensor
        z, x, rest = tensor.tensor_split((config.mamba_d_inner, 2 * config.mamba_d_inner))
        return torch.cat([x, z, rest])

    load.fitted = faulty


def skipped_last_read() -> None:
    """The depth memory is not read before the final norm."""
    real_init, real_read = depth_memory.DepthMemory.__init__, depth_memory.DepthMemory.read

    def init(self: Any, config: Any, prefix: str) -> None:
        real_init(self, config, prefix)
        before = config.num_passes * (config.num_hidden_layers + 1) - 1
        self.is_last_read = itertools.cycle([*[False] * before, True])

    def read(self: Any, unwritten: Any, bank: depth_memory.Bank, reading: Any) -> Any:
        return real_read(self, unwritten, [] if next(self.is_last_read) else bank, reading)

    depth_memory.DepthMemory.__init__, depth_memory.DepthMemory.read = init, read


def late_positions() -> None:
    """What comes out is 0.1% too large from position 800 on."""
    real = metis16.Metis16ForCausalLM.forward

    def faulty(self: Any, input_ids: Any, positions: torch.Tensor, *rest: Any, **named: Any) -> Any:
        hidden = real(self, input_ids, positions, *rest, **named)
        return torch.where(positions[:, None] >= 800, 1.001 * hidden, hidden)

    metis16.Metis16ForCausalLM.forward = faulty


FAULTS = {
    fault.__name__: fault
    for fault in (
        swapped_epsilons,
        swapped_passes,
        dropped_selection_bias,
        swapped_x_and_z,
        skipped_last_read,
        late_positions,
    )
}
