"""The program report: rows, passes, FLOPs."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import jaxmp
from jaxmp.audit import audit

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def spec(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def passes(report):
    return [row.pass_name for row in report.products]


program = functools.partial(audit, target=None)


class TestFlops:
    def test_mlp_step_is_three_times_its_forward(self):
        b, d, h, o = 32, 48, 80, 16

        def loss(params, x):
            return jnp.sum(jnp.tanh(x @ params[0]) @ params[1])

        report = program(jax.value_and_grad(loss), (spec(d, h), spec(h, o)), spec(b, d))
        forward = 2 * b * d * h + 2 * b * h * o
        assert report.flops(pass_name="fprop") == forward
        assert report.flops(pass_name="wgrad") == forward
        # No gradient of the input is asked for.
        assert report.flops(pass_name="dgrad") == 2 * b * h * o

    def test_attention(self):
        b, t, n, d = 2, 24, 4, 16

        def attend(q, k, v):
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
            return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

        report = program(attend, *[spec(b, t, n, d)] * 3)
        assert report.flops() == 2 * 2 * b * n * t * t * d
        assert len(report.products) == 2

    def test_scanned_stack_counts_every_turn(self):
        layers, b, d = 6, 8, 32

        def loss(weights, x):
            y, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
            return jnp.sum(y)

        report = program(jax.value_and_grad(loss), spec(layers, d, d), spec(b, d))
        assert {row.times for row in report.products} == {layers}
        assert sorted(passes(report)) == ["dgrad", "fprop", "wgrad"]
        assert report.flops() == 3 * layers * 2 * b * d * d

    def test_loops_multiply(self):
        def inner(x, w):
            return lax.fori_loop(0, 3, lambda _, x: x @ w, x)

        def outer(x, w):
            return lax.scan(lambda x, _: (inner(x, w), None), x, length=5)[0]

        report = program(outer, spec(4, 4), spec(4, 4))
        assert [row.times for row in report.products] == [15]

    @pytest.mark.parametrize(
        ("padding", "strides", "groups", "dilation"),
        [("VALID", (1, 1), 1, (1, 1)), ("VALID", (2, 1), 2, (1, 2)), ("SAME", (1, 1), 1, (1, 1))],
    )
    def test_convolution(self, padding, strides, groups, dilation):
        n, size, cin, cout, k = 2, 12, 8, 16, 3
        conv = functools.partial(
            lax.conv_general_dilated,
            window_strides=strides,
            padding=padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
            rhs_dilation=dilation,
        )
        x, w = spec(n, size, size, cin), spec(k, k, cin // groups, cout)
        report = program(conv, x, w)
        out = report.products[0].result_shape
        if padding == "VALID":
            assert report.flops() == 2 * math.prod(out) * k * k * cin // groups
        else:
            # Of each of three taps along an axis of 12, one falls outside at one end or none.
            assert report.flops() == 2 * n * cin * cout * (3 * 12 - 2) ** 2
        xla = jax.jit(conv).lower(x, w).cost_analysis()
        assert report.flops() == pytest.approx(xla["flops"], rel=0.01)

    @pytest.mark.parametrize("differentiate", [False, True])
    def test_agrees_with_xla_where_it_counts_products_only(self, differentiate):
        def fun(params, x):
            return jnp.vdot((x @ params[0]) @ params[1], x)

        def products(params, x):
            return (x @ params[0]) @ params[1]

        args = ((spec(256, 512), spec(512, 256)), spec(128, 256))
        fun = jax.grad(fun) if differentiate else products
        xla = jax.jit(fun).lower(*args).cost_analysis()["flops"]
        assert program(fun, *args).flops() == pytest.approx(xla, rel=0.01)

    def test_convolution_gradients_agree_with_xla(self):
        def loss(w, x):
            y = lax.conv_general_dilated(
                x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return jnp.sum(y * y)

        args = (spec(3, 3, 64, 128), spec(4, 33, 33, 64))
        gradient = jax.grad(loss, argnums=(0, 1))
        xla = jax.jit(gradient).lower(*args).cost_analysis()["flops"]
        report = program(gradient, *args)
        assert report.flops() == pytest.approx(xla, rel=0.01)
        assert [row.primitive for row in report.products] == ["conv_general_dilated"] * 3

    def test_ragged_dot(self):
        m, k, n, g = 32, 16, 8, 4
        report = program(lax.ragged_dot, spec(m, k), spec(g, k, n), spec(g, dtype=jnp.int32))
        assert report.flops() == 2 * m * k * n

    def test_zero_size(self):
        report = program(jnp.matmul, spec(0, 4), spec(4, 5))
        assert report.flops() == 0
        assert report.low_precision_fraction() == 1.0


class TestPasses:
    def test_reference(self):
        def loss(params, x):
            hidden = jax.nn.gelu(x @ params["up"] + params["bias"])
            return jnp.mean((hidden @ params["down"]) ** 2)

        def step(params, opt_state, x):
            value, grads = jax.value_and_grad(loss)(params, x)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        params = {"up": spec(8, 32), "bias": spec(32), "down": spec(32, 8)}
        with jax.numpy_dtype_promotion("standard"):
            report = program(step, params, jax.eval_shape(tx.init, params), spec(4, 8))
        assert sorted(passes(report)) == ["dgrad", "fprop", "fprop", "wgrad", "wgrad"]
        (dgrad,) = [row for row in report.products if row.pass_name == "dgrad"]
        assert dgrad.result_shape == (4, 32)

    def test_products_of_activations_are_dgrads(self):
        def loss(w, x):
            q = x @ w
            return jnp.sum(jax.nn.softmax(q @ q.T) @ q)

        report = program(jax.grad(loss), spec(8, 8), spec(16, 8))
        assert passes(report).count("wgrad") == 1
        assert passes(report).count("dgrad") == 4

    def test_recomputation(self):
        @jax.checkpoint
        def layer(x, w):
            return jnp.tanh(jnp.tanh(x @ w) @ w)

        def loss(w, x):
            y, _ = lax.scan(lambda x, _: (layer(x, w), None), x, length=3)
            return jnp.sum(y)

        report = program(jax.grad(loss), spec(8, 8), spec(4, 8))
        counts = {name: passes(report).count(name) for name in set(passes(report))}
        assert counts == {"fprop": 2, "recompute": 2, "dgrad": 2, "wgrad": 2}

    def test_custom_vjp(self):
        @jax.custom_vjp
        def matmul(x, w):
            return x @ w

        matmul.defvjp(lambda x, w: (matmul(x, w), (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))

        def loss(w, x):
            return jnp.sum(matmul(matmul(x, w), w))

        report = program(jax.value_and_grad(loss), spec(8, 8), spec(4, 8))
        # The gradient of x is not used, so its product is not run.
        assert sorted(passes(report)) == ["dgrad", "fprop", "fprop", "wgrad", "wgrad"]

    def test_microbatches_and_loss_scale(self):
        def loss(params, batch):
            return jnp.mean((batch @ params["w"]).astype(F32) ** 2)

        policy = jaxmp.get_policy("mixed_float16")
        tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
        step = jaxmp.make_train_step(loss, tx, policy, microbatches=2)
        with jax.numpy_dtype_promotion("standard"):
            state = jax.eval_shape(lambda: jaxmp.TrainState.create({"w": jnp.ones((8, 4))}, tx))
            report = program(step, state, spec(6, 8))
        assert sorted(passes(report)) == ["fprop", "wgrad"]
        assert [row.times for row in report.products] == [2, 2]
        assert report.low_precision_fraction() == 1.0
        assert not [trap for trap in report.traps if trap.kind == "unscaled-float16"]

    def test_branches_by_platform_are_not_mixed(self):
        def fun(x):
            return lax.platform_dependent(x, cpu=lambda x: x @ x, default=lambda x: x @ x @ x)

        assert len(program(fun, spec(4, 4)).products) == 1

    def test_every_branch_of_a_choice_is_there(self):
        def fun(flag, x):
            return lax.cond(flag, lambda x: x @ x, lambda x: x @ x @ x, x)

        assert len(program(fun, spec(dtype=jnp.bool_), spec(4, 4)).products) == 3


class TestRows:
    def test_dtypes_and_shapes(self):
        def fun(x, w):
            return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=F32)

        (row,) = program(fun, spec(4, 8, dtype=BF16), spec(8, 2, dtype=BF16)).products
        assert row.operand_dtypes == ("bfloat16", "bfloat16")
        assert (row.accumulation_dtype, row.result_dtype) == ("float32", "float32")
        assert (row.operand_shapes, row.result_shape) == (((4, 8), (8, 2)), (4, 2))
        assert row.bytes == 2 * (32 + 16) + 4 * 8

    def test_dot_algorithm_says_what_is_multiplied(self):
        def fun(x, w, preset):
            return lax.dot(x, w, precision=preset, preferred_element_type=F32)

        def dtypes(preset):
            (row,) = program(lambda x, w: fun(x, w, preset), spec(4, 8), spec(8, 2)).products
            return row.operand_dtypes, row.accumulation_dtype

        presets = lax.DotAlgorithmPreset
        assert dtypes(presets.BF16_BF16_F32) == (("bfloat16", "bfloat16"), "float32")
        assert dtypes(presets.F16_F16_F32) == (("float16", "float16"), "float32")
        # Three passes keep what one would lose.
        assert dtypes(presets.BF16_BF16_F32_X3) == (("float32", "float32"), "float32")
        assert dtypes(None) == (("float32", "float32"), "float32")

    def test_linen_module_paths(self):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(4, name="head")(nn.Dense(8, name="body")(x))

        net = Net()
        params = jax.eval_shape(net.init, jax.random.key(0), spec(2, 4))

        def loss(params, x):
            return jnp.sum(net.apply(params, x))

        report = program(jax.value_and_grad(loss), params, spec(2, 4))
        assert {row.path for row in report.products} == {"Net/body", "Net/head"}
        assert len(report.products) == 5

    def test_nnx_lines(self):
        model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        graphdef, params = nnx.split(model)

        def forward(params, x):
            return nnx.merge(graphdef, params)(x)

        (row,) = program(forward, params, spec(3, 4)).products
        assert row.where.startswith("test_audit_program.py:")
        assert row.where.endswith("(TestRows.test_nnx_lines.<locals>.forward)")

    def test_casts(self):
        def fun(x):
            return x.astype(BF16) * jnp.bfloat16(2), x.astype(jnp.int32)

        (row,) = program(fun, spec(8, 4)).casts
        assert (row.from_dtype, row.to_dtype, row.bytes) == ("float32", "bfloat16", 32 * 6)

    def test_half_reductions(self):
        def fun(x, table, index):
            return (
                lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None),
                lax.cumsum(x, axis=1),
                table.at[index].add(x),
                jnp.sum(x),
            )

        args = (spec(6, 4, dtype=BF16), spec(10, 4, dtype=BF16), spec(6, dtype=jnp.int32))
        rows = program(fun, *args).reductions
        assert [(row.primitive, row.terms) for row in rows] == [
            ("reduce_sum", 6),
            ("cumsum", 4),
            ("scatter-add", 6),
        ]

    def test_collectives_and_devices_of_shard_map(self):
        mesh = AbstractMesh((4,), ("d",))

        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(PartitionSpec("d"), PartitionSpec()),
            out_specs=PartitionSpec(),
        )
        def fun(x, w):
            return lax.psum(x.T @ (x @ w), "d")

        x = jax.ShapeDtypeStruct((8, 4), F32, sharding=NamedSharding(mesh, PartitionSpec("d")))
        w = jax.ShapeDtypeStruct((4, 4), F32, sharding=NamedSharding(mesh, PartitionSpec()))
        report = program(fun, x, w)
        (row,) = report.collectives
        assert row.primitive.startswith("psum")
        assert (row.dtype, row.bytes, row.times) == ("float32", 64, 1)
        assert report.flops() == 2 * 2 * 8 * 4 * 4

    def test_pallas_is_named_and_not_looked_into(self):
        def double(x_ref, o_ref):
            o_ref[...] = x_ref[...] @ x_ref[...]

        def fun(x):
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return pl.pallas_call(double, out_shape=shape, interpret=True)(x)

        report = program(fun, spec(8, 8))
        assert not report.products
        (row,) = report.opaque
        assert row.primitive == "pallas_call"
        assert "double" in row.name
        assert "double" in str(report)

    def test_enters_everything(self):
        @jax.custom_jvp
        def custom(x, w):
            return x @ w

        custom.defjvp(lambda p, t: (custom(*p), custom(t[0], p[1])))

        def fun(x, w, n):
            x = jax.jit(lambda x: x @ w)(x)
            x = jax.checkpoint(lambda x: x @ w)(x)
            x = custom(x, w)
            x = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1]
            x = lax.switch(n, [lambda x: x @ w, lambda x: x], x)
            return jax.vmap(lambda row: row @ w)(x)

        report = program(fun, spec(4, 4), spec(4, 4), spec(dtype=jnp.int32))
        assert len(report.products) == 6


class TestArguments:
    def test_static_and_donated_arguments_of_a_jitted_function(self):
        @functools.partial(jax.jit, donate_argnums=0, static_argnums=1, static_argnames="mode")
        def step(state, repeats, batch, mode="sum"):
            for _ in range(repeats):
                state = {"w": state["w"] + batch.T @ batch}
            return state if mode == "sum" else {}

        report = program(step, {"w": spec(4, 4)}, 3, spec(8, 4), mode="sum")
        assert len(report.products) == 3
        assert not report.traps

    def test_one_trace(self):
        traces = []

        @jax.jit
        def fun(x):
            traces.append(1)
            return x @ x

        program(fun, spec(4, 4))
        assert len(traces) == 1

    def test_arrays_numbers_keys_and_structs(self):
        def fun(tree, key, number, x):
            return x @ tree["w"] * number + jax.random.normal(key, (4, 4))

        tree = {"w": np.ones((4, 4), np.float32), "none": None}
        with jax.numpy_dtype_promotion("standard"):
            key = jax.random.key(0)
            assert len(program(fun, tree, key, 2.0, spec(4, 4)).products) == 1
            abstract = jax.eval_shape(lambda: key)
            assert len(program(fun, tree, abstract, 2.0, spec(4, 4)).products) == 1

    def test_argument_that_is_no_array(self):
        with pytest.raises(TypeError, match="Argument 'mode' is 'relu' of type str"):
            program(lambda x, mode: x, spec(2), "relu")
        with pytest.raises(TypeError, match=r"Argument 'tree/f' is <.*lambda"):
            program(lambda tree: tree, {"f": lambda: 0})

    def test_error_of_the_function_is_its_own(self):
        def fun(x):
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine"):
            program(fun, spec(2))
        with pytest.raises(TypeError, match="dot_general"):
            program(jnp.matmul, spec(2, 3), spec(4, 5))

    def test_two_meshes(self):
        devices = np.array(jax.devices()[:4])
        shardings = [
            NamedSharding(Mesh(devices.reshape(shape), ("a", "b")), PartitionSpec("a"))
            for shape in [(4, 1), (2, 2)]
        ]
        args = [jax.ShapeDtypeStruct((4, 4), F32, sharding=s) for s in shardings]
        with pytest.raises(ValueError, match="several"):
            program(lambda x, y: (x, y), *args)

    def test_nothing_is_executed(self):
        def fun(x):
            jax.debug.callback(lambda: pytest.fail("executed"))
            return x @ x

        program(fun, jnp.ones((2, 2)))

    def test_double_precision(self):
        with jax.enable_x64(True):
            report = program(lambda x: x @ x, spec(4, 4, dtype=jnp.float64))
        assert report.products[0].operand_dtypes == ("float64", "float64")
        assert not report.traps


def test_nnx_jit():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    report = program(step, model, optimizer, jnp.ones((3, 4)))
    assert sorted(passes(report)) == ["fprop", "wgrad"]
    assert len({row.parameter for row in report.products}) == 1
    assert not report.traps
