"""Autocast: the known answers, and the cases of public bug reports that it has to get right."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmp
from tests.autocast_tools import (
    BF16,
    F16,
    F32,
    UNIT,
    autocast,
    both,
    computed_in,
    drawn,
    dtypes_of,
    eqns_in,
    normal,
    traced,
)


def casts_to(eqns, *dtypes):
    return [
        eqn
        for eqn in eqns
        if eqn.primitive.name == "convert_element_type"
        and eqn.outvars[0].aval.dtype.type in dtypes
        and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)
    ]


def assert_error(result, wanted, tolerance):
    """Compares norms: an error of `tolerance` in each number is allowed, zeros included."""
    result, wanted = (np.asarray(v, np.float64) for v in (result, wanted))
    assert np.isfinite(result).all()
    assert np.linalg.norm(result - wanted) <= tolerance * np.linalg.norm(wanted)


def wrong(ours, plain, tolerance):
    """The names under which numbers differ, by more than the tolerance of the largest of each."""

    def differs(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return a.shape != b.shape or not np.abs(a - b).max() <= tolerance * np.abs(b).max()

    return [name for name in plain if differs(ours[name], plain[name])]


def odd_integers(seed, compute, *shape):
    """Numbers that the narrow dtype must round, and whose products add up exactly in float32.

    Of one bit too many, rounded to multiples of 2; seven products of such are below 2^24 times 4.
    """
    low = {BF16: 257, F16: 2049}[compute]
    rng = np.random.default_rng(seed)
    size = rng.integers(0, int(low * (2**0.5 - 1)) // 2, shape) * 2 + low
    return jnp.asarray(size * rng.choice([-1, 1], shape), F32)


SIZES = jnp.array([3, 0, 2])
LOW = {
    "matmul": (jnp.matmul, (4, 3), (3, 5)),
    "matvec": (jnp.matmul, (4, 3), (3,)),
    "dot": (jnp.dot, (5,), (5,)),
    "vdot": (jnp.vdot, (2, 3), (2, 3)),
    "tensordot": (functools.partial(jnp.tensordot, axes=2), (4, 2, 3), (2, 3, 5)),
    "einsum": (functools.partial(jnp.einsum, "bqhd,bkhd->bhqk"), (2, 4, 3, 5), (2, 3, 3, 5)),
    "conv 1d, dilated": (
        lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", rhs_dilation=(2,)),
        (2, 2, 9),
        (4, 2, 3),
    ),
    "conv 2d": (lambda x, w: lax.conv(x, w, (1, 2), "VALID"), (2, 1, 6, 6), (3, 1, 2, 3)),
    "conv_transpose": (
        lambda x, w: lax.conv_transpose(x, w, (2,), "SAME"),
        (2, 5, 2),
        (3, 2, 4),
    ),
    "ragged_dot": (lambda x, w: lax.ragged_dot(x, w, SIZES), (5, 3), (3, 3, 4)),
}


class TestEachOperation:
    """Answer 1: bit for bit what casting by hand gives."""

    @both
    def test_products_and_their_gradients(self, compute):
        args = {
            name: (odd_integers(0, compute, *left), odd_integers(1, compute, *right))
            for name, (_, left, right) in LOW.items()
        }

        def fun(args):
            return {name: LOW[name][0](*pair) for name, pair in args.items()}

        def with_gradients(fun):
            def run(args):
                result, pullback = jax.vjp(fun, args)
                signs = jax.tree.map(
                    lambda v: jnp.resize(jnp.array([1.0, -1.0, -1.0]), v.shape), result
                )
                return result, pullback(signs)[0]

            return jax.jit(run)

        ours, ours_grads = with_gradients(autocast(fun, compute))(args)
        rounded = jax.tree.map(lambda v: v.astype(compute).astype(F32), args)
        by_hand, grads = with_gradients(fun)(rounded)
        for name, (left, right) in grads.items():
            assert ours[name].dtype == F32
            np.testing.assert_array_equal(ours[name], by_hand[name], err_msg=name)
            np.testing.assert_array_equal(ours_grads[name][0], left, err_msg=name)
            np.testing.assert_array_equal(ours_grads[name][1], right, err_msg=name)
        products = computed_in(traced(with_gradients(autocast(fun, compute)), args))
        assert products == [compute] * 3 * len(LOW)

    @both
    def test_products_one_by_one(self, compute):
        args = odd_integers(0, compute, 4, 3), odd_integers(1, compute, 3, 5)
        by_hand = jnp.matmul(*(v.astype(compute).astype(F32) for v in args))
        assert not jnp.array_equal(by_hand, jnp.matmul(*args))
        np.testing.assert_array_equal(autocast(jnp.matmul, compute)(*args), by_hand)

    FULL = {
        "exp": (jnp.exp, 0, 2),
        "exp2": (jnp.exp2, 0, 2),
        "expm1": (jnp.expm1, 0, 2),
        "log": (jnp.log, 0.1, 9),
        "log1p": (jnp.log1p, 0.1, 9),
        "log2": (jnp.log2, 0.1, 9),
        "log10": (jnp.log10, 0.1, 9),
        "pow": (lambda x: jnp.power(x, 0.3), 0.1, 9),
        "reciprocal": (jnp.reciprocal, 0.1, 9),
        "power of -2": (lambda x: x**-2, 0.1, 9),
        "power of 5": (lambda x: x**5, 0.1, 3),
        "rsqrt": (lax.rsqrt, 0.1, 9),
        "acos": (jnp.arccos, -0.9, 0.9),
        "asin": (jnp.arcsin, -0.9, 0.9),
        "acosh": (jnp.arccosh, 1.1, 9),
        "asinh": (jnp.arcsinh, -2, 2),
        "atanh": (jnp.arctanh, -0.9, 0.9),
        "cosh": (jnp.cosh, -2, 2),
        "sinh": (jnp.sinh, -2, 2),
        "tan": (jnp.tan, -1, 1),
        "sin": (jnp.sin, -9, 9),
        "cos": (jnp.cos, -9, 9),
        "erf_inv": (lax.erf_inv, -0.9, 0.9),
        "lgamma": (lax.lgamma, 1, 9),
        "digamma": (lax.digamma, 1, 9),
        "polygamma": (lambda x: lax.polygamma(jnp.ones_like(x), x), 1, 9),
        "igamma": (lambda x: lax.igamma(jnp.full_like(x, 2.0), x), 1, 9),
        "zeta": (lambda x: lax.zeta(jnp.full_like(x, 3.0), x), 1, 9),
        "bessel_i0e": (lax.bessel_i0e, 0, 9),
        "bessel_i1e": (lax.bessel_i1e, 0, 9),
        "sum": (lambda x: jnp.sum(x, 0), 0.1, 9),
        "mean": (lambda x: jnp.mean(x, 1), 0.1, 9),
        "prod": (lambda x: jnp.prod(x, 0), 0.5, 2),
        "var": (lambda x: jnp.var(x, 0), 0.5, 2),
        "std": (lambda x: jnp.std(x, 0), 0.5, 2),
        "norm": (lambda x: jnp.linalg.norm(x, axis=0), 0.5, 2),
        "softmax": (jax.nn.softmax, -2, 2),
        "log_softmax": (jax.nn.log_softmax, -2, 2),
        "logsumexp": (lambda x: jax.nn.logsumexp(x, 0), -2, 2),
        "softplus": (jax.nn.softplus, -2, 2),
        "cumsum": (lambda x: jnp.cumsum(x, 0), 0.1, 9),
        "cumprod": (lambda x: jnp.cumprod(x, 0), 0.5, 2),
        "cumlogsumexp": (lax.cumlogsumexp, -2, 2),
        "reduce_window_sum": (
            lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID"),
            0.1,
            9,
        ),
        "fft": (lambda x: jnp.abs(jnp.fft.fft(x)), -2, 2),
        "scatter-add": (lambda x: jnp.zeros(8).at[jnp.array([1] * 8)].add(x[0]), 0.1, 9),
        "segment_sum": (lambda x: jax.ops.segment_sum(x, jnp.arange(8) // 3, 3), 0.1, 9),
    }

    @both
    def test_delicate_operations_are_in_float32(self, compute):
        def inputs(low, high):
            # What the narrow dtype holds, so that the product with one rounds nothing.
            x = jax.random.uniform(jax.random.key(0), (8, 8), minval=low, maxval=high)
            return x.astype(compute).astype(F32)

        xs = {name: inputs(*bounds) for name, (_, *bounds) in self.FULL.items()}

        def fun(xs):
            return {name: self.FULL[name][0](x @ jnp.eye(8)) for name, x in xs.items()}

        # Products of inputs that lead to sin, cos or tan are in float32, see TestPositions.
        products = computed_in(traced(autocast(fun, compute), xs))
        assert (products.count(compute), products.count(F32)) == (len(xs) - 3, 3)
        ours = jax.jit(autocast(fun, compute))(xs)
        plain = jax.jit(lambda xs: {name: self.FULL[name][0](x) for name, x in xs.items()})(xs)
        assert {v.dtype for v in ours.values()} == {np.dtype(F32)}
        # The same operations of the same numbers, which the compiler may order otherwise.
        assert not wrong(ours, plain, 16 * UNIT[F32])

    LINALG = {
        "cholesky": jnp.linalg.cholesky,
        "lu": lambda a: jax.scipy.linalg.lu_factor(a)[0],
        "qr": lambda a: jnp.linalg.qr(a)[1],
        "svd": lambda a: jnp.linalg.svd(a, compute_uv=False),
        "eigh": jnp.linalg.eigvalsh,
        "eig": lambda a: jnp.sort(jnp.abs(jnp.linalg.eigvals(a))),
        "schur": lambda a: jax.scipy.linalg.schur(a)[0],
        "solve": lambda a: jnp.linalg.solve(a, jnp.ones((8, 1))),
        "triangular_solve": lambda a: jax.scipy.linalg.solve_triangular(a, jnp.ones(8)),
        "tridiagonal_solve": lambda a: lax.linalg.tridiagonal_solve(
            jnp.zeros(8),
            jnp.diag(a),
            jnp.zeros(8),
            a[:, :2],
        ),
        "inv": jnp.linalg.inv,
        "det": jnp.linalg.det,
    }

    @both
    def test_linear_algebra_is_in_float32(self, compute):
        x = (normal(0, 8, 8) / 4).astype(compute).astype(F32)
        x = (x + x.T + 4 * jnp.eye(8)).astype(compute).astype(F32)

        def fun(x):
            return {name: op(x @ jnp.eye(8)) for name, op in self.LINALG.items()}

        ours = jax.jit(autocast(fun, compute))(x)
        plain = jax.jit(lambda x: {name: op(x) for name, op in self.LINALG.items()})(x)
        assert {v.dtype for v in ours.values()} == {np.dtype(F32)}
        # Of the same operands, up to the order of sums: some units times the condition, which is 3.
        assert not wrong(ours, plain, 256 * UNIT[F32])

    @both
    def test_gradients_of_linear_algebra_are_in_float32(self, compute):
        """A step has the products of their derivatives inside, a loss has them outside."""
        x = normal(0, 8, 8) / 4
        x = x + x.T + 4 * jnp.eye(8)
        operations = ("cholesky", "qr", "svd", "eigh", "solve", "inv", "det")

        def losses(wrap):
            return {
                name: wrap(lambda x, op=self.LINALG[name]: jnp.sum(jnp.sin(op(x))))
                for name in operations
            }

        def gradients(wrap):
            return lambda x: {name: jax.grad(loss)(x) for name, loss in losses(wrap).items()}

        plain = gradients(lambda loss: loss)
        wanted = jax.jit(plain)(x)
        outside = jax.jit(gradients(lambda loss: autocast(loss, compute)))(x)
        assert not wrong(outside, wanted, 256 * UNIT[F32])
        assert not wrong(jax.jit(autocast(plain, compute))(x), wanted, 256 * UNIT[F32])

    FOLLOW = {
        "tanh": jnp.tanh,
        "logistic": jax.nn.sigmoid,
        "erf": lax.erf,
        "erfc": lax.erfc,
        "sqrt": lambda x: jnp.sqrt(jnp.abs(x)),
        "cbrt": jnp.cbrt,
        "square": jnp.square,
        "relu": jax.nn.relu,
        "abs": jnp.abs,
        "neg": jnp.negative,
        "sign": jnp.sign,
        "floor": jnp.floor,
        "ceil": jnp.ceil,
        "round": jnp.round,
        "reduce_max": lambda x: jnp.max(x, 0, keepdims=True),
        "reduce_min": lambda x: jnp.min(x, 0, keepdims=True),
        "cummax": lax.cummax,
        "sort": lambda x: jnp.sort(x, 0),
        "top_k": lambda x: lax.top_k(x, 8)[0],
        "reshape": lambda x: x.reshape(4, 16).reshape(8, 8),
        "transpose": lambda x: x.T,
        "slice": lambda x: x[2:5],
        "gather": lambda x: x[jnp.array([3, 3, 0])],
        "rev": lambda x: x[::-1],
        "concatenate": lambda x: jnp.concatenate([x, x]),
        "pad": lambda x: jnp.pad(x, ((1, 0), (0, 0))),
        "dynamic_slice": lambda x: lax.dynamic_slice(x, (jnp.int32(1), jnp.int32(0)), (3, 8)),
        "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:2], (3, 0)),
        "select_n": lambda x: jnp.where(x > 0, x, 2 * x),
        "clamp": lambda x: jnp.clip(x, -1.0, 1.0),
        "stop_gradient": lax.stop_gradient,
        "optimization_barrier": lax.optimization_barrier,
        "add": lambda x: x + x[::-1],
        "sub": lambda x: x - x[::-1],
        "mul": lambda x: x * x[::-1],
        "div": lambda x: x / (x[::-1] + 4.0),
        "rem": lambda x: lax.rem(x, jnp.abs(x[::-1]) + 4.0),
        "max": lambda x: jnp.maximum(x, x[::-1]),
        "min": lambda x: jnp.minimum(x, x[::-1]),
        "atan2": lambda x: jnp.arctan2(x, x[::-1]),
    }

    @both
    def test_other_operations_between_products_are_narrow(self, compute):
        x, eye = normal(0, 8, 8).astype(compute).astype(F32), jnp.eye(8)
        between = {name: lambda x, op=op: op(x @ eye) @ eye for name, op in self.FOLLOW.items()}

        def fun(x):
            return {name: op(x) for name, op in between.items()}

        ours = jax.jit(autocast(fun, compute))(x)
        by_hand = {name: op(x.astype(compute)) for name, op in self.FOLLOW.items()}
        assert {v.dtype for v in by_hand.values()} == {np.dtype(compute)}
        # What is of several operations, a compiler may round less often.
        assert not wrong(ours, by_hand, 2 * UNIT[compute])
        # What is repeated is repeated in float32, so that gradients add up in it.
        wide = {
            "mixed_product",
            "gather",
            "broadcast_in_dim",
            "convert_element_type",
            "jit",
            "pjit",
        }
        for name, op in between.items():
            eqns = traced(autocast(op, compute), x)
            assert computed_in(eqns) == [compute] * 2
            full = [e for e in eqns if any(v.aval.dtype == F32 for v in e.outvars)]
            assert {eqn.primitive.name for eqn in full} <= wide, name

    def test_an_embedding_is_gathered_in_float32_and_its_gradient_adds_up_in_float32(self):
        table, w = normal(0, 4, 8), normal(1, 8, 3)
        index = jnp.zeros(4096, jnp.int32)

        def loss(table):
            return jnp.sum(jnp.take(table, index, 0) @ w)

        gradient = jax.grad(autocast(loss))(table)
        # Each of the 4096 terms is right to one rounding of the weights; their sum has no others.
        assert_error(gradient, jax.grad(loss)(table), UNIT[BF16])

    def test_other_dtypes_are_left_alone(self):
        integers = jnp.arange(12).reshape(3, 4)
        complexes = lax.complex(normal(0, 3, 4), normal(1, 3, 4))
        for fun, x in itertools.product(
            [lambda x: x @ x.T, lambda x: jnp.cumsum(x, 0), lambda x: x * x - 3],
            [integers, complexes],
        ):
            assert str(jax.make_jaxpr(autocast(fun))(x)) == str(jax.make_jaxpr(fun)(x))
            assert jnp.array_equal(autocast(fun)(x), fun(x))
        with jax.enable_x64(True):
            x = jnp.linspace(0, 1, 12, dtype=jnp.float64).reshape(3, 4)
            fun = lambda x: jnp.exp(x @ x.T) @ x  # noqa: E731
            assert str(jax.make_jaxpr(autocast(fun))(x)) == str(jax.make_jaxpr(fun)(x))
            result = autocast(fun)(x)
            assert result.dtype == jnp.float64
            assert jnp.array_equal(result, fun(x))

    def test_other_dtypes_beside_a_narrow_product(self):
        def fun(x, w, index, key, z):
            noise = jax.random.uniform(key, (4, 8))
            h = jnp.tanh(x @ w + noise) @ w
            return h[index], jnp.argmax(h, -1) + index, z * 2, jax.random.split(key)

        args = normal(0, 4, 8), normal(1, 8, 8), jnp.array([0, 3, 2, 2]), jax.random.key(3)
        args = *args, jnp.ones(2, jnp.complex64)
        ours, plain = autocast(fun)(*args), fun(*args)
        assert [v.dtype for v in ours] == [v.dtype for v in plain]
        assert jnp.array_equal(jax.random.key_data(ours[3]), jax.random.key_data(plain[3]))
        assert jnp.array_equal(ours[2], plain[2])
        assert_error(ours[0], plain[0], 8 * UNIT[BF16])

    @both
    def test_nested_disabling_restores(self, compute):
        x, w = normal(0, 4, 8), normal(1, 8, 8)
        product = lambda x, w: jnp.tanh(x @ w)  # noqa: E731

        def by_region(x, w):
            x = product(x, w)
            with jaxmp.full_precision():
                x = product(x, w)
            return product(x, w)

        def by_decorator(x, w):
            return product(jaxmp.full_precision()(product)(product(x, w), w), w)

        for fun in (by_region, by_decorator):
            eqns = traced(autocast(fun, compute), x, w)
            assert computed_in(eqns) == [compute, F32, compute]
            assert dtypes_of(eqns, "tanh")[1] == (F32,)
            # The backward pass of each, in reverse.
            gradient = traced(
                jax.grad(lambda x, w, f=fun: jnp.sum(autocast(f, compute)(x, w)), 1), x, w
            )
            assert computed_in(gradient).count(F32) == 3
            assert computed_in(gradient).count(compute) == 5

    @both
    def test_the_inner_autocast_wins(self, compute):
        x, w = normal(0, 4, 8), normal(1, 8, 8)
        product = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
        for inner in ("float32", "mixed_bfloat16", "mixed_float16"):
            wanted = jaxmp.get_policy(inner).compute_dtype.type

            def fun(x, w, inner=inner):
                return product(jaxmp.autocast(product, inner)(product(x, w), w), w)

            found = computed_in(traced(autocast(fun, compute), x, w))
            assert found == [compute, wanted, compute], inner
            x_gradient = jax.grad(lambda x, w, f=fun: jnp.sum(autocast(f, compute)(x, w)))
            found = computed_in(traced(x_gradient, x, w))
            assert found == [compute, wanted, compute] * 2, inner

    def test_a_region_left_by_an_error_ends(self):
        x, w = normal(0, 4, 8), normal(1, 8, 8)

        def fun(x, w):
            try:
                with jaxmp.full_precision():
                    raise KeyError
            except KeyError:
                return x @ w

        assert computed_in(traced(autocast(fun), x, w)) == [BF16]


class TestMixedInputs:
    """Answer 2: what was computed in float32 keeps the operation with a half value in float32."""

    OPS = {
        "add": lambda h, e: h + e,
        "sub": lambda h, e: h - e,
        "mul": lambda h, e: h * e,
        "div": lambda h, e: h / e,
        "max": jnp.maximum,
        "concatenate": lambda h, e: jnp.concatenate([h, e], 1),
        "select_n": lambda h, e: jnp.where(jnp.arange(8) < 4, h, e),
        "dynamic_update_slice": lambda h, e: lax.dynamic_update_slice(h, e[:2], (1, 0)),
        "atan2": jnp.arctan2,
    }

    @both
    @pytest.mark.parametrize("name", OPS)
    def test_arithmetic(self, name, compute):
        x, eye = normal(0, 4, 8).astype(compute).astype(F32), jnp.eye(8)

        def fun(x):
            h = x @ eye
            # The half value has a use in half besides, and the result is used twice.
            r = self.OPS[name](h, jnp.exp(h))
            return r, jnp.tanh(r), h @ eye

        eqns = traced(autocast(fun, compute), x)
        for eqn in eqns:
            if eqn.primitive.name == name:
                floats = {v.aval.dtype.type for v in eqn.invars if v.aval.dtype in (F32, compute)}
                assert floats == {F32}
        wanted = self.OPS[name](x, jnp.exp(x))
        np.testing.assert_allclose(autocast(fun, compute)(x)[0], wanted, rtol=4 * UNIT[F32])

    @both
    def test_comparisons_give_bools(self, compute):
        x, eye = normal(0, 4, 8).astype(compute).astype(F32), jnp.eye(8)

        def fun(x):
            h = x @ eye
            e = jnp.exp(h) - 1
            return h < e, h >= e, h == e, h != e, jnp.isfinite(h), jnp.isnan(e)

        for ours, wanted in zip(autocast(fun, compute)(x), fun(x), strict=True):
            assert ours.dtype == jnp.bool_
            assert jnp.array_equal(ours, wanted)

    @both
    def test_scatter_add_is_in_float32(self, compute):
        x, w = jnp.ones((3000, 1)), jnp.ones((1, 1))

        def fun(x, w):
            return jnp.zeros((2, 1)).at[jnp.zeros(3000, jnp.int32)].add(x @ w)

        # A running sum of ones stops at 256 in bfloat16 and at 2048 in float16.
        assert float(autocast(fun, compute)(x, w)[0, 0]) == 3000.0
        assert {
            dtypes[0] for dtypes in dtypes_of(traced(autocast(fun, compute), x, w), "scatter-add")
        } == {F32}


class TestCasts:
    """Answers 3 and 4: where casts are, and how many."""

    def test_a_weight_used_twice_is_cast_once_in_each_pass(self):
        x, w = normal(0, 4, 24), normal(1, 24, 24)

        def loss(w, x):
            return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

        for fun, passes in ((autocast(loss), 1), (jax.value_and_grad(autocast(loss)), 2)):
            # Of the program, operands of products are masters or cast once.
            casts = [
                eqn for eqn in casts_to(traced(fun, w, x), BF16) if eqn.invars[0].aval.size == 576
            ]
            assert len(casts) <= passes
            # Of the compiled one, the casts that are left after common ones are joined.
            text = jax.jit(fun).lower(w, x).compile().as_text()
            left = [
                line
                for line in text.splitlines()
                if " convert(" in line and "= bf16[24,24]" in line
            ]
            assert len(left) <= passes

    def test_a_program_without_products_is_unchanged(self):
        programs = [
            lambda x: jnp.sqrt(jax.nn.relu(jnp.exp(x))),
            lambda x: jnp.exp(jax.nn.relu(jnp.log(x))),
            lambda x: jax.nn.softmax(x) + 3,
            lambda x: lax.scan(lambda c, v: (c + v, c * v), x[0], x),
            lambda x: jnp.linalg.norm(x) / x.astype(F16).astype(F32),
            jax.grad(lambda x: jnp.sum(jnp.tanh(x) ** 2)),
            lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
        ]
        x = jnp.abs(normal(0, 4, 8))
        for fun in programs:
            ours, plain = (
                [
                    (eqn.primitive.name, *(str(v.aval) for v in [*eqn.invars, *eqn.outvars]))
                    for eqn in traced(f, x)
                    if eqn.primitive.name != "jit"  # small calls are computed in their place
                ]
                for f in (autocast(fun), fun)
            )
            assert ours == plain

    def test_an_all_float32_policy_changes_nothing(self):
        fun = lambda x: jnp.exp(jax.nn.relu(x @ x.T)) @ x  # noqa: E731
        x = normal(0, 4, 8)
        ours = jax.make_jaxpr(jaxmp.autocast(fun, "float32"))(x)
        assert str(ours) == str(jax.make_jaxpr(fun)(x))

    @both
    def test_elementwise_operations_between_products_are_narrow(self, compute):
        x, w = normal(0, 4, 8), normal(1, 8, 8)
        relu = lambda x: jnp.maximum(x, 0.0)  # noqa: E731
        eqns = traced(autocast(lambda x, w: relu(relu(x) @ w) @ w, compute), x, w)
        first, second = dtypes_of(eqns, "max")
        assert set(first) <= {F32, compute}
        assert second == (compute, compute)
        assert computed_in(eqns) == [compute] * 2
        # In is what the product takes, out what it gives.
        assert len(casts_to(eqns, compute)) <= 1
        assert len(casts_to(eqns, F32)) <= 1

    @both
    @pytest.mark.parametrize("uses", [1, 3])
    def test_one_cast_in_and_one_out_at_a_border(self, compute, uses):
        x, w = normal(0, 4, 8), normal(1, 8, 8)

        def fun(x, w):
            h = x @ w
            e = jnp.exp(h)
            return sum((jnp.tanh(e @ w) @ w for _ in range(uses)), start=jnp.zeros((4, 8)))

        eqns = traced(autocast(fun, compute), x, w)
        assert dtypes_of(eqns, "exp") == [(F32,)]
        made = {v for eqn in eqns if eqn.primitive.name == "exp" for v in eqn.outvars}
        assert len([eqn for eqn in casts_to(eqns, compute) if eqn.invars[0] in made]) == 1
        widened = [eqn for eqn in casts_to(eqns, F32) if eqn.invars[0].aval.dtype == compute]
        assert len(widened) <= 2

    @both
    def test_a_bool_made_a_float_may_go_narrow(self, compute):
        x, w = normal(0, 4, 8), normal(1, 8, 8)
        fun = lambda x, w: (x > 0).astype(F32) @ w  # noqa: E731
        assert computed_in(traced(autocast(fun, compute), x, w)) == [compute]
        result = autocast(fun, compute)(x, w)
        wanted = fun(x, w.astype(compute).astype(F32))
        np.testing.assert_allclose(result, wanted, atol=16 * UNIT[F32] * 8)

    @both
    def test_a_float32_loop_carry_with_a_product_inside(self, compute):
        x, w = normal(0, 4, 8), normal(1, 8, 8) / 3
        loops = {
            "scan": lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0],
            "stacked": lambda x, w: lax.scan(lambda c, _: (c + c @ w, c), x, length=3)[1][-1],
            "sum": lambda x, w: lax.scan(lambda c, v: (c + v @ w, None), x @ w, x[None])[0],
            "fori": lambda x, w: lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ w), x),
            "while": lambda x, w: lax.while_loop(
                lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x)
            )[1],
        }
        for name, loop in loops.items():
            fun = autocast(loop, compute)
            assert set(computed_in(traced(fun, x, w))) == {compute}, name
            result = fun(x, w)
            assert result.dtype == F32
            # Three products of two operands each, and the roundings of the carry.
            assert_error(result, loop(x, w), 12 * UNIT[compute])


@jax.custom_jvp
def scaled_tanh(x, w):
    return jnp.tanh(x @ w)


@scaled_tanh.defjvp
def _scaled_tanh_jvp(primals, tangents):
    x, w = primals
    y = scaled_tanh(x, w)
    return y, (1 - y**2) * (tangents[0] @ w + x @ tangents[1])


@jax.custom_vjp
def layer(x, w):
    return jnp.tanh(x @ w)


def _layer_fwd(x, w):
    y = layer(x, w)
    return y, (x, w, y)


def _layer_bwd(saved, g):
    x, w, y = saved
    g = g * (1 - y**2)
    return g @ w.T, x.T @ g


layer.defvjp(_layer_fwd, _layer_bwd)


class TestCustomRules:
    """Answer 5: products of both passes in the compute dtype."""

    @both
    @pytest.mark.parametrize("rule", [scaled_tanh, layer])
    def test_products_of_both_passes(self, rule, compute):
        x, w, v = normal(0, 4, 8), normal(1, 8, 8) / 3, normal(2, 8, 2)

        def loss(w, x):
            return jnp.sum(jnp.sin(rule(rule(x, w), w) @ v))

        outside = jax.value_and_grad(autocast(loss, compute))
        inside = autocast(jax.value_and_grad(loss), compute)
        wanted = jax.value_and_grad(loss)(w, x)
        for fun in (outside, inside, jax.jit(outside), jax.jit(inside)):
            # Forward three; backward two of each, save that of the input and of the constant.
            dtypes = computed_in(traced(fun, w, x))
            assert set(dtypes) == {compute}
            assert len(dtypes) >= 7
            value, grad = fun(w, x)
            assert (value.dtype, grad.dtype) == (F32, F32)
            assert_error(value, wanted[0], 12 * UNIT[compute])
            assert_error(grad, wanted[1], 12 * UNIT[compute])

    @both
    def test_custom_jvp_forwards(self, compute):
        x, w = normal(0, 4, 8), normal(1, 8, 8) / 3
        fun = lambda w: jax.jvp(lambda w: autocast(scaled_tanh, compute)(x, w), (w,), (w,))  # noqa: E731
        assert set(computed_in(traced(fun, w))) == {compute}
        wanted = jax.jvp(lambda w: scaled_tanh(x, w), (w,), (w,))
        for a, b in zip(fun(w), wanted, strict=True):
            assert a.dtype == F32
            assert_error(a, b, 8 * UNIT[compute])

    @both
    def test_a_rule_with_a_switch_and_integers(self, compute):
        """Non-differentiable arguments, integer residuals, a backward pass unlike the forward."""

        @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
        def clipped(bound, x, w, index):
            return jnp.clip(x @ w, -bound, bound)[index]

        def forward(bound, x, w, index):
            y = x @ w
            return jnp.clip(y, -bound, bound)[index], (x, w, index, jnp.abs(y) < bound)

        def backward(bound, saved, g):
            x, w, index, inside = saved
            g = jnp.where(inside, jnp.zeros(inside.shape).at[index].add(g), 0.0)
            return g @ w.T, x.T @ g, None

        clipped.defvjp(forward, backward)
        x, w, index = normal(0, 4, 8), normal(1, 8, 8), jnp.array([0, 0, 3])

        def loss(x, w):
            return jnp.sum(clipped(2.0, x, w, index) ** 2)

        grads = jax.grad(autocast(loss, compute), (0, 1))(x, w)
        assert set(computed_in(traced(jax.grad(autocast(loss, compute), (0, 1)), x, w))) == {
            compute
        }
        for grad, wanted in zip(grads, jax.grad(loss, (0, 1))(x, w), strict=True):
            assert grad.dtype == F32
            assert_error(grad, wanted, 8 * UNIT[compute])


def block(w, x):
    h = jnp.tanh(x @ w)
    a = jax.nn.softmax(h @ h.T) @ h
    return x + jnp.tanh(a @ w)


def signature(eqns, names=("mixed_product", "tanh", "exp", "reduce_max", "reduce_sum")):
    return sorted(
        (eqn.primitive.name, *(str(v.aval) for v in [*eqn.invars, *eqn.outvars]))
        for eqn in eqns
        if eqn.primitive.name in names
    )


class TestRemat:
    """Answer 6 and case B35: a recomputed value is that which was computed first."""

    @both
    def test_the_recomputed_forward_sees_the_same_dtypes(self, compute):
        w, x = normal(0, 8, 8) / 3, normal(1, 4, 8)

        def loss(w, x):
            # What is saved between is computed from, so that nothing of the block may be left out.
            return jnp.sum(jnp.sin(jax.checkpoint(block)(w, x)))

        jaxpr = jax.make_jaxpr(jax.grad(autocast(loss, compute)))(w, x)
        again = [e for e in jaxpr.jaxpr.eqns if e.primitive.name in ("checkpoint", "remat2")]
        (again,) = again
        recomputed = list(eqns_in(again.params["jaxpr"]))
        first = [e for e in eqns_in(jaxpr) if e not in recomputed and e is not again]
        wanted = [row for row in signature(first) if row[0] != "mixed_product"]
        assert {row[0] for row in wanted} == {"tanh", "exp", "reduce_max", "reduce_sum"}
        found = signature(recomputed)
        # The last tanh is needed, the sum of the loss is not the block's.
        for row in wanted:
            if row[0] in ("tanh", "exp", "reduce_max"):
                assert row in found
        assert set(computed_in(eqns_in(jaxpr))) == {compute}

    POLICIES = {
        "default": None,
        "nothing": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_saveable,
    }
    NESTINGS = {
        "autocast(checkpoint)": lambda f, p: autocast(jax.checkpoint(f, policy=p)),
        "checkpoint(autocast)": lambda f, p: jax.checkpoint(autocast(f), policy=p),
        "bf16 in f32 in bf16": lambda f, p: autocast(
            jaxmp.autocast(jax.checkpoint(autocast(f), policy=p), "float32")
        ),
    }

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("nesting", NESTINGS)
    def test_gradients_are_those_without(self, policy, nesting):
        w, x = normal(0, 8, 8) / 3, normal(1, 4, 8)
        rematted = self.NESTINGS[nesting](block, self.POLICIES[policy])

        def gradient(block):
            return jax.grad(lambda w, x: jnp.sum(jnp.sin(block(w, x))))

        ours, plain = gradient(rematted), gradient(autocast(block))
        wanted = jax.jit(plain)(w, x)

        def wrapped(w, x):
            return {
                "plain": ours(w, x),
                "jit": jax.jit(ours)(w, x),
                "scan": lax.scan(lambda c, x: (c + ours(w, x), None), w * 0, x[None])[0],
                "vmap": jax.vmap(ours, (None, 0))(w, x[None])[0],
            }

        assert set(computed_in(traced(wrapped, w, x))) == {BF16}
        found = jax.jit(wrapped)(w, x)
        assert not wrong(found, dict.fromkeys(found, wanted), 4 * UNIT[BF16])

    def test_leaving_has_no_effect(self):
        w, x = normal(0, 8, 8) / 3, normal(1, 4, 8)
        jitted = jax.jit(block)
        before = jitted(w, x)
        narrow = autocast(jitted)(w, x)
        assert jnp.array_equal(jitted(w, x), before)
        fresh = jax.jit(block)
        # The other way round: first traced inside, then used outside.
        assert jnp.array_equal(autocast(fresh)(w, x), narrow)
        assert jnp.array_equal(fresh(w, x), before)
        assert set(computed_in(traced(fresh, w, x))) == {F32}
        assert not jnp.array_equal(narrow, before)

    @pytest.mark.parametrize("first", ["full", "narrow"])
    def test_a_function_traced_in_a_region_is_not_reused_outside_it(self, first):
        """The caches of jit, checkpoint, scan and custom rules know one trace for both."""
        x, w = normal(0, 4, 8), normal(1, 8, 8) / 3

        functions = {
            "jit": jax.jit(lambda x, w: jnp.tanh(x @ w)),
            "checkpoint": jax.checkpoint(lambda x, w: jnp.tanh(x @ w)),
            "custom_vjp": layer,
            "custom_jvp": scaled_tanh,
            "scan": lambda x, w, body=lambda c, w: (jnp.tanh(c @ w), None): lax.scan(
                body, x, w[None]
            )[0],
            "vmap": jax.vmap(lambda x, w: jnp.tanh(x @ w), (0, None)),
        }
        for name, step in functions.items():

            def fun(x, step=step):
                if first == "narrow":
                    x = step(x, w)
                with jaxmp.full_precision():
                    x = step(x, w)
                return x if first == "narrow" else step(x, w)

            wanted = [BF16, F32] if first == "narrow" else [F32, BF16]
            assert computed_in(traced(autocast(fun), x)) == wanted, name
            gradient = computed_in(traced(jax.grad(lambda x, f=fun: jnp.sum(autocast(f)(x))), x))
            # As many in the backward pass; custom rules compute the gradient of w as well.
            assert gradient.count(F32) == gradient.count(BF16) >= 2, name


# Their sums are of another dtype than the user's own.
UNFIT = ("loop", "mean by a product")


class TestRange:
    """Answer 7 and case B27: sums over half values."""

    def test_three_sums_of_float16(self):
        one = jnp.ones((1, 1))

        def narrow(fun):
            return lambda x: fun((x[:, None] @ one)[:, 0])

        results = {
            70000.0: autocast(narrow(jnp.sum), F16)(jnp.ones(70000)),
            600.0: autocast(narrow(jnp.linalg.norm), F16)(jnp.full(4, 300.0)),
            np.log(70000.0): autocast(narrow(jax.nn.logsumexp), F16)(jnp.zeros(70000)),
        }
        for wanted, result in results.items():
            assert result.dtype == F32
            np.testing.assert_allclose(result, wanted, rtol=4 * UNIT[F32])

    def test_norm_and_logsumexp_of_float16_given_by_the_user(self):
        """They fit the dtype that they are returned in."""
        norm = autocast(jnp.linalg.norm, F16)(jnp.full(4, 300.0, F16))
        assert (norm.dtype, float(norm)) == (F16, 600.0)
        lse = autocast(jax.nn.logsumexp, F16)(jnp.zeros(70000, F16))
        assert lse.dtype == F16
        np.testing.assert_allclose(np.float32(lse), np.log(70000.0), rtol=UNIT[F16])

    @both
    @pytest.mark.parametrize("size", [30.0, 150.0, 200.0])
    def test_activations_of_large_values(self, size, compute):
        """The square of 256 does not fit float16, nor three times that of 148, as gelu has it."""
        h = jnp.linspace(-size, size, 64).reshape(8, 8)
        w = normal(1, 8, 8)
        activations = {
            name: getattr(jax.nn, name)
            for name in ("gelu", "silu", "mish", "softplus", "elu", "selu", "log_sigmoid", "relu")
        }
        activations["exact gelu"] = functools.partial(jax.nn.gelu, approximate=False)

        def gradients(wrap):
            def loss(activation):
                return wrap(lambda h: jnp.sum(jnp.cos(activation(h @ jnp.eye(8)) @ w / size)))

            return lambda h: {name: jax.grad(loss(f))(h) for name, f in activations.items()}

        found = jax.jit(gradients(lambda loss: autocast(loss, compute)))(h)
        wanted = jax.jit(gradients(lambda loss: loss))(h)
        assert not wrong(found, wanted, 16 * UNIT[compute])

    REDUCTIONS = {
        "mean": jnp.mean,
        "sum": jnp.sum,
        "var": lambda x: jnp.var(x) + 1,
        "std": lambda x: jnp.std(x) + 1,
        "norm": jnp.linalg.norm,
        "logsumexp": jax.nn.logsumexp,
        "cumsum": lambda x: jnp.cumsum(x)[-1],
        "prod": lambda x: jnp.prod(x[:100]),
        "mean of squares": lambda x: jnp.mean(x**2),
        "mean of products": lambda x: jnp.mean(x * x),
        "root mean square": lambda x: jnp.sqrt(jnp.mean(jnp.square(x))),
        "sum over n": lambda x: jnp.sum(x) / 1000 / 100,
        "sum of sums": lambda x: jnp.sum(jnp.sum(x.reshape(100, 1000), 0)),
        "segment_sum": lambda x: jax.ops.segment_sum(x, jnp.zeros(x.size, jnp.int32), 1)[0],
        "loop": lambda x: lax.scan(lambda c, v: (c + v, None), jnp.float32(0), x)[0],
        "mean by a product": lambda x: (x @ jnp.ones(x.size)) / x.size,
    }

    @both
    @pytest.mark.parametrize("value", [2.0, 1e-5])
    @pytest.mark.parametrize("kind", ["computed", "given"])
    def test_reductions_of_narrow_values(self, value, kind, compute):
        # Rounded once: what is left is the error of the reduction.
        x = jnp.full(100_000, value, compute).astype(F32)

        def computed(x):
            h = (x[:, None] @ jnp.ones((1, 1)))[:, 0]
            return {name: fun(h) for name, fun in self.REDUCTIONS.items()}

        def given(x):
            """Of half values that the user has, brought into the range of the half dtype."""
            results = {name: fun(x) for name, fun in self.REDUCTIONS.items() if name not in UNFIT}
            return {name: jnp.sqrt(v).astype(F32) for name, v in results.items()}

        ours = jax.jit(autocast(computed if kind == "computed" else given, compute))(
            x if kind == "computed" else x.astype(compute)
        )
        plain = jax.jit(computed if kind == "computed" else given)(x)
        assert {v.dtype for v in ours.values()} == {np.dtype(F32)}
        failures = {}
        for name, result in ours.items():
            wanted = self.exact(name, float(x[0]))
            wanted = wanted if kind == "computed" else wanted**0.5
            # Beyond what float32 holds: not asked for.
            fits = 2.0**-126 < wanted < 2.0**127 and np.isfinite(plain[name])
            if fits and not abs(float(result) - wanted) <= 1e-3 * wanted:
                failures[name] = (float(result), wanted)
        assert not failures

    @staticmethod
    def exact(name, v, n=100_000):
        return {
            "mean": v,
            "sum": n * v,
            "var": 1.0,
            "std": 1.0,
            "norm": v * n**0.5,
            "logsumexp": v + np.log(n),
            "cumsum": n * v,
            "prod": v**100,
            "mean of squares": v**2,
            "mean of products": v**2,
            "root mean square": v,
            "sum over n": v,
            "sum of sums": n * v,
            "segment_sum": n * v,
            "loop": n * v,
            "mean by a product": v,
        }[name]

    def test_sums_that_feed_a_division_are_not_cast_between(self):
        def fun(x):
            h = x @ jnp.ones((1, 1))
            return jnp.sum(h) / h.size, jnp.sum(h * h) / jnp.sum(jnp.abs(h))

        eqns = traced(autocast(fun, F16), jnp.ones((64, 1)))
        sums = {v for eqn in eqns if eqn.primitive.name == "reduce_sum" for v in eqn.outvars}
        assert not [eqn for eqn in casts_to(eqns, F16) if eqn.invars[0] in sums]
        assert set(dtypes_of(eqns, "reduce_sum")) == {(F32,)}
        assert set(dtypes_of(eqns, "div")) == {(F32, F32)}

    @both
    def test_an_explicit_dtype_is_respected(self, compute):
        x, w = jnp.ones((64, 3)), jnp.ones((3, 1))
        for dtype in (F16, BF16, F32):
            fun = lambda x, w, d=dtype: (jnp.sum(x @ w, dtype=d), jnp.mean(x @ w, dtype=d))  # noqa: E731
            ours, plain = autocast(fun, compute)(x, w), fun(x, w)
            assert [v.dtype for v in ours] == [v.dtype for v in plain] == [dtype] * 2
            assert jnp.array_equal(ours[0], plain[0])
        # Also where the sum then does not fit.
        fun = lambda x: jnp.sum(x @ jnp.ones((1, 1)), dtype=F16)  # noqa: E731
        assert jnp.isinf(autocast(fun, compute)(jnp.ones((70000, 1))))


class Rotary(nn.Module):
    """Frequencies as a variable that is no parameter."""

    features: int = 16

    @nn.compact
    def __call__(self, x, positions):
        inverse = self.variable(
            "constants", "inv_freq", lambda: 10000.0 ** (-jnp.arange(self.features) / self.features)
        )
        angles = positions[:, None].astype(F32) * inverse.value
        table = jnp.cos(angles)
        x = nn.Dense(self.features)(x) * table
        return nn.Dense(self.features)(x), table


class TestPositions:
    """Case B04: angles and their sines and cosines stay in float32."""

    POSITIONS = jnp.arange(2048)

    ANGLES = {
        "product": lambda p, f: p[:, None] * f,
        "outer": jnp.outer,
        "einsum": lambda p, f: jnp.einsum("i,j->ij", p, f),
        "matmul": lambda p, f: p[:, None] @ f[None],
        "scaled": lambda p, f: (p / 4.0)[:, None] * f,
        "concatenated": lambda p, f: jnp.concatenate([p[:, None] * f[:8], p[:, None] * f[8:]], 1),
    }

    @both
    @pytest.mark.parametrize("name", ANGLES)
    @pytest.mark.parametrize("traced_frequencies", [False, True])
    def test_tables(self, name, traced_frequencies, compute):
        x, w = normal(0, 2048, 16), normal(1, 16, 16)

        def fun(x, w, positions, frequencies=None):
            if frequencies is None:
                frequencies = 1.0 / 10000.0 ** (jnp.arange(0, 16).astype(F32) / 16)
            angles = self.ANGLES[name](positions.astype(F32), frequencies)
            tables = jnp.cos(angles), jnp.sin(angles)
            x = x @ w
            turned = jnp.concatenate([-x[:, 8:], x[:, :8]], -1)
            return (x * tables[0] + turned * tables[1]) @ w, *tables

        frequencies = jnp.asarray(10000.0 ** (-np.arange(16) / 16), F32)
        args = x, w, self.POSITIONS, *([frequencies] if traced_frequencies else [])
        eqns = traced(autocast(fun, compute), *args)
        assert set(dtypes_of(eqns, "cos", "sin")) == {(F32,)}
        floats_of_ints = [
            eqn.outvars[0].aval.dtype.type
            for eqn in eqns
            if eqn.primitive.name == "convert_element_type"
            and eqn.invars[0].aval.dtype == jnp.int32
        ]
        assert set(floats_of_ints) == {F32}
        turned, *tables = jax.jit(autocast(fun, compute))(*args)
        wanted_turned, *wanted = jax.jit(fun)(*args)
        for table, reference in zip(tables, wanted, strict=True):
            assert table.dtype == F32
            # Of angles up to 2047 radians, one unit of float32 is 2^-13.
            np.testing.assert_allclose(table, reference, atol=1e-3)
        assert_error(turned, wanted_turned, 8 * UNIT[compute])

    @both
    def test_in_flax(self, compute):
        model, x = Rotary(), normal(0, 2048, 16)
        variables = model.init(jax.random.key(1), x, self.POSITIONS)
        apply = autocast(model.apply, compute)
        (y, table), (wanted_y, wanted) = (
            apply(variables, x, self.POSITIONS),
            model.apply(variables, x, self.POSITIONS),
        )
        np.testing.assert_allclose(table, wanted, atol=1e-3)
        assert_error(y, wanted_y, 8 * UNIT[compute])
        eqns = traced(apply, variables, x, self.POSITIONS)
        assert dtypes_of(eqns, "cos") == [(F32,)]
        assert computed_in(eqns) == [compute] * 2

    @both
    def test_sinusoidal_embedding_of_time(self, compute):
        """As diffusion models have it: no product before, products after."""

        def fun(t, w):
            frequencies = jnp.exp(-jnp.log(10000.0) * jnp.arange(8).astype(F32) / 8)
            angles = t[:, None] * frequencies * 1000.0
            return jnp.tanh(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1) @ w) @ w

        t, w = jnp.linspace(0, 1, 64), normal(0, 16, 16) / 4
        assert set(dtypes_of(traced(autocast(fun, compute), t, w), "sin", "cos")) == {(F32,)}
        assert_error(autocast(fun, compute)(t, w), fun(t, w), 8 * UNIT[compute])


def attention(mask_scores):
    def fun(x, w):
        q, k, v = (x @ part for part in jnp.split(w, 3, 1))
        scores = mask_scores(q @ k.T / q.shape[-1] ** 0.5)
        return jax.nn.softmax(scores) @ v

    return fun


def masked(rows):
    """Causal, save that of some rows everything is masked."""
    return jnp.tril(jnp.ones((8, 8), bool)) & ~jnp.isin(jnp.arange(8), jnp.array(rows))[:, None]


MASK = masked([3])
MASKS = {
    "added": lambda s: s + jnp.where(MASK, 0.0, -1e10),
    "added array": lambda s: s + (1.0 - MASK.astype(F32)) * -1e9,
    "constant": lambda s: s + jnp.asarray(np.where(MASK, 0.0, -1e10), F32),
    "selected": lambda s: jnp.where(MASK, s, -1e10),
    "selected array": lambda s: jnp.where(MASK, s, jnp.full((8, 8), -1e10)),
    "finfo": lambda s: jnp.where(MASK, s, jnp.finfo(F32).min),
    "finfo of bf16": lambda s: jnp.where(MASK, s, float(jnp.finfo(BF16).min)),
    "finfo of f16": lambda s: s + jnp.where(MASK, 0.0, float(jnp.finfo(F16).min)),
    "two of f16": lambda s: (
        s
        + jnp.where(MASK, 0.0, float(jnp.finfo(F16).min))
        + jnp.where(masked([3, 5]), 0.0, float(jnp.finfo(F16).min))
    ),
    # Of the third row some scores overflow in float32 too, not all.
    "two of bf16": lambda s: (
        s
        + jnp.where(MASK, 0.0, float(jnp.finfo(BF16).min))
        + jnp.where(jnp.arange(8) > 2, float(jnp.finfo(BF16).min), 0.0)
    ),
    "subtracted": lambda s: s - 1e10 * (~MASK).astype(F32),
}


class TestMasks:
    """Case B07: large constants that the narrow dtype does not hold."""

    @both
    def test_finite_and_right(self, compute):
        x, w = normal(0, 8, 6), normal(1, 6, 18) / 2

        def fun(x, w):
            return {name: attention(mask)(x, w) for name, mask in MASKS.items()}

        def grads(wrap):
            def loss(mask):
                return wrap(lambda x, w: jnp.sum(jnp.sin(attention(mask)(x, w))))

            return lambda x, w: {
                name: jnp.concatenate([g.ravel() for g in jax.grad(loss(mask), (0, 1))(x, w)])
                for name, mask in MASKS.items()
            }

        # Rounded are operands, q, k, v, the scores, the weights: each a few units.
        ours = jax.jit(autocast(fun, compute))(x, w)
        assert not wrong(ours, jax.jit(fun)(x, w), 12 * UNIT[compute])
        ours = grads(lambda loss: autocast(loss, compute))
        assert not wrong(jax.jit(ours)(x, w), jax.jit(grads(lambda f: f))(x, w), 16 * UNIT[compute])
        assert set(computed_in(traced(ours, x, w))) == {compute}

    @both
    def test_masks_as_arguments(self, compute):
        x, w = normal(0, 8, 6), normal(1, 6, 18) / 2
        bias = jnp.where(MASK, 0.0, -1e10)
        fun = lambda x, w, bias: attention(lambda s: s + bias)(x, w)  # noqa: E731
        result = autocast(fun, compute)(x, w, bias)
        assert_error(result, fun(x, w, bias), 12 * UNIT[compute])

    @both
    def test_masked_scores_that_are_returned_too(self, compute):
        x, w = normal(0, 8, 6), normal(1, 6, 6) / 2

        def fun(x, w):
            scores = (x @ w) @ x.T + jnp.where(MASK, 0.0, -1e10)
            return jax.nn.softmax(scores) @ x, scores

        result, scores = autocast(fun, compute)(x, w)
        assert jnp.isfinite(scores).all()
        assert_error(result, fun(x, w)[0], 12 * UNIT[compute])

    @both
    def test_small_constants(self, compute):
        """What float16 rounds to zero, and then divides by or takes the logarithm of."""
        x, w = jnp.zeros((4, 8)), normal(1, 8, 8)
        programs = [
            lambda x, w: (x @ w) / (jnp.linalg.norm(x @ w) + 1e-9),
            lambda x, w: jnp.log((x @ w) ** 2 + 1e-9),
            lambda x, w: lax.rsqrt((x @ w) ** 2 + 1e-12),
            lambda x, w: 1 / jnp.maximum(x @ w, 1e-8),
            lambda x, w: ((x @ w) / (jnp.abs(x @ w) + 1e-9)) @ w,
            lambda x, w: ((x @ w) / jnp.sqrt((x @ w) ** 2 + 1e-9)) @ w,
        ]
        for fun in programs:
            np.testing.assert_allclose(autocast(fun, compute)(x, w), fun(x, w), rtol=1e-5)

    @both
    def test_flax_attention_with_a_mask(self, compute):
        model, x = nn.MultiHeadDotProductAttention(2), normal(0, 8, 8)
        params = drawn(model.init, jax.random.key(1), x)

        def loss(params, x):
            return jnp.sum(jnp.sin(model.apply(params, x, mask=MASK[None])))

        value, grads = jax.value_and_grad(autocast(loss, compute))(params, x)
        wanted, wanted_grads = jax.value_and_grad(loss)(params, x)
        assert abs(value - wanted) <= 12 * UNIT[compute] * 64**0.5
        flat = lambda tree: jnp.concatenate([v.ravel() for v in jax.tree.leaves(tree)])  # noqa: E731
        assert_error(flat(grads), flat(wanted_grads), 12 * UNIT[compute])


class TestOptions:
    """Case B08: an option changes what it says it changes."""

    X = normal(0, 1, 4, 8)

    def eqns(self, policy, wrap=lambda f: f):
        model = nn.MultiHeadDotProductAttention(2)
        params = drawn(model.init, jax.random.key(1), self.X)
        return traced(jaxmp.autocast(wrap(model.apply), policy), params, self.X)

    @both
    def test_softmax_in_float32_or_not(self, compute):
        policy = jaxmp.Policy(F32, compute, F32)
        assert dtypes_of(self.eqns(policy), "exp") == [(F32,)]
        follow = jaxmp.Policy(F32, compute, F32, primitives={"exp": "follow"})
        assert dtypes_of(self.eqns(follow), "exp") == [(compute,)]

    def test_full_precision(self):
        assert set(computed_in(self.eqns("mixed_bfloat16"))) == {BF16}
        assert set(computed_in(self.eqns("mixed_bfloat16", jaxmp.full_precision()))) == {F32}

    def test_compute_dtype(self):
        assert len(computed_in(self.eqns("mixed_bfloat16"))) == 6
        assert computed_in(self.eqns("mixed_float16")) == [F16] * 6
        assert computed_in(self.eqns("float32")) == [F32] * 6

    def test_activations(self):
        for activations, wanted in ((None, BF16), ("float32", F32)):
            options = {} if activations is None else {"activation_dtype": activations}
            eqns = self.eqns(jaxmp.Policy(F32, BF16, F32, **options))
            products = [eqn for eqn in eqns if eqn.primitive.name == "mixed_product"]
            # Query, key, value, and what attention gives: all go on into products.
            assert products[0].outvars[0].aval.dtype == wanted
            assert {eqn.params["compute_dtype"] for eqn in products} == {np.dtype(BF16)}

    @pytest.mark.parametrize("rule", ["query", "params/query", "query/kernel"])
    def test_rules(self, rule):
        eqns = self.eqns(jaxmp.get_policy("mixed_bfloat16").with_rules({rule: "float32"}))
        assert computed_in(eqns).count(F32) == 1
        assert computed_in(eqns).count(BF16) == 5

    def test_accumulation(self):
        for dtype in (F32, BF16):
            eqns = self.eqns(jaxmp.Policy(F32, BF16, F32, accum_dtype=dtype))
            found = {e.params["accum_dtype"] for e in eqns if e.primitive.name == "mixed_product"}
            assert found == {np.dtype(dtype)}

    def test_primitives(self):
        x, w = normal(0, 4, 8), normal(1, 8, 8)
        fun = lambda x, w: jnp.tanh(x @ w) @ w  # noqa: E731

        def eqns(**primitives):
            policy = jaxmp.Policy(F32, BF16, F32, primitives=primitives)
            return traced(jaxmp.autocast(fun, policy), x, w)

        assert dtypes_of(eqns(), "tanh") == [(BF16,)]
        assert dtypes_of(eqns(tanh="full"), "tanh") == [(F32,)]
        assert dtypes_of(eqns(tanh="opaque"), "tanh") == [(F32,)]
        assert computed_in(eqns(dot_general="full")) == [F32] * 2
        for bad, words in ({"tanh": "ful"}, "full"), ({"tahn": "full"}, "tanh"):
            with pytest.raises(ValueError, match=words):
                eqns(**bad)

    def test_a_rule_that_matches_nothing_is_reported(self):
        with pytest.warns(UserWarning, match="qurey"):
            self.eqns(jaxmp.get_policy("mixed_bfloat16").with_rules({"qurey": "float32"}))


class TestVariance:
    """Case B10: statistics of a large mean and a small spread."""

    X = 1e4 + normal(0, 1, 1024)

    @both
    @pytest.mark.parametrize("fast", [True, False])
    def test_a_norm_of_an_input_is_unchanged(self, fast, compute):
        norm = nn.LayerNorm(use_fast_variance=fast)
        params = norm.init(jax.random.key(0), self.X)
        result = autocast(norm.apply, compute)(params, self.X)
        np.testing.assert_array_equal(result, norm.apply(params, self.X))

    @both
    @pytest.mark.parametrize("fast", [True, False])
    def test_the_statistics_of_narrow_values_are_in_float32(self, fast, compute):
        norm, eye = nn.LayerNorm(use_fast_variance=fast), jnp.eye(1)
        # What is left after rounding 10,000 + n to the narrow dtype: multiples of 64 or of 8.
        x = jnp.round(self.X.T / 64) * 64 + 64 * jnp.round(normal(1, 1024, 1))
        assert jnp.array_equal(x, x.astype(compute).astype(F32))
        params = norm.init(jax.random.key(0), x.T)
        fun = lambda x: norm.apply(params, (x @ eye).T)  # noqa: E731
        eqns = traced(autocast(fun, compute), x)
        assert computed_in(eqns) == [compute]
        assert set(dtypes_of(eqns, "reduce_sum", "rsqrt")) == {(F32,)}
        result = autocast(fun, compute)(x)
        assert jnp.isfinite(result).all()
        # The order of sums may differ; E[x^2] is 10^8, its unit 6, the variance some thousands.
        np.testing.assert_allclose(result, norm.apply(params, x.T), rtol=1e-2, atol=1e-2)
        grads = jax.grad(lambda x: jnp.sum(jnp.sin(autocast(fun, compute)(x))))(x)
        assert jnp.isfinite(grads).all()

    @both
    def test_a_constant_row_gives_no_nan(self, compute):
        """One-pass forms as written by hand, whose variance of a constant must not be negative."""

        def fun(x, w, scale):
            h = x @ w
            mean = jnp.mean(h, -1, keepdims=True)
            variance = jnp.mean(h**2, -1, keepdims=True) - mean**2
            return ((h - mean) * lax.rsqrt(variance + 1e-6) * scale) @ w

        x, w = jnp.full((4, 16), 100.0), jnp.eye(16)
        value, grads = jax.value_and_grad(
            lambda w: jnp.sum(autocast(fun, compute)(x, w, jnp.ones(16)) ** 2)
        )(w)
        assert float(value) == 0.0
        assert jnp.isfinite(grads).all()

    @both
    def test_batch_norm(self, compute):
        norm, w = nn.BatchNorm(use_running_average=False), jnp.eye(4)
        x = 64 * jnp.round(normal(0, 256, 4)) + 1e4 - 1e4 % 64
        variables = norm.init(jax.random.key(0), x)
        fun = lambda v, x: norm.apply(v, x @ w, mutable=["batch_stats"])  # noqa: E731
        (y, new), (wanted_y, wanted) = autocast(fun, compute)(variables, x), fun(variables, x)
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(wanted), strict=True):
            assert a.dtype == F32
            np.testing.assert_allclose(a, b, rtol=2e-2)
        np.testing.assert_allclose(y, wanted_y, rtol=1e-2, atol=1e-2)


def cross_entropy(logits, labels):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def smoothed(logits, labels):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), 0.1)
    return jnp.mean(optax.softmax_cross_entropy(logits, targets))


def by_hand(logits, labels):
    log_p = logits - jax.nn.logsumexp(logits, -1, keepdims=True)
    return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], -1))


def log_of_softmax(logits, labels):
    p = jax.nn.softmax(logits)
    return -jnp.mean(jnp.log(jnp.take_along_axis(p, labels[:, None], -1)))


def sum_of_log_probabilities(logits, labels):
    return -jnp.sum(jax.nn.log_softmax(logits)) / logits.size + 0 * jnp.sum(labels).astype(F32)


LOSSES = [cross_entropy, smoothed, by_hand, log_of_softmax, sum_of_log_probabilities]


class TestLosses:
    """Case B28: the loss of half logits is that of float32, in training and in evaluation."""

    @pytest.mark.parametrize(("compute", "classes"), [(BF16, 100), (F16, 50_000)])
    @pytest.mark.parametrize("loss", LOSSES)
    def test_loss(self, loss, compute, classes):
        # The logits fit the narrow dtype: only the loss may round.
        logits = (normal(0, 8, classes) * 3).astype(compute).astype(F32)
        labels = jnp.arange(8) * 7
        one = jnp.ones((1, 1))

        def model(one, logits):
            return (logits[..., None] @ one)[..., 0]

        def fun(one, logits, labels):
            return loss(model(one, logits), labels)

        with jax.enable_x64(True):
            wide = jnp.asarray(np.asarray(logits, np.float64))
            with jax.numpy_dtype_promotion("standard"):
                wanted = float(loss(wide, labels))
        policy = jaxmp.Policy(F32, compute, F32)
        evaluated = jax.jit(autocast(fun, compute))(one, logits, labels)
        trained, grad = jax.jit(
            jaxmp.value_and_grad(fun, policy, loss_scale=jaxmp.NoOpLossScale())
        )(one, logits, labels)
        outside = loss(autocast(model, compute)(one, logits), labels)
        for value in (evaluated, trained, outside):
            assert value.dtype == F32
            np.testing.assert_allclose(value, wanted, rtol=1e-3)
        # The same policy gives the same loss in both modes, up to the order of sums.
        np.testing.assert_allclose(evaluated, trained, rtol=64 * UNIT[F32])
        assert jnp.isfinite(grad).all()

    @both
    def test_the_border_is_at_the_logits(self, compute):
        def fun(w, x, labels):
            return cross_entropy(jnp.tanh(x @ w) @ w, labels)

        args = normal(0, 8, 8), normal(1, 4, 8), jnp.arange(4)
        eqns = traced(autocast(fun, compute), *args)
        assert computed_in(eqns) == [compute] * 2
        assert set(dtypes_of(eqns, "exp", "log", "reduce_sum")) == {(F32,)}
        assert set(dtypes_of(eqns, "sub")) == {(F32, F32)}
        assert dtypes_of(eqns, "tanh") == [(compute,)]


WIDER = {
    name: LOW[name]
    for name in ("matmul", "einsum", "conv 1d, dilated", "conv_transpose", "ragged_dot", "conv 2d")
}


class TestWiderOutputs:
    """Case B32: derivatives of products with half operands and a float32 result."""

    def functions(self, name, compute):
        fun, left, right = WIDER[name]
        args = normal(0, *left), normal(1, *right)

        def loss(x, w):
            return jnp.sum(jnp.tanh(fun(x, w)))

        return loss, autocast(loss, compute), args

    @both
    @pytest.mark.parametrize("name", WIDER)
    def test_gradients_of_both_sides(self, name, compute):
        plain, ours, args = self.functions(name, compute)
        eqns = traced(jax.grad(ours, (0, 1)), *args)
        assert computed_in(eqns) == [compute] * 3
        gradient_products = [e for e in eqns if e.primitive.name == "mixed_product"][1:]
        assert {e.outvars[0].aval.dtype.type for e in gradient_products} == {F32}
        found, wanted = (jax.jit(jax.grad(f, (0, 1)))(*args) for f in (ours, plain))
        for grad, reference in zip(found, wanted, strict=True):
            assert grad.dtype == F32
            assert_error(grad, reference, 8 * UNIT[compute])
            # No round trip through the narrow dtype.
            assert np.any(np.asarray(grad) != np.asarray(grad).astype(compute).astype(F32))

    @both
    @pytest.mark.parametrize("name", WIDER)
    def test_other_transformations(self, name, compute):
        plain, ours, args = self.functions(name, compute)
        transformations = {
            "jvp": lambda f: jax.jvp(f, args, args),
            "linearize": lambda f: jax.linearize(f, *args)[1](*args),
            "vmap": lambda f: jax.vmap(f, (0, None))(jnp.stack([args[0], 2 * args[0]]), args[1]),
            "vmap of grad": lambda f: jax.vmap(jax.grad(f, 1), (0, None))(
                jnp.stack([args[0], 2 * args[0]]), args[1]
            ),
            "second order": lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(args[0], w) ** 2) / 8)(
                args[1]
            ),
            "forward over reverse": lambda f: jax.jvp(jax.grad(f, 1), args, args)[1],
        }
        if name == "ragged_dot":
            # Not batched by JAX 0.9 on the side of the weights.
            del transformations["vmap of grad"], transformations["vmap"]

        def run(f):
            return {key: transform(f) for key, transform in transformations.items()}

        found, wanted = jax.jit(lambda: run(ours))(), jax.jit(lambda: run(plain))()
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert a.dtype == b.dtype == F32
            # A loss is a sum of up to 240 terms, each with the roundings of its operands.
            assert np.linalg.norm(a - b) <= 8 * UNIT[compute] * (np.linalg.norm(b) + 240**0.5)
        assert set(computed_in(traced(lambda: run(ours)))) == {compute}


class Table(nn.Module):
    """A block whose float32 table and strong float32 scalar meet the stream."""

    @nn.compact
    def __call__(self, x, _):
        table = jnp.cos(jnp.arange(4).astype(F32)[:, None] * jnp.ones(8))
        h = nn.LayerNorm()(x) * table
        return x * np.float32(0.5) + nn.Dense(8)(jnp.tanh(h)), None


class TestCarries:
    """Case B34: the dtype of a carry is fixed, whatever the body makes of it."""

    @both
    def test_flax_scan_over_blocks(self, compute):
        model = nn.scan(Table, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)()
        x = normal(0, 4, 8)
        variables = drawn(lambda x: model.init(jax.random.key(1), x, None), x)

        def loss(variables, x):
            return jnp.sum(jnp.sin(model.apply(variables, x, None)[0]))

        assert autocast(model.apply, compute)(variables, x, None)[0].dtype == F32
        eqns = traced(jax.grad(autocast(loss, compute)), variables, x)
        assert set(computed_in(eqns)) == {compute}
        flat = lambda tree: jnp.concatenate([v.ravel() for v in jax.tree.leaves(tree)])  # noqa: E731
        grads = jax.grad(autocast(loss, compute))(variables, x)
        assert_error(flat(grads), flat(jax.grad(loss)(variables, x)), 16 * UNIT[compute])

    @both
    def test_bodies_that_widen_and_narrow(self, compute):
        x, w = normal(0, 4, 8), normal(1, 8, 8) / 3
        table = jnp.linspace(0.5, 1.5, 8)
        bodies = {
            "narrow at the end": lambda c: jnp.tanh(c @ w),
            "float32 at the end": lambda c: jax.nn.softmax(c @ w),
            "residual": lambda c: c + jnp.tanh(c @ w),
            "table": lambda c: jnp.tanh(c @ w) * table,
            "swap": lambda c: jnp.where(c > 0, c @ w, jnp.exp(-jnp.abs(c))),
            "unused": lambda c: c * 1.5,
        }
        for name, body in bodies.items():
            loops = (
                lambda x, b=body: lax.scan(lambda c, _: (b(c), c[0]), x, length=3),
                lambda x, b=body: lax.fori_loop(0, 3, lambda _, c: b(c), x),
                lambda x, b=body: lax.while_loop(
                    lambda s: s[0] < 3, lambda s: (s[0] + 1, b(s[1])), (0, x)
                ),
                lambda x, b=body: lax.scan(
                    lambda c, _: ((c[1], b(c[0])), None), (x, 2 * x), length=3
                ),
            )
            fun = lambda x, loops=loops: [(loop(x), x @ w) for loop in loops]  # noqa: E731
            ours, plain = jax.jit(autocast(fun, compute))(x), jax.jit(fun)(x)
            for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
                assert a.dtype == b.dtype, name
                # What compares or cuts may go the other way within a rounding.
                assert_error(a, b, 16 * UNIT[compute])

    @both
    def test_a_float32_counter(self, compute):
        """In the narrow dtype it would stop at 256 or 2048, and the loop would not end."""
        w = jnp.eye(2)

        def fun(x, w):
            state = lax.while_loop(
                lambda s: s[0] < 3000.0, lambda s: (s[0] + 1.0, jnp.tanh(s[1] @ w)), (0.0, x)
            )
            scanned, _ = lax.scan(
                lambda s, _: ((s[0] + 1.0, jnp.tanh(s[1] @ w)), None), (0.0, x), length=3000
            )
            return state, scanned

        (count, _), (scanned_count, _) = autocast(fun, compute)(jnp.ones((1, 2)), w)
        assert float(count) == 3000.0
        assert float(scanned_count) == 3000.0

    @both
    def test_a_step_counter_that_meets_narrow_values(self, compute):
        def body(carry, _):
            step, x = carry
            return (step + 1.0, x + (x @ jnp.eye(2)) / (step + 1.0)), step

        def fun(x):
            return lax.scan(body, (0.0, x), length=3000)

        (count, _), steps = autocast(fun, compute)(jnp.zeros((1, 2)))
        assert float(count) == 3000.0
        assert jnp.array_equal(steps, jnp.arange(3000.0))

    @both
    def test_branches_of_two_dtypes(self, compute):
        x, w = normal(0, 4, 8), normal(1, 8, 8)
        branches = [lambda x: x @ w, lambda x: x, jnp.exp, lambda x: jax.nn.relu(x @ w)]
        switch = lambda i, x: lax.switch(i, branches, x)  # noqa: E731
        for i, branch in enumerate(branches):
            fun = lambda x, i=i: jnp.sin(switch(i, x)) @ w  # noqa: E731
            plain = jnp.sin(branch(x)) @ w
            assert_error(jax.jit(autocast(fun, compute))(x), plain, 12 * UNIT[compute])
            grad = jax.grad(lambda x, f=fun: jnp.sum(autocast(f, compute)(x)))(x)
            assert grad.dtype == F32
            wanted = jax.grad(lambda x, b=branch: jnp.sum(jnp.sin(b(x)) @ w))(x)
            assert_error(grad, wanted, 16 * UNIT[compute])
        eqns = traced(jax.jit(autocast(switch, compute)), 0, x)
        assert computed_in(eqns) == [compute] * 2

    def test_a_user_carry_of_bfloat16(self):
        """What the user has in half stays there: the program's own dtypes are its outputs'."""
        x, w = normal(0, 4, 8).astype(BF16), normal(1, 8, 8)

        def fun(x, w):
            return lax.scan(lambda c, _: (jnp.tanh(c.astype(F32) @ w).astype(BF16), c), x, length=3)

        ours, plain = autocast(fun)(x, w), fun(x, w)
        for a, b in zip(ours, plain, strict=True):
            assert a.dtype == b.dtype == BF16
            assert_error(a, b, 12 * UNIT[BF16])


class TestRounding:
    """Case B38: what relies on rounding keeps it, compiled or not."""

    ROUNDINGS = {
        "bf16": lambda x: x.astype(BF16).astype(F32),
        "f16": lambda x: x.astype(F16).astype(F32),
        "fp8": lambda x: x.astype(jnp.float8_e4m3fn).astype(F32),
        "reduce_precision": lambda x: lax.reduce_precision(x, 8, 3),
        "what was lost": lambda x: x - lax.reduce_precision(x, 8, 7),
        "bits": lambda x: lax.bitcast_convert_type(
            lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000), F32
        ),
        "stochastic": lambda x: lax.bitcast_convert_type(
            (
                lax.bitcast_convert_type(x, jnp.uint32)
                + jax.random.bits(jax.random.key(7), x.shape) // 65536
            )
            & jnp.uint32(0xFFFF0000),
            F32,
        ),
    }

    @both
    @pytest.mark.parametrize("name", ROUNDINGS)
    def test_of_inputs_beside_a_product(self, name, compute):
        x, w = normal(0, 1000), normal(1, 8, 8)
        rounding = self.ROUNDINGS[name]
        fun = autocast(lambda x, w: (rounding(x), w @ w), compute)
        wanted = rounding(x)
        np.testing.assert_array_equal(fun(x, w)[0], wanted)
        np.testing.assert_array_equal(jax.jit(fun)(x, w)[0], wanted)

    @both
    @pytest.mark.parametrize("name", ROUNDINGS)
    def test_of_the_result_of_a_product(self, name, compute):
        """Bit casts and the like see the dtypes that the program was written for."""
        x = normal(0, 40, 25).astype(compute).astype(F32)
        rounding = self.ROUNDINGS[name]
        fun = autocast(lambda x: rounding(x @ jnp.eye(25)), compute)
        np.testing.assert_array_equal(fun(x), rounding(x))
        np.testing.assert_array_equal(jax.jit(fun)(x), rounding(x))

    @both
    def test_two_sum(self, compute):
        """The error terms of compensated sums of inputs are those of float32."""
        a, b, w = normal(0, 1000) * 100, normal(1, 1000), normal(2, 8, 8)

        def two_sum(a, b):
            s = a + b
            bb = s - a
            return s, (a - (s - bb)) + (b - bb)

        fun = autocast(lambda a, b, w: (two_sum(a, b), w @ w), compute)
        wanted = two_sum(a, b)
        assert float(jnp.abs(wanted[1]).max()) > 0
        for run in (fun, jax.jit(fun)):
            for x, y in zip(run(a, b, w)[0], wanted, strict=True):
                np.testing.assert_array_equal(x, y)

    @both
    def test_a_compensated_sum_in_a_loop(self, compute):
        terms, w = jnp.full(4096, 0.1), jnp.eye(8)

        def kahan(terms, w):
            def body(carry, x):
                total, lost, h = carry
                y = x - lost
                new = total + y
                return (new, (new - total) - y, jnp.tanh(h @ w)), None

            return lax.scan(body, (jnp.float32(0), jnp.float32(0), w), terms)[0][0]

        # Two units of the result, whatever the number of terms.
        wanted = 4096 * np.float64(np.float32(0.1))
        np.testing.assert_allclose(autocast(kahan, compute)(terms, w), wanted, rtol=4 * UNIT[F32])
        assert jnp.array_equal(jax.jit(autocast(kahan, compute))(terms, w), kahan(terms, w))

    @both
    def test_eager_and_compiled_agree(self, compute):
        w, x = normal(0, 8, 8) / 3, normal(1, 4, 8)
        for fun in (
            autocast(block, compute),
            jax.grad(lambda w, x: jnp.sum(autocast(block, compute)(w, x))),
        ):
            # A rounding that one of them left out would be a unit of the narrow dtype. Of the
            # oldest JAX the compiler leaves out some, for processors with f16 arithmetic.
            np.testing.assert_allclose(
                jax.jit(fun)(w, x), fun(w, x), rtol=UNIT[compute], atol=4 * UNIT[compute]
            )
