# SPDX-License-Identifier: Apache-2.0
"""The record of one cell: what was asked, what was observed, what was decided.

A record is evidence first. `observation` and `reference` are written once and never changed;
`verdict` is a pure function of the rest (harness/judge.py) and may be decided again at any time. A
run is a folder of records beside `run.json`, which names the cells that were selected, so that a
missing record shows.

The schema is versioned by a literal: a breaking change raises it, and an older file is refused by
name. Saving is atomic, and `load(save(record)) == record`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.measurements import (
    PromptObservation,
    ServedObservation,
    SoakObservation,
    SpeedObservation,
    TimingObservation,
)

SCHEMA_VERSION: Literal[1] = 1
RUN_FILE = "run.json"

VerdictName = Literal["pass", "fail", "error", "skip", "not_reached"]
FailureKind = Literal[
    "refused", "start_timeout", "crashed", "timeout", "garbage", "failed", "system"
]


_Loaded = TypeVar("_Loaded", bound=BaseModel)


class RecordError(ValueError):
    """A record or run folder cannot be read; the message holds one fault a line."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class EngineFacts(_Model):
    """Settings as the engine resolved them, in vLLM's own spelling."""

    dtype: str
    quantization: str | None
    max_model_len: int
    enforce_eager: bool
    block_size: int
    mamba_block_size: int | None
    mamba_cache_mode: str
    mamba_cache_dtype: str
    mamba_ssm_cache_dtype: str
    kv_cache_dtype: str
    enable_prefix_caching: bool
    num_gpu_blocks: int | None
    max_num_batched_tokens: int
    max_num_seqs: int
    async_scheduling: bool | None
    compilation_mode: str
    cudagraph_mode: str
    cudagraph_capture_sizes: list[int]
    tensor_parallel_size: int
    enable_expert_parallel: bool = False
    attention_backends: list[str]
    # "attention", "conv", "ssm" to the dtypes of the tensors that were allocated.
    cache_tensor_dtypes: dict[str, list[str]]
    device: str


class RequestObservation(_Model):
    """One finished request. `T` is the number of generated tokens, `K` the number of top tokens."""

    id: str
    prompt: str
    round: int
    num_prompt_tokens: int
    token_ids: list[int]  # (T,)
    logprobs: list[float]  # (T,), of the generated token, nats
    top_token_ids: list[list[int]]  # (T, K), most likely first
    top_logprobs: list[list[float]]  # (T, K), nats
    num_cached_tokens: int
    num_preemptions: int
    finish_reason: str | None
    ttft_ms: float | None
    e2el_ms: float | None


class Step(_Model):
    """One engine step as the scheduler reported it."""

    round: int
    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    decode_tokens: int
    preempted_requests: int
    kv_cache_usage: float
    cudagraph_runtime_mode: str | None
    padded_tokens: int | None


class EngineObservation(_Model):
    """What one cell saw of one engine."""

    kind: Literal["engine"] = "engine"
    facts: EngineFacts
    requests: list[RequestObservation]
    steps: list[Step]
    run_s: float


class ParserObservation(_Model):
    """What one cell saw of the parsers: counts, and each case that went wrong in words."""

    kind: Literal["parser"] = "parser"
    cases: int
    comparisons: int
    faults: list[str]
    run_s: float


Observation = Annotated[
    EngineObservation
    | ParserObservation
    | PromptObservation
    | ServedObservation
    | TimingObservation
    | SpeedObservation
    | SoakObservation,
    Field(discriminator="kind"),
]


class Scores(_Model):
    """Teacher-forced scores of one request's tokens by the reference port, in one precision."""

    logprobs: list[float]  # (T,), of the candidate's token, nats
    top_logprobs: list[list[float]]  # (T, K), at the candidate's top tokens, nats
    argmax: list[int]  # (T,)
    argmax_logprobs: list[float]  # (T,), nats
    max_abs_logit: list[float]  # (T,)


class PromptFloor(_Model):
    """Error of the port in the served precision against FP32 at the positions inside a prompt.

    They cost nothing (the same forward pass gives them) and are many: the worst of a hundred
    generated positions says little of the worst that a precision does.
    """

    positions: int
    maximum: dict[str, float]  # by metric; of the port's own best tokens
    mean: dict[str, float]


class RequestScores(_Model):
    """The FP32 reference, and the port in the served precision (None where that is FP32)."""

    reference: Scores
    port: Scores | None
    prompt_floor: PromptFloor | None


