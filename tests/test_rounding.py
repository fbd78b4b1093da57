import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp import _rounding


def bit_patterns():
    """All halves and the f32 values around them, every exponent, and random bits."""
    rng = np.random.default_rng(0)
    every_high_half = np.arange(2**16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    patterns = [every_high_half | bits for bits in low]
    every_f16 = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    patterns += [every_f16.view(np.uint32) + np.uint32(offset) for offset in (0, 1, 0x1000, 0x1001)]
    patterns.append(rng.integers(0, 2**32, 10**6, dtype=np.uint32))
    return np.concatenate(patterns).view(np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_round_to_is_the_cast_bit_for_bit(dtype, transform):
    x = bit_patterns()
    with np.errstate(all="ignore"):
        want = x.astype(jnp.dtype(dtype)).astype(np.float32)
    got = np.asarray(transform(lambda v: _rounding.round_to(v, dtype))(x))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    # f32 subnormals are flushed to zero by XLA on some backends, as in any other operation.
    comparable = ~np.isnan(want) & ((np.abs(x) >= 2.0**-126) | (x == 0))
    np.testing.assert_array_equal(got[comparable].view(np.uint32), want[comparable].view(np.uint32))


def test_narrow_has_the_dtype_and_the_value():
    x = jnp.array([1.001, 70000.0, 6e-8], jnp.float32)
    got = _rounding.narrow(x, "float16")
    assert got.dtype == jnp.float16
    np.testing.assert_array_equal(got, np.array([1.001, np.inf, 6e-8], np.float16))


def test_round_to_stays_in_the_program():
    """Case B38: a round trip of converts may be dropped on a GPU, reduce_precision may not."""
    jaxpr = jax.make_jaxpr(lambda x: _rounding.round_to(x, "bfloat16"))(jnp.ones(2))
    assert "reduce_precision" in str(jaxpr)


def test_round_to_rejects_what_it_cannot_round():
    with pytest.raises(ValueError, match="only float32 is rounded"):
        _rounding.round_to(jnp.ones(2, jnp.bfloat16), "bfloat16")
    with pytest.raises(ValueError, match="wider than float32"):
        _rounding.round_to(jnp.ones(2), "float64")
