"""Code written for jmp runs with `import jaxmp as jmp`, and gives what jmp gives."""

import inspect

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import jaxmp

BOTH = pytest.mark.parametrize("lib", [jmp, jaxmp], ids=["jmp", "jaxmp"])
TREE = {
    "f32": jnp.arange(3.0),
    "f16": jnp.arange(3.0, dtype=jnp.float16),
    "bf16": jnp.arange(3.0, dtype=jnp.bfloat16),
    "i": jnp.arange(3),
    "np": np.arange(3.0, dtype=np.float32),
    "o": "opaque",
}


def dtypes_of(tree):
    return jax.tree.map(lambda x: getattr(x, "dtype", None), tree)


@pytest.mark.parametrize("name", jmp.__all__)
def test_callables_take_jmps_arguments(name):
    theirs, ours = getattr(jmp, name), getattr(jaxmp, name)
    if not inspect.isclass(theirs) and not inspect.isfunction(theirs):
        return
    wanted = list(inspect.signature(theirs).parameters)
    have = inspect.signature(ours).parameters
    positional = [n for n, p in have.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if name in ("all_finite", "select_tree", "cast_to_full", "cast_to_half", "get_policy"):
        assert len(positional) == len(wanted)
    else:
        assert positional[: len(wanted)] == wanted


@pytest.mark.parametrize(
    "text",
    ["float32", "half", "full", "c=f16", "p=f16,c=f32", "p=f32,compute=bf16,output=f16", "o=f16"],
)
def test_policies_cast_as_jmps(text):
    theirs, ours = jmp.get_policy(text), jaxmp.get_policy(text)
    assert isinstance(ours, jmp.Policy)
    for cast in ("cast_to_param", "cast_to_compute", "cast_to_output"):
        assert dtypes_of(getattr(ours, cast)(TREE)) == dtypes_of(getattr(theirs, cast)(TREE))
    assert ours.with_output_dtype(jnp.float16).output_dtype == jnp.float16


def test_tree_functions_give_what_jmps_give():
    with jax.numpy_dtype_promotion("standard"):
        for tree in (TREE["f32"], [TREE["f32"], jnp.array([jnp.nan])], {}, None):
            assert bool(jaxmp.all_finite(tree)) == bool(jmp.all_finite(tree))
        a, b = {"x": jnp.ones(2)}, {"x": jnp.zeros(2)}
        for pred in (jnp.bool_(True), jnp.bool_(False)):
            ours, theirs = jaxmp.select_tree(pred, a, b), jmp.select_tree(pred, a, b)
            np.testing.assert_array_equal(ours["x"], theirs["x"])
        assert dtypes_of(jaxmp.cast_to_half(TREE)) == dtypes_of(jmp.cast_to_half(TREE))
        assert dtypes_of(jaxmp.cast_to_full(TREE)) == dtypes_of(jmp.cast_to_full(TREE))
        assert jaxmp.half_dtype() == jmp.half_dtype()


@BOTH
@pytest.mark.parametrize("kind", ["NoOpLossScale", "StaticLossScale", "DynamicLossScale"])
def test_the_training_loop_of_jmps_readme(lib, kind):
    """The loop that jmp documents, on a problem that overflows once: same path in both."""

    def loss_fn(params, loss_scale, policy, x):
        params, x = policy.cast_to_compute((params, x))
        out = policy.cast_to_output(jnp.mean(params["w"] * x))
        return loss_scale.scale(out)

    def train_step(params, loss_scale, x):
        grads = jax.grad(loss_fn)(params, loss_scale, policy, x)
        grads = policy.cast_to_compute(grads)
        grads = loss_scale.unscale(policy.cast_to_param(grads))
        finite = lib.all_finite(grads)
        loss_scale = loss_scale.adjust(finite)
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return lib.select_tree(finite, moved, params), loss_scale

    with jax.numpy_dtype_promotion("standard"):
        policy = lib.get_policy("params=float32,compute=float16,output=float32")
        cls = getattr(lib, kind)
        loss_scale = cls() if kind == "NoOpLossScale" else cls(jnp.float32(2.0**10))
        params = {"w": jnp.full(4, 2.0)}
        path = []
        for i in range(4):
            x = jnp.full(4, 1e6 if i == 1 else 0.5)
            params, loss_scale = jax.jit(train_step)(params, loss_scale, x)
            path.append(float(params["w"][0]))
        assert path == pytest.approx([1.9875, 1.9875, 1.975, 1.9625], rel=1e-3)
        scale = float(loss_scale.loss_scale)
        assert scale == {"N": 1, "S": 2.0**10, "D": 2.0**9}[kind[0]]


def test_a_jaxmp_policy_works_where_jmp_checks_the_class():
    policy = jaxmp.get_policy("mixed_bfloat16")
    assert isinstance(policy, jmp.Policy)
    assert jmp.cast_to_full(policy.cast_to_compute({"w": jnp.ones(2)}))["w"].dtype == jnp.float32
    assert isinstance(jaxmp.DynamicLossScale(), jaxmp.LossScale)