class Reference(_Model):
    """Scores in the order of the observation's requests."""

    checkpoint_sha256: str
    requests: list[RequestScores]


class Failure(_Model):
    """Why there is no observation, or no reference."""

    kind: FailureKind
    message: str
    log_tail: str = ""


class Corpus(_Model):
    """The prompts as frozen token ids."""

    sha256: str
    token_ids: dict[str, list[int]]


class Identity(_Model):
    """What makes two records of a cell the same measurement."""

    cell_sha256: str  # settings and prompt definitions
    versions_sha256: str  # packages, plugin and reference sources, card


class Finding(_Model):
    """One metric against its budget; `budget` is None where the metric is only reported."""

    metric: str
    observed: float
    budget: float | None
    floor: float | None
    passed: bool

    @property
    def margin(self) -> float | None:
        """Budget minus observed."""
        return None if self.budget is None else self.budget - self.observed


class ReachFact(_Model):
    """One thing that the cell claims about its run."""

    fact: str
    expected: str
    found: str
    reached: bool


class NearTie(_Model):
    """A generated token that is not the reference's, where the reference hardly prefers its own."""

    request: str
    position: int
    token_id: int
    reference_token_id: int
    margin_nats: float
    limit_nats: float


class WorstPosition(_Model):
    """A position of largest logprob error."""

    request: str
    position: int
    token_id: int
    reference: float
    candidate: float
    port: float | None


class Verdict(_Model):
    """What was decided, and from what."""

    verdict: VerdictName
    reasons: list[str] = []
    findings: list[Finding] = []
    reach: list[ReachFact] = []
    near_ties: list[NearTie] = []
    worst: list[WorstPosition] = []


class Record(_Model):
    """Everything known of one cell of one run."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run: str
    matrix: str
    kind: str
    cell: str
    axes: dict[str, str]
    engine_group: str
    settings: dict[str, Any]
    identity: Identity
    environment: dict[str, Any]
    seeds: dict[str, int]
    timings_s: dict[str, float]
    log: str | None
    corpus: Corpus | None = None
    observation: Observation | None = None
    reference: Reference | None = None
    failure: Failure | None = None
    verdict: Verdict | None = None


class Run(_Model):
    """The header of a run folder."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run: str
    matrix: str
    matrix_path: str
    question: str
    cells: list[str]
    started: str
    environment: dict[str, Any]


def write_atomic(path: Path, text: str) -> None:
    """Write a file whole or not at all: nobody reads half, a full disk leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def record_path(run: Path, cell: str) -> Path:
    """The file of one cell."""
    return run / f"{cell}.json"


def save(record: Record, run: Path) -> Path:
    """Write a record into its run folder and return the file."""
    path = record_path(run, record.cell)
    write_atomic(path, record.model_dump_json(indent=1) + "\n")
    return path


def load(path: Path) -> Record:
    """Read one record.

    Raises:
        RecordError: with every fault of the file, when it is missing, cut short or of another
        schema.
    """
    return _load(path, Record)


def save_run(header: Run, run: Path) -> None:
    """Write the header of a run folder."""
    write_atomic(run / RUN_FILE, header.model_dump_json(indent=1) + "\n")


def load_run(run: Path) -> tuple[Run, list[Record], list[str]]:
    """Read a run folder.

    Returns:
        The header, the readable records in the order of the matrix, and one sentence for each cell
        whose record is missing or unreadable.

    Raises:
        RecordError: when the folder has no readable header.
    """
    if not run.is_dir():
        raise RecordError(f"{run}: not a folder; expected a run folder such as results/<run>")
    header = _load(run / RUN_FILE, Run)
    records, faults = [], []
    for cell in header.cells:
        path = record_path(run, cell)
        if not path.exists():
            faults.append(f"{cell}: no record; the cell was selected but did not finish")
            continue
        try:
            records.append(load(path))
        except RecordError as error:
            faults.append(f"{cell}: {error}")
    return header, records, faults


def _load(path: Path, model: type[_Loaded]) -> _Loaded:
    try:
        return model.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise RecordError(f"{path}: {'; '.join(_faults(error))}") from error


def _faults(error: ValidationError) -> Iterable[str]:
    for fault in error.errors(include_url=False, include_input=False):
        place = ".".join(str(part) for part in fault["loc"])
        yield f"{place}: {fault['msg']}" if place else fault["msg"]
