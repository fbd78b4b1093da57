"""What parameters and optimizer state take, in bytes a parameter."""

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp import _tree
from jaxmp._dtypes import dtype_of, has_gradient
from jaxmp._table import render


@dataclasses.dataclass(frozen=True)
class MemoryAccount:
    """Bytes of parameters and of an optimizer's state.

    Attributes:
        parameters: how many numbers the parameters hold.
        bytes: by what they are for: `"params"`, and the names of fields of the state, such as
            `"mu"` or `"masters"`; `"other"` for what belongs to no parameter.
    """

    parameters: int
    bytes: dict[str, int]

    @property
    def bytes_per_parameter(self) -> float:
        """All bytes over the number of parameters."""
        return sum(self.bytes.values()) / max(self.parameters, 1)

    def __str__(self) -> str:
        shares = [(name, n / max(self.parameters, 1)) for name, n in self.bytes.items()]
        rows = [[name, f"{share:.2f}"] for name, share in shares]
        rows.append(["together", f"{self.bytes_per_parameter:.2f}"])
        return render(f"{self.parameters:,} parameters", ("", "bytes each"), rows, right={1})


def memory_account(params: Any, opt_state: Any) -> MemoryAccount:
    """Returns what parameters and an optimizer's state take, read off their arrays.

    Args:
        params: the parameters; arrays, or `jax.ShapeDtypeStruct`s.
        opt_state: the state of any optax transform, of arrays or of `jax.ShapeDtypeStruct`s, as
            `jax.eval_shape(tx.init, params)` gives it.

    Example:
        >>> import jaxmp, optax
        >>> params = {"w": jnp.ones((256, 256), jnp.bfloat16)}
        >>> tx = jaxmp.mixed_precision(optax.adam(1e-3), "mixed_bfloat16")
        >>> account = memory_account(params, jax.eval_shape(tx.init, params))
        >>> {name: round(n / account.parameters, 2) for name, n in account.bytes.items()}
        {'params': 2.0, 'masters': 4.0, 'mu': 4.0, 'nu': 4.0, 'other': 0.0}
    """
    names = sorted(_tree.leaf_names(params), key=len, reverse=True)
    counted: Counter[str] = Counter()
    counted["params"] = sum(map(_bytes, jax.tree.leaves(params)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        counted[_group(_tree.path_name(path), names)] += _bytes(leaf)
    floats = [leaf for leaf in jax.tree.leaves(params) if has_gradient(dtype_of(leaf))]
    other = counted.pop("other", 0)
    sizes = dict(counted) | {"other": other}
    return MemoryAccount(sum(math.prod(jnp.shape(leaf)) for leaf in floats), sizes)


def _group(path: str, names: list[str]) -> str:
    """Returns the name of the field that a leaf is in: what stands before a parameter's path."""
    for name in names:
        before, found, _ = f"/{path}/".partition(f"/{name}/")
        if found and before:
            return before.rsplit("/", 1)[-1]
    return "other"


def _bytes(leaf: Any) -> int:
    if jnp.issubdtype(getattr(leaf, "dtype", np.bool_), jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    dtype = dtype_of(leaf)
    return 0 if dtype is None else math.prod(jnp.shape(leaf)) * dtype.itemsize
