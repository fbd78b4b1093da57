"""The optax wrapper: skips, loss-scale state, schedules (cases B22, B23, B24, B26, B37)."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import jaxmp
from jaxmp.optim import apply_updates, get_mixed_precision_state, raise_for_skips
from tests.test_loss_scale import assert_same_kind
from tests.test_tree import odd_tree

# Optax's bare transforms do not run under strict promotion.
standard_promotion = functools.partial(jax.numpy_dtype_promotion, "standard")

POLICIES = ["float32", "mixed_bfloat16", "mixed_float16"]


def assert_same_bits(a, b):
    chex.assert_trees_all_equal_structs(a, b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.asarray(x).dtype == jnp.asarray(y).dtype
        assert bits_of(x) == bits_of(y)


def bits_of(leaf):
    is_key = jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()


def params_and_grads():
    params = {"w": jnp.array([[1.0, -0.0], [0.0, 1e-30]]), "b": jnp.array([-3.0])}
    return params, jax.tree.map(lambda p: jnp.full_like(p, 0.1), params)


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_skipped_step_restores_every_bit(bad, policy, transform):
    params, grads = params_and_grads()
    tx = jaxmp.mixed_precision(optax.adamw(optax.linear_schedule(0.1, 0.0, 9)), policy)

    @transform
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = step(params, tx.init(params), grads)
    bad_grads = grads | {"b": grads["b"].at[0].set(bad)}
    new_params, new_state = step(params, state, bad_grads)
    assert_same_bits(new_params, params)
    assert_same_bits(new_state.inner_state, state.inner_state)
    assert (int(new_state.step), int(new_state.skipped_steps), int(new_state.skip_streak)) == (
        2,
        1,
        1,
    )
    assert (bool(state.finite), bool(new_state.finite)) == (True, False)
    assert int(new_state.nonfinite_leaf) == 0, "'b' is the first leaf"
    assert_same_kind(new_state, state)
    assert_same_kind(new_state, tx.init(params))
    _, after = step(new_params, new_state, grads)
    assert (int(after.skipped_steps), int(after.skip_streak)) == (1, 0)


def test_updates_of_a_skipped_step_change_no_bit_not_even_of_minus_zero():
    params = {"w": jnp.array([-0.0, 0.0, 5.0, jnp.inf])}
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "float32")
    updates, _ = tx.update({"w": jnp.full(4, jnp.nan)}, tx.init(params), params)
    for apply in (optax.apply_updates, apply_updates):
        assert_same_bits(apply(params, updates), params)


@pytest.mark.parametrize("policy", POLICIES)
def test_clean_steps_are_those_of_the_bare_transform(policy):
    params, grads = params_and_grads()
    bare = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2))
    tx = jaxmp.mixed_precision(bare, policy)
    state, bare_state, bare_params = tx.init(params), bare.init(params), params
    update, bare_update = jax.jit(tx.update), jax.jit(bare.update)
    for _ in range(5):
        updates, state = update(grads, state, params)
        with standard_promotion():
            bare_updates, bare_state = bare_update(grads, bare_state, bare_params)
        # Two programs with the same arithmetic: fused multiply-adds may differ in the last place.
        chex.assert_trees_all_close(updates, bare_updates, rtol=2.0**-22)
        params = optax.apply_updates(params, updates)
        bare_params = optax.apply_updates(bare_params, bare_updates)
    chex.assert_trees_all_close(state.inner_state, bare_state, rtol=2.0**-22)


def test_the_form_of_the_gate_follows_the_platform():
    """A conditional on a CPU, a selection elsewhere; the inner transform is traced once."""
    traces = []

    def count():
        def update(updates, state, params=None):
            traces.append(1)
            return updates, state

        return optax.GradientTransformation(lambda _: optax.EmptyState(), update)

    tx = jaxmp.mixed_precision(optax.chain(count(), optax.adam(0.1)), "mixed_float16")
    params = {"w": jnp.ones(3)}
    traced = jax.jit(tx.update).trace(params, tx.init(params), params)
    texts = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "tpu", "cuda")
    }
    # The choice by platform is itself written as cases, of constants that the compiler folds.
    cases = {platform: text.count("stablehlo.case") for platform, text in texts.items()}
    assert cases["tpu"] == cases["cuda"] == cases["cpu"] - 1
    assert len(traces) == 1


def test_a_conditional_keeps_the_memory_of_the_bare_transform():
    """On a CPU a selection would need the whole optimizer state a second time."""
    params = {f"w{i}": jnp.ones((256, 256)) for i in range(4)}
    bare = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    used, x = [], jnp.ones((2, 256))
    for tx in (bare, jaxmp.mixed_precision(bare, "mixed_float16")):

        def step(params, state, x, tx=tx):
            grads = jax.grad(lambda p: sum(jnp.sum((x @ w) ** 2) for w in p.values()))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        with standard_promotion():
            lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), x)
            used.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    assert used[1] <= used[0] + 4096


def test_the_loss_scale_follows_the_policy():
    for policy, kind in {
        "float32": jaxmp.NoOpLossScale,
        "mixed_bfloat16": jaxmp.NoOpLossScale,
        "mixed_float16": jaxmp.DynamicLossScale,
        "p=f32,c=f16,o=f32": jaxmp.DynamicLossScale,
    }.items():
        state = jaxmp.mixed_precision(optax.sgd(1.0), policy).init({"w": jnp.ones(2)})
        assert isinstance(jaxmp.get_loss_scale(state), kind)
    with_f16_rule = jaxmp.get_policy("mixed_bfloat16").with_rules({"stem": "mixed_float16"})
    state = jaxmp.mixed_precision(optax.sgd(1.0), with_f16_rule).init({"w": jnp.ones(2)})
    assert isinstance(jaxmp.get_loss_scale(state), jaxmp.DynamicLossScale)
    chosen = jaxmp.mixed_precision(optax.sgd(1.0), "float32", jaxmp.StaticLossScale(8.0))
    assert jaxmp.get_loss_scale(chosen.init({"w": jnp.ones(2)})) == jaxmp.StaticLossScale(8.0)


def two_layer_loss(params, x):
    hidden = x @ params["a"]
    return jnp.mean((hidden @ params["b"]) ** 2)


def penalized_loss(params, x):
    slope = jax.grad(lambda x: two_layer_loss(params, x))(x)
    return two_layer_loss(params, x) + 0.1 * jnp.sum(slope**2)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("loss_fn", [two_layer_loss, penalized_loss])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_answer_4_equals_an_unscaled_control_that_skips_the_bad_batch(clip, loss_fn, accumulate):
    """Two layers 8-8-8, SGD with rate 1, infinity in the third of four batches."""
    key = jax.random.key(0)
    params = {
        name: 0.1 * jax.random.normal(jax.random.fold_in(key, i), (8, 8))
        for i, name in enumerate("ab")
    }
    batches = jax.random.normal(jax.random.fold_in(key, 2), (4, 4, 8)).at[2, 1, 3].set(jnp.inf)
    chain = (
        optax.sgd(1.0)
        if clip is None
        else optax.chain(optax.clip_by_global_norm(clip), optax.sgd(1.0))
    )
    scale = jaxmp.DynamicLossScale(128.0, period=1)
    tx = jaxmp.mixed_precision(chain, "float32", scale)

    def grads_of(params, batch, loss_scale):
        grad_fn = jaxmp.value_and_grad(loss_fn, "float32", loss_scale=loss_scale)
        parts = [grad_fn(params, part)[1] for part in jnp.split(batch, accumulate)]
        return jax.tree.map(lambda *gs: sum(gs) / accumulate, *parts)

    @jax.jit
    def step(params, state, batch):
        grads = grads_of(params, batch, jaxmp.get_loss_scale(state))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    control, control_state = params, chain.init(params)
    state = tx.init(params)
    for i, batch in enumerate(batches):
        params, state = step(params, state, batch)
        if i != 2:
            grads = grads_of(control, batch, None)
            with standard_promotion():
                updates, control_state = chain.update(grads, control_state, control)
            control = optax.apply_updates(control, updates)
    assert float(jaxmp.get_loss_scale(state).loss_scale) == 128 * 2**3 / 2
    # Powers of two scale exactly; jit and eager may round their sums differently.
    chex.assert_trees_all_close(params, control, rtol=1e-5, atol=1e-7)


def test_answer_7_duplicate_rows_overflow_in_f16():
    rows = jnp.zeros(3, jnp.float16).at[jnp.array([1, 1])].add(jnp.float16(64000))
    assert not bool(jaxmp.all_finite(rows))


@pytest.mark.parametrize(
    "chain",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        optax.chain(optax.clip(0.05), optax.sgd(0.1)),
        optax.chain(optax.clip_by_block_rms(0.05), optax.sgd(0.1)),
        optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
        optax.chain(optax.centralize(), optax.sgd(0.1)),
        optax.chain(optax.add_noise(0.01, 0.5, 0), optax.sgd(0.1)),
        optax.adamw(0.1, weight_decay=0.1),
    ],
    ids=["global norm", "value", "block rms", "adaptive", "centralize", "noise", "weight decay"],
)  # fmt: skip
def test_thresholds_do_not_depend_on_the_scale(chain):
    """Case B23: with the clip before the unscale, the path depends on the scale."""
    x = 3 * jax.random.normal(jax.random.key(1), (16, 8))
    start = {"a": jax.random.normal(jax.random.key(2), (8, 8)), "b": jnp.ones((8, 8))}
    paths = []
    for scale in (1.0, 2.0**8, 2.0**16):
        tx = jaxmp.mixed_precision(chain, "float32", jaxmp.StaticLossScale(scale))

        @jax.jit
        def step(params, state, tx=tx):
            grad_fn = jaxmp.value_and_grad(
                two_layer_loss, "float32", loss_scale=jaxmp.get_loss_scale(state)
            )
            loss, grads = grad_fn(params, x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, (loss, optax.tree.norm(grads))

        params, state = start, tx.init(start)
        for _ in range(5):
            params, state, logged = step(params, state)
        paths.append((params, logged))
    chex.assert_trees_all_close(*paths, rtol=1e-5, atol=1e-7)


def test_schedules_and_bias_correction_count_clean_steps_only():
    """Case B26: overflow at steps 1 and 3 of 10."""
    schedule = optax.warmup_constant_schedule(0.0, 0.1, 20)
    tx = jaxmp.mixed_precision(optax.adamw(schedule), "mixed_float16")
    bare = optax.adamw(schedule)
    params = control = {"w": jnp.ones(3)}
    state, control_state = tx.init(params), bare.init(params)
    update = jax.jit(tx.update)
    for i in range(10):
        grads = {"w": jnp.full(3, 0.1 * (i + 1))}
        bad = {"w": grads["w"].at[1].set(jnp.inf)}
        updates, state = update(bad if i in (1, 3) else grads, state, params)
        params = optax.apply_updates(params, updates)
        if i not in (1, 3):
            with standard_promotion():
                updates, control_state = jax.jit(bare.update)(grads, control_state, control)
            control = optax.apply_updates(control, updates)
    assert_same_bits(params, control)
    counts = [
        int(leaf)
        for name, leaf in zip(
            jaxmp._tree.leaf_names(state.inner_state),
            jax.tree.leaves(state.inner_state),
            strict=True,
        )
        if name.endswith("count")
    ]
    assert counts == [8, 8]
    assert (int(state.step), int(state.skipped_steps)) == (10, 2)


def test_multi_steps_inside_the_wrapper():
    """Cases B15 and B26: an overflow drops its microbatch, and the window waits for another."""
    params = {"w": jnp.ones(3)}
    tx = jaxmp.mixed_precision(optax.MultiSteps(optax.sgd(1.0), 2), "mixed_float16")
    state, update, moved = tx.init(params), jax.jit(tx.update), []
    for i in range(7):
        grads = {"w": jnp.full(3, jnp.inf if i == 2 else 0.5)}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        moved.append(float(-updates["w"][0]))
    assert moved == [0, 0.5, 0, 0, 0.5, 0, 0.5]
    found = get_mixed_precision_state(state)
    assert (int(found.step), int(found.skipped_steps)) == (7, 1)
    assert int(found.inner_state.gradient_step) == 3
    assert float(found.loss_scale.loss_scale) == 2.0**14
    assert update._cache_size() == 1


def test_multi_steps_around_the_wrapper_never_lets_a_nan_through():
    """Optax's accumulators keep the NaN (0 * NaN), so every later window is skipped: visible."""
    params = {"w": jnp.ones(3)}
    tx = optax.MultiSteps(jaxmp.mixed_precision(optax.sgd(1.0), "mixed_float16"), 2)
    state, update = tx.init(params), jax.jit(tx.update)
    for i in range(8):
        with standard_promotion():
            grads = {"w": jnp.full(3, jnp.inf if i == 2 else 0.5)}
            updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params["w"], [0.5] * 3)
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        raise_for_skips(state, limit=3)


