"""jaxmp.linen.wrap: the same model, in the dtypes of a policy."""

import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jaxmp
import jaxmp.linen
from jaxmp.linen import unwrap, wrap

F32 = np.dtype("float32")


class Block(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        y = nn.gelu(nn.Dense(2 * self.width, name="up")(y))
        return x + nn.Dense(self.width, name="down")(y)


class Net(nn.Module):
    """With batch statistics, dropout, a method of its own, and a shared module."""

    depth: int = 2

    def setup(self):
        self.stem = nn.Dense(8)
        self.blocks = [Block() for _ in range(self.depth)]
        self.norm = nn.BatchNorm()
        self.drop = nn.Dropout(0.5)
        self.head = nn.Dense(3)

    def features(self, x, train=False):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x, use_running_average=not train)
        return self.drop(x, deterministic=not train)

    def __call__(self, x, train=False):
        return self.head(self.features(x, train))


X = jax.random.normal(jax.random.key(1), (4, 5))


@pytest.fixture(scope="module")
def variables():
    return Net().init(jax.random.key(0), X)


def dtypes_of(tree):
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


def products(model, variables, *args, **kwargs):
    table = model.policy_table(variables, *args, **kwargs)
    return {row.path: row.products for row in table.rows if row.products}


def close(a, b, tolerance=2.0**-6):
    np.testing.assert_allclose(np.asarray(a, F32), np.asarray(b, F32), rtol=0, atol=tolerance)


class TestVariables:
    def test_are_those_of_the_module(self, variables):
        model = wrap(Net(), "mixed_bfloat16")
        jax.tree.map(np.testing.assert_array_equal, model.init(jax.random.key(0), X), variables)

    def test_are_stored_in_param_dtype_and_statistics_in_float32(self):
        variables = wrap(Net(), "bfloat16").init(jax.random.key(0), X)
        assert dtypes_of(variables["params"]) == {"bfloat16"}
        assert dtypes_of(variables["batch_stats"]) == {"float32"}

    def test_fit_a_wrapped_and_an_unwrapped_model(self, variables):
        model = wrap(Net(), "mixed_bfloat16")
        close(model.apply(variables, X), Net().apply(variables, X), 2.0**-5)
        own = model.init(jax.random.key(0), X)
        close(Net().apply(own, X), Net().apply(variables, X), 0)

    def test_of_another_model_are_an_error_of_flax(self):
        other = nn.Dense(3).init(jax.random.key(0), X)
        with pytest.raises(Exception, match="stem"):
            wrap(Net(), "mixed_bfloat16").apply(other, X)

    def test_that_are_partitioned_stay_so(self):
        init = nn.with_partitioning(nn.initializers.ones, ("data", None))
        model = wrap(nn.Dense(4, kernel_init=init), "bfloat16")
        variables = model.init(jax.random.key(0), X)
        kernel = variables["params"]["kernel"]
        assert isinstance(kernel, nn.Partitioned)
        assert (kernel.names, kernel.value.dtype) == (("data", None), jnp.bfloat16)
        assert model.apply(variables, X).dtype == jnp.bfloat16
        assert nn.get_partition_spec(variables)["params"]["kernel"] == jax.sharding.PartitionSpec(
            "data", None
        )

    def test_are_born_narrow(self):
        model = wrap(nn.Dense(64), "bfloat16")
        text = jax.jit(model.init).lower(jax.random.key(0), X).as_text()
        assert "tensor<5x64xbf16>" in text
        lazy = model.lazy_init(jax.random.key(0), jax.ShapeDtypeStruct((4, 5), F32))
        assert dtypes_of(lazy) == {"bfloat16"}

    def test_that_a_module_stores_narrow_itself_stay_narrow(self):
        model = wrap(nn.Dense(4, param_dtype=jnp.float16), "mixed_bfloat16")
        with jax.numpy_dtype_promotion("standard"):
            assert dtypes_of(model.init(jax.random.key(0), X)) == {"float16"}


