"""jaxmp.nnx: the same model, in the dtypes of a policy, and its gradients."""

import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
import jaxmp.nnx
from jaxmp.nnx import unwrap, value_and_grad, wrap

F32 = np.dtype("float32")


class Block(nnx.Module):
    def __init__(self, width, *, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(nnx.gelu(self.up(self.norm(x)))))


class Net(nnx.Module):
    """With a list of blocks, batch statistics, RNG state and a shared module."""

    def __init__(self, *, rngs):
        self.stem = nnx.Linear(5, 8, rngs=rngs)
        self.blocks = nnx.List([Block(8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.tied = self.blocks[0].norm
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def features(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.tied(self.norm(x))

    def __call__(self, x):
        return self.head(self.features(x))


class Stacked(nnx.Module):
    """With layers in a scan, mapped when they are made, and rematerialized."""

    def __init__(self, *, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(5, rngs=rngs)

        self.blocks = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def body(x, block):
            return nnx.remat(lambda block, x: block(x))(block, x)

        return body(x, self.blocks)


X = jax.random.normal(jax.random.key(1), (4, 5))
Y = jnp.arange(4) % 3


def net():
    return Net(rngs=nnx.Rngs(0))


def numbers(tree):
    """The arrays of a state, keys as numbers."""

    def leaf_fn(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return jax.tree.map(leaf_fn, nnx.to_pure_dict(nnx.state(tree)))


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(a, b, tolerance=2.0**-5):
    np.testing.assert_allclose(np.asarray(a, F32), np.asarray(b, F32), rtol=0, atol=tolerance)


def products(model, *args):
    return {row.path: row.products for row in model.policy_table(*args).rows if row.products}


def loss_fn(model, x, y):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(x), y))


class TestWrap:
    def test_keeps_the_state_and_what_is_shared(self):
        plain, model = net(), wrap(net(), "mixed_bfloat16")
        assert_same(numbers(plain), numbers(model))
        assert isinstance(model, Net)
        assert model.tied is model.blocks[0].norm
        assert type(unwrap(model)) is Net

    def test_copies(self):
        plain = net()
        before = numbers(plain)
        model = wrap(plain, "mixed_bfloat16")
        model(X)
        assert_same(numbers(plain), before)

    def test_values_statistics_and_rng_state_are_those_of_float32(self):
        plain, model = net(), wrap(net(), "mixed_bfloat16")
        for _ in range(2):
            close(model(X), plain(X), 2.0**-4)
        got, want = numbers(model), numbers(plain)
        close(got["norm"]["mean"], want["norm"]["mean"], 2.0**-7)
        assert_same(got["blocks"][1]["drop"], want["blocks"][1]["drop"])
        assert got["norm"]["mean"].dtype == F32

    def test_stores_parameters_and_leaves_other_variables(self):
        model = wrap(net(), "bfloat16")
        assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {"bfloat16"}
        stats = nnx.state(model, nnx.BatchStat)
        assert {x.dtype.name for x in jax.tree.leaves(stats)} == {"float32"}
        assert model(X).dtype == jnp.bfloat16

    def test_born_in_param_dtype(self):
        shapes = nnx.eval_shape(lambda: wrap(net(), "bfloat16"))
        assert {x.dtype.name for x in jax.tree.leaves(nnx.state(shapes, nnx.Param))} == {"bfloat16"}

        @nnx.jit
        def make():
            return wrap(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), "bfloat16")

        assert make().kernel.dtype == jnp.bfloat16

    def test_sharded_init(self):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

        @nnx.jit
        def make():
            model = wrap(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "bfloat16")
            state = nnx.state(model, nnx.Param)
            place = jax.NamedSharding(mesh, jax.P("data"))
            nnx.update(model, jax.lax.with_sharding_constraint(state, place))
            return model

        with jax.set_mesh(mesh):
            model = make()
        assert model.kernel.dtype == jnp.bfloat16
        assert model.kernel.sharding.spec == jax.P("data")
        assert model(jnp.ones((2, 8))).dtype == jnp.bfloat16

    def test_split_and_merge(self):
        model = wrap(net(), "mixed_bfloat16")
        model.eval()
        graphdef, state = nnx.split(model)

        @jax.jit
        def apply(state, x):
            return nnx.merge(graphdef, state)(x)

        close(apply(state, X), model(X), 2.0**-6)

    def test_inside_nnx_jit_state_is_updated(self):
        model, same = wrap(net(), "mixed_bfloat16"), wrap(net(), "mixed_bfloat16")
        got = nnx.jit(lambda model, x: model(x))(model, X)
        close(got, same(X), 2.0**-6)
        got, want = numbers(model), numbers(same)
        assert int(got["blocks"][0]["drop"]["rngs"]["count"]) == 1
        close(got["norm"]["mean"], want["norm"]["mean"], 2.0**-8)

    def test_scan_vmap_and_remat_inside(self):
        plain = Stacked(rngs=nnx.Rngs(0))
        model = wrap(Stacked(rngs=nnx.Rngs(0)), "mixed_bfloat16", rules={"up": "float32"})
        for each in (plain, model):
            each.eval()
        close(model(X), plain(X))
        assert products(model, X) == {"blocks/up": ("1 float32",), "blocks/down": ("1 bfloat16",)}

        def loss(model):
            return jnp.mean(model(X) ** 2)

        _, got = value_and_grad(loss, "mixed_bfloat16")(model)
        jax.tree.map(close, got, nnx.grad(loss)(plain))

    def test_vmap_over_a_call(self):
        model = wrap(nnx.Linear(5, 3, rngs=nnx.Rngs(0)), "mixed_bfloat16")
        got = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))(model, X)
        close(got, model(X), 2.0**-8)

    def test_modules_among_the_arguments_are_updated(self):
        class Draws(nnx.Module):
            def __call__(self, x, rngs):
                return x + rngs.noise.normal(x.shape)

        model, rngs = wrap(Draws(), "mixed_bfloat16"), nnx.Rngs(noise=0)
        first, second = model(X, rngs), model(X, rngs)
        assert int(rngs.noise.count[...]) == 2
        assert not np.array_equal(first, second)

    def test_other_methods(self):
        model = wrap(net(), "mixed_bfloat16", methods=["__call__", "features"])
        model.eval()
        assert model.features(X).dtype == F32
        text = str(jax.make_jaxpr(model.features)(X))
        assert "bf16" in text
        model = wrap(net(), "mixed_bfloat16")
        model.eval()
        assert "bf16" not in str(jax.make_jaxpr(model.features)(X))

    def test_is_compiled_once_outside_of_jit(self):
        traces = []

        class Counted(nnx.Module):
            def __init__(self, rngs):
                self.linear = nnx.Linear(5, 3, rngs=rngs)

            def __call__(self, x):
                traces.append(1)
                return self.linear(x)

        model = wrap(Counted(nnx.Rngs(0)), "mixed_bfloat16")
        for _ in range(3):
            model(X)
        assert len(traces) == 1

    def test_a_checkpoint_fits_both(self, tmp_path):
        import orbax.checkpoint as ocp  # noqa: PLC0415

        plain, model = net(), wrap(net(), "mixed_bfloat16")
        plain.head.kernel[...] = jnp.ones((8, 3))
        pure = nnx.to_pure_dict(nnx.state(plain, nnx.Param))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "plain", pure)
            checkpointer.wait_until_finished()
            target = nnx.to_pure_dict(nnx.state(model, nnx.Param))
            restored = checkpointer.restore(tmp_path / "plain", target)
        state = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(state, restored)
        nnx.update(model, state)
        np.testing.assert_array_equal(model.head.kernel[...], 1.0)

    def test_is_the_program_of_autocast(self):
        model = wrap(net(), "mixed_bfloat16")
        model.eval()
        graphdef, state = nnx.split(model)
        plain = nnx.graphdef(unwrap(model))

        def report(apply):
            def loss(state, x):
                return jnp.mean(apply(state, x) ** 2)

            return jaxmp.audit(jax.grad(loss, allow_int=True), state, X)

        ours = report(lambda state, x: nnx.merge(graphdef, state)(x))
        pure = jaxmp.autocast(lambda state, x: nnx.merge(plain, state)(x), "mixed_bfloat16")
        theirs = report(pure)
        assert [(p.operand_dtypes, p.pass_name) for p in ours.products] == [
            (p.operand_dtypes, p.pass_name) for p in theirs.products
        ]
        ours, theirs = ours.compiled.memory.temporary, theirs.compiled.memory.temporary
        assert abs(ours - theirs) <= 0.01 * theirs

    def test_operations_have_the_paths_of_modules(self):
        model = wrap(net(), "mixed_bfloat16")
        model.eval()
        graphdef, state = nnx.split(model)
        report = jaxmp.audit(lambda state, x: nnx.merge(graphdef, state)(x), state, X, target=None)
        assert [row.path for row in report.products] == [
            "stem",
            "blocks/0/up",
            "blocks/0/down",
            "blocks/1/up",
            "blocks/1/down",
            "head",
        ]