def test_a_users_own_skip_leaves_nothing_half_done():
    """Case B24: a norm limit of the user's, beside ours, in both orders."""
    params = {"w": jnp.ones(3)}

    def drop_large():
        def update(updates, state, params=None):
            norm = optax.tree.norm(updates)
            return jax.tree.map(lambda u: jnp.where(norm > 10, 0.0, u), updates), state

        return optax.GradientTransformation(lambda _: optax.EmptyState(), update)

    for tx in (
        jaxmp.mixed_precision(optax.chain(drop_large(), optax.sgd(0.1)), "mixed_float16"),
        optax.chain(jaxmp.mixed_precision(optax.sgd(0.1), "mixed_float16"), drop_large()),
    ):
        state, update, moved = tx.init(params), jax.jit(tx.update), []
        for size in (1.0, 1000.0, jnp.inf, 1.0):
            updates, state = update({"w": jnp.full(3, size)}, state, params)
            moved.append(bool(jnp.any(updates["w"] != 0)))
        assert moved == [True, False, False, True]
        found = get_mixed_precision_state(state)
        assert (int(found.step), int(found.skipped_steps), int(found.skip_streak)) == (4, 1, 0)
        assert float(found.loss_scale.loss_scale) == 2.0**14


def test_a_nan_at_every_scale_ends_in_a_clear_error():
    """Case B22: 200 steps with 0 * inf in the backward."""
    params = {"good": jnp.ones(2), "poisoned": jnp.ones(2)}

    def loss_fn(params, x):
        return jnp.sum(params["good"] * x) + jnp.sum(jnp.sqrt(params["poisoned"] * 0.0))

    tx = jaxmp.mixed_precision(optax.adam(0.1), "mixed_float16")

    @jax.jit
    def step(params, state):
        grad_fn = jaxmp.value_and_grad(
            loss_fn, "mixed_float16", loss_scale=jaxmp.get_loss_scale(state)
        )
        _, grads = grad_fn(params, jnp.ones(2))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    new, state = params, tx.init(params)
    raise_for_skips(state, limit=1)
    for _ in range(200):
        new, state = step(new, state)
    assert_same_bits(new, params)
    assert float(jaxmp.get_loss_scale(state).loss_scale) == 1.0
    assert int(state.skip_streak) == 200
    assert step._cache_size() == 1
    with pytest.raises(FloatingPointError, match=r"200 steps in a row.*'poisoned'.*to 1\.0"):
        raise_for_skips(state)
    raise_for_skips(state, limit=201)


