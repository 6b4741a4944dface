# SPDX-License-Identifier: Apache-2.0
"""The engine child: one vLLM engine, driven step by step, everything public about it written down.

Run as `python -m harness.engine CONFIG` by harness/collect.py. The engine is `LLMEngine`, below the
`LLM` class, because a cell decides when a request arrives. What is observed comes from interfaces
that vLLM offers: `RequestOutput`, the resolved `VllmConfig`, and a stat logger, which the engine
tells of each step (how many prompt tokens it computed, whom it preempted, which CUDA graph it
replayed). No method is patched.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from vllm import EngineArgs, SamplingParams
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase

from harness import job_loop
from harness.records import EngineFacts, EngineObservation, RequestObservation, Step

_OWN_ARGS: dict[str, Any] = {
    "disable_log_stats": False,
    "enable_logging_iteration_details": True,
    "cudagraph_metrics": True,
}


_GOLDEN_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_seqs": 1,
    "kv_cache_memory_bytes": 2**28,
}


class StepRecorder(StatLoggerBase):
    """Keeps what the engine reports of each step that scheduled tokens."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0):
        self.round = 0
        self.steps: list[Step] = []

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by the engine after each step."""
        details = scheduler_stats.iteration_details if scheduler_stats else None
        preempted = iteration_stats.num_preempted_reqs if iteration_stats else 0
        if details is None and not preempted:
            return
        graph = scheduler_stats.cudagraph_stats if scheduler_stats else None
        self.steps.append(
            Step(
                round=self.round,
                prefill_requests=details.num_ctx_requests if details else 0,
                prefill_tokens=details.num_ctx_tokens if details else 0,
                decode_requests=details.num_generation_requests if details else 0,
                decode_tokens=details.num_generation_tokens if details else 0,
                preempted_requests=preempted,
                kv_cache_usage=scheduler_stats.kv_cache_usage if scheduler_stats else 0.0,
                cudagraph_runtime_mode=graph.runtime_mode if graph else None,
                padded_tokens=graph.num_padded_tokens if graph else None,
            )
        )

    def log_engine_initialized(self) -> None:
        """Nothing to say: the log has vLLM's own lines."""


def build(config: dict[str, Any]) -> tuple[dict[str, Any], job_loop.Handler]:
    """Start the engine; return its resolved settings and what answers a cell's job.

    Args:
        config: `model` (a checkpoint folder) and `args` (EngineArgs by name).

    Raises:
        ValueError: naming every argument that EngineArgs does not have.
    """
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    unknown = sorted(set(config["args"]) - known)
    if unknown:
        raise ValueError(f"vLLM's EngineArgs has no {', '.join(unknown)}: see `vllm serve --help`")
    args = EngineArgs(model=config["model"], **config["args"], **_OWN_ARGS)
    recorder = StepRecorder()
    engine = LLMEngine.from_engine_args(args, stat_loggers=[lambda *_: recorder])
    facts = _facts(engine)

    def handle(job: dict[str, Any]) -> BaseModel:
        return _observe(engine, recorder, facts, job["settings"], job["token_ids"])

    return facts.model_dump(), handle


def _observe(
    engine: LLMEngine,
    recorder: StepRecorder,
    facts: EngineFacts,
    settings: dict[str, Any],
    token_ids: dict[str, list[int]],
) -> EngineObservation:
    """Run the rounds of one cell on an engine with an empty prefix cache."""
    if facts.enable_prefix_caching and not engine.reset_prefix_cache():
        raise RuntimeError("the prefix cache could not be emptied: requests of another cell run on")
    recorder.steps = []
    started = time.monotonic()
    requests: list[RequestObservation] = []
    for number, round_ in enumerate(settings["workload"]["rounds"]):
        recorder.round = number
        if "before" in round_:
            _BEFORE[round_["before"]](engine)
        for batch in _batches(round_):
            requests += _run_batch(engine, number, batch, settings["sampling"], token_ids)
    return EngineObservation(
        facts=facts, requests=requests, steps=recorder.steps, run_s=time.monotonic() - started
    )


def _sleep(engine: LLMEngine) -> None:
    """Move the weights off the card and back; caches are given up."""
    engine.sleep(level=1)
    engine.wake_up()


def _sleep_deeply(engine: LLMEngine) -> None:
    """Give the weights up too, and read them anew."""
    engine.sleep(level=2)
    engine.wake_up(tags=["weights"])
    engine.collective_rpc("reload_weights")
    engine.wake_up(tags=["kv_cache"])


def _reload(engine: LLMEngine) -> None:
    """Read the weights anew over ruins, so that what is not read shows in the answers."""
    engine.collective_rpc(spoil)
    engine.collective_rpc("reload_weights")


_BEFORE = {"sleep": _sleep, "sleep_deeply": _sleep_deeply, "reload": _reload}


def spoil(worker: Any) -> None:
    """On a worker: set to zero every parameter, and every buffer that the plugin computes of them."""
    for module in worker.get_model().modules():
        own = list(module.parameters(recurse=False))
        if type(module).__module__.startswith("vllm_metis."):
            own += module.buffers(recurse=False)
        for tensor in own:
            tensor.data.zero_()


def _batches(round_: dict[str, Any]) -> Iterator[list[tuple[int, str, int]]]:
    """(position in the round, prompt, step of arrival) of requests that may meet in the engine."""
    prompts = list(enumerate(round_["prompts"]))
    if round_["schedule"] == "alone":
        yield from ([(index, prompt, 0)] for index, prompt in prompts)
    else:
        every = round_.get("arrive_every_steps", 0)
        yield [(index, prompt, index * every) for index, prompt in prompts]


