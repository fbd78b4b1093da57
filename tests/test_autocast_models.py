"""Autocast of unmodified float32 functions: models, losses, solvers, transformations, steps."""

import functools
import importlib
import warnings
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

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
    normal,
    traced,
)

# Together they take minutes.
pytestmark = pytest.mark.slow

P = PartitionSpec


def floats(tree):
    return [
        np.asarray(leaf, np.float64)
        for leaf in jax.tree.leaves(tree)
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    ]


def assert_alike(ours, plain, tolerance):
    """Same structure and dtypes, and norms of the error of each leaf below the tolerance.

    A leaf whose true value is nearly zero (the gradient of a bias of keys) has the error of what
    it was computed from: a sixteenth of the norm of the largest leaf is allowed for.
    """
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype
        assert not getattr(a, "weak_type", False) or getattr(b, "weak_type", False)
    ours, plain = floats(ours), floats(plain)
    norms = [np.linalg.norm(leaf) for leaf in plain]
    for a, b, norm in zip(ours, plain, norms, strict=True):
        assert a.shape == b.shape
        assert np.isfinite(a).all()
        assert np.linalg.norm(a - b) <= tolerance * (norm + max(norms) / 16)


def check(loss, args, *computes, roundings, argnums=0, has_aux=False, selects=False):
    """Compares a loss and its gradients with float32, and looks at every product.

    Autocast is around the loss, and around its derivative. `roundings` is about how many roundings
    to the narrow dtype lie on the way from the arguments to the loss and back; each is an error of
    at most one unit in each number. The reference is of float32, whose own error is below that by
    2^-13. A loss that selects by one-hot vectors does that in float32.
    """
    transform = functools.partial(jax.value_and_grad, argnums=argnums, has_aux=has_aux)
    plain = jax.jit(transform(loss))
    products = len(computed_in(traced(plain, *args)))
    assert products
    wanted = plain(*args)
    for compute in computes:
        outside, inside = transform(autocast(loss, compute)), autocast(transform(loss), compute)
        for fun in (outside, inside):
            dtypes = computed_in(traced(fun, *args))
            assert set(dtypes) == {compute} | ({F32} if selects else set())
            assert len(dtypes) >= products
        # Compiling takes most of the time of this file: each is compiled in one of the dtypes.
        compiled = inside if compute == F16 else outside
        assert_alike(jax.jit(compiled)(*args), wanted, roundings * UNIT[compute])


