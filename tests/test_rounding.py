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


NARROW = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


def neighbours(x, dtype):
    """The values of a dtype around each number that is none of them, below and above in size."""
    every = np.arange(2 ** (8 * jnp.dtype(dtype).itemsize), dtype=np.uint32)
    halves = every.astype(f"u{jnp.dtype(dtype).itemsize}").view(jnp.dtype(dtype))
    with np.errstate(all="ignore"):
        values = halves.astype(np.float64)
    values = np.unique(values[np.isfinite(values) & (values >= 0)])
    place = np.searchsorted(values, np.abs(x), side="right") - 1
    return values[place], values[np.minimum(place + 1, len(values) - 1)]


def numbers(dtype):
    """Of every size that a dtype has, subnormals too, of both signs, and around powers of two."""
    info = jnp.finfo(dtype)
    low, high = np.log2(float(info.smallest_subnormal)) + 1, np.log2(float(info.max)) - 1
    low = max(low, -120)  # XLA flushes what is subnormal in f32
    sizes = np.exp2(np.random.default_rng(0).uniform(low, high, 60))
    powers = np.exp2(np.arange(np.ceil(low), np.floor(high), (high - low) // 8))
    values = np.concatenate([sizes, powers, powers * (1 - 1e-6), powers * (1 + 1e-6)])
    return np.concatenate([values, -values]).astype(np.float32)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_stochastic_rounding_is_unbiased(dtype, transform):
    x, draws = numbers(dtype), 4096
    bits = jax.random.bits(jax.random.key(1), (draws, x.size))
    fun = transform(lambda x, bits: _rounding.round_stochastically(x, dtype, bits))
    rounded = np.asarray(fun(jnp.broadcast_to(x, bits.shape), bits), np.float64)
    below, above = neighbours(x.astype(np.float64), dtype)
    assert np.all((np.abs(rounded) == below) | (np.abs(rounded) == above))
    assert np.all(np.signbit(rounded) == np.signbit(x))
    # The mean of a coin that is thrown so often, six standard deviations at most.
    gap = above - below
    share = (np.abs(x.astype(np.float64)) - below) / gap
    deviation = gap * np.sqrt(np.maximum(share * (1 - share), 1 / draws) / draws)
    assert np.all(np.abs(rounded.mean(0) - x) <= 6 * deviation + gap * 2.0**-16)


@pytest.mark.parametrize("dtype", NARROW)
def test_stochastic_rounding_keeps_what_the_dtype_has(dtype):
    every = np.arange(2 ** (8 * jnp.dtype(dtype).itemsize), dtype=np.uint32)
    x = every.astype(f"u{jnp.dtype(dtype).itemsize}").view(jnp.dtype(dtype)).astype(np.float32)
    x = x[(np.abs(x) >= 2.0**-126) | (x == 0) | ~np.isfinite(x)]
    for seed in range(4):
        bits = jax.random.bits(jax.random.key(seed), x.shape)
        rounded = np.asarray(_rounding.round_stochastically(jnp.asarray(x), dtype, bits))
        same = (rounded == x) | (np.isnan(rounded) & np.isnan(x))
        assert np.all(same & (np.signbit(rounded) == np.signbit(x)))


@pytest.mark.parametrize("dtype", NARROW)
def test_stochastic_rounding_does_not_overflow_what_rounding_does_not(dtype):
    largest = float(jnp.finfo(dtype).max)
    x = jnp.full(1000, np.nextafter(np.float32(largest), np.float32(np.inf)))
    bits = jax.random.bits(jax.random.key(0), x.shape)
    assert set(np.asarray(_rounding.round_stochastically(x, dtype, bits))) == {largest}
    far = _rounding.round_stochastically(jnp.float32(3e38)[None], dtype, bits[:1])
    if dtype == "float16":
        assert np.isinf(far[0])
    else:
        assert np.isfinite(far[0])


def test_stochastic_rounding_is_a_function_of_its_bits():
    x = jnp.asarray(numbers("bfloat16"))
    one, two = (jax.random.bits(jax.random.key(seed), x.shape) for seed in (0, 1))
    first = _rounding.round_stochastically(x, "bfloat16", one)
    np.testing.assert_array_equal(first, _rounding.round_stochastically(x, "bfloat16", one))
    assert np.any(first != _rounding.round_stochastically(x, "bfloat16", two))
    with pytest.raises(ValueError, match=r"bits uint32\[3\]"):
        _rounding.round_stochastically(x, "bfloat16", one[:3])
