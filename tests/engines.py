# SPDX-License-Identifier: Apache-2.0
"""Engines for tests: one child process each, driven in rounds of requests."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.kinds.parity.observation import EngineObservation, RequestObservation
from harness.process.worker import Worker

ARGS = {
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 4096,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 2**28,
}
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
START_S, RUN_S = 240.0, 300.0

Round = tuple[str, Sequence[str]]
"""A schedule (`alone` or `batched`) and the prompts of one round, by name."""


def ids(length: int, seed: int = 0) -> list[int]:
    """Return a prompt of `length` tokens that has no prefix in common with another seed's."""
    return [(i * 7919 + (seed + 1) * 104729) % 500 + 7 for i in range(length)]


def configure(folder: Path, **arguments: Any) -> Any:
    """Resolve the engine's configuration, as every vLLM command does first."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, **arguments
    ).create_engine_config()


class Engine:
    """A started engine; `facts` are its resolved settings."""

    def __init__(self, worker: Worker, folder: Path, facts: dict[str, Any]) -> None:
        self._worker, self._folder, self.facts = worker, folder, facts
        self._runs = 0

    def run(
        self, prompts: Mapping[str, Sequence[int]], rounds: Sequence[Round], max_tokens: int = 16
    ) -> EngineObservation:
        """Serve rounds of greedy requests, the prefix cache empty before the first."""
        sampling = {
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 2,
        }
        workload = {
            "rounds": [
                {"schedule": how, "cached": "any", "prompts": list(names)} for how, names in rounds
            ]
        }
        self._runs += 1
        job = {
            "settings": {"workload": workload, "sampling": sampling},
            "token_ids": {name: list(tokens) for name, tokens in prompts.items()},
        }
        text = self._worker.run(job, self._folder / f"run{self._runs}.json", RUN_S)
        return EngineObservation.model_validate_json(text)


@contextmanager
def engine(
    model: Path, folder: Path, environment: Mapping[str, str] = {}, **args: Any
) -> Iterator[Engine]:
    """Start an engine on the CPU with `args` over `ARGS`; it is gone when the block ends."""
    command = [sys.executable, "-m", "harness.kinds.parity.child"]
    config = {"model": str(model), "args": {**ARGS, **args}}
    env = {**ENVIRONMENT, **environment}
    worker = Worker(command, config, folder, "engine", env, forked=True)
    try:
        yield Engine(worker, folder, worker.start(START_S))
    finally:
        worker.stop()


def answers(requests: Sequence[RequestObservation]) -> dict[str, list[int]]:
    """Return the tokens of each prompt; a prompt asked twice must have got the same."""
    found: dict[str, list[int]] = {}
    for request in requests:
        assert found.setdefault(request.prompt, request.token_ids) == request.token_ids
    return found


def largest_logprob_difference(
    first: Sequence[RequestObservation], second: Sequence[RequestObservation]
) -> float:
    """Return the largest difference of a chosen token's logprob over prompts that both answer."""
    known = {request.prompt: request.logprobs for request in first}
    return max(
        abs(a - b)
        for request in second
        for a, b in zip(known[request.prompt], request.logprobs, strict=True)
    )
