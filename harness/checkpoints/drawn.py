# SPDX-License-Identifier: Apache-2.0
"""A model of a shape without a checkpoint: a configuration, and weights drawn in the engine.

For shapes that would take minutes to write and load. vLLM's dummy weights send every token to the same
experts; these spread them as trained ones do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from harness.checkpoints.quantize import FP8
from harness.checkpoints.write import config_of
from harness.files import write_atomic

DRAWN_ARGS: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
"""Engine arguments for a folder that holds a configuration only."""

# A token's own embedding must stand out from what all tokens share: of the memory each layer adds the
# same to all of them where, on a CPU, nothing else that it is written of is drawn.
_SHARED = {"stream_embeddings": 0.1, "depth_memory.output.weight": 0.01}


def configuration_only(cache: Path, shape: str, dtype: str) -> Path:
    """Write a folder with a config.json and no weights."""
    folder = cache / f"{shape}-{dtype}-configuration"
    head = {"architectures": ["Metis16ForCausalLM"], "model_type": "metis16", "torch_dtype": dtype}
    write_atomic(folder / "config.json", json.dumps(head | config_of(shape), indent=2) + "\n")
    return folder


@torch.no_grad()
def draw_weights(model: Any, seed: int) -> None:
    """Draw a Metis-1.6 model's weights, and what it computes of them; see `draw_parameters`."""
    draw_parameters(model, seed)
    model.process_weights_after_loading()


@torch.no_grad()
def draw_parameters(model: Any, seed: int) -> None:
    """Draw weights at the scale that keeps activations at one; what is FP8 stays as vLLM filled it.

    On a CPU the linears stay too: vLLM has packed them.
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(seed)
        if parameter.dtype == FP8 or ".routed_experts." in name or name.endswith("_scale"):
            continue
        if name.endswith(".A"):
            parameter.fill_(-1.0)
        elif name.endswith(("norm.weight", "norm_f.weight")):
            parameter.fill_(1.0)
        elif parameter.dim() < 2 or name.endswith("mix_logits"):
            parameter.zero_()
        else:
            scale = next((s for end, s in _SHARED.items() if name.endswith(end)), 1.0)
            parameter.normal_(0.0, scale * parameter.shape[-1] ** -0.5, generator=generator)
        seed += 1
