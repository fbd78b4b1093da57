"""How fast the default device multiplies each dtype: measured, in a few seconds."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# (operands, result); the first is what the others are compared with.
CANDIDATES = (
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float32"),
    ("float16", "float16"),
    ("float8_e4m3fn", "float32"),
)

RULE = (
    "fast (slow): three of four ratios to the float32 matmul of the same round are above 1.15 "
    "(below 1/1.15) and beyond those of float32 measured against itself"
)

_TARGET_SECONDS = 4e-3  # of one float32 matmul: far above the cost of a dispatch
_BLOCK, _LARGEST = 256, 8192  # rows and columns
_MARGIN = 1.15
_MIN_ROUNDS, _MAX_ROUNDS = 5, 50


@dataclasses.dataclass(frozen=True)
class DtypeSpeed:
    """What one dtype's matmul did on the device.

    Attributes:
        operand_dtype: of both operands.
        result_dtype: what the matmul was asked for.
        gflops: 10⁹ floating point operations per second, at the median; None if it cannot run.
        ratio: of its speed to float32's, the median over the rounds; None if either cannot run.
        verdict: `"fast"`, `"slow"`, `"as float32"` or, with too few rounds, `"unclear"`;
            `"cannot run"`.
        reason: the first line of the error if it cannot run, else an empty string.
    """

    operand_dtype: str
    result_dtype: str
    gflops: float | None
    ratio: float | None
    verdict: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class SpeedReport:
    """The measured speeds.

    Attributes:
        size: the matrices were `[size, size]`.
        rounds: how often every dtype was timed at most, each time next to float32.
        seconds: spent on measuring, compilation aside.
        speeds: one per pair of operand and result dtype.
    """

    size: int
    rounds: int
    seconds: float
    speeds: tuple[DtypeSpeed, ...]


def measure_speeds(
    seconds: float = 3.0, *, candidates: Sequence[tuple[str, str]] = CANDIDATES
) -> SpeedReport:
    """Times a square matmul of each dtype on the default device.

    All are compiled first, then timed in turns, so that what disturbs the machine disturbs all of
    them. A dtype that the device cannot multiply is reported, not raised.

    Args:
        seconds: for the timing; compilation and the search for a size come on top.
        candidates: pairs of operand and result dtype; the first is the reference.

    Raises:
        ValueError: if `seconds` is not positive.

    Example:
        >>> report = measure_speeds(0.01, candidates=[("float32", "float32")])
        >>> report.speeds[0].verdict in ("as float32", "unclear")
        True
    """
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds!r}. Try 3.")
    size = _fitting_size(*candidates[0])
    # The reference runs twice a round: how far it is from itself is what noise does.
    runs = [_prepare(*pair, size) for pair in [candidates[0], *candidates]]
    start = time.perf_counter()
    times = _timed_in_turns(runs, seconds)
    spent = time.perf_counter() - start
    noise = _ratios(times[0], times[1])
    speeds = []
    for (operand, result), run, mine in zip(candidates, runs[1:], times[1:], strict=True):
        if isinstance(run, str):
            speeds.append(DtypeSpeed(operand, result, None, None, "cannot run", run))
            continue
        gflops = 2 * size**3 / statistics.median(mine.values()) / 1e9
        ratios = _ratios(times[0], mine)
        ratio = statistics.median(ratios) if ratios else None
        speeds.append(DtypeSpeed(operand, result, gflops, ratio, verdict(ratios, noise)))
    return SpeedReport(size, len(times[0]), spent, tuple(speeds))


def _fitting_size(operand_dtype: str, result_dtype: str) -> int:
    """Returns a size, a multiple of the block, whose reference matmul takes some milliseconds."""
    size, fits = _BLOCK, _BLOCK
    while True:
        run = _prepare(operand_dtype, result_dtype, size)
        if isinstance(run, str):  # it does not fit in memory, say
            return fits
        fits, took = size, min(_seconds_of(run) for _ in range(3))
        if took >= _TARGET_SECONDS or size >= _LARGEST:
            return size
        growth = min(4.0, (_TARGET_SECONDS / took) ** (1 / 3))
        size = min(_LARGEST, _BLOCK * max(size // _BLOCK + 1, round(size * growth / _BLOCK)))


def _prepare(operand_dtype: str, result_dtype: str, size: int) -> Callable[[], Any] | str:
    """Returns a compiled matmul that has run once, or why it cannot run."""

    @jax.jit
    def operands(block: jax.Array) -> tuple[jax.Array, jax.Array]:
        repeats = (size // _BLOCK, size // _BLOCK)
        a, b = jnp.tile(block, repeats), jnp.tile(block.T, repeats)
        return a.astype(operand_dtype), b.astype(operand_dtype)

    @jax.jit
    def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot(a, b, preferred_element_type=jnp.dtype(result_dtype))

    # Random digits, for a GPU clocks higher on zeros than on real data; one block of them,
    # repeated, for JAX's generator would take longer to compile than all the rest.
    block = np.random.default_rng(0).uniform(-1, 1, (_BLOCK, _BLOCK)).astype(np.float32)
    # XLA names no common class for what a backend cannot do: the class differs by release and
    # device, and it comes while lowering, while compiling or at run time.
    try:
        a, b = operands(block)
        jax.block_until_ready(matmul(a, b))
    except Exception as error:
        return first_line(error)
    return lambda: matmul(a, b)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or the name of its class if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _seconds_of(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _timed_in_turns(
    runs: Sequence[Callable[[], Any] | str], seconds: float
) -> list[dict[int, float]]:
    """Returns, for each of `runs`, the seconds it took by round.

    One that has used up its share of the time sits the other rounds out, so that a very slow
    dtype does not take the rounds of the others.
    """
    times: list[dict[int, float]] = [{} for _ in runs]
    share = seconds / max(1, sum(callable(run) for run in runs))
    for turn in range(_MAX_ROUNDS):
        due = [
            (run, mine)
            for run, mine in zip(runs, times, strict=True)
            if not isinstance(run, str) and (turn == 0 or sum(mine.values()) < share)
        ]
        for run, mine in due:
            mine[turn] = _seconds_of(run)
        if not due:
            break
    return times


def _ratios(reference: dict[int, float], other: dict[int, float]) -> list[float]:
    """Returns how many times as fast as the reference of its round the other one was."""
    return [reference[turn] / other[turn] for turn in sorted(reference.keys() & other.keys())]


def verdict(ratios: Sequence[float], noise: Sequence[float]) -> str:
    """Returns what the ratios to float32 say, given those of float32 to itself.

    Example:
        >>> verdict([1.9, 2.1, 2.0, 1.2, 2.0], [0.9, 1.1, 1.0, 1.0, 1.0])
        'fast'
        >>> verdict([1.9, 2.1, 2.0, 1.2, 2.0], [0.5, 3.0, 1.0, 2.5, 0.4])
        'as float32'
    """
    if len(ratios) < _MIN_ROUNDS or len(noise) < _MIN_ROUNDS:
        return "unclear"
    low, _, high = statistics.quantiles(ratios, n=4)
    noise_low, _, noise_high = statistics.quantiles(noise, n=4)
    if low > max(_MARGIN, noise_high):
        return "fast"
    if high < min(1 / _MARGIN, noise_low):
        return "slow"
    return "as float32"