class Sows(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(5, 5, rngs=rngs)

    def __call__(self, x):
        x = self.linear(x)
        self.sow(nnx.Intermediate, "features", x)
        return x


class TestModels:
    """Of many kinds."""

    def test_equal_numbers_of_other_types_are_other_programs(self):
        class Scales(nnx.Module):
            def __call__(self, x, factor):
                return x * factor

        model = wrap(Scales(), "mixed_bfloat16")
        x = jnp.arange(4)
        assert model(x, 2).dtype == jnp.int32
        with jax.numpy_dtype_promotion("standard"):
            assert model(x, 2.0).dtype == F32

    def test_static_methods(self):
        class Static(nnx.Module):
            act = staticmethod(jax.nn.relu)

            @staticmethod
            def shift(x):
                return x + 1

            def __call__(self, x):
                return self.act(self.shift(x))

        close(wrap(Static(), "mixed_bfloat16")(X), jax.nn.relu(X + 1), 2.0**-6)

    @pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
    def test_sow_in_a_list(self):
        model = wrap(nnx.Sequential(Sows(rngs=nnx.Rngs(0))), "mixed_bfloat16")
        model(X)
        (features,) = jax.tree.leaves(model.layers[0].features)
        assert features.shape == (4, 5)
        model(X)
        assert len(jax.tree.leaves(model.layers[0].features)) == 2

    def test_capture(self):
        class Outer(nnx.Module):
            def __init__(self, *, rngs):
                self.inner = Sows(rngs=rngs)

            def __call__(self, x):
                return self.inner(x)

        plain = Outer(rngs=nnx.Rngs(0))
        model = wrap(plain, "mixed_bfloat16")
        _, got = nnx.capture(model, nnx.Intermediate)(X)
        _, want = nnx.capture(plain, nnx.Intermediate)(X)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        jax.tree.map(close, got, want)

    def test_that_are_no_pytrees(self):
        class Opaque(nnx.Module, pytree=False):
            def __init__(self, *, rngs):
                self.linear = nnx.Linear(5, 3, rngs=rngs)

            def __call__(self, x):
                return self.linear(x)

        plain = Opaque(rngs=nnx.Rngs(0))
        close(wrap(plain, "mixed_bfloat16")(X), plain(X))

    def test_tied_embeddings_follow_the_policy(self):
        class Tied(nnx.Module):
            def __init__(self, *, rngs):
                self.embed = nnx.Embed(7, 4, rngs=rngs)

            def __call__(self, x):
                return self.embed.attend(self.embed(x))

        model = wrap(Tied(rngs=nnx.Rngs(0)), "mixed_bfloat16")
        assert products(model, jnp.arange(3)) == {"embed": ("1 bfloat16",)}

    def test_of_linen_inside(self):
        inner = nnx.bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0)).lazy_init(X)
        close(wrap(inner, "mixed_bfloat16")(X), inner(X))

    def test_pickle(self):
        model = wrap(Sows(rngs=nnx.Rngs(0)), "bfloat16", rules={"linear": "mixed_bfloat16"})
        same = pickle.loads(pickle.dumps(model))
        assert type(same) is type(model)
        assert_same(numbers(same), numbers(model))

    def test_a_table_of_another_method(self):
        class Encodes(nnx.Module):
            def __init__(self, *, rngs):
                self.linear = nnx.Linear(5, 3, rngs=rngs)

            def encode(self, x):
                return self.linear(x)

        model = wrap(Encodes(rngs=nnx.Rngs(0)), "mixed_bfloat16", methods=["encode"])
        assert products(model, X) == {"linear": ("1 bfloat16",)}

    def test_what_a_call_would_lose_is_an_error(self):
        class Counts(nnx.Module):
            def __init__(self):
                self.calls = 0

            def __call__(self, x):
                self.calls += 1
                return x

        class Lazy(nnx.Module):
            def __call__(self, x):
                self.linear = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
                return self.linear(x)

        with pytest.raises(ValueError, match="sets 'calls' to 1"):
            wrap(Counts(), "mixed_bfloat16")(X)
        with pytest.raises(ValueError, match="makes a Linear"):
            wrap(Lazy(), "mixed_bfloat16")(X)

    def test_an_attribute_that_is_no_number_is_unchanged(self):
        class Threshold(nnx.Module):
            def __init__(self):
                self.best = float("nan")

            def __call__(self, x):
                return x

        assert wrap(Threshold(), "mixed_bfloat16")(X).shape == X.shape


