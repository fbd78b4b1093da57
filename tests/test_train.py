"""The jitted training step: skips, microbatches, mutable state, EMA, no host sync."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp import LossOutput, TrainState, make_train_step
from jaxmp.optim import get_mixed_precision_state
from tests.test_loss_scale import assert_same_kind
from tests.test_mixed_precision import assert_same_bits


def linear_loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def make_batch(seed=0, size=8):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {"x": jax.random.normal(keys[0], (size, 4)), "y": jax.random.normal(keys[1], (size, 2))}


def start(tx, **options):
    return TrainState.create({"w": jnp.full((4, 2), 0.5)}, tx, **options)


def adamw(policy="mixed_float16", loss_scale=None):
    return jaxmp.mixed_precision(optax.adamw(1e-2), policy, loss_scale)


def copy(tree):
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)


def test_the_step_is_the_loop_written_by_hand():
    policy, tx, batch = "mixed_float16", adamw(), make_batch()
    step = make_train_step(linear_loss, tx, policy)
    state = start(tx)

    @jax.jit
    def by_hand(params, opt_state):
        grad_fn = jaxmp.value_and_grad(
            linear_loss, policy, loss_scale=jaxmp.get_loss_scale(opt_state)
        )
        loss, grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    params, opt_state = state.params, state.opt_state
    for i in range(3):
        params, opt_state, loss, norm = by_hand(params, opt_state)
        state, info = step(copy(state), batch)
        chex.assert_trees_all_close(state.params, params, rtol=1e-6)
        np.testing.assert_allclose([info.loss, info.grad_norm], [loss, norm], rtol=1e-6)
        assert int(info.step) == int(state.step) == i + 1
    assert {x.dtype for x in (info.loss, info.grad_norm, info.loss_scale)} == {np.dtype("float32")}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_one_compilation_for_five_steps_with_a_skip_and_a_growth(microbatches):
    traces = []

    def loss_fn(params, batch):
        traces.append(1)
        return linear_loss(params, batch)

    tx = adamw(loss_scale=jaxmp.DynamicLossScale(2.0**8, period=2))
    step, state = (
        make_train_step(loss_fn, tx, "mixed_float16", microbatches=microbatches),
        start(tx),
    )
    scales, before = [], jax.eval_shape(lambda s: s, state)
    for i in range(5):
        batch = make_batch(i)
        if i == 1:
            batch["x"] = batch["x"].at[0, 0].set(jnp.inf)
        state, info = step(state, batch)
        scales.append((float(info.loss_scale), bool(info.skipped)))
    assert scales == [(256, False), (256, True), (128, False), (128, False), (256, False)]
    assert len(traces) == 1
    assert step._cache_size() == 1
    assert jax.eval_shape(lambda s: s, state) == before


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_skipped_step_restores_everything_but_the_counters(microbatches):
    def loss_fn(params, batch, *, model_state, rng):
        noise = jax.random.normal(rng, batch["x"].shape)
        seen = model_state["seen"] + jnp.mean(batch["x"], dtype=jnp.float32)
        return LossOutput(
            linear_loss(params, batch | {"x": batch["x"] + 0 * noise.astype(batch["x"].dtype)}),
            metrics={"mean": jnp.mean(batch["x"])},
            model_state={"seen": seen, "steps": model_state["steps"] + 1},
        )

    tx = adamw(loss_scale=jaxmp.DynamicLossScale(2.0**8))
    step = make_train_step(loss_fn, tx, "mixed_float16", microbatches=microbatches, ema_decay=0.9)
    state = start(
        tx,
        model_state={"seen": jnp.float32(0), "steps": jnp.int32(0)},
        rng=jax.random.key(7),
        ema=True,
    )
    state, info = step(state, make_batch())
    assert not bool(info.skipped)
    assert int(state.model_state["steps"]) == microbatches
    before = copy(state)
    bad = make_batch()
    bad["y"] = bad["y"].at[5, 1].set(jnp.nan)
    state, info = step(state, bad)
    assert bool(info.skipped)
    for name in ("params", "model_state", "ema_params"):
        assert_same_bits(getattr(state, name), getattr(before, name))
    assert_same_bits(jax.random.key_data(state.rng), jax.random.key_data(before.rng))
    inner = [get_mixed_precision_state(s).inner_state for s in (state, before)]
    assert_same_bits(*inner)
    assert_same_kind(state, before)
    assert (int(state.step), int(info.skipped_steps), int(info.skip_streak)) == (2, 1, 1)
    state, info = step(state, make_batch())
    assert (int(info.skipped_steps), int(info.skip_streak)) == (1, 0)


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_microbatches_give_the_big_batchs_step(k, scale):
    """Cases B31 and B51: accumulation and scale change neither the loss nor the gradient."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "float32", jaxmp.StaticLossScale(scale))
    batch = make_batch()
    loss, grads = jax.value_and_grad(linear_loss)(start(tx).params, batch)
    state, info = make_train_step(linear_loss, tx, "float32", microbatches=k)(start(tx), batch)
    np.testing.assert_allclose(info.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(info.grad_norm, optax.tree.norm(grads), rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], 0.5 - 0.1 * grads["w"], rtol=1e-5)


