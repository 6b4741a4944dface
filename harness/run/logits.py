# SPDX-License-Identifier: Apache-2.0
"""`python -m harness logits DIR --out FILE`: what a model's own Transformers code computes.

The file holds the prompts of a matrix as token ids, and the logits after each token in FP32 and in
BF16. A run elsewhere takes it with `--logits FILE` (harness/scoring/logits.py).
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from harness import exit_codes
from harness.checkpoints.folder import MODEL_VARIABLE, ModelError, model_folder
from harness.kinds.smoke.settings import SmokeSettings
from harness.matrices.expand import MATRICES, Matrix, load_matrix
from harness.prompts import corpus
from harness.strict_yaml import YamlError

MATRIX = MATRICES / "real_smoke.yaml"

_LONGEST_PROMPT = 4096


def frozen_prompts(matrix: Matrix, folder: Path) -> dict[str, list[int]]:
    """Return the prompts of a matrix's `parity` cells as token ids.

    Raises:
        CorpusError: a prompt is empty or too long.
    """
    from harness.checkpoints.tokenizer import read_tokenizer, render

    tokenizer = read_tokenizer(folder)
    names = {
        name
        for cell in matrix.cells
        if isinstance(cell.settings, SmokeSettings) and cell.settings.smoke.check == "parity"
        for name in cell.settings.prompt_names
    }
    return corpus.freeze(
        matrix.prompts,
        names,
        block_size=1,
        vocab_size=len(tokenizer),
        longest=_LONGEST_PROMPT,
        render=partial(render, tokenizer),
    ).token_ids


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m harness logits`."""
    parser.add_argument(
        "folder", type=Path, nargs="?", metavar="DIR", help=f"a checkpoint; or ${MODEL_VARIABLE}"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="*.safetensors")
    parser.add_argument(
        "--matrix", type=Path, default=MATRIX, help="whose prompts; default real_smoke.yaml"
    )


def run(args: argparse.Namespace) -> int:
    """Write the file and print its name; 2 where folder or matrix will not do."""
    from harness.scoring.logits import write_logits

    try:
        folder = model_folder(args.folder, "logits DIR")
        prompts = frozen_prompts(load_matrix(args.matrix), folder)
        write_logits(folder, args.out, prompts)
    except (ModelError, YamlError, corpus.CorpusError) as error:
        print(error, file=sys.stderr)
        return exit_codes.USAGE
    print(args.out)
    return exit_codes.PASSED
