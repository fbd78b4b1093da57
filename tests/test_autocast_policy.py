"""What a policy can say to autocast: rules, classes of primitives, the dtype of activations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp._jaxpr import inner_jaxprs, source_line

BF16, F32 = jnp.bfloat16, jnp.float32
X, W = jnp.ones((4, 8)), jnp.full((8, 8), 0.1)


def eqns_of(fun, *args):
    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn
            for inner in inner_jaxprs(eqn):
                yield from walk(inner.jaxpr)

    return list(walk(jax.make_jaxpr(fun)(*args).jaxpr))


def dtypes_of(name, fun, *args):
    return [eqn.outvars[0].aval.dtype for eqn in eqns_of(fun, *args) if eqn.primitive.name == name]


def names_of(fun, *args):
    return [eqn.primitive.name for eqn in eqns_of(fun, *args)]


def two_layers(params, x):
    with jax.named_scope("body"):
        x = jnp.tanh(x @ params["first"])
    with jax.named_scope("head"):
        return x @ params["second"]


PARAMS = {"first": W, "second": W}


@pytest.mark.parametrize("pattern", ["head", "^second$"])
def test_a_rule_is_found_in_a_scope_and_in_the_path_of_an_argument(pattern):
    policy = jaxmp.get_policy("mixed_bfloat16").with_rules({pattern: "float32"})
    names = names_of(jaxmp.autocast(two_layers, policy), PARAMS, X)
    assert names.count("mixed_product") == names.count("dot_general") == 1
    grads = jax.grad(lambda p: jnp.sum(jaxmp.autocast(two_layers, policy)(p, X)))(PARAMS)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype("float32")}


def test_a_rule_for_another_half_dtype():
    policy = jaxmp.get_policy("mixed_bfloat16").with_rules({"head": "mixed_float16"})
    eqns = eqns_of(jaxmp.autocast(two_layers, policy), PARAMS, X)
    computed = [e.params["compute_dtype"] for e in eqns if e.primitive.name == "mixed_product"]
    assert computed == [np.dtype(BF16), np.dtype("float16")]


def test_a_rule_that_matches_nothing_is_reported_with_what_is_near():
    policy = jaxmp.get_policy("mixed_bfloat16").with_rules({"secnd": "float32"})
    with pytest.warns(UserWarning, match=r"'secnd' matched none of \d paths. Nearest: second"):
        jaxmp.autocast(two_layers, policy)(PARAMS, X)
    far = jaxmp.get_policy("mixed_bfloat16").with_rules({"^(0|3)$": "float32"})
    with pytest.warns(UserWarning, match=r"matched none of \d paths. Some: .*first"):
        jaxmp.autocast(two_layers, far)(PARAMS, X)


def exponential(x, w):
    return jnp.exp(x @ w) @ w


def test_a_primitive_can_be_given_another_class():
    def dtype_of_exp(kind):
        policy = jaxmp.Policy(primitives={"exp": kind} if kind else {})
        return dtypes_of("exp", jaxmp.autocast(exponential, policy), X, W)

    assert dtype_of_exp(None) == dtype_of_exp("full") == dtype_of_exp("opaque") == [F32]
    assert dtype_of_exp("follow") == dtype_of_exp("low") == [BF16]


def test_products_can_be_given_another_class():
    for kind in ("full", "opaque"):
        policy = jaxmp.Policy(primitives={"dot_general": kind})
        assert "mixed_product" not in names_of(jaxmp.autocast(exponential, policy), X, W)


def test_bad_classes_and_primitives():
    with pytest.raises(ValueError, match=r"Unknown class 'ful' of primitive 'exp'.*mean 'full'"):
        jaxmp.Policy(primitives={"exp": "ful"})
    with pytest.raises(ValueError, match=r"Bad class of a primitive 'exp'"):
        jaxmp.Policy(primitives=["exp"])
    policy = jaxmp.Policy(primitives={"expp": "full"})
    with pytest.raises(ValueError, match=r"gives a class to 'expp', which is no.*mean 'exp'"):
        jaxmp.autocast(exponential, policy)(X, W)
    with pytest.raises(ValueError, match="activation_dtype is float16, but must be float32 or"):
        jaxmp.Policy(activation_dtype="float16")
    with pytest.raises(ValueError, match="no JSON object"):
        jaxmp.get_policy('c=bf16,primitives={"exp"}')


def test_policies_survive_their_text():
    policy = jaxmp.Policy(
        activation_dtype="float32",
        primitives={"exp": "follow", "dot_general": "full"},
        rules={"a,rules=b": jaxmp.Policy(primitives={"tanh": "full"})},
    )
    assert jaxmp.get_policy(str(policy)) == policy
    assert hash(jaxmp.get_policy(str(policy))) == hash(policy)
    assert policy.primitive_class("exp") == "follow"
    assert jaxmp.Policy(activation_dtype="bfloat16") == jaxmp.Policy()


def test_activations_in_f32_leave_only_operands_narrow():
    policy = jaxmp.Policy(activation_dtype="float32")
    fun = jaxmp.autocast(lambda x, w: jnp.sum(jnp.tanh(x @ w) @ w), policy)
    assert dtypes_of("tanh", fun, X, W) == [F32]
    products = [
        e for e in eqns_of(jax.grad(fun, (0, 1)), X, W) if e.primitive.name == "mixed_product"
    ]
    assert len(products) == 6
    assert {e.params["compute_dtype"] for e in products} == {np.dtype(BF16)}
    assert {e.params["out_dtype"] for e in products} == {np.dtype(F32)}


def test_full_precision_as_a_decorator_and_a_context():
    @jaxmp.full_precision
    def inside(x, w):
        return x @ w

    def with_context(x, w):
        with jaxmp.full_precision():
            return x @ w

    for fun in (inside, with_context):
        cast = jaxmp.autocast(lambda x, w, f=fun: jnp.sum(f(x @ w, w) @ w))
        names = names_of(cast, X, W)
        assert (names.count("mixed_product"), names.count("dot_general")) == (2, 1)
        backward = names_of(jax.grad(cast, (0, 1)), X, W)
        assert (backward.count("mixed_product"), backward.count("dot_general")) == (6, 3)
        assert names_of(fun, X, W) == ["dot_general"]


def test_equations_keep_their_lines_and_scopes():
    fun = jaxmp.autocast(two_layers)
    (first, second) = [e for e in eqns_of(fun, PARAMS, X) if e.primitive.name == "mixed_product"]
    assert source_line(first).startswith("test_autocast_policy.py:")
    assert source_line(first) != source_line(second)
    assert "body" in str(first.source_info.name_stack)
    assert "head" in str(second.source_info.name_stack)


def test_an_all_f32_policy_changes_nothing():
    plain = str(jax.make_jaxpr(two_layers)(PARAMS, X))
    assert str(jax.make_jaxpr(jaxmp.autocast(two_layers, "float32"))(PARAMS, X)) == plain


def test_softmax_keeps_only_its_narrow_result_in_a_scan():
    def loss(w, x):
        def layer(x, w):
            return x + jax.nn.softmax(x @ w) @ w, None

        return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)

    ws = jnp.stack([W] * 3)
    jaxpr = jax.make_jaxpr(jax.grad(jaxmp.autocast(loss)))(ws, X)
    forward = next(e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan")
    carry = forward.outvars[0].aval
    assert carry.dtype == BF16
    # Differentiated twice, it is the derivative of what it computes.
    wide = jax.hessian(loss)(ws, X)
    narrow = jax.hessian(jaxmp.autocast(loss))(ws, X)
    assert jnp.linalg.norm(narrow - wide) < 64 * 2.0**-8 * jnp.linalg.norm(wide)
