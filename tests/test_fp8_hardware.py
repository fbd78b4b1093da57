"""fp8 on hardware that is not here: what the compilers for GPUs and TPUs make of it."""

import collections
import dataclasses
import functools
import importlib
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp
from jaxmp.audit import TargetUnavailableError, audit
from tests import reference_gpt
from tests.test_fp8_products import gpt_loss

pytestmark = [pytest.mark.audit, pytest.mark.slow]

E4M3, E5M2, BF16 = "float8_e4m3fn", "float8_e5m2", "bfloat16"
BASE = reference_gpt.Shape()
# In four blocks four matmuls of layers and two of attention, and the head.
LAYERS, ATTENTION = 17, 24
DELAYED = str(jaxmp.Policy(recipe="delayed"))


@functools.cache
def compiled(policy, target):
    params = jax.eval_shape(lambda: reference_gpt.init(jax.random.key(0), BASE))
    tokens = jax.ShapeDtypeStruct((BASE.batch, BASE.length + 1), jnp.int32)
    fun = functools.partial(gpt_loss, shape=BASE)
    state = jaxmp.init_fp8_state(fun, policy, params, tokens)

    def step(params, tokens, state):
        return jaxmp.value_and_grad(fun, policy, fp8_state=state)(params, tokens)

    return compile_for(target, step, params, tokens, state)


def compile_for(target, fun, *args):
    try:
        return audit(fun, *args, target=target, float32=False).compiled
    except TargetUnavailableError as error:
        pytest.skip(str(error))


def kinds(report):
    return collections.Counter(tuple(sorted(row.operand_dtypes)) for row in report.products)


@pytest.mark.parametrize("policy", ["mixed_float8", DELAYED])
def test_gpt_on_an_h100(policy):
    ours, half = compiled(policy, "cuda:h100"), compiled("mixed_bfloat16", "cuda:h100")
    assert kinds(ours) == {
        (E4M3, E4M3): LAYERS,
        (E4M3, E5M2): 2 * LAYERS,
        (BF16, BF16): ATTENTION,
    }
    calls = {row.instruction for row in ours.products if E4M3 in row.operand_dtypes}
    assert calls == {"__cublas$lt$matmul$f8"}
    assert ours.memory.temporary <= half.memory.temporary


def test_delayed_scaling_reads_less():
    current, delayed = (compiled(policy, "cuda:h100") for policy in ("mixed_float8", DELAYED))
    assert delayed.fusions < current.fusions


@pytest.mark.parametrize("target", ["cuda:b200", "cuda:rtx5090"])
def test_mxfp8_on_blackwell(target):
    ours = compiled("mixed_mxfp8", target)
    assert kinds(ours) == {(E4M3, E4M3): 3 * LAYERS, (BF16, BF16): ATTENTION}
    calls = {row.instruction for row in ours.products if E4M3 in row.operand_dtypes}
    assert calls == {"__cudnn$blockScaledDot"}


def test_a_wide_mlp_on_a_tpu7x():
    # Of a whole GPT of this width: `python -m benchmarks.fp8 cycles`.
    x, wide = (jax.ShapeDtypeStruct((4096, size), jnp.float32) for size in (4096, 8192))

    def loss(params, x):
        return jnp.mean((nn.gelu(x @ params["in"]) @ params["out"].T) ** 2)

    ours, half = (
        compile_for("tpu:tpu7x", jaxmp.value_and_grad(loss, policy), {"in": wide, "out": wide}, x)
        for policy in ("mixed_float8", "mixed_bfloat16")
    )
    # The gradient of what goes in is not asked for.
    assert kinds(ours) == {(E4M3, E4M3): 2, (E4M3, E5M2): 3}
    assert ours.estimated_cycles <= 0.85 * half.estimated_cycles


def sharded(shape, *axes):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P(*axes))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def mlp_loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"]) ** 2)


@pytest.mark.parametrize(
    ("policy", "target", "gathered"),
    [("mixed_float8", "cuda:h100", E4M3), ("mixed_mxfp8", "cuda:b200", BF16)],
)
def test_weights_are_gathered_as_they_are_multiplied(policy, target, gathered):
    params = {"in": sharded((1024, 4096), "data"), "out": sharded((4096, 1024), "data")}
    step = jaxmp.value_and_grad(mlp_loss, policy)
    ours = compile_for(target, step, params, sharded((8192, 1024), "data"))
    assert kinds(ours).total() == 5
    large = [row for row in ours.collectives if row.bytes > 1 << 20]
    assert {row.dtype for row in large if row.instruction == "all-gather"} == {gathered}
    assert {row.dtype for row in large if row.instruction != "all-gather"} == {"float32"}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadAttention(num_heads=8)(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(h)


class Gpt(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(512, 512)(tokens)
        for _ in range(2):
            x = Block()(x)
        return nn.Dense(512, use_bias=False)(nn.LayerNorm()(x))


def test_a_linen_gpt_on_an_h100():
    model, tokens = Gpt(), jax.ShapeDtypeStruct((8, 257), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params, tokens):
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    ours = compile_for("cuda:h100", jaxmp.value_and_grad(loss, "mixed_float8"), params, tokens)
    # In two blocks query, key and value, which the compiler merges into one product (forward, and
    # in one of the gradients), output, and two of the MLP; and the head.
    assert kinds(ours) == {(E4M3, E4M3): 9, (E4M3, E5M2): 22, (BF16, BF16): 12}


def test_an_nnx_gpt_on_an_h100(monkeypatch):
    folder = str(Path(__file__).parents[1] / "examples")
    sys.path.insert(0, folder)
    gpt = importlib.import_module("gpt")
    depth = 3
    monkeypatch.setitem(gpt.SIZES, "base", dataclasses.replace(gpt.SIZES["base"], depth=depth))
    step, args = gpt.audit_case(jaxmp.get_policy("mixed_float8"))
    ours = compile_for("cuda:h100", step, *args)
    layers = 4 * depth + 1
    found = kinds(ours)
    assert (found[E4M3, E4M3], found[E4M3, E5M2]) == (layers, 2 * layers)
    assert found[BF16, BF16] == 6 * depth
