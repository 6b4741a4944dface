# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_metis plan`: what serving a model takes of a card, before buying the time.

The arithmetic follows vLLM 0.31: `Platform._align_hybrid_block_size` (platforms/interface.py)
for the block, `_get_kv_cache_groups_uniform_page_size` and `get_max_concurrency_for_kv_cache_config`
(v1/core/kv_cache_utils.py) for the pool. Nothing of vLLM or a GPU is needed.
"""

import argparse
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from vllm_metis.checkpoint.specs import MODEL_DTYPES, checkpoint_tensors
from vllm_metis.config import ConfigError, Metis16Config
from vllm_metis.hook import tensor_parallel_sizes

GIB = 2**30
GPU_MEMORY_UTILIZATION = 0.92  # vLLM's default

COMMON = {
    "vocab_size": 65536,
    "max_position_embeddings": 131072,
    "num_passes": 2,
    "max_passes": 5,
    "head_dim": 64,
    "attention_pass_lora_rank": 8,
    "mamba_expand": 2,
    "mamba_head_dim": 64,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 256,
    "num_streams": 4,
    "pass_embedding_dim": 64,
    "sinkhorn_iterations": 8,
    "route_feature_dim": 256,
    "memory_dim": 256,
    "continuation_logit_limit": 4.0,
    "moe_latent_size": 1024,
    "num_experts_per_tok": 4,
    "num_shared_experts": 1,
    "max_routed_k": 8,
    "rms_norm_eps": 1e-6,
    "mamba_norm_eps": 1e-5,
}
PUBLISHED = {
    "logos": COMMON
    | {
        "hidden_size": 2560,
        "num_hidden_layers": 20,
        "attention_layer_indices": [5, 10, 15],
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "mamba_n_groups": 10,
        "num_experts": 192,
        "moe_intermediate_size": 768,
    },
    "praxis": COMMON
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 12,
        "attention_layer_indices": [4, 8],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_n_groups": 8,
        "num_experts": 128,
        "moe_intermediate_size": 512,
    },
}
"""Geometry of the published models, for planning without a checkpoint at hand."""


@dataclass(frozen=True)
class Plan:
    """What one rank holds, in bytes, and what the engine makes of it.

    Attributes:
        weights_bytes: On one rank, the embedding counted once.
        kv_bytes_per_token: Keys and values of all attention layers and passes.
        state_bytes: Conv and SSM state of all Mamba layers and passes of one sequence.
        block_size: Tokens per block once vLLM has aligned it: the shortest prefix that can hit.
        pool_bytes: Left for the cache.
        num_blocks: Of the pool.
        blocks_per_sequence: That a sequence of `max_model_len` tokens takes.
    """

    weights_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    block_size: int
    pool_bytes: int
    num_blocks: int
    blocks_per_sequence: int

    @property
    def max_concurrency(self) -> float:
        """Sequences of `max_model_len` tokens that fit at once, as vLLM logs it."""
        return self.num_blocks / self.blocks_per_sequence


def weights_bytes(config: Metis16Config, dtype: str, tp: int) -> int:
    """Return the bytes of the parameters on one of `tp` ranks."""
    return sum(
        spec.nbytes(dtype, tp)
        for name, spec in checkpoint_tensors(config).items()
        if name != "lm_head.weight" or not config.tie_word_embeddings
    )


def cache_layers(config: Metis16Config) -> tuple[int, int]:
    """Return how many attention and Mamba cache layers there are: one per layer and pass."""
    attention = len(config.attention_layer_indices)
    return attention * config.num_passes, (config.num_hidden_layers - attention) * config.num_passes


def plan(
    config: Metis16Config,
    memory_bytes: int,
    max_model_len: int,
    dtype: str = "bf16",
    tp: int = 1,
    kv_dtype_bytes: int | None = None,
    ssm_dtype_bytes: int = 4,
    alignment: int = 16,
    reserve_bytes: int = 0,
) -> Plan:
    """Return what serving takes on one rank.

    Args:
        memory_bytes: For weights and cache together.
        alignment: Tokens that vLLM rounds a block up to: 16 on CUDA, 128 on a CPU.
        reserve_bytes: For activations, CUDA graphs and the runtime.
    """
    attention, mamba = cache_layers(config)
    model_bytes = MODEL_DTYPES[dtype]
    kv_bytes = kv_dtype_bytes or model_bytes
    kv_per_layer = 2 * (config.num_key_value_heads // tp) * config.head_dim * kv_bytes
    ssm = config.mamba_num_heads // tp * config.mamba_head_dim * config.mamba_d_state
    conv = config.conv_dim // tp * (config.mamba_d_conv - 1)
    state_per_layer = ssm * ssm_dtype_bytes + conv * model_bytes
    step = alignment * kv_per_layer
    block_size = max(alignment, -(-state_per_layer // step) * alignment)
    weights = weights_bytes(config, dtype, tp)
    pool = max(0, memory_bytes - weights - reserve_bytes)
    # Layers come in groups of one size, the smaller count, or the larger where they are close.
    smaller, larger = sorted((attention, mamba))
    group = larger if larger < 1.5 * smaller else smaller
    mamba_groups, attention_groups = -(-mamba // group), -(-attention // group)
    return Plan(
        weights_bytes=weights,
        kv_bytes_per_token=kv_per_layer * attention,
        state_bytes=state_per_layer * mamba,
        block_size=block_size,
        pool_bytes=pool,
        num_blocks=pool // (group * block_size * kv_per_layer),
        # Align mode keeps the running state and one checkpoint per Mamba group.
        blocks_per_sequence=attention_groups * -(-max_model_len // block_size) + 2 * mamba_groups,
    )


def describe(name: str, config: Metis16Config, found: Plan, arguments: argparse.Namespace) -> str:
    """Return the report."""
    sizes = ", ".join(map(str, tensor_parallel_sizes(config)))
    blocks = f"{found.num_blocks} blocks, {found.blocks_per_sequence} each"
    rows = (
        ("weights on each GPU", f"{found.weights_bytes / GIB:.2f}", "GiB"),
        ("reserved", f"{arguments.reserve:.2f}", "GiB"),
        ("left for the cache", f"{found.pool_bytes / GIB:.2f}", "GiB"),
        ("KV cache of a token", f"{found.kv_bytes_per_token / 1024:.2f}", "KiB"),
        ("states of a sequence", f"{found.state_bytes / 2**20:.2f}", "MiB"),
        ("block size", f"{found.block_size}", "tokens (no shorter prefix can hit)"),
        (
            f"sequences of {arguments.max_model_len} tokens",
            f"{found.max_concurrency:.2f}",
            f"at once ({blocks})",
        ),
        ("TP sizes that divide", "", sizes),
    )
    columns = ("left", "right", "left")
    table = tabulate(rows, tablefmt="plain", colalign=columns, disable_numparse=True)
    gpus = f"{arguments.tp} GPU(s) of {arguments.gpu_memory:g} GiB"
    return f"{name}, {arguments.dtype}, {gpus}\n{textwrap.indent(table, '  ')}"


def serve_line(model: str, arguments: argparse.Namespace, sequences: int) -> str:
    """Return the `vllm serve` command for the planned settings."""
    parts = [
        f"vllm serve {model}",
        f"--max-model-len {arguments.max_model_len}",
        f"--max-num-seqs {sequences}",
        "--reasoning-parser metis --enable-auto-tool-choice --tool-call-parser metis",
    ]
    if arguments.tp > 1:
        parts.append(f"--tensor-parallel-size {arguments.tp}")
    return " ".join(parts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="DIR|logos|praxis", help="a checkpoint or its name"
    )
    parser.add_argument("--gpu-memory", type=float, required=True, metavar="GIB", help="of a GPU")
    parser.add_argument("--max-model-len", type=int, required=True, help="prompt and answer")
    parser.add_argument("--tp", type=int, default=1, help="GPUs to split the model over")
    parser.add_argument(
        "--dtype", choices=MODEL_DTYPES, default="bf16", help="fp8: an FP8 checkpoint"
    )
    parser.add_argument(
        "--reserve",
        type=float,
        default=2.0,
        metavar="GIB",
        help="for activations and CUDA graphs (default 2)",
    )


def read_config(model: str) -> tuple[str, Metis16Config]:
    """Return a name to serve and the configuration of a folder or a published model.

    Raises:
        ConfigError: No such model, or its configuration is unusable.
    """
    if model in PUBLISHED:
        return f"Lernex/Metis-1.6-{model.capitalize()}", Metis16Config(**PUBLISHED[model])
    path = Path(model) / "config.json"
    if not path.is_file():
        names = ", ".join(PUBLISHED)
        raise ConfigError(f"--model {model}: expected a folder with config.json, or {names}")
    config = Metis16Config(**json.loads(path.read_text()))
    config.check()
    return model, config


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; return 0 when it fits, 1 when it does not, 2 for unusable arguments."""
    try:
        name, config = read_config(arguments.model)
    except ConfigError as error:
        print(error)
        return 2
    sizes = tensor_parallel_sizes(config)
    if arguments.tp not in sizes:
        print(f"--tp {arguments.tp} does not divide; sizes that do: {', '.join(map(str, sizes))}")
        return 2
    found = plan(
        config,
        memory_bytes=int(arguments.gpu_memory * GIB * GPU_MEMORY_UTILIZATION),
        max_model_len=arguments.max_model_len,
        dtype=arguments.dtype,
        tp=arguments.tp,
        reserve_bytes=int(arguments.reserve * GIB),
    )
    print(describe(name, config, found, arguments))
    if found.max_concurrency < 1:
        print("\nDoes not fit: shorten --max-model-len, use FP8 or more GPUs.")
        return 1
    print(f"\n{serve_line(name, arguments, min(256, int(found.max_concurrency)))}")
    return 0
