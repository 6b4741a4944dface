# SPDX-License-Identifier: Apache-2.0
"""Evidence for tests of what judges, compares and shows it: small, and right unless changed."""

import math
from typing import Any

from harness.evidence.engine import EngineFacts
from harness.evidence.environment import Environment
from harness.evidence.record import Corpus, Identity, Record, Run
from harness.evidence.scores import PromptFloor, Reference, RequestScores, Scores
from harness.judging import metrics
from harness.kinds.parity.observation import EngineObservation, RequestObservation, Step
from harness.records.store import AnyRecord

VOCABULARY = 64
BLOCK_SIZE = 16
TOP = 4
# A peaked distribution over TOP tokens, and what is left over for the rest of the vocabulary.
_TOP_LOGPROBS = [math.log(p) for p in (0.7, 0.15, 0.1, 0.04)]


def settings(**changes: Any) -> dict[str, Any]:
    """Settings of a parity cell: one prompt `p` of 20 tokens alone, 3 tokens generated, FP32."""
    found: dict[str, Any] = {
        "checkpoint": {
            "shape": "tiny",
            "dtype": "float32",
            "seed": 1,
            "taught": False,
            "quantize": "none",
        },
        "precision": "fp32",
        "engine": {"args": {"dtype": "float32", "enable_prefix_caching": False}, "env": {}},
        "sampling": {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True, "logprobs": TOP},
        "workload": {"rounds": [{"schedule": "alone", "cached": "none", "prompts": ["p"]}]},
        "reach": {
            "mamba_ssm_cache_dtype": "float32",
            "mamba_cache_mode": "none",
            "prefill": "whole",
            "preemptions": "none",
            "cudagraphs": "NONE",
            "quantization": None,
        },
        "timeout": {"start_s": 20, "cell_s": 20},
    }
    return found | changes


PARSER = {
    "checkpoint": settings()["checkpoint"],
    "parser": {
        "delta_size": 1,
        "history": "none",
        "mode": "direct",
        "tool_choice": "auto",
        "truncation": "none",
    },
    "timeout": settings()["timeout"],
}
"""Settings of a parser cell."""

CARD = {
    "name": "NVIDIA H200",
    "driver": "580",
    "memory_mib": "143771",
    "memory_used_mib": "0",
    "compute_capability": "9.0",
    "sm_clock_mhz": "345",
    "max_sm_clock_mhz": "1980",
    "power_limit_w": "700.00",
}


def smoke_settings(**smoke: Any) -> dict[str, Any]:
    """Settings of a smoke cell that looks at `smoke`, behind a server."""
    rounds = [{"schedule": "alone", "cached": "any", "prompts": ["p"]}]
    return {
        "engine": {"args": {}, "env": {}, "serve": True},
        "smoke": smoke,
        "workload": {"rounds": rounds},
        "timeout": settings()["timeout"],
    }


def environment(**changes: Any) -> Environment:
    """A machine without a card, outside a checkout."""
    fields: dict[str, Any] = {
        "versions": {"vllm": "0.31.0"},
        "sources_sha256": {},
        "machine": {"system": "s", "architecture": "a", "processor": "fake", "cores": 2},
        "cards": [],
        "foreign_processes_on_cards": [],
        "git": {"commit": None, "dirty": None},
        "flags": {},
        "processes": 1,
    }
    return Environment(**(fields | changes))


def engine_facts(args: dict[str, Any], **changes: Any) -> EngineFacts:
    """What an engine with these arguments resolves."""
    caching = args.get("enable_prefix_caching", False)
    facts: dict[str, Any] = {
        "dtype": args.get("dtype", "float32"),
        "quantization": None,
        "max_model_len": 128,
        "enforce_eager": args.get("enforce_eager", True),
        "block_size": BLOCK_SIZE,
        "mamba_block_size": BLOCK_SIZE,
        "mamba_cache_mode": "align" if caching else "none",
        "mamba_cache_dtype": "auto",
        "mamba_ssm_cache_dtype": "float32",
        "kv_cache_dtype": "auto",
        "enable_prefix_caching": caching,
        "num_gpu_blocks": 100,
        "max_num_batched_tokens": args.get("max_num_batched_tokens", 64),
        "max_num_seqs": args.get("max_num_seqs", 8),
        "async_scheduling": False,
        "compilation_mode": "NONE",
        "cudagraph_mode": "NONE",
        "cudagraph_capture_sizes": [],
        "tensor_parallel_size": 1,
        "attention_backends": ["FAKE"],
        "cache_tensor_dtypes": {
            "attention": ["float32"],
            "conv": ["float32"],
            "ssm": ["float32"],
        },
        "device": "fake",
    }
    return EngineFacts(**(facts | changes))


def request(
    prompt: str,
    *,
    round_: int = 0,
    index: int = 0,
    length: int = 20,
    tokens: int = 3,
    **changes: Any,
) -> RequestObservation:
    """A request whose tokens are 10, 11, … and the reference's own."""
    token_ids = [10 + step for step in range(tokens)]
    fields: dict[str, Any] = {
        "id": f"{round_}.{index}-{prompt}",
        "prompt": prompt,
        "round": round_,
        "num_prompt_tokens": length,
        "token_ids": token_ids,
        "logprobs": [_TOP_LOGPROBS[0]] * tokens,
        "top_token_ids": [[token, 50, 51, 52] for token in token_ids],
        "top_logprobs": [list(_TOP_LOGPROBS) for _ in token_ids],
        "num_cached_tokens": 0,
        "num_preemptions": 0,
        "finish_reason": "length",
        "ttft_ms": 5.0,
        "e2el_ms": 25.0,
    }
    return RequestObservation(**(fields | changes))


