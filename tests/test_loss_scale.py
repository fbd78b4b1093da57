import copy
import pickle

import chex
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax import serialization
from hypothesis import given
from hypothesis import strategies as st

import jaxmp
import jaxmp.linen
from jaxmp.loss_scale import as_loss_scale
from tests.test_tree import odd_tree

MODES = ["eager", "jit", "scan"]


def run(scale, flags, mode):
    """Returns the states after each flag; under jit and scan the body must be traced once."""
    traces = []

    def body(scale, finite):
        traces.append(finite)
        scale = scale.adjust(finite)
        return scale, scale

    flags = jnp.asarray(flags, bool)
    if mode == "scan":
        _, stacked = jax.jit(lambda s, f: jax.lax.scan(body, s, f))(scale, flags)
        states = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(len(flags))]
        assert len(traces) == 1
        return states
    step, states = (jax.jit(body) if mode == "jit" else body), []
    for flag in flags:
        scale, _ = step(scale, flag)
        states.append(scale)
    assert mode == "eager" or len(traces) == 1
    return states


def assert_same_kind(a, b):
    """The state is a fixed point: structure, dtypes, shapes and weak types."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jax.typeof(x) == jax.typeof(y)


OK, BAD = True, False


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("scale", "flags", "want"),
    [
        # The answers of the specification, 1, 2, 5 and 6.
        (
            jaxmp.DynamicLossScale(4.0, period=2, factor=2, backoff=0.25),
            [OK, OK, BAD],
            [(4, 1), (8, 0), (2, 0)],
        ),
        (
            jaxmp.DynamicLossScale(2.0**32, period=1000, hysteresis=2),
            [BAD, BAD, BAD, OK, BAD],
            [(2.0**32, 0), (2.0**31, 0), (2.0**30, 0), (2.0**30, 1), (2.0**29, 0)],
        ),
        (
            jaxmp.DynamicLossScale(2.0**4),
            [BAD] * 5,
            [(8, 0), (4, 0), (2, 0), (1, 0), (1, 0)],
        ),
        (
            jaxmp.DynamicLossScale(2.0**8, period=2),
            [BAD, BAD, OK, OK, OK, BAD],
            [(128, 0), (64, 0), (64, 1), (128, 0), (128, 1), (64, 0)],
        ),
        # Hysteresis refills when the scale grows.
        (
            jaxmp.DynamicLossScale(4.0, period=2, hysteresis=2),
            [BAD, OK, OK, BAD, BAD],
            [(4, 0), (4, 1), (8, 0), (8, 0), (4, 0)],
        ),
    ],
)
def test_answers(scale, flags, want, mode):
    states = run(scale, flags, mode)
    got = [(float(s.loss_scale), int(s.counter)) for s in states]
    assert got == want
    for state in states:
        assert_same_kind(state, scale)


@pytest.mark.parametrize("mode", MODES)
def test_growth_by_16_from_1e38_stays_finite(mode):
    states = run(jaxmp.DynamicLossScale(1e38, period=1, factor=16), [OK] * 3, mode)
    assert all(float(s.loss_scale) == np.float32(1e38) for s in states)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("period", [1, 2, 7])
def test_growth_exactly_every_period_clean_steps(period, mode):
    states = run(jaxmp.DynamicLossScale(4.0, period=period), [OK] * (3 * period), mode)
    got = [float(s.loss_scale) for s in states]
    assert got == [4.0 * 2 ** ((i + 1) // period) for i in range(3 * period)]


def test_the_scale_is_bounded_whatever_happens():
    """Case B21: growth without end, and a scale forced to infinity."""
    scale = run(jaxmp.DynamicLossScale(period=1, factor=10), [OK] * 70, "scan")[-1]
    assert float(scale.loss_scale) == 2.0**32
    capped = jaxmp.DynamicLossScale(8.0, period=1, max_loss_scale=32.0)
    assert [float(s.loss_scale) for s in run(capped, [OK] * 4, "jit")] == [16, 32, 32, 32]
    for forced in (jnp.inf, jnp.nan):
        leaves, treedef = jax.tree.flatten(scale)
        broken = treedef.unflatten([jnp.float32(forced), *leaves[1:]])
        for flag in (OK, BAD):
            fixed = float(broken.adjust(jnp.bool_(flag)).loss_scale)
            assert 0 < fixed <= 2.0**32


def test_the_scale_never_reaches_zero():
    """Case B22: 200 overflows in a row, with and without a floor."""
    for scale in (
        jaxmp.DynamicLossScale(),
        jaxmp.DynamicLossScale(min_loss_scale=0.0),
        jaxmp.DynamicLossScale(3.0, factor=3, min_loss_scale=0.37),
    ):
        last = run(scale, [BAD] * 200, "scan")[-1]
        assert float(last.loss_scale) > 0
        assert np.isfinite(float(1 / last.loss_scale))
        assert float(last.unscale(last.scale(jnp.float32(1.5)))) == pytest.approx(1.5)
        assert int(last.skip_streak) == 200
    assert float(last.loss_scale) == np.float32(0.37)


@pytest.mark.parametrize(
    "start", [2.0**15, np.float16(2.0**15), np.float32(2.0**15), "f16", "bf16"]
)
def test_the_scale_is_f32_whatever_it_was_built_from(start):
    """Case B19: a half scale raises or overflows elsewhere."""
    halves = {"f16": jnp.asarray(2.0**15, jnp.float16), "bf16": jnp.asarray(2.0**15, jnp.bfloat16)}
    scale = jaxmp.DynamicLossScale(
        halves.get(start, start) if isinstance(start, str) else start, period=1
    )
    assert scale.loss_scale.dtype == jnp.float32
    up, down = run(scale, [OK, BAD], "jit")
    assert (float(up.loss_scale), float(down.loss_scale)) == (2.0**16, 2.0**15)


def test_an_integer_scale_is_f32_with_jmps_warning():
    with pytest.warns(UserWarning, match="Expected floating type for loss_scale, got int32"):
        scale = jaxmp.DynamicLossScale(jnp.asarray(8, jnp.int32))
    assert (scale.loss_scale.dtype, float(scale.loss_scale)) == (jnp.float32, 8.0)
    with pytest.warns(UserWarning, match="Expected floating type for loss_scale"):
        assert jaxmp.StaticLossScale(2).loss_scale == 2.0
    with pytest.warns(UserWarning, match="Expected floating type for min_loss_scale"):
        jaxmp.DynamicLossScale(1.0, min_loss_scale=jnp.asarray(1, jnp.int32))


SCALES = [
    jaxmp.NoOpLossScale(),
    jaxmp.StaticLossScale(2.0**10),
    jaxmp.DynamicLossScale(2.0**10),
    jaxmp.DynamicLossScale(3.0),
]


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_scale_then_unscale(scale, transform):
    tree = {
        "f32": jnp.array([1.5, -0.0, 1e-30]),
        "f16": jnp.array([60000.0, 6e-8], jnp.float16),
        "bf16": jnp.ones(2, jnp.bfloat16),
        "c": jnp.array([1 + 2j], jnp.complex64),
        "i": jnp.int32(3),
    }
    scaled = transform(lambda s, t: s.scale(t))(scale, tree)
    back = transform(lambda s, t: s.unscale(t))(scale, scaled)
    factor = float(scale.loss_scale)
    for name in ("f32", "f16", "bf16", "c"):
        want = np.asarray(tree[name]).astype(np.complex64 if name == "c" else np.float32)
        np.testing.assert_allclose(scaled[name], want * np.float32(factor), rtol=2.0**-23)
        np.testing.assert_allclose(back[name], want, rtol=2.0**-22)
        if not isinstance(scale, jaxmp.NoOpLossScale):
            assert scaled[name].dtype == back[name].dtype == want.dtype, "half leaves are widened"
    assert scaled["i"].dtype == jnp.int32
    assert int(back["i"]) == 3


def test_scaling_by_powers_of_two_is_exact():
    x = jax.random.normal(jax.random.key(0), (1000,))
    for scale in (jaxmp.StaticLossScale(2.0**20), jaxmp.DynamicLossScale(2.0**-20)):
        np.testing.assert_array_equal(scale.unscale(scale.scale(x)), x)


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_scaling_passes_over_leaves_without_numbers(scale):
    """Case B37."""
    tree = odd_tree()
    for got in (scale.scale(tree), scale.unscale(tree)):
        chex.assert_trees_all_equal_structs(got, tree)
        for name in ("int", "bool", "fp8", "int4", "key", "float0", "string", "function"):
            assert got[name] is tree[name], name
    assert jaxmp.NoOpLossScale().scale(tree) is tree


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_every_option_survives(scale):
    if isinstance(scale, jaxmp.DynamicLossScale):
        scale = jaxmp.DynamicLossScale(
            8.0, 3, 5, 3, 0.5, max_loss_scale=64.0, backoff=0.125, hysteresis=4, skip_streak=2
        ).adjust(BAD)  # fmt: skip
    copies = [
        jax.tree.map(lambda x: x, scale),
        jax.jit(lambda s: s)(scale),
        jax.lax.scan(lambda s, _: (s, None), scale, None, length=2)[0],
        pickle.loads(pickle.dumps(scale)),
        copy.deepcopy(scale),
        serialization.from_state_dict(scale, serialization.to_state_dict(scale)),
        serialization.from_bytes(scale, serialization.to_bytes(scale)),
        jax.tree.map(lambda x: x[0], jax.vmap(lambda _, s=scale: s)(jnp.arange(2))),
    ]
    for again in copies:
        assert type(again) is type(scale)
        assert str(jax.tree.map(np.asarray, again)) == str(jax.tree.map(np.asarray, scale))


def test_vmap_gives_each_lane_its_own_scale():
    scales = jax.vmap(lambda x: jaxmp.DynamicLossScale(x, period=1))(jnp.array([4.0, 8.0]))
    assert scales.loss_scale.shape == (2,)
    got = jax.vmap(lambda s, f: s.adjust(f))(scales, jnp.array([True, False]))
    np.testing.assert_array_equal(got.loss_scale, [8.0, 4.0])


def test_two_plain_scales_adjust_to_themselves():
    for scale in (jaxmp.NoOpLossScale(), jaxmp.StaticLossScale(4.0)):
        assert scale.adjust(jnp.bool_(False)) is scale
        assert jax.tree.leaves(scale) == []


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: jaxmp.DynamicLossScale(0.0), "loss_scale is 0.0, but must be a positive finite"),
        (lambda: jaxmp.DynamicLossScale(-1.0), "loss_scale is -1.0"),
        (lambda: jaxmp.DynamicLossScale(jnp.inf), "loss_scale is inf"),
        (lambda: jaxmp.DynamicLossScale(float("nan")), "loss_scale is nan"),
        (lambda: jaxmp.DynamicLossScale(1e39), "loss_scale is 1e\\+39"),
        (lambda: jaxmp.DynamicLossScale(jnp.ones(2)), "positive finite number"),
        (lambda: jaxmp.DynamicLossScale("big"), "loss_scale is 'big'"),
        (lambda: jaxmp.StaticLossScale(0.0), "loss_scale is 0.0"),
        (lambda: jaxmp.StaticLossScale(jnp.float32(jnp.inf)), "positive finite number"),
        (lambda: jaxmp.DynamicLossScale(period=0), "period is 0, but must be an integer"),
        (lambda: jaxmp.DynamicLossScale(period=1.5), "period is 1.5"),
        (lambda: jaxmp.DynamicLossScale(hysteresis=0), "hysteresis is 0"),
        (lambda: jaxmp.DynamicLossScale(factor=1.0), "factor is 1.0"),
        (lambda: jaxmp.DynamicLossScale(backoff=1.0), "backoff is 1.0"),
        (lambda: jaxmp.DynamicLossScale(min_loss_scale=-1.0), "min_loss_scale is -1.0"),
        (lambda: jaxmp.DynamicLossScale(max_loss_scale=0.5), "below min_loss_scale"),
        (lambda: jaxmp.DynamicLossScale().adjust(jnp.ones(2)), "expected boolean scalar"),
        (lambda: jaxmp.DynamicLossScale().adjust(1), "expected boolean scalar"),
        (lambda: jax.jit(jaxmp.StaticLossScale)(1.0), "traced value"),
    ],
)
def test_bad_input(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_building_a_scale_in_jit_from_a_traced_value_works():
    scale = jax.jit(lambda x: jaxmp.DynamicLossScale(x, period=3))(jnp.float16(8))
    assert (scale.loss_scale.dtype, scale.period) == (jnp.float32, 3)


@given(
    st.lists(st.booleans(), max_size=40),
    st.integers(1, 4),
    st.integers(-3, 20),
    st.sampled_from([2, 3, 10]),
)
def test_sequences_equal_jmps_between_the_bounds(flags, period, start, factor):
    """The same flags move our scale as they move jmp's, up to the rounding of 1 / factor."""
    with jax.numpy_dtype_promotion("standard"):  # jmp multiplies ints by bools
        ours = jaxmp.DynamicLossScale(
            2.0**start, period=period, factor=factor, max_loss_scale=2.0**126
        )
        theirs = jmp.DynamicLossScale(jnp.float32(2.0**start), jnp.int32(0), period, factor)
        for flag in flags:
            if float(theirs.loss_scale) > 2.0**100:
                break
            ours, theirs = ours.adjust(jnp.bool_(flag)), theirs.adjust(jnp.bool_(flag))
            np.testing.assert_allclose(ours.loss_scale, theirs.loss_scale, rtol=1e-5)
            assert int(ours.counter) == int(theirs.counter)


def test_jmps_objects_are_taken():
    theirs = jmp.DynamicLossScale(jnp.float32(8), jnp.int32(1), 7, 4, jnp.float32(0.5))
    ours = as_loss_scale(theirs)
    assert (float(ours.loss_scale), int(ours.counter)) == (8.0, 1)
    assert (ours.period, ours.factor, ours.min_loss_scale) == (7, 4.0, 0.5)
    assert as_loss_scale(jmp.NoOpLossScale()) == jaxmp.NoOpLossScale()
    assert as_loss_scale(jmp.StaticLossScale(4.0)) == jaxmp.StaticLossScale(4.0)
    for bad in (3.0, None, "dynamic", jaxmp.DynamicLossScale):
        with pytest.raises(TypeError, match="must be a loss scale object"):
            as_loss_scale(bad)


@pytest.mark.parametrize(
    "options", [{"period": "a"}, {"period": float("nan")}, {"period": 2**31}, {"factor": "x"}]
)
def test_options_that_are_no_numbers(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is "):
        jaxmp.DynamicLossScale(**options)
