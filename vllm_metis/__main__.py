# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_metis`: what a user may ask about a checkpoint before serving it."""

import argparse
import sys

from vllm_metis.cli import check, plan

COMMANDS = {"check": check, "plan": plan}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m vllm_metis", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").split("\n")[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
    arguments = parser.parse_args(argv)
    return COMMANDS[arguments.command].run(arguments)


if __name__ == "__main__":
    sys.exit(main())
