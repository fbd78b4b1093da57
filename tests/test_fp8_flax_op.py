"""Flax's own fp8 layers, whose statistics stand among the parameters, in a train step."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from tests.autocast_tools import normal

X = normal(0, 32, 64)
OVERWRITTEN = "_overwrite_with_gradient"


def loss_of(model):
    return lambda params, x: jnp.mean(model.apply(params, x) ** 2)


def optimizer(policy):
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1))
    return jaxmp.mixed_precision(chain, policy)


def train(model, policy, batch, **options):
    params = model.init(jax.random.key(1), X)
    tx, loss_fn = optimizer(policy), loss_of(model)
    state = jaxmp.TrainState.create(params, tx, ema=True)
    step = jaxmp.make_train_step(loss_fn, tx, policy, ema_decay=0.9, donate=False, **options)
    return params, *step(state, batch)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_statistics_are_overwritten(policy, microbatches):
    model = nn.Dense(32, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    batch = X.at[0].multiply(8)
    with jax.numpy_dtype_promotion("standard"):
        before, state, info = train(model, policy, batch, microbatches=microbatches)
        right = jax.grad(loss_of(model))(before, batch)
    assert not bool(info.skipped)
    found, wanted = (tree[OVERWRITTEN]["Fp8DirectDotGeneralOp_0"] for tree in (state.params, right))
    for name in ("input_amax_history", "kernel_amax_history"):
        assert float(wanted[name].max()) > 0
        np.testing.assert_array_equal(found[name], wanted[name])
    for name in ("input_scale", "kernel_scale", "output_grad_scale"):
        np.testing.assert_array_equal(found[name], 1)
    assert float(found["output_grad_amax_history"].max()) > 0
    averaged = state.ema_params[OVERWRITTEN]
    jax.tree.map(np.testing.assert_array_equal, averaged, state.params[OVERWRITTEN])
    norm = optax.tree.norm(right["params"])
    np.testing.assert_allclose(info.grad_norm, norm, rtol=0.1)
    assert not np.array_equal(state.params["params"]["kernel"], before["params"]["kernel"])


def test_a_skipped_step_keeps_them_and_the_loop_is_the_same_without():
    batch = X.at[0, 0].set(jnp.nan)
    for options in ({"dot_general_cls": nn.Fp8DirectDotGeneralOp}, {}):
        with jax.numpy_dtype_promotion("standard"):
            before, state, info = train(nn.Dense(32, **options), "mixed_bfloat16", batch)
        assert bool(info.skipped)
        jax.tree.map(np.testing.assert_array_equal, state.params, before)
