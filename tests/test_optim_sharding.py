"""What the optimizer side keeps lies where the parameters lie, and is the same on many devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import optim

BF16, F32 = jnp.bfloat16, jnp.float32
EIGHT_BITS = {"mu": "block8", "nu": "block8_square"}
SHAPES = {"a": (64, 512), "b": (8,), "c": (4, 3, 16)}
SPECS = {"a": P("x", None), "b": P(), "c": P("x")}
TRANSFORMS = {
    "masters": (optim.master_weights(optax.adam(1e-2)), BF16),
    "stochastic rounding": (optim.stochastic_rounding(optax.adam(1e-2), key=0), BF16),
    "all of it": (
        optim.accumulate(
            jaxmp.mixed_precision(
                optim.state_dtype(optax.chain(optax.clip(1.0), optax.adam(1e-2)), EIGHT_BITS),
                "mixed_float16",
            ),
            2,
        ),
        BF16,
    ),
    "average": (optax.chain(optax.adam(1e-2), optim.ema(0.9)), F32),
}


def drawn(seed, dtype):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(s), dtype) for name, s in SHAPES.items()}


def trained(tx, params, grads, steps=4):
    @jax.jit
    def step(params, state):
        with jax.numpy_dtype_promotion("standard"):  # optax, where nothing of ours is around it
            updates, state = tx.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


@pytest.mark.parametrize("name", list(TRANSFORMS))
def test_on_a_mesh(name):
    tx, dtype = TRANSFORMS[name]
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    places = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params, grads = drawn(0, dtype), drawn(1, F32)
    first = jax.tree.leaves(tx.init(jax.device_put(params, places)))
    assert all(len(leaf.devices()) == 4 for leaf in first if leaf.size > 4096)
    alone = trained(tx, params, grads)
    spread = trained(tx, jax.device_put(params, places), jax.device_put(grads, places))
    kept = set()
    for one, many in zip(jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True):
        if jnp.issubdtype(many.dtype, jax.dtypes.prng_key):
            one, many = map(jax.random.key_data, (one, many))  # noqa: PLW2901
        same = np.asarray(one.astype(F32)) == np.asarray(many.astype(F32))
        # The last bit of a scale is the compiler's; the rounding of a number may turn on it.
        if name != "all of it":
            assert same.all()
        elif same.size > 1000:
            assert same.mean() > 0.99
        kept.add((many.shape, getattr(many.sharding, "spec", None)))
    of_size = {(shape, spec) for shape, spec in kept if shape in SHAPES.values()}
    assert of_size == {(SHAPES[name], SPECS[name]) for name in SHAPES}
    assert all(spec == P("x", None) for shape, spec in kept if shape == (64, 2))  # scales of blocks


@pytest.mark.parametrize("precise", [False, True], ids=["alone", "mixed_precision"])
def test_blocks_in_an_nnx_optimizer(precise):
    def trained(transform):
        model = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
        tx = optim.state_dtype(optax.adam(1e-2), EIGHT_BITS)
        tx = jaxmp.mixed_precision(tx, "mixed_bfloat16") if precise else tx
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @transform
        def step(model, optimizer):
            def loss(model):
                return ((model(jnp.ones((2, 32))) - 3.0) ** 2).sum()

            optimizer.update(model, nnx.grad(loss)(model))

        for _ in range(4):
            step(model, optimizer)
        return model.kernel[...]

    np.testing.assert_allclose(trained(lambda f: f), trained(nnx.jit), rtol=0, atol=2.0**-22)
