"""Models as people write them, in Flax, wrapped: against float64."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxmp
import jaxmp.linen
import jaxmp.nnx

pytestmark = pytest.mark.slow

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
both = pytest.mark.parametrize("dtype", UNIT)


def rotary(x):
    """Rotates pairs of features by angles that grow with the position: [B, T, H, D]."""
    length, width = x.shape[1], x.shape[-1]
    frequencies = 1e4 ** (-jnp.arange(0, width, 2, dtype=x.dtype) / width)
    angles = jnp.arange(length, dtype=x.dtype)[:, None] * frequencies
    sin, cos = jnp.sin(angles)[:, None, :], jnp.cos(angles)[:, None, :]
    even, odd = x[..., ::2], x[..., 1::2]
    return jnp.concatenate([even * cos - odd * sin, even * sin + odd * cos], axis=-1)


class Transformer(nn.Module):
    """A block with rotary embedding, grouped-query attention, RMSNorm and a gated MLP."""

    heads: int = 4
    groups: int = 2
    width: int = 32

    @nn.compact
    def __call__(self, x):
        size = self.width // self.heads
        y = nn.RMSNorm(name="norm_1")(x)
        query = nn.DenseGeneral((self.heads, size), use_bias=False, name="query")(y)
        key = nn.DenseGeneral((self.groups, size), use_bias=False, name="key")(y)
        value = nn.DenseGeneral((self.groups, size), use_bias=False, name="value")(y)
        query, key = rotary(query), rotary(key)
        repeats = self.heads // self.groups
        key, value = (jnp.repeat(each, repeats, axis=2) for each in (key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / size**0.5
        length = x.shape[1]
        mask = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        x = x + nn.DenseGeneral(self.width, axis=(-2, -1), use_bias=False, name="out")(y)
        y = nn.RMSNorm(name="norm_2")(x)
        gate = nn.silu(nn.Dense(64, use_bias=False, name="gate")(y))
        return x + nn.Dense(self.width, use_bias=False, name="down")(
            gate * nn.Dense(64, use_bias=False, name="up")(y)
        )


class UNet(nn.Module):
    """Two levels with GroupNorm, a strided convolution down and a transposed one up."""

    @nn.compact
    def __call__(self, x):
        def block(x, width, name):
            y = nn.silu(nn.GroupNorm(4, name=f"{name}_norm")(x))
            return nn.Conv(width, (3, 3), name=f"{name}_conv")(y)

        x = nn.Conv(8, (3, 3), name="stem")(x)
        skip = block(x, 8, "down")
        y = block(nn.Conv(16, (3, 3), (2, 2), name="pool")(skip), 16, "middle")
        y = nn.ConvTranspose(8, (2, 2), (2, 2), name="up")(y)
        y = block(jnp.concatenate([y, skip], axis=-1), 8, "last")
        return nn.Conv(1, (1, 1), name="head")(y)


class Experts(nnx.Module):
    """A mixture of experts: a router in f32, each token in its best expert, by `ragged_dot`."""

    def __init__(self, width, experts, *, rngs):
        self.router = nnx.Linear(width, experts, rngs=rngs)
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.up = nnx.Param(init(rngs.params(), (experts, width, 2 * width)))
        self.down = nnx.Param(init(rngs.params(), (experts, 2 * width, width)))

    def __call__(self, x):
        gates = jax.nn.softmax(self.router(x))
        chosen = jnp.argmax(gates, axis=-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=gates.shape[-1]).astype(jnp.int32)
        y = nnx.gelu(lax.ragged_dot(x[order], self.up[...], sizes))
        y = lax.ragged_dot(y, self.down[...], sizes)
        back = jnp.zeros_like(y).at[order].set(y)
        return x + back * jnp.take_along_axis(gates, chosen[:, None], axis=-1)


class Recurrent(nn.Module):
    """An LSTM over a sequence, and a head on its last state."""

    param_dtype: Any = jnp.float32  # of the state that the LSTM begins with too

    @nn.compact
    def __call__(self, x):
        cell = nn.OptimizedLSTMCell(16, param_dtype=self.param_dtype)
        return nn.Dense(3, name="head")(nn.RNN(cell, name="lstm")(x)[:, -1])


def double(tree):
    return jax.tree.map(lambda x: x.astype(np.float64), jax.tree.map(np.asarray, tree))


def assert_near(got, want, dtype, roundings):
    """The error of the whole array against its norm: each rounding adds at most a unit."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-6)
    assert error <= roundings * UNIT[dtype], error / UNIT[dtype]


LINEN = {
    "transformer": (Transformer(), (2, 6, 32)),
    "unet": (UNet(), (2, 8, 8, 1)),
    "lstm": (Recurrent(), (2, 7, 5)),
}
WIDE = {name: module for name, (module, _) in LINEN.items()} | {"lstm": Recurrent(jnp.float64)}


@both
@pytest.mark.parametrize("name", LINEN)
def test_linen(name, dtype):
    module, shape = LINEN[name]
    x = np.asarray(jax.random.normal(jax.random.key(1), shape))
    variables = jax.jit(module.init)(jax.random.key(0), x)
    model = jaxmp.linen.wrap(module, f"mixed_{dtype}")

    def results(model, variables, x):
        def loss(variables, x):
            y = model.apply(variables, x)
            return jnp.mean(jnp.square(y)), y

        return jax.jit(jax.grad(loss, has_aux=True, argnums=(0, 1)))(variables, x)

    grads, got = results(model, variables, x)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        want_grads, want = jax.tree.map(
            np.asarray, results(WIDE[name], double(variables), double(x))
        )
    assert_near(got, want, dtype, 4)
    jax.tree.map(lambda a, b: assert_near(a, b, dtype, 16), grads, want_grads)
    report = jaxmp.audit(model.apply, variables, x, target=None)
    assert {d for row in report.products for d in row.operand_dtypes} == {dtype}


@both
def test_mixture_of_experts(dtype):
    x = np.asarray(jax.random.normal(jax.random.key(1), (24, 8)))
    plain = Experts(8, 4, rngs=nnx.Rngs(0))
    model = jaxmp.nnx.wrap(plain, f"mixed_{dtype}", rules={"router": "float32"})

    def loss_fn(model, x):
        y = model(x)
        return jnp.mean(jnp.square(y)), y

    grad_fn = jaxmp.nnx.value_and_grad(
        loss_fn, f"mixed_{dtype}", has_aux=True, loss_scale=jaxmp.NoOpLossScale()
    )
    (_, got), grads = grad_fn(model, x)
    graphdef, state = nnx.split(plain)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = nnx.merge(graphdef, double(state))
        (_, want), want_grads = nnx.value_and_grad(loss_fn, has_aux=True)(wide, double(x))
        want, want_grads = jax.tree.map(np.asarray, (want, want_grads))
    assert_near(got, want, dtype, 4)
    jax.tree.map(lambda a, b: assert_near(a, b, dtype, 16), grads, want_grads)
    found = {row.path: row.products for row in model.policy_table(x).rows}
    assert found == {"": (f"2 {dtype}",), "router": ("1 float32",)}