def test_leaves_without_a_gradient_pass_through():
    """Case B37."""
    params = {name: leaf for name, leaf in odd_tree().items() if name not in ("bf16", "f16", "fp8")}
    tx = jaxmp.mixed_precision(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), "mixed_float16"
    )
    state = tx.init(params)
    _, grads = jaxmp.value_and_grad(
        lambda p: jnp.sum(p["f32"]) * p["python"] + jnp.sum(jnp.abs(p["complex"])), "float32"
    )(params)
    chex.assert_trees_all_equal_structs(grads, params)
    updates, state = tx.update(grads, state, params)
    got = apply_updates(params, updates)
    chex.assert_trees_all_equal_structs(got, params)
    for name in ("int", "bool", "key", "string", "function", "python_int", "int4", "float0"):
        assert got[name] is params[name], name
    for name in ("f32", "complex", "python"):
        assert not np.array_equal(got[name], params[name]), name
    assert got["complex"].dtype == jnp.complex64
    bad = grads | {"complex": grads["complex"].at[0].set(complex(0, jnp.inf))}
    _, state = tx.update(bad, state, params)
    assert int(state.skipped_steps) == 1, "an infinity in the imaginary part alone counts (B05)"


def test_integers_among_the_params_work_with_optax_apply_updates():
    params = {"w": jnp.ones(2), "n": jnp.int32(3), "mask": jnp.array([True, False])}
    tx = jaxmp.mixed_precision(optax.adamw(0.1), "mixed_bfloat16")

    @jax.jit
    def step(params, state):
        _, grads = jaxmp.value_and_grad(lambda p: jnp.sum(p["w"]), "mixed_bfloat16")(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    got, _ = step(params, tx.init(params))
    assert int(got["n"]) == 3
    np.testing.assert_array_equal(got["mask"], params["mask"])
    assert got["mask"].dtype == jnp.bool_
    assert not np.array_equal(got["w"], params["w"])


def test_frozen_parameters_stay_and_count_in_the_check():
    """Case B37: documented, the check looks at every gradient given."""
    params = {"frozen": jnp.ones(2), "free": jnp.ones(2)}
    tx = jaxmp.mixed_precision(
        optax.partition(
            {"a": optax.adam(0.1), "b": optax.set_to_zero()}, {"frozen": "b", "free": "a"}
        ),
        "mixed_float16",
    )
    grads = {"frozen": jnp.ones(2), "free": jnp.ones(2)}
    updates, state = tx.update(grads, tx.init(params), params)
    got = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(got["frozen"], params["frozen"])
    assert not np.array_equal(got["free"], params["free"])
    _, state = tx.update(grads | {"frozen": jnp.full(2, jnp.nan)}, state, params)
    assert int(state.skipped_steps) == 1


def test_half_gradients_are_widened_before_the_chain_sees_them():
    seen = []

    def spy():
        def update(updates, state, params=None):
            seen.append(jax.tree.map(lambda u: u.dtype, updates))
            return updates, state

        return optax.GradientTransformation(lambda _: optax.EmptyState(), update)

    params = {"w": jnp.ones(64)}
    tx = jaxmp.mixed_precision(optax.chain(spy(), optax.clip_by_global_norm(1.0)), "mixed_float16")
    updates, _ = tx.update({"w": jnp.full(64, 300.0, jnp.float16)}, tx.init(params), params)
    assert seen == [{"w": jnp.float32}]
    np.testing.assert_allclose(optax.tree.norm(updates), 1.0, rtol=1e-6)


def test_the_state_is_a_fixed_point_for_injected_hyperparameters():
    params = {"w": jnp.ones(3)}
    for rate in (0.1, np.float32(0.1), jnp.float32(0.1), optax.constant_schedule(0.1)):
        tx = jaxmp.mixed_precision(optax.inject_hyperparams(optax.adamw)(rate), "mixed_float16")
        state = tx.init(params)
        update = jax.jit(tx.update)
        for size in (0.1, jnp.inf, 0.1):
            updates, new_state = update({"w": jnp.full(3, size)}, state, params)
            assert_same_kind(new_state, state)
            assert updates["w"].dtype == jnp.float32
            state = new_state
        assert update._cache_size() == 1


def test_found_in_any_nesting():
    wrapped = jaxmp.mixed_precision(optax.adam(0.1), "mixed_float16")
    params = {"w": jnp.ones(2)}
    for tx in (
        wrapped,
        optax.chain(wrapped),
        optax.chain(optax.chain(optax.identity(), wrapped), optax.identity()),
        optax.partition({"a": wrapped}, {"w": "a"}),
    ):
        state = tx.init(params)
        assert float(jaxmp.get_loss_scale(state).loss_scale) == 2.0**15
        assert float(jaxmp.get_loss_scale({"deep": [state]}).loss_scale) == 2.0**15
    state = jaxmp.TrainState.create(params, wrapped)
    assert float(jaxmp.get_loss_scale(state).loss_scale) == 2.0**15


def test_extra_arguments_reach_the_inner_transform():
    tx = jaxmp.mixed_precision(
        optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1)), "float32"
    )
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    for _ in range(5):
        updates, state = tx.update({"w": jnp.ones(2)}, state, params, value=jnp.float32(1.0))
    assert float(updates["w"][0]) > -1.0


