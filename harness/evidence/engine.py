# SPDX-License-Identifier: Apache-2.0
"""What an engine says of itself and of prompts, whichever kind of cell asks."""

from __future__ import annotations

from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from harness.evidence.base import Evidence


class EngineFacts(Evidence):
    """Settings as the engine resolved them, in vLLM's own spelling.

    What has a default was not written down by speed and smoke cells before December 2026; their
    records are read all the same, and keep what they have when they are judged again.
    """

    dtype: str
    quantization: str | None
    max_model_len: int
    enforce_eager: bool
    block_size: int | None = None
    mamba_block_size: int | None = None
    mamba_cache_mode: str | None = None
    mamba_cache_dtype: str | None = None
    mamba_ssm_cache_dtype: str
    kv_cache_dtype: str
    enable_prefix_caching: bool
    num_gpu_blocks: int | None = None
    max_num_batched_tokens: int
    max_num_seqs: int
    async_scheduling: bool | None = None
    compilation_mode: str | None = None
    cudagraph_mode: str
    cudagraph_capture_sizes: list[int] = []
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    attention_backends: list[str] = []
    # "attention", "conv", "ssm" to the dtypes of the tensors that were allocated.
    cache_tensor_dtypes: dict[str, list[str]] = {}
    # By torch.compile in the workers, and those of them that load a buffer after storing to it.
    generated_kernels: int | None = None
    reloading_kernels: list[str] = []
    device: str

    @model_serializer(mode="wrap")
    def _as_observed(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if name in self.model_fields_set}


class PromptLogprobs(Evidence):
    """One prompt as the engine scored it. `T` is its length less one, `K` the number of top tokens."""

    prompt: str
    token_ids: list[int]  # (T,), of the prompt after its first
    logprobs: list[float]  # (T,), nats
    top_token_ids: list[list[int]]  # (T, K), most likely first
    top_logprobs: list[list[float]]  # (T, K), nats

    @property
    def id(self) -> str:
        """What names it among others."""
        return self.prompt
