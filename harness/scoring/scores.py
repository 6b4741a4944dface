# SPDX-License-Identifier: Apache-2.0
"""From logits to scores: the one place where the reference's logits meet a candidate's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.evidence.scores import PromptFloor, Scores
from harness.judging import metrics

_TOP = 20  # tokens of a position inside a prompt, as many as cells ask of generated ones


def score(
    logits: Tensor, token_ids: Sequence[int], top_token_ids: Sequence[Sequence[int]]
) -> Scores:
    """Return the scores of a candidate's tokens, computed in float64.

    Args:
        logits: (T, V), the distribution before each token, unnormalized.
        token_ids: (T,), the candidate's.
        top_token_ids: (T, K), those that the candidate found likeliest.
    """
    logprobs = torch.log_softmax(logits.double(), -1)
    argmax = logits.argmax(-1)
    return Scores(
        logprobs=_at(logprobs, torch.tensor(token_ids)[:, None])[:, 0].tolist(),
        top_logprobs=_at(logprobs, torch.tensor(top_token_ids)).tolist(),
        argmax=argmax.tolist(),
        argmax_logprobs=_at(logprobs, argmax[:, None])[:, 0].tolist(),
        max_abs_logit=logits.abs().amax(-1).tolist(),
    )


def prompt_floor(reference: Tensor, port: Tensor) -> PromptFloor:
    """Return what the port errs by inside a prompt, on its own best tokens, as if it generated there.

    Args:
        reference, port: logits (T, V) of the same positions; T may be 0.
    """
    if not len(reference):
        nothing = dict.fromkeys(metrics.FLOORED, 0.0)
        return PromptFloor(positions=0, maximum=nothing, mean=nothing)
    exact, rounded = (torch.log_softmax(logits.double(), -1) for logits in (reference, port))
    best = rounded.topk(min(_TOP, rounded.shape[-1])).indices
    exact, rounded = (_at(logprobs, best).numpy() for logprobs in (exact, rounded))
    errors = {
        name: function(exact[:, 0], rounded[:, 0])
        if field == "logprobs"
        else function(exact, rounded)
        for name, (function, field) in metrics.FLOORED.items()
    }
    return PromptFloor(
        positions=len(exact),
        maximum={name: float(values.max()) for name, values in errors.items()},
        mean={name: float(values.mean()) for name, values in errors.items()},
    )


def _at(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    return logprobs.gather(-1, token_ids)
