"""Delayed scaling: its state follows what products see, through every transformation."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from jax import lax

import jaxmp
import jaxmp.linen
from jaxmp import fp8
from jaxmp import nnx as jaxmp_nnx
from jaxmp.fp8._meter import BINS, counts, largest_of, metered
from tests.autocast_tools import BF16, F32, eqns_in, normal

RECIPE = fp8.DelayedScaling(history=4)
DELAYED, FP8 = jaxmp.Policy(recipe=RECIPE), "mixed_float8"
X, W = normal(0, 32, 64), normal(1, 64, 48)
FIRST_SCALES = (2.0**-4, 2.0**-6, 2.0**-24)


def limit(x):
    """The largest number, rounded up to 1.75 times a power of two."""
    largest = np.abs(np.asarray(x, np.float64)).max()
    return 1.75 * 2.0 ** np.ceil(np.log2(largest / 1.75))


def loss_fn(w, x):
    return jnp.mean(jnp.tanh(x @ w)) * 64


def gradient_of_result(w, x):
    _, pull = jax.vjp(lambda y: jnp.mean(jnp.tanh(y)) * 64, (x.astype(BF16) @ w.astype(BF16)))
    (g,) = pull(jnp.float32(1).astype(BF16))
    return g


def seen_by(fun, state, *args, policy=DELAYED):
    _, grads, seen = jax.jit(jaxmp.value_and_grad(fun, policy, fp8_state=state))(*args)
    return grads, seen


def test_the_state_follows_what_products_see():
    state = jaxmp.init_fp8_state(loss_fn, DELAYED, W, X)
    product = state["product"]
    g = limit(gradient_of_result(W, X))
    assert product.history.shape == (3, 4)
    np.testing.assert_array_equal(product.history[:, 0], [limit(X), limit(W), g])
    np.testing.assert_array_equal(product.history[:, 1:], 0)
    np.testing.assert_array_equal(product.scale, [limit(X) / 448, limit(W) / 448, g / 57344])
    # The largest of the last four steps, then forgotten.
    for factor, largest in ((8, 8), (1, 8), (1, 8), (1, 8), (1, 1)):
        grads, seen = seen_by(loss_fn, state, W, factor * X)
        state = fp8.update_state(state, seen)
        assert float(state["product"].scale[0]) == largest * limit(X) / 448
        assert grads.dtype == F32


def test_scales_of_the_steps_before_are_used():
    state = jaxmp.init_fp8_state(loss_fn, DELAYED, W, X)

    def product(x, w, scale):
        y = fp8.dequantize(fp8.quantize(x, scale=scale[0])) @ fp8.dequantize(
            fp8.quantize(w, scale=scale[1])
        )
        return jnp.mean(jnp.tanh(y)) * 64

    # 16 times as large as the scale knows: saturated.
    run = jaxmp.value_and_grad(loss_fn, DELAYED, fp8_state=state)
    loss, _, _ = run(W, 16 * X)
    scale = state["product"].scale
    np.testing.assert_allclose(loss, product(16 * X, W, scale), atol=64 * 2**-8)
    assert abs(float(loss) - float(product(16 * X, W, 16 * scale))) > 0.5
    # And with a margin not.
    wide = jaxmp.Policy(recipe=fp8.DelayedScaling(history=4, margin=4))
    state = jaxmp.init_fp8_state(loss_fn, wide, W, X)
    np.testing.assert_array_equal(state["product"].scale, 16 * scale)
    # Of what was never seen the scale stays, without a margin too.
    unseen = jaxmp.init_fp8_state(loss_fn, wide, W, 0 * X)["product"].scale[0]
    assert float(unseen) == FIRST_SCALES[0]


def test_wgrad_in_the_compute_dtype_has_no_scales():
    policy = jaxmp.Policy(recipe=fp8.DelayedScaling(history=4, high_precision_wgrad=True))
    state = jaxmp.init_fp8_state(loss_fn, policy, W, X)
    grads, seen = seen_by(loss_fn, state, W, X, policy=policy)
    # The scales of the first step are those of now.
    current = jaxmp.Policy(recipe=fp8.CurrentScaling(high_precision_wgrad=True))
    _, right = jax.jit(jaxmp.value_and_grad(loss_fn, current))(W, X)
    np.testing.assert_allclose(grads, right, rtol=1e-6, atol=1e-6)
    assert float(seen["product"][2].sum()) == 1


def test_most_recent_and_what_is_not_finite():
    recent = jaxmp.Policy(recipe=fp8.DelayedScaling(history=4, amax="most_recent"))
    state = jaxmp.init_fp8_state(loss_fn, recent, W, 8 * X)
    _, seen = seen_by(loss_fn, state, W, X, policy=recent)
    assert float(fp8.update_state(state, seen)["product"].scale[0]) == limit(X) / 448
    # Of f32 the largest is not 1.75 times a power of two.
    top = 1.75 * 2.0**127
    for bad, largest in ((jnp.nan, X), (jnp.inf, X), (1e-38, X), (3e38, top)):
        _, seen = seen_by(loss_fn, state, W, X.at[0, 0].set(bad), policy=recent)
        new = fp8.update_state(state, seen)["product"]
        assert np.isfinite(new.scale).all()
        assert (new.scale > 0).all()
        assert float(new.history[0, 0]) == limit(largest)
    # All zeros say nothing, and a skipped step changes nothing.
    for seen, finite in (
        (seen_by(loss_fn, state, W, 0 * X, policy=recent)[1], True),
        (seen_by(loss_fn, state, W, X, policy=recent)[1], False),
    ):
        new = fp8.update_state(state, seen, finite)["product"]
        np.testing.assert_array_equal(new.history[0], state["product"].history[0])
        np.testing.assert_array_equal(new.scale[0], state["product"].scale[0])


def layers(ws, x, step):
    x, _ = lax.scan(lambda x, w: (step(x, w), None), x, ws)
    return jnp.mean(x**2)


def layer(x, w):
    return jnp.tanh(x @ w)


WS = normal(2, 3, 64, 64) / 8 * jnp.array([0.25, 1.0, 4.0])[:, None, None]


class TestTransformations:
    @pytest.mark.parametrize(
        "step",
        [
            layer,
            jax.jit(layer),
            jax.checkpoint(layer),
            jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable),
            lambda x, w: lax.cond(x[0, 0] < 9, layer, lambda x, w: x, x, w),
        ],
        ids=["plain", "jit", "remat", "remat_policy", "cond"],
    )
    def test_each_layer_of_a_scan_has_a_history(self, step):
        fun = functools.partial(layers, step=step)
        state = jaxmp.init_fp8_state(fun, DELAYED, WS, X)
        (product,) = state.values()
        assert product.history.shape == (3, 3, 4)
        np.testing.assert_array_equal(product.history[:, 1, 0], [limit(w) for w in WS])
        inputs = [X]
        for w in WS[:-1]:
            inputs.append(layer(inputs[-1], w))
        np.testing.assert_array_equal(product.history[:, 0, 0], [limit(x) for x in inputs])
        assert (product.history[:, 2, 0] > 0).all()
        grads, seen = seen_by(fun, state, WS, X)
        assert jax.tree.map(jnp.shape, seen) == dict.fromkeys(state, (3, 3, 256))
        plain = jax.grad(fun)(WS, X)
        for own, right in zip(grads, plain, strict=True):
            assert np.vdot(own, right) > 0.95 * np.linalg.norm(own) * np.linalg.norm(right)

    def test_turns_with_one_weight_share_a_state(self):
        def recurrent(w, xs):
            def turn(h, x):
                return jnp.tanh(h + x @ w[:64]), x @ w[64:]

            h, ys = lax.scan(turn, jnp.zeros((32, 64)), xs)
            return jnp.mean(h**2) + jnp.mean(ys)

        w = jnp.concatenate([normal(3, 64, 64), normal(4, 64, 64)])
        xs = normal(5, 7, 32, 64) * jnp.arange(1.0, 8.0)[:, None, None]
        state = jaxmp.init_fp8_state(recurrent, DELAYED, w, xs)
        assert sorted(state) == ["product", "product_2"]
        for product in state.values():
            assert product.history.shape == (3, 4)
            assert float(product.history[0, 0]) == limit(xs)

    def test_a_branch_that_did_not_run_keeps_its_history(self):
        def fun(w, x, flag):
            return jnp.mean(lax.cond(flag, lambda: x @ w, lambda: (2 * x) @ (4 * w)))

        with pytest.warns(UserWarning, match="nothing was seen:\n  product\n"):
            state = jaxmp.init_fp8_state(fun, DELAYED, W, X, True)
        idle, ran = state.values()
        assert float(ran.history[0, 0]) == limit(X)
        np.testing.assert_array_equal(idle.history, 0)
        np.testing.assert_array_equal(idle.scale, FIRST_SCALES)
        _, seen = seen_by(fun, state, W, X, False)
        idle, new_ran = fp8.update_state(state, seen).values()
        np.testing.assert_array_equal(new_ran.history, ran.history)
        assert float(idle.history[1, 0]) == limit(4 * W)

    def test_of_several_uses_the_largest_counts(self):
        @jax.jit
        def head(w, x):
            return jnp.mean(x @ w)

        def fun(w, x):
            return head(w, x) + head(w, 32 * x)

        state = jaxmp.init_fp8_state(fun, DELAYED, W, X)
        assert [float(p.history[0, 0]) for p in state.values()] == [limit(X), limit(32 * X)]
        summed = fp8.update_state(
            {"a": state["product"]}, {"a": sum(seen_by(fun, state, W, X)[1].values())}
        )
        assert float(summed["a"].history[0, 0]) == limit(32 * X)

    def test_vmap_and_forward_mode(self):
        xs = jnp.stack([X, 16 * X])

        def fun(w, xs):
            return jnp.mean(jax.vmap(lambda x: jnp.tanh(x @ w))(xs))

        state = jaxmp.init_fp8_state(fun, DELAYED, W, xs)
        assert float(state["product"].history[0, 0]) == limit(16 * X)
        state = jaxmp.init_fp8_state(loss_fn, DELAYED, W, X)
        run = jaxmp.value_and_grad(loss_fn, DELAYED, fp8_state=state)
        _, _, seen = jax.vmap(run, (None, 0))(W, xs)
        total = jax.tree.map(lambda counts: counts.sum(0), seen)
        assert float(fp8.update_state(state, total)["product"].history[0, 0]) == limit(16 * X)
        loss, tangent = jax.jvp(lambda w: run(w, X)[0], (W,), (W,))
        assert np.isfinite([loss, tangent]).all()

    @pytest.mark.parametrize("own", [False, True])
    def test_a_meter_under_vmap(self, own):
        xs = jnp.stack([X, 16 * X])
        meter = jnp.zeros((2, 3, BINS) if own else (3, BINS))

        def total(meter):
            def one(x, meter):
                seen = jnp.stack([counts(x), counts(2 * x)])
                return metered(4 * x, meter, seen, every=False)

            return jnp.sum(jax.vmap(one, (0, 0 if own else None))(xs, meter) * xs)

        largest = largest_of(jax.grad(total)(meter))
        each = np.array([[limit(x), limit(2 * x), limit(x)] for x in xs])
        np.testing.assert_array_equal(largest, each if own else each[1])

    def test_on_a_mesh_and_in_a_shard_map(self):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        x = X.at[9, 0].set(1e3)
        rows = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data", None)))
        alone = jaxmp.init_fp8_state(loss_fn, DELAYED, W, x)

        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P()
        )
        def local(w, x):
            return lax.pmean(loss_fn(w, x), "data")

        tall = jax.device_put(jnp.tile(x, (2, 1)), rows.sharding)
        for fun, x in ((loss_fn, rows), (local, tall)):
            state = jaxmp.init_fp8_state(fun, DELAYED, W, x)
            (product,) = state.values()
            for slot in (0, 1):
                assert product.history[slot, 0] == alone["product"].history[slot, 0]
            grads, _ = seen_by(fun, state, W, x)
            assert np.isfinite(grads).all()


def mlp_loss(params, batch, **_):
    with jax.named_scope("inner"):
        h = jnp.tanh(batch["x"] @ params["in"])
    with jax.named_scope("outer"):
        return jnp.mean((h @ params["out"] - batch["y"]) ** 2)


def train_state(policy=DELAYED, **options):
    params = {"in": W / 8, "out": W.T / 7}
    batch = {"x": X, "y": jnp.tanh(X @ normal(7, 64, 64) / 8)}
    tx = jaxmp.mixed_precision(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1)), policy
    )
    state = jaxmp.TrainState.create(
        params, tx, fp8_state=jaxmp.init_fp8_state(mlp_loss, policy, params, batch), **options
    )
    return state, tx, batch


class TestTrainStep:
    def test_it_learns_and_the_state_is_a_fixed_point(self):
        state, tx, batch = train_state(ema=True)
        step = jaxmp.make_train_step(mlp_loss, tx, DELAYED, ema_decay=0.9)
        shapes = jax.tree.map(jax.typeof, state)
        losses = []
        for _ in range(60):
            state, info = step(state, batch)
            losses.append(float(info.loss))
        assert losses[-1] < losses[0] / 4
        assert jax.tree.map(jax.typeof, state) == shapes
        assert step._cache_size() == 1
        assert sorted(state.fp8_state) == ["inner", "outer"]
        for product in state.fp8_state.values():
            assert (product.history > 0).all()

    def test_optimizers_do_not_see_it(self):
        state, tx, batch = train_state()
        step = jaxmp.make_train_step(mlp_loss, tx, DELAYED, donate=False)
        _, info = step(state, batch)
        grad_fn = jaxmp.value_and_grad(mlp_loss, DELAYED, fp8_state=state.fp8_state)
        _, grads, _ = jax.jit(grad_fn)(state.params, batch)
        assert jax.tree.structure(grads) == jax.tree.structure(state.params)
        np.testing.assert_allclose(info.grad_norm, optax.tree.norm(grads), rtol=1e-6)

    def test_microbatches_take_the_largest(self):
        state, tx, batch = train_state()
        # The cards are dealt to four: the second gets the large one.
        batch["x"] = batch["x"].at[1].multiply(64)
        step = jaxmp.make_train_step(mlp_loss, tx, DELAYED, microbatches=2, donate=False)
        new, _ = step(state, batch)
        inner = new.fp8_state["inner"]
        assert float(inner.history[0, 0]) == limit(batch["x"])
        assert float(inner.history[0, 1]) == float(state.fp8_state["inner"].history[0, 0])

    def test_a_skipped_step_keeps_it_bit_for_bit(self):
        state, tx, batch = train_state()
        step = jaxmp.make_train_step(mlp_loss, tx, DELAYED, donate=False)
        new, info = step(state, batch | {"x": batch["x"].at[0, 0].set(jnp.nan)})
        assert bool(info.skipped)
        jax.tree.map(np.testing.assert_array_equal, new.fp8_state, state.fp8_state)

    @pytest.mark.parametrize("scale", [2.0**15, 1000.0, 2.0**-3])
    def test_the_loss_scale_is_not_seen(self, scale):
        policy = jaxmp.Policy(compute_dtype="float16", recipe=RECIPE)
        plain = jaxmp.init_fp8_state(loss_fn, policy, W, X)
        grad_fn = jaxmp.value_and_grad(
            loss_fn, policy, loss_scale=jaxmp.StaticLossScale(scale), fp8_state=plain
        )
        _, grads, seen = jax.jit(grad_fn)(W, X)
        right = jax.grad(loss_fn)(W, X)
        # As far from float32 as with the scales of now.
        _, current = jaxmp.value_and_grad(
            loss_fn,
            jaxmp.Policy(compute_dtype="float16", recipe="current"),
            loss_scale=jaxmp.StaticLossScale(scale),
        )(W, X)
        error, bound = (np.linalg.norm(found - right) for found in (grads, current))
        assert error <= 1.2 * bound
        new = fp8.update_state(plain, seen)["product"].history[:, 0]
        factors = np.asarray(new / plain["product"].history[:, 0])
        np.testing.assert_array_equal(factors[:2], 1)
        # Rounded up to a power of two, where the loss scale is none.
        assert factors[2] == (1 if np.log2(scale) % 1 == 0 else 2)

    def test_half_precision_with_loss_scale(self):
        policy = jaxmp.Policy(compute_dtype="float16", recipe=RECIPE)
        state, tx, batch = train_state(policy)
        step = jaxmp.make_train_step(mlp_loss, tx, policy)
        for _ in range(5):
            state, info = step(state, batch)
        assert not bool(info.skipped)
        assert float(info.loss) < 1

    def test_checkpoints(self, tmp_path):
        state, tx, batch = train_state()
        step = jaxmp.make_train_step(mlp_loss, tx, DELAYED, donate=False)
        for _ in range(3):
            state, _ = step(state, batch)
        jaxmp.checkpoint.save(tmp_path / "a", state)
        fresh, _, _ = train_state()
        restored = jaxmp.checkpoint.restore(tmp_path / "a", fresh)
        after, again = (step(each, batch)[0] for each in (state, restored))
        jax.tree.map(np.testing.assert_array_equal, after, again)

    def test_the_same_loop_without_fp8(self):
        state, tx, batch = train_state("mixed_bfloat16")
        assert state.fp8_state is None
        state, _ = jaxmp.make_train_step(mlp_loss, tx, "mixed_bfloat16")(state, batch)
        assert state.fp8_state is None


class Mlp(nnx.Module):
    def __init__(self):
        self.hidden = nnx.Linear(64, 48, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(1))
        self.head = nnx.Linear(48, 64, rngs=nnx.Rngs(2))

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.hidden(x))))


def test_nnx_models():
    model = jaxmp_nnx.wrap(Mlp(), DELAYED, rules={"head": "mixed_bfloat16"})

    def model_loss(model, x):
        return jnp.mean((model(x) - x) ** 2)

    state = jaxmp_nnx.init_fp8_state(model_loss, DELAYED, model, X)
    assert list(state) == ["hidden"]
    optimizer = nnx.Optimizer(
        model, jaxmp.mixed_precision(optax.adam(1e-2), DELAYED), wrt=nnx.Param
    )

    @nnx.jit
    def step(model, optimizer, state, x):
        grad_fn = jaxmp_nnx.value_and_grad(model_loss, DELAYED, fp8_state=state)
        loss, grads, seen = grad_fn(model, x)
        optimizer.update(model, grads)
        return loss, fp8.update_state(state, seen)

    losses = []
    for _ in range(20):
        loss, state = step(model, optimizer, state, X)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2
    assert (state["hidden"].history > 0).all()


def test_linen_models():
    model = nn.Sequential([nn.Dense(48), nn.relu, nn.Dense(64)])
    params = model.init(jax.random.key(0), X)

    def model_loss(params, x):
        return jnp.mean((model.apply(params, x) - x) ** 2)

    policy = DELAYED.with_rules({"layers_2": "mixed_bfloat16"})
    state = jaxmp.init_fp8_state(model_loss, policy, params, X)
    assert list(state) == ["Sequential.layers_0"]
    stored = serialization.from_bytes(state, serialization.to_bytes(state))
    jax.tree.map(np.testing.assert_array_equal, stored, state)


def test_rules_choose_and_current_has_no_state():
    policy = jaxmp.get_policy("mixed_float8").with_rules({"outer": DELAYED})
    state, _, batch = train_state(policy)
    assert list(state.fp8_state) == ["outer"]
    assert jaxmp.init_fp8_state(mlp_loss, "mixed_float8", state.params, batch) is None
    specs = jax.eval_shape(lambda: (state.params, batch))
    untouched = jaxmp.init_fp8_state(mlp_loss, policy, *specs)
    assert jax.tree.map(jnp.shape, untouched) == jax.tree.map(jnp.shape, state.fp8_state)
    np.testing.assert_array_equal(untouched["outer"].scale, FIRST_SCALES)


def test_names_that_numbers_would_make_twice():
    def fun(params, x):
        with jax.named_scope("mlp"):
            x = jnp.tanh(x @ params["a"]) @ params["b"]
        with jax.named_scope("mlp_2"):
            x = jnp.tanh(x) @ params["c"]
        return jnp.mean(x**2)

    params = {name: normal(i, 64, 64) / 8 for i, name in enumerate("abc")}
    state = jaxmp.init_fp8_state(fun, DELAYED, params, X)
    assert sorted(state) == ["mlp", "mlp_2", "mlp_3"]
    assert float(state["mlp_2"].history[1, 0]) == limit(params["c"])
    tx = jaxmp.mixed_precision(optax.sgd(1.0), FP8)
    news = [
        jaxmp.make_train_step(fun, tx, FP8, microbatches=count, donate=False)(
            jaxmp.TrainState.create(params, tx), X
        )[0].params
        for count in (1, 2)
    ]
    grads = jax.grad(fun)(params, X)
    for name, grad in grads.items():
        for new in news:
            error = np.linalg.norm(params[name] - new[name] - grad)
            assert error < 0.2 * np.linalg.norm(grad), name


def test_weights_that_begin_as_zeros():
    def fun(params, x):
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["head"] - x) ** 2)

    params = {"in": W / 8, "head": jnp.zeros((48, 64))}
    state = jaxmp.init_fp8_state(fun, DELAYED, params, X)
    tx = optax.adam(1e-3)
    opt_state = tx.init(params)
    for _ in range(3):
        _, grads, seen = jaxmp.value_and_grad(fun, DELAYED, fp8_state=state)(params, X)
        right = jax.grad(fun)(params, X)
        for found, wanted in zip(*map(jax.tree.leaves, (grads, right)), strict=True):
            assert np.linalg.norm(found - wanted) <= 0.25 * np.linalg.norm(wanted)
        state = fp8.update_state(state, seen)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)


@pytest.mark.parametrize("options", [{"inline": True}, {"donate_argnums": 1}])
def test_jits_with_options_that_change_no_number(options):
    inner = jax.jit(lambda w, x: jnp.tanh(x @ w), **options)
    state = jaxmp.init_fp8_state(lambda w, x: jnp.mean(inner(w, x)), DELAYED, W, X)
    assert list(state) == ["product"]
    assert (state["product"].history[:, 0] > 0).all()


def test_products_stand_where_they_stood():
    state, tx, batch = train_state()
    step = jaxmp.make_train_step(mlp_loss, tx, DELAYED, microbatches=2)
    report = jaxmp.audit(step, state, batch, target=None, policy=DELAYED)
    assert {row.path for row in report.products} == {"inner", "outer"}
    assert len(report.products) == 5
    assert not report.traps


def test_without_a_state_scales_are_current():
    x = 100 * X
    alone = jaxmp.autocast(jnp.matmul, DELAYED)(x, W)
    np.testing.assert_array_equal(alone, jaxmp.autocast(jnp.matmul, "mixed_float8")(x, W))


def test_bad_input():
    with pytest.raises(ValueError, match="'delayed\\(history=4\\)' has a state"):
        jaxmp.value_and_grad(loss_fn, DELAYED)
    state, tx, batch = train_state()
    other = jaxmp.init_fp8_state(loss_fn, DELAYED, W, X)
    lines = r"does not fit.*\n  inner: has no state\n  outer: has no.*\n  product: has a state, but"
    with pytest.raises(ValueError, match=lines):
        jaxmp.value_and_grad(mlp_loss, DELAYED, fp8_state=other)(state.params, batch)
    lines = r"does not fit[^$]*no such matmul[^$]*batch of this size"
    with pytest.warns(UserWarning, match="takes none"), pytest.raises(ValueError, match=lines):
        jaxmp.value_and_grad(loss_fn, DELAYED, fp8_state=other)(W, X[:24])
    e5m2 = jaxmp.Policy(recipe=fp8.DelayedScaling(history=4, forward="e5m2"))
    with pytest.raises(ValueError, match=r"of the recipe delayed\(history=4\), but the policy"):
        jaxmp.value_and_grad(loss_fn, e5m2, fp8_state=other)(W, X)
    for policy in ("mixed_float8", "mixed_mxfp8", "mixed_bfloat16"):
        with pytest.raises(ValueError, match="no recipe with a state"):
            jaxmp.value_and_grad(loss_fn, policy, fp8_state=other)
    scanned = functools.partial(layers, step=layer)
    with pytest.raises(ValueError, match=r"state for layers \(\), but layers \(3,\)"):
        jaxmp.value_and_grad(scanned, DELAYED, fp8_state=other)(WS, X)
    with pytest.raises(ValueError, match="only in one of both:\n  inner\n"):
        fp8.update_state(other, {"inner": jnp.zeros((3, 256))})
    stateless, _, _ = train_state("mixed_bfloat16")
    with pytest.raises(ValueError, match="has a state"):
        jaxmp.make_train_step(mlp_loss, tx, DELAYED)(stateless, batch)


def tied_loss(params, batch):
    x, _ = lax.scan(lambda x, w: (layer(x, w), None), batch["x"], params["layers"])
    return jnp.mean((x @ params["out"].reshape(64, 48) @ params["out"].reshape(64, 48).T) ** 2)


@pytest.mark.parametrize(
    "recipe", [fp8.CurrentScaling(), RECIPE, fp8.CurrentScaling(scaling="row"), fp8.BlockScaling()]
)
def test_microbatches_share_the_codes_of_weights(recipe):
    policy = jaxmp.Policy(recipe=recipe)
    params = {"layers": WS, "out": W.reshape(8, 8, 48) / 8}
    batch = {"x": normal(8, 64, 64)}
    if isinstance(recipe, fp8.BlockScaling):
        params["out"] = normal(9, 8, 8, 48)
    tx = jaxmp.mixed_precision(optax.sgd(1.0), policy)
    fp8_state = jaxmp.init_fp8_state(tied_loss, policy, params, {"x": X})
    state = jaxmp.TrainState.create(params, tx, fp8_state=fp8_state)
    step = jaxmp.make_train_step(tied_loss, tx, policy, microbatches=2, donate=False)
    products = [
        eqn.params
        for eqn in eqns_in(jax.make_jaxpr(step)(state, batch))
        if eqn.primitive.name == "mixed_product" and eqn.params["recipe"] is not None
    ]
    is_shared = "row" not in str(recipe) and not isinstance(recipe, fp8.BlockScaling)
    for params_of in products:
        assert ("codes" in params_of["extras"]) == (is_shared and "w" in params_of["roles"])
    new, _ = step(state, batch)
    # The same as by hand, where every microbatch quantizes its weights.
    grad_fn = jax.jit(jaxmp.value_and_grad(tied_loss, policy, fp8_state=fp8_state))
    halves = [grad_fn(params, {"x": batch["x"][i::2]}) for i in range(2)]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, halves[0][1], halves[1][1])
    for leaf, old, grad in zip(*map(jax.tree.leaves, (new.params, params, mean)), strict=True):
        np.testing.assert_allclose(leaf, old - grad, atol=1e-5 * float(abs(grad).max()) + 1e-6)
    if fp8_state is not None:
        seen = jax.tree.map(jnp.add, halves[0][2], halves[1][2])
        right = fp8.update_state(fp8_state, seen)
        jax.tree.map(np.testing.assert_array_equal, new.fp8_state, right)
