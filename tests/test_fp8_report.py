"""What the report of fp8 says of saturated and flushed numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxmp
import jaxmp.nnx
from jaxmp import fp8
from tests.autocast_tools import normal

X, W = normal(0, 32, 64), normal(1, 64, 48)


def loss_fn(w, x):
    return jnp.mean(jnp.tanh(x @ w))


def lost(x, fmt, scale):
    """Shares of saturated and flushed numbers, of the codes themselves."""
    codes = fp8.quantize(x, fmt, scale=scale).codes.astype(jnp.float32)
    is_large = abs(x / scale) > float(jnp.finfo(fp8.quantize(x, fmt).codes.dtype).max)
    return float(is_large.mean()), float(((codes == 0) & (x != 0)).mean())


@pytest.mark.parametrize("spread", [0.0, 4.0, 8.0])
def test_shares_are_those_of_the_codes(spread):
    x = X * jnp.exp(spread * normal(2, 32, 64))
    report = jaxmp.fp8_report(loss_fn, "mixed_float8", W, x)
    activations, weight, gradient = report.rows
    names = [(row.operand, row.fmt) for row in report.rows]
    assert names == [
        ("activations", "float8_e4m3fn"),
        ("weight", "float8_e4m3fn"),
        ("gradient", "float8_e5m2"),
    ]
    scale = activations.scale
    assert scale == float(fp8.scale_for(abs(x).max(), power_of_two=True))
    saturated, flushed = lost(x, "e4m3", scale)
    assert activations.saturated == saturated == 0
    # Numbers within an eighth of the threshold are counted as held.
    small = abs(x / scale) <= 2.0**-10 * 7 / 8
    assert activations.flushed == float((small & (x != 0)).mean()) <= flushed
    assert activations.recommended == ("mxfp8" if flushed > 0.02 else "current")
    assert weight.recommended == "current"
    assert weight.largest >= float(abs(W).max())
    assert gradient.saturated == 0


def test_the_scales_of_a_state():
    policy = jaxmp.Policy(recipe=fp8.DelayedScaling(history=4))
    state = jaxmp.init_fp8_state(loss_fn, policy, W, X)
    report = jaxmp.fp8_report(loss_fn, policy, W, 8 * X, fp8_state=state)
    row = report.rows[0]
    assert row.scale == float(state["product"].scale[0])
    assert row.saturated == lost(8 * X, "e4m3", row.scale)[0] > 0.1
    assert report.recommended() == {"product": "mxfp8"}
    report = jaxmp.fp8_report(loss_fn, policy, W, X, fp8_state=state)
    assert report.recommended() == {"product": "delayed(history=4)"}
    with pytest.raises(ValueError, match="does not fit"):
        jaxmp.fp8_report(loss_fn, policy, W, X, fp8_state={"other": state["product"]})


def test_layers_of_a_scan_and_text():
    def layers(ws, x):
        return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])

    ws = normal(3, 2, 64, 64) * jnp.array([1.0, 8.0])[:, None, None]
    report = jaxmp.fp8_report(layers, "mixed_mxfp8", ws, X)
    assert [row.product for row in report.rows] == ["product/0"] * 3 + ["product/1"] * 3
    assert report.rows[4].largest >= 4 * report.rows[1].largest
    assert "product/1" in str(report)
    assert len(report.to_dict()["rows"]) == 6


def test_nothing_is_quantized():
    odd, message = W[:, :7], "takes none of 1 matmuls.*multiples of 16, but are 32, 7 and 64"
    with pytest.warns(UserWarning, match=message):
        report = jaxmp.fp8_report(loss_fn, "mixed_float8", odd, X)
    assert report.rows == ()
    assert report.recommended() == {}
    # As where a model is initialized, or run for one input.
    assert np.isfinite(float(jaxmp.autocast(loss_fn, "mixed_float8")(odd, X)))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("mxfp8", "of 32, but are 32, 48 and 80"), ("current(min_size=64)", "at least 64, but")],
)
def test_training_without_a_quantized_product_is_warned_of(recipe, message):
    policy, x, w = jaxmp.Policy(recipe=recipe), normal(3, 32, 80), normal(4, 80, 48)
    with pytest.warns(UserWarning, match=message):
        jax.jit(jaxmp.value_and_grad(loss_fn, policy))(w, x)
    # One is enough, and products with batch axes are none that a recipe is for.
    fine = normal(5, 64, 64)
    jaxmp.value_and_grad(lambda w, x: loss_fn(w, fine @ fine), policy)(fine, x)
    jaxmp.value_and_grad(lambda w, x: jnp.mean(jnp.einsum("bij,bjk->bik", x, w)), policy)(
        normal(6, 2, 3, 5), normal(7, 2, 7, 3)
    )


def test_with_float64_enabled_and_on_an_explicit_mesh():
    right = jaxmp.fp8_report(loss_fn, "mixed_float8", W, X)
    with jax.enable_x64(True):
        assert jaxmp.fp8_report(loss_fn, "mixed_float8", W, X) == right
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data", None)))
        found = jaxmp.fp8_report(loss_fn, "mixed_float8", W, rows)
    assert [row.largest for row in found.rows] == [row.largest for row in right.rows]


def test_of_an_nnx_model():
    model = nnx.Sequential(
        nnx.Linear(64, 32, rngs=nnx.Rngs(0)), nnx.Linear(32, 64, rngs=nnx.Rngs(1))
    )
    policy = jaxmp.Policy(recipe=fp8.DelayedScaling(history=4))

    def model_loss(model, x):
        return jnp.mean((model(x) - x) ** 2)

    state = jaxmp.nnx.init_fp8_state(model_loss, policy, model, X)
    report = jaxmp.nnx.fp8_report(model_loss, policy, model, X, fp8_state=state)
    assert list(report.recommended()) == list(state)
    assert [row.scale for row in report.rows[:3]] == state[report.rows[0].product].scale.tolist()


def test_bad_input():
    with pytest.raises(ValueError, match="float32 has no recipe, so"):
        jaxmp.fp8_report(loss_fn, "mixed_bfloat16", W, X)
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda w, x: jaxmp.fp8_report(loss_fn, "mixed_float8", w, x).rows)(W, X)
