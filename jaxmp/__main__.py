"""The command line: `python -m jaxmp doctor` and `python -m jaxmp audit`."""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxmp._doctor import DeviceError, diagnose_environment
from jaxmp._factory import Program, UsageError, load_factory, make_program
from jaxmp.audit import (
    TARGETS,
    CompileError,
    CompileTimeoutError,
    Report,
    TargetError,
    TargetUnavailableError,
    audit,
)
from jaxmp.audit._targets import parse_target, require_compiler
from jaxmp.policy import Policy, get_policy

_AUDIT_HELP = """\
MODULE:FACTORY names a function that makes what is audited: it returns (function, args) or
(function, args, kwargs), args being a tuple of arrays, jax.ShapeDtypeStructs or other arguments.
MODULE is a dotted name or a path. If the factory has a parameter `policy`, it gets --policy.

  python -m jaxmp audit train.py:make_step --policy mixed_bfloat16 --target tpu:v5e
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0, 1 (it failed) or 2 (usage)."""
    args = _parser().parse_args(argv)
    return args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("jaxmp", description="Mixed precision for JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser(
        "doctor",
        help="what this machine is good for",
        description="Versions, devices, fast dtypes (measured), extras and known faults.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument(
        "--seconds", type=_positive, default=3.0, help="to measure for (default: 3)"
    )
    doctor.set_defaults(run=_doctor)

    command = commands.add_parser(
        "audit",
        help="which precision a program really has",
        description="Lists every matmul, cast, reduction and collective of a program.",
        epilog=_AUDIT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("factory", metavar="MODULE:FACTORY", help="makes the program, see below")
    command.add_argument(
        "--target",
        action="append",
        help=f"to compile for, may be given again: {', '.join(TARGETS)} (default: cpu)",
    )
    command.add_argument("--policy", type=_policy, help="such as mixed_bfloat16")
    command.add_argument(
        "--float32",
        action=argparse.BooleanOptionalAction,
        help="whether to compile the same in float32 too (default: for GPU targets)",
    )
    command.add_argument("--json", action="store_true", help="print a JSON list, one per target")
    command.add_argument(
        "--assert-low-precision",
        type=_fraction,
        nargs="?",
        const=0.99,
        metavar="FRACTION",
        help="exit with 1 if a smaller part of the work is in low precision (default: 0.99)",
    )
    command.add_argument(
        "--timeout", type=_positive, default=600.0, help="seconds for a compilation (default: 600)"
    )
    command.set_defaults(run=_audit)
    return parser


def _positive(text: str) -> float:
    return _number(text, "a positive number", lambda value: value > 0)


def _fraction(text: str) -> float:
    if ":" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no fraction. Write MODULE:FACTORY first, or --assert-low-precision=0.99."
        )
    return _number(text, "a fraction from 0 to 1", lambda value: 0 <= value <= 1)


def _number(text: str, rule: str, is_valid: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and is_valid(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not {rule}.")
    return value


def _policy(text: str) -> Policy:
    try:
        return get_policy(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _doctor(args: argparse.Namespace) -> int:
    try:
        report = diagnose_environment(args.seconds)
    except DeviceError as error:
        print(f"jaxmp doctor: error: {error}", file=sys.stderr)
        return 1
    print(_as_json(report.to_dict()) if args.json else report)
    return 0


def _audit(args: argparse.Namespace) -> int:
    targets = args.target or ["cpu"]
    reports: list[Report] = []
    try:
        _check_targets(targets)
        # Only the report is to come out of stdout, whatever the program prints while it is made.
        with contextlib.redirect_stdout(sys.stderr):
            program = make_program(load_factory(args.factory), args.policy)
        for target in targets:
            reports.append(_report(program, target, args))
            if not args.json:
                print(reports[-1], end="\n\n" if len(reports) < len(targets) else "\n")
    except UsageError as error:
        print(f"jaxmp audit: error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(_as_json([report.to_dict() for report in reports]))
    if args.assert_low_precision is None:
        return 0
    short = [report for report in reports if _falls_short(report, args.assert_low_precision)]
    return 1 if short else 0


def _check_targets(targets: Sequence[str]) -> None:
    """Raises a `UsageError` for a target that is not known or whose compiler is not installed."""
    try:
        for target in map(parse_target, targets):
            if not target.is_here:
                require_compiler(target)
    except (TargetError, TargetUnavailableError) as error:
        raise UsageError(error) from None


def _report(program: Program, target: str, args: argparse.Namespace) -> Report:
    """Audits the program; what the program itself raises while it is traced passes through."""
    function, positional, named = program
    options = {name: getattr(args, name) for name in ("policy", "float32", "timeout")}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return audit(function, *positional, target=target, **options, **named)
    except CompileError as error:
        # What was found without the compiler is not lost.
        if error.report is not None and not args.json:
            print(error.report, end="\n\n")
        raise UsageError(error) from None
    except (CompileTimeoutError, TargetError, TargetUnavailableError) as error:
        raise UsageError(error) from None


def _falls_short(report: Report, min_fraction: float) -> bool:
    try:
        report.assert_low_precision(min_fraction)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return True
    return False


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False)


if __name__ == "__main__":
    sys.exit(main())
