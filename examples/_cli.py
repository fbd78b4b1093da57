"""The command line of the GPT example."""

import argparse
import dataclasses
from pathlib import Path
from typing import NoReturn

from _run import Run, Settings, new_run, resumed_run

DEFAULTS = Settings(size="small", steps=800, batch_size=8, microbatches=1, seed=0)
SMOKE = Settings(size="tiny", steps=100, batch_size=8, microbatches=2, seed=0)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_args(argv: list[str] | None, sizes: list[str]) -> argparse.Namespace:
    """Parses the command line; settings that are not given are None.

    Args:
        argv: the arguments; those of the process if left out.
        sizes: the names of the model sizes.
    """
    parser = _Parser(
        prog="gpt.py",
        description="Trains a GPT on the standard library's sources, once for each policy.",
    )
    add = parser.add_argument
    policies = "name or text of a policy; several with commas or options (float32,mixed_bfloat16)"
    add("--policy", action="append", default=[], metavar="NAME", help=policies)
    add("--steps", type=_count, metavar="N", help=f"training steps ({DEFAULTS.steps})")
    add("--size", choices=sizes, help=f"size of the model ({DEFAULTS.size})")
    batch = f"windows of text in a batch ({DEFAULTS.batch_size})"
    add("--batch-size", type=_count, metavar="N", help=batch)
    microbatches = f"parts that a batch is computed in ({DEFAULTS.microbatches})"
    add("--microbatches", type=_count, metavar="N", help=microbatches)
    seed = f"seed of the parameters and of the data order ({DEFAULTS.seed})"
    add("--seed", type=_seed, metavar="N", help=seed)
    out = "where the checkpoints and the plot go (out/gpt, or the folder that is resumed)"
    add("--out", type=Path, metavar="DIR", help=out)
    add("--resume", type=Path, metavar="DIR", help="continue the run in DIR, and save there")
    add("--sample", action="store_true", help="generate text with each trained policy")
    add("--smoke", action="store_true", help="a tiny run of everything, in less than a minute")
    args = parser.parse_args(argv)
    args.out = args.out or args.resume or Path("out/gpt")
    return args


def open_run(args: argparse.Namespace, checksum: int) -> Run:
    """Returns the run that the command line asks for.

    Args:
        args: what `parse_args` returned.
        checksum: that of the text.

    Raises:
        UserError: if the settings do not fit together, or not to the run in the folder.
    """
    names = [field.name for field in dataclasses.fields(Settings)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    policies = split_policies(args.policy)
    if args.resume:
        return resumed_run(args.resume, given, policies, checksum)
    settings = dataclasses.replace(SMOKE if args.smoke else DEFAULTS, **given)
    policies = policies or ["float32", "mixed_bfloat16"]
    return new_run(args.out, settings, policies, checksum)


def split_policies(texts: list[str]) -> list[str]:
    """Returns the policies of all `--policy` options, each once.

    Commas separate names, but belong to a text such as "params=float32,compute=bfloat16".
    """
    names = [name for text in texts for name in ([text] if "=" in text else text.split(","))]
    return list(dict.fromkeys(name.strip() for name in names))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to 2**32 - 1")
    return int(text)
