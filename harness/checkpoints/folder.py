# SPDX-License-Identifier: Apache-2.0
"""The folder of a model that is not made here: where it is named, and what tells it from another.

A fingerprint reads headers, sizes and samples, so that 20 GB of weights cost nothing to name.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

MODEL_VARIABLE = "METIS_MODEL_DIR"

_SAMPLES = 256  # of a file, at even distances
_SAMPLE_BYTES = 4096


class ModelError(ValueError):
    """No model is named, or the folder that is named holds none; the message says what to do."""


def model_folder(named: str | os.PathLike[str] | None, how_to_name: str) -> Path:
    """Return the folder of the model that is named, or that METIS_MODEL_DIR names.

    Args:
        how_to_name: what to pass, for the error.

    Raises:
        ModelError: there is none.
    """
    found = named or os.environ.get(MODEL_VARIABLE)
    if not found:
        raise ModelError(f"no model is named: pass {how_to_name}, or set {MODEL_VARIABLE}")
    folder = Path(found).resolve()
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} is no checkpoint: expected config.json and *.safetensors")
    return folder


def configuration(folder: Path) -> dict[str, Any]:
    """Return the config.json of a checkpoint."""
    values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return values


def vocab_size(folder: Path) -> int:
    """Return the size of a checkpoint's vocabulary."""
    from vllm_metis.config import Metis16Config  # knows every spelling of the key

    return int(Metis16Config(**configuration(folder)).vocab_size)


def fingerprint(folder: Path) -> str:
    """Return a SHA-256 of config.json and of each safetensors file's size, header and samples."""
    total = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        total.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            total.update(file.read(length))
            for sample in range(_SAMPLES):
                file.seek(8 + length + (size - 8 - length) * sample // _SAMPLES)
                total.update(file.read(_SAMPLE_BYTES))
    return total.hexdigest()