class TestRules:
    def test_by_path_and_by_type(self):
        rules = {nnx.LayerNorm: "float32", "head": "float32", "blocks/1": "mixed_float16"}
        model = wrap(net(), "mixed_bfloat16", rules=rules)
        model.eval()
        found = {row.path: (row.products, row.reason) for row in model.policy_table(X).rows}
        assert found["stem"] == (("1 bfloat16",), "policy")
        assert found["blocks/0/up"] == (("1 bfloat16",), "policy")
        assert found["blocks/0/norm"] == ((), "rule 'LayerNorm'")
        assert found["blocks/1/up"] == (("1 float16",), "rule 'blocks/1'")
        assert found["head"] == (("1 float32",), "rule 'head'")
        assert "tied" not in found

    def test_with_all_fields(self):
        model = wrap(net(), "mixed_bfloat16", rules={"head": "float16", "stem/kernel": "float32"})
        model.eval()
        assert model.head.kernel.dtype == jnp.float16
        assert model.stem.kernel.dtype == F32
        assert products(model, X)["stem"] == ("1 float32",)
        result = model(X)
        np.testing.assert_array_equal(result, result.astype(jnp.float16).astype(F32))

    def test_a_dtype_that_the_model_sets_is_respected(self):
        class Sets(nnx.Module):
            def __init__(self, rngs):
                self.a = nnx.Linear(5, 5, dtype=jnp.float32, rngs=rngs)
                self.b = nnx.Linear(5, 5, param_dtype=jnp.bfloat16, rngs=rngs)

            def __call__(self, x):
                return self.b(self.a(x))

        model = wrap(Sets(nnx.Rngs(0)), "mixed_float16")
        found = {row.path: (row.products, row.reason) for row in model.policy_table(X).rows}
        assert found["a"] == (("1 float32",), "dtype=float32")
        assert found["b"] == (("1 float16",), "policy")
        assert model.b.kernel.dtype == jnp.bfloat16


