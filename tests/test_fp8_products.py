"""Matmuls in fp8: which gain, what all three products take and give, under every transformation."""

import collections
import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxmp
from jaxmp import fp8, linen
from jaxmp import nnx as jaxmp_nnx
from jaxmp.audit import audit
from tests import reference_gpt
from tests.autocast_tools import BF16, F16, F32, UNIT, eqns_in, normal

FP8 = "mixed_float8"
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


X, W, G = normal(0, 32, 64), normal(1, 64, 48), normal(2, 32, 48)


def exact(fun, lhs, lhs_format, rhs, rhs_format):
    """The product of the quantized operands, in float64."""
    values = (
        np.asarray(fp8.dequantize(fp8.quantize(x, fmt, power_of_two=True)), np.float64)
        for x, fmt in ((lhs, lhs_format), (rhs, rhs_format))
    )
    return fun(*values)


def assert_close(result, wanted, terms, roundings=1):
    """Roundings of the result, and of each of the additions in float32."""
    unit = roundings * UNIT[result.dtype.type]
    bound = (unit + terms * UNIT[F32]) * (np.abs(wanted) + 8 * terms**0.5)
    assert np.all(np.abs(np.asarray(result, np.float64) - wanted) <= bound)


def recipes(fun, *args):
    """Whether each product of floats is quantized, in the order of the program."""
    eqns = eqns_in(jax.make_jaxpr(fun)(*args))
    return [e.params["recipe"] is not None for e in eqns if e.primitive.name == "mixed_product"]


