# SPDX-License-Identifier: Apache-2.0
"""`python -m harness`: the commands around the matrices. `pytest matrices/NAME.yaml` runs one.

Exit codes: 0 passed; 1 parity or behaviour; 2 usage or matrix; 3 infrastructure; 4 nothing
ran or a cell did not reach what it names.
"""

import argparse
import importlib
import sys

COMMANDS = {
    "checkpoint": ("harness.checkpoints.write", "write a tiny, or full-size, random checkpoint"),
    "quantize": ("harness.checkpoints.quantize", "write the FP8 copy of a checkpoint"),
    "loaded_weights": (
        "harness.loaded_weights.command",
        "compare what vLLM holds with a checkpoint",
    ),
    "logits": ("harness.run.logits", "store a checkpoint's FP32 logits, by its own code"),
    "golden": (
        "harness.scoring.golden",
        "hold the reference, or the engine, against golden vectors",
    ),
    "cases": ("harness.serving.cases", "replay parser cases of a YAML file, whole and streamed"),
    "list": ("harness.matrices.list_cells", "print the cells of a matrix and their engines"),
    "schema": ("harness.matrices.schema", "write the JSON schema of matrices, for editors"),
    "judge": ("harness.records.judge", "decide again on a saved run, without an engine"),
    "score": ("harness.run.score", "compute the references of a saved run anew, without an engine"),
    "compare": ("harness.records.compare", "say which cells of two runs differ, and how"),
    "report": ("harness.report.page", "write Markdown and HTML of a saved run"),
    "baseline": ("harness.records.baseline", "renew the stored baseline of a matrix, on purpose"),
    "bench": ("harness.serving.bench", "measure the parsers"),
}
"""Module of each command, imported when asked for: most need neither torch nor vLLM."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    argv = sys.argv[1:] if argv is None else argv
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name, (path, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name == asked:
            module = importlib.import_module(path)
            command.description = module.__doc__
            command.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(command)
    arguments = parser.parse_args(argv)
    return importlib.import_module(COMMANDS[arguments.command][0]).run(arguments)


if __name__ == "__main__":
    sys.exit(main())