def test_microbatches_are_averaged_by_token():
    """Case B31: unequal counts of valid tokens, one microbatch without any."""
    mask = jnp.array([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]], jnp.float32)
    x = jnp.arange(16.0).reshape(4, 4)

    def loss_fn(params, batch):
        errors = (params["w"] * batch["x"]) * batch["mask"]
        count = jnp.sum(batch["mask"])
        metrics = {
            "mean": jnp.sum(batch["x"] * batch["mask"]) / count,
            "count": count.astype(jnp.int32),
            "seen": jnp.sum(batch["mask"], 1),
            "all": jnp.all(batch["x"] >= 0),
        }
        return LossOutput(jnp.sum(errors) / count, weight=count, metrics=metrics)

    tx = jaxmp.mixed_precision(optax.sgd(1.0), "float32")
    for k in (1, 2, 4):
        state = TrainState.create({"w": jnp.float32(2.0)}, tx)
        step = make_train_step(loss_fn, tx, "float32", microbatches=k)
        state, info = step(state, {"x": x, "mask": mask})
        want = float(jnp.sum(x * mask) / jnp.sum(mask))
        np.testing.assert_allclose(info.loss, 2 * want, rtol=1e-6)
        np.testing.assert_allclose(state.params["w"], 2 - want, rtol=1e-6)
        np.testing.assert_allclose(info.metrics["mean"], want, rtol=1e-6)
        assert int(info.metrics["count"]) == 7
        assert info.metrics["count"].dtype == jnp.int32
        np.testing.assert_array_equal(info.metrics["seen"], [4, 1, 0, 2])
        assert (bool(info.metrics["all"]), info.metrics["all"].dtype) == (True, jnp.bool_)


@pytest.mark.parametrize(
    ("values", "want"),
    [(np.full(1024, 1e-3), 1e-3), (np.tile([1.0, 1.01], 128), 1.005)],
    ids=["1024 x 1e-3", "256 x 1.0 or 1.01"],
)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_many_microbatches_accumulate_in_f32(values, want, policy):
    """Case B31: a bf16 sum of 1024 thousandths stops at a half."""
    tx = jaxmp.mixed_precision(optax.sgd(1.0), policy)
    step = make_train_step(lambda p, b: jnp.mean(p["w"] * b), tx, policy, microbatches=len(values))
    state, info = step(
        TrainState.create({"w": jnp.zeros(())}, tx), jnp.asarray(values, jnp.float32)
    )
    # bf16 rounds each value once, to 2^-9 relative; the sum adds nothing to that.
    tolerance = 1e-3 if policy == "float32" else 2.0**-8
    np.testing.assert_allclose(-state.params["w"], want, rtol=tolerance)
    np.testing.assert_allclose(info.grad_norm, want, rtol=tolerance)


