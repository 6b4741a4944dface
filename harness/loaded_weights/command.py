# SPDX-License-Identifier: Apache-2.0
"""`python -m harness loaded_weights DIR`: every tensor that vLLM holds, against the checkpoint.

Unquantized tensors must be bit-identical once they are in the model's dtype, FP8 ones equal to
their own rounding. Both passes must use the same weights, and each weight must be held once. On a
card the tensors are those of a running engine; on a CPU, where vLLM packs weights for its kernels
after loading, they are compared just before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from harness import exit_codes
from harness.checkpoints.folder import MODEL_VARIABLE, model_folder
from harness.checkpoints.quantize import FP8
from harness.loaded_weights.expected import (
    SCALE,
    UNKNOWN,
    Expectation,
    TensorComparison,
    module_kind,
)
from harness.loaded_weights.stored import StoredWeights

ROUNDED_SHARE_LIMIT = 0.0012
"""Largest share of a kind's values that rounding on load may put one FP8 step away, where a product
lies at a midpoint between two. Right kernels give 0 to this, another tensor's scale nearly 1."""

_ENGINE_ARGS: dict[str, Any] = {
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_seqs": 1,
    "kv_cache_memory_bytes": 2**30,
    "gpu_memory_utilization": 0.1,  # only a check at the start: what is free must be a tenth
}


@dataclass
class Report:
    """What was found; `faults` is empty where everything is as it must be.

    Attributes:
        compared: every tensor that the checkpoint stands behind.
        others: buffers that it does not.
        notes: a sentence on each of the other checks that held.
    """

    compared: list[TensorComparison] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def examine(model: nn.Module, stored: StoredWeights, quantization: str | None = None) -> Report:
    """Compare everything that a loaded `Metis16ForCausalLM` holds.

    Args:
        model: as vLLM holds it.
        quantization: as asked for on load.
    """
    report = Report()
    dtype: torch.dtype = model.vllm_config.model_config.dtype
    expectation = Expectation(stored, dtype, quantization is not None)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in _held(model):
        if module_kind(name) == UNKNOWN and name not in parameters:
            report.others.append(name)
            continue
        report.compared.append(expectation.compare(name, tensor))
    report.faults += [one.fault for one in report.compared if one.fault]
    report.faults += _faults_of_rounding(report.compared)
    report.faults += [
        f"{name}: in the checkpoint, but behind nothing that vLLM holds" for name in stored.unread()
    ]
    _check_passes(model, report)
    _check_memory(model, stored, dtype, quantization, report)
    return report


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by name; modules that vLLM registers twice, once."""
    seen = set()
    held = (model.named_parameters(remove_duplicate=False), model.named_buffers())
    for name, tensor in chain(*held):
        name = name.replace(".experts._shared_experts._layer.", ".shared_expert.")
        if name not in seen:
            seen.add(name)
            yield name, tensor


def _faults_of_rounding(compared: list[TensorComparison]) -> Iterator[str]:
    for kind, members in _by_kind([one for one in compared if one.rounded_on_load]).items():
        differing, values = _sum(members, "differing"), _sum(members, "values")
        if differing / values > ROUNDED_SHARE_LIMIT:
            yield (
                f"{kind}: {differing} of {values} values are one FP8 step off their own rounding, "
                f"more than {ROUNDED_SHARE_LIMIT:.2%}"
            )


def _check_passes(model: nn.Module, report: Report) -> None:
    """Every layer must have one mixer a pass, over one set of weights."""
    config = model.config
    layers, faults = 0, []
    for name, module in model.named_modules():
        if not name.endswith(".mixer"):
            continue
        layers += 1
        first, *later = getattr(module, "passes", [None])
        if 1 + len(later) != config.num_passes:
            faults.append(f"{name}: {1 + len(later)} passes, expected {config.num_passes}")
        for number, mixer in enumerate(later, start=1):
            if _storages(mixer) != _storages(first):
                faults.append(f"{name}: pass {number} does not use the weights of pass 0")
    if layers != config.num_hidden_layers:
        faults.append(f"{layers} layers have a mixer, expected {config.num_hidden_layers}")
    report.faults += faults
    if not faults:
        report.notes.append(f"{config.num_passes} passes over one set of weights, {layers} layers")


def _storages(module: Any) -> dict[str, int]:
    """Where each weight of a mixer lies; KV scales belong to a pass."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    return {name: tensor.data_ptr() for name, tensor in tensors if "_scale" not in name}


