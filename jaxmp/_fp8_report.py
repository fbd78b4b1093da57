"""How well fp8 holds what the matmuls of a model multiply."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxmp import _tree
from jaxmp._dtypes import FLOAT32
from jaxmp._fp8_state import counted
from jaxmp._table import render
from jaxmp.autocast import autocast_loss, check_state, sites_of
from jaxmp.fp8 import BlockScaling, scale_for
from jaxmp.fp8._formats import E4M3, E5M2
from jaxmp.fp8._meter import BINS, largest_of, limit_of
from jaxmp.fp8._recipes import ROLES
from jaxmp.policy import Policy, get_policy

_NAMES = {"x": "activations", "w": "weight", "g": "gradient"}
# The share of numbers that a scale for all may lose before blocks are recommended.
_MOST_LOST = 0.01


@dataclasses.dataclass(frozen=True)
class OperandRow:
    """What one operand of a product loses in 8 bits.

    Attributes:
        product: the name of the product, and the number of the layer if it is in a scan.
        operand: "activations", "weight" or "gradient".
        fmt: the name of the dtype it is quantized to.
        largest: its largest number, rounded up to 1.75 times a power of two.
        scale: by which its codes are multiplied, one for all of it.
        saturated: the share of the numbers that are too large.
        flushed: the share of those that become zero, and are not.
        recommended: "mxfp8" if more than 1% are lost in these two ways; else the recipe that it
            has, or "current" if that has blocks.
    """

    product: str
    operand: str
    fmt: str
    largest: float
    scale: float
    saturated: float
    flushed: float
    recommended: str


@dataclasses.dataclass(frozen=True)
class Fp8Report:
    """What `fp8_report` returns; its text is a table.

    Attributes:
        rows: three for each product: activations, weight, gradient.
    """

    rows: tuple[OperandRow, ...]

    def recommended(self) -> dict[str, str]:
        """Returns for each product the recipe that holds all of its operands."""
        found: dict[str, str] = {}
        for row in self.rows:
            found[row.product] = max(found.get(row.product, ""), row.recommended)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns the rows as JSON takes them."""
        return {"rows": [dataclasses.asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        header = ["product", "operand", "format", "up to", "scale", "saturated", "flushed"]
        cells = [
            [
                row.product,
                row.operand,
                row.fmt,
                f"{row.largest:.3g}",
                f"{row.scale:.3g}",
                f"{row.saturated:.2%}",
                f"{row.flushed:.2%}",
                row.recommended,
            ]
            for row in self.rows
        ]
        right = set(range(3, len(header)))
        title = "fp8 with one scale for a tensor, whatever the recipe"
        return render(title, [*header, "recommended"], cells, right=right)


def fp8_report(
    fun: Callable[..., Any],
    policy: Policy | str,
    *args: Any,
    fp8_state: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Fp8Report:
    """Returns how much of what matmuls multiply is too large or too small for 8 bits.

    The loss and its gradients are computed once under the policy. All numbers are counted by powers
    of two, with one scale for a tensor also where the recipe has more: that of `fp8_state` if it
    has one, else that of now.

    Args:
        fun: the loss function, as for `init_fp8_state`.
        policy: a policy or the name of one.
        *args: its arguments, arrays: parameters and a batch, of several microbatches one.
        fp8_state: the state of delayed scaling, for the scales that it has.
        **kwargs: other arguments of the function.

    Returns:
        Three rows for each matmul that is quantized, in the order of the program.

    Raises:
        ValueError: if the policy has no recipe, or the `fp8_state` is of another function.
        TypeError: if arguments are traced, as inside of a jit.

    Warns:
        UserWarning: if no matmul is quantized.

    Example:
        >>> def loss_fn(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> x = jnp.ones((32, 16)).at[0, 0].set(1e6)  # an outlier
        >>> report = fp8_report(loss_fn, "mixed_float8", jnp.ones((16, 16)), x)
        >>> report.rows[0].largest, round(report.rows[0].flushed, 3), report.recommended()
        (1835008.0, 0.998, {'product': 'mxfp8'})
    """
    policy = get_policy(policy)
    if not policy.recipes():
        raise ValueError(
            f"The policy {policy} has no recipe, so nothing is quantized: use one such as "
            "'mixed_float8'."
        )
    if any(map(_tree.is_traced, jax.tree.leaves((args, kwargs)))):
        raise TypeError(
            "fp8_report counts numbers, but was given traced arrays: call it outside of jit."
        )
    low_fun = autocast_loss(fun, policy)
    sites = sites_of(low_fun, *args, **kwargs)
    if fp8_state is not None:
        check_state(sites, fp8_state)
    scales = {name: product.scale for name, product in (fp8_state or {}).items()}
    meters = {site.name: jnp.zeros((*site.shape, len(ROLES), BINS), FLOAT32) for site in sites}
    seen = counted(low_fun, scales, meters, args, kwargs, every=True)
    rows = []
    for site in sites:
        found = np.asarray(seen[site.name])
        for layer in np.ndindex(site.shape):
            name = "/".join([site.name, *map(str, layer)])
            for slot, role in enumerate(ROLES):
                counts, scale = found[(*layer, slot)], scales.get(site.name)
                own = None if scale is None else float(scale[(*layer, slot)])
                rows.append(_row(name, role, site.recipe, counts, own))
    return Fp8Report(tuple(rows))


def _row(name: str, role: str, recipe: Any, counts: np.ndarray, scale: float | None) -> OperandRow:
    # Of what is in blocks it is said how the format would do without.
    dtype = recipe.dtypes((role, role))[0]
    dtype = dtype if dtype in (E4M3, E5M2) else E4M3
    fmt = "e4m3" if dtype == E4M3 else "e5m2"
    largest = largest_of(jnp.asarray(counts))
    scale = float(scale_for(largest, fmt, power_of_two=True)) if scale is None else scale
    info = ml_dtypes.finfo(dtype)
    sizes = np.asarray(limit_of(jnp.arange(BINS, dtype=jnp.int32)), np.float64) / scale
    total = max(float(counts.sum()), 1.0)
    saturated = float(counts[sizes > float(info.max)].sum()) / total
    flushed = float(counts[sizes <= float(info.smallest_subnormal) / 2].sum()) / total
    enough = "current" if isinstance(recipe, BlockScaling) else str(recipe)
    best = "mxfp8" if saturated + flushed > _MOST_LOST else enough
    return OperandRow(
        name, _NAMES[role], dtype.name, float(largest), scale, saturated, flushed, best
    )
