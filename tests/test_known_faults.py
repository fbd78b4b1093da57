"""The table of known faults: each that a CPU can show is run, in the releases that have it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmp import all_finite
from jaxmp._known_faults import FAULTS, faults_of, release

BY_NAME = {fault.name: fault for fault in FAULTS}
MATMUL = (((1,), (0,)), ((), ()))
# What only a GPU shows.
NOT_ON_CPU = {fault.name for fault in FAULTS if fault.platform == "gpu"}


def transposed_bfloat16_matmul():
    x = jnp.ones((64, 64), jnp.bfloat16)

    @jax.jit
    def transposed(a, b):
        return lax.dot_general(a, b, MATMUL, preferred_element_type=jnp.float32).T

    return raises("DotThunk", transposed, x, x)


def nan_lost_by_maximum():
    x = jnp.ones(2**14, jnp.float32).at[7].set(jnp.nan)
    assert not all_finite(x)
    largest = jax.jit(lambda x: jnp.max(jnp.abs(x)))(x)
    return bool(jnp.isfinite(largest))


def float16_attention():
    x = jnp.ones((1, 8, 2, 16), jnp.float16)
    with jax.numpy_dtype_promotion("standard"):  # this function of JAX promotes by itself
        return raises("F16_F16_F32", jax.jit(jax.nn.dot_product_attention), x, x, x)


def scaled_matmul():
    x = jnp.ones((1, 32, 64), jnp.float8_e4m3fn)
    scale = jnp.ones((1, 32, 2), jnp.float8_e8m0fnu)
    return raises("scaled_matmul", jax.jit(jax.nn.scaled_matmul), x, x, scale, scale)


def mixed_operands():
    narrow, wide = jnp.ones((8, 8), jnp.bfloat16), jnp.ones((8, 8), jnp.float32)
    return lax.dot_general(narrow, wide, MATMUL).dtype == jnp.float32


def wide_cotangent():
    def loss(w, x):
        return lax.dot_general(x, w, MATMUL, preferred_element_type=jnp.float32).sum()

    x = jnp.ones((8, 8), jnp.bfloat16)
    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, x)
    operands = [
        {variable.aval.dtype.name for variable in equation.invars}
        for equation in traced.jaxpr.eqns
        if equation.primitive.name == "dot_general"
    ]
    backward_is_wide = operands == [{"bfloat16"}, *2 * [{"float32", "bfloat16"}]]
    return backward_is_wide and all(aval.dtype == jnp.bfloat16 for aval in traced.out_avals)


def fp8_does_not_saturate():
    large = jnp.float32(465)
    four, five = large.astype(jnp.float8_e4m3fn), jnp.float32(1e6).astype(jnp.float8_e5m2)
    return bool(jnp.isnan(four.astype(jnp.float32)) & jnp.isinf(five.astype(jnp.float32)))


def grouped_convolution_on_a_mesh():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    w, x = jnp.ones((3, 2, 8)), jnp.ones((8, 5, 8))

    def loss(w, x):
        numbers = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=numbers, feature_group_count=4
        ).sum()

    spread = NamedSharding(mesh, PartitionSpec("data"))
    found = jax.jit(jax.grad(loss))(w, jax.device_put(x, spread))
    return not jnp.allclose(found, jax.grad(loss)(w, x))


def raises(words, function, *args):
    try:
        jax.block_until_ready(function(*args))
    except Exception as error:
        if words not in str(error):
            raise
        return True
    return False


SHOWN = {
    "transposed-bfloat16-matmul": transposed_bfloat16_matmul,
    "nan-lost-by-maximum": nan_lost_by_maximum,
    "float16-attention": float16_attention,
    "scaled-matmul": scaled_matmul,
    "mixed-operands": mixed_operands,
    "wide-cotangent": wide_cotangent,
    "fp8-does-not-saturate": fp8_does_not_saturate,
    "grouped-convolution-on-a-mesh": grouped_convolution_on_a_mesh,
}


def test_every_fault_is_shown_or_belongs_to_a_gpu():
    assert set(SHOWN) | NOT_ON_CPU == set(BY_NAME)
    assert not set(SHOWN) & NOT_ON_CPU
    assert len(BY_NAME) == len(FAULTS)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU shows")
@pytest.mark.parametrize("name", SHOWN)
def test_this_release_has_the_fault_exactly_where_the_table_says_so(name):
    # Where this fails the fault has gone or come: end its range, or begin it earlier.
    assert SHOWN[name]() == BY_NAME[name].in_release(jax.__version__)


def test_the_remedies_work_on_a_cpu():
    x = jnp.ones((64, 64), jnp.bfloat16)
    half = jnp.ones((1, 8, 2, 16), jnp.float16)

    @jax.jit
    def guarded(a, b):
        a, b = lax.optimization_barrier((a, b))
        product = lax.dot_general(a, b, MATMUL, preferred_element_type=jnp.float32)
        return lax.optimization_barrier(product).T

    narrow = jax.jit(lambda a, b: lax.dot_general(a, b, MATMUL).T)
    assert (guarded(x, x) == 64).all()
    assert (narrow(x, x) == 64).all()
    for dtype in (jnp.bfloat16, jnp.float32):
        wide = half.astype(dtype)
        with jax.numpy_dtype_promotion("standard"):
            attention = jax.jit(jax.nn.dot_product_attention)(wide, wide, wide)
        assert (attention == 1).all()
    clipped = jnp.clip(jnp.float32(1e6), -448, 448).astype(jnp.float8_e4m3fn)
    assert clipped.astype(jnp.float32) == 448


def test_without_preferred_element_type_the_backward_matmuls_are_narrow():
    def loss(w, x):
        return lax.dot_general(x, w, MATMUL).astype(jnp.float32).sum()

    x = jnp.ones((8, 8), jnp.bfloat16)
    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, x)
    matmuls = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert {v.aval.dtype.name for eqn in matmuls for v in eqn.invars} == {"bfloat16"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_says_what_happens_and_what_to_do(fault):
    assert fault.symptom.endswith(".")
    assert fault.remedy.endswith(".")
    assert fault.until is None or release(fault.since) < release(fault.until)


def names(*args):
    return {fault.name for fault in faults_of(*args)}


def test_faults_are_those_of_the_device():
    assert "bfloat16-as-float32" in names("0.10.2", "gpu", "7.5")
    assert "bfloat16-as-float32" not in names("0.10.2", "gpu", "8.0")
    assert "bfloat16-as-float32" not in names("0.10.2", "gpu", "10.0")
    assert "bfloat16-as-float32" not in names("0.10.2", "gpu", "gfx942")
    assert "bfloat16-as-float32" not in names("0.10.2", "gpu", None)
    assert "bfloat16-as-float32" not in names("0.10.2", "cpu", None)
    assert "excess-precision" in names("0.12.0.1", "gpu", "gfx942")
    assert not names("0.10.2", "tpu") & {f.name for f in FAULTS if f.platform in ("cpu", "gpu")}


def test_a_range_of_releases_ends_before_its_last_word():
    fault = dataclasses.replace(FAULTS[0], since="0.10", until="0.11.0")
    inside = ("0.10", "0.10.2", "0.10.2.1", "0.10.3.dev20260101+cpu")
    outside = ("0.9.2", "0.11.0", "0.12.0.1", "1.0")
    assert all(map(fault.in_release, inside))
    assert not any(map(fault.in_release, outside))
