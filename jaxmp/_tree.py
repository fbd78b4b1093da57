"""Pytrees: casts, the finite check, selection, and the names of leaves."""

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._dtypes import (
    FLOAT32,
    FLOAT64,
    dtype_of,
    half_dtype,
    is_inexact,
    is_real_float,
    widened,
)

T = TypeVar("T")
_Class = TypeVar("_Class", bound=type)


def path_name(path: Sequence[Any]) -> str:
    """Returns a JAX key path as text: `"blocks/0/kernel"`; the root is the empty string."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def leaf_names(tree: Any) -> list[str]:
    """Returns the name of every leaf of `tree`, in the order of `jax.tree.leaves`.

    Example:
        >>> leaf_names({"head": {"kernel": 1.0}, "blocks": [2.0]})
        ['blocks/0', 'head/kernel']
    """
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of `tree` by name.

    Raises:
        ValueError: if two leaves have one name, as in `{"a/b": 1, "a": {"b": 2}}`.
    """
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {path_name(path) or "(root)": leaf for path, leaf in pairs}
    if len(leaves) < len(pairs):
        counts = collections.Counter(leaf_names(tree))
        twice = sorted(name for name, count in counts.items() if count > 1)
        raise ValueError(f"Two leaves have one name: {', '.join(twice)}. Rename one of them.")
    return leaves