@pytest.mark.parametrize("where", range(4))
def test_an_overflow_in_any_microbatch_is_one_skip(where):
    """Case B24: one finite check and one scale update for the whole window."""
    tx = jaxmp.mixed_precision(
        optax.chain(optax.clip_by_global_norm(0.2), optax.adam(0.1)),
        "mixed_float16",
        jaxmp.DynamicLossScale(2.0**8, period=2),
    )
    step, state = make_train_step(linear_loss, tx, "mixed_float16", microbatches=4), start(tx)
    before = copy(state)
    bad = make_batch()
    bad["x"] = bad["x"].at[2 * where].set(jnp.inf)
    state, info = step(state, bad)
    assert bool(info.skipped)
    assert_same_bits(state.params, before.params)
    scales = []
    for _ in range(4):
        state, info = step(state, make_batch())
        scales.append(float(info.loss_scale))
    assert scales == [128, 128, 256, 256], "nothing of the bad window is left"
    assert int(info.skipped_steps) == 1


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("skipped", [False, True])
def test_reported_numbers_do_not_carry_the_scale(k, skipped):
    """Case B51: loss, metrics, per-example losses and the norm equal those of the f32 run."""

    def loss_fn(params, batch):
        errors = jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2, -1)
        poison = 0.0 * jnp.sum(jnp.sqrt(params["w"] * 0)) if skipped else 0.0
        metrics = {"per_example": errors, "error": jnp.mean(errors)}
        return LossOutput(jnp.mean(errors) + poison, metrics=metrics)

    batch, infos = make_batch(), {}
    for name, policy, scale in (
        ("f32", "float32", jaxmp.NoOpLossScale()),
        ("f16", "mixed_float16", jaxmp.DynamicLossScale(2.0**16)),
    ):
        tx = jaxmp.mixed_precision(optax.adam(0.1), policy, scale)
        step = make_train_step(loss_fn, tx, policy, microbatches=k)
        _, infos[name] = step(start(tx), batch)
    f32, f16 = infos["f32"], infos["f16"]
    assert bool(f16.skipped) or not skipped
    for a, b in ((f32.loss, f16.loss), *((f32.metrics[n], f16.metrics[n]) for n in f32.metrics)):
        assert a.shape == b.shape
        assert a.dtype == b.dtype == jnp.float32
        np.testing.assert_allclose(b, a, rtol=2.0**-8)
    if not bool(f16.skipped):
        np.testing.assert_allclose(f16.grad_norm, f32.grad_norm, rtol=2.0**-8)


def test_randomness_is_new_in_every_step_and_microbatch_and_repeats_from_a_state():
    def loss_fn(params, batch, *, rng):
        return LossOutput(jnp.mean(params["w"]), metrics={"draw": jax.random.bits(rng, (1,))})

    tx = jaxmp.mixed_precision(optax.sgd(0.0), "float32")
    step = make_train_step(loss_fn, tx, "float32", microbatches=4, donate=False)
    state = start(tx, rng=jax.random.key(0))
    draws, state_1 = [], None
    for i in range(3):
        state_1 = state if i == 1 else state_1
        state, info = step(state, make_batch())
        draws.append(np.asarray(info.metrics["draw"]))
    assert len(np.unique(np.concatenate(draws))) == 12
    _, again = step(state_1, make_batch())
    np.testing.assert_array_equal(again.metrics["draw"], draws[1])


def test_ema_is_kept_in_f32_and_copies_integers():
    """Case B18's kind: decay 0.999 from 1 towards 2 in 200 steps gives 1.181."""
    tx = jaxmp.mixed_precision(optax.identity(), "mixed_bfloat16")
    state = TrainState.create({"w": jnp.ones(3), "n": jnp.int32(4)}, tx, ema=True)
    step = make_train_step(lambda p, b: jnp.sum(p["w"]) * 0, tx, "mixed_bfloat16", ema_decay=0.999)
    state = jax.tree.map(lambda x: x, state)
    state.params["w"] = jnp.full(3, 2.0)
    for _ in range(200):
        state, _ = step(state, jnp.ones(2))
    np.testing.assert_allclose(state.ema_params["w"], 2 - 0.999**200, rtol=1e-5)
    assert state.ema_params["w"].dtype == jnp.float32
    assert int(state.ema_params["n"]) == 4


