import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxmp
from jaxmp import _tree

HALF = [jnp.bfloat16, jnp.float16]


def odd_tree():
    """Every kind of leaf that people put into trees (case B37)."""
    return {
        "f32": jnp.ones((2, 3)),
        "bf16": jnp.ones(2, jnp.bfloat16),
        "f16": jnp.ones((), jnp.float16),
        "int": jnp.int32(7),
        "bool": jnp.array([True, False]),
        "complex": jnp.array([1 + 2j, 3 - 4j], jnp.complex64),
        "fp8": jnp.ones(4, jnp.float8_e4m3fn),
        "int4": jnp.ones(2, jnp.int4),
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(0),
        "float0": np.zeros((2,), jax.dtypes.float0),
        "none": None,
        "python": 2.0,
        "python_int": 3,
        "string": "text",
        "function": jax.jit(jnp.sin),
    }


UNCAST = [
    "int", "bool", "complex", "fp8", "int4", "key", "float0", "none", "python", "python_int",
    "string", "function",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.float32, *HALF])
def test_casts_touch_only_real_floats(dtype):
    tree = odd_tree()
    got = _tree.cast_floats(tree, np.dtype(dtype))
    for name in UNCAST:
        assert got[name] is tree[name], name
    for name in ("f32", "bf16", "f16", "empty"):
        assert got[name].dtype == dtype
        chex.assert_trees_all_equal(
            got[name].astype(jnp.float32), tree[name].astype(jnp.float32), strict=True
        )
    chex.assert_trees_all_equal_structs(got, tree)


def test_cast_keeps_an_array_that_fits_and_removes_weak_types():
    x = jnp.ones(2)
    assert _tree.cast_floats(x, np.dtype(jnp.float32)) is x
    weak = jnp.asarray(1.0)
    assert weak.aval.weak_type
    assert not _tree.cast_floats(weak, np.dtype(jnp.float32)).aval.weak_type


def test_cast_of_shape_dtype_struct_keeps_its_sharding():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    struct = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding)
    got = _tree.cast_floats(struct, np.dtype(jnp.bfloat16))
    assert (got.shape, got.dtype, got.sharding) == ((2,), jnp.bfloat16, sharding)


@pytest.mark.parametrize(
    "batch",
    [
        np.ones((8, 4), ml_dtypes.bfloat16),
        np.ones((8, 4), ml_dtypes.bfloat16) / 2,
        np.ones((8, 4), ml_dtypes.bfloat16) + 1.0,
        np.ones((8, 4)),
        np.float32(3),
        np.float64(3),
    ],
    ids=["bf16", "halved", "plus one", "float64", "float32 scalar", "float64 scalar"],
)
@pytest.mark.parametrize("jit", [False, True])
def test_host_arrays_become_jax_arrays_of_the_compute_dtype(batch, jit):
    """Case B02: NumPy promotes bf16 to f32, so a batch must not stay in NumPy."""
    traces = []

    def cast(x):
        traces.append(x)
        return jaxmp.get_policy("mixed_bfloat16").cast_to_compute(x)

    fun = jax.jit(cast) if jit else cast
    for _ in range(2):
        got = fun(batch)
        assert isinstance(got, jax.Array)
        assert got.dtype == jnp.bfloat16
        assert (got / 2 + 1.0).dtype == jnp.bfloat16
    assert len(traces) == (1 if jit else 2)


def test_float64_is_cast_only_by_a_policy_that_names_it():
    with jax.enable_x64(True):
        x = {"np": np.ones(2), "jnp": jnp.ones(2), "np32": np.ones(2, np.float32)}
        got = jaxmp.get_policy("mixed_bfloat16").cast_to_compute(x)
        assert [v.dtype for v in got.values()] == [jnp.float64, jnp.float64, jnp.bfloat16]
        got = jaxmp.get_policy("p=f64,c=f32,o=f64").cast_to_compute(x)
        assert {v.dtype for v in got.values()} == {np.dtype("float32")}
        assert jaxmp.cast_to_full(x)["jnp"].dtype == jnp.float64