class TestApply:
    def test_batch_statistics_are_float32(self, variables):
        model, rngs = wrap(Net(), "mixed_float16"), {"dropout": jax.random.key(2)}
        got, changed = model.apply(variables, X, train=True, mutable=["batch_stats"], rngs=rngs)
        want, same = Net().apply(variables, X, train=True, mutable=["batch_stats"], rngs=rngs)
        assert got.dtype == F32
        assert dtypes_of(changed) == {"float32"}
        close(got, want, 2.0**-5)
        jax.tree.map(close, changed, same)

    @pytest.mark.parametrize("method", ["features", Net.features], ids=["name", "function"])
    def test_methods(self, variables, method):
        model = wrap(Net(), "mixed_bfloat16")
        got = model.apply(variables, X, method=method)
        close(got, Net().apply(variables, X, method=method), 2.0**-5)
        report = jaxmp.audit(
            lambda v, x: model.apply(v, x, method=method), variables, X, target=None
        )
        assert {d for row in report.products for d in row.operand_dtypes} == {"bfloat16"}

    def test_intermediates(self, variables):
        model = wrap(Net(), "mixed_bfloat16")
        _, got = model.apply(variables, X, capture_intermediates=True)
        _, want = Net().apply(variables, X, capture_intermediates=True)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert dtypes_of(got) == {"float32"}

    def test_a_train_state_of_flax(self, variables):
        model = wrap(Net(), "mixed_float16")
        tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_float16")
        state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)

        @jax.jit
        def step(state, x):
            def loss_fn(params):
                given = {"params": params, "batch_stats": variables["batch_stats"]}
                return jnp.mean(state.apply_fn(given, x) ** 2)

            grad_fn = jaxmp.value_and_grad(
                loss_fn, "mixed_float16", loss_scale=jaxmp.get_loss_scale(state.opt_state)
            )
            loss, grads = grad_fn(state.params)
            return state.apply_gradients(grads=grads), loss

        losses = []
        for _ in range(5):
            state, loss = step(state, X)
            losses.append(float(loss))
        assert losses[-1] < losses[0]
        assert dtypes_of(state.params) == {"float32"}
        skipped, _ = step(state, X.at[0, 0].set(jnp.inf))
        jax.tree.map(np.testing.assert_array_equal, skipped.params, state.params)

    @pytest.mark.parametrize("lift", ["scan", "remat", "vmap"])
    def test_lifted_transformations(self, lift):
        class Lifted(nn.Module):
            @nn.compact
            def __call__(self, x):
                if lift == "remat":
                    return nn.remat(Block)(5)(x)
                if lift == "vmap":
                    mapped = nn.vmap(
                        Block, variable_axes={"params": 0}, split_rngs={"params": True}
                    )
                    return mapped(5)(x)
                body = nn.scan(
                    lambda block, x, _: (block(x), None),
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    length=3,
                )
                return body(Block(5), x, None)[0]

        x = X[None] if lift == "vmap" else X
        model = wrap(Lifted(), "mixed_bfloat16", rules={"up$": "float32"})
        variables = model.init(jax.random.key(0), x)

        def loss(model):
            return jax.value_and_grad(lambda v: jnp.mean(model.apply(v, x) ** 2))

        (got, grads), (want, want_grads) = loss(model)(variables), loss(Lifted())(variables)
        close(got, want, 2.0**-7 * float(want))
        jax.tree.map(lambda a, b: close(a, b, 2.0**-5), grads, want_grads)
        found = products(model, variables, x)
        assert {path.rpartition("/")[2]: text for path, text in found.items()} == {
            "up": ("1 float32",),
            "down": ("1 bfloat16",),
        }

    def test_is_compiled_once_outside_of_jit(self, variables):
        traces = []

        class Counted(nn.Module):
            @nn.compact
            def __call__(self, x):
                traces.append(1)
                return nn.Dense(3)(x)

        model = wrap(Counted(), "mixed_bfloat16")
        variables = model.init(jax.random.key(0), X)
        traces.clear()
        results = [model.apply(variables, X) for _ in range(3)]
        assert len(traces) == 1
        np.testing.assert_array_equal(results[0], results[2])

    def test_what_is_no_array_comes_through(self):
        class Talks(nn.Module):
            @nn.compact
            def __call__(self, x, times):
                return nn.Dense(3)(x) * times, "done", None

        model = wrap(Talks(), "mixed_bfloat16")
        variables = Talks().init(jax.random.key(0), X, 2)
        result, text, nothing = model.apply(variables, X, 2)
        assert (text, nothing, result.dtype) == ("done", None, F32)

    def test_equal_fields_of_other_types_are_other_programs(self):
        class Scales(nn.Module):
            factor: object

            @nn.compact
            def __call__(self, x):
                return x * self.factor

        x = jnp.arange(4)
        assert wrap(Scales(2), "mixed_bfloat16").apply({}, x).dtype == jnp.int32
        with jax.numpy_dtype_promotion("standard"):
            assert wrap(Scales(2.0), "mixed_bfloat16").apply({}, x).dtype == F32

    def test_a_function_as_method_is_traced_anew(self):
        model, scale = wrap(nn.Dense(4), "mixed_bfloat16"), [1.0]
        variables = model.init(jax.random.key(0), X)

        def method(module, x):
            return module(x) * scale[0]

        once = model.apply(variables, X, method=method)
        scale[0] = 2.0
        close(model.apply(variables, X, method=method), 2 * once, 2.0**-6)

    def test_all_variables_keep_their_dtypes(self):
        model = wrap(nn.Dense(4), "bfloat16")
        variables = model.init(jax.random.key(0), X)
        _, changed = model.apply(variables, X, mutable=True)
        assert dtypes_of(changed) == {"bfloat16"}

    def test_a_module_that_forwards_attributes(self):
        class Forwards(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(4)(x)

            def __getattr__(self, name):
                raise AttributeError(name)

        model = wrap(Forwards(), "mixed_bfloat16")
        variables = model.init(jax.random.key(0), X)
        close(model.apply(variables, X), Forwards().apply(variables, X))

    def test_a_module_with_an_init_of_its_own(self):
        class Own(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(4)(x)

            def init(self, key):
                return super().init(key, X)

        variables = wrap(Own(), "bfloat16").init(jax.random.key(0))
        assert dtypes_of(variables) == {"bfloat16"}

    def test_float32_leaves_the_program_as_it_is(self, variables):
        def text(model):
            return str(jax.make_jaxpr(lambda v: model.apply(v, X))(variables))

        assert text(wrap(Net(), "float32")) == text(Net())

    def test_is_the_program_of_autocast(self, variables):
        model = wrap(Net(), "mixed_bfloat16")
        pure = jaxmp.autocast(Net().apply, "mixed_bfloat16")

        def report(apply):
            def loss(variables, x):
                return jnp.mean(apply(variables, x) ** 2)

            return jaxmp.audit(jax.grad(loss), variables, X)

        ours, theirs = report(model.apply), report(pure)
        assert [(p.path, p.operand_dtypes, p.pass_name) for p in ours.products] == [
            (p.path, p.operand_dtypes, p.pass_name) for p in theirs.products
        ]
        assert ours.compiled.memory == theirs.compiled.memory


class TestRules:
    def test_by_path_and_by_type(self, variables):
        rules = {nn.BatchNorm: "float32", "head": "float32", "blocks_1": "mixed_float16"}
        table = wrap(Net(), "mixed_bfloat16", rules=rules).policy_table(variables, X)
        found = {row.path: (row.products, row.reason) for row in table.rows}
        assert found["stem"] == (("1 bfloat16",), "policy")
        assert found["blocks_0/up"] == (("1 bfloat16",), "policy")
        assert found["blocks_1/up"] == (("1 float16",), "rule 'blocks_1'")
        assert found["norm"] == ((), "rule 'BatchNorm'")
        assert found["head"] == (("1 float32",), "rule 'head'")
        assert table.unused == ()

    def test_the_last_wins_and_holds_inside(self, variables):
        rules = [("up", "float32"), (Block, "mixed_float16"), ("blocks_1/up", "mixed_bfloat16")]
        found = products(wrap(Net(), "mixed_bfloat16", rules=rules), variables, X)
        assert found["blocks_0/up"] == ("1 float16",)
        assert found["blocks_0/down"] == ("1 float16",)
        assert found["blocks_1/up"] == ("1 bfloat16",)

    def test_of_the_policy_and_of_a_parameter(self, variables):
        policy = jaxmp.get_policy("mixed_bfloat16").with_rules({"head/kernel": "float32"})
        found = products(wrap(Net(), policy), variables, X)
        assert found["head"] == ("1 float32",)
        assert found["stem"] == ("1 bfloat16",)
        stored = wrap(Net(), "bfloat16", rules={"head/kernel": "float32"}).init(
            jax.random.key(0), X
        )["params"]
        assert dtypes_of(stored["head"]) == {"float32"}
        assert dtypes_of(stored["stem"]) == {"bfloat16"}

    def test_with_all_fields(self):
        class Ends(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(4, name="a")(nn.Dense(4, name="b")(x))

        model = wrap(Ends(), "mixed_bfloat16", rules={"^a$": "float16"})
        variables = model.init(jax.random.key(0), X)
        stored = jax.tree.map(lambda leaf: leaf.dtype.name, variables["params"])
        assert stored["a"]["kernel"] == "float16"
        assert stored["b"]["kernel"] == "float32"
        # The result of `a` is rounded to float16, that of the model is float32.
        result = model.apply(variables, X)
        np.testing.assert_array_equal(result, result.astype(jnp.float16).astype(F32))

    def test_of_half_in_a_model_of_float32(self, variables):
        found = products(wrap(Net(), "float32", rules={"head": "mixed_bfloat16"}), variables, X)
        assert found["head"] == ("1 bfloat16",)
        assert found["stem"] == ("1 float32",)

    def test_a_shared_module_has_the_path_of_its_parameters(self):
        class Shares(nn.Module):
            def setup(self):
                self.first = nn.Dense(5)
                self.second = Calls(self.first)

            def __call__(self, x):
                return self.second(self.first(x))

        class Calls(nn.Module):
            other: nn.Module

            @nn.compact
            def __call__(self, x):
                return nn.Dense(5, name="own")(self.other(x))

        model = wrap(Shares(), "mixed_bfloat16", rules={"second": "float32"})
        variables = model.init(jax.random.key(0), X)
        found = products(model, variables, X)
        assert found == {"first": ("2 bfloat16",), "second/own": ("1 float32",)}

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_a_dtype_that_the_model_sets_is_respected(self, dtype):
        class Sets(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(4, name="b")(nn.Dense(4, dtype=dtype, name="a")(x))

        model = wrap(Sets(), "mixed_bfloat16")
        with jax.numpy_dtype_promotion("standard"):
            variables = model.init(jax.random.key(0), X)
            table = model.policy_table(variables, X)
            report = jaxmp.audit(model.apply, variables, X, target=None, policy="mixed_bfloat16")
        found = {row.path: (row.products, row.reason) for row in table.rows}
        assert found["a"] == ((f"1 {dtype}",), f"dtype={dtype}")
        assert found["b"] == (("1 bfloat16",), "policy")
        defeated = [row.path for row in report.products if dtype in row.operand_dtypes]
        assert defeated == ["Sets/a"]

    def test_the_table_marks_unused_rules(self, variables):
        model = wrap(Net(), "mixed_bfloat16", rules={"haed": "float32", nn.Conv: "float32"})
        text = str(model.policy_table(variables, X))
        assert "unused rule: 'haed'" in text
        assert "unused rule: 'Conv'" in text


class TestBadInput:
    def test_a_rule_for_nothing(self, variables):
        model = wrap(Net(), "mixed_bfloat16", rules={"haed": "float32"})
        with pytest.raises(ValueError, match="'haed'; nearest: head"):
            model.init(jax.random.key(0), X)
        with pytest.warns(UserWarning, match="'haed'; nearest: head"):
            model.apply(variables, X)

    def test_a_class(self):
        with pytest.raises(TypeError, match=r"wrap\(Net\(...\), policy\)"):
            wrap(Net, "mixed_bfloat16")

    def test_no_module(self):
        with pytest.raises(TypeError, match="function is no Linen module"):
            wrap(lambda x: x, "mixed_bfloat16")

    def test_twice(self):
        with pytest.raises(ValueError, match="wrapped already"):
            wrap(wrap(Net(), "mixed_bfloat16"), "float32")

    def test_a_bound_module(self, variables):
        with pytest.raises(ValueError, match="is bound"):
            wrap(Net().bind(variables), "mixed_bfloat16")

        class Inside(nn.Module):
            def setup(self):
                self.inner = wrap(nn.Dense(3), "mixed_bfloat16")

            def __call__(self, x):
                return self.inner(x)

        with pytest.raises(ValueError, match="Wrap the outermost module"):
            Inside().init(jax.random.key(0), X)
        with pytest.raises(ValueError, match="cannot be bound"):
            wrap(Net(), "mixed_bfloat16").bind(variables)

    def test_a_bad_rule_or_policy(self):
        with pytest.raises(ValueError, match="no regular expression"):
            wrap(Net(), "mixed_bfloat16", rules={"(": "float32"})
        with pytest.raises(ValueError, match="Unknown dtype or preset"):
            wrap(Net(), "mixed_bfloat16", rules={nn.Dense: "flaot32"})
        with pytest.raises(ValueError, match="Unknown recipe 'fp4'"):
            wrap(Net(), jaxmp.Policy(recipe="fp4"))

    def test_unwrap_of_what_is_not_wrapped(self):
        with pytest.raises(TypeError, match="is not wrapped"):
            unwrap(Net())


def test_is_the_module_otherwise(variables):
    model = wrap(Net(depth=2), "mixed_bfloat16", rules={"head": "float32"})
    assert isinstance(model, Net)
    assert model.depth == 2
    assert unwrap(model) == Net()
    same = wrap(Net(), "mixed_bfloat16", rules={"head": "float32"})
    assert (model, hash(model)) == (same, hash(same))
    assert model != wrap(Net(), "mixed_bfloat16")
    assert model.clone(depth=1).init(jax.random.key(0), X)["params"].keys() >= {"blocks_0"}


def test_pickle():
    model = wrap(Block(3), "mixed_bfloat16", rules={nn.Dense: "float32"})
    assert pickle.loads(pickle.dumps(model)) == model


class TestHalfHazards:
    """Of f16: what overflows or vanishes in layers that compute in it."""

    def grads(self, module, x, *args):
        model = wrap(module, "mixed_float16")
        variables = model.init(jax.random.key(0), x, *args)

        def loss(variables, x):
            return jnp.mean(model.apply(variables, x, *args) ** 2)

        return model.apply(variables, x, *args), jax.grad(loss, argnums=(0, 1))(variables, x)

    def test_attention_rows_that_are_fully_masked(self):
        class Attends(nn.Module):
            @nn.compact
            def __call__(self, x, mask):
                return nn.MultiHeadDotProductAttention(num_heads=2)(x, x, mask=mask)

        x = jax.random.normal(jax.random.key(0), (2, 4, 8))
        mask = jnp.ones((2, 1, 4, 4), bool).at[0, :, 1].set(False)
        result, grads = self.grads(Attends(), x, mask)
        assert jaxmp.all_finite((result, grads))

    @pytest.mark.parametrize(
        "norm", [nn.LayerNorm, nn.RMSNorm, lambda: nn.GroupNorm(2), nn.InstanceNorm]
    )
    def test_large_inputs_of_norms(self, norm):
        x = 6e4 * jax.random.uniform(jax.random.key(0), (4, 6, 8), minval=0.5)
        result, grads = self.grads(norm(), x)
        assert jaxmp.all_finite((result, grads))
        want = norm().apply(norm().init(jax.random.key(0), x), x)
        close(result, want, 2.0**-6)

    def test_a_tiny_epsilon(self):
        x = jnp.zeros((2, 8)).at[0].set(1.0)
        result, grads = self.grads(nn.LayerNorm(epsilon=1e-12), x)
        assert jaxmp.all_finite((result, grads))

    def test_variance_far_from_zero(self):
        x = 1e4 + jax.random.normal(jax.random.key(0), (64, 8))
        module = nn.BatchNorm(use_running_average=False, use_fast_variance=False)
        model = wrap(module, "mixed_float16")
        variables = module.init(jax.random.key(0), x)
        got, changed = model.apply(variables, x, mutable=["batch_stats"])
        want, same = module.apply(variables, x, mutable=["batch_stats"])
        close(got, want, 2.0**-10)
        jax.tree.map(lambda a, b: close(a, b, 1e-4 * float(jnp.max(jnp.abs(b)))), changed, same)

    def test_one_pass_variance_far_from_zero_is_that_of_float32(self):
        x = 1e4 + jax.random.normal(jax.random.key(0), (1, 1024))
        model = wrap(nn.LayerNorm(), "mixed_float16")
        variables = model.init(jax.random.key(0), x)
        got, want = model.apply(variables, x), nn.LayerNorm().apply(variables, x)
        assert jaxmp.all_finite(got)
        close(jnp.std(got), jnp.std(want), 2.0**-8)
        exact = wrap(nn.LayerNorm(use_fast_variance=False), "mixed_float16")
        close(jnp.std(exact.apply(variables, x)), 1.0, 2.0**-8)

    @pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
    def test_angles_of_frequencies_among_the_variables(self, policy):
        class Rotates(nn.Module):
            @nn.compact
            def __call__(self, x):
                steps = jnp.arange(16) / 16
                frequencies = self.variable("constants", "frequencies", lambda: 1e4**-steps)
                angles = jnp.arange(2048).astype(F32)[:, None] * frequencies.value
                return nn.Dense(16)(x) * jnp.cos(angles), jnp.cos(angles)

        model, x = wrap(Rotates(), policy), jnp.ones((2048, 4))
        variables = model.init(jax.random.key(0), x)
        _, table = model.apply(variables, x)
        _, want = Rotates().apply(variables, x)
        close(table, want, 1e-3)
