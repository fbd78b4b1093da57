"""Compiles a program, here or for hardware that is not there, and reports what came out."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxmp.audit import _compiled_rows, _hlo, _traffic
from jaxmp.audit._rows import (
    CompiledCollective,
    CompiledProduct,
    CompiledReport,
    Memory,
    WideCopy,
)
from jaxmp.audit._targets import (
    Target,
    TargetError,
    child_environment,
    parse_target,
    require_compiler,
    version_hint,
)
from jaxmp.audit._trace import Program

RESULT_MARKER = b"\n--- jaxmp.audit result ---\n"
_CHILD = (sys.executable, "-m", "jaxmp.audit._child")
_NOISE = re.compile(r"\s*$|[IW]\d{4} |WARNING: |=== Source Location|\s*File \"|learning/")
_LAST_LINES = 15
_WARNINGS = threading.Lock()  # filters are the process's, and two programs may compile at once


class CompileError(RuntimeError):
    """The compiler refused the program, or ended without a result.

    Attributes:
        report: the report of the program alone, where `audit` raised it.
    """

    report: Any = None


class CompileTimeoutError(TimeoutError):
    """The compiler took longer than allowed."""


def compile_program(program: Program, target: str, *, timeout: float = 600.0) -> CompiledReport:
    """Compiles `program` for `target` and reports on the optimized program; see `prepare`."""
    return prepare(program, target, timeout=timeout)()


def prepare(
    program: Program, target: str, *, timeout: float = 600.0
) -> Callable[[], CompiledReport]:
    """Lowers `program` for `target`, and returns a function that compiles it and reports.

    JAX's settings are those of this thread, so it is lowered here; the function for a compiler in
    another process may be called in any.

    Args:
        program: traced; nothing of it is run.
        target: one of `jaxmp.audit.TARGETS`, with a topology if need be; see `parse_target`.
        timeout: seconds that a compiler in another process may take.

    Raises:
        TargetError: for a target that does not exist or has too few devices.
        TargetUnavailableError: if the compiler is not installed.
        CompileError: if the compiler refuses the program.
        CompileTimeoutError: after `timeout` seconds.
    """
    needed = program.mesh.size if program.mesh is not None else 1
    where = parse_target(target, needed)
    if where.is_here:
        return functools.partial(_compile_here, program, where, needed)
    require_compiler(where)
    job = {
        "topology": where.topology,
        "target": str(where),
        "device_memory": where.device_memory,
        "donated": program.donate_argnums,
        "mesh": _mesh_description(program),
        "x64": jax.dtypes.canonicalize_dtype(np.int64) == np.int64,
    }
    message = json.dumps(job).encode() + b"\n" + _export(program, where.platform)
    return lambda: report_from_dict(_run_child(message, where, program.name, timeout))


def _compile_here(program: Program, target: Target, needed: int) -> CompiledReport:
    devices = jax.local_devices(backend="cpu" if target.platform == "cpu" else None)
    if needed > len(devices):
        raise TargetError(
            f"Target {str(target)!r} has {len(devices)} devices, but the program is sharded over "
            f"{needed}. Compile it for another target, as 'tpu:v5e', or get more CPU devices: call "
            f"jax.config.update('jax_num_cpu_devices', {needed}) before JAX is first used, or set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}."
        )
    stats = None if target.platform == "cpu" else devices[0].memory_stats()
    mesh = place_mesh(_mesh_description(program), devices)
    shardings = [place(_partition(spec), mesh, devices[0]) for spec in program.inputs]
    try:
        return compile_and_report(
            program.function,
            [place_input(spec, s) for spec, s in zip(program.inputs, shardings, strict=True)],
            donated=program.donate_argnums,
            device=devices[0],
            device_count=needed,
            target=str(target),
            device_memory=(stats or {}).get("bytes_limit"),
        )
    except jax.errors.JaxRuntimeError as error:
        raise CompileError(
            f"The compiler for {target} refused the program {program.name}: {error}"
        ) from error


def _partition(spec: jax.ShapeDtypeStruct) -> PartitionSpec | None:
    return spec.sharding.spec if isinstance(spec.sharding, NamedSharding) else None


def place(spec: PartitionSpec | None, mesh: Mesh | None, device: Any) -> Sharding:
    """Returns the sharding of an input: on `mesh`, whole if it states none, or on `device`."""
    if mesh is None:
        return SingleDeviceSharding(device)
    return NamedSharding(mesh, spec or PartitionSpec())


def place_input(spec: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """Returns the input with a sharding over devices."""
    weak_type = getattr(spec, "weak_type", False)
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, weak_type=weak_type, sharding=sharding)


def _mesh_description(program: Program) -> dict[str, Any] | None:
    """Returns the names, sizes and types of the axes, for `place_mesh`."""
    mesh = program.mesh
    if mesh is None:
        return None
    return {
        "names": mesh.axis_names,
        "sizes": mesh.axis_sizes,
        "types": [kind.name for kind in mesh.axis_types],
    }


def place_mesh(description: dict[str, Any] | None, devices: Sequence[Any]) -> Mesh | None:
    """Returns a mesh of the first devices, as many as it needs."""
    if description is None:
        return None
    sizes = tuple(description["sizes"])
    types = tuple(jax.sharding.AxisType[name] for name in description["types"])
    array = np.array(devices[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(array, tuple(description["names"]), axis_types=types)


def compile_and_report(
    function: Callable[..., Any],
    inputs: Sequence[jax.ShapeDtypeStruct],
    *,
    donated: Sequence[int],
    device: Any,
    device_count: int,
    target: str,
    device_memory: int | None,
) -> CompiledReport:
    """Compiles for the devices that the inputs' shardings name and reads the result."""
    if inputs:
        jitted = jax.jit(function, donate_argnums=tuple(donated))
    else:  # nothing but the outputs to say where it runs
        jitted = jax.jit(function, out_shardings=SingleDeviceSharding(device))
    start = time.perf_counter()
    with _WARNINGS, warnings.catch_warnings():
        # An input that no output can replace: the memory figures say so.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        lowered = jitted.lower(*inputs)
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    module = _hlo.parse(compiled.as_text() or "")
    return CompiledReport(
        target=target,
        device_kind=device.device_kind,
        devices=device_count,
        device_memory=device_memory,
        products=_compiled_rows.products(module),
        collectives=_compiled_rows.collectives(module),
        wide_copies=_compiled_rows.wide_copies(module),
        memory=_memory(compiled),
        fusions=_compiled_rows.fusions(module),
        bytes_accessed=_bytes_accessed(compiled, module),
        estimated_cycles=_compiled_rows.estimated_cycles(module),
        compile_seconds=seconds,
    )


