"""Where arrays lie on a mesh: layouts, what they refuse, and placements that follow a weight."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import optim, sharding
from jaxmp._placement import Placement


def make_mesh(*sizes, names=("data", "model"), kind=AxisType.Auto):
    return jax.make_mesh(sizes, names[: len(sizes)], axis_types=(kind,) * len(sizes))


MESH = make_mesh(8)
PARAMS = {"w": jnp.ones((16, 32)), "b": jnp.zeros(32)}
BATCH = jax.random.normal(jax.random.key(0), (32, 16))


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def transform(policy="mixed_float16"):
    return jaxmp.mixed_precision(optax.adam(0.1), policy)


def make_step(policy="mixed_float16", loss=loss_fn, **options):
    return jaxmp.make_train_step(loss, transform(policy), policy, donate=False, **options)


def start(policy="mixed_float16"):
    return jaxmp.TrainState.create(PARAMS, transform(policy))


def specs_of(tree):
    return {name: s.spec for name, s in jaxmp._tree.named_leaves(tree).items()}


class TestShardings:
    def test_of_a_state_each_leaf_lies_as_its_parameter(self):
        layout = sharding.Layout(MESH, {"w": P("data"), "b": P()})
        specs = specs_of(layout.shardings(start()))
        assert specs["params/w"] == P("data")
        assert specs["opt_state/inner_state/0/mu/w"] == P("data")
        assert specs["opt_state/inner_state/0/nu/b"] == P()
        assert specs["opt_state/loss_scale/loss_scale"] == P()
        assert specs["step"] == P()

    def test_states_of_other_shapes_share_the_first_axes(self):
        params = {"w": jnp.ones((256, 512))}
        layout = sharding.Layout(MESH, P("data"))
        factored = optax.adafactor(1e-2, min_dim_size_to_factor=128).init(params)
        found = {
            (leaf.shape, s.spec)
            for leaf, s in zip(
                jax.tree.leaves(factored),
                jax.tree.leaves(layout.shardings(factored, params)),
                strict=True,
            )
        }
        assert ((256,), P("data")) in found
        assert ((512,), P()) in found
        tx = optim.state_dtype(optax.adam(1e-2), {"mu": "block8", "nu": "block8_square"})
        state = tx.init(params)
        placed = layout.place(state, params)
        large = [leaf for leaf in jax.tree.leaves(placed) if leaf.size >= 256 * 512]
        assert large
        assert all(leaf.sharding.spec == P("data") for leaf in large)

    def test_one_spec_is_for_all_and_may_be_a_sharding(self):
        for spec in (P("data"), NamedSharding(MESH, P("data"))):
            layout = sharding.Layout(MESH, spec)
            specs = specs_of(layout.shardings({"a": jnp.ones((8, 2)), "b": jnp.ones(16)}))
            assert specs == {"a": P("data"), "b": P("data")}

    def test_a_state_that_is_placed_is_that_which_is_created_of_placed_parameters(self):
        layout = sharding.fsdp(PARAMS, MESH, min_size=1)
        placed = layout.place(start())
        created = jaxmp.TrainState.create(layout.place(PARAMS), transform())
        made = layout.create(start)
        for one, two, three in zip(*map(jax.tree.leaves, (placed, created, made)), strict=True):
            assert one.sharding == two.sharding == three.sharding
            np.testing.assert_array_equal(one, three)

    def test_a_batch_of_numpy_arrays_is_spread(self):
        layout = sharding.Layout(make_mesh(4, 2), batch_axes="data")
        batch = layout.place_batch({"x": np.ones((8, 3)), "y": np.arange(8)})
        assert {leaf.sharding.spec for leaf in jax.tree.leaves(batch)} == {P("data")}
        assert batch["y"].tolist() == list(range(8))

    def test_parameters_that_are_one_array(self):
        layout = sharding.Layout(MESH, P("data"))
        w = jnp.ones((16, 32))
        state = layout.place(jaxmp.TrainState.create(w, transform()))
        inner = state.opt_state.inner_state[0]
        assert {leaf.sharding.spec for leaf in (state.params, inner.mu, inner.nu)} == {P("data")}
        assert layout.place(transform().init(w), w).inner_state[0].mu.sharding.spec == P("data")
        assert state.step.sharding.spec == P()

    @pytest.mark.parametrize("sizes", [(1,), (8, 1)])
    def test_along_an_axis_of_one_device_nothing_is_cut(self, sizes):
        specs = {"w": P("model", "data") if len(sizes) == 2 else P("data"), "b": P()}
        mesh = jax.make_mesh(
            sizes, ("data", "model")[: len(sizes)], devices=jax.devices()[: sizes[0]]
        )
        layout = sharding.Layout(mesh, specs, batch_axes="data")
        step, state = make_step(layout=layout), layout.place(start())
        for _ in range(2):
            state, _ = step(state, layout.place_batch(BATCH))
        assert step._cache_size() == 1


class TestFsdp:
    def test_it_warns_where_nothing_is_large_enough(self):
        with pytest.warns(UserWarning, match="sharded none of 2 parameters.*min_size=16384"):
            layout = sharding.fsdp(PARAMS, MESH)
        assert layout.specs == {"w": P(), "b": P()}
        sharding.fsdp(PARAMS, make_mesh(1), min_size=2**20)

    PARAMS = {
        "large": jnp.ones((64, 256)),
        "stacked": jnp.ones((512, 64, 32)),
        "odd": jnp.ones((129, 129)),
        "small": jnp.ones((8, 8)),
        "only first": jnp.ones((512, 9, 9)),
        "number": jnp.float32(1),
        "none": jnp.ones((0, 64)),
    }

    def test_it_shards_the_largest_axis_that_divides(self):
        specs = sharding.fsdp(self.PARAMS, MESH).specs
        assert specs == {
            "large": P(None, "data"),
            "stacked": P(None, "data"),
            "odd": P(),
            "small": P(),
            "only first": P("data"),
            "number": P(),
            "none": P(),
        }

    def test_it_leaves_what_is_sharded_and_shards_over_some_axes_only(self):
        mesh = make_mesh(2, 2, 2, names=("replica", "data", "model"))
        layout = sharding.fsdp(
            {"up": jnp.ones((256, 512)), "down": jnp.ones((512, 256))},
            mesh,
            batch_axes=("replica", "data"),
            shard_axes="data",
            specs={"up": P(None, "model"), "down": P("model")},
        )
        assert layout.specs == {"up": P("data", "model"), "down": P("model", "data")}
        assert layout.batch_axes == ("replica", "data")


STEP_ERRORS = {
    "uneven batch": (
        lambda layout: make_step(layout=layout)(layout.place(start()), BATCH[:30]),
        r"\(30, 16\), whose leading axis does not divide over the 8 devices",
    ),
    "uneven microbatches": (
        lambda layout: make_step(layout=layout, microbatches=8)(layout.place(start()), BATCH),
        "in 8 microbatches over the 8 devices .* or the number of microbatches",
    ),
    "scalar in a batch": (lambda layout: layout.place_batch({"x": BATCH, "t": 2.0}), "is a scalar"),
    "no layout": (lambda _: make_step(layout=MESH), "layout is a Mesh, but must be"),
    "specs as layout": (
        lambda layout: jaxmp.value_and_grad(loss_fn, "float32", layout=layout.specs),
        "layout is a dict, but must be",
    ),
    "state without parameters": (
        lambda layout: layout.place(transform().init(PARAMS)),
        r"layout.place\(opt_state, params\)",
    ),
    "uneven placed batch": (lambda layout: layout.place_batch(BATCH[:30]), "drop or pad"),
    "state on one device": (
        lambda layout: make_step(layout=layout)(jax.device_put(start(), jax.devices()[0]), BATCH),
        "incompatible devices",
    ),
    "state on another mesh": (
        lambda layout: make_step(layout=layout)(
            jax.device_put(start(), NamedSharding(make_mesh(4), P())), BATCH
        ),
        "incompatible devices",
    ),
    "both": (lambda layout: make_step(layout=layout, axis_name="data"), "Use one of them"),
    "several arguments": (
        lambda layout: jaxmp.value_and_grad(
            loss_fn, "mixed_bfloat16", argnums=(0, 1), layout=layout
        ),
        "argnums is",
    ),
}


@pytest.mark.parametrize("name", STEP_ERRORS)
def test_what_a_step_on_a_mesh_refuses(name):
    attempt, message = STEP_ERRORS[name]
    with pytest.raises(ValueError, match=message):
        attempt(sharding.fsdp(PARAMS, MESH, min_size=1))


LAYOUT_ERRORS = {
    "no such axis": (lambda: sharding.Layout(MESH, P("dta")), "has no axis 'dta'.*'data'"),
    "no such batch axis": (lambda: sharding.Layout(MESH, batch_axes="x"), "has no axis 'x'"),
    "which batch axis": (lambda: sharding.Layout(make_mesh(4, 2)), "batch_axes='data'"),
    "no spec": (lambda: sharding.Layout(MESH, {"w": "data"}), "must be a jax.sharding"),
    "too many axes": (
        lambda: sharding.Layout(MESH, P(None, None, "data")).shardings(PARAMS),
        "'b' has shape",
    ),
    "does not divide": (
        lambda: sharding.Layout(MESH, P("data")).shardings({"w": jnp.ones((12, 3))}),
        "an axis of 12 does not divide over the 8 devices",
    ),
    "other structure": (
        lambda: sharding.Layout(MESH, {"w": P("data")}).shardings(PARAMS),
        "do not fit the parameters: there is none for 'b'",
    ),
    "one spec too many": (
        lambda: sharding.Layout(MESH, {"w": P(), "b": P(), "c": P()}).shardings(PARAMS),
        "do not fit the parameters: 'c' is no parameter",
    ),
    "no place": (lambda: sharding.Layout(MESH, P(P.UNCONSTRAINED)), "or None"),
    "batch axis twice": (lambda: sharding.Layout(MESH, batch_axes=("data",) * 2), "Name it once"),
    "no name": (lambda: sharding.Layout(MESH, batch_axes=0), "must be the name of an axis"),
    "no mesh": (lambda: sharding.fsdp(MESH, PARAMS), "mesh is a dict"),
    "no devices": (lambda: sharding.Layout(MESH.abstract_mesh).place(PARAMS), "is abstract"),
}


@pytest.mark.parametrize("name", LAYOUT_ERRORS)
def test_what_a_layout_refuses(name):
    attempt, message = LAYOUT_ERRORS[name]
    with pytest.raises(ValueError, match=message):
        attempt()


SPECS = (P(), P("data"))


def in_shard_map(fun, args, *, specs=SPECS, **options):
    fun = jax.shard_map(fun, mesh=MESH, in_specs=specs, out_specs=P(), **options)
    return jax.jit(fun)(*args)


class TestMapped:
    def test_without_the_name_of_an_axis_it_is_an_error(self):
        for options in ({}, {"check_vma": False}):
            with pytest.raises(ValueError, match="Give axis_name='data'"):
                in_shard_map(make_step(), (start(), BATCH), **options)
            with pytest.raises(ValueError, match="Give axis_name='data'"):
                in_shard_map(
                    lambda state, x: transform().update(
                        {"w": x[0, 0] * jnp.ones((16, 32)), "b": x[0, 0] * jnp.ones(32)},
                        state.opt_state,
                        state.params,
                    )[0],
                    (start(), BATCH),
                    **options,
                )
        with pytest.raises(ValueError, match="Give axis_name='i'"):
            jax.pmap(make_step(), axis_name="i", in_axes=(None, 0))(
                start(), BATCH.reshape(8, 4, 16)
            )
        with pytest.raises(ValueError, match="Give the pmap a name"):
            jax.pmap(make_step(), in_axes=(None, 0))(start(), BATCH.reshape(8, 4, 16))

    def test_what_is_the_same_on_all_devices_needs_no_name(self):
        def local(state, x):
            grads = jax.tree.map(jnp.ones_like, state.params)
            return transform().update(grads, state.opt_state, state.params)

        updates, _ = in_shard_map(local, (start(), BATCH))
        assert updates["w"].shape == (16, 32)
        in_shard_map(
            lambda state, x: make_step(axis_name=())(state, jnp.ones((4, 16))),
            (start(), BATCH),
            check_vma=False,
        )

    @pytest.mark.parametrize("reduced", [lax.pmean, lambda x, axis: lax.psum(x, axis) / 8])
    def test_a_loss_that_is_averaged_already_is_an_error(self, reduced):
        def mean_loss(params, x):
            return reduced(loss_fn(params, x), "data")

        message = "The loss is the same on all devices along 'data'"
        for microbatches in (1, 2):
            step = make_step(loss=mean_loss, axis_name="data", microbatches=microbatches)
            with pytest.raises(ValueError, match=message):
                in_shard_map(step, (start(), BATCH))
        grad_fn = jaxmp.value_and_grad(mean_loss, "float32", axis_name="data")
        with pytest.raises(ValueError, match=message):
            in_shard_map(grad_fn, (PARAMS, BATCH))
        plain = jaxmp.value_and_grad(mean_loss, "float32")
        _, grads = in_shard_map(plain, (PARAMS, BATCH))
        expected = jax.grad(loss_fn)(PARAMS, BATCH)["w"]
        np.testing.assert_allclose(grads["w"], expected, rtol=2.0**-16, atol=2.0**-18)

    def test_gradients_are_not_added_up_unasked(self):
        def grads(axis_name, own=lambda params: params):
            def local(params, x):
                grad_fn = jaxmp.value_and_grad(loss_fn, "float32", axis_name=axis_name)
                _, grads = grad_fn(own(params), x)
                return jax.tree.map(lambda g: lax.pmean(g, "data"), grads)

            return in_shard_map(local, (PARAMS, BATCH))["w"]

        with pytest.raises(ValueError, match="the sum over devices, not the mean"):
            grads(None)
        expected = jax.grad(loss_fn)(PARAMS, BATCH)["w"]
        tolerance = {"rtol": 2.0**-16, "atol": 2.0**-18}
        np.testing.assert_allclose(grads("data"), expected, **tolerance)
        np.testing.assert_allclose(grads(()), 8 * expected, **tolerance)
        cast = jaxmp._mapped.vary
        np.testing.assert_allclose(
            grads(None, lambda params: cast(params, ("data",))), expected, **tolerance
        )

    def test_a_layout_is_refused(self):
        layout = sharding.Layout(MESH)
        grad_fn = jaxmp.value_and_grad(loss_fn, "float32", layout=layout)
        for fun, first in ((make_step(layout=layout), start()), (grad_fn, PARAMS)):
            with pytest.raises(ValueError, match=r"around maps 'data'\. Give axis_name"):
                in_shard_map(fun, (first, BATCH))

    def test_a_name_that_is_not_mapped_is_an_error(self):
        with pytest.raises(ValueError, match="no mapped axis 'data': no axis is mapped"):
            make_step(axis_name="data")(start(), BATCH)
        with pytest.raises(ValueError, match="no mapped axis 'x': those mapped here are 'data'"):
            in_shard_map(make_step(axis_name="x"), (start(), BATCH))

    def test_a_loss_scale_that_differs_between_devices_is_an_error(self):
        def local(state, x):
            own = jaxmp.get_loss_scale(state.opt_state)
            factor = (1 + lax.axis_index("data")).astype(jnp.float32)
            own = dataclasses.replace(own, loss_scale=own.loss_scale * factor)
            opt_state = state.opt_state._replace(loss_scale=own)
            return make_step(axis_name="data")(dataclasses.replace(state, opt_state=opt_state), x)

        with pytest.raises(ValueError, match=r"'loss_scale/loss_scale'.*may differ"):
            in_shard_map(local, (start(), BATCH))

    @pytest.mark.parametrize(
        ("options", "specs", "message"),
        [
            ({"check_vma": False}, P("data"), "check_vma"),
            ({}, P(), "is the same on all devices"),
        ],
    )
    def test_what_gather_refuses(self, options, specs, message):
        with pytest.raises(ValueError, match=message):
            in_shard_map(
                lambda w: sharding.gather(w, "data", policy="float32"),
                (BATCH,),
                specs=(specs,),
                **options,
            )
        with pytest.raises(ValueError, match="no axis is mapped here"):
            sharding.gather(BATCH, "data", policy="float32")

    def test_pmap(self):
        step = jax.pmap(make_step(axis_name="i"), axis_name="i", in_axes=(None, 0))
        state, info = step(start(), BATCH.reshape(8, 4, 16))
        expected, want = make_step()(start(), BATCH)
        np.testing.assert_allclose(info.loss, np.full(8, want.loss), rtol=2.0**-20)
        for name, leaf in expected.params.items():
            assert np.unique(state.params[name], axis=0).shape[0] == 1
            np.testing.assert_allclose(state.params[name][0], leaf, atol=2.0**-10)

    def test_weights_metrics_statistics_and_keys(self):
        """As microbatches, devices are averaged by weight; each has a random key of its own."""

        def own(params, batch, *, model_state, rng):
            errors = (batch["x"] @ params["w"] + params["b"]).mean(-1) ** 2 * batch["mask"]
            count = batch["mask"].sum()
            return jaxmp.LossOutput(
                errors.sum() / count,
                weight=count,
                metrics={
                    "mean": batch["x"].sum() / count,
                    "count": count.astype(jnp.int32),
                    "all": jnp.all(batch["mask"] == 1),
                    "rows": batch["x"][:, 0],
                    "positive": batch["x"][:, 0] > 0,
                },
                model_state=model_state | {"seen": model_state["seen"] + jax.random.uniform(rng)},
            )

        mask = jnp.asarray([1.0] * 4 + [0, 1, 1, 0] + [1.0] * 20 + [0.0] * 4)
        batch = {"x": BATCH, "mask": mask}
        state = jaxmp.TrainState.create(
            PARAMS,
            transform("float32"),
            rng=jax.random.key(1),
            model_state={"seen": jnp.float32(0), "key": jax.random.key(2)},
        )
        plain = make_step("float32", own)
        _, want = plain(state, batch)
        for options in ({}, {"check_vma": False}):
            step = make_step("float32", own, axis_name="data")
            after, info = in_shard_map(step, (state, batch), **options)
            np.testing.assert_allclose(info.loss, want.loss, rtol=2.0**-20)
            np.testing.assert_allclose(info.grad_norm, want.grad_norm, rtol=2.0**-18)
            assert int(info.metrics["count"]) == int(mask.sum())
            assert not bool(info.metrics["all"])
            np.testing.assert_array_equal(info.metrics["rows"], BATCH[:, 0])
            np.testing.assert_array_equal(info.metrics["positive"], BATCH[:, 0] > 0, strict=True)
            assert after.model_state["key"] == jax.random.key(2)
            mean = BATCH[:28].sum() / mask.sum()  # the last device counts for nothing
            np.testing.assert_allclose(info.metrics["mean"], mean, rtol=1e-4)
            key = jax.random.fold_in(jax.random.key(1), 0)
            seen = [jax.random.uniform(jax.random.fold_in(key, i)) for i in range(8)]
            np.testing.assert_allclose(after.model_state["seen"], np.mean(seen), rtol=2.0**-20)


@pytest.mark.parametrize("around", ["nothing", "explicit", "automatic"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_layout_works_whatever_the_axes_of_meshes_are(kind, around):
    layout = sharding.fsdp(PARAMS, make_mesh(8, kind=kind), min_size=1)
    _, want = make_step()(start(), BATCH)
    other = {"explicit": AxisType.Explicit, "automatic": AxisType.Auto}.get(around)
    step = make_step(layout=layout)
    with contextlib.nullcontext() if other is None else jax.set_mesh(make_mesh(8, kind=other)):
        state, info = step(layout.place(start()), layout.place_batch(BATCH))
        state, _ = step(state, layout.place_batch(BATCH))
    np.testing.assert_allclose(info.loss, want.loss, rtol=2.0**-20)
    assert step._cache_size() == 1


def test_value_and_grad_with_a_layout():
    layout = sharding.fsdp(PARAMS, MESH, min_size=1)
    grad_fn = jax.jit(jaxmp.value_and_grad(loss_fn, "mixed_bfloat16", layout=layout))
    loss, grads = grad_fn(layout.place(PARAMS), layout.place_batch(BATCH))
    want, expected = jaxmp.value_and_grad(loss_fn, "mixed_bfloat16")(PARAMS, BATCH)
    np.testing.assert_allclose(loss, want, rtol=2.0**-7)
    assert grads["w"].sharding.spec == P(None, "data")
    for name in grads:
        assert grads[name].dtype == jnp.float32
        np.testing.assert_allclose(grads[name], expected[name], rtol=2.0**-6, atol=1e-3)


def test_second_order_with_a_layout():
    layout = sharding.Layout(MESH, P("data"))
    batch = layout.place_batch(BATCH)

    def product(layout):
        def grad(params):
            return jaxmp.value_and_grad(loss_fn, "mixed_bfloat16", layout=layout)(params, batch)[1]

        return jax.jit(lambda params: jax.jvp(grad, (params,), (params,))[1])

    placed = layout.place(jax.tree.map(jnp.ones_like, PARAMS))
    found, expected = product(layout)(placed), product(None)(placed)
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=2.0**-7, atol=2.0**-7)


def test_a_model_of_flax_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(16, 64, rngs=rngs)
            self.down = nnx.Linear(64, 16, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    graphdef, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)

    def loss(params, x):
        return jnp.mean((nnx.merge(graphdef, params)(x) - x) ** 2)

    tx = transform("float32")
    layout = sharding.fsdp(params, MESH, min_size=64)
    state = layout.place(jaxmp.TrainState.create(params, tx))
    assert state.params["up"]["kernel"][...].sharding.spec == P(None, "data")
    step = jaxmp.make_train_step(loss, tx, "float32", layout=layout, donate=False)
    plain = jaxmp.make_train_step(loss, tx, "float32", donate=False)
    one, two = state, jaxmp.TrainState.create(params, tx)
    for _ in range(3):
        one, info = step(one, layout.place_batch(BATCH))
        two, want = plain(two, BATCH)
    np.testing.assert_allclose(info.loss, want.loss, rtol=2.0**-18)
    assert step._cache_size() == 1


class TestPlacement:
    PLACE = Placement(MESH, ((), ("data",)), ("data",))

    @pytest.mark.parametrize(
        ("operation", "expected"),
        [
            (lambda x: x.T, (("data",), ())),
            (lambda x: x[:3], ((), ("data",))),
            (lambda x: x[:, :3], None),
            (lambda x: x[:, ::-1], None),
            (lambda x: x[::-1], ((), ("data",))),
            (lambda x: x.reshape(6, 8, 2), ((), ("data",), ())),
            (lambda x: x.reshape(6, 2, 8), None),
            (lambda x: x.reshape(2, 3, 16), ((), (), ("data",))),
            (lambda x: x.reshape(96), None),
            (lambda x: x.T.reshape(96), (("data",),)),
            (lambda x: x.reshape(6, 1, 16), ((), (), ("data",))),
            (lambda x: jnp.broadcast_to(x, (2, 6, 16)), ((), (), ("data",))),
            (lambda x: lax.dynamic_slice(x, (1, 0), (2, 16)), ((), ("data",))),
            (lambda x: lax.squeeze(lax.slice(x, (0, 0), (1, 16)), (0,)), (("data",),)),
            (lambda x: x.sum(0), None),
            (jnp.sin, None),
        ],
    )
    def test_it_follows_moves(self, operation, expected):
        place = self.PLACE
        for eqn in jax.make_jaxpr(operation)(jnp.ones((6, 16))).jaxpr.eqns:
            place = place and place.moved(eqn)
        assert (place and place.spec) == expected

    def test_of_stacked_layers(self):
        stacked = self.PLACE.stacked()
        assert stacked.spec == ((), (), ("data",))
        assert stacked.of_turn() == self.PLACE
        assert self.PLACE.with_spec((("data",), ())).of_turn() is None
