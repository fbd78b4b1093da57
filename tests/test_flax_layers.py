"""Every layer of Flax, Linen and NNX, under the nine combinations of dtypes."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
import jaxmp.linen
import jaxmp.nnx
from tests.autocast_tools import computed_in, eqns_in

DTYPES = ("float32", "bfloat16", "float16")
# Every pair of parameters and computation, of those and the output, and of the other two.
TRIPLES = [
    (DTYPES[i], DTYPES[j], DTYPES[(i + j) % 3]) for i, j in itertools.product(range(3), repeat=2)
]
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}

IMAGE, SEQUENCE, VECTOR = (2, 6, 6, 4), (2, 5, 8), (3, 8)


class SelfAttention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(num_heads=2)(x, x)


class Spectral(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.SpectralNorm(nn.Dense(4))(x, update_stats=False)


class Weight(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.WeightNorm(nn.Dense(4))(x)


LINEN = {
    "Dense": (lambda: nn.Dense(4), VECTOR),
    "DenseGeneral": (lambda: nn.DenseGeneral((2, 3)), VECTOR),
    "Einsum": (lambda: nn.Einsum((8, 4), "bi,io->bo"), VECTOR),
    "Conv": (lambda: nn.Conv(4, (3, 3)), IMAGE),
    "ConvTranspose": (lambda: nn.ConvTranspose(4, (3, 3), strides=(2, 2)), IMAGE),
    "ConvLocal": (lambda: nn.ConvLocal(4, (3, 3)), IMAGE),
    "Embed": (lambda: nn.Embed(7, 4), None),
    "MultiHeadDotProductAttention": (SelfAttention, SEQUENCE),
    "LSTM": (lambda: nn.RNN(nn.LSTMCell(4)), SEQUENCE),
    "OptimizedLSTM": (lambda: nn.RNN(nn.OptimizedLSTMCell(4)), SEQUENCE),
    "GRU": (lambda: nn.RNN(nn.GRUCell(4)), SEQUENCE),
    "BatchNorm": (lambda: nn.BatchNorm(use_running_average=True), IMAGE),
    "LayerNorm": (nn.LayerNorm, VECTOR),
    "RMSNorm": (nn.RMSNorm, VECTOR),
    "GroupNorm": (lambda: nn.GroupNorm(num_groups=2), IMAGE),
    "InstanceNorm": (nn.InstanceNorm, IMAGE),
    "SpectralNorm": (Spectral, VECTOR),
    "WeightNorm": (Weight, VECTOR),
    "Dropout": (lambda: nn.Dropout(0.5, deterministic=True), VECTOR),
    "PReLU": (nn.PReLU, VECTOR),
}

NNX = {
    "Linear": (lambda r: nnx.Linear(8, 4, rngs=r), VECTOR),
    "LinearGeneral": (lambda r: nnx.LinearGeneral(8, (2, 3), rngs=r), VECTOR),
    "Einsum": (lambda r: nnx.Einsum("bi,io->bo", (8, 4), (4,), rngs=r), VECTOR),
    "Conv": (lambda r: nnx.Conv(4, 4, (3, 3), rngs=r), IMAGE),
    "ConvTranspose": (lambda r: nnx.ConvTranspose(4, 4, (3, 3), strides=(2, 2), rngs=r), IMAGE),
    "Embed": (lambda r: nnx.Embed(7, 4, rngs=r), None),
    "MultiHeadAttention": (
        lambda r: nnx.MultiHeadAttention(2, 8, decode=False, rngs=r),
        SEQUENCE,
    ),
    "LSTM": (lambda r: nnx.RNN(nnx.LSTMCell(8, 4, rngs=r), rngs=r), SEQUENCE),
    "OptimizedLSTM": (lambda r: nnx.RNN(nnx.OptimizedLSTMCell(8, 4, rngs=r), rngs=r), SEQUENCE),
    "GRU": (lambda r: nnx.RNN(nnx.GRUCell(8, 4, rngs=r), rngs=r), SEQUENCE),
    "BatchNorm": (lambda r: nnx.BatchNorm(4, use_running_average=True, rngs=r), IMAGE),
    "LayerNorm": (lambda r: nnx.LayerNorm(8, rngs=r), VECTOR),
    "RMSNorm": (lambda r: nnx.RMSNorm(8, rngs=r), VECTOR),
    "GroupNorm": (lambda r: nnx.GroupNorm(4, num_groups=2, rngs=r), IMAGE),
    "InstanceNorm": (lambda r: nnx.InstanceNorm(4, rngs=r), IMAGE),
    "SpectralNorm": (lambda r: nnx.SpectralNorm(nnx.Linear(8, 4, rngs=r), rngs=r), VECTOR),
    "WeightNorm": (lambda r: nnx.WeightNorm(nnx.Linear(8, 4, rngs=r), rngs=r), VECTOR),
    "Dropout": (lambda r: nnx.Dropout(0.5, deterministic=True, rngs=r), VECTOR),
    "LoRA": (lambda r: nnx.LoRA(8, 2, 4, rngs=r), VECTOR),
    "LoRALinear": (lambda r: nnx.LoRALinear(8, 4, lora_rank=2, rngs=r), VECTOR),
    "PReLU": (lambda r: nnx.PReLU(), VECTOR),
}


def data(shape):
    if shape is None:
        return jnp.array([[1, 2, 6], [0, 3, 3]])
    return jax.random.normal(jax.random.key(1), shape)


def half_of(name):
    """One of the two in turn, so that both are for half of the layers."""
    return DTYPES[1 + len(name) % 2]


def half(dtype):
    return f"params=float32,compute={dtype},output=float32"


def policy_of(params, compute, output):
    return f"params={params},compute={compute},output={output}"


def result_and_products(fun, *args):
    """The dtype of what a function returns, and those of its products."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    (result,) = jaxpr.out_avals
    return result.dtype, {np.dtype(dtype).name for dtype in computed_in(eqns_in(jaxpr))}


