"""The three-product contract, under every transformation."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmp
from jaxmp import conv_general_dilated, dot_general, einsum, matmul, ragged_dot, remat_policy
from jaxmp.audit import TargetUnavailableError, audit

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
UNIT = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24}
NUMBERS = (((2,), (1,)), ((0,), (0,)))


def normal(seed, *shape, dtype=F32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def exact(fun, lhs, rhs, compute_dtype):
    """The product of the rounded operands, in float64."""
    rounded = (np.asarray(x.astype(compute_dtype), np.float64) for x in (lhs, rhs))
    with jax.enable_x64(True):
        return np.asarray(fun(*map(jnp.asarray, rounded)), np.float64)


def bound(value, terms, out_dtype):
    """Rounding of the result, and of each of the additions in float32."""
    return (UNIT[out_dtype] + terms * UNIT[F32]) * (np.abs(value) + terms**0.5)


def assert_close(result, wanted, terms):
    difference = np.abs(np.asarray(result, np.float64) - wanted)
    assert np.all(difference <= bound(wanted, terms, result.dtype.type))


def dot_operands(text):
    """The dtypes of the operands of each product in a compiled module's text."""
    dtypes = dict(re.findall(r"%?([\w.-]+)(?: = |: )(\w+)\[", text))
    operands = re.findall(r" dot\(%?([\w.-]+), %?([\w.-]+)\)", text)
    return [(dtypes[lhs], dtypes[rhs]) for lhs, rhs in operands]


