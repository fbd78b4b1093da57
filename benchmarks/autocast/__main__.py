"""What `jaxmp.autocast` saves and costs, against float32 and against casts by hand.

    python -m benchmarks.autocast memory    # compiled for an H100 and a TPU v5e, none needed
    python -m benchmarks.autocast time      # of a step, on this machine
    python -m benchmarks.autocast trace     # CPU seconds to trace and lower
    python -m benchmarks.autocast error     # of gradients, against float64

`memory` needs the audit extras: pip install "jaxmp[audit-tpu,audit-cuda]".
"""

import argparse
from collections.abc import Sequence

from benchmarks.autocast import _error, _memory, _time, _trace
from benchmarks.autocast._recipes import RECIPES


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables of one subcommand."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    memory = _command(commands, "memory", "memory and dtypes of compiled steps", _memory.run)
    memory.add_argument("--case", action="append", choices=tuple(_memory.CASES))
    memory.add_argument("--target", action="append", help=f"default: {_memory.TARGETS}")
    _add_recipes(memory, RECIPES)
    time = _command(commands, "time", "time of a GPT's step on this machine", _time.run)
    time.add_argument("--rounds", type=int, default=15)
    _add_recipes(time, RECIPES)
    trace = _command(commands, "trace", "CPU seconds to trace and lower a GPT's step", _trace.run)
    trace.add_argument("--layers", type=int, nargs="+", default=[4, 16, 64])
    trace.add_argument("--rounds", type=int, default=5)
    text = f"to lower for, may be repeated; default: {', '.join(_trace.PLATFORMS)}"
    trace.add_argument("--platform", action="append", choices=_trace.PLATFORMS, help=text)
    _add_recipes(trace, _trace.RECIPES)
    error = _command(commands, "error", "error of a GPT's gradients", _error.run)
    error.add_argument("--layers", type=int, nargs="+", default=[2, 8])
    error.add_argument("--seeds", type=int, default=5)
    _add_recipes(error, _error.RECIPES)
    args = vars(parser.parse_args(arguments))
    args.pop("run")(**args)


def _command(commands, name: str, text: str, run) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    return command


def _add_recipes(command: argparse.ArgumentParser, recipes: Sequence[str]) -> None:
    text = f"may be repeated; default: {', '.join(recipes)}"
    command.add_argument("--recipe", action="append", choices=recipes, help=text)


if __name__ == "__main__":
    main()
