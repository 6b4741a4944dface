# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by the tests: checkpoints are written once per run, whatever the workers."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Before vLLM is imported: the tests need no GPU, hub or usage statistics.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
# Tests share the cores among pytest's workers: threads of their own only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from filelock import FileLock

GOLDEN = Path(__file__).parent / "golden"

# Workers take files in this order, the long ones first, so that none is left with one at the end.
# Teaching the model takes minutes, and test_real_smoke waits for it: by then it is there.
FIRST = (
    "test_taught.py",
    "test_engine_cases.py",
    "test_seeded_faults.py",
    "test_real_smoke.py",
    "test_own_server.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first, without taking a file's tests apart."""

    def place(item: pytest.Item) -> int:
        name = item.path.name
        return FIRST.index(name) if name in FIRST else len(FIRST)

    items.sort(key=place)


@pytest.fixture(autouse=True)
def _environment_kept() -> Iterator[None]:
    """Undo what a command that a test runs in this process does to the environment."""
    found = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(found)


@pytest.fixture(autouse=True)
def _checkpoints_bring_their_own_code() -> Iterator[None]:
    """Undo what would take the place of a checkpoint's own code in later tests of this process.

    That is vLLM's registration of the plugin's configuration class with Transformers, and code that
    Transformers imported from another checkpoint and folder.
    """
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]
    auto = sys.modules.get("transformers.models.auto.configuration_auto")
    if auto is not None:
        auto.CONFIG_MAPPING._extra_content.pop("metis16", None)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that gives the folder of a checkpoint, written on the first call.

    Its arguments are those of `harness.checkpoints.write.write_checkpoint`, the spelling as text.
    """
    base = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        base = base.parent
    root = base / "checkpoints"
    root.mkdir(exist_ok=True)

    def write(shape: str = "tiny", spelling: str = "", **options: object) -> Path:
        from harness.checkpoints.spelling import Spelling
        from harness.checkpoints.write import write_checkpoint

        key = "-".join([shape, spelling, *(f"{k}={v}" for k, v in sorted(options.items()))])
        folder = root / key.replace(",", "_").replace("/", "_").strip("-")
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                write_checkpoint(folder, shape, spelling=Spelling.parse(spelling), **options)
        return folder

    return write