class TestContract:
    @pytest.mark.parametrize("compute", [BF16, F16])
    @pytest.mark.parametrize("x_dtype", [BF16, F16, F32])
    @pytest.mark.parametrize("w_dtype", [BF16, F16, F32])
    def test_dtypes_of_all_three_products(self, compute, x_dtype, w_dtype):
        policy = jaxmp.Policy(F32, compute, F32)
        x, w = normal(0, 6, 8, dtype=x_dtype), normal(1, 8, 4, dtype=w_dtype)

        def loss(x, w):
            return jnp.sum(matmul(x, w, policy=policy).astype(F32) ** 2)

        report = audit(jax.value_and_grad(loss, (0, 1)), x, w, target=None)
        name = jnp.dtype(compute).name
        assert [row.operand_dtypes for row in report.products] == [(name, name)] * 3
        assert {row.accumulation_dtype for row in report.products} == {"float32"}
        results = sorted((row.result_shape, row.result_dtype) for row in report.products)
        wanted = {(6, 4): compute, (6, 8): x_dtype, (4, 8): w_dtype}
        assert results == sorted((shape, jnp.dtype(d).name) for shape, d in wanted.items())
        _, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)
        assert [grad.dtype for grad in grads] == [x_dtype, w_dtype]

    def test_step_has_no_traps(self):
        def loss(params, x):
            hidden = jax.nn.gelu(matmul(x, params["up"]))
            return jnp.mean(matmul(hidden, params["down"]).astype(F32) ** 2)

        params = {"up": normal(0, 16, 32), "down": normal(1, 32, 16)}
        report = audit(jax.value_and_grad(loss), params, normal(2, 64, 16, dtype=BF16), target=None)
        report.assert_low_precision(1.0)
        report.assert_no_traps()
        assert [row.parameter for row in report.products if row.pass_name == "wgrad"] == [
            "params/down",
            "params/up",
        ]

    def test_weight_gradient_is_that_of_the_rounded_operands_to_float32(self):
        x, w, cotangent = normal(0, 512, 8), normal(1, 8, 4), normal(2, 512, 4, dtype=BF16)
        _, pullback = jax.vjp(lambda w: matmul(x, w), w)
        (gradient,) = pullback(cotangent)
        wanted = exact(lambda x, g: x.T @ g, x, cotangent, BF16)
        assert_close(gradient, wanted, 512)
        # Rounded to bfloat16, as plain JAX does, it would be far off.
        assert np.abs(np.asarray(gradient.astype(BF16), np.float64) - wanted).max() > 0.01

    def test_float32_policy_leaves_the_program_as_it_is(self):
        x, w = normal(0, 6, 8), normal(1, 8, 4)
        numbers = (((1,), (0,)), ((), ()))
        ours = jax.make_jaxpr(lambda x, w: dot_general(x, w, numbers, policy="float32"))(x, w)
        plain = jax.make_jaxpr(lambda x, w: lax.dot_general(x, w, numbers))(x, w)
        assert str(ours) == str(plain)
        ours = jax.make_jaxpr(lambda x, w: einsum("ij,jk->ik", x, w, policy="float32"))(x, w)
        assert str(ours) == str(jax.make_jaxpr(lambda x, w: jnp.einsum("ij,jk->ik", x, w))(x, w))

    def test_other_dtypes_are_multiplied_as_they_are(self):
        integers = jnp.arange(6).reshape(2, 3)
        assert matmul(integers, integers.T).dtype == integers.dtype
        assert matmul(jnp.ones((2, 2), jnp.complex64), jnp.ones((2, 2), jnp.complex64)).dtype == (
            jnp.complex64
        )

    @pytest.mark.parametrize("output", [None, F32, F16, BF16])
    def test_output_dtype(self, output):
        result = matmul(normal(0, 4, 8), normal(1, 8, 2), output_dtype=output)
        assert result.dtype == (output or BF16)
        assert_close(result, exact(jnp.matmul, normal(0, 4, 8), normal(1, 8, 2), BF16), 8)

    def test_transposed_result_runs(self):
        """XLA:CPU folds the transpose into the product, and then refuses to run it."""
        fun = jax.jit(lambda a, b: matmul(a, b, output_dtype=F32).T)
        assert fun(normal(0, 32, 16, dtype=BF16), normal(1, 16, 8, dtype=BF16)).shape == (8, 32)

    @pytest.mark.parametrize("shape", [(8, 256, 256), (64, 64), (4, 128, 32)])
    def test_cpu_is_given_narrow_operands(self, shape):
        """XLA:CPU computes a product in f32, at its speed, if its form is not the right one."""

        def loss(x, w):
            return jnp.sum(matmul(x, w).astype(F32) ** 2)

        x, w = (jax.ShapeDtypeStruct(s, F32) for s in (shape, (shape[-1], 1024)))
        text = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, w).compile().as_text()
        assert dot_operands(text) == [("bf16", "bf16")] * 3

    def test_policies_by_name_and_bad_ones(self):
        assert matmul(jnp.ones((2, 2)), jnp.ones((2, 2)), policy="mixed_float16").dtype == F16
        with pytest.raises(ValueError, match="Unknown dtype or preset"):
            matmul(jnp.ones((2, 2)), jnp.ones((2, 2)), policy="mixed")
        with pytest.raises(ValueError, match="at least one axis"):
            matmul(1.0, jnp.ones(2))
        with pytest.raises(ValueError, match="must be of one size"):
            matmul(jnp.ones((2, 3)), jnp.ones((2, 3)))


def batched(lhs, rhs, **options):
    return dot_general(lhs, rhs, NUMBERS, **options)


def plain(lhs, rhs):
    return lax.dot_general(lhs.astype(F32), rhs.astype(F32), NUMBERS)


LHS, RHS = normal(0, 3, 4, 8), normal(1, 3, 8, 2)


def smooth(product):
    return lambda lhs, rhs: jnp.sum(jnp.sin(product(lhs, rhs).astype(F32)))


