# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine, driven step by step: what parity, smoke and speed cells and golden vectors ask.

It is the engine that `vllm serve` runs, without an HTTP server in between: below the `LLM` class,
because the caller decides when a request arrives, and a token's time is the time at which the engine
gave it away. What is observed comes from interfaces that vLLM offers; no method is patched.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vllm import EngineArgs, SamplingParams
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from harness import generated_code
from harness.evidence.engine import EngineFacts, PromptLogprobs

_CPU_ARGS: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 2**29}
_LAYER_FACTS = ("attention", "conv", "ssm", "backend")

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and what is wanted of it; it arrives before the step of that number."""

    name: str
    token_ids: Sequence[int]
    params: SamplingParams
    step: int = 0


class Engine:
    """An engine that is ready.

    Args:
        model: folder of a checkpoint.
        args: vLLM's EngineArgs, by name.
        in_process: whether the model must be in this process; else the environment decides.
        stat_loggers: factories of vLLM's stat loggers, which the engine tells of each step.

    Attributes:
        core: vLLM's own engine.

    Raises:
        ValueError: naming every argument that EngineArgs does not have.
    """

    def __init__(
        self,
        model: str,
        args: Mapping[str, Any],
        *,
        in_process: bool = True,
        stat_loggers: Sequence[Callable[..., Any]] | None = None,
    ):
        known = {field.name for field in dataclasses.fields(EngineArgs)}
        if unknown := sorted(set(args) - known):
            raise ValueError(
                f"vLLM's EngineArgs has no {', '.join(unknown)}: see `vllm serve --help`"
            )
        if in_process:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        engine_args = EngineArgs(model=model, **args)
        self.core = LLMEngine.from_engine_args(
            engine_args, stat_loggers=list(stat_loggers) if stat_loggers else None
        )
        self._asked = 0

    @property
    def facts(self) -> EngineFacts:
        """What it resolved, and what its workers allocated."""
        config = self.core.vllm_config
        model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
        compilation, parallel = config.compilation_config, config.parallel_config
        layers: dict[str, set[str]] = {name: set() for name in _LAYER_FACTS}
        for worker in self.core.collective_rpc(_layer_facts):
            for name, values in worker.items():
                layers[name].update(values)
        generated: dict[str, list[str]] = {}
        for worker in self.core.collective_rpc(_generated_kernels):
            generated |= worker
        return EngineFacts(
            dtype=_name(model.dtype),
            quantization=model.quantization,
            max_model_len=model.max_model_len,
            enforce_eager=model.enforce_eager,
            block_size=cache.block_size,
            mamba_block_size=cache.mamba_block_size,
            mamba_cache_mode=cache.mamba_cache_mode,
            mamba_cache_dtype=_name(cache.mamba_cache_dtype),
            mamba_ssm_cache_dtype=_name(cache.mamba_ssm_cache_dtype),
            kv_cache_dtype=_name(cache.cache_dtype),
            enable_prefix_caching=bool(cache.enable_prefix_caching),
            num_gpu_blocks=cache.num_gpu_blocks,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
            async_scheduling=scheduler.async_scheduling,
            compilation_mode=_name(compilation.mode),
            cudagraph_mode=_name(compilation.cudagraph_mode),
            cudagraph_capture_sizes=list(compilation.cudagraph_capture_sizes or []),
            tensor_parallel_size=parallel.tensor_parallel_size,
            enable_expert_parallel=parallel.enable_expert_parallel,
            attention_backends=sorted(layers.pop("backend")),
            cache_tensor_dtypes={name: sorted(values) for name, values in layers.items()},
            generated_kernels=len(generated),
            reloading_kernels=[
                f"{name}: {', '.join(buffers)}" for name, buffers in generated.items() if buffers
            ],
            device=current_platform.get_device_name(),
        )

    def apply(self, function: Callable[[Any], _Result]) -> _Result:
        """Call a function with the loaded model and return its result."""
        (result,) = self.core.apply_model(function)
        return result

    def steps(self, requests: Sequence[Request]) -> Iterator[list[Any]]:
        """Serve requests; yield what each step gives, nothing where it only scheduled ahead.

        Args:
            requests: in the order in which they arrive.
        """
        waiting = list(requests)
        step = 0
        while waiting or self.core.has_unfinished_requests():
            while waiting and waiting[0].step <= step:
                one = waiting.pop(0)
                prompt = {"prompt_token_ids": list(one.token_ids)}
                self.core.add_request(one.name, prompt, one.params.clone())
            yield self.core.step()
            step += 1

    def answers(self, requests: Sequence[Request]) -> tuple[list[Any], list[int]]:
        """Serve requests of different names.

        Returns:
            What each gave once it was finished, and how many requests gave something in each step.
        """
        steps = list(self.steps(requests))
        finished = {
            output.request_id: output for outputs in steps for output in outputs if output.finished
        }
        return [finished[request.name] for request in requests], list(map(len, steps))

    def requests(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
        """Return requests under names of their own, which arrive together."""
        named = []
        for ids in prompts:
            self._asked += 1
            named.append(Request(str(self._asked), ids, params))
        return named

    def prompt_logprobs(
        self, prompts: Mapping[str, Sequence[int]], top: int
    ) -> list[PromptLogprobs]:
        """Return the logprobs of each prompt's own tokens and of the `top` likeliest there."""
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=top, detokenize=False
        )
        found = []
        for name, ids in prompts.items():
            positions = self._alone(ids, params).prompt_logprobs[1:]  # nothing predicts the first
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

    def vocabulary_logprobs(self, ids: Sequence[int]) -> list[list[float]]:
        """Return the log-probabilities of the whole vocabulary after each token of a prompt.

        Returns:
            (n, V): row i is the distribution after token i. The engine needs `max_logprobs=-1`.
        """
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=-1, logprobs=-1, detokenize=False
        )
        output = self._alone(ids, params)
        positions = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
        return [[row[i].logprob for i in range(len(row))] for row in positions]

    def _alone(self, ids: Sequence[int], params: SamplingParams) -> Any:
        """Run one request and return what it gave when it was finished."""
        (answer,), _ = self.answers(self.requests([ids], params))
        return answer


