"""`diagnose.first_nonfinite`: faults that were planted are found, with their place and cause."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import diagnose
from jaxmp._dataflow import dataflow
from jaxmp.diagnose._observe import Observer, count_of, places_of

F32 = jnp.float32


class Block(nn.Module):
    gain: float

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(nn.Dense(8)(x))
        scores = (h @ h.T * self.gain).astype(jnp.float16)
        weights = jnp.exp(scores)
        weights = (weights / weights.sum(-1, keepdims=True)).astype(F32)
        return x + weights @ h / 8


class Stack(nn.Module):
    faulty: int | None

    @nn.compact
    def __call__(self, x):
        for i in range(12):
            x = Block(2.0 if i == self.faulty else 0.01, name=f"layer_{i}")(x)
        return x


def test_a_softmax_in_float16_that_overflows_in_one_layer_of_twelve():
    x = jax.random.normal(jax.random.key(0), (6, 8))
    params = Stack(None).init(jax.random.key(1), x)

    def loss_fn(params, x, faulty):
        return jnp.mean(Stack(faulty).apply(params, x) ** 2)

    def find(faulty):
        return diagnose.first_nonfinite(
            lambda params, x: loss_fn(params, x, faulty), params, x, argnums=0
        )

    report = find(7)
    assert report
    assert report.path == "Stack/layer_7"
    assert report.where.startswith("test_diagnose_nonfinite.py:")
    assert report.where.endswith("(Block.__call__)")
    assert (report.operation, report.makes, report.dtype) == ("exp", "inf", "float16")
    assert (report.backward, report.turns, report.blame) == (False, (), "dtype")
    (operand,) = report.operands
    assert operand.shape == (6, 6)
    assert 11.09 < operand.largest < 20  # exp(11.09) is 65504
    assert operand.nonfinite == 0
    assert "layer_7" in str(report)
    assert report.to_dict()["operands"][0]["dtype"] == "float16"
    clean = find(None)
    assert not clean
    assert str(clean) == "All results are finite."


def in_scan(x, w):
    def body(x, w):
        x = jnp.exp(x * w)
        return x, x

    return jnp.sum(lax.scan(body, x, w)[1])


def in_scan_of_scans(x, w):
    def outer(x, w):
        return lax.scan(lambda x, w: (jnp.exp(x * w), None), x, w)[0], None

    return lax.scan(outer, x, w.reshape(2, 3))[0]


def in_scan_of_whiles(x, w):
    def outer(x, w):
        def turn(state):
            return jnp.exp(state[0] * w), state[1] + 1

        return lax.while_loop(lambda state: state[1] < 3, turn, (x, 0))[0], None

    return lax.scan(outer, x, w[:2])[0]


def in_while_of_scans(x, w):
    def turn(state):
        x, _ = lax.scan(lambda x, w: (jnp.exp(x * w), None), state[0], w[:2])
        return x, state[1] + 1

    return lax.while_loop(lambda state: state[1] < 3, turn, (x, 0))[0]


def in_reversed_scan(x, w):
    return lax.scan(lambda x, w: (jnp.exp(x * w), None), x, w, reverse=True)[0]


def two_in_scan(x, w, reverse=False):
    """What stands first fails in turn 4, and what stands second in turn 2."""

    def body(x, w):
        return x + 1 / (w - 4) + jnp.exp(jnp.where(w == 2, 100.0, 0.0)), None

    return lax.scan(body, x, w, reverse=reverse)[0]


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, x), lambda x, grad: (grad / (x - 1),))


# From 1 by exp: 2.7, 15.2, 3.8e6, inf.
X, W = jnp.float32(1), jnp.ones(6)
# name: function, arguments, options, expected (operation, makes, backward, turns, blame)
FAULTS = {
    "scan": (in_scan, (X, W), {}, ("exp", "inf", False, (3,), "model")),
    "scan, gradients": (in_scan, (X, W), {"argnums": 1}, ("exp", "inf", False, (3,), "model")),
    "scan in scan": (in_scan_of_scans, (X, W), {}, ("exp", "inf", False, (1, 0), "model")),
    "while in scan": (in_scan_of_whiles, (X, W), {}, ("exp", "inf", False, (1, 0), "model")),
    "scan in while": (in_while_of_scans, (X, W), {}, ("exp", "inf", False, (1, 1), "model")),
    "reversed scan": (in_reversed_scan, (X, W), {}, ("exp", "inf", False, (2,), "model")),
    "two": (two_in_scan, (X, jnp.arange(6.0)), {}, ("exp", "inf", False, (2,), "model")),
    "two, reversed": (
        lambda x, w: two_in_scan(x, w, reverse=True),
        (X, jnp.arange(6.0)),
        {},
        ("div", "inf", False, (4,), "model"),
    ),
    "branch": (
        lambda x: lax.cond(x > 0, lambda x: 1 / (x - 1), jnp.log, x),
        (X,),
        {},
        ("div", "inf", False, (), "model"),
    ),
    "remat": (
        jax.checkpoint(lambda x: jnp.sum(jnp.log(x - 1))),
        (X,),
        {"argnums": 0},
        ("log", "inf", False, (), "model"),
    ),
    "backward only": (
        lambda x: jnp.sqrt(x - 1),
        (X,),
        {"argnums": 0},
        ("div", "inf", True, (), "model"),
    ),
    "custom rule": (
        lambda x: clipped(x) * 2,
        (X,),
        {"argnums": 0},
        ("div", "inf", True, (), "model"),
    ),
    "guarded": (
        # The gradient of what is not chosen is 0 / 0: it takes a second `where`, before the log.
        lambda x: jnp.where(x > 1, jnp.log(x - 1), 0.0),
        (X,),
        {"argnums": 0},
        ("div", "nan", True, (), "model"),
    ),
    "NaN": (lambda x: (x - 1) / (x - 1), (X,), {}, ("div", "nan", False, (), "model")),
    "product in float16": (
        lambda w, x: jnp.sum((x @ w).astype(F32)),
        (jnp.full((4, 4), 300.0), jnp.full((4, 4), 300.0)),
        {"policy": "mixed_float16"},
        ("dot_general", "inf", False, (), "dtype"),
    ),
    "scale": (
        lambda w, x: jnp.mean((x @ w) ** 2),
        (jnp.ones((4, 4)), jnp.ones((4, 4))),
        {
            "policy": "mixed_float16",
            "argnums": 0,
            "loss_scale": jaxmp.StaticLossScale(2.0**20),
        },
        ("convert_element_type", "inf", True, (), "scale"),
    ),
    "auxiliary": (
        lambda x: (x, {"log": jnp.log(x - 1)}),
        (X,),
        {"argnums": 0, "has_aux": True},
        ("log", "inf", False, (), "model"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(name):
    fun, args, options, expected = FAULTS[name]
    report = diagnose.first_nonfinite(fun, *args, **options)
    found = (report.operation, report.makes, report.backward, report.turns, report.blame)
    assert found == expected


def test_what_reaches_no_result_is_no_fault():
    def masked(x):
        hidden = jnp.where(x > 0, jnp.log(x), 0.0)  # log(0) is not chosen
        scores = jnp.where(x > 0, hidden, -jnp.inf)
        return jnp.sum(jax.nn.softmax(scores)) + jnp.sqrt(x[1] - 2)

    report = diagnose.first_nonfinite(masked, jnp.asarray([0.0, 1.0]))
    assert (report.operation, report.makes) == ("sqrt", "nan")
    assert report.operands[0].largest == -1


def test_what_is_given_is_named():
    report = diagnose.first_nonfinite(
        lambda params, x: jnp.sum(params["w"] * x), {"w": jnp.asarray([1.0, jnp.nan])}, np.ones(2)
    )
    assert report.inputs == ("0/w",)
    assert report.operation == ""
    assert "0/w" in str(report)
    constant = diagnose.first_nonfinite(lambda x: jnp.full((2,), jnp.inf), X)
    assert constant.nonfinite == ("the result",)
    assert "constants" in str(constant)


def test_leaves_of_every_kind():
    args = (
        {"none": None, "empty": jnp.zeros((0, 3)), "fp8": jnp.ones(3, jnp.float8_e4m3fn)},
        np.ones(3),
        2,
        jax.random.key(0),
        jnp.ones(3, jnp.complex64),
    )

    def fun(tree, x, n, key, z):
        noise = jax.random.uniform(key, (3,))
        total = jnp.sum(tree["empty"]) + jnp.sum(tree["fp8"].astype(F32) * x.astype(F32))
        return jnp.log(total - 3) + n, jnp.sum(noise), z

    report = diagnose.first_nonfinite(fun, *args)
    assert (report.nonfinite, report.operation) == (("0",), "log")


def test_a_training_step():
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_float16")
    step = jaxmp.make_train_step(
        lambda params, x: jnp.mean((x @ params["w"]) ** 2) / (x[0, 0] - 1), tx, "mixed_float16"
    )
    state = jaxmp.TrainState.create({"w": jnp.ones((8, 4))}, tx)
    report = diagnose.first_nonfinite(step, state, jnp.ones((2, 8)))
    assert report.operation == "div"
    assert "1/loss" in report.nonfinite
    jax.block_until_ready(state)  # nothing was donated


def test_what_cannot_be_looked_into_is_one_operation():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(x):
        return jnp.log(x - 1) + 1

    fun = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    report = diagnose.first_nonfinite(lambda x: fun(x * 1) * 2, jnp.ones(8))
    assert (report.operation, report.makes) == ("shard_map", "inf")

    def host(x):
        return jax.pure_callback(lambda x: x / np.float32(0), jax.typeof(x), x)

    report = diagnose.first_nonfinite(lambda x: host(x + 1), X)
    assert "callback" in report.operation


def test_jax_debug_nans_stays_usable():
    with jax.debug_nans(True):
        report = diagnose.first_nonfinite(lambda x: jnp.log(x - 2), X)
        assert report.makes == "nan"
        with pytest.raises(FloatingPointError):
            jnp.log(X - 2).block_until_ready()


def test_bad_input():
    with pytest.raises(ValueError, match="Say what is differentiated"):
        diagnose.first_nonfinite(jnp.sum, jnp.ones(3), loss_scale=jaxmp.StaticLossScale(8.0))
    with pytest.raises(ValueError, match=r"outside of jax\.jit"):
        jax.jit(lambda x: diagnose.first_nonfinite(jnp.log, x).turns)(jnp.ones(3))
    with pytest.raises(ValueError, match="scalar"):
        diagnose.first_nonfinite(lambda x: x, jnp.ones(3), argnums=0)


PROGRAMS = [in_scan, in_scan_of_scans, in_scan_of_whiles, in_while_of_scans, in_reversed_scan]


@pytest.mark.parametrize("fun", PROGRAMS)
@pytest.mark.parametrize("is_gradient", [False, True])
def test_looking_changes_no_result_and_counts_as_the_dataflow_does(fun, is_gradient):
    if is_gradient:
        if "while" in fun.__name__:
            pytest.skip("a while loop has no reverse derivative")
        fun = jax.value_and_grad(fun, argnums=1)
    args = (jnp.float32(0.5), jnp.linspace(-1, 0.5, 6))
    closed = jax.make_jaxpr(fun)(*args)
    observer = Observer(lambda *_: jnp.bool_(False), jnp.any)
    found, records = jax.jit(lambda *args: observer.run(closed.jaxpr, closed.consts, args))(*args)
    for one, other in zip(found, jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        np.testing.assert_array_equal(one, other)
    flow, places = dataflow(closed), places_of(closed.jaxpr)
    assert len(records) == len(places) == len(flow.equations) == count_of(closed.jaxpr)
    for results, place, record in zip(flow.equations, places, records, strict=True):
        assert results[0].eqn is place.eqn
        scans = [loop.length for loop in place.loops if loop.length is not None]
        assert record.value.shape == tuple(scans)
        assert len(record.turns) == len(place.loops) - len(scans)