@pytest.fixture
def standard_promotion():
    """Optax raises a float to an int32 power, Haiku multiplies by bools, a Flax pool by ints."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class TransformerBlock(nn.Module):
    @nn.compact
    def __call__(self, x, mask=None, deterministic=False):
        h = nn.LayerNorm()(x)
        h = nn.MultiHeadDotProductAttention(num_heads=2, dropout_rate=0.1)(
            h, mask=mask, deterministic=deterministic
        )
        x = x + nn.Dropout(0.1)(h, deterministic=deterministic)
        h = nn.Dense(16)(nn.LayerNorm()(x))
        return x + nn.Dropout(0.1)(nn.Dense(8)(nn.gelu(h)), deterministic=deterministic)


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (4, 8):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            # Smooth: a maximum goes the other way where two numbers are a rounding apart.
            x = nn.swish(nn.BatchNorm(use_running_average=False)(x))
            x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(5)(x.mean((1, 2)))


class ScanBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return TransformerBlock()(x, deterministic=True), None


class TestLinen:
    def test_transformer_block(self):
        model, x = TransformerBlock(), normal(0, 3, 6, 8)
        mask = nn.make_causal_mask(np.ones((3, 6)))
        variables = drawn(
            lambda x: model.init(dict.fromkeys(("params", "dropout"), jax.random.key(1)), x), x
        )

        def loss(params, x, rng):
            y = model.apply(params, x, mask, rngs={"dropout": rng})
            return jnp.mean(jnp.tanh(y)) * 64

        check(loss, (variables, x, jax.random.key(3)), BF16, F16, roundings=16, argnums=(0, 1))

    def test_dropout_draws_the_same_bits(self):
        model, x, w = nn.Dropout(0.5), jnp.ones((8, 8)), jnp.eye(8)

        def fun(x, rng):
            return model.apply({}, x @ w, deterministic=False, rngs={"dropout": rng}) @ w

        rng = jax.random.key(3)
        assert jnp.array_equal(autocast(fun)(x, rng), fun(x, rng))

    @both
    @pytest.mark.usefixtures("standard_promotion")
    def test_convolutions_and_batch_norm(self, compute):
        model, x = ConvNet(), normal(0, 8, 8, 8, 3)
        variables = drawn(model.init, jax.random.key(1), x)
        labels = jnp.arange(8) % 5

        def loss(params, stats, x):
            logits, new = model.apply(
                {"params": params, "batch_stats": stats}, x, mutable=["batch_stats"]
            )
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean() * 16, new

        args = variables["params"], variables["batch_stats"], x
        check(loss, args, compute, roundings=24, has_aux=True)
        _, new = autocast(loss, compute)(*args)
        for leaf in jax.tree.leaves(new):
            assert leaf.dtype == F32
            # Statistics of half activations, but sums and running means are of float32.
            assert jnp.any(leaf != leaf.astype(compute).astype(F32))

    def test_scan_over_layers(self):
        layers = nn.scan(
            ScanBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )()
        x = normal(0, 2, 6, 8)
        params = drawn(lambda x: layers.init(jax.random.key(1), x, None), x)

        def loss(params, x):
            return jnp.mean(jnp.tanh(layers.apply(params, x, None)[0])) * 64

        check(loss, (params, x), BF16, roundings=32)

    def test_remat(self):
        model, x = nn.remat(TransformerBlock, static_argnums=(3,))(), normal(0, 2, 6, 8)
        params = drawn(lambda x: TransformerBlock().init(jax.random.key(1), x, None, True), x)

        def loss(params, x):
            return jnp.mean(jnp.tanh(model.apply(params, x, None, True))) * 64

        check(loss, (params, x), BF16, roundings=16)

    def test_scan_over_rematted_layers(self):
        layers = nn.scan(
            nn.remat(ScanBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )()
        x = normal(0, 2, 6, 8)
        params = drawn(lambda x: layers.init(jax.random.key(1), x, None), x)

        def loss(params, x):
            return jnp.mean(jnp.tanh(layers.apply(params, x, None)[0])) * 64

        check(loss, (params, x), BF16, roundings=24)

    @pytest.mark.parametrize("cell", [nn.LSTMCell, nn.OptimizedLSTMCell])
    def test_recurrent(self, cell):
        model, x = nn.RNN(cell(8)), normal(0, 4, 5, 6)
        params = drawn(model.init, jax.random.key(1), x)
        loss = lambda params, x: jnp.mean(jnp.tanh(model.apply(params, x))) * 64  # noqa: E731
        check(loss, (params, x), BF16, roundings=24)

    def test_bound_methods_and_init(self):
        model, x = TransformerBlock(), normal(0, 2, 6, 8)
        rngs = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
        ours, plain = jax.jit(autocast(model.init))(rngs, x), jax.jit(model.init)(rngs, x)
        # Parameters are drawn, not computed: they are the same to the last bit.
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
            assert a.dtype == b.dtype == F32
            np.testing.assert_allclose(a, b, rtol=4 * UNIT[F32])

    def test_orthogonal_init_is_a_decomposition(self):
        model = nn.Dense(6, kernel_init=nn.initializers.orthogonal())
        params = autocast(model.init)(jax.random.key(1), jnp.ones((1, 6)))
        kernel = params["params"]["kernel"]
        np.testing.assert_allclose(kernel @ kernel.T, np.eye(6), atol=64 * UNIT[F32])

    def test_tied_embedding(self):
        class Tied(nn.Module):
            @nn.compact
            def __call__(self, tokens):
                embed = nn.Embed(11, 8)
                x = nn.Dense(8)(embed(tokens))
                return embed.attend(nn.LayerNorm()(x))

        tokens = jnp.arange(12).reshape(3, 4) % 11
        params = drawn(Tied().init, jax.random.key(1), tokens)

        def loss(params):
            logits = Tied().apply(params, tokens)
            labels = (tokens + 1) % 11
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean() * 16

        check(loss, (params,), BF16, roundings=16)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        h = nnx.gelu(self.norm(self.first(x)))
        return self.last(h + self.attention(h))


class Counted(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.last(self.dropout(x.mean((1, 2))))


class TestNnx:
    def test_split_and_merge(self):
        graph, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)

        def loss(params, x):
            return jnp.mean(jnp.tanh(nnx.merge(graph, params)(x))) * 64

        check(loss, (params, normal(0, 3, 5, 8)), BF16, roundings=16)

    @both
    def test_a_module_as_an_argument(self, compute):
        x = normal(0, 3, 5, 8)

        def loss(model, x):
            return jnp.mean(jnp.tanh(model(x))) * 64

        model = Net(nnx.Rngs(0))
        value, grads = nnx.jit(nnx.value_and_grad(autocast(loss, compute)))(model, x)
        wanted, wanted_grads = nnx.jit(nnx.value_and_grad(loss))(model, x)
        assert_alike((value, grads), (wanted, wanted_grads), 16 * UNIT[compute])
        graph, state = nnx.split(model)
        eqns = traced(
            lambda state, x: autocast(loss, compute)(nnx.merge(graph, state), x), state, x
        )
        assert set(computed_in(eqns)) == {compute}
        assert len(computed_in(eqns)) == 8

    @both
    def test_a_module_that_changes_itself(self, compute):
        """Statistics, counters of random streams: the state of the functional form."""
        graph, params, rest = nnx.split(Counted(nnx.Rngs(0)), nnx.Param, ...)

        def loss(params, rest, x):
            model = nnx.merge(graph, params, rest)
            value = jnp.mean(jnp.tanh(model(x))) * 64
            return value, nnx.state(model, nnx.Not(nnx.Param))

        args = params, rest, normal(0, 4, 6, 6, 3)
        ours = jax.jit(jax.value_and_grad(autocast(loss, compute), has_aux=True))
        (value, new), grads = ours(*args)
        plain = jax.jit(jax.value_and_grad(jax.jit(loss), has_aux=True))
        (wanted, wanted_new), wanted_grads = plain(*args)
        assert_alike((value, grads), (wanted, wanted_grads), 24 * UNIT[compute])
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(wanted_new), strict=True):
            assert a.dtype == b.dtype
            if jnp.issubdtype(a.dtype, jnp.integer) or jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                assert jnp.array_equal(a, b)
            else:
                np.testing.assert_allclose(a, b, rtol=8 * UNIT[compute], atol=8 * UNIT[compute])
        eqns = traced(jax.grad(autocast(loss, compute), has_aux=True), *args)
        assert set(computed_in(eqns)) == {compute}


@pytest.fixture(scope="module")
def hk():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Haiku imports what JAX deprecated
        return importlib.import_module("haiku")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("standard_promotion")
class TestHaiku:
    def test_mlp_and_norm(self, hk):
        def forward(x, is_training):
            x = hk.nets.MLP([16, 8])(
                x, dropout_rate=0.1 if is_training else None, rng=hk.next_rng_key()
            )
            return hk.Linear(4)(hk.LayerNorm(-1, True, True)(x))

        model, x = hk.transform(forward), normal(0, 6, 8)
        params = drawn(lambda x: model.init(jax.random.key(1), x, True), x)

        def loss(params, key, x):
            return jnp.mean(jnp.tanh(model.apply(params, key, x, True))) * 64

        check(loss, (params, jax.random.key(2), x), BF16, roundings=16)

    def test_attention(self, hk):
        def forward(x):
            attention = hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling(1.0))
            return attention(x, x, x, mask=jnp.tril(jnp.ones((5, 5)))[None, None])

        model, x = hk.without_apply_rng(hk.transform(forward)), normal(0, 3, 5, 8)
        params = drawn(model.init, jax.random.key(1), x)
        loss = lambda params, x: jnp.mean(jnp.tanh(model.apply(params, x))) * 64  # noqa: E731
        check(loss, (params, x), BF16, roundings=16)

    def test_recurrent(self, hk):
        def forward(x):
            core = hk.LSTM(8)
            return hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))[0]

        model, x = hk.without_apply_rng(hk.transform(forward)), normal(0, 5, 3, 6)
        params = drawn(model.init, jax.random.key(1), x)
        loss = lambda params, x: jnp.mean(jnp.tanh(model.apply(params, x))) * 64  # noqa: E731
        check(loss, (params, x), BF16, roundings=24)

    def test_convolution_with_state(self, hk):
        def forward(x):
            x = hk.Conv2D(4, 3, with_bias=False)(x)
            x = hk.BatchNorm(True, True, 0.9)(x, is_training=True)
            return hk.Linear(3)(jax.nn.relu(x).mean((1, 2)))

        model, x = hk.without_apply_rng(hk.transform_with_state(forward)), normal(0, 4, 6, 6, 3)
        params, state = drawn(model.init, jax.random.key(1), x)

        def loss(params, state, x):
            y, new = model.apply(params, state, x)
            return jnp.mean(jnp.tanh(y)) * 64, new

        check(loss, (params, state, x), BF16, roundings=24, has_aux=True)


class TestEquinox:
    @pytest.fixture
    def eqx(self):
        return pytest.importorskip("equinox")

    @both
    def test_filtered_gradients_of_an_mlp(self, eqx, compute):
        """A model whose leaves are arrays, functions and strings."""
        model, x = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0)), normal(0, 6, 8)

        def loss(model, x):
            return jnp.mean(jnp.tanh(jax.vmap(model)(x))) * 64

        ours = eqx.filter_value_and_grad(autocast(loss, compute))
        plain = eqx.filter_value_and_grad(loss)(model, x)
        assert_alike(ours(model, x), plain, 12 * UNIT[compute])
        assert_alike(eqx.filter_jit(ours)(model, x), plain, 12 * UNIT[compute])
        inside = autocast(eqx.filter_value_and_grad(loss), compute)
        assert_alike(inside(model, x), plain, 12 * UNIT[compute])
        params, static = eqx.partition(model, eqx.is_array)
        fun = lambda params, x: ours(eqx.combine(params, static), x)[0]  # noqa: E731
        assert set(computed_in(traced(fun, params, x))) == {compute}

    def test_partitioned(self, eqx):
        keys = jax.random.split(jax.random.key(0), 4)

        class Block(eqx.Module):
            norm: eqx.nn.LayerNorm
            attention: eqx.nn.MultiheadAttention
            dropout: eqx.nn.Dropout
            mlp: eqx.nn.MLP

            def __init__(self):
                self.norm = eqx.nn.LayerNorm(8)
                self.attention = eqx.nn.MultiheadAttention(2, 8, key=keys[0])
                self.dropout = eqx.nn.Dropout(0.1)
                self.mlp = eqx.nn.MLP(8, 8, 16, 1, jax.nn.gelu, key=keys[1])

            def __call__(self, x, key):
                h = jax.vmap(self.norm)(x)
                x = x + self.dropout(self.attention(h, h, h), key=key)
                return x + jax.vmap(self.mlp)(jax.vmap(self.norm)(x))

        params, static = eqx.partition(Block(), eqx.is_inexact_array)

        def loss(params, x, key):
            return jnp.mean(jnp.tanh(eqx.combine(params, static)(x, key))) * 64

        check(loss, (params, normal(0, 5, 8), keys[3]), BF16, roundings=16)

    def test_convolution_and_recurrence(self, eqx):
        keys = jax.random.split(jax.random.key(0), 2)
        conv = eqx.nn.Conv1d(6, 8, 3, padding=1, key=keys[0])
        params, static = eqx.partition((conv, eqx.nn.GRUCell(8, 8, key=keys[1])), eqx.is_array)

        def loss(params, x):
            conv, cell = eqx.combine(params, static)
            x = conv(x).T
            last, _ = lax.scan(lambda h, v: (cell(v, h), None), jnp.zeros(8), x)
            return jnp.mean(jnp.tanh(last)) * 64

        check(loss, (params, normal(0, 6, 5)), BF16, roundings=24)


LABELS = jnp.array([1, 0, 3, 2, 2, 1])
LOSSES = {
    "integer labels": lambda y: optax.softmax_cross_entropy_with_integer_labels(y, LABELS),
    "one-hot": lambda y: optax.softmax_cross_entropy(y, jax.nn.one_hot(LABELS, 4)),
    "sigmoid": lambda y: optax.sigmoid_binary_cross_entropy(y, jax.nn.one_hot(LABELS, 4)),
    "focal": lambda y: optax.sigmoid_focal_loss(y, jax.nn.one_hot(LABELS, 4)),
    "l2": lambda y: optax.l2_loss(y, jnp.ones_like(y)),
    "squared error": optax.squared_error,
    "huber": lambda y: optax.huber_loss(y, jnp.ones_like(y), delta=0.5),
    "log cosh": lambda y: optax.log_cosh(y, jnp.ones_like(y)),
    "cosine": lambda y: optax.cosine_distance(y, jnp.arange(4.0) + jnp.zeros_like(y), epsilon=1e-8),
    "hinge": lambda y: optax.hinge_loss(y, jnp.sign(jnp.arange(4.0) - 1.5) + jnp.zeros_like(y)),
    "kl": lambda y: optax.kl_divergence(jax.nn.log_softmax(y), jnp.full_like(y, 0.25)),
    "ctc": lambda y: optax.ctc_loss(
        y[None], jnp.zeros((1, 6)), jnp.array([[1, 2, 1]]), jnp.zeros((1, 3))
    ),
}


class TestLosses:
    @pytest.mark.parametrize("name", LOSSES)
    def test_loss_of_a_layer(self, name):
        def loss(w, v, x):
            return jnp.sum(LOSSES[name](jnp.tanh(x @ w) @ v)) * 4

        args = normal(0, 8, 8) / 3, normal(1, 8, 4) / 2, normal(2, 6, 8)
        check(loss, args, BF16, F16, roundings=12, argnums=(0, 1), selects=name == "ctc")

    @pytest.mark.parametrize("name", LOSSES)
    def test_the_loss_itself_is_in_float32(self, name):
        """Of logits that fit the narrow dtype the loss has no error of it."""
        logits = (normal(0, 6, 4) * 2).astype(BF16).astype(F32)
        fun = lambda logits: LOSSES[name](logits @ jnp.eye(4))  # noqa: E731
        ours, plain = jax.jit(autocast(fun))(logits), LOSSES[name](logits)
        assert ours.dtype == F32
        np.testing.assert_allclose(ours, plain, rtol=64 * UNIT[F32], atol=16 * UNIT[F32])
        grad = jax.grad(lambda y: jnp.sum(autocast(fun)(y)))(logits)
        wanted = jax.grad(lambda y: jnp.sum(LOSSES[name](y)))(logits)
        # One rounding, where the gradient of the logits enters the product.
        np.testing.assert_allclose(grad, wanted, rtol=2 * UNIT[BF16], atol=2 * UNIT[BF16])


class TestAttention:
    @both
    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"bias": True}, {"mask": True}],
                             ids=["plain", "causal", "bias", "mask"])  # fmt: skip
    def test_dot_product_attention(self, options, compute):
        q, k, v = (normal(i, 2, 6, 2, 4) for i in range(3))
        options = dict(options)
        if "bias" in options:
            options["bias"] = normal(4, 1, 2, 6, 6)
        if "mask" in options:
            options["mask"] = jnp.tril(jnp.ones((6, 6), bool))[None, None]

        def loss(q, k, v):
            return jnp.mean(jnp.tanh(jax.nn.dot_product_attention(q, k, v, **options))) * 64

        check(loss, (q, k, v), compute, roundings=12, argnums=(0, 1, 2))
        eqns = traced(autocast(loss, compute), q, k, v)
        assert set(dtypes_of(eqns, "exp")) == {(F32,)}

    def test_grouped_queries(self):
        q, k, v = normal(0, 2, 6, 4, 4), normal(1, 2, 6, 2, 4), normal(2, 2, 6, 2, 4)

        def loss(q, k, v):
            return jnp.mean(jnp.tanh(jax.nn.dot_product_attention(q, k, v, is_causal=True))) * 64

        check(loss, (q, k, v), BF16, F16, roundings=12, argnums=(0, 1, 2))

    @both
    @pytest.mark.parametrize("causal", [False, True])
    def test_flash(self, causal, compute):
        q, k, v = (normal(i, 8, 4) for i in range(3))
        w = normal(3, 4, 4)

        def loss(attend):
            return lambda q, k, v: jnp.mean(jnp.tanh(attend(q @ w, k, v, causal) @ w)) * 16

        check(loss(flash), (q, k, v), compute, roundings=16, argnums=(0, 1, 2))
        plain = jax.grad(loss(plain_attention), (0, 1, 2))(q, k, v)
        assert_alike(
            jax.grad(autocast(loss(flash), compute), (0, 1, 2))(q, k, v), plain, 16 * UNIT[compute]
        )
        eqns = traced(jax.grad(autocast(loss(flash), compute)), q, k, v)
        assert set(dtypes_of(eqns, "exp")) == {(F32,)}

    @both
    def test_flash_forward_statistics_are_in_float32(self, compute):
        """The running sum of the weights is a carry: 4096 equal keys give the mean value."""
        q, k = jnp.zeros((1, 4)), jnp.zeros((4096, 4))
        v = jnp.ones((4096, 4))
        result = autocast(functools.partial(flash, causal=False), compute)(q, k, v)
        np.testing.assert_allclose(result, 1.0, rtol=UNIT[compute])


def plain_attention(q, k, v, causal):
    scores = q @ k.T / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -jnp.inf)
    return jax.nn.softmax(scores) @ v


BLOCK = 2


def _blocks(x):
    return x.reshape(-1, BLOCK, x.shape[-1])


def _scores(q, k, start, causal):
    scores = q @ k.T / q.shape[-1] ** 0.5
    if not causal:
        return scores
    columns = start + jnp.arange(BLOCK)
    return jnp.where(jnp.arange(q.shape[0])[:, None] >= columns, scores, -1e30)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def flash(q, k, v, causal):
    return _flash_fwd(q, k, v, causal)[0]


def _flash_fwd(q, k, v, causal):
    def body(carry, block):
        out, top, total = carry
        k, v, start = block
        scores = _scores(q, k, start, causal)
        new = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new[:, None])
        shrink = jnp.exp(top - new)
        return (out * shrink[:, None] + weights @ v, new, total * shrink + weights.sum(-1)), None

    rows = q.shape[0]
    first = jnp.zeros((rows, v.shape[-1])), jnp.full(rows, -1e30), jnp.zeros(rows)
    starts = jnp.arange(0, k.shape[0], BLOCK)
    (out, top, total), _ = lax.scan(body, first, (_blocks(k), _blocks(v), starts))
    out = out / total[:, None]
    return out, (q, k, v, out, top + jnp.log(total))


def _flash_bwd(causal, saved, g):
    q, k, v, out, lse = saved
    delta = jnp.sum(g * out, -1)

    def body(dq, block):
        k, v, start = block
        weights = jnp.exp(_scores(q, k, start, causal) - lse[:, None])
        ds = weights * (g @ v.T - delta[:, None]) / q.shape[-1] ** 0.5
        return dq + ds @ k, (ds.T @ q, weights.T @ g)

    starts = jnp.arange(0, k.shape[0], BLOCK)
    dq, (dk, dv) = lax.scan(body, jnp.zeros_like(q), (_blocks(k), _blocks(v), starts))
    return dq, dk.reshape(k.shape), dv.reshape(v.shape)


flash.defvjp(_flash_fwd, _flash_bwd)


class Weights(NamedTuple):
    input: Any
    state: Any
    bias: Any


def weights(n, m, gates=1):
    return Weights(
        normal(0, m, gates * n) / m**0.5, normal(1, n, gates * n) / n**0.5, jnp.full(gates * n, 0.1)
    )


def elman(w, h, x):
    h = jnp.tanh(x @ w.input + h @ w.state + w.bias)
    return h, h


def lstm(w, state, x):
    h, c = state
    i, f, g, o = jnp.split(x @ w.input + h @ w.state + w.bias, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


class TestLoops:
    def test_elman(self):
        def loss(w, xs):
            return (
                jnp.mean(jnp.tanh(lax.scan(functools.partial(elman, w), jnp.zeros((3, 8)), xs)[1]))
                * 64
            )

        check(loss, (weights(8, 6), normal(2, 5, 3, 6)), BF16, F16, roundings=24)

    @pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}],
                             ids=["forward", "reverse", "unrolled"])  # fmt: skip
    def test_lstm(self, options):
        def loss(w, xs):
            zeros = jnp.zeros((3, 8))
            _, hs = lax.scan(functools.partial(lstm, w), (zeros, zeros), xs, **options)
            return jnp.mean(jnp.tanh(hs)) * 64

        check(loss, (weights(8, 6, 4), normal(2, 4, 3, 6)), BF16, F16, roundings=24)

    @both
    def test_gradients_of_weights_add_up_in_float32_over_steps(self, compute):
        """A loop of 4096 steps whose every term is 1: a narrow sum would stop at 256 or 2048."""
        x = jnp.ones((4096, 1, 1))

        def loss(w):
            return lax.scan(lambda c, x: (c + jnp.sum(x @ w), None), jnp.float32(0), x)[0]

        for fun in (jax.grad(autocast(loss, compute)), autocast(jax.grad(loss), compute)):
            grad = fun(jnp.ones((1, 1)))
            assert (grad.dtype, float(grad[0, 0])) == (F32, 4096.0)
        assert float(autocast(loss, compute)(jnp.ones((1, 1)))) == 4096.0

    @both
    def test_fori_and_while(self, compute):
        w, x = normal(0, 8, 8) / 3, normal(1, 4, 8)

        def fori(w, x):
            x = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w) + x / (i + 1.0), x)
            return jnp.mean(jnp.tanh(x @ w)) * 16

        check(fori, (w, x), compute, roundings=16, argnums=(0, 1))

        def dynamic(w, x, n):
            return lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w), x) @ w

        assert set(computed_in(traced(autocast(dynamic, compute), w, x, 3))) == {compute}
        assert_alike(
            jax.jit(autocast(dynamic, compute))(w, x, 3), dynamic(w, x, 3), 16 * UNIT[compute]
        )

    def test_loop_with_an_index_into_narrow_values(self):
        w, x = normal(0, 8, 8) / 3, normal(1, 5, 8)

        def fun(w, x):
            h = x @ w
            body = lambda i, out: out.at[i].set(jnp.tanh(h[i] @ w))  # noqa: E731
            return jnp.sum(lax.fori_loop(0, 5, body, jnp.zeros((5, 8))) @ w)

        check(fun, (w, x), BF16, F16, roundings=12)

    def test_map(self):
        w, x = normal(0, 8, 8) / 3, normal(1, 6, 8)
        for options in ({}, {"batch_size": 2}):

            def loss(w, x, options=options):
                return jnp.sum(jnp.tanh(lax.map(lambda v: jnp.tanh(v @ w) @ w, x, **options)))

            check(loss, (w, x), BF16, F16, roundings=12)

    def test_associative_scan(self):
        """A linear recurrence whose gates are narrow."""
        w, v, x = normal(0, 8, 8) / 3, normal(1, 8, 8) / 3, normal(2, 6, 8)

        def combine(a, b):
            return a[0] * b[0], b[0] * a[1] + b[1]

        def loss(w, v, x):
            gates, inputs = jax.nn.sigmoid(x @ w), x @ v
            _, h = lax.associative_scan(combine, (gates, inputs))
            return jnp.sum(jnp.tanh(h @ w))

        check(loss, (w, v, x), BF16, F16, roundings=16, argnums=(0, 1, 2))

    def test_conditions(self):
        w, x = normal(0, 8, 8) / 3, normal(1, 4, 8)

        def loss(w, x, flag):
            x = lax.cond(flag, lambda x: jnp.tanh(x @ w), lambda x: x, x)
            x = lax.switch(flag.astype(jnp.int32), [lambda x: x @ w, jnp.exp, jnp.sin], x)
            return jnp.sum(jnp.tanh(x @ w))

        for flag in (True, False):
            check(loss, (w, x, jnp.array(flag)), BF16, F16, roundings=16, argnums=(0, 1))

    def test_loops_in_loops(self):
        w, x = normal(0, 8, 8) / 3, normal(1, 2, 4, 8)

        def loss(w, x):
            def outer(h, x):
                inner = lambda h, _: (jnp.tanh(h @ w + x), None)  # noqa: E731
                h, _ = lax.scan(jax.checkpoint(inner), h, length=2)
                h = lax.cond(jnp.array(True), lambda h: h @ w, lambda h: h, h)
                return h, jnp.sum(h)

            h, sums = lax.scan(outer, jnp.zeros((4, 8)), x)
            return jnp.sum(jnp.tanh(h)) + jnp.mean(sums)

        check(loss, (w, x), BF16, F16, roundings=24)


def spd(n):
    a = normal(0, n, n)
    return a @ a.T / n + jnp.eye(n)


def power_iteration(a):
    def step(state):
        v, _, value = state
        w = a @ v
        return w / jnp.linalg.norm(w), value, v @ w

    start = jnp.ones(a.shape[0]), jnp.float32(0), jnp.float32(1)
    return lax.while_loop(lambda s: jnp.abs(s[1] - s[2]) > 1e-6, step, start)[2]


def jacobi(a, b):
    diagonal = jnp.diag(a)

    def step(x):
        return x + (b - a @ x) / diagonal

    residual = lambda x: jnp.linalg.norm(b - a @ x)  # noqa: E731
    return lax.while_loop(lambda x: residual(x) > 1e-5, step, jnp.zeros_like(b))


def newton(a, b):
    def residual(x):
        return a @ x + x**3 - b

    def step(state):
        x, _ = state
        update = jnp.linalg.solve(jax.jacfwd(residual)(x), residual(x))
        return x - update, jnp.linalg.norm(update)

    start = jnp.zeros_like(b), jnp.float32(jnp.inf)
    return lax.while_loop(lambda s: s[1] > 1e-5, step, start)[0]


def bisection(a, b):
    def step(state):
        low, high = state
        middle = (low + high) / 2
        positive = jnp.sum(a @ (middle * b)) > 1.0
        return jnp.where(positive, low, middle), jnp.where(positive, middle, high)

    start = jnp.float32(-100), jnp.float32(100)
    return lax.while_loop(lambda s: s[1] - s[0] > 1e-4, step, start)[0]


SOLVERS = {
    "power iteration": lambda a, b: power_iteration(a),
    "jacobi": lambda a, b: jacobi(a / 8 + jnp.diag(jnp.diag(a)), b),
    "newton": newton,
    "bisection": lambda a, b: bisection(a, jnp.ones_like(b)),
    "cg": lambda a, b: jax.scipy.sparse.linalg.cg(lambda x: a @ x, b, tol=1e-6)[0],
    "cg of a matrix": lambda a, b: jax.scipy.sparse.linalg.cg(a, b, tol=1e-6)[0],
    "bicgstab": lambda a, b: jax.scipy.sparse.linalg.bicgstab(a, b, tol=1e-6)[0],
    "gmres": lambda a, b: jax.scipy.sparse.linalg.gmres(a, b, tol=1e-6)[0],
    "solve": jnp.linalg.solve,
    "expm": lambda a, b: jax.scipy.linalg.expm(a / 4) @ jnp.zeros_like(b) + jnp.sum(a),
}


class TestSolvers:
    """What stops by a tolerance would not stop, or too soon, in the narrow dtype."""

    @both
    @pytest.mark.parametrize("name", SOLVERS)
    def test_runs_in_float32(self, name, compute):
        a, b = spd(8), normal(1, 8)
        ours = jax.jit(autocast(SOLVERS[name], compute))(a, b)
        assert ours.dtype == F32
        # Both solve to their tolerance, of 1e-4 at most.
        np.testing.assert_allclose(ours, SOLVERS[name](a, b), rtol=1e-3, atol=2e-4)

    @both
    @pytest.mark.parametrize("name", ["newton", "jacobi", "cg"])
    def test_between_products(self, name, compute):
        """The solver is of float32, what comes before and after it is narrow."""
        a, b, w = spd(8), normal(1, 8), normal(2, 8, 8) / 3

        def fun(a, b, w):
            return jnp.tanh(SOLVERS[name](a, jnp.tanh(b @ w)) @ w) @ w

        assert_alike(
            jax.jit(autocast(fun, compute))(a, b, w), fun(a, b, w), 12 * UNIT[compute] + 2e-4
        )
        dtypes = computed_in(traced(autocast(fun, compute), a, b, w))
        assert dtypes[0] == compute
        assert dtypes[-2:] == [compute] * 2
        assert set(dtypes[1:-2]) == {F32}

    @both
    def test_gradients_through_a_linear_solve(self, compute):
        a, b, w = spd(8), normal(1, 8), normal(2, 8, 8) / 3

        def loss(w, b):
            x, _ = jax.scipy.sparse.linalg.cg(lambda x: a @ x, jnp.tanh(b @ w), tol=1e-6)
            return jnp.sum(jnp.tanh(x @ w))

        plain = jax.grad(loss, (0, 1))(w, b)
        for fun in (
            jax.grad(autocast(loss, compute), (0, 1)),
            autocast(jax.grad(loss, (0, 1)), compute),
        ):
            assert_alike(jax.jit(fun)(w, b), plain, 16 * UNIT[compute])

    @both
    def test_a_solver_with_an_implicit_derivative(self, compute):
        """A fixed point of a layer, by custom_vjp: a solver in the backward pass too."""

        @jax.custom_vjp
        def fixed_point(w, x):
            def step(state):
                z, _ = state
                return jnp.tanh(z @ w + x), z

            start = jnp.tanh(x), x + 1
            return lax.while_loop(lambda s: jnp.abs(s[0] - s[1]).max() > 1e-5, step, start)[0]

        def forward(w, x):
            z = fixed_point(w, x)
            return z, (w, x, z)

        def backward(saved, g):
            w, x, z = saved
            _, pullback = jax.vjp(lambda w, x, z: jnp.tanh(z @ w + x), w, x, z)

            def step(state):
                u, _ = state
                return g + pullback(u)[2], u

            u = lax.while_loop(lambda s: jnp.abs(s[0] - s[1]).max() > 1e-5, step, (g, g + 1))[0]
            return pullback(u)[:2]

        fixed_point.defvjp(forward, backward)
        w, x, v = normal(0, 8, 8) / 8, normal(1, 4, 8), normal(2, 8, 8) / 3
        loss = lambda w, x: jnp.sum(jnp.tanh(fixed_point(w, x @ v) @ v))  # noqa: E731
        grads = jax.jit(jax.grad(autocast(loss, compute), (0, 1)))(w, x)
        assert_alike(grads, jax.grad(loss, (0, 1))(w, x), 16 * UNIT[compute])


def mlp(params, x):
    for w in params[:-1]:
        x = jnp.tanh(x @ w)
    return x @ params[-1]


def mlp_loss(params, x):
    return jnp.mean(jnp.tanh(mlp(params, x))) * 16


PARAMS = [normal(0, 6, 8) / 2, normal(1, 8, 8) / 3, normal(2, 8, 4) / 3]
X = normal(3, 5, 6)


def block(w, x):
    h = checkpoint_name(jnp.tanh(x @ w), "hidden")
    return x + jax.nn.softmax(h @ w) @ w


POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots without batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
}


class TestTransformations:
    @pytest.mark.parametrize("policy", POLICIES)
    def test_checkpoint(self, policy):
        w, x = normal(0, 8, 8) / 3, normal(1, 4, 8)
        step = jax.checkpoint(block, policy=POLICIES[policy])

        def loss(w, x):
            return jnp.mean(jnp.tanh(step(w, step(w, x)))) * 16

        check(loss, (w, x), BF16, F16, roundings=16, argnums=(0, 1))

    @pytest.mark.parametrize("policy", POLICIES)
    def test_checkpoint_recomputes_as_many_products_as_without_autocast(self, policy):
        """A policy that names products knows those of autocast as well."""
        w, x = normal(0, 8, 8) / 3, normal(1, 4, 8)
        step = jax.checkpoint(block, policy=POLICIES[policy])

        def loss(w, x):
            return jnp.mean(jnp.tanh(step(w, step(w, x))))

        ours = computed_in(traced(jax.grad(autocast(loss)), w, x))
        assert len(ours) == len(computed_in(traced(jax.grad(loss), w, x)))

    @both
    def test_forward_mode(self, compute):
        tangents = jax.tree.map(jnp.cos, PARAMS)
        fun = lambda params: autocast(mlp, compute)(params, X)  # noqa: E731
        plain = jax.jvp(lambda params: mlp(params, X), (PARAMS,), (tangents,))
        ours = jax.jvp(fun, (PARAMS,), (tangents,))
        assert_alike(ours, plain, 16 * UNIT[compute])
        _, linear = jax.linearize(fun, PARAMS)
        # What linearize leaves to run are the same products.
        np.testing.assert_allclose(
            linear(tangents), ours[1], rtol=UNIT[compute], atol=UNIT[compute]
        )
        inside = autocast(lambda p, t: jax.jvp(lambda p: mlp(p, X), (p,), (t,)), compute)
        assert_alike(inside(PARAMS, tangents), plain, 16 * UNIT[compute])
        for program in (
            lambda p, t: jax.jvp(fun, (p,), (t,)),
            inside,
            lambda p, t: jax.linearize(fun, p)[1](t),
        ):
            assert set(computed_in(traced(program, PARAMS, tangents))) == {compute}

    @both
    def test_second_order(self, compute):
        transforms = {
            "hessian": jax.hessian,
            "reverse over reverse": lambda f: jax.jacrev(jax.grad(f)),
            "hessian-vector": lambda f: lambda w: jax.jvp(jax.grad(f), (w,), (w,))[1],
            "gradient penalty": lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(w) ** 2)),
        }

        def loss(w):
            return jnp.mean(jnp.tanh(jnp.tanh(X @ w) @ PARAMS[1])) * 16

        def outside(w):
            return {name: t(autocast(loss, compute))(w) for name, t in transforms.items()}

        def plain(w):
            return {name: t(loss)(w) for name, t in transforms.items()}

        inside = autocast(plain, compute)
        for fun in (outside, inside):
            assert set(computed_in(traced(fun, PARAMS[0]))) == {compute}
        fun = inside if compute == F16 else outside
        found, wanted = jax.jit(fun)(PARAMS[0]), jax.jit(plain)(PARAMS[0])
        for name in transforms:
            assert_alike(found[name], wanted[name], 24 * UNIT[compute])

    @both
    def test_vmap_of_grad(self, compute):
        """Per-example gradients, outside and inside."""
        xs = normal(4, 7, 1, 6)
        per_example = lambda f: jax.vmap(jax.grad(f), (None, 0))  # noqa: E731
        plain = per_example(mlp_loss)(PARAMS, xs)
        for fun in (
            per_example(autocast(mlp_loss, compute)),
            autocast(per_example(mlp_loss), compute),
        ):
            assert_alike(jax.jit(fun)(PARAMS, xs), plain, 12 * UNIT[compute])
            assert set(computed_in(traced(fun, PARAMS, xs))) == {compute}

    @both
    def test_vmap_over_models(self, compute):
        stacked = jax.tree.map(lambda w: jnp.stack([w, -w, 2 * w]), PARAMS)
        fun = lambda f: jax.vmap(jax.value_and_grad(f), (0, None))  # noqa: E731
        for ours in (fun(autocast(mlp_loss, compute)), autocast(fun(mlp_loss), compute)):
            assert_alike(ours(stacked, X), fun(mlp_loss)(stacked, X), 16 * UNIT[compute])
            assert set(computed_in(traced(ours, stacked, X))) == {compute}

    @both
    def test_vjp_of_several_outputs(self, compute):
        def fun(params, x):
            h = jnp.tanh(x @ params[0])
            return {"hidden": h, "out": (h @ params[1], jnp.sum(h)), "count": x.shape[0]}

        def pull(f):
            out, pullback = jax.vjp(lambda p: jax.tree.map(jnp.float32, f(p, X)), PARAMS)
            return pullback(jax.tree.map(jnp.ones_like, out))

        assert_alike(pull(autocast(fun, compute)), pull(fun), 12 * UNIT[compute])

    @both
    def test_stop_gradient_and_unused_arguments(self, compute):
        def loss(params, x):
            h = jnp.tanh(x @ params[0])
            return jnp.mean(jnp.tanh(lax.stop_gradient(h) @ params[1] + h)) * 16

        check(loss, (PARAMS, X), compute, roundings=12, argnums=(0, 1))
        grads = jax.grad(autocast(loss, compute))(PARAMS, X)
        assert not jnp.any(grads[2])

    def test_jit_traces_once(self):
        traces = []

        def loss(params, x):
            traces.append(1)
            return mlp_loss(params, x)

        fun = jax.jit(jax.value_and_grad(autocast(loss)))
        for seed in range(3):
            fun(PARAMS, normal(seed, 5, 6))
        assert len(traces) == 1

    def test_eager_calls_with_other_shapes(self):
        fun = autocast(mlp)
        for rows in (1, 3, 0):
            assert fun(PARAMS, jnp.ones((rows, 6))).shape == (rows, 4)

    def test_abstract_evaluation(self):
        out = jax.eval_shape(autocast(mlp), PARAMS, X)
        assert (out.shape, out.dtype, out.weak_type) == ((5, 4), F32, False)


def adamw_step(tx):
    def step(params, state, x):
        value, grads = jax.value_and_grad(mlp_loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def assert_full(tree):
    """Numbers of float32 that no rounding to a narrow dtype went over."""
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size > 1:
            assert leaf.dtype == F32
            for dtype in (BF16, F16):
                rounded = leaf.astype(dtype).astype(F32)
                # Zeros do not tell.
                assert jnp.mean((leaf != rounded) | (leaf == 0)) > 0.75


@pytest.mark.usefixtures("standard_promotion")
class TestSteps:
    """Autocast around a whole step: masters and moments stay what they are."""

    @both
    @pytest.mark.parametrize(
        "tx",
        [optax.adamw(1e-3), optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)),
         optax.sgd(1e-2, momentum=0.9), optax.lion(1e-3), optax.adafactor(1e-2)],
        ids=["adamw", "clipped", "momentum", "lion", "adafactor"],
    )  # fmt: skip
    def test_one_step(self, tx, compute):
        step, state = adamw_step(tx), tx.init(PARAMS)
        ours = autocast(step, compute)
        assert set(computed_in(traced(ours, PARAMS, state, X))) == {compute}
        (params, moments, value), plain = (jax.jit(f)(PARAMS, state, X) for f in (ours, step))
        assert_alike(value, plain[2], 12 * UNIT[compute])
        # The second moment is a square.
        assert_alike(moments, plain[1], 2 * 12 * UNIT[compute])
        assert_full((params, moments))
        # A first step of these is by the sign of the gradient or linear in it, and of size 1e-2.
        np.testing.assert_array_less(
            0.5,
            np.mean(
                np.concatenate(
                    [(np.abs(a - b) <= 1e-4).ravel() for a, b in zip(params, plain[0], strict=True)]
                )
            ),
        )
        for a, b in zip(params, plain[0], strict=True):
            assert jnp.abs(a - b).max() <= 2e-2

    @both
    def test_small_updates_are_not_lost(self, compute):
        """1e-5 beside 1 is below half a unit of either narrow dtype."""
        params, tx = [jnp.ones((6, 4))], optax.adamw(1e-5, weight_decay=0.0)
        step, state = adamw_step(tx), tx.init(params)
        ours = jax.jit(autocast(step, compute))
        params_1, *_ = ours(params, state, X)
        assert jnp.all(params_1[0] != 1.0)
        np.testing.assert_allclose(jnp.abs(params_1[0] - 1), 1e-5, rtol=0.05)

    @both
    def test_a_scan_of_steps(self, compute):
        tx = optax.adamw(1e-4)
        state, batches = tx.init(PARAMS), normal(5, 8, 5, 6)

        def train(params, state, batches):
            def body(carry, x):
                params, state, value = adamw_step(tx)(*carry, x)
                return (params, state), value

            return lax.scan(body, (params, state), batches)

        ours = autocast(train, compute)
        eqns = traced(ours, PARAMS, state, batches)
        assert set(computed_in(eqns)) == {compute}
        for eqn in eqns:
            if eqn.primitive.name == "scan":
                carried = {v.aval.dtype.type for v in eqn.outvars}
                assert carried <= {F32, jnp.int32}
        ((params, moments), values) = jax.jit(ours)(PARAMS, state, batches)
        ((plain, plain_moments), plain_values) = jax.jit(train)(PARAMS, state, batches)
        assert_full((params, moments))
        assert_alike(values, plain_values, 24 * UNIT[compute])
        assert_alike(moments, plain_moments, 32 * UNIT[compute])
        for a, b, start in zip(params, plain, PARAMS, strict=True):
            assert jnp.all(a != start)
            # Eight steps of 1e-4, some of which may have the other sign.
            assert jnp.abs(a - b).max() <= 2 * 8 * 1.1e-4
            assert jnp.mean(jnp.abs(a - b)) <= 1e-4

    @both
    def test_averages_and_counters_keep_their_precision(self, compute):
        """An average that moves by 1e-4 of itself a step, and a count of examples."""

        def step(params, average, seen, x):
            value, grads = jax.value_and_grad(mlp_loss)(params, x)
            params = jax.tree.map(lambda p, g: p - 1e-4 * g, params, grads)
            average = jax.tree.map(lambda a, p: 0.9999 * a + 0.0001 * p, average, params)
            return params, average, seen + x.shape[0], value

        def train(params, x):
            def body(carry, _):
                *carry, value = step(*carry, x)
                return tuple(carry), value

            start = params, jax.tree.map(lambda p: p * 0 + 1, params), jnp.float32(0)
            return lax.scan(body, start, length=500)

        (_, average, seen), _ = jax.jit(autocast(train, compute))(PARAMS, X)
        (_, plain, _), _ = jax.jit(train)(PARAMS, X)
        assert float(seen) == 2500.0
        for a, b in zip(average, plain, strict=True):
            # It has moved by 0.05 in steps below half a unit of either dtype; the weights that
            # it follows differ by roundings of the gradients, by less than 1e-3.
            np.testing.assert_allclose(a, b, atol=1e-4)

    def test_flax_train_state(self):
        compute = BF16
        train_state = pytest.importorskip("flax.training.train_state")
        model, x = TransformerBlock(), normal(0, 2, 6, 8)
        params = drawn(lambda x: model.init(jax.random.key(1), x, None, True), x)
        state = train_state.TrainState.create(
            apply_fn=model.apply, params=params, tx=optax.adamw(1e-3)
        )

        def step(state, x, key):
            def loss(params):
                y = state.apply_fn(params, x, rngs={"dropout": key})
                return jnp.mean(jnp.tanh(y)) * 16

            value, grads = jax.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), value

        new, value = jax.jit(autocast(step, compute))(state, x, jax.random.key(2))
        plain, plain_value = jax.jit(step)(state, x, jax.random.key(2))
        assert int(new.step) == 1
        assert_alike(value + 1, plain_value + 1, 16 * UNIT[compute])
        assert_alike(new.opt_state, plain.opt_state, 32 * UNIT[compute])
        eqns = traced(autocast(step, compute), state, x, jax.random.key(2))
        assert set(computed_in(eqns)) == {compute}

    @both
    def test_accumulation_over_microbatches(self, compute):
        batches = jnp.stack([X] * 64)

        def accumulate(params, batches):
            def body(total, x):
                grads = jax.grad(mlp_loss)(params, x)
                return jax.tree.map(jnp.add, total, grads), None

            return lax.scan(body, jax.tree.map(jnp.zeros_like, params), batches)[0]

        ours = jax.jit(autocast(accumulate, compute))(PARAMS, batches)
        one = jax.jit(autocast(jax.grad(mlp_loss), compute))(PARAMS, X)
        # Of 64 equal terms the sum has no error beyond that of float32.
        assert_alike(ours, jax.tree.map(lambda g: 64 * g, one), 64 * UNIT[F32])


class TestMeshes:
    @pytest.fixture
    def mesh(self):
        if jax.device_count() < 4:
            pytest.skip("needs four devices")
        return jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def test_shard_map(self, mesh):
        w, v, x = normal(0, 6, 8) / 2, normal(1, 8, 4) / 3, normal(2, 8, 6)

        def loss(w, v, x):
            def local(w, v, x):
                return lax.pmean(jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ v)), "d") * 16

            return jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P("d")), out_specs=P())(
                w, v, x
            )

        check(loss, (w, v, x), BF16, F16, roundings=12, argnums=(0, 1))

    @both
    def test_gradients_inside_shard_map(self, mesh, compute):
        specs = {"mesh": mesh, "in_specs": (P(), P("d")), "out_specs": P()}

        def plain(params, x):
            return jax.grad(mlp_loss)(params, x)

        def parallel(autocast_inside):
            fun = autocast(mlp_loss, compute) if autocast_inside else mlp_loss

            def local(params, x):
                # Parameters are the same on every device: their gradient is summed by shard_map.
                return jax.tree.map(lambda g: g / 4, jax.grad(fun)(params, x))

            return jax.shard_map(local, **specs)

        x = normal(4, 8, 6)
        for fun in (parallel(True), autocast(parallel(False), compute)):
            assert_alike(jax.jit(fun)(PARAMS, x), plain(PARAMS, x), 12 * UNIT[compute])
            eqns = traced(fun, PARAMS, x)
            assert set(computed_in(eqns)) == {compute}
            reduced = dtypes_of(eqns, "psum", "psum_invariant", "psum2", "all_reduce")
            assert {dtype for row in reduced for dtype in row} <= {F32}

    def test_split_contraction(self, mesh):
        """Tensor parallelism: partial sums meet in float32."""
        x, w, v = normal(0, 4, 8), normal(1, 8, 16) / 3, normal(2, 16, 8) / 4

        def fun(x, w, v):
            def local(x, w, v):
                return lax.psum(jnp.tanh(x @ w) @ v, "d")

            specs = {"in_specs": (P(), P(None, "d"), P("d", None)), "out_specs": P()}
            return jnp.sum(jnp.tanh(jax.shard_map(local, mesh=mesh, **specs)(x, w, v)))

        check(fun, (x, w, v), BF16, F16, roundings=12, argnums=(0, 1, 2))

    def test_sharding_constraints(self, mesh):
        rows = NamedSharding(mesh, PartitionSpec("d", None))

        def fun(x, w):
            x = lax.with_sharding_constraint(x @ w, rows)
            return jnp.tanh(x) @ w

        x, w = normal(0, 8, 8), normal(1, 8, 8)
        result = jax.jit(autocast(fun))(x, w)
        assert_alike(result, fun(x, w), 8 * UNIT[BF16])
        assert set(dtypes_of(traced(autocast(fun), x, w), "sharding_constraint")) == {(BF16,)}


class TestArguments:
    def test_closures_over_arrays(self):
        w = normal(0, 8, 8) / 3
        host = np.asarray(normal(1, 8, 8), np.float32) / 3
        loss = lambda x: jnp.sum(jnp.tanh((x @ w) @ host))  # noqa: E731
        check(loss, (normal(2, 4, 8),), BF16, F16, roundings=8)

    @pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.vmap, jax.custom_jvp],
                             ids=["jit", "checkpoint", "vmap", "custom_jvp"])  # fmt: skip
    def test_inner_functions_that_close_over_arrays(self, wrap):
        """JAX keeps what they close over as constants of an inner jaxpr."""
        w, table = normal(0, 8, 8) / 3, np.linspace(0, 1, 8, dtype=np.float32)
        step = wrap(lambda x: jnp.tanh(x @ w) * table)
        if wrap is jax.custom_jvp:
            step.defjvp(lambda x, t: (step(*x), (1 - step(*x) ** 2) * (t[0] @ w) * table))
        loss = lambda x: jnp.sum(jnp.tanh(step(step(x)) @ w))  # noqa: E731
        check(loss, (normal(2, 4, 8),), BF16, roundings=12)

    @both
    def test_closures_over_tracers(self, compute):
        x = normal(2, 4, 8)

        def loss(w, v):
            inner = autocast(lambda x: jnp.tanh(x @ w), compute)
            return jnp.sum(jnp.tanh(inner(inner(x)) @ v))

        def plain(w, v):
            inner = lambda x: jnp.tanh(x @ w)  # noqa: E731
            return jnp.sum(jnp.tanh(inner(inner(x)) @ v))

        args = normal(0, 8, 8) / 3, normal(1, 8, 8) / 3
        for fun in (loss, jax.jit(loss)):
            grads = jax.grad(fun, (0, 1))(*args)
            assert_alike(grads, jax.grad(plain, (0, 1))(*args), 12 * UNIT[compute])
        dtypes = computed_in(traced(jax.grad(loss, (0, 1)), *args))
        # What is outside stays in float32: a product forward, and two of its gradient.
        assert (dtypes.count(compute), dtypes.count(F32)) == (5, 3)
        mapped = jax.vmap(lambda w: loss(w, args[1]))(args[0][None])
        assert_alike(mapped[0], plain(*args), 12 * UNIT[compute])
        _, scanned = lax.scan(lambda c, w: (c, loss(w, args[1])), 0, args[0][None])
        assert_alike(scanned[0], plain(*args), 12 * UNIT[compute])

    @both
    def test_keywords_defaults_and_static_arguments(self, compute):
        def fun(x, w, *more, activation=jnp.tanh, scale=2.0, mode="sum", bias=None, layers=2):
            for _ in range(layers):
                x = activation(x @ w * scale)
            if bias is not None:
                x = x + bias["b"]
            x = x @ w + sum(more)
            return {"sum": jnp.sum, "mean": jnp.mean}[mode](x), x, mode if mode == "x" else None

        x, w = normal(0, 4, 8), normal(1, 8, 8) / 3
        bias = {"b": jnp.ones(8)}
        for args, keywords in (
            ((x, w), {}),
            ((x,), {"w": w}),
            ((x, w, 1.0, 2), {"scale": 0.5}),
            ((x, w), {"activation": jax.nn.relu, "mode": "mean", "layers": 1}),
            ((x, w), {"bias": bias, "scale": jnp.float32(0.5)}),
        ):
            ours, plain = autocast(fun, compute)(*args, **keywords), fun(*args, **keywords)
            assert_alike(ours[:2], plain[:2], 16 * UNIT[compute])
            assert ours[2] is None
        grads = jax.grad(lambda b: autocast(fun, compute)(x, w, bias=b)[0])(bias)
        assert_alike(grads, jax.grad(lambda b: fun(x, w, bias=b)[0])(bias), 8 * UNIT[compute])

    def test_python_numbers_keep_their_kind(self):
        seen = []

        def fun(x, n, flag, scale):
            seen.append((type(n), type(flag), type(scale)))
            return x @ x * scale if flag else x[:n]

        result = autocast(fun)(normal(0, 4, 4), 2, False, 1.5)
        assert result.shape == (2, 4)
        assert seen == [(int, bool, float)]

    def test_outputs_that_are_no_arrays(self):
        fun = lambda x: (x @ x, 3, None, {"a": 2.5, "b": True}, x)  # noqa: E731
        x = normal(0, 4, 4)
        result = autocast(fun)(x)
        assert jax.tree.structure(result) == jax.tree.structure(fun(x))
        assert (int(result[1]), float(result[3]["a"]), bool(result[3]["b"])) == (3, 2.5, True)
        assert jnp.array_equal(result[4], x)

    @both
    def test_numpy_and_half_arguments(self, compute):
        x, w = np.asarray(normal(0, 4, 8)), normal(1, 8, 8)
        assert autocast(jnp.matmul, compute)(x, w).dtype == F32
        for dtype in (BF16, F16):
            half = jnp.asarray(x, dtype)
            result = autocast(lambda x, w: x @ w.astype(x.dtype), compute)(half, w)
            assert result.dtype == dtype
            assert_alike(result.astype(F32), x @ w, 8 * UNIT[BF16])

    def test_wrapping_keeps_the_name(self):
        assert autocast(mlp).__name__ == "mlp"

    def test_shared_and_custom_nodes(self):
        w = Weights(normal(0, 6, 8), normal(1, 8, 8), jnp.ones(8))
        ours = autocast(elman)(w, jnp.zeros((3, 8)), normal(2, 3, 6))
        plain = elman(w, jnp.zeros((3, 8)), normal(2, 3, 6))
        assert_alike(ours, plain, 8 * UNIT[BF16])


class TestOpaque:
    """Kernels, callbacks and rules of others see the dtypes that they were written for."""

    def test_callbacks(self):
        seen = []
        x, w = normal(0, 4, 8), normal(1, 8, 8)

        def host(h):
            seen.append(h.dtype)
            return np.asarray(h) * 2

        def fun(x, w):
            h = x @ w
            jax.debug.callback(lambda h: seen.append(h.dtype), h)
            h = jax.pure_callback(host, jax.ShapeDtypeStruct(h.shape, h.dtype), h)
            return jnp.tanh(h) @ w

        result = jax.jit(autocast(fun))(x, w)
        jax.effects_barrier()
        assert seen == [np.dtype(F32)] * 2
        assert_alike(result, jnp.tanh(x @ w * 2) @ w, 8 * UNIT[BF16])
        assert computed_in(traced(autocast(fun), x, w)) == [BF16] * 2

    def test_pallas(self):
        pl = pytest.importorskip("jax.experimental.pallas")
        x, w = normal(0, 4, 8), normal(1, 8, 8)

        def kernel(x_ref, out_ref):
            assert x_ref.dtype == F32
            out_ref[...] = x_ref[...] * 2

        def fun(x, w):
            spec = jax.ShapeDtypeStruct((4, 8), F32)
            h = pl.pallas_call(kernel, out_shape=spec, interpret=True)(x @ w)
            return jnp.tanh(h) @ w

        assert_alike(jax.jit(autocast(fun))(x, w), jnp.tanh(x @ w * 2) @ w, 8 * UNIT[BF16])

    @both
    def test_custom_vmap(self, compute):
        @jax.custom_batching.custom_vmap
        def step(x, w):
            return jnp.tanh(x @ w)

        @step.def_vmap
        def _(size, batched, x, w):
            del size
            assert batched == [True, False]
            return jnp.tanh(jnp.einsum("bij,jk->bik", x, w)), True

        xs, w = normal(0, 3, 4, 8), normal(1, 8, 8) / 3
        plain = jnp.tanh(xs @ w) @ w
        fun = lambda x: step(x, w) @ w  # noqa: E731
        for mapped in (jax.vmap(autocast(fun, compute)), autocast(jax.vmap(fun), compute)):
            assert_alike(jax.jit(mapped)(xs), plain, 8 * UNIT[compute])
            assert set(computed_in(traced(mapped, xs))) == {compute}

    @both
    def test_code_by_platform(self, compute):
        w, x = normal(0, 8, 8) / 3, normal(1, 4, 8)

        def fun(x):
            h = lax.platform_dependent(x @ w, cpu=lambda h: jnp.tanh(h @ w), default=jnp.tanh)
            return h @ w

        assert_alike(
            jax.jit(autocast(fun, compute))(x), jnp.tanh(x @ w @ w) @ w, 12 * UNIT[compute]
        )

    def test_leaks_nothing(self):
        fun = autocast(
            lambda x: lax.scan(
                lambda c, _: (jnp.tanh(c @ PARAMS[0].T @ PARAMS[0]), c),
                jnp.tanh(x @ PARAMS[0]),
                length=2,
            )
        )
        with jax.checking_leaks():
            jax.jit(jax.grad(lambda x: jnp.sum(fun(x)[0])))(X)