@pytest.mark.parametrize("k", [1, 2])
def test_integer_parameters_pass_through(k):
    tx = adamw()
    params = {"w": jnp.full((4, 2), 0.5), "n": jnp.int32(3), "mask": jnp.array([True, False])}
    state = TrainState.create(params, tx)
    step = make_train_step(linear_loss, tx, "mixed_float16", microbatches=k)
    state, _ = step(state, make_batch())
    state, info = step(state, make_batch())
    assert not bool(info.skipped)
    assert (int(state.params["n"]), state.params["n"].dtype) == (3, jnp.int32)
    assert state.params["mask"].dtype == jnp.bool_


def test_the_state_is_donated_and_the_callers_parameters_are_not():
    tx, params = adamw(), {"w": jnp.full((4, 2), 0.5)}
    tied = {"a": params["w"], "b": params["w"]}
    state = TrainState.create(tied, tx, ema=True)
    step = make_train_step(
        lambda p, b: linear_loss({"w": p["a"] + p["b"]}, b), tx, "mixed_float16", ema_decay=0.5
    )
    new_state, _ = step(state, make_batch())
    assert state.params["a"].is_deleted()
    assert not params["w"].is_deleted()
    memory = step.lower(new_state, make_batch()).compile().memory_analysis()
    arrays = [leaf for leaf in jax.tree.leaves(new_state) if leaf.ndim]
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in arrays)
    kept = make_train_step(linear_loss, tx, "mixed_float16", donate=False)
    state = start(tx)
    kept(state, make_batch())
    assert not state.params["w"].is_deleted()


def test_a_step_makes_no_transfer_to_the_host():
    tx = adamw()
    step, state, batch = make_train_step(linear_loss, tx, "mixed_float16"), start(tx), make_batch()
    state, _ = step(state, batch)
    with jax.transfer_guard_device_to_host("disallow"):
        for _ in range(3):
            state, info = step(state, batch)
    text = step.lower(state, batch).as_text()
    assert "callback" not in text
    assert "outfeed" not in text
    assert isinstance(info.loss, jax.Array)


def test_the_step_works_inside_scan_and_with_x64():
    tx = adamw(loss_scale=jaxmp.DynamicLossScale(2.0**8, period=2))
    step = make_train_step(linear_loss, tx, "mixed_float16", donate=False)
    batches = jax.tree.map(lambda *xs: jnp.stack(xs), *(make_batch(i) for i in range(4)))
    final, infos = jax.lax.scan(step, start(tx), batches)
    state = start(tx)
    for i in range(4):
        state, _ = step(state, jax.tree.map(lambda x, i=i: x[i], batches))
    chex.assert_trees_all_close(final, state, rtol=1e-6)
    np.testing.assert_array_equal(infos.loss_scale, [256, 256, 512, 512])
    with jax.enable_x64(True):
        tx = adamw()
        state = TrainState.create({"w": jnp.full((4, 2), 0.5, jnp.float32)}, tx)
        before = jax.eval_shape(lambda s: s, state)
        batch = jax.tree.map(lambda x: x.astype(jnp.float32), make_batch())
        state, info = make_train_step(linear_loss, tx, "mixed_float16", microbatches=2)(
            state, batch
        )
        assert jax.eval_shape(lambda s: s, state) == before
        assert {info.loss.dtype, info.grad_norm.dtype} == {np.dtype("float32")}


def zero_weight(params, batch):
    return LossOutput(linear_loss(params, batch), weight=jnp.float32(0))


def test_a_batch_without_any_weight_is_skipped():
    tx = adamw()
    step = make_train_step(zero_weight, tx, "mixed_float16", microbatches=2)
    state = start(tx)
    before = copy(state)
    state, info = step(state, make_batch())
    assert bool(info.skipped)
    assert_same_bits(state.params, before.params)


