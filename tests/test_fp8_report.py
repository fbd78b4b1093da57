"""What the report of fp8 says of saturated and flushed numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
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
    assert activations.recipe == ("mxfp8" if flushed > 0.02 else "current")
    assert weight.recipe == "current"
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
    report = jaxmp.fp8_report(loss_fn, "mixed_bfloat16", W, X)
    assert report.rows == ()
    assert report.recommended() == {}
    odd = jax.tree.map(lambda leaf: leaf[:, :7], W)
    assert jaxmp.fp8_report(loss_fn, "mixed_float8", odd, X).rows == ()
    assert np.isfinite(float(jaxmp.autocast(loss_fn, "mixed_float8")(odd, X)))