def test_params_may_be_left_out():
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "mixed_float16")
    updates, _ = tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}))
    np.testing.assert_array_equal(updates["w"], [-1.0, -1.0])


def test_bad_input():
    params = {"w": jnp.ones(2)}
    wrapped = jaxmp.mixed_precision(optax.adam(0.1), "mixed_float16")
    with pytest.raises(
        ValueError, match=r"No loss scale in an optimizer state of type tuple: wrap"
    ):
        jaxmp.get_loss_scale(optax.adam(0.1).init(params))
    with pytest.raises(ValueError, match=r"2 loss scales.*\n  0\n  1"):
        jaxmp.get_loss_scale((wrapped.init(params), wrapped.init(params)))
    with pytest.raises(ValueError, match=r"holds a mixed_precision or skip_nonfinite already"):
        jaxmp.mixed_precision(optax.chain(wrapped), "float32").init(params)
    with pytest.raises(ValueError, match=r"only in params: w\n  only in gradients: x"):
        wrapped.update({"x": jnp.ones(2)}, wrapped.init(params), params)
    with pytest.raises(ValueError, match=r"Unknown dtype or preset"):
        jaxmp.mixed_precision(optax.adam(0.1), "mixed_fp61")
    with pytest.raises(TypeError, match="must be a loss scale object"):
        jaxmp.mixed_precision(optax.adam(0.1), "float32", 128.0)


