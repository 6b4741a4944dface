# SPDX-License-Identifier: Apache-2.0
"""Files that are whole or absent, and hashes that say whether two things are the same."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

_SOURCES = {".py", ".jinja", ".yaml"}


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


def kept_folder() -> Path:
    """Return the folder of what outlives a run: METIS_CACHE, or ~/.cache/vllm-metis."""
    return Path(os.environ.get("METIS_CACHE", Path.home() / ".cache/vllm-metis"))


def digest(value: object) -> str:
    """Return the SHA-256 of a JSON value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sources_sha256(places: Iterable[Path]) -> str:
    """Return the SHA-256 of sources, names and contents, whatever their order.

    Args:
        places: files, and folders for the sources below them.
    """
    below = (place.rglob("*") if place.is_dir() else (place,) for place in places)
    total = hashlib.sha256()
    for file in sorted(file for files in below for file in files if file.suffix in _SOURCES):
        total.update(f"{file.name}\0".encode())
        total.update(file.read_bytes())
    return total.hexdigest()
