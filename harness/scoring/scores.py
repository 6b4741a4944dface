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


def roundings(reference: Scores, others: Sequence[Scores]) -> dict[str, list[list[float]]]:
    """Return what other references are off at a candidate's tokens, (N, T) by metric."""
    return {
        name: [
            [_short(error) for error in function(getattr(reference, field), getattr(one, field))]
            for one in others
        ]
        for name, (function, field) in metrics.FLOORED.items()
    }


def prompt_floor(reference: Tensor, others: Sequence[Tensor]) -> PromptFloor:
    """Return what others err by inside a prompt, on their own best tokens, as if they generated there.

    Args:
        reference: logits (T, V); T may be 0.
        others: logits of the same positions, at least one.
    """
    if not len(reference):
        nothing = dict.fromkeys(metrics.FLOORED, 0.0)
        return PromptFloor(positions=0, maximum=nothing, mean=nothing)
    found = [_errors(reference, other) for other in others]
    return PromptFloor(
        positions=len(reference),
        maximum={name: max(float(e[name].max()) for e in found) for name in metrics.FLOORED},
        mean={name: max(float(e[name].mean()) for e in found) for name in metrics.FLOORED},
    )


def _errors(reference: Tensor, other: Tensor) -> dict[str, metrics.Array]:
    exact, rounded = (torch.log_softmax(logits.double(), -1) for logits in (reference, other))
    best = rounded.topk(min(_TOP, rounded.shape[-1])).indices
    exact, rounded = (_at(logprobs, best).numpy() for logprobs in (exact, rounded))
    return {
        name: function(exact[:, 0], rounded[:, 0])
        if field == "logprobs"
        else function(exact, rounded)
        for name, (function, field) in metrics.FLOORED.items()
    }


def _short(error: float) -> float:
    """Four digits of an error: it is compared with a multiple of another one."""
    return float(f"{error:.4g}")


def _at(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    return logprobs.gather(-1, token_ids)