def test_cast_to_half_and_full_are_jmps():
    assert jaxmp.cast_to_half(jnp.ones(2)).dtype == jaxmp.half_dtype() == jnp.float16
    assert jaxmp.cast_to_full(jnp.ones(2, jnp.float16)).dtype == jnp.float32


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize(
    "dtype",
    [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64, jnp.float8_e5m2],
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_all_finite_finds_one_bad_value(bad, dtype, transform):
    good = {"a": jnp.ones((3, 5)), "b": jnp.ones(7, dtype)}
    assert bool(transform(jaxmp.all_finite)(good))
    for i in (0, 6):
        assert not bool(transform(jaxmp.all_finite)(good | {"b": good["b"].at[i].set(bad)}))


def test_all_finite_finds_an_inf_in_the_imaginary_part():
    """Case B05."""
    assert not bool(jaxmp.all_finite(jnp.array([1 + 1j, complex(0, jnp.inf)])))


def test_all_finite_of_odd_trees():
    assert bool(jaxmp.all_finite(odd_tree()))
    for empty in (None, {}, [], (), {"a": None}, jnp.zeros((0, 2))):
        got = jaxmp.all_finite(empty)
        assert bool(got)
        assert (got.dtype, got.shape) == (bool, ())
    assert not bool(jaxmp.all_finite({"python": float("nan")}))
    assert not bool(jaxmp.all_finite(np.array([np.inf])))
    assert bool(jaxmp.all_finite(jnp.float16(65504))), "the largest f16 is finite"


def test_all_finite_in_float64_and_vmap():
    got = jax.vmap(jaxmp.all_finite)({"a": jnp.array([1.0, jnp.nan]), "b": jnp.ones(2)})
    np.testing.assert_array_equal(got, [True, False])
    with jax.enable_x64(True):
        assert bool(jaxmp.all_finite(jnp.array([1e300])))


@pytest.mark.parametrize("pred", [True, False, np.bool_(True), jnp.bool_(False)])
@pytest.mark.parametrize("jit", [False, True])
def test_select_tree_keeps_bits_dtypes_and_structure(pred, jit):
    a, b = odd_tree(), odd_tree()
    for tree, value in ((a, -0.0), (b, 5.0)):
        for name in ("f32", "bf16", "f16"):
            tree[name] = jnp.full_like(tree[name], value)
    b["key"] = jax.random.key(1)
    for name in ("function", "float0"):
        b[name] = a[name]
    if jit:
        static = {n: a.pop(n) and b.pop(n) for n in ("string", "function")}
        a.pop("float0"), b.pop("float0")
        assert static
    select = jax.jit(jaxmp.select_tree) if jit else jaxmp.select_tree
    got, want = select(pred, a, b), (a if pred else b)
    for name in ("f32", "bf16", "f16", "complex", "fp8", "int4", "int", "bool", "empty"):
        assert got[name].dtype == want[name].dtype
        assert np.asarray(got[name]).tobytes() == np.asarray(want[name]).tobytes(), name
    chex.assert_trees_all_equal(
        jax.random.key_data(got["key"]), jax.random.key_data(want["key"]), strict=True
    )


def test_select_tree_rejects_what_it_cannot_select():
    a = {"w": jnp.ones(2), "f": print}
    with pytest.raises(ValueError, match=r"float32\[1\], expected boolean scalar"):
        jaxmp.select_tree(jnp.ones([1]), None, None)
    with pytest.raises(ValueError, match="expected boolean scalar"):
        jaxmp.select_tree(1, None, None)
    with pytest.raises(ValueError, match=r"'w' is float32\[2\] in one tree and bfloat16\[2\]"):
        jaxmp.select_tree(True, a, a | {"w": jnp.ones(2, jnp.bfloat16)})
    with pytest.raises(ValueError, match="'f' is no array and differs"):
        jaxmp.select_tree(True, a, a | {"f": len})
    assert jaxmp.select_tree(True, None, None) is None


def test_leaf_names():
    tree = {"blocks": [{"kernel": 1.0}], "none": None, "scale": jaxmp.DynamicLossScale()}
    assert _tree.leaf_names(tree) == [
        "blocks/0/kernel", "scale/loss_scale", "scale/counter", "scale/hysteresis_left",
        "scale/skip_streak",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="Two leaves have one name: a/b"):
        _tree.named_leaves({"a/b": 1, "a": {"b": 2}})


def test_strong_makes_a_fixed_point():
    tree = {"weak": jnp.asarray(1.0), "python": 2, "np": np.float64(3), "text": "x", "none": None}
    got = _tree.strong(tree)
    for name in ("weak", "python", "np"):
        assert isinstance(got[name], jax.Array)
        assert not got[name].aval.weak_type
    assert got["text"] == "x"


def test_fresh_arrays_are_copies_and_reject_functions():
    w = jnp.ones(2)
    got = _tree.fresh_arrays({"a": w, "b": w, "key": jax.random.key(0), "n": 1})
    pointers = {got[name].unsafe_buffer_pointer() for name in "ab"}
    assert len(pointers | {w.unsafe_buffer_pointer()}) == 3
    with pytest.raises(ValueError, match="'f' is of type"):
        _tree.fresh_arrays({"f": functools.partial(print)})


def test_state_classes_unflatten_anything_and_replace_checks_names():
    scale = jaxmp.DynamicLossScale(4.0, period=7)
    leaves, treedef = jax.tree.flatten(scale)
    assert treedef.unflatten([object()] * len(leaves)).period == 7
    with pytest.raises(TypeError, match="has no field"):
        _tree.replace_state(scale, nonsense=1)
