# SPDX-License-Identifier: Apache-2.0
"""A process that reloads the weights of a tiny engine over ruins, and says what did not come back.

    python -m tests.reloading_engine MODEL

Routed experts are left out: on a CPU vLLM 0.31 packs them when they are first loaded, and only then,
for which reason a reload is refused there.
"""

import os
import sys
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}

import torch
from vllm import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from harness.kinds.parity.child import spoil
from tests.engines import ARGS


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: t.detach().clone() for name, t in named.items() if ".routed_experts." not in name}


def reload(worker: Any) -> None:
    model = worker.get_model()
    before = tensors(model)
    spoil(worker)
    spoiled = [name for name, t in tensors(model).items() if not torch.equal(t, before[name])]
    try:
        worker.reload_weights()
    except ValueError as error:
        print(f"refused: {error}")
    model.holds_weights = False
    worker.reload_weights()
    after = tensors(model)
    wrong = [name for name in before if not torch.equal(after[name], before[name])]
    print(f"{len(spoiled)} of {len(before)} tensors spoiled, wrong after the reload: {wrong}")


if __name__ == "__main__":
    engine = LLMEngine.from_engine_args(EngineArgs(model=sys.argv[1], **ARGS))
    engine.collective_rpc(reload)
