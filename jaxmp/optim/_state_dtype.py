"""Optimizer state in fewer bytes."""

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmp import _tree
from jaxmp._dtypes import FLOAT32, HALF_DTYPES, dtype_of, parse_dtype
from jaxmp._errors import bullet_list
from jaxmp._rounding import round_stochastically
from jaxmp.optim._blocks import Blocks, decode, encode
from jaxmp.optim._checks import inner_update
from jaxmp.optim._stochastic_rounding import as_key

_FORMATS = ("block8", "block8_square")


class StateDtypeState(NamedTuple):
    """State of `state_dtype`.

    Attributes:
        key: the PRNG key of the next step's roundings.
        inner_state: the state of the wrapped transform, as it is stored.
    """

    key: jax.Array
    inner_state: Any


def state_dtype(
    tx: optax.GradientTransformation, dtypes: Mapping[str, Any], *, key: Any = 0
) -> optax.GradientTransformationExtraArgs:
    """Stores fields of an optimizer's state in fewer bytes; the arithmetic stays f32.

    Values are stored by stochastic rounding: a bf16 second moment that is rounded to nearest would
    never decay, since 0.999 of it is nearer to itself than to the next value. The wrapped transform
    sees f32 gradients and parameters, so that what it keeps is f32 where nothing is said.

    `"block8"` takes 8 bits a number and an f32 scale for 256 of them, 1.016 bytes (float8_e4m3fn in
    blocks; Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022, has another code).
    `"block8_square"` is for second moments: it stores square roots, whose range is enough. Both for
    Adam: `state_dtype(tx, {"mu": "block8", "nu": "block8_square"})`, 2.03 bytes a parameter.

    Args:
        tx: any optax transform or chain.
        dtypes: for a regular expression that a part of a leaf's path matches, such as `"nu"` for
            `0/nu/kernel`, a dtype (bfloat16, float16, float32) or one of these formats. The last
            match wins.
        key: a seed, or a PRNG key, for the roundings.

    Raises:
        ValueError: for unknown formats; from `init`, if an expression matches no float of the
            state.

    Example:
        >>> tx = state_dtype(optax.adam(1e-3), {"mu": "bfloat16", "nu": "block8_square"})
        >>> state = tx.init({"w": jnp.ones((256, 4))})
        >>> adam = state.inner_state[0]
        >>> adam.mu["w"].dtype.name, adam.nu["w"].codes.dtype.name, adam.nu["w"].scales.shape
        ('bfloat16', 'float8_e4m3fn', (4,))
    """
    inner = optax.with_extra_args_support(tx)
    formats = {pattern: _as_format(wanted) for pattern, wanted in dtypes.items()}
    first_key = as_key(key)

    def init(params: Any) -> Any:
        key, bits_key = jax.random.split(first_key)
        inner_state = _tree.strong(inner.init(jax.tree.map(_tree.widen_leaf, params)))
        _check_patterns(formats, inner_state)
        return StateDtypeState(key, _stored(formats, inner_state, bits_key))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        key, bits_key = jax.random.split(state.key)
        grads = jax.tree.map(_tree.widen_leaf, updates)
        full = None if params is None else jax.tree.map(_tree.widen_leaf, params)
        wide = _wide(formats, state.inner_state)
        updates, new = inner_update(inner, grads, wide, full, extra_args)
        stored = jax.tree.leaves(_stored(formats, new, bits_key))
        # Blocks come back as what they were given as.
        structure = jax.tree.structure(state.inner_state)
        return updates, StateDtypeState(key, structure.unflatten(stored))

    return optax.GradientTransformationExtraArgs(init, update)


def _as_format(wanted: Any) -> Any:
    if isinstance(wanted, str) and wanted in _FORMATS:
        return wanted
    try:
        dtype = parse_dtype(wanted)
    except ValueError as error:
        raise ValueError(
            f"The format of a state is {wanted!r}, but must be one of float32, bfloat16, float16, "
            f"{', '.join(_FORMATS)}."
        ) from error
    if dtype not in (*HALF_DTYPES, FLOAT32):
        raise ValueError(f"State is f32 where it is computed, so {dtype} would gain nothing.")
    return dtype


def _format_of(formats: Mapping[str, Any], path: Any) -> Any:
    """Returns what the last matching pattern says of a leaf; None if none matches."""
    parts = _tree.path_name(path).split("/")
    found = [f for pattern, f in formats.items() if any(re.fullmatch(pattern, p) for p in parts)]
    return found[-1] if found else None


def _check_patterns(formats: Mapping[str, Any], state: Any) -> None:
    names = [
        _tree.path_name(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if dtype_of(leaf) == FLOAT32
    ]
    parts = {part for name in names for part in name.split("/")}
    unused = [p for p in formats if not any(re.fullmatch(p, part) for part in parts)]
    if names and unused:
        raise ValueError(
            f"{', '.join(map(repr, unused))}: no float in the optimizer's state has a path with "
            f"such a part. They are:\n{bullet_list(names)}"
        )


def _stored(formats: Mapping[str, Any], state: Any, key: jax.Array) -> Any:
    pairs, treedef = jax.tree_util.tree_flatten_with_path(state)

    def stored(i: int, path: Any, leaf: Any) -> Any:
        wanted = _format_of(formats, path)
        if wanted is None or wanted == FLOAT32 or dtype_of(leaf) != FLOAT32:
            return leaf
        return _narrowed(leaf, jax.random.fold_in(key, i), wanted)

    return treedef.unflatten(stored(i, path, leaf) for i, (path, leaf) in enumerate(pairs))


# Compiled, since outside of a jitted step each of its many operations would be by itself.
@functools.partial(jax.jit, static_argnames="wanted")
def _narrowed(leaf: Any, key: jax.Array, wanted: Any) -> Any:
    bits = jax.random.bits(key, jnp.shape(leaf), jnp.uint32)
    if isinstance(wanted, str):
        return encode(leaf, bits, is_square=wanted == "block8_square")
    return round_stochastically(leaf, wanted, bits).astype(wanted)


def _wide(formats: Mapping[str, Any], state: Any) -> Any:
    def wide(path: Any, leaf: Any) -> Any:
        wanted = _format_of(formats, path)
        if _is_blocks(leaf):
            return decode(_as_blocks(leaf), is_square=wanted == "block8_square")
        if wanted in HALF_DTYPES and dtype_of(leaf) == wanted:
            return lax.convert_element_type(leaf, FLOAT32)
        return leaf

    return jax.tree_util.tree_map_with_path(wide, state, is_leaf=_is_blocks)


def _is_blocks(node: Any) -> bool:
    """Whether a node is an array in blocks; `nnx.Optimizer` makes a mapping of such a pair."""
    is_mapping = isinstance(node, Mapping) and set(node) == set(Blocks._fields)
    return is_mapping or isinstance(node, Blocks)


def _as_blocks(node: Any) -> Blocks:
    return Blocks(**node) if isinstance(node, Mapping) else node
