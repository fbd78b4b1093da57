"""What fp8 does to results, gradients and training, against the answers that are known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp import fp8
from tests import reference_gpt
from tests.autocast_tools import normal
from tests.test_fp8_formats import signal_to_noise
from tests.test_fp8_products import SHAPE, cosine, gpt_arguments, gpt_loss

RECIPES = {
    "current": fp8.CurrentScaling(),
    "rows": fp8.CurrentScaling(scaling="row"),
    "delayed": fp8.DelayedScaling(history=16),
    "mxfp8": fp8.BlockScaling("mxfp8"),
}


def gradients(fun, recipe, *args):
    """Loss and gradients under a recipe, with the state that it needs."""
    policy = jaxmp.Policy(recipe=recipe)
    state = jaxmp.init_fp8_state(fun, policy, *args)
    return jax.jit(jaxmp.value_and_grad(fun, policy, fp8_state=state))(*args)[:2]


@pytest.mark.parametrize("name", RECIPES)
def test_a_linear_layer(name):
    x, w, g = normal(0, 128, 256), normal(1, 256, 128), normal(2, 128, 128)

    def loss(args):
        return jnp.sum((args[0] @ args[1]) * g)

    y = jaxmp.matmul(x, w, policy=jaxmp.Policy(recipe=RECIPES[name]), output_dtype="float32")
    assert signal_to_noise(y, x @ w) >= 18
    _, (dx, dw) = gradients(loss, RECIPES[name], (x, w))
    assert signal_to_noise(dx, g @ w.T) >= 17
    assert signal_to_noise(dw, x.T @ g) >= 17


def encoder(params, tokens):
    return reference_gpt.model(params, tokens[:, :-1], SHAPE, "float32")


@pytest.mark.parametrize("name", RECIPES)
def test_a_transformer(name):
    params, tokens = gpt_arguments()
    policy = jaxmp.Policy(recipe=RECIPES[name])
    with jax.numpy_dtype_promotion("standard"):
        exact = encoder(params, tokens)
        found = jax.jit(jaxmp.autocast(encoder, policy))(params, tokens)
    assert signal_to_noise(found, exact) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows", "delayed", "mxfp8"])
def test_gradients_of_a_gpt(name):
    params, tokens = gpt_arguments()
    loss, grads = gradients(gpt_loss, RECIPES[name], params, tokens)
    plain_loss, plain = jax.jit(jax.value_and_grad(gpt_loss))(params, tokens)
    assert abs(loss / plain_loss - 1) < 2.0**-7
    for grad, right in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
        assert cosine(grad, right) > 0.99


def text(steps):
    """Batches of bytes that repeat with errors, so that there is something to learn."""
    source = np.random.default_rng(0)
    period = source.integers(0, 256, 17)
    for _ in range(steps):
        starts = source.integers(0, 17, (SHAPE.batch, 1))
        tokens = period[(starts + np.arange(SHAPE.length + 1)) % 17]
        noise = source.integers(0, 256, tokens.shape)
        yield jnp.asarray(np.where(source.random(tokens.shape) < 0.1, noise, tokens), jnp.int32)


def losses(policy, steps=60):
    params = reference_gpt.init(jax.random.key(0), SHAPE)
    tx = jaxmp.mixed_precision(optax.adamw(3e-3), policy)
    first = next(text(1))
    state = jaxmp.TrainState.create(
        params, tx, fp8_state=jaxmp.init_fp8_state(gpt_loss, policy, params, first)
    )
    step = jaxmp.make_train_step(gpt_loss, tx, policy)
    found = []
    for batch in text(steps):
        state, info = step(state, batch)
        found.append(info.loss)
    return np.asarray(found, np.float64)


@functools.cache
def half_losses():
    return losses("mixed_bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("current", 0.02), ("delayed", 0.02), ("mxfp8", 0.03)])
def test_a_gpt_learns_as_in_bfloat16(name, most):
    found, half = losses(jaxmp.Policy(recipe=RECIPES[name])), half_losses()
    assert half[-10:].mean() < half[0] / 3
    assert abs(found[-10:].mean() / half[-10:].mean() - 1) < most
