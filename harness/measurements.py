# SPDX-License-Identifier: Apache-2.0
"""What cells observe that are no parity cells of a made checkpoint: a part of the record's schema.

Evidence only. What follows from it is decided in harness/judge_measured.py, again whenever asked.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class EngineSettings(_Model):
    """What an engine in its own process resolved, in vLLM's spelling."""

    dtype: str
    quantization: str | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    mamba_ssm_cache_dtype: str
    kv_cache_dtype: str
    enforce_eager: bool
    cudagraph_mode: str
    device: str


class PromptLogprobs(_Model):
    """One prompt as the engine scored it. `T` is its length less one, `K` the number of top tokens."""

    prompt: str
    token_ids: list[int]  # (T,), of the prompt after its first
    logprobs: list[float]  # (T,), nats
    top_token_ids: list[list[int]]  # (T, K), most likely first
    top_logprobs: list[list[float]]  # (T, K), nats


class PromptObservation(_Model):
    """Prompt logprobs of an engine."""

    kind: Literal["prompt"] = "prompt"
    settings: EngineSettings
    prompts: list[PromptLogprobs]
    run_s: float


class FunctionCall(_Model):
    """A tool call as a client got it; the arguments are the text that was sent."""

    name: str
    arguments: str


class ServedAnswer(_Model):
    """One answer of a server, and what of its request decides how it must look."""

    prompt: str
    streamed: bool
    enable_thinking: bool
    tools: list[dict[str, Any]]
    after_tool_result: bool
    reasoning: str | None
    content: str | None
    tool_calls: list[FunctionCall]
    finish_reason: str | None
    completion_tokens: int


class ServedObservation(_Model):
    """Answers of a server to chat requests."""

    kind: Literal["served"] = "served"
    answers: list[ServedAnswer]
    run_s: float


class ServedStream(_Model):
    """One streamed completion, as a client saw it; times are counted from the start of its round."""

    round: int
    prompt_tokens: int
    completion_tokens: int
    sent_ms: float
    first_token_ms: float
    last_token_ms: float


class TimingObservation(_Model):
    """Rounds of equal streams that a client held open at once."""

    kind: Literal["timing"] = "timing"
    streams: list[ServedStream]


class Kernel(_Model):
    """One CUDA kernel, or operator on a CPU, in a decode step, on average over those profiled."""

    name: str
    calls: float
    total_us: float


class SpeedRound(_Model):
    """One round: equal requests that arrived together, driven step by step."""

    first_token_ms: float
    last_token_ms: float
    steps: int  # that gave tokens
    tokens: list[int]  # generated, by request
    last_token_ids: list[int]


class SpeedObservation(_Model):
    """Speed of an engine in its own process, and what bounds it.

    Attributes:
        startup_s: from the start of the process until the engine was ready.
        memory_bytes: in use on the card, or by the process on a CPU.
        copy_bytes_s: of a copy within the device's memory, bytes read and written, in this run.
        bytes_moved: least number of bytes that a decode step, or the prefill, must move.
        distinct_experts: chosen in a layer by the tokens of a step, and expected of even routing.
    """

    kind: Literal["speed"] = "speed"
    settings: EngineSettings
    rounds: list[SpeedRound]
    prompt_tokens: int
    startup_s: float
    memory_bytes: int
    copy_bytes_s: float
    bytes_moved: int
    distinct_experts: tuple[float, float]
    kernels: list[Kernel]


class RequestCounts(_Model):
    """What became of the requests of one kind.

    Attributes:
        sent: by a client, whole or streamed.
        completed: answered to the end, and compared with the answer given alone.
        refused: answered with the 4xx that is right for them.
        left: disconnected or aborted by the client, as it meant to.
        failed: all else; `SoakObservation.errors` says how.
    """

    sent: int
    completed: int
    refused: int
    left: int
    failed: int


class Difference(_Model):
    """A request whose answer is not the one it gets alone; both answers as a client reads them."""

    request: str
    when: str  # in the traffic, and how long after it began, or alone after it
    alone: dict[str, Any]
    found: dict[str, Any]


class Percentiles(_Model):
    """Of times in milliseconds."""

    p50: float
    p90: float
    p99: float


class Minute(_Model):
    """Latency of the answers that ended in one minute; None where too few came to tell."""

    minute: int
    streams: int
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None


class Sample(_Model):
    """The server at one moment, and what ended since the sample before.

    Attributes:
        t_s: since the traffic began.
        rss_bytes: resident memory of the server's processes.
        card_bytes: memory in use on all cards, whoever uses it; None without one.
        running, waiting: requests, as the scheduler counts them.
        kv_cache_usage: share of the pool, 0 to 1; the fullest engine's.
        preemptions: since the server started.
        completed, ttft_ms, itl_ms: answers that ended, and the medians of those streamed.
    """

    t_s: float
    rss_bytes: int
    card_bytes: int | None
    running: int
    waiting: int
    kv_cache_usage: float
    preemptions: int
    completed: int
    ttft_ms: float | None
    itl_ms: float | None


class SoakObservation(_Model):
    """Traffic of many clients, mixed, and what it left of the server.

    Attributes:
        run_s: from the first request of the traffic to the end of the last.
        peak_in_flight: requests that clients had open at once, at most.
        requests: by kind.
        different, unstable: answers that differ from those given alone: in the traffic, and of the
            same requests alone after it. The first ones are in `differences`, in full.
        error_count: what was no client's fault; the first ones are in `errors`.
        counters: by vLLM's name, what the server added in the traffic; over its engines.
        finished_by_engine: requests that each engine of the server finished.
        healthy: it answered its health check when all was over.
        stopped: it ended in time when it was asked to.
        orphans: its processes that outlived it.
    """

    kind: Literal["soak"] = "soak"
    run_s: float
    peak_in_flight: int
    requests: dict[str, RequestCounts]
    different: int
    unstable: int
    differences: list[Difference]
    error_count: int
    errors: list[str]
    minutes: list[Minute]
    samples: list[Sample]
    counters: dict[str, float]
    finished_by_engine: dict[str, int]
    completion_tokens: int
    healthy: bool
    stopped: bool
    orphans: list[str]
