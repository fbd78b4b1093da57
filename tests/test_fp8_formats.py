"""Arrays in 8 and 4 bits a number: every code, saturation, scales, blocks."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmp import fp8
from jaxmp._rounding import round_to_small

F32 = jnp.float32
DTYPES = {
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "e2m1": np.dtype(ml_dtypes.float4_e2m1fn),
}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
# Half a unit in the last place, in terms of the number.
ROUNDING = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}
both = pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def all_codes(fmt):
    codes = np.arange(256).astype(np.uint8).view(DTYPES[fmt])
    return codes, codes.astype(np.float32)


def finite_values(dtype):
    count = 16 if dtype == DTYPES["e2m1"] else 256
    values = np.unique(np.arange(count).astype(np.uint8).view(dtype).astype(np.float32))
    return values[np.isfinite(values)]


def signal_to_noise(approximate, exact):
    noise = np.mean(np.square(np.asarray(approximate, np.float64) - exact))
    return 10 * np.log10(np.mean(np.square(np.asarray(exact, np.float64))) / noise)


@both
def test_every_code_comes_back(fmt):
    codes, values = all_codes(fmt)
    got = fp8.quantize(values, fmt, scale=1.0)
    values = np.where(np.isinf(values), np.nan, values)
    np.testing.assert_array_equal(np.asarray(got.codes).astype(np.float32), values)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(
        np.asarray(got.codes)[finite].view(np.uint8), codes[finite].view(np.uint8)
    )
    np.testing.assert_array_equal(fp8.dequantize(got), values)


@pytest.mark.parametrize("fmt", DTYPES)
def test_rounding_is_to_nearest_even(fmt):
    dtype = DTYPES[fmt]
    values = finite_values(dtype)
    middles = (values[1:] + values[:-1]) / 2
    near = [np.nextafter(middles, np.float32(side)) for side in (np.inf, -np.inf)]
    spread = normal(0, 4096) * np.exp2(np.random.default_rng(1).integers(-20, 18, 4096)).astype("f")
    x = np.concatenate([values, middles, *near, spread]).astype(np.float32)
    wanted = np.clip(x, -LARGEST[fmt], LARGEST[fmt]).astype(dtype).astype(np.float32)
    for got in (round_to_small(x, dtype), jax.jit(round_to_small, static_argnums=1)(x, dtype)):
        assert got.dtype == F32
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(wanted))


def test_saturation_nan_and_infinity():
    odd = jnp.array([jnp.nan, jnp.inf, -jnp.inf])
    for fmt in ("e4m3", "e5m2"):
        assert np.isnan(fp8.dequantize(fp8.quantize(odd, fmt, key=jax.random.key(0)))).all()
    x = jnp.array([448.0, 464, 465, 1000, -1000, 3e38, jnp.nan, jnp.inf, -jnp.inf])
    e4m3 = np.asarray(fp8.quantize(x, "e4m3", scale=1.0).codes).astype(np.float32)
    np.testing.assert_array_equal(e4m3, [448, 448, 448, 448, -448, 448, *[np.nan] * 3])
    x = jnp.array([57344.0, 61440, 65536, 1e6, -1e6, jnp.nan, jnp.inf, -jnp.inf])
    e5m2 = np.asarray(fp8.quantize(x, "e5m2", scale=1.0).codes).astype(np.float32)
    wanted = [57344, 57344, 57344, 57344, -57344, *[np.nan] * 3]
    np.testing.assert_array_equal(e5m2, wanted)
    # Divided by the scale, these are out of the range of f32.
    x = jnp.array([1e3, -1e3, 0.0, jnp.inf, jnp.nan])
    far = np.asarray(fp8.quantize(x, "e5m2", scale=2.0**-126).codes).astype(np.float32)
    np.testing.assert_array_equal(far, [57344, -57344, 0, np.nan, np.nan])


@both
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, np.inf, np.nan, 3e38, 1.0])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_are_finite_and_positive(fmt, amax, power_of_two):
    scale = float(fp8.scale_for(amax, fmt, power_of_two=power_of_two))
    assert np.isfinite(scale)
    assert scale > 0
    assert np.isfinite(np.float32(1) / np.float32(scale))
    if power_of_two:
        assert np.frexp(scale)[0] == 0.5


@both
def test_zeros_stay_zero_and_what_is_not_finite_has_no_say_in_the_scale(fmt):
    np.testing.assert_array_equal(fp8.dequantize(fp8.quantize(jnp.zeros((3, 4)), fmt)), 0)
    x = jnp.array([1.0, 2.0, jnp.nan, jnp.inf])
    np.testing.assert_array_equal(fp8.quantize(x, fmt).scales, np.float32([2.0 / LARGEST[fmt]]))
    np.testing.assert_allclose(fp8.dequantize(fp8.quantize(x, fmt))[:2], [1, 2], rtol=1e-6)
    assert fp8.dequantize(fp8.quantize(jnp.zeros((0, 4)), fmt)).shape == (0, 4)


@both
@given(exponent=st.integers(-60, 60))
def test_a_power_of_two_changes_the_scale_alone(fmt, exponent):
    x = normal(0, 8, 16)
    for axis in (None, 1):
        plain = fp8.quantize(x, fmt, axis=axis)
        scaled = fp8.quantize(x * np.float32(2.0**exponent), fmt, axis=axis)
        np.testing.assert_array_equal(
            np.asarray(scaled.codes).view(np.uint8), np.asarray(plain.codes).view(np.uint8)
        )
        np.testing.assert_array_equal(scaled.scales, plain.scales * np.float32(2.0**exponent))


@both
@pytest.mark.parametrize("axis", [None, -1, 0, (0, 2)])
@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16, jnp.float16])
def test_values_and_shapes_of_scales(fmt, axis, dtype):
    x = jnp.asarray(normal(1, 4, 6, 8), dtype)
    got = jax.jit(lambda x: fp8.quantize(x, fmt, axis=axis))(x)
    shapes = {None: (1, 1, 1), -1: (4, 6, 1), 0: (1, 6, 8), (0, 2): (1, 6, 1)}
    assert (got.scales.shape, got.scales.dtype) == (shapes[axis], F32)
    assert (got.codes.shape, got.codes.dtype) == (x.shape, DTYPES[fmt])
    back = fp8.dequantize(got)
    # Below the smallest normal the error is half a step of it: 2^-10 and 2^-17.
    step = got.scales * float(ml_dtypes.finfo(DTYPES[fmt]).smallest_subnormal) / 2
    assert np.all(
        np.abs(back - x.astype(F32)) <= np.maximum(ROUNDING[fmt] * 1.001 * np.abs(back), step)
    )
    assert fp8.dequantize(got, jnp.bfloat16).dtype == jnp.bfloat16


def test_signal_to_noise_of_scales_of_rows():
    x = normal(0, 64, 256) * np.exp2(np.arange(64)[:, None] % 16 - 8).astype(np.float32)
    assert signal_to_noise(fp8.dequantize(fp8.quantize(x, "e4m3", axis=-1)), x) >= 25
    assert signal_to_noise(fp8.dequantize(fp8.quantize_blocks(x, "mxfp8")), x) >= 25
    assert signal_to_noise(fp8.dequantize(fp8.quantize_blocks(x, "nvfp4")), x) >= 18


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "mxfp8", "nvfp4"])
def test_stochastic_rounding_is_unbiased(fmt):
    quantize = fp8.quantize if fmt in ("e4m3", "e5m2") else fp8.quantize_blocks
    x = jnp.full(100_000 // 32 * 32, 0.3).at[::16].set(1.0)
    back = fp8.dequantize(quantize(x, fmt, key=jax.random.key(0)))
    same = np.delete(np.asarray(back, np.float64), np.s_[::16])
    assert len(set(same)) == 2
    assert abs(same.mean() - 0.3) <= 5 * same.std() / len(same) ** 0.5 + 1e-7


class TestBlocks:
    @pytest.mark.parametrize("fmt", ["mxfp8", "mxfp8_e5m2"])
    def test_scales_are_the_smallest_powers_of_two_that_hold_the_block(self, fmt):
        largest = LARGEST["e4m3" if fmt == "mxfp8" else "e5m2"]
        for amax in (1.0, largest, np.nextafter(np.float32(largest), np.float32(1e9)), 3e38, 0.37):
            x = np.zeros(32, np.float32)
            x[3] = amax
            got = fp8.quantize_blocks(x, fmt)
            scale = float(np.asarray(got.scales).astype(np.float32)[0])
            assert scale * largest >= amax > scale * largest / 2
            np.testing.assert_allclose(fp8.dequantize(got), x, rtol=2.0**-3)

    def test_codes_are_those_of_ml_dtypes(self):
        x = normal(0, 4, 64)
        got = fp8.quantize_blocks(x)
        scales = np.repeat(np.asarray(got.scales).astype(np.float32), 32, 1)
        wanted = (x / scales).astype(DTYPES["e4m3"])
        np.testing.assert_array_equal(np.asarray(got.codes).view(np.uint8), wanted.view(np.uint8))

    @pytest.mark.parametrize("fmt", ["mxfp8", "mxfp8_e5m2", "nvfp4"])
    def test_zeros_and_what_is_not_finite(self, fmt):
        for odd in (np.nan, np.inf, -np.inf):
            x = np.ones((2, 64), np.float32)
            x[0], x[1, 40] = 0, odd
            back = np.array(fp8.dequantize(fp8.quantize_blocks(x, fmt)))
            size = 16 if fmt == "nvfp4" else 32
            block = np.s_[40 // size * size : 40 // size * size + size]
            assert np.isnan(back[1, block]).all()
            back[1, block] = 1
            np.testing.assert_allclose(back, np.where(np.isfinite(x), x, 1), rtol=1e-6)
        zeros = fp8.quantize_blocks(jnp.zeros(32), fmt)
        assert not np.asarray(zeros.scales).view(np.uint8).any()
        assert not np.asarray(zeros.codes).view(np.uint8).any()

    @pytest.mark.parametrize("amax", [1e-45, 1e-38, 1e-30, 3e38])
    @pytest.mark.parametrize("fmt", ["mxfp8", "mxfp8_e5m2", "nvfp4"])
    def test_ends_of_the_range_are_finite(self, fmt, amax):
        x = np.linspace(-1, 1, 64, dtype=np.float32) * np.float32(amax)
        back = np.asarray(fp8.dequantize(fp8.quantize_blocks(x, fmt)))
        assert np.isfinite(back).all()
        if amax > 1e-31:
            assert np.abs(back - x).max() <= amax / 4

    @pytest.mark.parametrize(("fmt", "size"), [("mxfp8", 32), ("nvfp4", 16)])
    def test_squares_are_the_same_in_the_transpose(self, fmt, size):
        x = normal(0, 2 * size, 4 * size)
        got = fp8.quantize_blocks(x, fmt, axis=(0, 1))
        transposed = fp8.quantize_blocks(x.T, fmt, axis=(0, 1))
        assert got.scales.shape == (2, 4)
        np.testing.assert_array_equal(fp8.dequantize(got), fp8.dequantize(transposed).T)

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_any_axis(self, axis):
        x = normal(0, 32, 64, 96)
        got = fp8.quantize_blocks(x, axis=axis)
        moved = fp8.quantize_blocks(np.moveaxis(x, axis, -1))
        np.testing.assert_array_equal(
            np.moveaxis(np.asarray(fp8.dequantize(got)), axis, -1), fp8.dequantize(moved)
        )

    def test_under_transformations(self):
        x = normal(0, 3, 4, 32)
        plain = fp8.dequantize(fp8.quantize_blocks(x))
        for fun in (jax.jit(fp8.quantize_blocks), jax.vmap(fp8.quantize_blocks)):
            np.testing.assert_array_equal(fp8.dequantize(fun(x)), plain)
        _, scanned = jax.lax.scan(lambda c, x: (c, fp8.quantize_blocks(x)), None, x)
        np.testing.assert_array_equal(fp8.dequantize(scanned), plain)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fp8.quantize(jnp.ones(3), "e4m4"), ValueError, "Did you mean 'e4m3'"),
        (lambda: fp8.quantize(jnp.ones(3), "mxfp8"), ValueError, "of jaxmp.fp8.quantize_blocks"),
        (lambda: fp8.quantize_blocks(jnp.ones(32), "e5m2"), ValueError, "of jaxmp.fp8.quantize"),
        (lambda: fp8.quantize(jnp.arange(3)), TypeError, "x is int32"),
        (lambda: fp8.quantize("text"), TypeError, "x is str"),
        (lambda: fp8.quantize_blocks(jnp.ones((2, 40))), ValueError, "pad it to 64"),
        (lambda: fp8.quantize_blocks(jnp.ones((2, 32)), axis=2), ValueError, "no axis 2"),
        (lambda: fp8.quantize_blocks(jnp.float32(1)), ValueError, "no axis -1"),
        (
            lambda: fp8.quantize(jnp.ones(3), scale=1.0, power_of_two=True),
            ValueError,
            "but scale was given",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
