"""Activation functions: what is kept of them for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp.autocast._activation import find_activations
from tests.autocast_tools import BF16, F16, F32, UNIT, autocast, both, normal, traced

B, D, WIDE = 4, 8, 32
X, UP, DOWN = normal(0, B, D), normal(1, D, WIDE), normal(2, WIDE, D)


def tanh_gelu(x):
    return 0.5 * x * (1 + jnp.tanh(0.79788 * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "gelu": jax.nn.gelu,
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "by hand": tanh_gelu,
    "by hand, jitted": jax.jit(tanh_gelu),
    "squared relu": lambda x: jnp.square(jnp.maximum(x, 0)) * 0.5,
    "quick gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}
each = pytest.mark.parametrize("name", list(ACTIVATIONS))


def feed_forward(activation):
    return lambda x, up, down: activation(x @ up) @ down


def single_steps(fun, *args):
    return [eqn for eqn in traced(fun, *args) if eqn.primitive.name == "custom_jvp_call"]


def kept(fun, *args):
    """The arrays of the hidden width that the backward pass takes from the forward pass."""
    _, backward = jax.vjp(fun, *args)
    return [leaf.dtype for leaf in jax.tree.leaves(backward) if leaf.shape == (B, WIDE)]


@both
@each
def test_only_the_derivative_is_kept(name, compute):
    fun = autocast(feed_forward(ACTIVATIONS[name]), compute)
    # And the result, which the second product's weight gradient needs.
    assert kept(fun, X, UP, DOWN) == [jnp.dtype(compute)] * 2


@both
@each
@pytest.mark.parametrize("change", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
def test_values_and_gradients(name, compute, change):
    activation = ACTIVATIONS[name]
    if change is jax.vmap:
        plain, args = feed_forward(activation), (X[None], UP[None], DOWN[None])
    else:
        plain, args = feed_forward(activation), (X, UP, DOWN)
    fun = change(autocast(plain, compute))
    wanted = jax.vjp(change(plain), *args)
    found = jax.vjp(fun, *args)
    cotangent = jnp.ones_like(wanted[0])
    for ours, right in zip(
        jax.tree.leaves((found[0], found[1](cotangent))),
        jax.tree.leaves((wanted[0], wanted[1](cotangent))),
        strict=True,
    ):
        assert ours.dtype == F32
        scale = float(jnp.max(jnp.abs(right)))
        # Ten roundings on the longest path: two products, and the steps of the function.
        np.testing.assert_allclose(ours, right, atol=10 * UNIT[compute] * scale)


@both
@each
def test_one_rounding_of_the_value_and_one_of_the_derivative(name, compute):
    activation = ACTIVATIONS[name]
    x, one = X.astype(compute).astype(F32), jnp.eye(D)
    value, backward = jax.vjp(lambda x: autocast(feed_forward(activation), compute)(x, one, one), x)
    right, slope = jax.jvp(activation, (x,), (jnp.ones_like(x),))
    np.testing.assert_array_equal(value, right.astype(compute).astype(F32))
    np.testing.assert_array_equal(backward(jnp.ones_like(x))[0], slope.astype(compute).astype(F32))


def test_steps_that_need_more_range_than_float16_has():
    def mish(x):
        return x * jnp.tanh(jnp.log1p(jnp.exp(x)))

    def bump(x):
        return 1 / (1e-4 + x**2)

    for activation in (mish, bump):
        fun = feed_forward(activation)
        assert len(single_steps(autocast(fun, BF16), X, UP, DOWN)) == 1
        assert not single_steps(autocast(fun, F16), X, UP, DOWN)


@both
def test_a_constant_that_does_not_fit(compute):
    def fun(x, up, down):
        hidden = x @ up
        return (jnp.tanh(hidden) * hidden * 1e-42) @ (down * 1e35)

    assert not single_steps(autocast(fun, compute), X, UP, DOWN)


def test_two_functions_of_one_array():
    def fun(x, up, down):
        hidden = x @ up
        return jax.nn.gelu(hidden) @ down + jax.nn.silu(hidden) @ down

    assert len(single_steps(autocast(fun), X, UP, DOWN)) == 2


def test_derivatives_of_higher_order():
    def loss(fun):
        return lambda x: jnp.sum(fun(x, UP, DOWN) ** 2)

    ours, plain = (
        jax.hessian(loss(change(feed_forward(jax.nn.gelu))))(X)
        for change in (autocast, lambda f: f)
    )
    assert ours.dtype == F32
    np.testing.assert_allclose(ours, plain, atol=16 * UNIT[BF16] * float(jnp.max(jnp.abs(plain))))


def test_a_gate():
    def fun(x, up, gate, down):
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    args = X, UP, normal(3, D, WIDE), DOWN
    # Of the product its two operands, of which one is the result of the function.
    assert kept(autocast(fun), *args) == [jnp.dtype(BF16)] * 4


def test_a_parameter_of_the_function():
    def fun(x, up, down, beta):
        hidden = x @ up
        return (hidden * jax.nn.sigmoid(beta * hidden)) @ down

    beta = jnp.float32(1.5)
    assert len(single_steps(autocast(fun), X, UP, DOWN, beta)) == 1

    def gradient(fun):
        return jax.grad(lambda beta: jnp.sum(fun(X, UP, DOWN, beta)))(beta)

    ours, kept = gradient(autocast(fun)), gradient(autocast(jax.checkpoint(fun)))
    assert ours.dtype == F32
    np.testing.assert_allclose(ours, kept, rtol=1e-6)
    # Every term has a few roundings of its own.
    terms = jnp.sum(jnp.abs((X @ UP) ** 2 * jnp.sum(DOWN, axis=1)))
    np.testing.assert_allclose(ours, gradient(fun), atol=4 * UNIT[BF16] * float(terms) / 4)


def test_a_parameter_that_is_made_in_between():
    def fun(x, up, down):
        hidden = x @ up
        bent = jnp.tanh(hidden)
        return (bent * jnp.max(x) * hidden) @ down

    assert not single_steps(autocast(fun), X, UP, DOWN)
    right = fun(X, UP, DOWN)
    scale = float(jnp.max(jnp.abs(right)))
    np.testing.assert_allclose(autocast(fun)(X, UP, DOWN), right, atol=8 * UNIT[BF16] * scale)


class TestLeftAlone:
    def assert_plain(self, fun, *args):
        assert not single_steps(fun, *(args or (X, UP, DOWN)))

    def test_one_operation(self):
        self.assert_plain(autocast(feed_forward(jnp.tanh)))

    def test_what_has_no_curve(self):
        self.assert_plain(autocast(feed_forward(lambda x: 0.5 * jnp.maximum(2 * x + 1, 0.1 * x))))

    def test_several_results(self):
        def fun(x, up, down):
            hidden = x @ up
            bent = jnp.tanh(hidden)
            return bent @ down, (hidden * bent) @ down

        self.assert_plain(autocast(fun))

    def test_float32(self):
        self.assert_plain(autocast(feed_forward(jax.nn.gelu), F32))
        policy = jaxmp.Policy(activation_dtype=F32, compute_dtype=BF16)
        self.assert_plain(jaxmp.autocast(feed_forward(jax.nn.gelu), policy))

    def test_an_island(self):
        self.assert_plain(autocast(lambda x, up: jnp.mean(jax.nn.gelu(x @ up))), X, UP)

    def test_full_precision(self):
        def fun(x, up, down):
            with jaxmp.full_precision():
                return jax.nn.gelu(x @ up) @ down

        self.assert_plain(autocast(fun))

    def test_primitives_that_the_policy_names(self):
        policy = jaxmp.Policy(compute_dtype=BF16, primitives={"tanh": "full"})
        self.assert_plain(jaxmp.autocast(feed_forward(jax.nn.gelu), policy))


def test_another_autocast_has_been_here():
    inner = autocast(feed_forward(jax.nn.gelu), F16)
    (step,) = single_steps(autocast(inner), X, UP, DOWN)
    assert step.outvars[0].aval.dtype == F16


def test_layers_share_one_trace():
    def fun(x, *weights):
        for up in weights:
            x = jax.nn.gelu(x @ up)
        return x

    weights = [normal(i, D, D) for i in range(4)]
    # The last one gives the result, in float32.
    assert len(single_steps(autocast(fun), X, *weights)) == 3
    found = find_activations(jax.make_jaxpr(fun)(X, *weights).jaxpr)
    assert len({activation.key for activation in found.values()}) == 1


def test_in_a_scan_no_factor_is_stacked():
    def fun(x, ups, downs):
        def layer(x, weights):
            up, down = weights
            return x + jax.nn.gelu(x @ up) @ down, None

        return jax.lax.scan(layer, x, (ups, downs))[0]

    args = X, jnp.stack([UP] * 3), jnp.stack([DOWN] * 3)
    _, backward = jax.vjp(autocast(fun), *args)
    stacked = [leaf.dtype for leaf in jax.tree.leaves(backward) if leaf.shape == (3, B, WIDE)]
    assert stacked == [jnp.dtype(BF16)] * 2


def test_a_rule_for_one_layer_holds_for_it_alone():
    def fun(x, *weights):
        for i, up in enumerate(weights):
            with jax.named_scope(f"layer_{i}"):
                x = jax.nn.gelu(x @ up)
        return x

    policy = jaxmp.get_policy("mixed_bfloat16").with_rules({"layer_1": "float32"})
    weights = [normal(i, D, D) for i in range(5)]
    # Neither the first, which leads to float32 only, nor the last, which gives the result.
    assert len(single_steps(jaxmp.autocast(fun, policy), X, *weights)) == 2
