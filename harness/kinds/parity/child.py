# SPDX-License-Identifier: Apache-2.0
"""The child of a parity matrix: an engine, everything public about it written down.

Run as `python -m harness.kinds.parity.child CONFIG` by harness/run/cells.py. What is observed comes
from interfaces that vLLM offers: `RequestOutput`, the resolved `VllmConfig`, and a stat logger, which
the engine tells of each step (how many prompt tokens it computed, whom it preempted, which CUDA graph
it replayed).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel
from vllm import SamplingParams
from vllm.v1.metrics.loggers import StatLoggerBase

from harness.engine import Engine, Request
from harness.evidence.engine import EngineFacts
from harness.kinds.parity.observation import EngineObservation, RequestObservation, Step
from harness.kinds.parity.settings import Sampling
from harness.kinds.settings import Round, Workload
from harness.process import child_loop

_OWN_ARGS: dict[str, Any] = {
    "disable_log_stats": False,
    "enable_logging_iteration_details": True,
    "cudagraph_metrics": True,
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


def build(config: dict[str, Any]) -> tuple[dict[str, Any], child_loop.Handler]:
    """Start the engine; return its resolved settings and what answers a cell's job.

    Args:
        config: `model` (a checkpoint folder) and `args` (EngineArgs by name).
    """
    recorder = StepRecorder()
    args = {**config["args"], **_OWN_ARGS}
    loggers = [lambda *_: recorder]
    engine = Engine(config["model"], args, in_process=False, stat_loggers=loggers)
    facts = engine.facts

    def handle(job: dict[str, Any]) -> BaseModel:
        workload = Workload.model_validate(job["settings"]["workload"])
        sampling = Sampling.model_validate(job["settings"]["sampling"])
        return _observe(engine, recorder, facts, workload, sampling, job["token_ids"])

    return facts.model_dump(), handle


def _observe(
    engine: Engine,
    recorder: StepRecorder,
    facts: EngineFacts,
    workload: Workload,
    sampling: Sampling,
    token_ids: dict[str, list[int]],
) -> EngineObservation:
    """Run the rounds of one cell on an engine with an empty prefix cache."""
    if facts.enable_prefix_caching and not engine.core.reset_prefix_cache():
        raise RuntimeError("the prefix cache could not be emptied: requests of another cell run on")
    recorder.steps = []
    started = time.monotonic()
    requests: list[RequestObservation] = []
    for number, round_ in enumerate(workload.rounds):
        recorder.round = number
        if round_.before is not None:
            _BEFORE[round_.before](engine)
        for batch in _batches(round_):
            requests += _run_batch(engine, number, batch, sampling, token_ids)
    return EngineObservation(
        facts=facts, requests=requests, steps=recorder.steps, run_s=time.monotonic() - started
    )


def _sleep(engine: Engine) -> None:
    """Move the weights off the card and back; caches are given up."""
    engine.core.sleep(level=1)
    engine.core.wake_up()


def _sleep_deeply(engine: Engine) -> None:
    """Give the weights up too, and read them anew."""
    engine.core.sleep(level=2)
    engine.core.wake_up(tags=["weights"])
    engine.core.collective_rpc("reload_weights")
    engine.core.wake_up(tags=["kv_cache"])


def _reload(engine: Engine) -> None:
    """Read the weights anew over ruins, so that what is not read shows in the answers."""
    engine.core.collective_rpc(spoil)
    engine.core.collective_rpc("reload_weights")


_BEFORE: dict[str, Callable[[Engine], None]] = {
    "sleep": _sleep,
    "sleep_deeply": _sleep_deeply,
    "reload": _reload,
}


def spoil(worker: Any) -> None:
    """On a worker: set to zero every parameter, and every buffer that the plugin computes of them."""
    for module in worker.get_model().modules():
        own = list(module.parameters(recurse=False))
        if type(module).__module__.startswith("vllm_metis."):
            own += module.buffers(recurse=False)
        for tensor in own:
            tensor.data.zero_()


def _batches(round_: Round) -> Iterator[list[tuple[int, str, int]]]:
    """(position in the round, prompt, step of arrival) of requests that may meet in the engine."""
    prompts = list(enumerate(round_.prompts))
    if round_.schedule == "alone":
        yield from ([(index, prompt, 0)] for index, prompt in prompts)
    else:
        every = round_.arrive_every_steps or 0
        yield [(index, prompt, index * every) for index, prompt in prompts]


def _run_batch(
    engine: Engine,
    number: int,
    batch: list[tuple[int, str, int]],
    sampling: Sampling,
    token_ids: dict[str, list[int]],
) -> list[RequestObservation]:
    params = SamplingParams(**sampling.model_dump(), detokenize=False)
    prompts = {f"{number}.{index}-{prompt}": (prompt, step) for index, prompt, step in batch}
    requests = [
        Request(name, token_ids[prompt], params, step) for name, (prompt, step) in prompts.items()
    ]
    finished = {
        output.request_id: _request(
            output, number, prompts[output.request_id][0], sampling.logprobs
        )
        for outputs in engine.steps(requests)
        for output in outputs
        if output.finished
    }
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


if __name__ == "__main__":
    child_loop.main(build)