def test_a_transform_that_drifts_in_dtype_is_held():
    """Case B14's kind: updates and state keep the dtypes of params and of the initial state."""

    def drifting():
        def init(_):
            return {"count": jnp.int32(0), "mean": jnp.zeros(3, jnp.bfloat16)}

        def update(updates, state, params=None):
            halves = jax.tree.map(lambda u: u.astype(jnp.bfloat16), updates)
            state = {"count": state["count"] + 1, "mean": state["mean"] + updates["w"]}
            return halves, state

        return optax.GradientTransformation(init, update)

    params = {"w": jnp.ones(3)}
    for transform in (lambda f: f, jax.jit):
        tx = jaxmp.mixed_precision(drifting(), "mixed_bfloat16")
        state, update = tx.init(params), transform(tx.update)
        for _ in range(3):
            updates, new_state = update({"w": jnp.full(3, 0.5)}, state, params)
            assert updates["w"].dtype == jnp.float32
            assert_same_kind(new_state, state)
            state = new_state
        assert int(state.inner_state["count"]) == 3


@pytest.mark.parametrize("jit", [False, True])
def test_an_ensemble_skips_lane_by_lane(jit):
    params = {"w": jnp.ones((4, 3))}
    tx = jaxmp.mixed_precision(optax.adam(0.1), "mixed_float16")
    update = jax.vmap(tx.update)
    state = jax.vmap(tx.init)(params)
    grads = {"w": jnp.full((4, 3), 0.5).at[2, 1].set(jnp.nan)}
    updates, state = (jax.jit(update) if jit else update)(grads, state, params)
    np.testing.assert_array_equal(state.skipped_steps, [0, 0, 1, 0])
    np.testing.assert_array_equal(jnp.any(updates["w"] != 0, 1), [True, True, False, True])
    np.testing.assert_array_equal(state.inner_state[0].count, [1, 1, 0, 1])
    scales = [2.0**15, 2.0**15, 2.0**14, 2.0**15]
    np.testing.assert_array_equal(state.loss_scale.loss_scale, scales)


