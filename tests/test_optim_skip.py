"""Skipped steps: alone, together with other optimizers, by loss; what counts as not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp import optim
from tests.test_mixed_precision import assert_same_bits

PARAMS = {"a": jnp.ones(3), "b": jnp.full(2, -2.0)}
GRADS = jax.tree.map(lambda p: jnp.full_like(p, 0.5), PARAMS)
BAD = GRADS | {"b": jnp.array([1.0, jnp.nan])}
jit_or_not = pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])


def counters(state):
    return int(state.step), int(state.skipped_steps), int(state.skip_streak)


@jit_or_not
def test_alone_it_restores_every_bit(transform):
    tx = optim.skip_nonfinite(optax.adamw(optax.linear_schedule(0.1, 0.0, 9)))
    update = transform(tx.update)
    _, state = update(GRADS, tx.init(PARAMS), PARAMS)
    updates, skipped = update(BAD, state, PARAMS)
    assert_same_bits(skipped.inner_state, state.inner_state)
    assert_same_bits(optax.apply_updates(PARAMS, updates), PARAMS)
    assert counters(skipped) == (2, 1, 1)
    assert (bool(state.finite), bool(skipped.finite)) == (True, False)
    assert skipped.gradients.names[int(skipped.nonfinite_leaf)] == "b"
    _, after = update(GRADS, skipped, PARAMS)
    assert counters(after) == (3, 1, 0)
    with pytest.raises(FloatingPointError, match=r"1 steps in a row were skipped\. The first.*'b'"):
        optim.raise_for_skips(skipped, limit=1)


@jit_or_not
@pytest.mark.parametrize("wrap", ["skip_nonfinite", "mixed_precision"])
def test_two_optimizers_skip_the_same_steps(transform, wrap):
    """The two of a GAN: one scale, one verdict."""

    def wrapped():
        if wrap == "skip_nonfinite":
            return optim.skip_nonfinite(optax.adam(0.1))
        return jaxmp.mixed_precision(optax.adam(0.1), "mixed_float16")

    generator, critic = wrapped(), wrapped()

    @transform
    def step(states, grads):
        finite = jaxmp.all_finite(grads)
        pairs = zip((generator, critic), grads, states, strict=True)
        return tuple(tx.update(g, s, PARAMS, finite=finite)[1] for tx, g, s in pairs)

    states = generator.init(PARAMS), critic.init(PARAMS)
    for grads in ((GRADS, GRADS), (BAD, GRADS), (GRADS, BAD), (GRADS, GRADS)):
        states = step(states, grads)
        assert counters(states[0]) == counters(states[1])
        if wrap == "mixed_precision":
            scales = [float(jaxmp.get_loss_scale(state).loss_scale) for state in states]
            assert scales[0] == scales[1]
    assert counters(states[0]) == (4, 2, 0)
    assert int(states[0].inner_state[0].count) == 2


def test_the_reason_lies_with_another_optimizer():
    tx = optim.skip_nonfinite(optax.adam(0.1))
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS, finite=jnp.bool_(False))
    assert int(state.nonfinite_leaf) == -2
    with pytest.raises(FloatingPointError, match="those of another one are not"):
        optim.raise_for_skips(state, limit=1)


@jit_or_not
def test_a_loss_scale_for_each_loss(transform):
    scales = {"task": jaxmp.DynamicLossScale(period=2), "aux": jaxmp.DynamicLossScale(period=3)}
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_float16", scales)
    update, state = transform(tx.update), tx.init(PARAMS)
    history = [(True, True), (True, False), (True, True), (False, True), (True, True)]
    for task, aux in history:
        finite = {"task": jnp.bool_(task), "aux": jnp.bool_(aux)}
        updates, state = update(GRADS, state, PARAMS, finite=finite)
        assert (float(updates["a"][0]) != 0) == (task and aux)
    found = {name: float(s.loss_scale) for name, s in jaxmp.get_loss_scale(state).items()}
    # Grown after two clean steps, back after one overflow; back, and three clean ones.
    assert found == {"task": 2.0**15, "aux": 2.0**15}
    assert counters(state) == (5, 2, 0)
    with pytest.raises(ValueError, match="aux, task have a loss scale each"):
        tx.update(GRADS, state, PARAMS)
    with pytest.raises(ValueError, match="aux, task have a loss scale each"):
        tx.update(GRADS, state, PARAMS, finite={"task": True})


def test_a_verdict_is_one_flag():
    tx = optim.skip_nonfinite(optax.sgd(0.1))
    for finite in (jnp.ones(2, bool), 1.0, GRADS["a"]):
        with pytest.raises(ValueError, match=r"pass a bool\[\]"):
            tx.update(GRADS, tx.init(PARAMS), PARAMS, finite=finite)


@jit_or_not
@pytest.mark.parametrize("size", [2.0**59, 2.0**60, 3e38])
def test_a_gradient_whose_square_leaves_float32_is_infinite(transform, size):
    """Adam's second moment would be infinite for ever, and the parameter would never move again."""
    tx = optim.skip_nonfinite(optax.adam(0.1))
    update = transform(tx.update)
    huge = GRADS | {"a": jnp.array([0.0, -size, 1.0])}
    _, state = update(huge, tx.init(PARAMS), PARAMS)
    assert int(state.skipped_steps) == (size >= 2.0**60)
    assert bool(jaxmp.all_finite(state.inner_state))
    updates, _ = update(GRADS, state, PARAMS)
    assert bool(jaxmp.all_finite(updates))


@jit_or_not
@pytest.mark.parametrize("name", ["prodigy", "dadapt_adamw"])
def test_a_state_that_would_turn_nan_is_not_taken(transform, name):
    """They divide by the norm of all gradients, and 0 / 0 would stay in their state."""
    tx = optim.skip_nonfinite(getattr(optax.contrib, name)())
    update, state = transform(tx.update), tx.init(PARAMS)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, state = update(zeros, state, PARAMS)
    assert bool(jaxmp.all_finite((updates, state.inner_state)))
    updates, state = update(GRADS, state, PARAMS)
    assert bool(jaxmp.all_finite((updates, state.inner_state)))
    assert int(state.skip_streak) == 0
    assert np.any(updates["a"] != 0)


def test_a_number_that_was_infinite_from_the_start_is_no_reason():
    tx = optim.skip_nonfinite(optax.contrib.reduce_on_plateau(patience=1))
    state = tx.init(PARAMS)
    assert not bool(jaxmp.all_finite(state.inner_state))
    _, state = tx.update(GRADS, state, PARAMS, value=jnp.float32(1.0))
    assert int(state.skipped_steps) == 0


def test_wrapped_twice():
    tx = optim.skip_nonfinite(optax.sgd(0.1))
    with pytest.raises(ValueError, match="already, which would scale and skip twice"):
        jaxmp.mixed_precision(optax.chain(tx), "float32").init(PARAMS)
    state = (tx.init(PARAMS), tx.init(PARAMS))
    with pytest.raises(ValueError, match=r"2 states that count skipped steps.*\n  0\n  1"):
        optim.raise_for_skips(state)
    with pytest.raises(ValueError, match="0 states that count"):
        optim.raise_for_skips(())
