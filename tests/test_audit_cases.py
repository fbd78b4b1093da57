"""Programs that were once counted, placed or judged wrongly, or could not be audited at all."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import sparse
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmp
from jaxmp.audit import audit

BF16, F32 = jnp.bfloat16, jnp.float32
program = functools.partial(audit, target=None)


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def spec(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def kinds(fun, *args, **options):
    return {trap.kind for trap in program(fun, *args, **options).traps}


def local_mesh():
    return jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))


W, H = spec(8, 8), spec(16, 8, dtype=BF16)
POLICY = "mixed_bfloat16"


class TestPrograms:
    def test_linear_solve_is_entered_and_widened(self):
        def solve(matrix, b, h):
            x, _ = jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, b, maxiter=5)
            return x, h @ h.T

        args = W, spec(8), H
        assert len(program(solve, *args).products) > 1
        report = audit(solve, *args, target="cpu", float32=True)
        assert report.compiled_float32 is not None

    def test_sparse_product_is_opaque(self):
        matrix = sparse.BCOO.fromdense(jnp.eye(8))
        report = program(lambda x: matrix @ x, W)
        assert [row.primitive for row in report.opaque] == ["bcoo_dot_general"]

    @pytest.mark.parametrize("form", ["shard_map", "constraint", "out_shardings"])
    def test_mesh_that_only_the_program_names(self, form):
        mesh = local_mesh()
        rows = NamedSharding(mesh, PartitionSpec("d"))
        specs = {"in_specs": PartitionSpec("d"), "out_specs": PartitionSpec()}
        fun = {
            "shard_map": jax.shard_map(lambda x: lax.pmean(x, "d"), mesh=mesh, **specs),
            "constraint": lambda x: lax.with_sharding_constraint(x * 2, rows),
            "out_shardings": jax.jit(lambda x: x * 2, out_shardings=rows),
        }[form]
        assert audit(fun, spec(16, 8), target="cpu").compiled.devices == 4

    def test_static_numbers_beside_traced_ones(self):
        step = jax.jit(lambda w, n, rate: w @ w * rate * n, static_argnums=1)
        assert len(program(step, W, 3, 0.1).products) == 1
        step = jax.jit(lambda w, training, rate: w @ w * rate, static_argnames="training")
        assert len(program(step, W, True, 0.1).products) == 1

    def test_long_convolution_is_counted_without_its_matrix(self):
        n = 20_000
        assert program(jnp.convolve, spec(n), spec(n)).flops() == 2 * n * n

    def test_donation_of_an_inlined_function(self):
        step = jax.jit(lambda w, x: w + x, donate_argnums=0, inline=True)
        assert audit(step, W, W, target="cpu").compiled.memory.aliased == 256
        step = jax.jit(lambda w, x: (w + x).sum(), donate_argnums=0, inline=True)
        assert kinds(step, W, W) == {"unused-donation"}

    def test_double_precision_with_and_without_the_option(self):
        def fun(h, n):
            body = lambda c: (c[0] + 1, (c[1] @ c[1]) * 2.0)  # noqa: E731
            return lax.while_loop(lambda c: c[0] < n, body, (jnp.zeros_like(n), h))

        h = spec(8, 8, dtype=BF16)
        with jax.enable_x64(True):
            report = audit(fun, h, spec(dtype=jnp.int64), target="cpu", float32=True)
        assert report.compiled_float32 is not None
        assert not kinds(
            lambda s: {"n": s["n"] + 1, "m": s["m"]}, {"n": spec(4, dtype=np.int64), "m": W}
        )

    def test_references_are_audited_but_not_widened(self):
        def fun(x, w):
            total = jax.new_ref(jnp.zeros((16, 8), BF16))

            def body(carry, _):
                total[...] = total[...] + x @ w
                return carry, None

            lax.scan(body, 0, length=3)
            return total[...]

        report = audit(fun, H, spec(8, 8, dtype=BF16), target="cpu", float32=True)
        assert [row.times for row in report.products] == [3]
        assert report.compiled_float32 is None

    def test_batch_of_one(self):
        def loss(params, x):
            return jnp.sum((jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]) ** 2)

        params = {"w": W, "b": spec(8), "v": spec(8, 4)}
        rows = program(jax.value_and_grad(loss), params, spec(1, 8)).products
        assert sorted(row.pass_name for row in rows) == [
            "dgrad",
            "fprop",
            "fprop",
            "wgrad",
            "wgrad",
        ]


class TestPlaces:
    def test_remat_does_not_double_the_path(self):
        def layer(x, w):
            with jax.named_scope("block"):
                return jnp.tanh(x @ w)

        def loss(w, x):
            with jax.named_scope("Net"):
                return jnp.sum(jax.checkpoint(layer)(jnp.sin(x), w))

        rows = program(jax.value_and_grad(loss), W, W).products
        assert {row.path for row in rows} == {"Net/block"}

    def test_lines_below_a_wrapper_of_a_library(self):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return jnp.tanh(nn.Dense(8)(x)), None

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                blocks = nn.scan(
                    nn.remat(Block),
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    length=3,
                )
                return blocks(name="blocks")(x, None)[0]

        params = jax.eval_shape(Net().init, jax.random.key(0), W)
        rows = program(
            jax.value_and_grad(lambda p, x: jnp.sum(Net().apply(p, x))), params, W
        ).products
        assert {row.where.split("(")[1].split(".")[-2] for row in rows} == {"Block"}

    def test_lines_of_a_step_that_jaxmp_made(self):
        def loss(params, x):
            return jnp.sum((x @ params["w"]).astype(F32) ** 2)

        tx = jaxmp.mixed_precision(optax.sgd(0.1), POLICY)
        step = jaxmp.make_train_step(loss, tx, POLICY, microbatches=2)
        state = jaxmp.TrainState.create({"w": jnp.ones((8, 8))}, tx)
        report = program(step, state, spec(16, 8))
        assert all("loss" in row.where for row in report.products)
        assert all(trap.where for trap in report.traps)

    def test_line_of_an_einsum(self):
        def fun(x, w):
            return jnp.einsum("ij,jk->ik", x, w)

        (row,) = program(fun, W, W).products
        assert row.where.startswith("test_audit_cases.py:")


class TestFalseAlarms:
    def test_norms_of_flax(self):
        norm = nn.RMSNorm(dtype=BF16)
        params = jax.eval_shape(norm.init, jax.random.key(0), H)
        assert not kinds(norm.apply, params, H, policy=POLICY) & {"promotion", "half-norm"}

    def test_half_updates_of_float32_states(self):
        def step(params, x):
            half = jax.tree.map(lambda p: p.astype(BF16), params)
            grads = jax.grad(lambda p: jnp.sum((x @ p["w"]).astype(F32) ** 2))(half)
            return optax.apply_updates(params, grads), jnp.float32(0)

        def average(ema, params):
            return {"w": ema["w"] + 0.01 * (params["w"] - ema["w"])}

        assert "promotion" not in kinds(step, {"w": W}, H)
        half = {"w": spec(8, 8, dtype=BF16)}
        assert "promotion" not in kinds(average, {"w": W}, half, policy=POLICY)

    def test_products_that_must_be_wide(self):
        def fun(w, t, frequency):
            angles = jnp.einsum("i,j->ij", t, frequency)
            return jnp.sin(angles), jnp.vdot(w, w)

        assert not kinds(fun, W, spec(64), spec(32), policy=POLICY)

    def test_products_of_an_optimizer(self):
        def step(params, x):
            half = lambda p: (x @ p["w"].astype(BF16)).astype(F32)  # noqa: E731
            grads = jax.grad(lambda p: jnp.sum(half(p) ** 2))(params)
            orthogonal = grads["w"] @ grads["w"].T @ grads["w"]
            return {"w": params["w"] - orthogonal}, jnp.float32(0)

        assert "wide-product" not in kinds(step, {"w": W}, H)

    def test_policy_is_not_read_off_integers_or_moments(self):
        def quantized(x, w, q):
            return x @ w, lax.dot(q, q, preferred_element_type=jnp.int32)

        assert program(quantized, W, W, spec(8, 8, dtype=jnp.int8)).policy == "float32"
        tx = optax.adamw(1e-3, mu_dtype=BF16)

        def step(params, state, x):
            grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        report = program(step, {"w": W}, jax.eval_shape(tx.init, {"w": W}), W)
        assert report.policy == "float32"
        assert not report.traps

    def test_simulated_float8(self):
        def fun(x, w):
            quantized = (x / 2).astype(jnp.float8_e4m3fn).astype(BF16) * 2
            return quantized @ w

        assert not kinds(fun, H, spec(8, 8, dtype=BF16))

    def test_square_root_of_a_product(self):
        assert not kinds(lambda h, w: jnp.sqrt(jnp.abs(h @ w)), H, spec(8, 8, dtype=BF16))

        def rms(h):
            mean = jax.vmap(lambda row: jnp.vdot(row, row))(h) / 8
            return h * lax.rsqrt(mean)[:, None]

        assert "half-norm" in kinds(rms, H)

    def test_scalar_parameter_is_no_loss(self):
        def step(params, x):
            return {"scale": params["scale"] * jnp.bfloat16(0.5), "w": params["w"] * x}

        params = {"scale": spec(dtype=BF16), "w": spec(8, 8, dtype=BF16)}
        assert "half-loss" not in kinds(step, params, spec(8, 8, dtype=BF16))


def test_gradients_that_the_program_only_sums():
    policy = jaxmp.get_policy(POLICY)
    assert kinds(lambda h: jnp.sum(h.astype(F32)), H, policy=policy) == set()
