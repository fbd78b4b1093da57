"""Training on eight devices: the same numbers as on one, by XLA's partitioner and in shard_map."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import sharding

U = 2.0**-24  # unit roundoff of f32
WIDTH, HIDDEN, LAYERS, VOCABULARY, LENGTH = 16, 64, 2, 32, 8


def make_mesh(*sizes, names=("data", "model")):
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, names[: len(sizes)], axis_types=types)


def init(key):
    keys = iter(jax.random.split(key, 6))

    def normal(*shape):
        return 0.3 * jax.random.normal(next(keys), shape)

    return {
        "embedding": normal(VOCABULARY, WIDTH),
        "blocks": {
            "scale": jnp.ones((LAYERS, WIDTH)),
            "up": normal(LAYERS, WIDTH, HIDDEN),
            "bias": 0.1 * normal(LAYERS, HIDDEN),
            "down": normal(LAYERS, HIDDEN, WIDTH),
        },
        "odd": normal(WIDTH, 3),
        "head": normal(WIDTH, VOCABULARY),
    }


SPECS = {
    "dp": P(),
    "fsdp": {
        "embedding": P("data"),
        "blocks": {
            "scale": P(),
            "up": P(None, None, "data"),
            "bias": P(None, "data"),
            "down": P(None, "data"),
        },
        "odd": P(),
        "head": P(None, "data"),
    },
    "tp": {
        "embedding": P(),
        "blocks": {
            "scale": P(),
            "up": P(None, None, "model"),
            "bias": P(None, "model"),
            "down": P(None, "model"),
        },
        "odd": P(),
        "head": P(None, "model"),
    },
    "fsdp+tp": {
        "embedding": P("data"),
        "blocks": {
            "scale": P(),
            "up": P(None, "data", "model"),
            "bias": P(None, "model"),
            "down": P(None, "model", "data"),
        },
        "odd": P(),
        "head": P("data", "model"),
    },
}
MESHES = {"dp": (8,), "fsdp": (8,), "tp": (2, 4), "fsdp+tp": (4, 2)}


def block(x, layer):
    x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * layer["scale"]
    return x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]


def make_loss(body="scan"):
    step = jax.checkpoint(block) if "remat" in body else block

    def loss_fn(params, tokens):
        x = params["embedding"][tokens[:, :-1]]
        if "scan" in body:
            x, _ = lax.scan(lambda x, layer: (step(x, layer), None), x, params["blocks"])
        else:
            for i in range(LAYERS):
                x = step(x, jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"]))
        extra = jnp.mean((x @ params["odd"]) ** 2)
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], tokens[:, 1:])
        return losses.mean() + extra

    return loss_fn


def batches(steps=10):
    return jax.random.randint(jax.random.key(1), (steps, 32, LENGTH + 1), 0, VOCABULARY)


def transform(policy):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return jaxmp.mixed_precision(tx, policy)


def start(policy, **options):
    return jaxmp.TrainState.create(init(jax.random.key(0)), transform(policy), **options)


def train(step, state, batches):
    losses = []
    for batch in batches:
        state, info = step(state, batch)
        losses.append(float(info.loss))
    return state, losses


@functools.cache
def alone(policy="float32", body="scan", microbatches=1):
    step = jaxmp.make_train_step(
        make_loss(body), transform(policy), policy, microbatches=microbatches
    )
    return train(step, start(policy), batches())


def assert_same_training(found, expected, tolerance):
    (state, losses), (want, want_losses) = found, expected
    np.testing.assert_allclose(losses, want_losses, rtol=tolerance)
    for name, leaf, other in zip(
        jaxmp._tree.leaf_names(want.params),
        jax.tree.leaves(state.params),
        jax.tree.leaves(want.params),
        strict=True,
    ):
        assert leaf.dtype == jnp.float32
        scale = np.abs(other).max()
        np.testing.assert_allclose(leaf, other, atol=tolerance * scale, rtol=0, err_msg=name)


# Ten steps of AdamW: an update is at most the learning rate whatever the gradient, so rounding of
# a small gradient can move a parameter by its share of 1e-2; measured 2e-6 of the largest.
F32 = 2**10 * U


@pytest.mark.parametrize("body", ["scan", "loop", "remat scan", "remat loop"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("kind", SPECS)
def test_ten_steps_on_a_mesh_are_those_of_one_device(kind, microbatches, body):
    layout = sharding.Layout(make_mesh(*MESHES[kind]), SPECS[kind], batch_axes="data")
    step = jaxmp.make_train_step(
        make_loss(body),
        transform("float32"),
        "float32",
        microbatches=microbatches,
        layout=layout,
    )
    state = layout.place(start("float32"))
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    found = train(step, state, map(layout.place_batch, batches()))
    assert_same_training(found, alone("float32", body, microbatches), F32)
    assert jax.tree.map(lambda leaf: leaf.sharding, found[0]) == places
    assert step._cache_size() == 1


def sharded_loss(specs, policy, body="scan"):
    """The loss as a person writes it in a shard_map: every layer gathers what it multiplies."""

    def gathered(tree, specs):
        def leaf_fn(leaf, spec):
            axis = [i for i, name in enumerate(spec) if name == "data"]
            if not axis:
                return leaf
            return sharding.gather(leaf, "data", axis=axis[0], policy=policy)

        return jax.tree.map(leaf_fn, tree, specs)

    def own(x, layer):
        specs_of_layer = jax.tree.map(lambda s: P(*tuple(s)[1:]), specs["blocks"])
        return block(x, gathered(layer, specs_of_layer))

    step = jax.checkpoint(own) if "remat" in body else own

    def loss_fn(params, tokens):
        rest = {k: v for k, v in params.items() if k != "blocks"}
        rest = gathered(rest, {k: v for k, v in specs.items() if k != "blocks"})
        x = rest["embedding"][tokens[:, :-1]]
        if "scan" in body:
            x, _ = lax.scan(lambda x, layer: (step(x, layer), None), x, params["blocks"])
        else:
            for i in range(LAYERS):
                x = step(x, jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"]))
        extra = jnp.mean((x @ rest["odd"]) ** 2)
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ rest["head"], tokens[:, 1:])
        return losses.mean() + extra

    return loss_fn


def adam(policy):
    """Without a norm over all parameters, of which a device in a shard_map has parts."""
    return jaxmp.mixed_precision(optax.adamw(1e-2), policy)


def mapped(step, layout, state, **options):
    specs = jax.tree.map(lambda s: s.spec, layout.shardings(state))
    fun = jax.shard_map(
        step,
        mesh=layout.mesh,
        in_specs=(specs, P("data")),
        out_specs=(specs, P()),
        **options,
    )
    return jax.jit(fun)


@pytest.mark.parametrize("body", ["scan", "loop", "remat scan"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("kind", ["dp", "fsdp"])
def test_ten_steps_in_a_shard_map_are_those_of_one_device(kind, microbatches, body):
    layout = sharding.Layout(make_mesh(8), SPECS[kind])
    tx = adam("float32")
    loss = make_loss(body) if kind == "dp" else sharded_loss(SPECS[kind], "float32", body)
    options = {"microbatches": microbatches, "donate": False}
    step = jaxmp.make_train_step(loss, tx, "float32", axis_name="data", **options)
    first = jaxmp.TrainState.create(init(jax.random.key(0)), tx)
    plain = jaxmp.make_train_step(make_loss(body), tx, "float32", **options)
    expected = train(plain, first, batches())
    state = layout.place(first)
    found = train(mapped(step, layout, state), state, map(layout.place_batch, batches()))
    assert_same_training(found, expected, F32)