@pytest.mark.parametrize("used", [False, True])
def test_every_state_of_one_transform_has_buffers_of_its_own(used):
    """A donated state must not take another one, or the user's loss scale, with it."""
    scale = jaxmp.DynamicLossScale(2.0**4)
    scale = scale.adjust(jnp.bool_(True)) if used else scale  # JAX arrays from here on
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_float16", scale)
    step = jax.jit(lambda state, grads: tx.update(grads, state)[1], donate_argnums=0)
    params = {"w": jnp.ones(2)}
    for _ in range(2):
        step(tx.init(params), params)
    assert float(scale.loss_scale) == 16.0


def test_a_transform_built_inside_jit_works_outside():
    built = []

    @jax.jit
    def build(x):
        built.append(jaxmp.mixed_precision(optax.sgd(0.1), "mixed_float16"))
        return x

    build(1.0)
    state = built[0].init({"w": jnp.ones(2)})
    assert float(jaxmp.get_loss_scale(state).loss_scale) == 2.0**15


def test_the_name_is_right_where_the_wrapper_sees_a_part_of_the_tree():
    tx = optax.partition(
        {"a": jaxmp.mixed_precision(optax.adam(0.1), "mixed_float16"), "f": optax.set_to_zero()},
        {"b": "f", "w": "a"},
    )
    params = {"b": jnp.ones(2), "w": jnp.ones(2)}
    _, state = tx.update(params | {"w": jnp.full(2, jnp.nan)}, tx.init(params), params)
    with pytest.raises(FloatingPointError, match="that of 'w'"):
        raise_for_skips(state, limit=1)
    with pytest.raises(ValueError, match="limit is 0"):
        raise_for_skips(state, limit=0)


