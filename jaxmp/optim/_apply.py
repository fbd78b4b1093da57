"""Adding updates to parameters, whatever leaves they hold."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._dtypes import dtype_of, has_gradient, widened

T = TypeVar("T")


def apply_updates(params: T, updates: Any) -> T:
    """`optax.apply_updates` for trees that also hold integers, PRNG keys or opaque leaves.

    Args:
        params: any pytree. Only float and complex leaves change.
        updates: a tree of the same structure; what `mixed_precision` returns.

    Returns:
        `params + updates`, added in at least f32, each leaf in its own dtype.

    Example:
        >>> apply_updates({"w": jnp.ones(2), "n": 3}, {"w": jnp.ones(2), "n": 0})
        {'n': 3, 'w': Array([2., 2.], dtype=float32)}
    """

    def leaf_fn(param: Any, update: Any) -> Any:
        dtype = dtype_of(param)
        if not has_gradient(dtype) or not has_gradient(dtype_of(update)):
            return param
        wide = widened(dtype)
        param, update = (lax.convert_element_type(jnp.asarray(x), wide) for x in (param, update))
        return (param + update).astype(dtype)

    return jax.tree.map(leaf_fn, params, updates)
