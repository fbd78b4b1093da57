"""Every trap has a minimal program that shows it, and one like it that does not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jaxmp
from jaxmp.audit import TRAPS, audit

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
MESH = AbstractMesh((4,), ("d",))


def spec(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def sharded(*shape, dtype=F32, axes=("d",)):
    sharding = NamedSharding(MESH, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def over_devices(fun):
    specs = {"in_specs": PartitionSpec("d"), "out_specs": PartitionSpec()}
    return jax.shard_map(fun, mesh=MESH, check_vma=False, **specs)


def kinds(fun, *args, policy=None):
    return {trap.kind for trap in audit(fun, *args, target=None, policy=policy).traps}


def half_matmul(x, w):
    return x.astype(BF16) @ w.astype(BF16)


def preferred_matmul(x, w):
    return jnp.matmul(x.astype(BF16), w.astype(BF16), preferred_element_type=F32)


@jax.custom_vjp
def contract_matmul(x, w):
    return half_matmul(x, w)


def _contract_backward(saved, cotangent):
    x, w = (value.astype(BF16) for value in saved)
    dx = lax.dot_general(cotangent, w, (((1,), (1,)), ((), ())), preferred_element_type=F32)
    dw = lax.dot_general(x, cotangent, (((0,), (0,)), ((), ())), preferred_element_type=F32)
    return dx, dw


contract_matmul.defvjp(lambda x, w: (half_matmul(x, w), (x, w)), _contract_backward)


def loss_of(matmul):
    def loss(w, x):
        return jnp.sum(matmul(matmul(x, w).astype(F32), w).astype(F32) ** 2)

    return jax.value_and_grad(loss)


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def log_softmax(x):
    return jax.nn.log_softmax(x)


def logsumexp(x):
    return jax.nn.logsumexp(x)


def layer_norm(x):
    mean = jnp.mean(x, -1, keepdims=True)
    var = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + jnp.asarray(1e-3, x.dtype))


def in_float32(fun):
    return lambda x: fun(x.astype(F32)).astype(x.dtype)


def cumulative_sum(x):
    return lax.cumsum(x)


def kept_and_widened(x):
    half = x.astype(BF16)
    return half, half.astype(F32) + 1


def bare_sum(x):
    return lax.reduce(x, jnp.zeros((), x.dtype), lax.add, (0,))


def lookup(table, index):
    return jnp.sum(table[index].astype(F32) ** 2)


def narrow_first(table, index):
    return lookup(table.astype(BF16), index)


def narrow_after(table, index):
    return jnp.sum(table[index].astype(BF16).astype(F32) ** 2)


def cross_entropy(logits):
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 0].astype(F32))


def f16_gradient(w, x):
    return jax.grad(lambda w: jnp.sum((x @ w).astype(F32) ** 2))(w)


def f16_scaled(w, x):
    policy = jaxmp.get_policy("mixed_float16")
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
    opt_state = tx.init(w)

    def loss(w, x):
        return jnp.sum((x @ w).astype(F32) ** 2)

    scale = jaxmp.get_loss_scale(opt_state)
    _, grads = jaxmp.value_and_grad(loss, policy, loss_scale=scale)(w, x)
    return tx.update(grads, opt_state, w)[0]


def sgd(params, x):
    grads = jax.grad(lambda p: jnp.sum((x @ p["w"]).astype(F32) ** 2))(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), jnp.float32(0)


def rounded_loop(carry, xs):
    def turn(carry, x):
        return (carry.astype(F32) + x).astype(BF16), None

    return lax.scan(turn, carry, xs)[0]


def wide_loop(carry, xs):
    return lax.scan(lambda c, x: (c + x, None), carry.astype(F32), xs)[0].astype(BF16)


X, H = spec(16, 8), spec(16, 8, dtype=BF16)
W = spec(8, 8)
TABLE = np.linspace(0, 1, 8, dtype=np.float32)
POLICY = jaxmp.get_policy("mixed_bfloat16")
F32_POLICY = jaxmp.get_policy("float32")
BF16_REDUCE = jaxmp.get_policy("p=f32,c=bf16,o=f32,reduce=bf16")

SHOWS = {
    "wide-product": [
        (loss_of(preferred_matmul), (W, X)),
        (lambda w, x: half_matmul(x, w).astype(F32) @ w, (W, X)),
        (lambda w, x: lax.dot_general(x, w, (((1,), (0,)), ((), ()))), (W, H)),
    ],
    "rounded-weight-gradient": [
        (loss_of(half_matmul), (W, X)),
        (loss_of(preferred_matmul), (W, X)),
    ],
    "ping-pong-cast": [
        (lambda x: half_matmul(x, x.T).astype(F32).T.astype(BF16), (X,)),
        (
            lambda x, w: half_matmul(x.astype(BF16).reshape(8, 16).astype(F32) + 1, w),
            (X, spec(16, 4)),
        ),
    ],
    "promotion": [
        (lambda h: jnp.tanh(h * np.float32(0.5)), (H,)),
        (lambda h: h + TABLE, (H,)),
        (lambda h, bias: h + bias, (H, spec(8))),
        (lambda h, flag: jnp.where(flag, h, np.float32(0)), (H, spec(16, 8, dtype=jnp.bool_))),
    ],
    "half-softmax": [(softmax, (H,)), (log_softmax, (H,)), (logsumexp, (H,))],
    "half-norm": [(layer_norm, (H,))],
    "half-sum": [
        (bare_sum, (H,)),
        (cumulative_sum, (H,)),
        (jax.grad(lambda b, h: jnp.sum((h + b).astype(F32) ** 2)), (spec(8, dtype=BF16), H)),
    ],
    "half-loss": [(cross_entropy, (H,)), (lambda h: jnp.mean(h**2), (H,))],
    "half-scatter-add": [(jax.grad(narrow_first), (spec(10, 4), spec(16, dtype=jnp.int32)))],
    "narrow-collective": [
        (over_devices(lambda x: lax.psum(x, "d")), (sharded(16, 8, dtype=BF16),))
    ],
    "wide-collective": [
        (
            over_devices(lambda x: lax.all_gather(x, "d").astype(BF16) * 2),
            (sharded(16, 8),),
        ),
        (over_devices(lambda x: lax.psum(x, "d")), (sharded(16, 8),), BF16_REDUCE),
    ],
    "unscaled-float16": [(f16_gradient, (spec(8, 4, dtype=F16), spec(16, 8, dtype=F16)))],
    "dtype-change": [
        (lambda p, x: ({"w": p["w"].astype(BF16)}, jnp.sum(x)), ({"w": W}, X)),
    ],
    "rounded-carry": [
        (rounded_loop, (spec(8, dtype=BF16), X)),
        (lambda c, xs: lax.scan(lambda c, x: (c + x, None), c, xs)[0], (spec(8, dtype=BF16), H)),
    ],
    "narrow-state": [(sgd, ({"w": spec(8, 8, dtype=BF16)}, spec(16, 8, dtype=BF16)))],
    "narrow-product": [
        (half_matmul, (X, W), F32_POLICY),
        (half_matmul, (X, W), jaxmp.get_policy("mixed_float16")),
    ],
    "unused-donation": [
        (
            jax.jit(lambda w, x: (w * 2).astype(BF16) + x, donate_argnums=0),
            (W, spec(8, 8, dtype=BF16)),
        )
    ],
}
DOES_NOT = {
    "wide-product": [
        (loss_of(half_matmul), (W, X)),
        (loss_of(contract_matmul), (W, X)),
        (lambda w, x: x @ w, (W, X)),
        (loss_of(preferred_matmul), (W, X), F32_POLICY),
    ],
    "rounded-weight-gradient": [(loss_of(contract_matmul), (W, X))],
    "ping-pong-cast": [
        (lambda x: jnp.tanh(half_matmul(x, x.T).astype(F32)).astype(BF16), (X,)),
        # The rounded value is what the backward pass keeps.
        (kept_and_widened, (X,)),
    ],
    "promotion": [
        (lambda h: jnp.tanh(h * 0.5), (H,)),
        (lambda h: h + TABLE.astype(BF16), (H,)),
        (lambda h: h.astype(F32) * np.float32(0.5), (H,)),
        (jnp.mean, (H,)),
        (in_float32(layer_norm), (H,)),
    ],
    "half-softmax": [(in_float32(softmax), (H,)), (jnp.exp, (H,))],
    "half-norm": [(in_float32(layer_norm), (H,)), (jnp.sqrt, (H,))],
    "half-sum": [
        (jnp.sum, (H,)),
        (jnp.mean, (H,)),
        (in_float32(lax.cumsum), (H,)),
        (bare_sum, (X,)),
    ],
    "half-loss": [(lambda h: cross_entropy(h.astype(F32)), (H,)), (jnp.log, (H,))],
    "half-scatter-add": [(jax.grad(narrow_after), (spec(10, 4), spec(16, dtype=jnp.int32)))],
    "narrow-collective": [
        (over_devices(lambda x: lax.psum(x.astype(F32), "d")), (sharded(16, 8, dtype=BF16),)),
        (over_devices(lambda x: lax.psum(x, "d")), (sharded(16, 8, dtype=BF16),), BF16_REDUCE),
        (over_devices(lambda x: lax.psum(jnp.sum(x), "d")), (sharded(16, 8, dtype=BF16),)),
    ],
    "wide-collective": [
        (over_devices(lambda x: lax.all_gather(x.astype(BF16), "d") * 2), (sharded(16, 8),)),
        (over_devices(lambda x: lax.all_gather(x, "d") * 2), (sharded(16, 8),)),
    ],
    "unscaled-float16": [
        (f16_scaled, (W, X)),
        (f16_gradient, (spec(8, 4, dtype=BF16), spec(16, 8, dtype=BF16))),
        (lambda w, x: x @ w, (spec(8, 4, dtype=F16), spec(16, 8, dtype=F16))),
    ],
    "dtype-change": [
        (lambda p, x: ({"w": p["w"] * 2}, jnp.sum(x)), ({"w": W}, X)),
        (lambda count, x: (jnp.mean(x), count), (spec(dtype=jnp.int32), X)),
    ],
    "rounded-carry": [
        (wide_loop, (spec(8, dtype=BF16), X)),
        # The layers read the residual stream that they add to.
        (
            lambda c, xs: lax.scan(lambda c, x: (c + jnp.tanh(c), None), c, xs)[0],
            (spec(8, dtype=BF16), H),
        ),
    ],
    "narrow-state": [
        (sgd, ({"w": W}, X)),
        (sgd, ({"w": spec(8, 8, dtype=BF16)}, H), jaxmp.get_policy("bfloat16")),
        # A lookup table is not updated.
        (lambda t, x: ({"t": t["t"]}, x), ({"t": spec(8, 8, dtype=BF16)}, X)),
    ],
    "narrow-product": [
        (half_matmul, (X, W)),
        (half_matmul, (X, W), jaxmp.get_policy("mixed_bfloat16")),
        (jnp.matmul, (X, W), F32_POLICY),
    ],
    "unused-donation": [(jax.jit(lambda w, x: (w * 2, x), donate_argnums=0), (W, X))],
}


def cases(table):
    return [
        pytest.param(kind, *case, id=f"{kind}-{i}")
        for kind, programs in table.items()
        for i, case in enumerate((*case, None)[:3] for case in programs)
    ]


@pytest.fixture(autouse=True)
def standard_promotion():
    # Implicit promotion is one of the traps.
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(("kind", "fun", "args", "policy"), cases(SHOWS))
def test_trap_is_shown(kind, fun, args, policy):
    report = audit(fun, *args, target=None, policy=policy)
    traps = [trap for trap in report.traps if trap.kind == kind]
    assert traps
    for trap in traps:
        assert trap.cost
        assert trap.cause
        assert trap.remedy
        assert trap.path or trap.where or kind == "unscaled-float16"
    with pytest.raises(AssertionError, match=kind):
        report.assert_no_traps()


@pytest.mark.parametrize(("kind", "fun", "args", "policy"), cases(DOES_NOT))
def test_trap_is_not_there(kind, fun, args, policy):
    assert kind not in kinds(fun, *args, policy=policy)


def test_every_trap_of_a_program_has_both():
    assert set(SHOWS) == set(DOES_NOT) == set(TRAPS) - {"compiled-wider"}


def test_float32_program_has_none():
    assert not kinds(loss_of(jnp.matmul), W, X)


def test_contract_has_none():
    assert not kinds(loss_of(contract_matmul), W, X)


def test_rules_say_what_is_meant_to_be_wide():
    def fun(params, x):
        with jax.named_scope("Model"), jax.named_scope("head"):
            return half_matmul(x, params["w"]).astype(F32) @ params["w"]

    policy = jaxmp.get_policy("mixed_bfloat16")
    assert "wide-product" in kinds(fun, {"w": W}, X, policy=policy)
    for rule in ("head", "^head", "^Model/head$"):
        policy = jaxmp.get_policy("mixed_bfloat16").with_rules({rule: "float32"})
        assert "wide-product" not in kinds(fun, {"w": W}, X, policy=policy)


def test_rules_match_the_parameters_that_they_are_written_for():
    """As `policy.cast_to_compute(params)` does: there are no module paths in plain functions."""
    policy = jaxmp.get_policy("mixed_bfloat16").with_rules({"^head": "float32"})

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["body"]).astype(F32) @ params["head"]) ** 2)

    def step(params, x):
        return jaxmp.value_and_grad(loss, policy)(params, x)

    report = audit(step, {"body": W, "head": W}, X, target=None, policy=policy)
    assert {trap.kind for trap in report.traps} & {"wide-product", "narrow-product"} == set()
    assert [row.parameter for row in report.products] == [
        "params/body",
        "params/head",
        "params/head",
        "params/head",
        "params/body",
    ]
    (trap,) = (
        trap
        for trap in audit(step, {"body": W, "head": W}, X, target=None, policy=POLICY).traps
        if trap.kind == "wide-product" and trap.cause.startswith("fprop")
    )
    assert trap.path == "params/head"


def test_a_float32_result_is_told_where_it_became_float32():
    def fun(h, w):
        wide = h.astype(F32)
        return jnp.tanh(wide) @ w.astype(F32)

    (trap,) = audit(fun, H, spec(8, 8, dtype=BF16), target=None, policy=POLICY).traps
    assert "float32 since test_audit_traps.py:" in trap.cause
    args = spec(16, 8, dtype=BF16), W
    (trap,) = audit(lambda h, w: h.astype(F32) @ w, *args, target=None, policy=POLICY).traps
    assert "argument w" in trap.cause


def unscaled(loss):
    def gradient(w, x, y):
        return jax.grad(lambda w: loss((x @ w).astype(F32), y))(w)

    return gradient


def label_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def test_a_check_of_something_else_is_no_check_of_the_gradients():
    args = spec(8, 4, dtype=F16), spec(16, 8, dtype=F16), spec(16, dtype=jnp.int32)
    # optax's loss has an is_finite of its own.
    assert "unscaled-float16" in kinds(unscaled(label_loss), *args)

    def checked(w, x, y):
        gradient = unscaled(label_loss)(w, x, y)
        return jnp.where(jnp.all(jnp.abs(gradient) < jnp.inf), gradient, 0)

    assert "unscaled-float16" not in kinds(checked, *args)


def test_label_pick_of_a_loss_adds_nothing_up():
    report = audit(
        jax.value_and_grad(label_loss),
        spec(64, 8, dtype=BF16),
        spec(64, dtype=jnp.int32),
        target=None,
    )
    assert "half-scatter-add" not in {trap.kind for trap in report.traps}


def test_a_value_far_from_the_inputs_is_no_constant():
    def fun(x, h):
        for _ in range(20):
            x = jnp.sin(x)
        return h * x

    assert "promotion" not in kinds(fun, X, H)


def test_one_line_and_cause_is_one_trap():
    def fun(ws, x):
        for w in ws:
            x = jnp.tanh(preferred_matmul(x, w))
        return jnp.sum(x)

    traps = audit(jax.value_and_grad(fun), [W] * 4, X, target=None).traps
    wgrads = [trap for trap in traps if trap.cause.startswith("wgrad")]
    assert len(wgrads) == 1
    assert wgrads[0].cost.endswith("in 4 places")
    assert "preferred_matmul" in wgrads[0].where


@functools.partial(jax.jit, donate_argnums=0)
def donating(state, x):
    return {"w": state["w"] + x, "count": state["count"] + 1}


def test_donation_counts_each_output_once():
    state = {"w": W, "count": spec(dtype=jnp.int32)}
    assert not kinds(donating, state, W)
    report = audit(jax.jit(lambda a, b: a + b, donate_argnums=(0, 1)), W, W, target=None)
    (trap,) = report.traps
    assert (trap.kind, trap.path, trap.cost) == ("unused-donation", "b", "256 B")


def test_donation_that_only_the_compiler_does_not_use():
    def donated(fun):
        report = audit(jax.jit(fun, donate_argnums=(0, 1)), W, W, target="cpu")
        return [(trap.kind, trap.cost) for trap in report.traps]

    assert donated(lambda x, w: (x + 1, w * 2)) == []
    # A constant gets a buffer of its own.
    assert donated(lambda x, w: (jnp.zeros_like(x), w * 2)) == [("unused-donation", "256 B")]