def map_named(fun: Callable[..., Any], tree: T, *rest: Any) -> T:
    """`jax.tree.map` whose function gets the leaf's name first."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: fun(path_name(path), *leaves), tree, *rest
    )


def cast_leaf(leaf: Any, dtype: np.dtype, *, float64: bool = False) -> Any:
    """Casts one leaf if it is a real float array, and returns any other leaf as it is.

    Args:
        leaf: f16, bf16 or f32 arrays are cast, as JAX arrays (a NumPy array left in NumPy would
            turn bf16 into f32 at its next operation with a Python number). A `ShapeDtypeStruct`
            keeps its sharding. Python numbers are weakly typed already, and stay.
        dtype: the dtype to cast to.
        float64: whether float64 leaves are cast too.
    """
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return leaf
    have = dtype_of(leaf)
    if not (is_real_float(have) or (float64 and have == FLOAT64)):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype, weak_type=False)
    if isinstance(leaf, jax.Array) and have == dtype and not leaf.aval.weak_type:
        return leaf
    return lax.convert_element_type(jnp.asarray(leaf), dtype)


def cast_floats(tree: T, dtype: np.dtype, *, float64: bool = False) -> T:
    """Casts the real float leaves of `tree`; see `cast_leaf`."""
    return jax.tree.map(functools.partial(cast_leaf, dtype=dtype, float64=float64), tree)


def cast_to_full(tree: T) -> T:
    """Casts the f16, bf16 and f32 leaves of `tree` to float32 and leaves all others alone.

    Args:
        tree: any pytree. Integers, bools, complex and float64 arrays, fp8 arrays, PRNG keys,
            Python numbers and opaque leaves pass through untouched.

    Returns:
        A tree of the same structure.

    Example:
        >>> cast_to_full({"w": jnp.ones(2, jnp.bfloat16), "step": 3})
        {'step': 3, 'w': Array([1., 1.], dtype=float32)}
    """
    return cast_floats(tree, FLOAT32)


def cast_to_half(tree: T) -> T:
    """Casts the f16, bf16 and f32 leaves of `tree` to `half_dtype()`; see `cast_to_full`.

    Example:
        >>> cast_to_half({"w": jnp.ones(2)})["w"].dtype == half_dtype()
        True
    """
    return cast_floats(tree, half_dtype())


def no_gradient(leaf: Any) -> np.ndarray:
    """Returns what JAX gives as the gradient of a leaf that has none: zeros of dtype float0."""
    shape = leaf.shape if dtype_of(leaf) is not None and hasattr(leaf, "shape") else ()
    return np.zeros(shape, jax.dtypes.float0)


def widen_leaf(leaf: Any) -> Any:
    """Returns an inexact leaf as a JAX array of at least float32, any other leaf as it is."""
    dtype = dtype_of(leaf)
    if not is_inexact(dtype):
        return leaf
    return lax.convert_element_type(jnp.asarray(leaf), widened(dtype))


def strong(tree: T) -> T:
    """Returns numeric leaves as strongly typed JAX arrays, so that a state is a fixed point."""

    def leaf_fn(leaf: Any) -> Any:
        dtype = dtype_of(leaf)
        if dtype is None or isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return lax.convert_element_type(jnp.asarray(leaf), dtype)

    return jax.tree.map(leaf_fn, tree)


def fresh_arrays(tree: T) -> T:
    """Returns every leaf as a strongly typed JAX array with a buffer of its own.

    A state of such leaves can be donated: nobody else holds a buffer, and none is in it twice.

    Raises:
        ValueError: for leaves that are neither arrays nor numbers.
    """

    def leaf_fn(name: str, leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"Leaf {name!r} is a ShapeDtypeStruct, which has no values. For an abstract state, "
                "call this under jax.eval_shape."
            )
        if not _is_array(leaf):
            raise ValueError(
                f"Leaf {name!r} is of type {type(leaf).__name__}, which a jitted step cannot "
                "carry. Keep it out of the state, for example by closing over it."
            )
        return jnp.copy(leaf) if is_key(leaf) else jnp.array(leaf, dtype_of(leaf), copy=True)

    return map_named(leaf_fn, tree)


def commit_like(tree: T, committed: Any) -> T:
    """Puts the uncommitted arrays of `tree` where those of `committed` are, replicated.

    A jitted step returns them so; a state of another kind before its first step would be compiled
    for twice.
    """
    shardings = [
        leaf.sharding
        for leaf in jax.tree.leaves(committed)
        if isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.committed
    ]
    if not shardings:
        return tree
    sharding = shardings[0]
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    elif len(sharding.device_set) > 1:
        return tree

    def leaf_fn(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or is_traced(leaf) or leaf.committed:
            return leaf
        return jax.device_put(leaf, sharding)

    return jax.tree.map(leaf_fn, tree)


def like(tree: T, template: Any) -> T:
    """Casts each numeric leaf of `tree` to the dtype of its counterpart in `template`.

    Raises:
        ValueError: if a shape differs, or a cast would lose a kind of number: the imaginary part,
            or the fraction.
    """

    def leaf_fn(name: str, leaf: Any, want: Any) -> Any:
        dtype, have = dtype_of(want), dtype_of(leaf)
        if dtype is None or have is None:
            return leaf
        if jnp.shape(leaf) != jnp.shape(want) or _KINDS[have.kind] > _KINDS[dtype.kind]:
            raise ValueError(
                f"Leaf {name!r} is {_describe(leaf)}, but was {_describe(want)} before. A state "
                "keeps its shapes and kinds of numbers: cast or reshape it where it is made."
            )
        return lax.convert_element_type(jnp.asarray(leaf), dtype)

    return map_named(leaf_fn, tree, template)


# Numbers of a kind can be cast to the same kind or a later one. "V" is what NumPy calls bf16, fp8.
_KINDS = {"b": 0, "u": 1, "i": 1, "f": 2, "V": 2, "c": 3}


def all_finite(tree: Any) -> jax.Array:
    """Returns whether every number in `tree` is finite.

    Args:
        tree: any pytree. Float arrays of any width, complex arrays (both parts) and Python floats
            are looked at; integers, bools, PRNG keys, float0 arrays, None and opaque leaves are
            passed over.

    Returns:
        bool[]; True for a tree without numbers.

    Example:
        >>> bool(all_finite({"w": jnp.ones(3), "step": 1, "key": jax.random.key(0)}))
        True
        >>> bool(all_finite([jnp.array([1.0, jnp.nan])]))
        False
    """
    flags = [_leaf_is_finite(leaf) for leaf in jax.tree.leaves(tree)]
    return functools.reduce(operator.and_, flags, jnp.bool_(True))


def first_nonfinite(tree: Any, limit: float = math.inf) -> jax.Array:
    """Returns the index of the first leaf that `all_finite` would reject: i32[], -1 for none.

    Args:
        tree: any pytree.
        limit: an absolute value from which on a number counts as infinite.
    """
    flags = [_leaf_is_finite(leaf, limit) for leaf in jax.tree.leaves(tree)]
    if not flags:
        return jnp.int32(-1)
    bad = ~jnp.stack(flags)
    return jnp.where(jnp.any(bad), jnp.argmax(bad).astype(jnp.int32), jnp.int32(-1))


def _leaf_is_finite(leaf: Any, limit: float = math.inf) -> jax.Array:
    dtype = dtype_of(leaf)
    if not is_inexact(dtype):
        return jnp.bool_(True)
    array = jnp.asarray(leaf)
    # A maximum of absolute values would be a little faster, but XLA's CPU maximum drops NaN.
    if limit < math.inf:
        return jnp.all(jnp.abs(array) < limit)
    return jnp.all(jnp.isfinite(array.astype(FLOAT32) if dtype.itemsize == 1 else array))


def select_tree(pred: Any, a: T, b: T) -> T:
    """Returns `a` where `pred` is true, else `b`, leaf by leaf.

    Args:
        pred: bool[].
        a: any pytree.
        b: a pytree of the same structure, shapes and dtypes. Leaves that are no arrays (None,
            strings, callables, float0) must be equal in both.

    Returns:
        A pytree like `a`.

    Raises:
        ValueError: if `pred` is no boolean scalar, or the leaves do not match.

    Example:
        >>> select_tree(jnp.bool_(False), {"w": jnp.ones(2)}, {"w": jnp.zeros(2)})
        {'w': Array([0., 0.], dtype=float32)}
    """
    if jnp.shape(pred) != () or dtype_of(pred) != np.dtype(bool):
        got = f"{dtype_of(pred)}{list(jnp.shape(pred))}"
        raise ValueError(f"pred is {got}, expected boolean scalar: reduce it with jnp.all first.")
    return map_named(functools.partial(_select_leaf, pred), a, b)


def _select_leaf(pred: Any, name: str, a: Any, b: Any) -> Any:
    if _is_array(a) and _is_array(b):
        same_impl = getattr(a, "dtype", None) == getattr(b, "dtype", None) or not is_key(a)
        if jnp.shape(a) != jnp.shape(b) or dtype_of(a) != dtype_of(b) or not same_impl:
            raise ValueError(
                f"Leaf {name!r} is {_describe(a)} in one tree and {_describe(b)} in the other; "
                "both must have the same shape and dtype. Cast or reshape one of them first."
            )
        return lax.select(pred, jnp.asarray(a), jnp.asarray(b))
    if a is b or _equal(a, b):
        return a
    raise ValueError(
        f"Leaf {name!r} is no array and differs: {a!r} and {b!r}. Only arrays can be selected "
        "between; keep the same object in both trees."
    )


def _is_array(leaf: Any) -> bool:
    return dtype_of(leaf) is not None or is_key(leaf)


# Flax keeps here what is no parameter: its gradient is its next value (`flax.linen.fp8_ops`).
_OVERWRITTEN = "_overwrite_with_gradient"


def is_overwritten(name: str) -> bool:
    """Whether the gradient of the leaf of this name is its next value.

    Example:
        >>> is_overwritten("_overwrite_with_gradient/Dense_0/kernel_scale")
        True
    """
    return _OVERWRITTEN in name.split("/")


def map_overwritten(fun: Callable[..., Any], tree: T, *rest: Any) -> T:
    """Maps only the leaves whose gradient is their next value; others stay."""

    def leaf_fn(name: str, leaf: Any, *others: Any) -> Any:
        return fun(leaf, *others) if is_overwritten(name) else leaf

    return map_named(leaf_fn, tree, *rest)


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array that JAX traces; Python numbers are none."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind in "biufcV" and leaf.dtype != jax.dtypes.float0
    return isinstance(leaf, jax.Array)


def is_key(leaf: Any) -> bool:
    """Whether `leaf` is an array of typed PRNG keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_traced(leaf: Any) -> bool:
    """Whether `leaf` has no value yet, because a function is being traced."""
    return isinstance(leaf, Tracer)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b