class TestBadInput:
    def test_a_rule_for_nothing(self):
        with pytest.raises(ValueError, match="'haed'; nearest: head"):
            wrap(net(), "mixed_bfloat16", rules={"haed": "float32"})
        with pytest.raises(ValueError, match="'GroupNorm'; nearest: LayerNorm"):
            wrap(net(), "mixed_bfloat16", rules={nnx.GroupNorm: "float32"})

    def test_a_class_or_no_module(self):
        with pytest.raises(TypeError, match="Net is a class"):
            wrap(Net, "mixed_bfloat16")
        with pytest.raises(TypeError, match="dict is no NNX module"):
            wrap({}, "mixed_bfloat16")
        with pytest.raises(TypeError, match="dict is no NNX module"):
            value_and_grad(loss_fn, "mixed_bfloat16")({}, X, Y)

    def test_twice(self):
        with pytest.raises(ValueError, match="wrapped already"):
            wrap(wrap(net(), "mixed_bfloat16"), "float32")
        model = net()
        model.stem = wrap(model.stem, "mixed_bfloat16")
        with pytest.raises(ValueError, match="at 'stem' is wrapped already"):
            wrap(model, "float32")

    def test_a_method_that_is_not_there(self):
        with pytest.raises(ValueError, match="no method 'encode'"):
            wrap(net(), "mixed_bfloat16", methods=["encode"])

    def test_unwrap_of_what_is_not_wrapped(self):
        with pytest.raises(TypeError, match="is not wrapped"):
            unwrap(net())