def _run_batch(
    engine: LLMEngine,
    number: int,
    batch: list[tuple[int, str, int]],
    sampling: dict[str, Any],
    token_ids: dict[str, list[int]],
) -> list[RequestObservation]:
    finished: dict[str, RequestObservation] = {}
    prompts: dict[str, str] = {}  # by the id that the engine gives back
    waiting = list(batch)
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][2] <= step:
            index, prompt, _ = waiting.pop(0)
            name = f"{number}.{index}-{prompt}"
            params = SamplingParams(**sampling, detokenize=False)
            engine.add_request(name, {"prompt_token_ids": token_ids[prompt]}, params)
            prompts[name] = prompt
        for output in engine.step():
            if output.finished:
                prompt = prompts[output.request_id]
                finished[output.request_id] = _request(output, number, prompt, sampling["logprobs"])
        step += 1
    return [finished[name] for name in prompts]


def _request(output: Any, number: int, prompt: str, top: int) -> RequestObservation:
    completion = output.outputs[0]
    chosen, top_ids, top_logprobs = [], [], []
    for token, position in zip(completion.token_ids, completion.logprobs, strict=True):
        ranked = sorted(position.items(), key=lambda item: item[1].rank)
        chosen.append(_rounded(position[token].logprob))
        top_ids.append([id_ for id_, _ in ranked[:top]])
        top_logprobs.append([_rounded(entry.logprob) for _, entry in ranked[:top]])
    metrics = output.metrics
    return RequestObservation(
        id=output.request_id,
        prompt=prompt,
        round=number,
        num_prompt_tokens=len(output.prompt_token_ids),
        token_ids=list(completion.token_ids),
        logprobs=chosen,
        top_token_ids=top_ids,
        top_logprobs=top_logprobs,
        num_cached_tokens=output.num_cached_tokens,
        num_preemptions=metrics.num_preemptions if metrics else 0,
        finish_reason=completion.finish_reason,
        ttft_ms=1e3 * metrics.first_token_latency if metrics else None,
        e2el_ms=1e3 * (metrics.last_token_ts - metrics.queued_ts) if metrics else None,
    )


def _rounded(logprob: float) -> float:
    """Nine digits: all that a FP32 number holds."""
    return float(f"{logprob:.9g}")


def _facts(engine: LLMEngine) -> EngineFacts:
    config = engine.vllm_config
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    compilation, parallel = config.compilation_config, config.parallel_config
    layers: dict[str, set[str]] = {
        "attention": set(),
        "conv": set(),
        "ssm": set(),
        "backend": set(),
    }
    for worker in engine.collective_rpc(_layer_facts):
        for name, values in worker.items():
            layers[name].update(values)
    return EngineFacts(
        dtype=_dtype(model.dtype),
        quantization=model.quantization,
        max_model_len=model.max_model_len,
        enforce_eager=model.enforce_eager,
        block_size=cache.block_size,
        mamba_block_size=cache.mamba_block_size,
        mamba_cache_mode=cache.mamba_cache_mode,
        mamba_cache_dtype=_dtype(cache.mamba_cache_dtype),
        mamba_ssm_cache_dtype=_dtype(cache.mamba_ssm_cache_dtype),
        kv_cache_dtype=_dtype(cache.cache_dtype),
        enable_prefix_caching=bool(cache.enable_prefix_caching),
        num_gpu_blocks=cache.num_gpu_blocks,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        async_scheduling=scheduler.async_scheduling,
        compilation_mode=_enum(compilation.mode),
        cudagraph_mode=_enum(compilation.cudagraph_mode),
        cudagraph_capture_sizes=list(compilation.cudagraph_capture_sizes or []),
        tensor_parallel_size=parallel.tensor_parallel_size,
        enable_expert_parallel=parallel.enable_expert_parallel,
        attention_backends=sorted(layers.pop("backend")),
        cache_tensor_dtypes={name: sorted(values) for name, values in layers.items()},
        device=current_platform.get_device_name(),
    )


def golden_logprobs(folder: Path, prompts: list[list[int]]) -> list[list[list[float]]]:
    """Return the log-probabilities of the whole vocabulary after each token of each prompt.

    The engine is FP32 and sees the checkpoint alone: a golden folder's other tensors are not of the
    model.

    Returns:
        per prompt (n, V): row i is the distribution after token i.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("config.json", "model.safetensors"):
            (Path(scratch) / name).symlink_to((folder / name).resolve())
        args = EngineArgs(model=scratch, max_logprobs=-1, **_GOLDEN_ARGS, **_OWN_ARGS)
        engine = LLMEngine.from_engine_args(args)
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, logprobs=-1)
    sampling.detokenize = False
    rows = []
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling.clone())
        while engine.has_unfinished_requests():
            (output,) = engine.step() or [None]
        positions = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
        rows.append([[row[i].logprob for i in range(len(row))] for row in positions])
    return rows


def _layer_facts(worker: Any) -> dict[str, list[str]]:
    """On a worker: the attention backends, and the dtypes of the cache tensors it allocated."""
    found: dict[str, set[str]] = {"attention": set(), "conv": set(), "ssm": set(), "backend": set()}
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        if cache is None:
            continue
        if hasattr(layer, "get_state_shape"):
            conv, ssm = cache
            found["conv"].add(_dtype(conv.dtype))
            found["ssm"].add(_dtype(ssm.dtype))
        else:
            found["attention"].add(_dtype(cache.dtype))
            found["backend"].add(layer.get_attn_backend().get_name())
    return {name: sorted(values) for name, values in found.items()}


def _dtype(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _enum(value: Any) -> str:
    return str(getattr(value, "name", value))


if __name__ == "__main__":
    job_loop.main(build)