def test_a_skipped_step_keeps_minus_zeros_of_complex_parameters():
    params = {"c": jax.lax.complex(jnp.array([-0.0, 1.0]), jnp.array([-0.0, -0.0]))}
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "float32")
    for transform in (lambda f: f, jax.jit):
        bad = {"c": jnp.full(2, jnp.nan, jnp.complex64)}
        updates, _ = transform(tx.update)(bad, tx.init(params), params)
        assert_same_bits(transform(apply_updates)(params, updates), params)


def test_gradients_of_another_shape_are_rejected():
    params = {"w": jnp.ones(3)}
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "float32")
    for shape in ((2, 3), ()):
        with pytest.raises(
            ValueError, match=r"gradient of 'w' has shape .* the parameter has \(3,\)"
        ):
            tx.update({"w": jnp.ones(shape)}, tx.init(params), params)


def test_flax_train_states_and_optimizers():
    tx = jaxmp.mixed_precision(optax.adam(0.1), "mixed_float16")
    params = {"w": jnp.ones(3)}
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    good = state.apply_gradients(grads=params)
    bad = good.apply_gradients(grads={"w": jnp.full(3, jnp.inf)})
    assert_same_bits(bad.params, good.params)
    assert float(jaxmp.get_loss_scale(bad.opt_state).loss_scale) == 2.0**14
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    optimizer.update(model, jax.tree.map(lambda g: g + jnp.nan, grads))
    found = get_mixed_precision_state(optimizer.opt_state)
    assert not bool(found.finite)
    with pytest.raises(FloatingPointError, match="1 steps in a row"):
        raise_for_skips(optimizer.opt_state, limit=1)
