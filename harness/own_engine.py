# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in this process, for measurements that need its prompts' logprobs, times or model.

It is the engine that `vllm serve` runs, without a process or an HTTP server in between: requests
arrive together and the engine is driven step by step. Below the `LLM` class, so that a token's time
is the time at which the engine gave it away.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

# Before vLLM is imported: the model must be in this process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from vllm import EngineArgs, SamplingParams
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from harness.measurements import EngineSettings, Kernel, PromptLogprobs, SpeedRound

CPU_ARGS: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 2**29}
"""Over a cell's arguments on a CPU: vLLM would take most of the memory, and need a compiler."""

_LONGEST_KERNELS = 40
_Result = TypeVar("_Result")


class OwnEngine:
    """An engine that is ready.

    Args:
        model: folder of a checkpoint.
        args: vLLM's EngineArgs, by name.
    """

    def __init__(self, model: str, args: Mapping[str, Any]):
        own = {**args, **CPU_ARGS} if current_platform.is_cpu() else args
        self._engine = LLMEngine.from_engine_args(EngineArgs(model=model, **own))
        self._requests = 0

    @property
    def settings(self) -> EngineSettings:
        """What it resolved."""
        config = self._engine.vllm_config
        model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
        return EngineSettings(
            dtype=_name(model.dtype),
            quantization=model.quantization,
            max_model_len=model.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            enable_prefix_caching=bool(cache.enable_prefix_caching),
            mamba_ssm_cache_dtype=_name(cache.mamba_ssm_cache_dtype),
            kv_cache_dtype=_name(cache.cache_dtype),
            enforce_eager=model.enforce_eager,
            cudagraph_mode=config.compilation_config.cudagraph_mode.name,
            device=current_platform.get_device_name(),
        )

    def apply(self, function: Callable[[Any], _Result]) -> _Result:
        """Call a function with the loaded model and return its result."""
        (result,) = self._engine.apply_model(function)
        return result

    def prompt_logprobs(
        self, prompts: Mapping[str, Sequence[int]], top: int
    ) -> list[PromptLogprobs]:
        """Return the logprobs of each prompt's own tokens and of the `top` likeliest there."""
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=top, detokenize=False
        )
        found = []
        for name, ids in prompts.items():
            (output,) = self._alone(ids, params)
            positions = output.prompt_logprobs[1:]  # nothing predicts the first token
            ranked = [
                sorted(position.items(), key=lambda item: item[1].rank)[:top]
                for position in positions
            ]
            found.append(
                PromptLogprobs(
                    prompt=name,
                    token_ids=list(ids[1:]),
                    logprobs=[
                        position[token].logprob
                        for token, position in zip(ids[1:], positions, strict=True)
                    ],
                    top_token_ids=[[token for token, _ in row] for row in ranked],
                    top_logprobs=[[entry.logprob for _, entry in row] for row in ranked],
                )
            )
        return found

    def run_round(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> SpeedRound:
        """Generate `max_tokens` for prompts that arrive together, and time the steps."""
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        started = time.perf_counter()
        ids_by_request: dict[str, list[int]] = {self._add(ids, params): [] for ids in prompts}
        first_ms = last_ms = 0.0
        steps = 0
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            if not outputs:
                continue  # scheduled ahead: the tokens come with the next step
            steps += 1
            last_ms = 1e3 * (time.perf_counter() - started)
            for output in outputs:
                ids_by_request[output.request_id] = list(output.outputs[0].token_ids)
            if not first_ms and all(ids_by_request.values()):
                first_ms = last_ms
        return SpeedRound(
            first_token_ms=first_ms,
            last_token_ms=last_ms,
            steps=steps,
            tokens=[len(ids) for ids in ids_by_request.values()],
            last_token_ids=[ids[-1] for ids in ids_by_request.values()],
        )

    def profile_decode(self, prompts: Sequence[Sequence[int]], steps: int) -> list[Kernel]:
        """Return what a decode step of these prompts runs, longest first."""
        on_card = torch.cuda.is_available()
        params = SamplingParams(
            max_tokens=steps + 8, temperature=0.0, ignore_eos=True, detokenize=False
        )
        for ids in prompts:
            self._add(ids, params)
        while len(self._engine.step()) < len(prompts):
            pass  # until every prompt has its first token
        self._engine.step()
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(
            activities=[activity.CUDA if on_card else activity.CPU]
        ) as seen:
            for _ in range(steps):
                self._engine.step()
            if on_card:
                torch.cuda.synchronize()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        kernels = [
            Kernel(
                name=event.key,
                calls=event.count / steps,
                total_us=(event.self_device_time_total if on_card else event.self_cpu_time_total)
                / steps,
            )
            for event in seen.key_averages()
        ]
        return sorted(kernels, key=lambda kernel: -kernel.total_us)[:_LONGEST_KERNELS]

    def _add(self, ids: Sequence[int], params: Any) -> str:
        self._requests += 1
        name = str(self._requests)
        self._engine.add_request(name, {"prompt_token_ids": list(ids)}, params.clone())
        return name

    def _alone(self, ids: Sequence[int], params: Any) -> list[Any]:
        """Run one request and return what finished."""
        self._add(ids, params)
        finished = []
        while self._engine.has_unfinished_requests():
            finished += [output for output in self._engine.step() if output.finished]
        return finished


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")