@pytest.mark.parametrize(
    ("options", "create", "loss_fn", "batch", "words"),
    [
        ({"microbatches": 3}, {}, linear_loss, make_batch(), r"'x' has shape \(8, 4\), whose"),
        ({"microbatches": 2}, {}, linear_loss, {"x": jnp.float32(1)}, r"'x' has shape \(\)"),
        ({"ema_decay": 0.9}, {}, linear_loss, make_batch(), r"created with ema=False"),
        ({}, {"ema": True}, linear_loss, make_batch(), r"ema_decay is None.*ema=True"),
        ({}, {}, lambda p, b: b["x"], make_batch(), r"must be a floating-point scalar"),
        ({}, {}, lambda p, b: LossOutput(linear_loss(p, b), weight=jnp.ones(2)), make_batch(),
         r"weight is float32\[2\], but"),
        ({}, {}, lambda p, b: LossOutput(linear_loss(p, b), model_state={"a": 1}), make_batch(),
         r"but the TrainState has none"),
        ({}, {"model_state": {"a": 1, "b": 2}},
         lambda p, b, model_state: LossOutput(linear_loss(p, b), model_state={"a": 1}),
         make_batch(), r"another structure.*\n  b\n"),
    ],
)  # fmt: skip
def test_bad_input_when_traced(options, create, loss_fn, batch, words):
    tx = adamw()
    step = make_train_step(loss_fn, tx, "mixed_float16", **options)
    state = start(tx, **create)
    with pytest.raises(ValueError, match=words):
        step(state, batch)
    assert not state.params["w"].is_deleted(), "nothing is lost"


def test_bad_options():
    with pytest.raises(ValueError, match=r"Unknown recipe 'mxfp9'.*Did you mean 'mxfp8'"):
        make_train_step(linear_loss, adamw(), jaxmp.Policy(recipe="mxfp9"))
    for bad in (0, -1, 1.0, True, "2"):
        with pytest.raises(ValueError, match="microbatches is"):
            make_train_step(linear_loss, adamw(), "float32", microbatches=bad)
    for bad in (1.0, -0.1, 2):
        with pytest.raises(ValueError, match="ema_decay is"):
            make_train_step(linear_loss, adamw(), "float32", ema_decay=bad)
    with pytest.raises(ValueError, match=r"Leaf 'f' is of type .*cannot"):
        TrainState.create({"w": jnp.ones(2), "f": print}, adamw())
    step = make_train_step(linear_loss, optax.adam(0.1), "float32")
    with pytest.raises(ValueError, match=r"wrap the optimizer, tx = jaxmp.mixed_precision"):
        step(start(optax.adam(0.1)), make_batch())


def mesh_of(axis_type):
    return jax.make_mesh((4,), ("data",), axis_types=(axis_type,))


@pytest.mark.parametrize("axis_type", list(jax.sharding.AxisType)[:2], ids=str)
@pytest.mark.parametrize("k", [1, 4])
def test_a_sharded_batch_stays_sharded_and_the_step_compiles_once(axis_type, k):
    """Microbatches must not gather the batch, and a state on a mesh is a fixed point."""
    mesh = mesh_of(axis_type)

    def on_mesh(x, *spec):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.device_put(x, sharding)

    tx = jaxmp.mixed_precision(optax.adam(0.1), "float32")
    step = make_train_step(
        lambda p, b: jnp.mean((b @ p["w"]) ** 2), tx, "float32", microbatches=k, donate=False
    )
    weights, batch = jnp.full((64, 64), 0.1), jnp.asarray(np.random.randn(64, 64), jnp.float32)
    _, want = step(TrainState.create({"w": weights}, tx), batch)
    step = make_train_step(lambda p, b: jnp.mean((b @ p["w"]) ** 2), tx, "float32", microbatches=k)
    state, sharded = TrainState.create({"w": on_mesh(weights)}, tx), on_mesh(batch, "data")
    text = step.lower(state, sharded).compile().as_text()
    assert "all-gather" not in text
    assert f"f32[{16 // k},64]" in text, "each device computes its own rows"
    before = jax.tree.map(lambda x: x.sharding, state)
    state, info = step(state, sharded)
    np.testing.assert_allclose(info.loss, want.loss, rtol=1e-5)
    for _ in range(2):
        state, info = step(state, sharded)
    assert step._cache_size() == 1
    assert jax.tree.map(lambda x: x.sharding, state) == before


