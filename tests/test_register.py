# SPDX-License-Identifier: Apache-2.0
"""The plugin's entry point: what it registers, in which processes, and on which vLLM."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import vllm_metis
from vllm_metis.version import unsupported_vllm


def run_python(code: str) -> str:
    """Run code in a fresh interpreter; return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_declares_one_entry_point():
    found = entry_points(group="vllm.general_plugins", name="metis")
    assert [entry.value for entry in found] == ["vllm_metis:register"]


def test_importing_the_packages_imports_neither_torch_nor_vllm():
    printed = run_python(
        "import sys, vllm_metis, vllm_metis.checkpoint, vllm_metis.cli\n"
        "import vllm_metis.model, vllm_metis.parser\n"
        "print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    )
    assert printed.strip() == "set()"


def test_registering_imports_no_model_and_initialises_no_cuda():
    printed = run_python(
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "import sys, torch\n"
        "print(sorted(m for m in sys.modules if m.startswith('vllm_metis')))\n"
        "print(torch.cuda.is_initialized())"
    )
    assert printed.split("\n")[0] == str(["vllm_metis", "vllm_metis.hook", "vllm_metis.version"])
    assert printed.split("\n")[1] == "False"


def test_registering_twice_changes_nothing_and_warns_of_nothing(caplog):
    from vllm.model_executor.models import ModelRegistry

    vllm_metis.register()
    first = ModelRegistry.models["Metis16ForCausalLM"]
    caplog.clear()
    vllm_metis.register()
    assert ModelRegistry.models["Metis16ForCausalLM"] == first
    assert [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")] == []


def test_the_architecture_the_configuration_and_the_parsers_resolve():
    from vllm.model_executor.models import ModelRegistry
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    vllm_metis.register()
    from vllm_metis.config import Metis16Config

    assert "Metis16ForCausalLM" in ModelRegistry.get_supported_archs()
    assert _CONFIG_REGISTRY["metis16"] is Metis16Config
    assert (
        ReasoningParserManager.get_reasoning_parser("metis").__module__
        == "vllm_metis.parser.adapters"
    )
    assert ToolParserManager.get_tool_parser("metis").__module__ == "vllm_metis.parser.adapters"


@pytest.mark.parametrize(
    "version", ["0.31.0", "0.31.4", "0.31.0rc1", "0.31.0+cu130", "0.31.0+cpu", "0.31.0.dev7"]
)
def test_every_build_of_the_minor_is_supported(monkeypatch, version):
    monkeypatch.setattr("vllm.__version__", version)
    assert unsupported_vllm() is None


@pytest.mark.parametrize("version", ["0.30.2", "0.32.0", "1.31.0", "dev"])
def test_another_vllm_is_named_with_what_is_needed_and_how_to_get_it(monkeypatch, version):
    monkeypatch.setattr("vllm.__version__", version)
    reason = unsupported_vllm()
    for part in (f"vLLM {version}", ">=0.31,<0.32", "pip install 'vllm-metis[cuda]'"):
        assert part in reason


def test_a_vllm_without_the_parser_engine_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "lacks vllm.parser.engine" in unsupported_vllm()


WRONG_VERSION = """
import vllm
vllm.__version__ = "0.30.2"
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.models import ModelRegistry
print("Metis16ForCausalLM" in ModelRegistry.get_supported_archs())
print("LlamaForCausalLM" in ModelRegistry.get_supported_archs())
from transformers import AutoConfig
try:
    AutoConfig.for_model("metis16")
except RuntimeError as error:
    print(error)
"""


def test_beside_another_vllm_other_models_work_and_metis_is_refused_with_the_reason():
    metis, llama, *reason = run_python(WRONG_VERSION).strip().split("\n")[-3:]
    assert (metis, llama) == ("False", "True")
    assert "needs vLLM 0.31" in reason[0]
    assert "found vLLM 0.30.2" in reason[0]


def test_an_allow_list_that_names_another_plugin_leaves_metis_out():
    printed = run_python(
        "import os; os.environ['VLLM_PLUGINS'] = 'other'\n"
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.model_executor.models import ModelRegistry\n"
        "print('Metis16ForCausalLM' in ModelRegistry.get_supported_archs())"
    )
    assert printed.strip().endswith("False")