def _memory(compiled: Any) -> Memory:
    stats = compiled.memory_analysis()
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        peak=getattr(stats, "peak_memory_in_bytes", None) or None,
    )


def _bytes_accessed(compiled: Any, module: _hlo.Module) -> int | None:
    """Returns XLA's estimate, which takes a loop to turn once, and the turns after the first."""
    found = (compiled.cost_analysis() or {}).get("bytes accessed")
    return int(found) + _traffic.repeated_bytes(module) if found else None


def _export(program: Program, platform: str) -> bytes:
    """Lowers the program for a platform and returns it in bytes."""
    function = jax.jit(program.function)
    try:
        try:
            exported = jax.export.export(function, platforms=[platform])(*program.inputs)
        except ValueError as error:
            if "custom calls" not in str(error):
                raise
            # Kernels whose form may change between releases; here both sides are one release.
            checks = _custom_call_checks(function, program, platform)
            export = jax.export.export(function, platforms=[platform], disabled_checks=checks)
            exported = export(*program.inputs)
        return bytes(exported.serialize())
    except (ValueError, NotImplementedError, TypeError) as error:
        raise CompileError(
            f"{program.name} cannot be sent to the compiler for {platform}: {error}\n"
            "Callbacks (jax.debug.print, jax.pure_callback, io_callback) cannot, nor kernels of "
            "another platform: leave them out of the audited function."
        ) from error


def _custom_call_checks(
    function: Any, program: Program, platform: str
) -> list[jax.export.DisabledSafetyCheck]:
    lowered = function.trace(*program.inputs).lower(lowering_platforms=(platform,))
    names = re.findall(r'custom_call @"?([^\s"(]+)', lowered.as_text())
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in sorted(set(names))]


def _run_child(message: bytes, target: Target, name: str, timeout: float) -> dict[str, Any]:
    process = subprocess.Popen(
        _CHILD,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(target),
        start_new_session=True,  # a group of its own: XLA starts processes too
    )
    try:
        output, log = process.communicate(message, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise CompileTimeoutError(
            f"Compiling for {target} took more than {timeout:g} seconds and was ended. "
            f"Allow more with timeout={2 * timeout:g}."
        ) from error
    finally:
        _end(process)
    _, marker, result = output.partition(RESULT_MARKER)
    if process.returncode or not marker:
        raise CompileError(
            f"The compiler for {target} ended with code {process.returncode} and no result. "
            f"Its last lines:\n{_last_lines(log)}{version_hint(target)}"
        )
    decoded = json.loads(result)
    if "error" in decoded:
        raise CompileError(
            f"The compiler for {target} refused the program {name}: {decoded['error']}"
            f"{version_hint(target)}"
        )
    return decoded


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the child and all that it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _last_lines(log: bytes) -> str:
    lines = log.decode(errors="replace").splitlines()
    return "\n".join([line for line in lines if not _NOISE.match(line)][-_LAST_LINES:])


def report_from_dict(values: dict[str, Any]) -> CompiledReport:
    """Returns the report of which `dataclasses.asdict` made `values`, through JSON."""
    rows: dict[str, type] = {
        "products": CompiledProduct,
        "collectives": CompiledCollective,
        "wide_copies": WideCopy,
    }
    fields = dict(values, memory=Memory(**values["memory"]))
    for name, kind in rows.items():
        fields[name] = tuple(
            kind(**{k: _tupled(v) for k, v in row.items()}) for row in values[name]
        )
    return CompiledReport(**fields)


def _tupled(value: Any) -> Any:
    """JSON knows lists only."""
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def report_to_json(report: CompiledReport) -> bytes:
    """Returns what `report_from_dict` reads, as bytes."""
    return json.dumps(dataclasses.asdict(report)).encode()
