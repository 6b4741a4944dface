# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.cancelling_engine DIR`: traffic with cancellations must leave no trace.

Serves 400 short requests over a pool of few blocks and cancels every third after some of its
tokens, then asks the first 20 again and prints how many answers are the same.
"""

import os
import random
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["TORCH_COMPILE_DISABLE"] = "1"

from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from tests.engines import ARGS, ids

REQUESTS, ASKED_AGAIN = 400, 20


def main(folder: str) -> None:
    args = {**ARGS, "enable_prefix_caching": True, "num_gpu_blocks_override": 48}
    engine = LLMEngine.from_engine_args(EngineArgs(model=folder, **args))
    draw = random.Random(0)
    lengths = [draw.randrange(1, 120) for _ in range(REQUESTS)]
    cancelled: set[str] = set()

    def serve(names: list[str], cancel: bool) -> dict[str, list[int]]:
        waiting, tokens = list(names), {}
        while waiting or engine.has_unfinished_requests():
            while waiting and engine.get_num_unfinished_requests() < ARGS["max_num_seqs"]:
                name = waiting.pop(0)
                number = int(name.rsplit("-", 1)[1])
                params = SamplingParams(
                    max_tokens=6, temperature=0, ignore_eos=True, detokenize=False
                )
                prompt = {"prompt_token_ids": ids(lengths[number], seed=number)}
                engine.add_request(name, prompt, params)
            for output in engine.step():
                name, so_far = output.request_id, output.outputs[0].token_ids
                number = int(name.rsplit("-", 1)[1])
                if cancel and number % 3 == 2 and len(so_far) == 1 + number % 4:
                    engine.abort_request([name])
                    cancelled.add(name)
                elif output.finished:
                    tokens[name] = list(so_far)
        return tokens

    before = serve([f"warm-{i}" for i in range(ASKED_AGAIN)], cancel=False)
    serve([f"traffic-{i}" for i in range(REQUESTS)], cancel=True)
    after = serve([f"again-{i}" for i in range(ASKED_AGAIN)], cancel=False)
    equal = sum(before[f"warm-{i}"] == after[f"again-{i}"] for i in range(ASKED_AGAIN))
    print(
        f"{equal} of {ASKED_AGAIN} answers equal, {len(cancelled)} of {REQUESTS} requests cancelled"
    )


if __name__ == "__main__":
    main(sys.argv[1])