def assert_alike(ours, reference, tolerance=0.15):
    """Compares with the float32 result: some roundings of 1/256 of numbers of size sqrt(8)."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(reference), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert jnp.abs(a - b).max() <= tolerance * max(1, jnp.abs(b).max())


class TestTransformations:
    def test_eager_jit_and_scan_agree(self):
        eager = batched(LHS, RHS)
        assert jnp.array_equal(eager, jax.jit(batched)(LHS, RHS))
        _, scanned = lax.scan(lambda c, x: (c, batched(*x)), 0, (LHS[None], RHS[None]))
        assert jnp.array_equal(eager, scanned[0])

    @pytest.mark.parametrize(
        "transform",
        [
            lambda f: jax.grad(f, (0, 1)),
            lambda f: jax.jit(jax.grad(f, (0, 1))),
            lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
            lambda f: lambda *a: jax.jvp(f, a, a),
            lambda f: lambda *a: jax.linearize(f, *a)[1](*a),
            lambda f: jax.jacfwd(jax.grad(f, 1), 0),
            jax.hessian,
            lambda f: jax.jit(jax.hessian(f, 1)),
            lambda f: lambda a, b: jax.vmap(jax.grad(f, 1), (None, 0))(a, jnp.stack([b, b])),
            lambda f: lambda a, b: jax.vmap(jax.grad(f), (0, None))(jnp.stack([a, 2 * a]), b),
            lambda f: lambda a, b: jax.grad(lambda b: jnp.sum(jax.grad(f, 1)(a, b) ** 2))(b),
        ],
    )
    def test_derivatives(self, transform):
        assert_alike(transform(smooth(batched))(LHS, RHS), transform(smooth(plain))(LHS, RHS))

    def test_products_of_second_derivatives_are_narrow(self):
        report = audit(jax.hessian(smooth(batched)), LHS, RHS, target=None)
        assert {row.operand_dtypes for row in report.products} == {("bfloat16", "bfloat16")}

    @pytest.mark.parametrize(("left", "right"), [(0, 0), (1, None), (None, 2), (3, 1)])
    def test_vmap_over_any_axis(self, left, right):
        stacks = [
            x if axis is None else jnp.stack([x, 2 * x], axis)
            for x, axis in ((LHS, left), (RHS, right))
        ]
        result = jax.vmap(batched, (left, right))(*stacks)
        for i in range(2):
            pair = [
                x if axis is None else jnp.take(x, i, axis)
                for x, axis in zip(stacks, (left, right), strict=True)
            ]
            assert jnp.array_equal(result[i], batched(*pair))

    def test_in_loops_and_branches(self):
        w = normal(2, 8, 8) / 3

        def fun(w, x, flag):
            x = lax.fori_loop(0, 2, lambda _, x: matmul(x, w), x)
            x, _ = lax.scan(lambda x, _: (jnp.tanh(matmul(x, w)), None), x, length=3)
            return jnp.sum(lax.cond(flag, lambda x: matmul(x, w), lambda x: x, x).astype(F32))

        gradient = jax.jit(jax.grad(fun))(w, normal(3, 4, 8, dtype=BF16), True)
        assert gradient.dtype == F32
        assert jnp.isfinite(gradient).all()

    def test_shard_map(self):
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
        x, w = normal(0, 8, 6), normal(1, 6, 4)
        specs = {"in_specs": (PartitionSpec("d"), PartitionSpec()), "out_specs": PartitionSpec()}

        def loss(w, x):
            local = lambda x, w: lax.psum(jnp.sum(jnp.sin(matmul(x, w).astype(F32))), "d")  # noqa: E731
            return jax.shard_map(local, mesh=mesh, **specs)(x, w)

        ours = jax.jit(jax.grad(loss))(w, x)
        alone = jax.grad(lambda w: jnp.sum(jnp.sin(matmul(x, w).astype(F32))))(w)
        np.testing.assert_allclose(ours, alone, atol=1e-5)

    def test_explicit_shardings(self):
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
        rows = NamedSharding(mesh, PartitionSpec("d", None))
        with jax.set_mesh(mesh):
            x = jax.device_put(normal(0, 8, 6), rows)
            w = jax.device_put(normal(1, 6, 4), NamedSharding(mesh, PartitionSpec()))
            result = jax.jit(matmul)(x, w)
            assert jax.typeof(result).sharding.spec == PartitionSpec("d", None)
            gradient = jax.jit(jax.grad(lambda x: jnp.sum(matmul(x, w).astype(F32))))(x)
            assert jax.typeof(gradient).sharding.spec == PartitionSpec("d", None)

    def test_one_trace(self):
        traces = []

        @jax.jit
        def fun(x, w):
            traces.append(1)
            return matmul(x, w)

        for seed in range(3):
            fun(normal(seed, 2, 3), normal(seed, 3, 2))
        assert len(traces) == 1


@st.composite
def contractions(draw):
    """Any layout of batch, contracted and free axes, empty ones too."""
    sizes = st.integers(0, 4)
    batch, summed, left, right = (draw(st.lists(sizes, max_size=2)) for _ in range(4))
    shapes, positions = [], []
    for free in (left, right):
        order = draw(st.permutations(range(len(batch) + len(summed) + len(free))))
        axes = [*batch, *summed, *free]
        shapes.append(tuple(axes[i] for i in order))
        place = {axis: i for i, axis in enumerate(order)}
        positions.append(
            (
                [place[i] for i in range(len(batch), len(batch) + len(summed))],
                [place[i] for i in range(len(batch))],
            )
        )
    (left_sum, left_batch), (right_sum, right_batch) = positions
    return (
        shapes,
        ((left_sum, right_sum), (left_batch, right_batch)),
        int(np.prod(summed, initial=1)),
    )


@pytest.mark.slow
@settings(max_examples=15)
@given(contractions(), st.sampled_from([BF16, F16]), st.sampled_from([BF16, F16, F32]))
def test_any_contraction(contraction, compute, dtype):
    (left, right), numbers, terms = contraction
    lhs, rhs = normal(0, *left, dtype=dtype), normal(1, *right)
    policy = jaxmp.Policy(F32, compute, F32)
    product = functools.partial(dot_general, dimension_numbers=numbers, policy=policy)
    wanted = functools.partial(lax.dot_general, dimension_numbers=numbers)
    result = product(lhs, rhs)
    assert result.dtype == compute
    assert_close(result, exact(wanted, lhs, rhs, compute), terms)
    cotangent = normal(2, *result.shape, dtype=compute)
    grads = jax.vjp(product, lhs, rhs)[1](cotangent)
    rounded = [x.astype(compute).astype(F32) for x in (lhs, rhs)]
    reference = jax.vjp(wanted, *rounded)
    for grad, other, operand in zip(
        grads, reference[1](cotangent.astype(F32)), (lhs, rhs), strict=True
    ):
        assert grad.dtype == operand.dtype
        assert_close(grad, np.asarray(other, np.float64), 4096)


@pytest.mark.parametrize(
    ("left", "right"),
    [((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 4)), ((5, 2, 3), (3, 4)), ((5, 2, 3), (5, 3, 4)),
     ((1, 5, 2, 3), (6, 1, 3, 4)), ((0, 3), (3, 2)), ((2, 0), (0, 3)), ((3,), (5, 3, 4))],
)  # fmt: skip
def test_matmul_shapes(left, right):
    lhs, rhs = normal(0, *left), normal(1, *right)
    result = matmul(lhs, rhs, output_dtype=F32)
    wanted = exact(jnp.matmul, lhs, rhs, BF16)
    assert result.shape == wanted.shape
    assert_close(result, wanted, left[-1])


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("bqhd,bkhd->bhqk", [(2, 5, 3, 4), (2, 6, 3, 4)]),
        ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
        ("ii->i", [(3, 3)]),
        ("ij->", [(3, 4)]),
        ("ij,kj->k", [(3, 4), (5, 4)]),
        ("i,j->ij", [(3,), (4,)]),
        ("...i,i->...", [(2, 3, 4), (4,)]),
    ],
)
def test_einsum(subscripts, shapes):
    operands = [normal(i, *shape) for i, shape in enumerate(shapes)]
    result = einsum(subscripts, *operands, output_dtype=F32)
    reference = jnp.einsum(subscripts, *operands)
    assert result.shape == reference.shape
    assert_alike(result, reference, 0.05)
    assert einsum(subscripts, *operands).dtype == BF16


def test_einsum_asks_its_product_for_the_narrow_result():
    """A float32 one, narrowed after, would be stored first."""
    x, w = normal(0, 2, 3), normal(1, 3, 4)
    report = audit(lambda x, w: einsum("ij,jk->ki", x, w), x, w, target=None)
    assert [row.result_dtype for row in report.products] == ["bfloat16"]
    assert not report.casts


CONVOLUTIONS = [
    {"window_strides": (1, 1), "padding": "SAME"},
    {"window_strides": (2, 1), "padding": "VALID", "rhs_dilation": (1, 2)},
    {"window_strides": (1, 1), "padding": [(1, 0), (0, 2)], "feature_group_count": 2},
    {"window_strides": (1, 2), "padding": [(1, 1), (0, 1)], "lhs_dilation": (2, 1)},
    {"window_strides": (1, 1), "padding": "VALID", "batch_group_count": 2},
]


@pytest.mark.parametrize("options", CONVOLUTIONS)
@pytest.mark.parametrize("compute", [BF16, F16])
def test_convolution_and_its_gradients(options, compute):
    groups = options.get("feature_group_count", 1)
    x, w = normal(0, 2, 4, 9, 9), normal(1, 6, 4 // groups, 3, 3)
    policy = jaxmp.Policy(F32, compute, F32)

    def ours(x, w):
        return conv_general_dilated(x, w, policy=policy, **options)

    def reference(x, w):
        return lax.conv_general_dilated(*(v.astype(compute).astype(F32) for v in (x, w)), **options)

    result, pullback = jax.vjp(ours, x, w)
    wanted, reference_pullback = jax.vjp(reference, x, w)
    assert result.dtype == compute
    assert_close(result, np.asarray(wanted, np.float64), 4096)
    cotangent = normal(2, *result.shape, dtype=compute)
    for grad, other in zip(
        pullback(cotangent), reference_pullback(cotangent.astype(F32)), strict=True
    ):
        assert grad.dtype == F32
        # The reference rounds its gradients to the compute dtype on the way through its casts.
        assert jnp.abs(grad - other).max() <= 2 * UNIT[compute] * jnp.abs(other).max()
    assert_alike(
        jax.vmap(ours)(x[None], w[None])[0].astype(F32), result.astype(F32), tolerance=UNIT[compute]
    )


@pytest.mark.parametrize(
    "layout", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NCHW", "HWIO", "NHWC")]
)
def test_pointwise_convolution_is_a_matmul(layout):
    sizes = {"N": 2, "C": 40, "H": 7, "W": 8}
    kernel = {"H": 1, "W": 1, "I": 40, "O": 56}
    x = normal(0, *(sizes[letter] for letter in layout[0]))
    w = normal(1, *(kernel[letter] for letter in layout[1]))
    fun = functools.partial(
        conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=layout
    )
    gradient = jax.grad(lambda w, x: jnp.sum(fun(x, w, output_dtype=F32) ** 2))
    for lowered in (jax.jit(fun).lower(x, w), jax.jit(gradient).lower(w, x)):
        assert "convolution" not in lowered.as_text()
        assert "dot_general" in lowered.as_text()
    reference = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=layout
    )
    assert_alike(fun(x, w, output_dtype=F32), reference(x, w), 0.05)


def compiled(fun, *args, target):
    try:
        return audit(fun, *args, target=target, float32=False)
    except TargetUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.audit
@pytest.mark.parametrize("target", ["cuda:h100", "tpu:v5e"])
def test_compiled_products_are_narrow_with_float32_weight_gradients(target):
    def loss(params, x):
        for w in params:
            x = jnp.tanh(matmul(x, w))
        return jnp.mean(x.astype(F32) ** 2)

    args = [normal(i, 256, 256) for i in range(3)], normal(9, 512, 256, dtype=BF16)
    report = compiled(jax.value_and_grad(loss), *args, target=target)
    report.assert_low_precision(1.0)
    report.assert_no_traps()
    assert len(report.compiled.products) == 8
    if target.startswith("cuda"):
        results = [row.result_dtype for row in report.compiled.products]
        assert results.count("float32") == 3


@pytest.mark.audit
@pytest.mark.parametrize("target", ["cuda:h100", "tpu:v5e"])
def test_compiled_convolutions_are_narrow(target):
    def loss(w, x):
        y = conv_general_dilated(x, w, (1, 1), "SAME")
        return jnp.mean(conv_general_dilated(y, w, (1, 1), "SAME").astype(F32) ** 2)

    args = normal(0, 64, 64, 3, 3), normal(1, 4, 64, 16, 16, dtype=BF16)
    report = compiled(jax.value_and_grad(loss), *args, target=target)
    assert "compiled-wider" not in {trap.kind for trap in report.traps}
    report.assert_low_precision(1.0)


SIZES = jnp.array([3, 0, 5])


@pytest.mark.parametrize("compute", [BF16, F16])
def test_ragged_dot_and_its_gradients(compute):
    policy = jaxmp.Policy(F32, compute, F32)
    lhs, rhs = normal(0, 8, 6, dtype=BF16), normal(1, 3, 6, 4)
    result, pullback = jax.vjp(lambda l, r: ragged_dot(l, r, SIZES, policy=policy), lhs, rhs)  # noqa: E741
    rounded = [x.astype(compute).astype(F32) for x in (lhs, rhs)]
    wanted, reference = jax.vjp(lambda l, r: lax.ragged_dot(l, r, SIZES), *rounded)  # noqa: E741
    assert result.dtype == compute
    assert_close(result, np.asarray(wanted, np.float64), 8)
    cotangent = normal(2, *result.shape, dtype=compute)
    for grad, other, operand in zip(
        pullback(cotangent), reference(cotangent.astype(F32)), (lhs, rhs), strict=True
    ):
        assert grad.dtype == operand.dtype
        assert_close(grad, np.asarray(other, np.float64), 8)


def test_ragged_dot_is_narrow_in_all_three_products():
    def loss(rhs, lhs):
        return jnp.sum(ragged_dot(lhs, rhs, SIZES).astype(F32) ** 2)

    args = normal(1, 3, 6, 4), normal(0, 8, 6, dtype=BF16)
    report = audit(jax.value_and_grad(loss, (0, 1)), *args, target=None)
    assert [row.primitive for row in report.products] == ["ragged_dot_general"] * 3
    assert {row.operand_dtypes for row in report.products} == {("bfloat16", "bfloat16")}
    assert report.flops() == 3 * 2 * 8 * 6 * 4
    _, tangent = jax.jvp(functools.partial(loss, lhs=args[1]), args[:1], args[:1])
    assert_alike(tangent, jax.grad(loss)(*args).ravel() @ args[0].ravel(), 0.05)


def test_checkpoint_policies_know_the_products():
    def passes(policy):
        layer = jax.checkpoint(
            lambda w, x: jnp.tanh(matmul(jnp.tanh(matmul(x, w)), w)), policy=policy
        )
        fun = jax.value_and_grad(lambda w, x: jnp.sum(layer(w, x).astype(F32)))
        report = audit(fun, normal(0, 8, 8), normal(1, 4, 8), target=None)
        return [row.pass_name for row in report.products]

    saveable = jax.checkpoint_policies.dots_saveable
    assert passes(saveable).count("recompute") == 2
    assert passes(remat_policy(saveable)).count("recompute") == 0
    assert passes(remat_policy(jax.checkpoint_policies.nothing_saveable)).count("recompute") == 2
