"""Compiling for TPUs and GPUs that are not there, and the published figures of a GPT step.

Each test needs an audit extra: `pip install 'jaxmp[audit-tpu,audit-cuda]'`.
"""

import collections

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxmp.audit._compiled import CompileError, compile_program
from jaxmp.audit._gpus import GPUS
from jaxmp.audit._targets import (
    TARGETS,
    TargetUnavailableError,
    parse_target,
    require_compiler,
)
from jaxmp.audit._trace import trace_program
from tests import reference_gpt

pytestmark = pytest.mark.audit

ABSENT = [text for text in TARGETS if not parse_target(text).is_here]


def compiled(fun, args, text):
    """Compiles for `text`, or skips the test if its compiler is not installed."""
    try:
        require_compiler(parse_target(text))
    except TargetUnavailableError as error:
        pytest.skip(str(error))
    return compile_program(trace_program(fun, args, {}), text)


def shaped(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def multiplied_in(text, dtype):
    """The dtype in which a target multiplies operands of `dtype`."""
    platform, _, kind = text.partition(":")
    if platform == "tpu":
        return dtype
    capability = GPUS[kind].capability
    if dtype == "bfloat16" and capability < (8, 0):
        return "float32"
    if dtype.startswith("float8") and capability < (8, 9):
        return "float16"
    return dtype


def mlp_step(dtype):
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(jnp.matmul(x.astype(dtype), w.astype(dtype)))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    return jax.jit(step, donate_argnums=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("text", ABSENT)
def test_mlp_step(text, dtype):
    report = compiled(mlp_step(dtype), ([shaped(512, 512)] * 2, shaped(1024, 512)), text)
    dtypes = {row.operand_dtypes for row in report.products}
    # Two products forward, two weight gradients, one input gradient.
    assert [row.flops for row in report.products] == [2 * 1024 * 512 * 512] * 5
    # A TPU multiplies float16 operands as they are, or widened first to what its unit takes.
    assert dtypes <= {(multiplied_in(text, dtype),) * 2, ("float32", "float32")}
    assert dtype == "float16" or len(dtypes) == 1
    assert report.memory.aliased == 2 * 4 * 512 * 512
    assert report.device_memory == parse_target(text).device_memory
    assert (report.estimated_cycles is not None) == text.startswith("tpu")
    assert (report.bytes_accessed is not None) == text.startswith("tpu")


# Convolutions take compilers their time, so not all pairs are tried.
@pytest.mark.parametrize(
    ("text", "dtype"),
    [(text, "bfloat16") for text in ABSENT if text not in ("tpu:v4", "tpu:v5p")]
    + [(text, "float16") for text in ABSENT if text in ("tpu:v5e", "cuda:t4", "cuda:h100")],
)
def test_convolution_step(text, dtype):
    def loss(kernels, x):
        for kernel in kernels:
            x = lax.conv_general_dilated(
                x.astype(dtype),
                kernel.astype(dtype),
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = jnp.tanh(x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(kernels, x):
        grads = jax.grad(loss)(kernels, x)
        return [k - 0.1 * g for k, g in zip(kernels, grads, strict=True)]

    kernels = [shaped(3, 3, 64, 64)] * 2
    report = compiled(step, (kernels, shaped(8, 32, 32, 64)), text)
    # Of the 3·32 taps of each axis two fall on the padding.
    assert [row.flops for row in report.products] == [2 * 8 * 64 * 64 * (3 * 32 - 2) ** 2] * 5
    dtypes = {row.operand_dtypes for row in report.products}
    assert dtypes <= {(multiplied_in(text, dtype),) * 2, ("float32", "float32")}
    if text.startswith("cuda"):
        assert all(row.instruction.startswith("__cudnn$conv") for row in report.products)


@pytest.mark.parametrize("text", ABSENT)
def test_float8_product(text):
    def narrow(x):
        scale = 448 / jnp.max(jnp.abs(x))
        return jnp.clip(x * scale, -448, 448).astype(jnp.float8_e4m3fn), 1 / scale

    def product(x, w):
        (x, x_scale), (w, w_scale) = narrow(x), narrow(w)
        return jnp.dot(x, w, preferred_element_type=jnp.float32) * (x_scale * w_scale)

    report = compiled(product, (shaped(512, 1024), shaped(1024, 512)), text)
    (row,) = report.products
    assert row.operand_dtypes == (multiplied_in(text, "float8_e4m3fn"),) * 2
    assert row.result_dtype == "float32"
    is_fp8_call = row.instruction == "__cublas$lt$matmul$f8"
    assert is_fp8_call == (text.startswith("cuda") and "float8" in row.operand_dtypes[0])


@pytest.mark.parametrize("text", ["cuda:h100:1x1x8", "tpu:v5e:2x4", "tpu:tpu7x"])
def test_sharded_step(text):
    mesh = AbstractMesh((8,), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data", None))
    weights = [shaped(512, 512, sharding=rows)] * 2
    report = compiled(mlp_step("bfloat16"), (weights, shaped(1024, 512, sharding=rows)), text)
    assert report.devices == 8
    gathers = [row for row in report.collectives if row.instruction == "all-gather"]
    reductions = [row for row in report.collectives if "reduce" in row.instruction]
    assert {row.dtype for row in gathers} == {"bfloat16"}
    assert sum(row.bytes for row in gathers) == 2 * 2 * 512 * 512
    assert {row.dtype for row in reductions if row.bytes > 64} == {"bfloat16"}  # the weights'
    assert {row.group_size for row in report.collectives} == {8}
    # Each device has an eighth of the work, and of both arguments.
    assert [row.flops for row in report.products] == [2 * 128 * 512 * 512] * 5
    assert report.memory.arguments < 4 * (2 * 512 * 512 + 1024 * 512) // 8 + 4096


@pytest.mark.parametrize("text", ["cuda:h100", "tpu:v5e"])
def test_a_loop_counts_its_trips(text):
    def fun(x, ws):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    args = (shaped(256, 256, dtype=jnp.bfloat16), shaped(6, 256, 256, dtype=jnp.bfloat16))
    report = compiled(fun, args, text)
    assert [row.times for row in report.products] == [6]
    assert report.products[0].flops == 2 * 256**3


def test_traffic_of_a_loop_grows_with_its_length():
    def fun(x, ws):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    def traffic(length):
        report = compiled(fun, (shaped(512, 512), shaped(length, 512, 512)), "tpu:v5e")
        return report.bytes_accessed

    turn = 4 * 3 * 512 * 512  # activations in and out, and a weight
    # The compiler slices the weight out first, which moves it twice more, and keeps a counter.
    assert 20 * turn <= traffic(40) - traffic(20) <= 2.1 * 20 * turn


@pytest.mark.parametrize("text", ["cuda:h100", "tpu:v5e"])
def test_what_the_compiler_refuses(text):
    kernel = jax.ffi.ffi_call("jaxmp_no_such_kernel", shaped(4))
    with pytest.raises(CompileError, match=r"refused the program.*jaxmp_no_such_kernel"):
        compiled(kernel, (shaped(4),), text)


@pytest.mark.parametrize("text", ["cuda:h100", "tpu:v5e"])
def test_a_program_without_inputs(text):
    assert compiled(lambda: jnp.ones((4, 4)), (), text).memory.outputs >= 64


FLOAT32, BFLOAT16 = ("float32", "float32"), ("bfloat16", "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "products", "megabytes"),
    [
        ("textbook, half activations", {FLOAT32: 34, BFLOAT16: 41}, 5369),
        ("by hand", {BFLOAT16: 75}, 4655),
    ],
)
def test_gpt_on_an_h100(recipe, products, megabytes):
    report = compiled(*reference_gpt.train_step(reference_gpt.Shape(), recipe), "cuda:h100")
    assert collections.Counter(row.operand_dtypes for row in report.products) == products
    assert report.memory.temporary / 1e6 == pytest.approx(megabytes, rel=0.02)


@pytest.mark.slow
def test_gpt_on_a_v5e():
    # With four layers 75 products, and 36.0 GB.
    shape = reference_gpt.Shape(layers=1)
    report = compiled(*reference_gpt.train_step(shape, "by hand"), "tpu:v5e")
    assert len(report.products) == 21
    # Twice the multiply-adds, for the forward pass and both gradients: as on a GPU.
    attention = 3 * 2 * 2 * 8 * 1024 * 1024 * 1024
    weights = 3 * 2 * 8 * 1024 * (12 * 1024**2 + 32768 * 1024)
    assert sum(row.flops for row in report.products) == attention + weights
    assert report.bytes_accessed / 1e9 == pytest.approx(13.15, rel=0.02)
