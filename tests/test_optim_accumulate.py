"""Accumulating gradients and averaging parameters (cases B15, B18, B24)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp import checkpoint, optim
from tests.test_mixed_precision import assert_same_bits

BF16, F32 = jnp.bfloat16, jnp.float32
jit_or_not = pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])


def batches(count, dtype=F32):
    rng = np.random.default_rng(0)
    return [{"w": jnp.asarray(rng.standard_normal((3, 4)), dtype)} for _ in range(count)]


@jit_or_not
@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_window_is_one_update_with_the_mean(transform, k):
    params, tx = {"w": jnp.ones((3, 4))}, optim.accumulate(optax.adam(0.1), k)
    update, state = transform(tx.update), tx.init(params)
    plain = optax.adam(0.1)
    plain_state, plain_params = plain.init(params), params
    grads = batches(3 * k)
    for i, grad in enumerate(grads):
        updates, state = update(grad, state, params)
        if i % k < k - 1:
            assert np.all(np.signbit(updates["w"]) & (np.asarray(updates["w"]) == 0))
        params = optax.apply_updates(params, updates)
        if i % k == k - 1:
            mean = jax.tree.map(lambda *g: sum(g) / k, *grads[i - k + 1 : i + 1])
            with jax.numpy_dtype_promotion("standard"):
                expected, plain_state = plain.update(mean, plain_state, plain_params)
            plain_params = optax.apply_updates(plain_params, expected)
            np.testing.assert_allclose(params["w"], plain_params["w"], rtol=1e-6)
    assert int(state.inner_state[0].count) == 3


def test_weights_of_batches():
    params, tx = {"w": jnp.zeros(2)}, optim.accumulate(optax.sgd(1.0), 3)
    state = tx.init(params)
    for value, weight in ((1.0, 2), (4.0, 5.0), (jnp.float32(-3.0), jnp.int32(1))):
        updates, state = tx.update({"w": jnp.full(2, value)}, state, params, weight=weight)
    np.testing.assert_allclose(updates["w"], -(2 * 1 + 5 * 4 - 3) / 8, rtol=1e-6)
    for _ in range(3):
        updates, state = tx.update({"w": jnp.ones(2)}, state, params, weight=0.0)
    np.testing.assert_array_equal(updates["w"], 0)


@jit_or_not
@pytest.mark.parametrize("bad", range(4))
def test_an_overflow_in_one_call_skips_the_window_once(transform, bad):
    """Case B24: one scale, one check and one change of the scale in a window."""
    params = {"w": jnp.ones((3, 4))}
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    tx = optim.accumulate(jaxmp.mixed_precision(chain, "mixed_float16"), 4)
    update, state = transform(tx.update), tx.init(params)
    start = state.inner_state.inner_state
    for i, grad in enumerate(batches(4)):
        assert float(jaxmp.get_loss_scale(state).loss_scale) == 2.0**15
        factor = jnp.inf if i == bad else 1.0
        updates, state = update({"w": grad["w"] * factor}, state, params)
        assert_same_bits(optax.apply_updates(params, updates), params)
    assert float(jaxmp.get_loss_scale(state).loss_scale) == 2.0**14
    assert (int(state.inner_state.step), int(state.inner_state.skipped_steps)) == (1, 1)
    assert_same_bits(state.inner_state.inner_state, start)
    np.testing.assert_array_equal(state.sums["w"], 0)
    for grad in batches(4):
        updates, state = update(grad, state, params)
    assert np.all(updates["w"] != 0)


@pytest.mark.parametrize("params_dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("grads_dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", ["adam", "adafactor", "schedule_free_adamw"])
@pytest.mark.parametrize("form", ["accumulate", "MultiSteps"])
def test_dtypes_of_both_branches_agree(params_dtype, grads_dtype, name, form):
    """Case B15."""
    module = optax if hasattr(optax, name) else optax.contrib
    inner = getattr(module, name)(1e-2)
    if form == "accumulate":
        tx = optim.accumulate(jaxmp.mixed_precision(inner, "mixed_float16"), 2)
    else:
        multi = optax.MultiSteps(inner, 2).gradient_transformation()
        tx = jaxmp.mixed_precision(multi, "mixed_float16")
    params = {"w": jnp.ones((3, 4), params_dtype)}
    state, traces = tx.init(params), []

    @jax.jit
    def step(grads, state, params):
        traces.append(1)
        updates, state = tx.update(grads, state, params)
        return updates, state, optim.apply_updates(params, updates)

    for grads in batches(6, grads_dtype):
        updates, new_state, params = step(grads, state, params)
        assert updates["w"].dtype == F32
        assert params["w"].dtype == params_dtype
        assert jax.tree.map(jnp.result_type, new_state) == jax.tree.map(jnp.result_type, state)
        state = new_state
    assert len(traces) == 1
    assert np.all(optim.full_weights(state, params)["w"] != 1)
    if form == "accumulate":
        assert state.sums["w"].dtype == F32


def test_leaves_without_a_gradient():
    params = {"w": jnp.ones(2), "n": jnp.arange(3), "key": jax.random.key(0)}
    grads = {
        "w": jnp.ones(2),
        "n": np.zeros(3, jax.dtypes.float0),
        "key": np.zeros((), jax.dtypes.float0),
    }
    tx = optim.accumulate(jaxmp.mixed_precision(optax.adam(0.1), "mixed_float16"), 2)
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
    after = optim.apply_updates(params, updates)
    np.testing.assert_array_equal(after["n"], params["n"])
    assert np.all(after["w"] < 1)


def test_a_window_survives_a_checkpoint(tmp_path):
    params = {"w": jnp.ones((3, 4))}
    tx = optim.accumulate(jaxmp.mixed_precision(optax.adam(0.1), "mixed_float16"), 3)
    state = tx.init(params)
    first, second, third = batches(3)
    for grads in (first, second):
        _, state = tx.update(grads, state, params)
    checkpoint.save(tmp_path, state, step=0)
    again = checkpoint.restore(tmp_path, tx.init(params))
    assert_same_bits(again, state)
    assert_same_bits(tx.update(third, again, params), tx.update(third, state, params))


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "2"])
def test_bad_counts(k):
    with pytest.raises(ValueError, match=r"k is .*, but must be an integer of at least 1"):
        optim.accumulate(optax.sgd(0.1), k)


class TestEma:
    def test_a_half_average_would_stay_at_its_start(self):
        """Case B18: 200 steps of decay 0.999 from 1 toward 2."""
        tx = optax.chain(optax.set_to_zero(), optim.ema(0.999))
        params = {"w": jnp.ones(3, BF16), "n": jnp.arange(2)}
        state = tx.init(params)
        params = {"w": jnp.full(3, 2, BF16), "n": jnp.arange(2) + 5}
        zeros = {"w": jnp.zeros(3), "n": jnp.zeros(2, int)}
        for _ in range(200):
            _, state = jax.jit(tx.update)(zeros, state, params)
        average = optim.get_ema(state)
        assert average["w"].dtype == F32
        np.testing.assert_allclose(average["w"], 2 - 0.999**200, rtol=1e-5)
        np.testing.assert_array_equal(average["n"], params["n"])

    def test_it_is_that_of_the_parameters_after_the_update(self):
        params, decay = {"w": jnp.array([1.0, -2.0])}, 0.9
        tx = optax.chain(optax.sgd(0.5), optim.ema(decay))
        state, average = tx.init(params), params["w"]
        for grad in (1.0, 2.0, -1.0):
            updates, state = tx.update({"w": jnp.full(2, grad)}, state, params)
            params = optax.apply_updates(params, updates)
            average = decay * average + (1 - decay) * params["w"]
            np.testing.assert_allclose(optim.get_ema(state)["w"], average, rtol=1e-6)

    @pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
    def test_skipped_steps_leave_it_and_masters_are_averaged(self, dtype):
        params = {"w": jnp.ones(3, dtype)}
        chain = optax.chain(optax.sgd(1e-4), optim.ema(0.5))
        tx = jaxmp.mixed_precision(chain, "mixed_bfloat16")
        state, update = tx.init(params), jax.jit(tx.update)
        _, state = update({"w": jnp.ones(3)}, state, params)
        np.testing.assert_allclose(optim.get_ema(state)["w"], 1 - 0.5e-4, rtol=1e-7)
        _, after = update({"w": jnp.full(3, jnp.nan)}, state, params)
        assert_same_bits(optim.get_ema(after), optim.get_ema(state))

    def test_bad_input(self):
        for decay in (1.0, -0.1, True, "0.9", None):
            with pytest.raises(ValueError, match=r"decay is .*, but lies in \[0, 1\)"):
                optim.ema(decay)
        tx, params = optim.ema(0.9), {"w": jnp.ones(2)}
        with pytest.raises(ValueError, match="ema updates the parameters itself"):
            tx.update(params, tx.init(params))
        with pytest.raises(ValueError, match=r"only in params: v\n  only in the average: w"):
            tx.update({"v": jnp.ones(2)}, tx.init(params), {"v": jnp.ones(2)})
        with pytest.raises(ValueError, match="0 averages in an optimizer state"):
            optim.get_ema(optax.sgd(0.1).init(params))