def test_a_state_on_one_chosen_device_compiles_once():
    device = jax.devices()[2]
    tx = adamw()
    params = jax.device_put({"w": jnp.full((4, 2), 0.5)}, device)
    state = TrainState.create(params, tx, rng=jax.random.key(0), ema=True)
    assert {leaf.devices().copy().pop() for leaf in jax.tree.leaves(state)} == {device}
    step = make_train_step(lambda p, b, rng: linear_loss(p, b), tx, "mixed_float16", ema_decay=0.9)
    for i in range(3):
        state, _ = step(state, jax.device_put(make_batch(i), device))
    assert step._cache_size() == 1


def test_per_example_metrics_keep_the_order_of_the_batch():
    tx = jaxmp.mixed_precision(optax.sgd(0.0), "float32")

    def loss_fn(params, batch):
        return LossOutput(jnp.mean(params["w"]), metrics={"x": batch["x"][:, 0]})

    for k in (1, 2, 8):
        step = make_train_step(loss_fn, tx, "float32", microbatches=k, donate=False)
        _, info = step(start(tx), make_batch())
        np.testing.assert_array_equal(info.metrics["x"], make_batch()["x"][:, 0])


@pytest.mark.parametrize("k", [1, 2])
def test_metrics_do_not_overflow_in_their_own_dtype(k):
    values = {
        "u8": jnp.uint8(200),
        "i16": jnp.int16(30000),
        "f16": jnp.float16(60000),
        "f8": jnp.asarray(400, jnp.float8_e4m3fn),
        "python": 1.5,
    }
    tx = adamw("p=f32,c=f16,o=f16")
    step = make_train_step(
        lambda p, b: LossOutput(linear_loss(p, b), weight=70000.0, metrics=values),
        tx, "p=f32,c=f16,o=f16", microbatches=k,
    )  # fmt: skip
    _, info = step(start(tx), make_batch())
    got = {name: (float(x), str(x.dtype)) for name, x in info.metrics.items()}
    assert got == {
        "u8": (200 * k, "uint32"),
        "i16": (30000 * k, "int32"),
        "f16": (60000, "float32"),
        "f8": (jnp.asarray(400, jnp.float8_e4m3fn), "float32"),
        "python": (1.5, "float32"),
    }


@pytest.mark.parametrize("k", [1, 2])
def test_half_and_odd_leaves_in_the_model_state(k):
    model_state = {
        "half": jnp.ones(2, jnp.bfloat16),
        "fp8": jnp.ones(2, jnp.float8_e4m3fn),
        "n": jnp.int32(1),
        "flag": jnp.array(True),
        "key": jax.random.key(0),
    }

    def loss_fn(params, batch, *, model_state):
        assert model_state["half"].dtype == jnp.bfloat16, "reaches the function uncast"
        new = model_state | {"half": model_state["half"] * 2, "n": model_state["n"] + 1}
        return LossOutput(linear_loss(params, batch), model_state=new)

    tx = adamw("mixed_bfloat16")
    state = start(tx, model_state=model_state)
    state, _ = make_train_step(loss_fn, tx, "mixed_bfloat16", microbatches=k)(state, make_batch())
    assert int(state.model_state["n"]) == 1 + k
    assert float(state.model_state["half"][0]) == 2**k
    assert {n: x.dtype for n, x in state.model_state.items()} == {
        n: x.dtype for n, x in model_state.items()
    }


def test_parameters_may_hold_fp8_leaves():
    """Case B44's kind: an fp8 leaf has no gradient and is left alone."""
    tx = adamw("mixed_bfloat16")
    params = {"w": jnp.full((4, 2), 0.5), "f8": jnp.ones(2, jnp.float8_e4m3fn)}
    state = TrainState.create(params, tx, ema=True)
    step = make_train_step(linear_loss, tx, "mixed_bfloat16", microbatches=2, ema_decay=0.9)
    state, info = step(state, make_batch())
    assert state.params["f8"].dtype == state.ema_params["f8"].dtype == jnp.float8_e4m3fn
    assert not bool(info.skipped)


