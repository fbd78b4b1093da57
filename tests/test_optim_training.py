"""A small GPT with parameters stored in bf16: 300 steps."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp import optim
from tests import reference_gpt

BF16, F32 = jnp.bfloat16, jnp.float32
SHAPE = reference_gpt.Shape(width=64, heads=2, layers=1, length=32, vocabulary=256, batch=8)
STEPS, SEEN = 300, 20


def adam():
    return optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 30, STEPS, 1e-4))


WAYS = {
    "float32": (F32, adam),
    "eight bits": (
        F32, lambda: optim.state_dtype(adam(), {"mu": "block8", "nu": "block8_square"})
    ),
    "kahan": (BF16, lambda: optim.kahan(adam())),
    "stochastic_rounding": (BF16, lambda: optim.stochastic_rounding(adam(), key=0)),
    "plain": (BF16, adam),
}  # fmt: skip


def batches():
    """Windows of a text that does not change."""
    data = np.frombuffer((Path(__file__).parents[1] / "LICENSE").read_bytes(), np.uint8)
    starts = np.random.default_rng(0).integers(
        0, len(data) - SHAPE.length - 1, (STEPS, SHAPE.batch)
    )
    return jnp.asarray(data[starts[..., None] + np.arange(SHAPE.length + 1)].astype(np.int32))


def loss_fn(params, tokens):
    logits = reference_gpt.model(params, tokens[:, :-1], SHAPE, "float32")
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def initial(dtype):
    params = reference_gpt.init(jax.random.key(0), SHAPE)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def last_loss(way):
    """Returns the mean of the last losses of a training."""
    dtype, make = WAYS[way]
    tx, params = make(), initial(dtype)
    grad_fn = jaxmp.value_and_grad(loss_fn, "mixed_bfloat16")

    @jax.jit
    def step(params, state, tokens):
        loss, grads = grad_fn(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    with jax.numpy_dtype_promotion("standard"):
        for tokens in batches():
            params, state, loss = step(params, state, tokens)
            losses.append(loss)
    return float(np.mean(losses[-SEEN:]))


@pytest.mark.slow
def test_narrow_parameters_and_state_end_where_float32_does():
    # With other batches the ratios are within 1.3% of 1 for each way, and 5% to 8% above for plain.
    right = last_loss("float32")
    for way in ("eight bits", "kahan", "stochastic_rounding"):
        assert abs(last_loss(way) / right - 1) < 0.02, way
    assert last_loss("plain") / right - 1 > 0.03


@pytest.mark.slow
def test_masters_are_those_of_float32_adam_on_the_same_gradients():
    tx, plain = jaxmp.mixed_precision(adam(), "mixed_bfloat16"), adam()
    params, plain_params = initial(BF16), initial(BF16)
    plain_params = jax.tree.map(lambda leaf: leaf.astype(F32), plain_params)
    grad_fn = jaxmp.value_and_grad(loss_fn, "mixed_bfloat16")

    @jax.jit
    def step(params, state, plain_params, plain_state, tokens):
        _, grads = grad_fn(params, tokens)
        updates, state = tx.update(grads, state, params)
        plain_updates, plain_state = plain.update(grads, plain_state, plain_params)
        plain_params = optim.apply_updates(plain_params, plain_updates)
        return optim.apply_updates(params, updates), state, plain_params, plain_state

    carry = (params, tx.init(params), plain_params, plain.init(plain_params))
    with jax.numpy_dtype_promotion("standard"):
        for tokens in batches():
            carry = step(*carry, tokens)
    params, state, plain_params, _ = carry
    masters = optim.full_weights(state, params)
    for master, right, live in zip(
        *map(jax.tree.leaves, (masters, plain_params, params)), strict=True
    ):
        # Each of 300 updates of at most 1e-3 is rounded in f32, and so is the sum.
        bound = STEPS * 2.0**-24 * (float(jnp.max(jnp.abs(right))) + 1e-2)
        np.testing.assert_allclose(master, right, atol=bound)
        np.testing.assert_array_equal(live, master.astype(BF16))
