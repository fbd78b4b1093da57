"""How long an audit of the GPT example's base step takes, against tracing it.

python -m benchmarks.audit_time                                  # the program report alone
python -m benchmarks.audit_time --target cuda:h100 --target tpu:v5e   # needs the audit extras
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import jax

import jaxmp

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import gpt


def main() -> None:
    """Prints the seconds of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", action="append", default=[])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    policy = jaxmp.get_policy("mixed_bfloat16")
    traces, audits = [], []
    for _ in range(args.repeats):
        # A new function each time, since JAX remembers traces.
        traces.append(_seconds(lambda: _trace(policy)))
        audits.append(_seconds(lambda: _audit(policy, None)))
    trace, audit = statistics.median(traces), statistics.median(audits)
    print(f"JAX {jax.__version__}: tracing {trace:.2f} s, with the program report {audit:.2f} s")
    print(f"program report: {(audit - trace) / trace:.2f} times tracing")
    for target in args.target:
        print(f"audit for {target}: {_seconds(lambda t=target: _audit(policy, t)):.1f} s")


def _trace(policy: jaxmp.Policy) -> None:
    step, arguments = gpt.audit_case(policy)
    step.trace(*arguments)


def _audit(policy: jaxmp.Policy, target: str | None) -> None:
    step, arguments = gpt.audit_case(policy)
    jaxmp.audit(step, *arguments, target=target, policy=policy)


def _seconds(fun) -> float:
    begin = time.perf_counter()
    fun()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