@pytest.mark.parametrize("x_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("out_dtype", [F32, BF16, F16])
def test_all_three_products(x_dtype, out_dtype):
    x, w = X.astype(x_dtype), W

    def fun(x, w):
        return jaxmp.matmul(x, w, policy=FP8, output_dtype=out_dtype)

    y, vjp = jax.vjp(fun, x, w)
    g = G.astype(out_dtype)
    dx, dw = jax.jit(vjp)(g)
    assert (y.dtype, dx.dtype, dw.dtype) == (out_dtype, x_dtype, F32)
    assert_close(y, exact(np.matmul, x, "e4m3", w, "e4m3"), 64)
    assert_close(dx, exact(lambda g, w: g @ w.T, g, "e5m2", w, "e4m3"), 48)
    assert_close(dw, exact(lambda x, g: x.T @ g, x, "e4m3", g, "e5m2"), 32)


def in_blocks(x, fmt, axis):
    """What an operand of a product is, in float64; axis is the contracted one."""
    return np.asarray(fp8.dequantize(fp8.quantize_blocks(x, fmt, axis=axis)), np.float64)


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("out_dtype", [F32, BF16, F16])
def test_all_three_products_of_blocks(fmt, out_dtype):
    x, w, g = normal(0, 32, 64), normal(1, 64, 96), normal(2, 32, 96).astype(out_dtype)
    policy = jaxmp.Policy(recipe=fp8.BlockScaling(fmt))
    y, vjp = jax.vjp(lambda x, w: jaxmp.matmul(x, w, policy=policy, output_dtype=out_dtype), x, w)
    dx, dw = jax.jit(vjp)(g)
    assert (y.dtype, dx.dtype, dw.dtype) == (out_dtype, F32, F32)
    # The weights of nvfp4 have square blocks.
    forward, backward = ((0, 1), (0, 1)) if fmt == "nvfp4" else (0, 1)
    left = functools.partial(in_blocks, fmt=fmt)
    # With a scale for all of a tensor the result is rounded before that scale and after.
    terms = 2 if fmt == "nvfp4" else 1
    assert_close(y, left(x, axis=1) @ left(w, axis=forward), 64, terms)
    assert_close(dx, left(g, axis=1) @ left(w, axis=backward).T, 96, terms)
    assert_close(dw, left(x, axis=0).T @ left(g, axis=0), 32, terms)


def test_blocks_of_several_contracted_axes_and_a_nan():
    x, w = normal(3, 8, 4, 4, 16), normal(4, 4, 16, 2, 32)
    policy = jaxmp.Policy(recipe="mxfp8")
    y = jaxmp.einsum("abkd,kdhe->abhe", x, w, policy=policy, output_dtype=F32)
    flat = in_blocks(x.reshape(32, 64), "mxfp8", 1) @ in_blocks(w.reshape(64, 64), "mxfp8", 0)
    assert_close(y, flat.reshape(8, 4, 2, 32), 64)
    broken = jaxmp.einsum("abkd,kdhe->abhe", x.at[0, 0, 0, 0].set(jnp.nan), w, policy=policy)
    assert np.isnan(broken[0, 0]).all()
    assert np.isfinite(broken[0, 1:]).all()


def test_a_scale_for_each_row():
    rows = X * jnp.logspace(-6, 6, 32)[:, None]
    policies = [jaxmp.Policy(recipe=fp8.CurrentScaling(scaling=s)) for s in ("row", "tensor")]
    own, shared = (
        jaxmp.einsum("abk,kn->abn", rows.reshape(4, 8, 64), W, policy=policy, output_dtype=F32)
        for policy in policies
    )
    left, right = (
        np.asarray(fp8.dequantize(fp8.quantize(x, axis=axis, power_of_two=True)), np.float64)
        for x, axis in ((rows, 1), (W, 0))
    )
    assert_close(own, (left @ right).reshape(4, 8, 48), 64)
    plain = (rows @ W).reshape(4, 8, 48)
    errors = [abs(y - plain).max(axis=(-1,)) / abs(plain).max(axis=-1) for y in (own, shared)]
    assert errors[0].max() < 0.1
    assert errors[1].max() > 0.9


def test_scales_that_are_no_powers_of_two():
    policy = jaxmp.Policy(recipe=fp8.CurrentScaling(power_of_two=False))
    y = jaxmp.matmul(X, W, policy=policy)
    wanted = np.matmul(*(np.asarray(fp8.dequantize(fp8.quantize(x)), np.float64) for x in (X, W)))
    assert_close(y, wanted, 64)


def test_wgrad_in_the_compute_dtype():
    policy = jaxmp.Policy(recipe=fp8.CurrentScaling(high_precision_wgrad=True))

    def loss(x, w, product):
        return jnp.sum(product(x, w).astype(F32) ** 2)

    by_hand = functools.partial(loss, product=functools.partial(jaxmp.matmul, policy=policy))
    assert sorted(recipes(jax.grad(by_hand, (0, 1)), X, W)) == [False, True, True]

    def weight_on_the_left(w, other):
        return loss(w.T, (X @ other).T, jnp.matmul)

    traced = jax.make_jaxpr(jaxmp.value_and_grad(weight_on_the_left, policy, argnums=(0, 1)))
    found = collections.Counter(
        (eqn.params["roles"], eqn.params["recipe"] is not None)
        for eqn in eqns_in(traced(normal(3, 48, 16), W))
        if eqn.primitive.name == "mixed_product"
    )
    # Both products, the gradient of what the second multiplies, and those of both weights.
    roles = collections.Counter(tuple(sorted(pair)) for pair, quantized in found if quantized)
    assert roles == {("w", "x"): 2, ("g", "w"): 1}
    assert sum(not quantized for _, quantized in found.elements()) == 2
    dw = jax.grad(by_hand, 1)(X, W)
    g = 2 * jaxmp.matmul(X, W, policy=policy)
    assert_close(dw, np.float64(X.astype(BF16)).T @ np.float64(g.astype(BF16)), 4096)


def test_a_recipe_needs_a_half_compute_dtype():
    whole = jaxmp.get_policy("recipe=current")
    ruled = jaxmp.get_policy(FP8).with_rules({"head": whole})
    for policy in (whole, ruled):
        with pytest.raises(ValueError, match=r"computes in float32.*use 'compute=bfloat16,"):
            jaxmp.value_and_grad(jnp.matmul, policy)
    jaxmp.autocast(jnp.matmul, jaxmp.get_policy(FP8).with_rules({"head": "float32"}))


def test_recipes_as_text():
    recipe = fp8.DelayedScaling(history=16, strict=True, amax="most_recent")
    policy = jaxmp.Policy(recipe=recipe)
    assert jaxmp.get_policy(str(policy)) == policy
    assert fp8.get_recipe(policy.recipe) == fp8.get_recipe(recipe) == recipe
    spaced = jaxmp.get_policy("c=bf16, recipe = current( min_size = 64, scaling = row )")
    assert fp8.get_recipe(spaced.recipe) == fp8.CurrentScaling(min_size=64, scaling="row")
    assert str(fp8.BlockScaling("nvfp4", min_size=32)) == "nvfp4(min_size=32)"
    ruled = policy.with_rules({"head": jaxmp.Policy(recipe=fp8.BlockScaling())})
    assert jaxmp.get_policy(str(ruled)) == ruled


@dataclasses.dataclass
class Device:
    compute_capability: str
    device_kind: str = "NVIDIA A100"
    platform: str = "gpu"


@pytest.mark.parametrize(
    ("capability", "recipe", "runs"),
    [
        ("8.0", "current", False),
        ("8.9", "current", True),
        ("9.0", "delayed", True),
        ("9.0", "mxfp8", False),
        ("10.0", "mxfp8", True),
        ("12.0", "nvfp4", True),
    ],
)
def test_hardware_without_such_matmuls(capability, recipe, runs):
    device = Device(capability)
    policy = jaxmp.get_policy("mixed_bfloat16").with_rules({"a": jaxmp.Policy(recipe=recipe)})
    if runs:
        assert fp8.runnable(policy, device) == policy
        return
    with pytest.warns(UserWarning, match=f"{capability} < .*computed in bfloat16") as caught:
        found = fp8.runnable(policy, device)
    assert len(caught) == 1
    assert found == jaxmp.get_policy("mixed_bfloat16").with_rules({"a": "mixed_bfloat16"})
    strict = jaxmp.Policy(recipe=f"{recipe}(strict=true)")
    with pytest.raises(ValueError, match="has no such matmuls"):
        fp8.runnable(strict, device)
    cpu = jax.local_devices()[0]
    assert fp8.runnable(strict, cpu) == fp8.runnable(str(strict)) == strict


def test_small_products_are_left():
    policy = jaxmp.Policy(recipe=fp8.CurrentScaling(min_size=48))
    assert recipes(jaxmp.autocast(jnp.matmul, policy), X, W) == [False]
    assert recipes(jaxmp.autocast(jnp.matmul, policy), jnp.tile(X, (2, 1)), W) == [True]


def test_dtypes_that_the_audit_reports():
    def loss(x, w):
        return jnp.sum(jaxmp.matmul(x, w, policy=FP8).astype(F32) ** 2)

    report = audit(jax.grad(loss, (0, 1)), X, W, target=None, policy=FP8)
    found = [tuple(sorted(row.operand_dtypes)) for row in report.products]
    assert sorted(found) == [(E4M3, E4M3), (E4M3, E5M2), (E4M3, E5M2)]
    assert {row.accumulation_dtype for row in report.products} == {"float32"}


@pytest.mark.parametrize(
    ("lhs", "rhs", "dims", "gains"),
    [
        ((32, 64), (64, 48), (((1,), (0,)), ((), ())), True),
        ((2, 16, 64), (64, 48), (((2,), (0,)), ((), ())), True),
        ((2, 8, 64), (64, 48), (((2,), (0,)), ((), ())), True),
        ((2, 7, 64), (64, 48), (((2,), (0,)), ((), ())), False),
        ((32, 64), (64, 40), (((1,), (0,)), ((), ())), False),
        ((32, 8, 6), (8, 6, 16), (((1, 2), (0, 1)), ((), ())), True),
        ((32, 24), (24, 16), (((1,), (0,)), ((), ())), False),
        ((4, 32, 64), (4, 64, 48), (((2,), (1,)), ((0,), (0,))), False),
        ((0, 64), (64, 48), (((1,), (0,)), ((), ())), False),
        ((64,), (64, 48), (((0,), (0,)), ((), ())), False),
    ],
)
def test_which_products_gain(lhs, rhs, dims, gains):
    fun = jaxmp.autocast(lambda x, y: lax.dot_general(x, y, dims), FP8)
    assert recipes(fun, jnp.ones(lhs), jnp.ones(rhs)) == [gains]
    assert jax.jit(fun)(jnp.ones(lhs), jnp.ones(rhs)).dtype == F32


def test_convolutions_and_einsums():
    def conv(x, k):
        return lax.conv_general_dilated(x, k, (1, 1), "SAME")

    x, k = jnp.ones((16, 16, 8, 8)), jnp.ones((16, 16, 3, 3))
    assert recipes(jaxmp.autocast(conv, FP8), x, k) == [False]
    by_hand = jaxmp.einsum("bsd,dhk->bshk", jnp.ones((2, 16, 32)), jnp.ones((32, 4, 8)), policy=FP8)
    assert (by_hand.shape, by_hand.dtype) == ((2, 16, 4, 8), BF16)
    np.testing.assert_array_equal(by_hand, 32)


def loss_of(product):
    return lambda x, w: jnp.sum(jnp.sin(product(x, w).astype(F32) / 8))


def in_fp8(x, w):
    return jaxmp.matmul(x, w, policy=FP8, output_dtype=F32)


class TestTransformations:
    def test_eager_jit_scan_and_remat_agree(self):
        eager = jax.grad(loss_of(in_fp8), (0, 1))(X, W)
        jitted = jax.jit(jax.grad(loss_of(in_fp8), (0, 1)))(X, W)
        remat = jax.jit(jax.grad(jax.checkpoint(loss_of(in_fp8)), (0, 1)))(X, W)
        _, scanned = lax.scan(
            lambda c, _: (c, jax.grad(loss_of(in_fp8), (0, 1))(X, W)), 0, None, length=2
        )
        scanned = jax.tree.map(lambda leaf: leaf[1], scanned)
        for other in (jitted, remat, scanned):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), eager, other)

    def test_vmap_shares_the_scale(self):
        # At the scale of the second, the first is among the subnormal numbers.
        apart = jnp.stack([X, 1e4 * X])
        batched = jax.vmap(in_fp8, (0, None))(apart, W)
        assert_close(batched[0], exact(np.matmul, apart, "e4m3", W, "e4m3")[0], 64)
        with pytest.raises(AssertionError):
            assert_close(batched[0], exact(np.matmul, X, "e4m3", W, "e4m3"), 64)
        xs = jnp.stack([X, 2 * X])
        grads = jax.vmap(jax.grad(loss_of(in_fp8)), (0, None))(xs, W)
        plain = jax.vmap(jax.grad(loss_of(jnp.matmul)), (0, None))(xs, W)
        assert cosine(grads, plain) > 0.98

    @pytest.mark.parametrize("recipe", ["current(scaling=row)", "mxfp8"])
    def test_a_mapped_weight_is_not_quantized_by_rows_and_blocks(self, recipe):
        def loss(x, w):
            return jnp.mean(jnp.tanh(x @ w)) * 64

        xs, ws = jnp.stack([X, X[::-1]]) / 8, jnp.stack([W, -W])[..., :32] / 8
        low = jaxmp.autocast(loss, jaxmp.Policy(recipe=recipe))
        # Of gradients per example one of three products is of two mapped operands.
        per_example = jax.vmap(jax.grad(low, (0, 1)), (0, None))
        right = jax.vmap(jax.grad(loss, (0, 1)), (0, None))(xs, ws[0])
        for found, wanted in zip(per_example(xs, ws[0]), right, strict=True):
            assert cosine(found, wanted) > 0.99
        assert sorted(recipes(per_example, xs, ws[0])) == [False, True, True]
        plain = jaxmp.autocast(loss, "mixed_bfloat16")
        found, wanted = (jax.vmap(jax.grad(fun, 1))(xs, ws) for fun in (low, plain))
        np.testing.assert_array_equal(found, wanted)

    def test_forward_mode_and_second_order(self):
        _, tangent = jax.jvp(in_fp8, (X, W), (normal(5, 32, 64), normal(6, 64, 48)))
        _, plain = jax.jvp(jnp.matmul, (X, W), (normal(5, 32, 64), normal(6, 64, 48)))
        assert cosine(tangent, plain) > 0.99

        def twice(product):
            def norm(x, w):
                return jnp.sum(jax.grad(loss_of(product))(x, w) ** 2)

            return jax.jit(jax.grad(norm, 1))(X / 8, W)

        assert cosine(twice(in_fp8), twice(jnp.matmul)) > 0.98

    def test_on_a_mesh_the_scale_is_of_the_whole_array(self):
        mesh = jax.make_mesh((4,), ("data",))
        rows = jax.NamedSharding(mesh, jax.P("data", None))
        x = X.at[0, 0].set(1e4)
        sharded = jax.jit(in_fp8)(jax.device_put(x, rows), W)
        assert_close(sharded, exact(np.matmul, x, "e4m3", W, "e4m3"), 64)
        own = np.concatenate([exact(np.matmul, s, "e4m3", W, "e4m3") for s in jnp.split(x, 4)])
        with pytest.raises(AssertionError):
            assert_close(sharded, own, 64)

    @pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
    def test_blocks_on_explicit_axes_of_a_mesh(self, recipe):
        def loss(x, w):
            return jnp.mean(jnp.tanh(x @ w)) * 64

        grad_fn = jax.jit(jax.grad(jaxmp.autocast(loss, jaxmp.Policy(recipe=recipe)), 1))
        w = W[:, :32] / 8
        assert recipes(grad_fn, X, w) == [True, True]
        right = grad_fn(X, w)
        mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(mesh):
            # What is contracted for the gradient of a weight is sharded.
            x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data", None)))
            found = grad_fn(x, jax.device_put(w, jax.NamedSharding(mesh, jax.P(None, None))))
        np.testing.assert_allclose(jax.device_get(found), right, atol=1e-5)

    def test_explicit_axes_of_a_mesh(self):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(mesh):
            x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data", None)))
            w = jax.device_put(W, jax.NamedSharding(mesh, jax.P(None, None)))
            y = jax.jit(in_fp8)(x, w)
            grad = jax.jit(jax.grad(loss_of(in_fp8), 1))(x, w)
        assert jax.typeof(y).sharding.spec == jax.P("data", None)
        assert_close(jax.device_get(y), exact(np.matmul, X, "e4m3", W, "e4m3"), 64)
        right = jax.grad(loss_of(in_fp8), 1)(X, W)
        np.testing.assert_allclose(jax.device_get(grad), right, atol=1e-5)


