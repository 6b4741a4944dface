# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections (mHC): how a sublayer reads and writes the streams.

The residual of a token is S streams. A sublayer reads one mixture of them and writes its
output back to all, while the streams themselves are mixed by a doubly stochastic matrix.
Mix, read and write depend on weights and the pass alone, so they are computed once after
loading (`HyperConnection.finalize`), in FP32.

`read_streams` and `write_streams` take plain tensors: with the memory read and the norm
they are all that happens between two sublayers, and are meant to be fused.

Source: docs/model.md, forward pass 2.3 to 2.6.
"""

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm

from vllm_metis.config import Metis16Config


def sinkhorn(logits: torch.Tensor, iterations: int) -> torch.Tensor:
    """Return exp of `logits` made doubly stochastic: rows first, then columns, each time.

    Args:
        logits: (..., S, S), float32; row o is an output stream, column i an input stream.
    """
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()


def read_streams(streams: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """Return the mixture of the streams that a sublayer sees.

    Args:
        streams: (T, S, D), model dtype.
        read: (S,), float32, sums to one.

    Returns:
        (T, D), model dtype.
    """
    return (streams.float() * read[:, None]).sum(1).to(streams.dtype)


def write_streams(
    streams: torch.Tensor, output: torch.Tensor, mix: torch.Tensor, write: torch.Tensor
) -> torch.Tensor:
    """Return the mixed streams plus a sublayer's output: `S_o = Σ_i mix[o,i]·S_i + write_o·out`.

    Args:
        streams: (T, S, D), model dtype, as the sublayer read them.
        output: (T, D), model dtype.
        mix: (S, S), float32, doubly stochastic.
        write: (S,), float32, sums to one.

    Returns:
        (T, S, D), model dtype, rounded once.
    """
    wide = streams.float()
    written = write[:, None] * output.float()[:, None]
    # Term by term: a batched product would not fuse, one broadcast holds S² · D per token.
    for i in range(streams.shape[1]):
        written = written + mix[:, i, None] * wide[:, i : i + 1]
    return written.to(streams.dtype)


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

    def read_normed(self, streams: torch.Tensor, pass_index: int) -> torch.Tensor:
        """Return the sublayer's input of this pass, (T, D), model dtype."""
        return self.norm(read_streams(streams, self.read[pass_index]))

    def write_back(
        self, streams: torch.Tensor, output: torch.Tensor, pass_index: int
    ) -> torch.Tensor:
        """Return the streams after the sublayer, (T, S, D), model dtype."""
        return write_streams(streams, output, self.mix[pass_index], self.write[pass_index])
