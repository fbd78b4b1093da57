"""Parameters that are stored narrow: masters, Kahan summation, stochastic rounding (case B17)."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp import checkpoint, optim
from tests.test_mixed_precision import assert_same_bits
from tests.test_optim_contract import everything_wanted

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32

WRAPPERS = {
    "master_weights": optim.master_weights,
    "kahan": optim.kahan,
    "stochastic_rounding": functools.partial(optim.stochastic_rounding, key=0),
    "mixed_precision": functools.partial(jaxmp.mixed_precision, policy="mixed_bfloat16"),
}
every = pytest.mark.parametrize("wrapper", list(WRAPPERS))
both = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])

with_promotion = pytest.mark.parametrize(
    "apply", [optax.apply_updates, optim.apply_updates], ids=["optax", "jaxmp"]
)


def run(tx, params, grads_of, steps, apply=optim.apply_updates):
    @jax.jit
    def step(params, state, i):
        updates, state = tx.update(grads_of(params, i), state, params)
        return apply(params, updates), state

    state = tx.init(params)
    for i in range(steps):
        params, state = step(params, state, i)
    assert step._cache_size() == 1
    return params, state


def constant(value):
    return lambda params, i: jax.tree.map(lambda p: jnp.full(p.shape, value, F32), params)


@every
@both
@with_promotion
def test_small_updates_are_not_lost(wrapper, dtype, apply):
    """Case B17: 100 steps of 1e-4 from 1."""
    params = {"w": jnp.ones(4096, dtype), "f32": jnp.ones(3)}
    with jax.numpy_dtype_promotion("standard"):
        params, state = run(WRAPPERS[wrapper](optax.adam(1e-4)), params, constant(0.1), 100, apply)
    assert params["w"].dtype == dtype
    np.testing.assert_allclose(params["f32"], 0.99, rtol=1e-5)
    full = optim.full_weights(state, params)
    assert jax.tree.map(lambda leaf: leaf.dtype, full) == {"w": F32, "f32": F32}
    if wrapper == "stochastic_rounding":
        # A coin for each of 4096 parameters, thrown 100 times: six standard deviations.
        step = float(jnp.finfo(dtype).eps) / 2
        bound = 6 * np.sqrt(100 * 1e-4 * step / 4096)
        assert abs(float(full["w"].mean()) - 0.99) <= bound + 1e-5
    else:
        # What Kahan keeps is rounded to 8 bits of its own.
        accuracy = 1e-6 if wrapper != "kahan" else 100 * float(jnp.finfo(dtype).eps) ** 2
        np.testing.assert_allclose(full["w"], 0.99, rtol=max(accuracy, 1e-5))
        nearest = full["w"].astype(dtype).astype(F32)
        np.testing.assert_array_equal(params["w"].astype(F32), nearest)


@both
@with_promotion
def test_updates_land_on_the_rounded_master(dtype, apply):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.standard_normal(10_000) * 4.0 ** rng.integers(-5, 5), dtype)}
    grads = [jnp.asarray(rng.standard_normal(10_000), F32) for _ in range(5)]
    masters = params["w"].astype(F32)
    tx = optim.master_weights(optax.sgd(0.3))
    state = tx.init(params)
    for grad in grads:
        with jax.numpy_dtype_promotion("standard"):
            updates, state = jax.jit(tx.update)({"w": grad}, state, params)
            params = jax.jit(apply)(params, updates)
        masters = masters - jnp.float32(0.3) * grad
        np.testing.assert_allclose(state.masters["w"], masters, rtol=1e-6, atol=1e-6)
        assert_same_bits(params["w"], state.masters["w"].astype(dtype))


def test_masters_follow_plain_adam_bit_for_bit():
    """The same gradients: masters are what f32 parameters would be."""
    rng = np.random.default_rng(0)
    start = jnp.asarray(rng.standard_normal((8, 8)), BF16)
    grads = [{"w": jnp.asarray(rng.standard_normal((8, 8)), F32)} for _ in range(20)]
    plain, plain_params = optax.adamw(1e-2), {"w": start.astype(F32)}
    tx, params = optim.master_weights(optax.adamw(1e-2)), {"w": start}
    plain_state, state = plain.init(plain_params), tx.init(params)
    for grad in grads:
        with jax.numpy_dtype_promotion("standard"):
            updates, plain_state = plain.update(grad, plain_state, plain_params)
        plain_params = optim.apply_updates(plain_params, updates)
        updates, state = tx.update(grad, state, params)
        params = optim.apply_updates(params, updates)
    assert_same_bits(state.masters, plain_params)
    assert_same_bits(state.inner_state, plain_state)


def test_float32_parameters_have_no_master():
    tx = optim.master_weights(optax.adam(0.1))
    state = tx.init({"a": jnp.ones(2), "n": jnp.arange(2), "none": None})
    assert state.masters == {"a": None, "n": None, "none": None}
    mixed = jaxmp.mixed_precision(optax.adam(0.1), "mixed_bfloat16")
    assert not isinstance(mixed.init({"a": jnp.ones(2)}).inner_state, optim.MasterWeightsState)
    narrow = mixed.init({"a": jnp.ones(2, BF16), "n": jnp.arange(2)})
    assert narrow.inner_state.masters["a"].dtype == F32
    assert narrow.inner_state.inner_state[0].mu["a"].dtype == F32


@pytest.mark.parametrize("name", ["kahan", "stochastic_rounding", "master_weights"])
def test_mixed_precision_leaves_narrow_parameters_to_a_transform_that_cares_for_them(name):
    tx = jaxmp.mixed_precision(optax.chain(WRAPPERS[name](optax.adam(0.1))), "mixed_bfloat16")
    state = tx.init({"a": jnp.ones(2, BF16)})
    assert not isinstance(state.inner_state, optim.MasterWeightsState)
    updates, after = tx.update({"a": jnp.array([1.0, jnp.inf])}, state, {"a": jnp.ones(2, BF16)})
    assert updates["a"].dtype == F32
    assert np.all(np.signbit(updates["a"]))
    assert np.all(updates["a"] == 0)
    assert_same_bits(after.inner_state, state.inner_state)


def test_weights_set_from_outside_replace_their_masters():
    tx = optim.master_weights(optax.sgd(1e-3))
    params = {"w": jnp.ones(3, BF16)}
    _, state = tx.update({"w": jnp.ones(3)}, tx.init(params), params)
    loaded = {"w": jnp.array([1.0, 2.0, -5.0], BF16)}
    _, state = tx.update({"w": jnp.ones(3)}, state, loaded)
    # The first is where its master, 0.999, had it.
    np.testing.assert_allclose(state.masters["w"], [0.998, 1.999, -5.001], rtol=1e-6)


def test_masters_survive_updates_that_were_added_in_bfloat16():
    tx, params = optim.master_weights(optax.sgd(1e-4)), {"w": jnp.ones(3, BF16)}
    state = tx.init(params)
    for _ in range(100):
        updates, state = tx.update({"w": jnp.ones(3)}, state, params)
        params = jax.tree.map(lambda p, u: p + u.astype(BF16), params, updates)
    np.testing.assert_allclose(state.masters["w"], 0.99, rtol=1e-5)


def test_replace_master_weights():
    tx = optax.chain(optax.identity(), optim.master_weights(optax.sgd(0.1)))
    params = {"w": jnp.ones(2, BF16), "b": jnp.ones(2)}
    state = optim.replace_master_weights(
        tx.init(params), {"w": jnp.full(2, 1.001), "b": params["b"]}
    )
    assert_same_bits(state[1].masters, {"w": jnp.full(2, 1.001, F32), "b": None})
    with pytest.raises(ValueError, match=r"w: float32\[3\] for a master of float32\[2\]"):
        optim.replace_master_weights(state, {"w": jnp.ones(3), "b": jnp.ones(2)})
    with pytest.raises(ValueError, match="0 states of master_weights"):
        optim.replace_master_weights(optax.sgd(0.1).init(params), params)


@every
def test_state_is_a_fixed_point_and_survives_a_checkpoint(wrapper, tmp_path):
    tx, params = WRAPPERS[wrapper](optax.adam(1e-3)), {"w": jnp.linspace(-1, 1, 64).astype(BF16)}
    params, state = run(tx, params, constant(0.3), 3)
    checkpoint.save(tmp_path, {"params": params, "state": state}, step=3)
    template = {"params": params, "state": tx.init(params)}
    again = checkpoint.restore(tmp_path, template)
    assert_same_bits(again["params"], params)
    chex.assert_trees_all_equal_structs(again["state"], state)
    update = jax.jit(tx.update)
    for one, two in zip(
        jax.tree.leaves(update({"w": jnp.ones(64)}, state, params)),
        jax.tree.leaves(update({"w": jnp.ones(64)}, again["state"], again["params"])),
        strict=True,
    ):
        if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            assert_same_bits(one, two)


def test_stochastic_rounding_is_reproducible_from_its_key():
    params = {"w": jnp.ones(256, BF16)}

    def after(key):
        tx = optim.stochastic_rounding(optax.sgd(1e-3), key)
        return run(tx, params, constant(1.0), 5)[0]["w"]

    assert_same_bits(after(1), after(jax.random.key(1)))
    assert_same_bits(after(1), after(jax.random.PRNGKey(1)))
    assert np.any(after(1) != after(2))


@pytest.mark.parametrize("key", [None, 1.5, True, jnp.ones(2)])
def test_stochastic_rounding_needs_a_key(key):
    with pytest.raises(ValueError, match="give a seed or a PRNG key"):
        optim.stochastic_rounding(optax.sgd(0.1), key)


@pytest.mark.parametrize("name", ["kahan", "stochastic_rounding", "master_weights"])
def test_bad_input(name):
    tx, params = WRAPPERS[name](optax.sgd(0.1)), {"w": jnp.ones(2, BF16), "v": jnp.ones(2)}
    state = tx.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    with pytest.raises(ValueError, match=f"{name} updates the parameters itself"):
        tx.update(grads, state)
    with pytest.raises(ValueError, match=f"{name} updates the parameters itself"):
        tx.init(None)
    with pytest.raises(ValueError, match="only in gradients: x"):
        tx.update({**grads, "x": jnp.ones(2)}, state, params)
    with pytest.raises(ValueError, match="'w' has shape"):
        tx.update({**grads, "w": jnp.ones(3)}, state, params)
    if name != "stochastic_rounding":
        other = {"w": jnp.ones(2, BF16), "u": jnp.ones(2)}
        with pytest.raises(ValueError, match=r"only in params: u\n  only in the state: v"):
            tx.update(jax.tree.map(jnp.ones_like, other), state, other)
        wide = jax.tree.map(lambda leaf: leaf.astype(F32), params)
        with pytest.raises(ValueError, match=r"w: .*\[2\] for a parameter of float32\[2\]"):
            tx.update(grads, state, wide)


def test_full_weights_of_several_states():
    params = {"w": jnp.ones(2, BF16)}
    one = optim.master_weights(optax.sgd(0.1)).init(params)
    with pytest.raises(ValueError, match="2 states"):
        optim.full_weights((one, one), params)
    assert_same_bits(optim.full_weights((), params), {"w": jnp.ones(2)})


@every
def test_in_a_scan_and_under_vmap(wrapper):
    tx, params = WRAPPERS[wrapper](optax.adam(1e-2)), {"w": jnp.ones((3, 5), BF16)}

    def steps(params):
        def body(carry, _):
            params, state = carry
            updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
            return (optim.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, tx.init(params)), length=4)[0][0]

    whole = jax.jit(steps)(params)
    assert whole["w"].dtype == BF16
    lanes = jax.jit(jax.vmap(steps))(params)
    if wrapper != "stochastic_rounding":  # each lane draws the same bits
        assert_same_bits(whole, lanes)


def test_a_train_state_of_narrow_parameters_averages_their_masters():
    tx = jaxmp.mixed_precision(optax.sgd(1e-3), "params=bf16,compute=bf16,output=f32")
    state = jaxmp.TrainState.create({"w": jnp.ones((4, 1), BF16)}, tx, ema=True)
    step = jaxmp.make_train_step(
        lambda params, x: jnp.sum(x @ params["w"]), tx, "mixed_bfloat16", ema_decay=0.5
    )
    x = jnp.full((1, 4), 0.25)
    for _ in range(4):
        state, info = step(state, x)
    assert not bool(info.skipped)
    np.testing.assert_allclose(optim.full_weights(state, state.params)["w"], 0.999, rtol=1e-6)
    mean = 1.0
    for i in range(1, 5):
        mean = 0.5 * mean + 0.5 * (1 - 2.5e-4 * i)
    np.testing.assert_allclose(state.ema_params["w"], mean, rtol=1e-6)


def test_a_train_step_without_an_average_takes_several_ways_of_storing():
    ways = {"a": optim.kahan(optax.sgd(1e-3)), "b": optim.master_weights(optax.sgd(1e-3))}
    tx = jaxmp.mixed_precision(optax.partition(ways, {"v": "a", "w": "b"}), "mixed_bfloat16")
    params = {"v": jnp.ones((4, 1), BF16), "w": jnp.ones((4, 1), BF16)}
    step = jaxmp.make_train_step(
        lambda params, x: jnp.sum(x @ params["v"] + x @ params["w"]), tx, "mixed_bfloat16"
    )
    _, info = step(jaxmp.TrainState.create(params, tx), jnp.ones((1, 4)))
    assert not bool(info.skipped)


TRANSFORMS = WRAPPERS | {
    "skip_nonfinite": optim.skip_nonfinite,
    "accumulate": functools.partial(optim.accumulate, k=2),
    "state_dtype": functools.partial(
        optim.state_dtype, dtypes={"mu": "block8", "nu": "block8_square"}
    ),
}
ODD = {
    "w": jnp.ones((4, 300), BF16), "zero": jnp.zeros((0, 3), BF16), "scalar": jnp.ones((), BF16),
    "none": None, "list": [jnp.ones(3)],
}  # fmt: skip


def partitioned(wrap):
    labels = {"w": "a", "zero": "a", "scalar": "b", "none": None, "list": ["a"]}
    return optax.partition({"a": wrap(optax.adam(1e-2)), "b": optax.sgd(0.1)}, labels)


def masked(wrap):
    mask = {"w": True, "zero": False, "scalar": True, "none": None, "list": [False]}
    return optax.masked(wrap(optax.adam(1e-2)), mask)


NESTINGS = {
    "alone": lambda wrap: wrap(optax.adam(1e-2)),
    "partition": partitioned,
    "masked": masked,
    "chain": lambda wrap: optax.chain(optax.clip_by_global_norm(1.0), wrap(optax.adam(1e-2))),
    "MultiSteps": lambda wrap: optax.MultiSteps(
        wrap(optax.adam(1e-2)), 2
    ).gradient_transformation(),
    "inject_hyperparams": lambda wrap: optax.inject_hyperparams(
        lambda learning_rate: wrap(optax.adam(learning_rate))
    )(learning_rate=1e-2),
}


EVERYWHERE = [
    (name, *form)
    for name in TRANSFORMS
    for form in [*((nesting, False) for nesting in NESTINGS), ("alone", True)]
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "nesting", "x64"), EVERYWHERE if everything_wanted else EVERYWHERE[::3]
)
def test_everywhere_that_optax_takes_a_transform(name, nesting, x64):
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(x64):
        params = ODD | ({"f64": jnp.ones(3, jnp.float64)} if x64 else {})
        tx = NESTINGS[nesting](TRANSFORMS[name])
        after, _ = run(tx, params, constant(1.0), 4)
        assert after["w"].dtype == BF16
        assert np.all(after["w"] != 1)
        assert after["zero"].shape == (0, 3)
        if x64:
            assert after["f64"].dtype == jnp.float64