def cosine(one, other):
    one, other = (np.asarray(x, np.float64).ravel() for x in (one, other))
    return one @ other / np.linalg.norm(one) / np.linalg.norm(other)


SHAPE = reference_gpt.Shape(width=64, heads=2, layers=2, length=64, vocabulary=256, batch=4)


def gpt_loss(params, tokens, shape=SHAPE):
    with jax.numpy_dtype_promotion("standard"):
        logits = reference_gpt.model(params, tokens[:, :-1], shape, "float32")
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def gpt_arguments():
    params = reference_gpt.init(jax.random.key(0), SHAPE)
    tokens = jax.random.randint(jax.random.key(1), (SHAPE.batch, SHAPE.length + 1), 0, 256)
    return jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, params), tokens


@pytest.mark.slow
def test_gradients_of_a_gpt():
    params, tokens = gpt_arguments()
    low = jax.jit(jaxmp.value_and_grad(gpt_loss, FP8))
    loss, grads = low(params, tokens)
    plain_loss, plain = jax.jit(jax.value_and_grad(gpt_loss))(params, tokens)
    assert abs(loss / plain_loss - 1) < 2.0**-7
    for grad, right in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
        assert (grad.dtype, grad.shape) == (F32, right.shape)
        assert cosine(grad, right) > 0.99


