# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections (mHC): how a sublayer reads and writes the streams.

The residual of a token is S streams. A sublayer reads one mixture of them and writes its
output back to all, while the streams themselves are mixed by a doubly stochastic matrix.
Mix, read and write depend on weights and the pass alone, so they are computed once after
loading (`HyperConnection.finalize`), in FP32.

What is done with them, together with the memory read and the norm, are the operators of
`stream_ops`.

Source: docs/model.md, forward pass 2.3 to 2.6.
"""

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm

from vllm_metis.config import Metis16Config
from vllm_metis.model.stream_ops import Reading, Unwritten


def sinkhorn(logits: torch.Tensor, iterations: int) -> torch.Tensor:
    """Return exp of `logits` made doubly stochastic: rows first, then columns, each time.

    Args:
        logits: (..., S, S), float32; row o is an output stream, column i an input stream.
    """
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()


class HyperConnection(nn.Module):
    """mHC of one sublayer, with the norm in front of it.

    Buffers, float32, filled by `finalize`: `mix` (P, S, S), `read` (P, S), `write` (P, S).
    """

    mix: torch.Tensor
    read: torch.Tensor
    write: torch.Tensor

    def __init__(self, config: Metis16Config) -> None:
        super().__init__()
        passes, streams = config.num_passes, config.num_streams
        self.iterations = config.sinkhorn_iterations
        self.mix_logits = nn.Parameter(torch.empty(streams, streams), requires_grad=False)
        self.read_logits = nn.Parameter(torch.empty(streams), requires_grad=False)
        self.write_logits = nn.Parameter(torch.empty(streams), requires_grad=False)
        self.controller = nn.Linear(config.pass_embedding_dim, streams * (streams + 2))
        self.controller.requires_grad_(False)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        for name, shape in (
            ("mix", (passes, streams, streams)),
            ("read", (passes, streams)),
            ("write", (passes, streams)),
        ):
            buffer = torch.full(shape, float("nan"), dtype=torch.float32)
            self.register_buffer(name, buffer, persistent=False)

    def finalize(self, pass_embeddings: torch.Tensor) -> None:
        """Compute the constants of every pass from the loaded weights.

        Args:
            pass_embeddings: (P, pass_embedding_dim).
        """
        streams = self.read_logits.numel()
        delta = nn.functional.linear(
            pass_embeddings.float(),
            self.controller.weight.float(),
            self.controller.bias.float(),
        )
        mix, read, write = delta.split([streams * streams, streams, streams], dim=-1)
        mix = self.mix_logits.float() + mix.view(-1, streams, streams)
        self.mix.copy_(sinkhorn(mix, self.iterations))
        self.read.copy_((self.read_logits.float() + read).softmax(-1))
        self.write.copy_((self.write_logits.float() + write).softmax(-1))

    def reading(self, pass_index: int) -> Reading:
        """Return how the sublayer reads the streams in this pass."""
        return Reading(self.read[pass_index], self.norm.weight, self.norm.variance_epsilon)

    def unwritten(self, streams: torch.Tensor, output: torch.Tensor, pass_index: int) -> Unwritten:
        """Return the streams (T, S, D) with the sublayer's output (T, D), to be written back."""
        return Unwritten(streams, output, self.mix[pass_index], self.write[pass_index])
