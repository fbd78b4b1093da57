"""See, and prove, what a program really runs, on hardware that need not be there.

`audit` traces a function and reports its matmuls and convolutions by dtype and pass, casts,
half-precision sums, collectives and traps; for a target it compiles it too, and reports what the
compiler made of it and what memory it needs. TPUs and GPUs are compiled for without having one,
with the extras `jaxmp[audit-tpu]` and `jaxmp[audit-cuda]`.
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxmp._widen import CannotWidenError
from jaxmp.audit._compiled import CompileError, CompileTimeoutError, compile_program, prepare
from jaxmp.audit._compiled_traps import with_compiled
from jaxmp.audit._half_detectors import find_traps
from jaxmp.audit._program import Analysis, analyse
from jaxmp.audit._report import Report, ReportDiff, is_narrow
from jaxmp.audit._rows import (
    Cast,
    Collective,
    CompiledCollective,
    CompiledProduct,
    CompiledReport,
    Memory,
    Opaque,
    Product,
    Reduction,
    Trap,
    WideCopy,
)
from jaxmp.audit._targets import (
    TARGETS,
    Target,
    TargetError,
    TargetUnavailableError,
    parse_target,
)
from jaxmp.audit._trace import Program, in_float32, trace_program
from jaxmp.audit._traps import TRAPS, infer_intent
from jaxmp.policy import get_policy, short_name

__all__ = [
    "TARGETS",
    "TRAPS",
    "Cast",
    "Collective",
    "CompileError",
    "CompileTimeoutError",
    "CompiledCollective",
    "CompiledProduct",
    "CompiledReport",
    "Memory",
    "Opaque",
    "Product",
    "Reduction",
    "Report",
    "ReportDiff",
    "TargetError",
    "TargetUnavailableError",
    "Trap",
    "WideCopy",
    "audit",
]


def audit(
    fun: Callable[..., Any],
    *args: Any,
    target: str | None = "cpu",
    policy: Any = None,
    float32: bool | None = None,
    timeout: float = 600.0,
    **kwargs: Any,
) -> Report:
    """Reports what a function runs: in which precision, with which traps, in how much memory.

    The function is traced, and compiled for the target; nothing is executed and nothing written.

    Args:
        fun: any function that `jax.jit` takes, such as a whole training step; or a jitted one,
            whose donated and static arguments and shardings are kept.
        *args: its arguments: arrays, numbers, `jax.ShapeDtypeStruct`s and pytrees of them. Those
            with a `NamedSharding` are compiled for as many devices as its mesh has; the mesh may be
            a `jax.sharding.AbstractMesh`, since no devices are needed.
        target: what to compile for: `"cpu"`; `"attached"`, the default device of this process;
            `"tpu:v5e"` or with a topology `"tpu:v5e:2x4"` (extra `audit-tpu`); `"cuda:h100"` or
            `"cuda:h100:1x1x8"` (extra `audit-cuda`); see `TARGETS`. TPUs and GPUs are compiled for
            in another process, without the hardware. None only traces.
        policy: the policy, or its name, that the program is held against. If left out it is read
            off the program: the half dtype that most of its products have.
        float32: whether to compile the same program in float32 too, every narrower float widened,
            to say what it would cost instead. Both are compiled at the same time. If left out, it
            is done for GPU targets only, where compilers are quick. Kernels that cannot be looked
            into keep their dtypes; a program that mutates references is not compared.
        timeout: seconds that the compiler may take.
        **kwargs: more arguments of the function, by name.

    Returns:
        The report: `print` it, or look at its rows; `assert_low_precision`, `assert_no_traps` and
        `assert_fits` are for tests.

    Raises:
        TypeError: if an argument is no array.
        TargetError: for an unknown target, or one with too few devices.
        ValueError: if the arguments are sharded over several meshes.
        TargetUnavailableError: if the target's compiler is not installed.
        CompileError: if the compiler refuses the program; its `report` is of the program alone.
        CompileTimeoutError: if it takes longer than `timeout`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.sum((x @ w).astype(jnp.float32) ** 2)
        >>> w, x = (jax.ShapeDtypeStruct((64, 64), jnp.bfloat16) for _ in range(2))
        >>> report = audit(jax.value_and_grad(loss), w, x)
        >>> [(row.pass_name, row.operand_dtypes) for row in report.products]
        [('fprop', ('bfloat16', 'bfloat16')), ('wgrad', ('bfloat16', 'bfloat16'))]
    """
    where = None if target is None else parse_target(target)
    policy = None if policy is None else get_policy(policy)
    program = trace_program(fun, args, kwargs)
    if target is not None and program.mesh is not None:
        where = parse_target(target, program.mesh.size)
    platform = _platform(where.platform if where is not None else "attached")
    analysis = analyse(program, platform)
    intent = infer_intent(analysis, policy)
    report = _report(program.name, analysis, intent, find_traps(program, analysis, intent))
    if target is None or where is None:
        return report
    compare = where.platform == "cuda" if float32 is None else float32
    try:
        compiled, wide = _compile(program, where, timeout, compare=compare and _is_mixed(report))
    except CompileError as error:
        error.report = report
        raise
    traps = with_compiled(program, report, compiled, intent)
    return dataclasses.replace(report, compiled=compiled, compiled_float32=wide, traps=traps)


def _is_mixed(report: Report) -> bool:
    return bool(report.casts or report.reductions) or any(map(is_narrow, report.products))


def _compile(
    program: Program, target: Target, timeout: float, *, compare: bool
) -> tuple[CompiledReport, CompiledReport | None]:
    """Compiles a program, and at the same time the same in float32 if asked."""
    if not compare:
        return compile_program(program, str(target), timeout=timeout), None
    compile_it = prepare(program, str(target), timeout=timeout)
    try:
        wide = in_float32(program)
    except CannotWidenError:
        return compile_it(), None
    compile_wide = prepare(wide, str(target), timeout=timeout)
    if target.is_here:
        return compile_it(), compile_wide()
    # The compilers run in processes of their own, the threads only wait for them.
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = pool.submit(compile_wide)
        return compile_it(), waiting.result()


def _platform(platform: str) -> str:
    """Returns the name that lowering rules go by."""
    if platform != "attached":
        return platform
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


def _report(name: str, analysis: Analysis, intent: Any, traps: tuple[Trap, ...]) -> Report:
    return Report(
        function=name,
        policy=short_name(intent.policy),
        policy_inferred=not intent.given,
        products=tuple(row for _, row in analysis.products),
        casts=tuple(row for _, row in analysis.casts),
        reductions=tuple(row for _, row in analysis.reductions),
        collectives=tuple(row for _, row in analysis.collectives),
        opaque=tuple(row for _, row in analysis.opaque),
        traps=traps,
    )