def test_attention_stays_in_bfloat16_and_rules_choose():
    params, tokens = gpt_arguments()
    fun = jaxmp.value_and_grad(gpt_loss, FP8)
    # Four layers' matmuls in each of two blocks and the head, three times; two of attention.
    assert collections.Counter(recipes(fun, params, tokens)) == {True: 27, False: 12}
    only = jaxmp.Policy(rules={"inner": FP8})

    def named(x, w):
        with jax.named_scope("inner"):
            y = x @ w
        return y @ w.T

    assert recipes(jaxmp.autocast(named, only), X, W) == [True, False]


class Mlp(nnx.Module):
    def __init__(self):
        self.hidden = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(32, 16, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x)))


def test_flax_models_by_rules():
    rules = {"layers_2|head": "mixed_bfloat16"}
    model = linen.wrap(nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(16)]), FP8, rules=rules)
    table = str(model.policy_table(model.init(jax.random.key(0), X), X))
    assert table.count(f"1 {E4M3}") == table.count("1 bfloat16") == 1
    model = jaxmp_nnx.wrap(Mlp(), FP8, rules=rules)
    table = str(model.policy_table(X))
    assert table.count(f"1 {E4M3}") == table.count("1 bfloat16") == 1
    _, grads = jaxmp_nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), FP8)(model, X)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype(F32)}