def scores(tokens: int = 3, **changes: Any) -> Scores:
    """The reference's scores of `request`'s tokens."""
    fields: dict[str, Any] = {
        "logprobs": [_TOP_LOGPROBS[0]] * tokens,
        "top_logprobs": [list(_TOP_LOGPROBS) for _ in range(tokens)],
        "argmax": [10 + step for step in range(tokens)],
        "argmax_logprobs": [_TOP_LOGPROBS[0]] * tokens,
        "max_abs_logit": [4.0] * tokens,
    }
    return Scores(**(fields | changes))


def step(**changes: Any) -> Step:
    """A decode step of one request."""
    fields: dict[str, Any] = {
        "round": 0,
        "prefill_requests": 0,
        "prefill_tokens": 0,
        "decode_requests": 1,
        "decode_tokens": 1,
        "preempted_requests": 0,
        "kv_cache_usage": 0.1,
        "cudagraph_runtime_mode": None,
        "padded_tokens": None,
    }
    return Step(**(fields | changes))


def prefill_step(tokens: int, **changes: Any) -> Step:
    """A step that computes prompt tokens of one request."""
    fields = {"prefill_requests": 1, "prefill_tokens": tokens}
    return step(**({"decode_requests": 0, "decode_tokens": 0} | fields | changes))


def observation(**changes: Any) -> EngineObservation:
    """What `settings()` asks for."""
    fields: dict[str, Any] = {
        "facts": engine_facts({}),
        "requests": [request("p")],
        "steps": [prefill_step(20), step(), step()],
        "run_s": 0.5,
    }
    return EngineObservation(**(fields | changes))


FP32_FLOOR_NATS = 2.5e-5
"""What an FP32 reference that sums in another order is off in `pair`, at every position."""


def pair(
    reference_scores: Scores | None = None, port: Scores | None = None, inside: float = 0.0
) -> RequestScores:
    """The reference's scores of a request; a port errs by `inside` within the prompt.

    The port is both references that differ in rounding only; without one, they are FP32's.
    """
    exact = reference_scores or scores()
    errors = dict.fromkeys(metrics.FLOORED, inside)
    roundings = {
        name: [[FP32_FLOOR_NATS] * len(exact.logprobs)] * 2
        if port is None
        else [function(getattr(exact, field), getattr(port, field)).tolist()] * 2
        for name, (function, field) in metrics.FLOORED.items()
    }
    return RequestScores(
        reference=exact,
        port=port,
        prompt_floor=PromptFloor(positions=1, maximum=errors, mean=errors),
        roundings=roundings,
    )


def reference(*requests: RequestScores) -> Reference:
    """References of the requests; of one that agrees, unless given."""
    found = list(requests) or [pair()]
    return Reference(checkpoint_sha256="0" * 64, requests=found)


def record(**changes: Any) -> Record[Any]:
    """A record of `settings()` that passes."""
    fields: dict[str, Any] = {
        "run": "run",
        "matrix": "demo",
        "kind": "parity",
        "cell": "fp32-alone",
        "axes": {"dtype": "fp32", "mode": "alone"},
        "engine_group": "fp32",
        "settings": settings(),
        "identity": Identity(cell_sha256="a" * 64, versions_sha256="b" * 64),
        "environment": environment(),
        "seeds": {"checkpoint": 1},
        "timings_s": {"cell": 1.0, "engine_start": 2.0},
        "log": "logs/fp32.log",
        "corpus": Corpus(sha256="c" * 64, token_ids={"p": list(range(20))}),
        "observation": observation(),
        "reference": reference(),
    }
    made: Record[Any] = AnyRecord(**(fields | changes))
    return made


def header(*cells: str, **changes: Any) -> Run:
    """The header of a run with these cells."""
    fields: dict[str, Any] = {
        "run": "run",
        "matrix": "demo",
        "matrix_path": "matrices/demo.yaml",
        "question": "Is it right?",
        "cells": list(cells),
        "started": "20261129-120000",
        "environment": environment(),
    }
    return Run(**(fields | changes))


def fake_observation(
    cell_settings: dict[str, Any], token_ids: dict[str, list[int]]
) -> EngineObservation:
    """What a fake engine observes: requests alone; wrong where the prompt's name says so."""
    requests, steps = [], []
    tokens = cell_settings["sampling"]["max_tokens"]
    for number, round_ in enumerate(cell_settings["workload"]["rounds"]):
        for index, prompt in enumerate(round_["prompts"]):
            length = len(token_ids[prompt])
            found = request(prompt, round_=number, index=index, length=length, tokens=tokens)
            if prompt == "wrong_token":
                found = found.model_copy(update={"token_ids": [9, *found.token_ids[1:]]})
            if prompt == "nan":
                found = found.model_copy(update={"logprobs": [math.nan, *found.logprobs[1:]]})
            requests.append(found)
            steps += [prefill_step(length, round=number), step(round=number)]
    return EngineObservation(
        facts=engine_facts(cell_settings["engine"]["args"]),
        requests=requests,
        steps=steps,
        run_s=0.0,
    )


def fake_scores(sequence: dict[str, Any]) -> RequestScores:
    """What a fake reference answers: it prefers `request`'s own tokens by far."""
    own = scores(len(sequence["token_ids"]))
    logprobs = [
        logprob if token == preferred else -5.0
        for token, preferred, logprob in zip(
            sequence["token_ids"], own.argmax, own.logprobs, strict=True
        )
    ]
    return pair(own.model_copy(update={"logprobs": logprobs}))
