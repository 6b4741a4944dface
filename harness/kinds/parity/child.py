# SPDX-License-Identifier: Apache-2.0
"""The child of a parity matrix: an engine, everything public about it written down.

Run as `python -m harness.kinds.parity.child CONFIG` by harness/run/cells.py. What is observed comes
from interfaces that vLLM offers: `RequestOutput`, the resolved `VllmConfig`, and a stat logger, which
the engine tells of each step (how many prompt tokens it computed, whom it preempted, which CUDA graph
it replayed). A round that is asked several times is written down once, with what differed later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from vllm import SamplingParams
from vllm.v1.metrics.loggers import StatLoggerBase

from harness.checkpoints.drawn import DRAWN_ARGS, configuration_only, draw_weights
from harness.engine import Engine, Request
from harness.evidence.engine import EngineFacts
from harness.evidence.repetitions import Repetitions
from harness.kinds.parity.observation import EngineObservation, RequestObservation, Step
from harness.kinds.parity.settings import Sampling
from harness.kinds.settings import Round, Workload
from harness.process import child_loop
from harness.repetition import Repeated

_OWN_ARGS: dict[str, Any] = {
    "disable_log_stats": False,
    "enable_logging_iteration_details": True,
    "cudagraph_metrics": True,
}


class StepRecorder(StatLoggerBase):
    """Keeps what the engine reports of each step that scheduled tokens."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0):
        self.begin(0)

    def begin(self, round_: int) -> None:
        """Keep the steps of a round from here on, and no earlier ones."""
        self.round = round_
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
        config: `args` (EngineArgs by name), and `model` (a checkpoint folder), or `drawn` (shape, dtype
            and seed of weights that are drawn) and `cache` (a folder).
    """
    recorder = StepRecorder()
    args = {**config["args"], **_OWN_ARGS}
    loggers = [lambda *_: recorder]
    if drawn := config.get("drawn"):
        folder = configuration_only(Path(config["cache"]), drawn["shape"], drawn["dtype"])
        engine = Engine(str(folder), {**args, **DRAWN_ARGS}, stat_loggers=loggers)
        engine.apply(lambda model: draw_weights(model, drawn["seed"]))
    else:
        engine = Engine(config["model"], args, in_process=False, stat_loggers=loggers)
    facts = engine.facts

    def handle(job: dict[str, Any]) -> BaseModel:
        workload = Workload.model_validate(job["settings"]["workload"])
        sampling = Sampling.model_validate(job["settings"]["sampling"])
        return _observe(engine, recorder, facts, workload, sampling, job["token_ids"])

    vocab_size = engine.core.model_config.get_vocab_size()
    return {**facts.model_dump(), "vocab_size": vocab_size}, handle


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
    started = time.monotonic()
    requests: list[RequestObservation] = []
    steps: list[Step] = []
    repetitions: list[Repetitions] = []
    for number, round_ in enumerate(workload.rounds):
        if round_.before is not None:
            _BEFORE[round_.before](engine)
        repeated = Repeated(number)
        for is_again in range(round_.times):
            recorder.begin(number)
            outputs = list(_ask(engine, number, round_, sampling, token_ids))
            if not is_again:
                steps += recorder.steps
                requests += [_request(one, number, sampling.logprobs) for one in outputs]
            if round_.times > 1:
                repeated.add(outputs, tuple(map(_made_up_of, recorder.steps)))
        if round_.times > 1:
            repetitions.append(repeated.found())
    return EngineObservation(
        facts=facts,
        requests=requests,
        steps=steps,
        run_s=time.monotonic() - started,
        repetitions=repetitions,
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


def _ask(
    engine: Engine,
    number: int,
    round_: Round,
    sampling: Sampling,
    token_ids: dict[str, list[int]],
) -> Iterator[Any]:
    """Ask a round once; yield what its requests gave, in their order."""
    params = SamplingParams(
        **sampling.model_dump(),
        prompt_logprobs=sampling.logprobs if round_.prompt_rows else None,
        detokenize=False,
    )
    for batch in round_.batches():
        requests = [
            Request(f"{number}.{index}-{prompt}", token_ids[prompt], params, step)
            for index, prompt, step in batch
        ]
        answers, _ = engine.answers(requests)
        yield from answers


def _made_up_of(step: Step) -> Step:
    """Return of a step what must be the same each time; the cache fills from one to the next."""
    return step.model_copy(update={"kv_cache_usage": 0.0})


def _request(output: Any, number: int, top: int) -> RequestObservation:
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
        prompt=output.request_id.partition("-")[2],
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