class TestGradients:
    @pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "plain"])
    def test_are_those_of_float32(self, wrapped):
        model, plain = net(), net()
        model = wrap(model, "mixed_bfloat16") if wrapped else model
        loss, grads = value_and_grad(loss_fn, "mixed_bfloat16")(model, X, Y)
        want, same = nnx.value_and_grad(loss_fn)(plain, X, Y)
        assert loss.dtype == F32
        close(loss, want)
        assert jax.tree.structure(grads) == jax.tree.structure(same)
        assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}
        jax.tree.map(lambda a, b: close(a, b, 2.0**-4), grads, same)
        assert_same(numbers(model)["blocks"][0]["drop"], numbers(plain)["blocks"][0]["drop"])

    def test_a_wrapped_module_inside_keeps_its_policy(self):
        model = net()
        model.head = wrap(model.head, "float32")
        model.blocks[1] = wrap(model.blocks[1], "mixed_float16")
        loss, grads = value_and_grad(loss_fn, "mixed_bfloat16")(model, X, Y)
        want, same = nnx.value_and_grad(loss_fn)(net(), X, Y)
        close(loss, want)
        leaves = zip(jax.tree.leaves(grads), jax.tree.leaves(same), strict=True)
        for got, expected in leaves:
            close(got, expected, 2.0**-4)
        graphdef, state = nnx.split(model)

        def fun(state):
            return value_and_grad(loss_fn, "mixed_bfloat16")(nnx.merge(graphdef, state), X, Y)[0]

        report = jaxmp.audit(fun, state, target=None)
        dtypes = {row.path: row.operand_dtypes[0] for row in report.products}
        assert (dtypes["stem"], dtypes["blocks/0/up"]) == ("bfloat16", "bfloat16")
        others = {path: dtype for path, dtype in dtypes.items() if "0" not in path}
        assert sorted(others.values()) == ["bfloat16", "float16", "float16", "float32"], dtypes

    def test_of_narrow_parameters_are_float32(self):
        model = wrap(net(), "bfloat16")
        _, grads = value_and_grad(loss_fn, "bfloat16")(model, X, Y)
        assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}

    def test_with_aux_and_a_filter(self):
        model = wrap(nnx.LoRALinear(5, 3, lora_rank=2, rngs=nnx.Rngs(0)), "mixed_bfloat16")

        def with_aux(model, x, y):
            logits = model(x)
            return loss_fn(model, x, y), logits

        grad_fn = value_and_grad(with_aux, "mixed_bfloat16", wrt=nnx.LoRAParam, has_aux=True)
        (loss, logits), grads = grad_fn(model, X, Y)
        assert (loss.dtype, logits.shape) == (F32, (4, 3))
        assert set(nnx.to_pure_dict(grads)["lora"]) == {"lora_a", "lora_b"}
        assert "kernel" not in nnx.to_pure_dict(grads)

    def test_a_training_loop_and_a_skipped_step(self):
        model = wrap(net(), "mixed_float16")
        tx = jaxmp.mixed_precision(optax.adam(1e-2), "mixed_float16")
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x, y):
            loss_scale = jaxmp.get_loss_scale(optimizer.opt_state)
            loss, grads = value_and_grad(loss_fn, "mixed_float16", loss_scale=loss_scale)(
                model, x, y
            )
            optimizer.update(model, grads)
            return loss

        losses = [float(step(model, optimizer, X, Y)) for _ in range(8)]
        assert losses[-1] < losses[0]
        before = numbers(model)
        scale = float(jaxmp.get_loss_scale(optimizer.opt_state).loss_scale[...])
        assert not np.isfinite(step(model, optimizer, X.at[0, 0].set(jnp.inf), Y))
        assert_same(numbers(model), before)
        assert float(jaxmp.get_loss_scale(optimizer.opt_state).loss_scale[...]) == scale / 2
        model.eval()
        assert jaxmp.all_finite(model(X))

    def test_in_float32_is_that_of_nnx(self):
        loss, grads = value_and_grad(loss_fn, "float32")(net(), X, Y)
        want, same = nnx.value_and_grad(loss_fn)(net(), X, Y)
        close(loss, want, 2.0**-20)
        jax.tree.map(lambda a, b: close(a, b, 2.0**-20), grads, same)


class TestHalfHazards:
    """Of f16: what overflows or vanishes in layers that compute in it."""

    def results(self, module, x):
        model = wrap(module, "mixed_float16")

        def loss(model, x):
            return jnp.mean(model(x) ** 2)

        grad_fn = value_and_grad(loss, "mixed_float16", loss_scale=jaxmp.NoOpLossScale())
        return model(x), grad_fn(model, x)[1]

    def test_attention_rows_that_are_fully_masked(self):
        class Attends(nnx.Module):
            def __init__(self, rngs):
                self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)

            def __call__(self, x):
                mask = jnp.ones((2, 1, 4, 4), bool).at[0, :, 1].set(False)
                return self.attention(x, mask=mask)

        x = jax.random.normal(jax.random.key(0), (2, 4, 8))
        assert jaxmp.all_finite(self.results(Attends(nnx.Rngs(0)), x))

    @pytest.mark.parametrize("norm", [nnx.LayerNorm, nnx.RMSNorm], ids=["layer", "rms"])
    def test_large_inputs_and_tiny_epsilon_of_norms(self, norm):
        x = 6e4 * jax.random.uniform(jax.random.key(0), (4, 8), minval=0.5)
        result, grads = self.results(norm(8, epsilon=1e-12, rngs=nnx.Rngs(0)), x.at[1].set(0.0))
        assert jaxmp.all_finite((result, grads))
        close(result, norm(8, epsilon=1e-12, rngs=nnx.Rngs(0))(x.at[1].set(0.0)), 2.0**-6)