def _describe(leaf: Any) -> str:
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(jnp.shape(leaf))}"


def register_state(data_fields: Sequence[str]) -> Callable[[_Class], _Class]:
    """Class decorator: registers a frozen dataclass as a pytree node.

    Unlike `jax.tree_util.register_dataclass`, unflattening does not run `__init__`: validation
    happens once, when a person builds the object, and never on tracers or on device arrays (where
    it would wait for the device).

    Args:
        data_fields: the fields that hold arrays; all others are static.
    """
    data_fields = tuple(data_fields)

    def decorate(cls: _Class) -> _Class:
        meta_fields = tuple(f.name for f in dataclasses.fields(cls) if f.name not in data_fields)

        def flatten_with_keys(obj: Any) -> Any:
            children = [
                (jax.tree_util.GetAttrKey(name), getattr(obj, name)) for name in data_fields
            ]
            return children, tuple(getattr(obj, name) for name in meta_fields)

        def flatten(obj: Any) -> Any:
            return (
                [getattr(obj, name) for name in data_fields],
                tuple(getattr(obj, name) for name in meta_fields),
            )

        def unflatten(meta: Any, data: Any) -> Any:
            obj = object.__new__(cls)
            for name, value in (
                *zip(data_fields, data, strict=True),
                *zip(meta_fields, meta, strict=True),
            ):
                object.__setattr__(obj, name, value)
            return obj

        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
        return cls

    return decorate


def replace_state(obj: T, **changes: Any) -> T:
    """`dataclasses.replace` for a class of `register_state`, without running `__init__`."""
    new = object.__new__(type(obj))
    for field in dataclasses.fields(obj):  # type: ignore[arg-type]
        value = changes.pop(field.name) if field.name in changes else getattr(obj, field.name)
        object.__setattr__(new, field.name, value)
    if changes:
        raise TypeError(f"{type(obj).__name__} has no field {sorted(changes)}.")
    return new