def assert_close(got, want, dtype):
    """Within the rounding of operands and of a stored result, of sums of at most 64 terms."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    scale = np.max(np.abs(want), initial=2.0**-6)
    np.testing.assert_allclose(got, want, rtol=0, atol=16 * ROUNDOFF[dtype] * scale)


def dtypes_in(tree):
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize("name", LINEN)
def test_linen_layer_has_the_dtypes_of_the_policy(name):
    make, shape = LINEN[name]
    x = data(shape)
    for params in DTYPES:
        init = jaxmp.linen.wrap(make(), policy_of(params, "bfloat16", "float32")).init
        variables = jax.eval_shape(init, jax.random.key(0), x)
        assert dtypes_in(variables.get("params", {})) <= {params}
        assert dtypes_in({**variables, "params": {}}) <= {"float32"}
        for _, compute, output in [triple for triple in TRIPLES if triple[0] == params]:
            model = jaxmp.linen.wrap(make(), policy_of(params, compute, output))
            result, products = result_and_products(model.apply, variables, x)
            assert result == output
            assert products <= {compute}


@pytest.mark.parametrize("name", NNX)
def test_nnx_layer_has_the_dtypes_of_the_policy(name):
    make, shape = NNX[name]
    x, plain = data(shape), make(nnx.Rngs(0))
    for params, compute, output in TRIPLES:
        model = jaxmp.nnx.wrap(plain, policy_of(params, compute, output))
        graphdef, state = nnx.split(model)

        def apply(state, x, graphdef=graphdef):
            return nnx.merge(graphdef, state)(x)

        assert dtypes_in(nnx.state(model, nnx.Param)) <= {params}
        result, products = result_and_products(apply, state, x)
        assert result == output
        assert products <= {compute}


@pytest.mark.slow
@pytest.mark.parametrize("name", LINEN)
def test_linen_layer_has_the_values_and_gradients_of_float32(name):
    make, shape = LINEN[name]
    x, plain = data(shape), make()
    variables = plain.init(jax.random.key(0), x)
    params = variables.pop("params", {"none": jnp.ones(())})

    def results(model):
        def loss(params):
            y = model.apply({**variables, "params": params}, x)
            return jnp.mean(jnp.sin(y.astype(jnp.float32))), y

        (_, y), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        return y, grads

    want, want_grads = results(plain)
    dtype = half_of(name)
    got, grads = results(jaxmp.linen.wrap(make(), half(dtype)))
    assert got.dtype == jnp.float32
    assert_close(got, want, dtype)
    jax.tree.map(lambda a, b: assert_close(a, b, dtype), grads, want_grads)


@pytest.mark.slow
@pytest.mark.parametrize("name", NNX)
def test_nnx_layer_has_the_values_and_gradients_of_float32(name):
    make, shape = NNX[name]
    x, plain = data(shape), make(nnx.Rngs(0))
    has_params = bool(jax.tree.leaves(nnx.state(plain, nnx.Param)))

    def loss_fn(model):
        y = model(x)
        return jnp.mean(jnp.sin(y.astype(jnp.float32))), y

    def results(model, grad_fn):
        if not has_params:
            return loss_fn(model)[1], {}
        (_, y), grads = grad_fn(model)
        return y, grads

    grad_fn = nnx.jit(nnx.value_and_grad(loss_fn, has_aux=True))
    want, want_grads = results(nnx.clone(plain), grad_fn)
    dtype = half_of(name)
    model = jaxmp.nnx.wrap(plain, half(dtype))
    grad_fn = jaxmp.nnx.value_and_grad(
        loss_fn, half(dtype), has_aux=True, loss_scale=jaxmp.NoOpLossScale()
    )
    got, grads = results(model, nnx.jit(grad_fn))
    assert got.dtype == jnp.float32
    assert_close(got, want, dtype)
    jax.tree.map(lambda a, b: assert_close(a, b, dtype), grads, want_grads)
