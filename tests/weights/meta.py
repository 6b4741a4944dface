# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's headers as the loader sees them, for tests that change one thing about it."""

import json
from pathlib import Path

import torch

from harness.checkpoints.spelling import AXES
from vllm_metis.checkpoint.audit import Audit
from vllm_metis.cli.check import read_headers
from vllm_metis.config import Metis16Config

ALL_AT_ONCE = ",".join(f"{axis}={values[-1]}" for axis, values in AXES.items())
"""The spelling of a release that is furthest from the plain one."""


def headers(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint on the meta device, by name."""
    tensors, faults = read_headers(folder)
    assert faults == []
    return tensors


def faults_of(folder: Path, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return what the audit finds when `tensors` stand under the folder's config.json."""
    audit = Audit(Metis16Config(**json.loads((folder / "config.json").read_text())))
    for name, tensor in tensors.items():
        list(audit.admit(name, tensor))
    return audit.faults()