def test_a_train_step_learns():
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), FP8)

    def loss_fn(params, batch):
        x, y = batch
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)

    state = jaxmp.TrainState.create({"in": W / 8, "out": W.T / 7}, tx)
    step = jaxmp.make_train_step(loss_fn, tx, FP8)
    target = jnp.tanh(X @ normal(7, 64, 64) / 8)
    losses = []
    for _ in range(60):
        state, info = step(state, (X, target))
        losses.append(float(info.loss))
    assert losses[-1] < losses[0] / 4
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype(F32)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp8.get_recipe("curent"), "Did you mean 'current'"),
        (lambda: jaxmp.autocast(jnp.sum, jaxmp.Policy(recipe="sinh")), "Unknown recipe 'sinh'"),
        (lambda: fp8.CurrentScaling(forward="e4m4"), "Unknown format 'e4m4'"),
        (lambda: fp8.CurrentScaling(multiple=0), "multiple is 0"),
        (lambda: fp8.CurrentScaling(scaling="rows"), "scaling is 'rows'.*Did you mean 'row'"),
        (lambda: fp8.BlockScaling("mxfp4"), "format is 'mxfp4'.*Did you mean"),
        (lambda: fp8.BlockScaling(multiple=16), "multiple is 16, but mxfp8 has blocks of 32"),
        (lambda: fp8.DelayedScaling(history=0), "history is 0"),
        (lambda: fp8.DelayedScaling(margin=-1), "margin is -1"),
        (lambda: fp8.DelayedScaling(amax="last"), "amax is 'last'"),
        (lambda: fp8.get_recipe("delayed(histroy=3)"), "Did you mean 'history'"),
        (lambda: fp8.get_recipe("delayed(history=a)"), "must be an integer"),
        (lambda: fp8.get_recipe("mxfp8(strict=1)"), "must be true or false"),
        (lambda: fp8.get_recipe("mxfp8(format=nvfp4)"), "Unknown option 'format'"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