def _check_memory(
    model: nn.Module,
    stored: StoredWeights,
    dtype: torch.dtype,
    quantization: str | None,
    report: Report,
) -> None:
    """Each weight must be held once: the storages must add up to what serving is planned with."""
    from vllm_metis.checkpoint.specs import checkpoint_tensors
    from vllm_metis.cli.plan import weights_bytes
    from vllm_metis.config import Metis16Config

    config = Metis16Config(**stored.values)  # vLLM's says of a tied head that it is none
    tensors = dict(model.named_parameters())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors.values()}
    held = sum(storage.nbytes() for storage in storages.values())
    fp8 = [name for name, tensor in tensors.items() if tensor.dtype == FP8]
    if fp8 and not any(".routed_experts." in name for name in fp8):
        report.notes.append(f"{held} bytes of weights; no plan for experts expanded from FP8")
        return
    planned = weights_bytes(config, "fp8" if fp8 else {4: "fp32", 2: "bf16"}[dtype.itemsize], 1)
    if quantization is not None:  # one scale a tensor or expert, in place of one a row
        planned += sum(t.nbytes for name, t in tensors.items() if name.endswith(SCALE))
        planned -= sum(spec.scale_bytes("fp8") for spec in checkpoint_tensors(config).values())
    if held != planned:
        report.faults.append(
            f"weights take {held} bytes in {len(storages)} storages, expected {planned}: "
            "`python -m vllm_metis plan` counts each once"
        )
        return
    report.notes.append(f"{held} bytes of weights, as planned with each held once")


def table(compared: list[TensorComparison]) -> str:
    """Return the comparison by kind of module."""
    rows = [
        (
            kind,
            len(members),
            _sum(members, "nbytes"),
            _sum(members, "values"),
            _sum(members, "differing"),
            _verdict(kind, members),
        )
        for kind, members in _by_kind(compared).items()
    ]
    return tabulate(rows, ("kind", "tensors", "bytes", "values", "differing", "verdict"))


def _verdict(kind: str, members: list[TensorComparison]) -> str:
    if any(one.fault for one in members) or any(_faults_of_rounding(members)):
        return "DIFFERENT"
    if any(one.rounded_on_load for one in members):
        return "one FP8 step off" if _sum(members, "differing") else "its own rounding"
    return "as computed" if kind == "constants" else "identical"


def _sum(members: list[TensorComparison], of: str) -> int:
    return sum(getattr(one, of) for one in members)


def _by_kind(compared: list[TensorComparison]) -> dict[str, list[TensorComparison]]:
    found: dict[str, list[TensorComparison]] = {}
    for one in compared:
        found.setdefault(one.kind, []).append(one)
    return found


def examine_folder(folder: Path, dtype: str, quantization: str | None) -> Report:
    """Have vLLM load a checkpoint and examine what it holds.

    Args:
        dtype: as vLLM's `--dtype`.
        quantization: as vLLM's `--quantization`; None for what the checkpoint says.

    Raises:
        ValueError: rounding on load, which vLLM cannot do on a CPU.
    """
    from vllm import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    args = EngineArgs(str(folder), dtype=dtype, quantization=quantization, **_ENGINE_ARGS)
    stored = StoredWeights(folder)
    if current_platform.is_cpu():
        if quantization is not None:
            raise ValueError(
                f"--quantization {quantization}: vLLM rounds to FP8 after loading, and not on a CPU; "
                "quantize the checkpoint (`python -m harness quantize`) or use a card"
            )
        with before_packing(args) as model:
            return examine(model, stored)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the tensors must be in this process
    args.moe_backend = "triton"  # others put experts' weights in an order of their own
    engine = LLMEngine.from_engine_args(args)
    (report,) = engine.apply_model(lambda model: examine(model, stored, quantization))
    return report


@contextlib.contextmanager
def before_packing(args: Any) -> Iterator[nn.Module]:
    """Yield the model as it is loaded on a CPU, before vLLM replaces weights by packed ones.

    Args:
        args: vLLM's EngineArgs.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.model_loader.weight_tying import maybe_retie_word_embeddings
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = args.create_engine_config()
    model_config = config.model_config
    model_config.maybe_untie_word_embeddings()
    with (
        tempfile.TemporaryDirectory() as scratch,
        set_current_vllm_config(config),
        set_default_torch_dtype(model_config.dtype),
    ):
        init_distributed_environment(1, 0, f"file://{scratch}/rendezvous", 0, "gloo")
        try:
            ensure_model_parallel_initialized(1, 1)
            model = initialize_model(config)
            get_model_loader(config.load_config).load_weights(model, model_config)
            maybe_retie_word_embeddings(model, model_config)
            model.process_weights_after_loading()
            yield model
        finally:
            cleanup_dist_env_and_memory()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m harness loaded_weights`."""
    parser.add_argument(
        "folder", type=Path, nargs="?", metavar="DIR", help=f"a checkpoint; or ${MODEL_VARIABLE}"
    )
    parser.add_argument("--dtype", default="auto", help="vLLM's; default the checkpoint's own")
    parser.add_argument(
        "--quantization", choices=("fp8_per_tensor",), help="round to FP8 on load, on a card"
    )


def run(args: argparse.Namespace) -> int:
    """Print a table by kind of module and every difference; 1 where there is one."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
    try:
        folder = model_folder(args.folder, "loaded_weights DIR")
        report = examine_folder(folder, args.dtype, args.quantization)
    except ValueError as error:
        print(error, file=sys.stderr)
        return exit_codes.USAGE
    print(table(report.compared))
    for note in report.notes:
        print(note)
    if report.others:
        print(f"not of the checkpoint, so not compared: {', '.join(report.others)}")
    print(f"{len(report.faults)} fault(s):" if report.faults else "no difference")
    for fault in report.faults:
        print(f"  {fault}")
    return exit_codes.FAILED if report.faults else exit_codes.PASSED
