"""Traps that only the compiled program shows, on the hardware that has them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jaxmp
from jaxmp.audit import TargetUnavailableError, audit

pytestmark = pytest.mark.audit

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def report_of(fun, *args, target, **options):
    """Audits, or skips the test where the compiler is not installed."""
    try:
        return audit(fun, *args, target=target, float32=False, **options)
    except TargetUnavailableError as error:
        pytest.skip(str(error))


def spec(*shape, dtype=F32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def kinds(report):
    return {trap.kind for trap in report.traps}


def matmul_in(dtype):
    return lambda x, w: jnp.matmul(x.astype(dtype), w.astype(dtype))


X, W = spec(512, 256), spec(256, 512)


@pytest.mark.parametrize("target", ["cuda:t4", "cuda:v100"])
def test_bfloat16_without_hardware_is_float32(target):
    report = report_of(matmul_in(BF16), X, W, target=target)
    (trap,) = (trap for trap in report.traps if trap.kind == "compiled-wider")
    assert trap.cause.endswith("runs 16-bit products as f32 × f32")
    assert "mixed_float16" in trap.remedy
    assert trap.cost == "134 MFLOP in 1 products"
    assert report.low_precision_fraction() == 0
    with pytest.raises(AssertionError, match="in low precision"):
        report.assert_low_precision()
    assert "compiled-wider" in str(report)


@pytest.mark.parametrize(
    ("dtype", "target"),
    [(F16, "cuda:t4"), (BF16, "cuda:l4"), (BF16, "cuda:h100"), (BF16, "tpu:v5e")],
)
def test_half_products_with_hardware_stay_half(dtype, target):
    report = report_of(matmul_in(dtype), X, W, target=target)
    assert "compiled-wider" not in kinds(report)
    report.assert_low_precision(1.0)


def scaled_product(x, w):
    def narrow(x):
        scale = 448 / jnp.max(jnp.abs(x))
        return jnp.clip(x * scale, -448, 448).astype(jnp.float8_e4m3fn), 1 / scale

    (x, x_scale), (w, w_scale) = narrow(x), narrow(w)
    return jnp.dot(x, w, preferred_element_type=F32) * (x_scale * w_scale)


def test_float8_without_hardware_is_float16():
    report = report_of(scaled_product, X, W, target="cuda:a100")
    (trap,) = (trap for trap in report.traps if trap.kind == "compiled-wider")
    assert trap.cause.endswith("runs 8-bit products as f16 × f16")
    assert "compiled-wider" not in kinds(report_of(scaled_product, X, W, target="cuda:h100"))


def test_half_convolution_with_a_float32_result_is_float32():
    def convolution(result_dtype):
        def fun(x, w):
            return lax.conv_general_dilated(
                x.astype(BF16), w.astype(BF16), (1, 1), "SAME", preferred_element_type=result_dtype
            )

        return report_of(fun, spec(4, 64, 16, 16), spec(64, 64, 3, 3), target="cuda:h100")

    assert "compiled-wider" in kinds(convolution(F32))
    assert "compiled-wider" not in kinds(convolution(None))


MESH = AbstractMesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def sharded(*shape):
    return spec(*shape, sharding=NamedSharding(MESH, PartitionSpec("data", None)))


@jax.custom_vjp
def contract(x, w):
    return x.astype(BF16) @ w.astype(BF16)


def _backward(saved, cotangent):
    x, w = (value.astype(BF16) for value in saved)
    dx = lax.dot_general(cotangent, w, (((1,), (1,)), ((), ())), preferred_element_type=F32)
    dw = lax.dot_general(x, cotangent, (((0,), (0,)), ((), ())), preferred_element_type=F32)
    return dx, dw


contract.defvjp(lambda x, w: (contract(x, w), (x, w)), _backward)


def gradient(matmul):
    def loss(w, x):
        return jnp.mean(jnp.tanh(matmul(x, w).astype(F32)) ** 2)

    return jax.value_and_grad(loss)


@pytest.mark.parametrize("target", ["cuda:h100", "tpu:v5e"])
def test_gradients_reduced_in_half_over_devices(target):
    w, x = sharded(1024, 1024), sharded(2048, 1024)
    by_hand = report_of(gradient(matmul_in(BF16)), w, x, target=target)
    assert "narrow-collective" in kinds(by_hand)
    assert by_hand.compiled.devices == 8
    assert "narrow-collective" not in kinds(report_of(gradient(contract), w, x, target=target))
    policy = jaxmp.get_policy("p=f32,c=bf16,o=f32,reduce=bf16")
    allowed = report_of(gradient(matmul_in(BF16)), w, x, target=target, policy=policy)
    assert "narrow-collective" not in kinds(allowed)


@pytest.mark.parametrize("target", ["cuda:h100", "tpu:v5e"])
def test_weights_gathered_in_float32(target):
    def gather_first(w, x):
        whole = lax.with_sharding_constraint(w, NamedSharding(MESH, PartitionSpec()))
        # The scaling in between keeps the compiler from moving the cast.
        return x.astype(BF16) @ (whole * whole.sum()).astype(BF16)

    w, x = sharded(1024, 1024), sharded(2048, 1024)
    assert "wide-collective" in kinds(report_of(gather_first, w, x, target=target))
    narrow = report_of(lambda w, x: matmul_in(BF16)(x, w), w, x, target=target)
    assert "wide-collective" not in kinds(narrow)
