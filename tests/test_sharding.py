"""Training on eight devices: the same numbers as on one, by XLA's partitioner and in shard_map."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import sharding
from jaxmp._jaxpr import inner_jaxprs

U = 2.0**-24  # unit roundoff of f32
WIDTH, HIDDEN, LAYERS, VOCABULARY, LENGTH = 16, 64, 2, 32, 8


# With this epsilon an update is smooth in the gradient, and a rounding of it stays one.
ADAM = optax.adamw(1e-2, eps=1e-3)


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


def make_loss(body="scan", block=block, gathered=lambda rest: rest):
    """The loss, with how a layer is computed and how the other parameters come to be whole."""
    step = jax.checkpoint(block) if "remat" in body else block

    def loss_fn(params, tokens):
        rest = gathered({name: leaf for name, leaf in params.items() if name != "blocks"})
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


def batches(steps=10):
    return jax.random.randint(jax.random.key(1), (steps, 32, LENGTH + 1), 0, VOCABULARY)


def transform(policy):
    tx = optax.chain(optax.clip_by_global_norm(1.0), ADAM)
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


# Each step rounds sums over devices in another order, and what differs is carried on.
F32 = 2**8 * U


PROGRAMS = [
    *(
        ("fsdp", "scan", 1),
        ("fsdp", "remat scan", 2),
        ("fsdp", "loop", 2),
        ("fsdp", "remat loop", 1),
    ),
    *(("dp", "scan", 1), ("dp", "loop", 2), ("tp", "remat scan", 2), ("tp", "loop", 1)),
    *(("fsdp+tp", "scan", 2), ("fsdp+tp", "remat loop", 1)),
]


@pytest.mark.parametrize(("kind", "body", "microbatches"), PROGRAMS)
def test_ten_steps_on_a_mesh_are_those_of_one_device(kind, body, microbatches):
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

    rest = {name: spec for name, spec in specs.items() if name != "blocks"}
    return make_loss(body, own, lambda params: gathered(params, rest))


def adam(policy):
    """Without a norm over all parameters, of which a device in a shard_map has parts."""
    return jaxmp.mixed_precision(ADAM, policy)


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


@pytest.mark.parametrize(("kind", "body", "microbatches"), PROGRAMS[:3] + PROGRAMS[4:6])
def test_ten_steps_in_a_shard_map_are_those_of_one_device(kind, body, microbatches):
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


SPLIT = {
    "tp": {"up": P(None, None, "model"), "bias": P(None, "model"), "down": P(None, "model")},
    "fsdp+tp": {
        "up": P(None, "data", "model"),
        "bias": P(None, "model"),
        "down": P(None, "model", "data"),
    },
}


def split_loss(kind):
    """The loss as a person writes it for two axes: layers are cut over the second."""

    def own(x, layer):
        up, down = layer["up"], layer["down"]
        if kind == "fsdp+tp":
            up = sharding.gather(up, "data", policy="float32")
            down = sharding.gather(down, "data", axis=1, policy="float32")
        y = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * layer["scale"]
        return y + lax.psum(jnp.tanh(y @ up + layer["bias"]) @ down, "model")

    return make_loss("scan", own)


@pytest.mark.parametrize(("kind", "microbatches"), [("tp", 2), ("fsdp+tp", 1)])
def test_ten_steps_of_layers_that_are_cut_in_a_shard_map(kind, microbatches):
    """The step averages over the axis of the batch; over the other one devices agree only."""
    specs = jax.tree.map(lambda _: P(), init(jax.random.key(0)))
    specs["blocks"] |= SPLIT[kind]
    layout = sharding.Layout(make_mesh(4, 2), specs, batch_axes="data")
    tx, options = adam("float32"), {"microbatches": microbatches, "donate": False}
    first = jaxmp.TrainState.create(init(jax.random.key(0)), tx)
    expected = train(jaxmp.make_train_step(make_loss(), tx, "float32", **options), first, batches())
    step = jaxmp.make_train_step(split_loss(kind), tx, "float32", axis_name="data", **options)
    state = layout.place(first)
    step = mapped(step, layout, state)
    found = train(step, state, map(layout.place_batch, batches()))
    assert_same_training(found, expected, F32)
    _, info = step(state, layout.place_batch(batches(1)[0]))
    plain = jaxmp.make_train_step(make_loss(), tx, "float32", **options)
    np.testing.assert_allclose(info.grad_norm, plain(first, batches(1)[0])[1].grad_norm, rtol=F32)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": make_mesh(8), "regather": False},
        {"mesh": make_mesh(4, 2), "batch_axes": ("data", "model"), "by_axis": True},
        {"mesh": make_mesh(4, 2), "batch_axes": ("model", "data"), "by_axis": True},
        {"mesh": make_mesh(4, 2), "batch_axes": "model", "by_axis": True},
    ],
)
def test_how_weights_are_gathered_changes_no_number(options):
    axes = ("data", "model") if options.get("by_axis") else "data"
    specs = jax.tree.map(lambda spec: P(*(part and axes for part in spec)), SPECS["fsdp"])
    layout = sharding.Layout(specs=specs, **options)
    step = jaxmp.make_train_step(make_loss(), transform("float32"), "float32", layout=layout)
    found = train(step, layout.place(start("float32")), map(layout.place_batch, batches()))
    assert_same_training(found, alone(), F32)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("kind", ["dp", "fsdp+tp"])
def test_half_steps_on_a_mesh_are_those_of_one_device(kind, policy):
    """What is rounded to half is the same but where sums in another order round another way."""
    layout = sharding.Layout(make_mesh(*MESHES[kind]), SPECS[kind], batch_axes="data")
    step = jaxmp.make_train_step(make_loss(), transform(policy), policy, layout=layout)
    found = train(step, layout.place(start(policy)), map(layout.place_batch, batches()))
    unit = 2.0**-8 if policy == "mixed_bfloat16" else 2.0**-11
    assert_same_training(found, alone(policy), 8 * unit)


@pytest.mark.parametrize("style", ["mesh", "shard_map"])
def test_frozen_parameters_stay_and_the_others_train_as_on_one_device(style):
    def tx():
        labels = {"embedding": "frozen", "blocks": "trained", "odd": "frozen", "head": "trained"}
        parts = {"trained": optax.adamw(1e-2), "frozen": optax.set_to_zero()}
        return jaxmp.mixed_precision(optax.multi_transform(parts, labels), "float32")

    first = jaxmp.TrainState.create(init(jax.random.key(0)), tx())
    plain = jaxmp.make_train_step(make_loss(), tx(), "float32", donate=False)
    expected = train(plain, first, batches())
    layout = sharding.Layout(make_mesh(8), SPECS["fsdp"])
    state = layout.place(first)
    if style == "mesh":
        step = jaxmp.make_train_step(make_loss(), tx(), "float32", layout=layout, donate=False)
    else:
        loss = sharded_loss(SPECS["fsdp"], "float32")
        step = jaxmp.make_train_step(loss, tx(), "float32", axis_name="data", donate=False)
        step = mapped(step, layout, state)
    found = train(step, state, map(layout.place_batch, batches()))
    assert_same_training(found, expected, F32)
    np.testing.assert_array_equal(found[0].params["embedding"], first.params["embedding"])


def of_every_device(leaf):
    """The parts of an array by what they are parts of: one for each device."""
    found = {}
    for shard in leaf.addressable_shards:
        found.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    return found


def assert_same_on_every_device(tree):
    for name, leaf in zip(jaxmp._tree.leaf_names(tree), jax.tree.leaves(tree), strict=True):
        for copies in of_every_device(leaf).values():
            for copy in copies:
                np.testing.assert_array_equal(copy, copies[0], err_msg=name)


@pytest.mark.parametrize("kind", ["dp", "fsdp"])
@pytest.mark.parametrize("style", ["mesh", "shard_map", "unchecked"])
def test_an_overflow_on_one_device_has_all_skip(style, kind):
    if style == "unchecked" and kind == "fsdp":
        pytest.skip("gather needs a shard_map that checks")
    policy = "mixed_float16"
    layout = sharding.Layout(make_mesh(8), SPECS[kind])
    first = jaxmp.TrainState.create(init(jax.random.key(0)), adam(policy))
    state = layout.place(first)

    def loss_of(own):
        # A token that only the rows of one device have has a factor that overflows in half.
        def loss_fn(params, batch):
            return own(params, batch["tokens"]) * jnp.max(batch["factor"])

        return loss_fn

    own = make_loss() if kind == "dp" or style == "mesh" else sharded_loss(SPECS[kind], policy)
    if style == "mesh":
        step = jaxmp.make_train_step(
            loss_of(own), adam(policy), policy, layout=layout, donate=False
        )
    else:
        step = jaxmp.make_train_step(
            loss_of(own), adam(policy), policy, axis_name="data", donate=False
        )
        step = mapped(step, layout, state, check_vma=style != "unchecked")
    tokens = batches(1)[0]
    factor = jnp.ones(32)
    clean = layout.place_batch({"tokens": tokens, "factor": factor})
    bad = layout.place_batch({"tokens": tokens, "factor": factor.at[21].set(1e6)})
    skipped, info = step(state, bad)
    assert bool(info.skipped)
    assert float(jaxmp.get_loss_scale(skipped.opt_state).loss_scale) == 2.0**14
    kept = [(each.params, each.opt_state.inner_state) for each in (state, skipped)]
    jax.tree.map(np.testing.assert_array_equal, *kept)
    assert_same_on_every_device((skipped, info))
    after, info = step(skipped, clean)
    assert not bool(info.skipped)
    assert float(info.loss_scale) == 2.0**14
    assert int(info.skipped_steps) == 1
    assert int(info.skip_streak) == 0
    assert_same_on_every_device((after, info))


def test_devices_agree_by_one_number():
    """Sharded gradients take one exchange to skip alike; those that are the same take none."""
    policy = "mixed_float16"
    for kind, expected in (("dp", 0), ("fsdp", 1)):
        layout = sharding.Layout(make_mesh(8), SPECS[kind])
        state = layout.place(jaxmp.TrainState.create(init(jax.random.key(0)), adam(policy)))
        own = make_loss() if kind == "dp" else sharded_loss(SPECS[kind], policy)
        step = jaxmp.make_train_step(own, adam(policy), policy, axis_name="data", donate=False)
        program = mapped(step, layout, state).trace(state, layout.place_batch(batches(1)[0]))
        assert str(program.jaxpr).count("pmin[") == expected


class TestReduceDtype:
    """B39 and B42: what gradients are added up in."""

    @staticmethod
    def gradient(contributions, reduce, style):
        """The mean over devices of gradients of which each has one, for a weight of ones."""
        devices = len(contributions)
        mesh, policy = make_mesh(devices), f"compute=bfloat16,output=float32,reduce={reduce}"
        x = jnp.asarray(contributions, jnp.float32)[:, None] * jnp.ones((1, 8))
        w = jnp.ones((8, 1))

        def loss_fn(w, x):
            return jnp.mean(x @ w)

        if style == "mesh":
            layout = sharding.Layout(mesh)
            grad_fn = jax.jit(jaxmp.value_and_grad(loss_fn, policy, layout=layout))
            _, grad = grad_fn(layout.place(w), layout.place_batch(x))
        else:
            grad_fn = jaxmp.value_and_grad(loss_fn, policy, axis_name="data")
            grad_fn = jax.shard_map(
                grad_fn,
                mesh=mesh,
                in_specs=(P(), P("data")),
                out_specs=P(),
                check_vma=style == "shard_map",
            )
            _, grad = jax.jit(grad_fn)(w, x)
        assert grad.dtype == jnp.float32
        assert np.unique(grad).size == 1
        return float(grad[0, 0])

    @pytest.mark.parametrize("style", ["mesh", "shard_map", "unchecked"])
    def test_by_default_nothing_is_lost(self, style):
        assert self.gradient([256, 1, 1, 1], "float32", style) == 259 / 4

    @pytest.mark.parametrize("style", ["shard_map", "unchecked"])
    def test_in_bfloat16_the_user_has_it_so(self, style):
        # 256, 257, 258 and 259 are 256 or 258 or 260 in 8 bits.
        assert self.gradient([256, 1, 1, 1], "bfloat16", style) in (256 / 4, 258 / 4, 260 / 4)

    @pytest.mark.parametrize("style", ["shard_map", "unchecked"])
    @pytest.mark.parametrize("size", [30000.0, 1e-7, 3e30, 1e-30])
    def test_in_float16_neither_size_nor_number_of_devices_decides(self, size, style):
        wanted = float(jnp.bfloat16(size))  # of the operand of the product
        found = self.gradient([size] * 4, "float16", style)
        assert abs(found - wanted) <= 2.0**-11 * wanted

    @pytest.mark.parametrize("bad", [np.inf, np.nan])
    def test_in_float16_infinity_and_nan_stay(self, bad):
        assert not np.isfinite(self.gradient([1.0, bad, 1.0, 1.0], "float16", "shard_map"))

    def test_in_float16_zeros_are_zeros(self):
        assert self.gradient([0.0] * 4, "float16", "shard_map") == 0


@pytest.mark.parametrize("reduce", ["bfloat16", "float16"])
@pytest.mark.parametrize("style", ["mesh", "shard_map"])
def test_ten_steps_reduced_in_half(style, reduce):
    """Every gradient is rounded once more, and added up in half: eight devices, eight roundings."""
    policy = f"compute=bfloat16,output=float32,reduce={reduce}"
    layout = sharding.Layout(make_mesh(8), SPECS["fsdp"])
    first = jaxmp.TrainState.create(init(jax.random.key(0)), adam(policy))
    plain = jaxmp.make_train_step(make_loss(), adam(policy), policy, donate=False)
    expected = train(plain, first, batches())
    state = layout.place(first)
    if style == "mesh":
        step = jaxmp.make_train_step(make_loss(), adam(policy), policy, layout=layout)
    else:
        own = sharded_loss(SPECS["fsdp"], policy)
        step = jaxmp.make_train_step(own, adam(policy), policy, axis_name="data", donate=False)
        step = mapped(step, layout, state)
    found = train(step, state, map(layout.place_batch, batches()))
    assert_same_training(found, expected, 8 * 2.0**-8)


def dtypes_of(program, primitive):
    """The dtypes of the arrays that a primitive gives in a program, those of its calls too."""
    return [
        var.aval.dtype.name
        for jaxpr in jaxprs_in(program.jaxpr)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == primitive
        for var in eqn.outvars
        if var.aval.ndim
    ]


def jaxprs_in(jaxpr):
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            yield from jaxprs_in(inner.jaxpr)


class TestSentByTheProgram:
    """B40: a program that gathers its weights itself, by hand, sends narrow ones."""

    MESH = make_mesh(8)

    @staticmethod
    def constrained(w, x):
        whole = NamedSharding(TestSentByTheProgram.MESH, P())
        return jnp.mean((x @ lax.with_sharding_constraint(w, whole)) ** 2)

    @staticmethod
    def explicit(w, x):
        return jnp.mean((x @ jax.sharding.reshard(w, P())) ** 2)

    @staticmethod
    def mapped(w, x):
        def local(w, x):
            own = jnp.mean((x @ lax.all_gather(w, "data", tiled=True)) ** 2)
            return lax.pmean(own, "data")

        specs = {"in_specs": (P("data"), P("data")), "out_specs": P()}
        return jax.shard_map(local, mesh=TestSentByTheProgram.MESH, **specs)(w, x)

    @pytest.mark.parametrize(
        ("style", "primitive"),
        [("constrained", "sharding_constraint"), ("explicit", "reshard"), ("mapped", "all_gather")],
    )
    def test_narrow_there_and_f32_back(self, style, primitive):
        w, x = jax.random.normal(jax.random.key(0), (16, 8)), jnp.ones((32, 16))
        _, expected = jaxmp.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2), "mixed_bfloat16")(
            w, x
        )
        mesh = self.MESH
        if style == "explicit":
            mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
        rows = NamedSharding(mesh, P("data"))
        grad_fn = jax.jit(jaxmp.value_and_grad(getattr(self, style), "mixed_bfloat16"))
        with jax.set_mesh(mesh):
            args = jax.device_put(w, rows), jax.device_put(x, rows)
            _, grad = grad_fn(*args)
            program = grad_fn.trace(*args).jaxpr
        np.testing.assert_allclose(grad, expected, rtol=2.0**-8)
        assert grad.dtype == jnp.float32
        back = [] if style == "mapped" else ["float32"]
        assert sorted(dtypes_of(program, primitive)) == ["bfloat16", *back]

    def test_forward_mode_and_second_order(self):
        w, x = jax.random.normal(jax.random.key(0), (16, 8)), jnp.ones((32, 16))
        fun = jaxmp.autocast(functools.partial(self.constrained, x=x))
        plain = jaxmp.autocast(lambda w: jnp.mean((x @ w) ** 2))
        tangent = jnp.ones_like(w)
        for transform in (lambda f: f, jax.grad):
            found = jax.jvp(transform(fun), (w,), (tangent,))
            expected = jax.jvp(transform(plain), (w,), (tangent,))
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=2.0**-7), found, expected
            )

    def test_what_is_used_in_f32_too_is_sent_in_f32(self):
        def loss_fn(w, x):
            whole = lax.with_sharding_constraint(w, NamedSharding(self.MESH, P()))
            return jnp.mean(x @ whole) + jnp.sum(jnp.exp(whole))

        w, x = jnp.ones((16, 8)) * 1.001, jnp.ones((32, 16))
        program = jax.make_jaxpr(jaxmp.autocast(loss_fn))(w, x)
        assert dtypes_of(program, "sharding_constraint") == ["float32"]


@pytest.mark.parametrize("batch_axes", ["data", "model"])
@pytest.mark.parametrize("rows", [16, 4])
def test_grouped_convolutions_beside_another_axis(batch_axes, rows):
    """XLA by itself multiplies the gradient by the devices along the other axis."""
    x = jax.random.normal(jax.random.key(0), (rows, 6, 6, 8))
    params = {
        "grouped": jax.random.normal(jax.random.key(1), (3, 3, 2, 8)),
        "depthwise": jax.random.normal(jax.random.key(2), (3, 3, 1, 16)),
    }

    def loss_fn(params, x):
        for groups, w in ((4, params["grouped"]), (8, params["depthwise"])):
            numbers = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
            )
        return jnp.mean(x**2)

    layout = sharding.fsdp(params, make_mesh(4, 2), batch_axes=batch_axes, min_size=1)
    grad_fn = jax.jit(jaxmp.value_and_grad(loss_fn, "float32", layout=layout))
    loss, grads = grad_fn(layout.place(params), layout.place_batch(x))
    expected, want = jax.value_and_grad(loss_fn)(params, x)
    np.testing.assert_allclose(loss, expected, rtol=F32)
    for name, grad in want.items():
        np.testing.assert_allclose(grads[name], grad, atol=F32 * np.abs(grad).max())


def test_gradients_of_cut_parameters_are_accumulated_in_a_shard_map():
    specs = {"w": P("data"), "b": P()}
    params = {"w": jnp.ones((16, 4)), "b": jnp.ones(4)}
    tx = jaxmp.optim.accumulate(optax.adam(0.1), 2)

    def two_steps(params):
        state = tx.init(params)
        for _ in range(2):
            grads = jax.tree.map(jnp.cos, params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    fun = jax.shard_map(two_steps, mesh=make_mesh(8), in_specs=(specs,), out_specs=specs)
    found, expected = jax.jit(fun)(params), two_steps(params)
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=8 * U)
