"""Compiling here, and what becomes of a compiler in another process that fails."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxmp.audit import _compiled
from jaxmp.audit._compiled import (
    CompileError,
    CompileTimeoutError,
    compile_program,
    report_from_dict,
    report_to_json,
)
from jaxmp.audit._trace import trace_program


def shaped(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def step(w, x):
    def loss(w):
        with jax.named_scope("layer"):
            y = jnp.matmul(x, w)
        return jnp.mean(jnp.tanh(y) ** 2)

    value, grad = jax.value_and_grad(loss)(w)
    return w - 0.1 * grad, value


@pytest.mark.parametrize("target", ["cpu", "attached"])
def test_compiles_here(target):
    fun = jax.jit(step, donate_argnums=0)
    program = trace_program(fun, (shaped(128, 64), shaped(256, 128)), {})
    report = compile_program(program, target)
    assert (report.target, report.devices) == (target, 1)
    assert {row.operand_dtypes for row in report.products} == {("float32", "float32")}
    assert {row.path for row in report.products} == {"layer"}
    assert [row.flops for row in report.products] == [2 * 256 * 128 * 64] * 2
    assert report.collectives == ()
    assert report.memory.arguments == 4 * (128 * 64 + 256 * 128)
    assert report.memory.aliased == 4 * 128 * 64
    assert report.bytes_accessed > report.memory.arguments
    assert report.estimated_cycles is None
    assert report.compile_seconds > 0


def test_a_scan_multiplies_and_counts():
    def fun(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    program = trace_program(fun, (shaped(32, 32), shaped(6, 32, 32)), {})
    assert [row.times for row in compile_program(program, "cpu").products] == [6]


def test_a_program_without_inputs():
    program = trace_program(lambda: jnp.ones((4, 4)), (), {})
    assert compile_program(program, "cpu").memory.outputs == 64


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_compiles_a_sharded_program_for_cpu_devices(axis_type):
    mesh = AbstractMesh((2, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    x = shaped(64, 32, sharding=NamedSharding(mesh, PartitionSpec("a", None)))
    w = shaped(32, 16, sharding=NamedSharding(mesh, PartitionSpec(None, "b")))
    program = trace_program(lambda x, w: jnp.sum(jnp.tanh(x @ w), 0), (x, w), {})
    report = compile_program(program, "cpu")
    assert report.devices == 4
    (product,) = report.products
    assert product.operand_shapes == ((32, 32), (32, 8))
    (collective,) = report.collectives
    assert (collective.instruction, collective.dtype) == ("all-reduce", "float32")
    assert (collective.bytes, collective.group_size) == (4 * 8, 2)


def test_an_input_without_a_sharding_is_whole_on_every_device():
    mesh = AbstractMesh((4,), ("data",))
    x = shaped(64, 32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    program = trace_program(lambda x, w: x @ w, (x, shaped(32, 16)), {})
    report = compile_program(program, "cpu")
    assert report.memory.arguments == 4 * (16 * 32 + 32 * 16)


def test_too_few_devices_here_gives_the_remedy():
    mesh = AbstractMesh((1024,), ("data",))
    x = shaped(1024, 2, sharding=NamedSharding(mesh, PartitionSpec("data")))
    program = trace_program(lambda x: x + 1, (x,), {})
    with pytest.raises(ValueError, match=r"sharded over 1024.*jax_num_cpu_devices', 1024\)"):
        compile_program(program, "cpu")


def test_what_the_compiler_here_refuses():
    fun = jax.ffi.ffi_call("jaxmp_no_such_kernel", shaped(4))
    program = trace_program(fun, (shaped(4),), {})
    with pytest.raises(CompileError, match="jaxmp_no_such_kernel"):
        compile_program(program, "cpu")


def test_report_goes_through_json():
    program = trace_program(step, (shaped(128, 64), shaped(256, 128)), {})
    report = compile_program(program, "cpu")
    assert report_from_dict(json.loads(report_to_json(report))) == report


@pytest.fixture
def child(monkeypatch):
    """Puts a script in the place of the compiler's process."""

    def install(script):
        monkeypatch.setattr(_compiled, "_CHILD", (sys.executable, "-c", script))
        monkeypatch.setattr(_compiled, "require_compiler", lambda target: None)
        monkeypatch.setattr(_compiled, "_export", lambda program, platform: b"program")
        program = trace_program(jnp.sin, (shaped(4),), {})
        return lambda **options: compile_program(program, "tpu:v5e", **options)

    return install


def test_a_child_that_fails_shows_its_last_lines(child):
    script = (
        "import sys; print('lost'); sys.stderr.write('I1234 noise\\n\\n'); "
        "[sys.stderr.write(f'line {i}\\n') for i in range(40)]; sys.exit(3)"
    )
    with pytest.raises(CompileError, match="code 3 and no result") as raised:
        child(script)()
    lines = str(raised.value).splitlines()
    assert "line 39" in lines[-1]
    assert len(lines) <= 16
    assert "noise" not in str(raised.value)


def test_a_child_that_says_why(child):
    script = (
        "import sys; header = sys.stdin.buffer.readline(); assert b'v5e:1x1' in header; "
        f'sys.stdout.write({_compiled.RESULT_MARKER.decode()!r} + \'{{"error": "OOM"}}\')'
    )
    with pytest.raises(CompileError, match="tpu:v5e:1x1 refused the program sin: OOM"):
        child(script)()


def test_a_child_that_takes_too_long_is_ended_with_its_children(child, tmp_path):
    pid = tmp_path / "pid"
    script = (
        "import pathlib, subprocess, sys, time\n"
        "process = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(process.pid))\n"
        "time.sleep(600)"
    )
    with pytest.raises(CompileTimeoutError, match=r"more than 3 seconds.*timeout=6"):
        child(script)(timeout=3.0)
    number = int(pid.read_text())
    for _ in range(100):
        if not _is_running(number):
            break
        time.sleep(0.05)
    assert not _is_running(number)


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_cannot_be_exported_says_so(monkeypatch):
    pytest.importorskip("flatbuffers", reason="an audit extra is not installed")

    def fun(x):
        jax.debug.print("{}", x)
        return x

    monkeypatch.setattr(_compiled, "require_compiler", lambda target: None)
    program = trace_program(fun, (shaped(4),), {})
    with pytest.raises(CompileError, match="fun cannot be sent to the compiler for tpu"):
        compile_program(program, "tpu:v5e")