def for_any_machine(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell's engine arguments with what a CPU needs, where this is one.

    vLLM would take most of the memory there, and need a compiler.
    """
    return {**args, **(_CPU_ARGS if current_platform.is_cpu() else {})}


def _layer_facts(worker: Any) -> dict[str, list[str]]:
    """On a worker: the attention backends, and the dtypes of the cache tensors it allocated."""
    found: dict[str, set[str]] = {name: set() for name in _LAYER_FACTS}
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        if cache is None:
            continue
        if hasattr(layer, "get_state_shape"):
            conv, ssm = cache
            found["conv"].add(_name(conv.dtype))
            found["ssm"].add(_name(ssm.dtype))
        else:
            found["attention"].add(_name(cache.dtype))
            found["backend"].add(layer.get_attn_backend().get_name())
    return {name: sorted(values) for name, values in found.items()}


def _generated_kernels(worker: Any) -> dict[str, list[str]]:
    """On a worker: the kernels that torch.compile generated, and the buffers that each reloads."""
    from torch._inductor.codecache import PyCodeCache

    found: dict[str, list[str]] = {}
    for module in PyCodeCache.modules:  # written anew where a compiled graph came from a cache
        path = Path(module.__file__ or "")
        if path.is_file():
            for name, body in generated_code.kernels(path.read_text()):
                found[f"{name} in {path.name}"] = generated_code.reloaded(body)
    return found


def _name(value: Any) -> str:
    """Return what a dtype or an enumeration's value is called."""
    return str(getattr(value, "name", value)).removeprefix("torch.")