def test_flax_nnx_batch_norm_as_model_state():
    """Case B26's kind: batch statistics are carried, and restored on a skip."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.out = nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x):
            return self.out(self.norm(x))

    graphdef, params, stats = nnx.split(Net(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def loss_fn(params, batch, *, model_state):
        model = nnx.merge(graphdef, params, model_state)
        loss = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        return LossOutput(loss, model_state=nnx.state(model, nnx.BatchStat))

    with jax.numpy_dtype_promotion("standard"):  # Flax promotes within its layers
        for k in (1, 2):
            tx = adamw("mixed_bfloat16")
            step = make_train_step(loss_fn, tx, "mixed_bfloat16", microbatches=k, donate=False)
            state = TrainState.create(params, tx, model_state=stats)
            state, info = step(state, make_batch())
            assert not bool(info.skipped)
            moved = jax.tree.leaves(state.model_state)
            assert not np.array_equal(moved[0], jax.tree.leaves(stats)[0])
            bad = make_batch() | {"y": make_batch()["y"].at[0].set(jnp.nan)}
            skipped, info = step(state, bad)
            assert bool(info.skipped)
            assert_same_bits(jax.tree.leaves(skipped.model_state), moved)


def test_the_value_is_passed_if_asked_for():
    chain = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, cooldown=0))
    tx = jaxmp.mixed_precision(chain, "float32")
    step = make_train_step(lambda p, b: jnp.sum(p["w"]) * 0 + 1, tx, "float32", pass_value=True)
    state = start(tx)
    for _ in range(5):
        state, _ = step(state, make_batch())
    assert float(get_mixed_precision_state(state).inner_state[1].scale) < 1


def test_leaves_of_another_length_are_not_split_silently():
    tx = adamw("float32")
    step = make_train_step(linear_loss, tx, "float32", microbatches=2)
    with pytest.raises(ValueError, match=r"leading axes: '.*' of . and '.*' of .\. Each example"):
        step(start(tx), make_batch() | {"class_weights": jnp.ones(2)})


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            lambda p, b: LossOutput(linear_loss(p, b), weight=jnp.sum(b["x"]).astype(jnp.float16)),
            r"weight is float16, in",
        ),
        (lambda p, b: LossOutput(linear_loss(p, b), weight="a"), "weight is str, but"),
        (lambda p, b: LossOutput(linear_loss(p, b), weight=1j), r"weight is complex64\[\], but"),
        (
            lambda p, b: LossOutput(linear_loss(p, b), metrics={"k": jax.random.key(0)}),
            "Metric 'k'",
        ),
        (lambda p, b: (linear_loss(p, b), {}), r"The loss is tuple.*LossOutput\(loss, metrics"),
    ],
)
def test_bad_loss_outputs(output, words):
    tx = adamw()
    with pytest.raises(ValueError, match=words):
        make_train_step(output, tx, "mixed_float16")(start(tx), make_batch())


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (
            {"a": jnp.ones(2, jnp.complex64), "n": jnp.int32(0)},
            r"'a' is complex64\[2\], but was float32\[2\]",
        ),
        ({"a": jnp.ones(2), "n": jnp.float32(0.7)}, r"'n' is float32\[\], but was int32\[\]"),
        ({"a": jnp.ones(3), "n": jnp.int32(0)}, r"'a' is float32\[3\], but was float32\[2\]"),
    ],
)
def test_a_model_state_keeps_its_shapes_and_kinds_of_numbers(new, words):
    """Case B05's kind: no imaginary part and no fraction is dropped silently."""
    tx = adamw()
    step = make_train_step(
        lambda p, b, model_state: LossOutput(linear_loss(p, b), model_state=new),
        tx,
        "mixed_float16",
    )
    state = start(tx, model_state={"a": jnp.zeros(2), "n": jnp.int32(0)})
    with pytest.raises(ValueError, match=words):
        step(state, make_batch())


def test_create_rejects_what_is_no_state():
    with pytest.raises(ValueError, match="rng is 5, but must be a PRNG key"):
        start(adamw(), rng=5)
    with pytest.raises(ValueError, match=r"'w' is a ShapeDtypeStruct.*jax.eval_shape"):
        TrainState.create({"w": jax.ShapeDtypeStruct((2,), jnp.float32)}, adamw())
    shapes = jax.eval_shape(lambda: start(adamw(), rng=jax.random.PRNGKey(0)))
    assert shapes.params["w"].shape == (4, 2)
