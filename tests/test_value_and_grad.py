"""Gradients under a policy: true f32 values, whatever the scale and whatever the leaves."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from tests.test_tree import odd_tree

EPS = {"float32": 2.0**-24, "mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11}
SCALES = {
    "none": jaxmp.NoOpLossScale(),
    "static": jaxmp.StaticLossScale(2.0**8),
    "dynamic": jaxmp.DynamicLossScale(2.0**8),
    "no power of two": jaxmp.DynamicLossScale(300.0),
}


def mlp_loss(params, x, y):
    hidden = jnp.tanh(x @ params["a"] + params["c"])
    return jnp.mean((hidden @ params["b"] - y) ** 2)


def problem():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "a": jax.random.normal(keys[0], (16, 32)) / 4,
        "b": jax.random.normal(keys[1], (32, 4)) / 6,
        "c": jnp.full(32, 0.1),
    }
    return params, jax.random.normal(keys[2], (8, 16)), jax.random.normal(keys[3], (8, 4))


@pytest.mark.parametrize("policy", EPS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_loss_and_gradients_are_those_of_f64(policy, scale, jit):
    params, x, y = problem()
    with jax.enable_x64(True):
        widen = functools.partial(jax.tree.map, lambda v: jnp.asarray(np.asarray(v, np.float64)))
        want_loss, want = jax.value_and_grad(mlp_loss)(widen(params), widen(x), widen(y))
    want_loss, want = jax.tree.map(np.asarray, (want_loss, want))

    grad_fn = jaxmp.value_and_grad(mlp_loss, policy, loss_scale=SCALES[scale])
    loss, grads = (jax.jit(grad_fn) if jit else grad_fn)(params, x, y)
    # A handful of roundings of each operand and result, each of at most one unit roundoff.
    rtol = 8 * EPS[policy]
    assert loss.dtype == jnp.float32
    assert not loss.aval.weak_type
    np.testing.assert_allclose(loss, want_loss, rtol=rtol)
    for name, grad in grads.items():
        assert grad.dtype == jnp.float32
        assert not grad.aval.weak_type
        error = np.linalg.norm(grad - want[name]) / np.linalg.norm(want[name])
        assert error < rtol, name


def test_a_power_of_two_scale_changes_no_bit_in_bf16():
    params, x, y = problem()
    plain = jaxmp.value_and_grad(mlp_loss, "mixed_bfloat16")(params, x, y)
    scaled = jaxmp.value_and_grad(
        mlp_loss, "mixed_bfloat16", loss_scale=jaxmp.StaticLossScale(2.0**20)
    )(params, x, y)
    chex.assert_trees_all_equal(plain, scaled, strict=True)


def test_the_function_sees_what_it_was_written_for():
    seen = {}

    def loss_fn(params, x, *, mask, key):
        seen.update(params=params["w"].dtype, x=x.dtype, mask=mask.dtype, key=key.dtype)
        return jnp.mean(params["w"] * x)

    args = {"w": jnp.ones(3)}, np.ones(3, np.float32)
    keywords = {"mask": jnp.ones(3, jnp.int32), "key": jax.random.key(0)}
    for policy in ("mixed_bfloat16", "mixed_float16"):
        grad_fn = jaxmp.value_and_grad(loss_fn, policy, loss_scale=jaxmp.NoOpLossScale())
        loss, grads = grad_fn(*args, **keywords)
        assert (seen["params"], seen["x"], seen["mask"]) == (jnp.float32, jnp.float32, jnp.int32)
        assert seen["key"] == keywords["key"].dtype
        assert (loss.dtype, grads["w"].dtype) == (jnp.float32, jnp.float32)


def test_a_half_loss_is_widened_before_it_is_scaled():
    """Case B51: an f16 loss of 6 times 2^14 is infinite in f16."""

    def loss_fn(w, x):
        return jnp.mean(w * x), {"per_example": w * x}

    scale = jaxmp.StaticLossScale(2.0**14)
    grad_fn = jaxmp.value_and_grad(loss_fn, "mixed_float16", has_aux=True, loss_scale=scale)
    (loss, aux), grads = jax.jit(grad_fn)(jnp.full(4, 2.0), jnp.full(4, 3.0))
    assert (float(loss), loss.dtype) == (6.0, jnp.float32)
    assert aux["per_example"].dtype == jnp.float32
    np.testing.assert_array_equal(aux["per_example"], [6.0] * 4)
    np.testing.assert_array_equal(grads, [0.75] * 4)


def test_the_loss_of_an_overflowing_step_is_finite():
    """Case B51: the gradient overflows, the loss does not."""
    scale = jaxmp.StaticLossScale(2.0**15)

    def loss_fn(w):
        matrix = jnp.full((2, 2), 8.0)
        return jnp.sum(w @ matrix @ matrix @ matrix)

    grad_fn = jaxmp.value_and_grad(loss_fn, "mixed_float16", loss_scale=scale)
    loss, grads = grad_fn(jnp.ones(2))
    assert float(loss) == 8192.0
    assert not bool(jaxmp.all_finite(grads))


def test_gradients_of_narrow_parameters_are_f32():
    for dtype in (jnp.bfloat16, jnp.float16):
        grad_fn = jaxmp.value_and_grad(lambda w: sum(jnp.sum(w) for _ in range(300)), "float32")
        _, grads = grad_fn(jnp.ones(2, dtype))
        assert grads.dtype == jnp.float32
        np.testing.assert_array_equal(grads, [300.0, 300.0])


def test_odd_leaves():
    """Case B37: leaves without a gradient come back as float0, others in at least f32."""
    params = odd_tree()
    real = ("f32", "bf16", "f16", "empty", "python")

    def loss_fn(p):
        assert p["string"] == "text"
        total = sum(jnp.sum(p[name]).astype(jnp.float32) for name in real if name != "python")
        return total * p["python"] + jnp.sum(jnp.abs(p["complex"])) * p["python_int"]

    loss, grads = jaxmp.value_and_grad(loss_fn, "float32")(params)
    chex.assert_trees_all_equal_structs(grads, params)
    for name, grad in grads.items():
        if name in real:
            assert grad.dtype == jnp.float32, name
            assert grad.shape == jnp.shape(params[name]), name
        elif name == "complex":
            assert grad.dtype == jnp.complex64
        elif name != "none":
            assert grad.dtype == jax.dtypes.float0, name
    assert bool(jaxmp.all_finite(grads))
    assert loss.dtype == jnp.float32


def test_complex_gradients_are_unscaled():
    """Case B05."""
    c = jnp.array([1 + 2j, 3 - 4j], jnp.complex64)
    want = jax.grad(lambda c: jnp.sum(jnp.abs(c)))(c)
    scale = jaxmp.DynamicLossScale(2.0**10)
    _, got = jaxmp.value_and_grad(lambda c: jnp.sum(jnp.abs(c)), "mixed_float16", loss_scale=scale)(
        c
    )
    assert got.dtype == jnp.complex64
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("argnums", [1, (1,), (0, 1), (1, 0), -1])
def test_argnums_as_in_jax(argnums):
    def loss_fn(a, b):
        return jnp.sum(a["x"] ** 2 * b)

    args = {"x": jnp.arange(3.0)}, jnp.arange(1.0, 4.0)
    want = jax.value_and_grad(loss_fn, argnums=argnums)(*args)
    got = jaxmp.value_and_grad(loss_fn, "float32", argnums=argnums)(*args)
    chex.assert_trees_all_equal(got, want)


def test_transformations_around_it():
    params, x, y = problem()
    grad_fn = jaxmp.value_and_grad(
        mlp_loss, "mixed_bfloat16", loss_scale=jaxmp.DynamicLossScale(2.0**8)
    )
    one = grad_fn(params, x, y)
    lanes = jax.vmap(grad_fn, in_axes=(None, 0, 0))(params, x[None], y[None])
    chex.assert_trees_all_close(jax.tree.map(lambda v: v[0], lanes), one, rtol=2.0**-6, atol=1e-4)
    _, scanned = jax.lax.scan(lambda c, xy: (c, grad_fn(params, *xy)), 0, (x[None], y[None]))
    chex.assert_trees_all_close(jax.tree.map(lambda v: v[0], scanned), one, rtol=2.0**-6, atol=1e-4)
    jax.checkpoint(lambda p: grad_fn(p, x, y)[0])(params)


def test_f64_stays_f64():
    with jax.enable_x64(True):
        scale = jaxmp.DynamicLossScale(2.0**8)
        w = jnp.ones(2, jnp.float64)
        loss, grads = jaxmp.value_and_grad(lambda w: jnp.sum(w**2), "float32", loss_scale=scale)(w)
        assert (loss.dtype, grads.dtype) == (jnp.float64, jnp.float64)
        np.testing.assert_array_equal(grads, [2.0, 2.0])


def test_rules_by_path_and_unused_rules():
    """Case B03: the head stays f32, and a rule that matches nothing is reported once a trace."""
    policy = jaxmp.get_policy("mixed_bfloat16").with_rules({"^head": "float32"})

    def loss_fn(params, x):
        return jnp.mean((x @ params["body"]) @ params["head"])

    params = {"head": jnp.ones((3, 2)), "body": jnp.ones((4, 3))}
    text = str(jax.make_jaxpr(jaxmp.value_and_grad(loss_fn, policy))(params, jnp.ones((2, 4))))
    # The head's three products are plain ones; of the body only the weights have a gradient.
    assert text.count("= dot_general[") == 3
    assert text.count("= mixed_product[") == 2
    typo = jaxmp.get_policy("mixed_bfloat16").with_rules({"haed": "float32"})
    with pytest.warns(
        UserWarning, match=r"Policy rule 'haed' matched none of 2 paths. Nearest: head"
    ):
        jaxmp.value_and_grad(lambda p: jnp.sum(p["head"]), typo)({"head": jnp.ones(2)})


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda w: w, r"The loss is float32\[2\], but must be a floating-point scalar"),
        (lambda w: jnp.sum(w).astype(jnp.complex64), r"The loss is complex64\[\]"),
        (lambda w: jnp.int32(1), r"The loss is int32\[\]"),
        (lambda w: None, "The loss is NoneType"),
        (lambda w: (jnp.sum(w), w), "The loss is tuple"),
    ],
)
def test_a_loss_that_is_no_real_scalar(loss_fn, words):
    with pytest.raises(ValueError, match=words):
        jaxmp.value_and_grad(loss_fn, "mixed_bfloat16")(jnp.ones(2))


def test_other_bad_input():
    with pytest.raises(ValueError, match=r"must return \(loss, aux\), got"):
        jaxmp.value_and_grad(jnp.sum, "float32", has_aux=True)(jnp.ones(2))
    for params in ({"n": jnp.int32(1), "f": print}, {}, None):
        with pytest.raises(ValueError, match="Nothing to differentiate: argument 0 has no float"):
            jaxmp.value_and_grad(lambda p: jnp.float32(1), "float32")(params)
    with pytest.raises(ValueError, match="Unknown recipe 'fp4'"):
        jaxmp.value_and_grad(jnp.sum, jaxmp.Policy(recipe="fp4"))
    with pytest.raises(TypeError, match="must be a loss scale object"):
        jaxmp.value_and_grad(jnp.sum, "float32", loss_scale=128.0)
    with pytest.raises(ZeroDivisionError):
        jaxmp.value_and_grad(lambda w: 1 / 0, "float32")(jnp.ones(2))


def test_an_fp8_loss_is_widened():
    grad_fn = jaxmp.value_and_grad(
        lambda w: (w**2).astype(jnp.float8_e4m3fn), "float32", loss_scale=SCALES["static"]
    )
    loss, grads = grad_fn(jnp.float32(2.0))
    assert (float(loss), loss.dtype, float(grads)) == (4.0, jnp.float32, 4.0)


def test_argnums_that_jax_would_not_take():
    def loss_fn(a, b):
        return jnp.sum(a**2) + jnp.sum(b)

    args = jnp.ones(2), jnp.ones(2)
    for bad, words in (((0, 0), "twice"), ((0, -2), "twice"), (2, "2 positional"), (-3, "argnums")):
        with pytest.raises(ValueError, match=words):
            jaxmp.value_and_grad(loss_fn, "float32", argnums=bad)(*args)
    with pytest.raises(ValueError, match="0 positional arguments"):
        jaxmp.value_and_grad(loss_fn, "float32")(a=args[0], b=args[1])
    _, grads = jaxmp.value_and_grad(loss_fn, "float32", argnums=np.int64(1))(*args)
    np.testing.assert_array_equal(grads, [1.0, 1.0])


def test_a_forgotten_loss_scale_is_reported():
    """Case B51: f16 without scaling loses small gradients, so it is not silent."""
    for policy in ("mixed_float16", jaxmp.Policy(rules={"stem": "mixed_float16"})):
        with pytest.warns(
            UserWarning, match=r"vanish in float16. Give value_and_grad a loss_scale"
        ):
            jaxmp.value_and_grad(jnp.sum, policy)
    jaxmp.value_and_grad(jnp.sum, "mixed_float16", loss_scale=jaxmp.NoOpLossScale())
    jaxmp.value_and_grad(jnp.sum, "mixed_bfloat16")


def test_a_recipe_in_a_rule_is_not_ignored():
    with pytest.raises(ValueError, match="Unknown recipe 'fp4'"):
        jaxmp.value_and_grad(jnp.sum, jaxmp.Policy(rules={"w": jaxmp.Policy(recipe="fp4")}))
