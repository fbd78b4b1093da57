"""Values that differ between devices, inside of shard_map and pmap."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._dtypes import FLOAT16, dtype_of, has_gradient, is_real_float

Axes = tuple[str, ...]


def as_axes(axis_name: Any) -> Axes:
    """Returns the names of one axis, of several or of none."""
    if axis_name is None:
        return ()
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def mapped_axes() -> Axes:
    """Returns the axes of a mesh over which what is traced now runs once for each device."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def varying(value: Any) -> frozenset[str]:
    """Returns the mapped axes over which a value differs, as far as its type says."""
    aval: Any = value if isinstance(value, jax.ShapeDtypeStruct) else jax.typeof(value)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", None) or getattr(manual, "varying", None) or ())


def is_tracked(axes: Axes) -> bool:
    """Whether types say what differs: in shard_map, unless check_vma is off; not in pmap."""
    return bool(axes) and bool(varying(lax.axis_index(axes[0])))


def differing(values: Sequence[Any]) -> frozenset[str]:
    """Returns the mapped axes over which any of several values may differ."""
    mapped = mapped_axes()
    if not mapped:
        return frozenset()
    if not is_tracked(mapped):
        return frozenset(mapped)
    return frozenset[str]().union(*map(varying, values))


def check_axis_name(axis_name: Any, values: Sequence[Any], what: str) -> None:
    """Raises ValueError if values may differ over axes of a mesh that nobody named.

    Args:
        axis_name: what the user gave: a name, several, or None.
        values: arrays that are to be the same on all devices in the end.
        what: they are, for the message.
    """
    mapped = mapped_axes()
    unknown = [axis for axis in as_axes(axis_name) if axis not in mapped]
    if unknown:
        where = f"those mapped here are {quoted(mapped)}" if mapped else "no axis is mapped here"
        raise ValueError(
            f"There is no mapped axis {unknown[0]!r}: {where}. Name the axes of the shard_map or "
            "pmap around, and none in jit alone."
        )
    if axis_name is not None and not is_tracked(mapped):
        return
    missing = sorted(differing(values) - set(as_axes(axis_name)))
    if missing:
        named = missing[0] if len(missing) == 1 else tuple(missing)
        remedy = f"Give axis_name={named!r}"
        if not all(axis.isidentifier() and not axis.startswith("_") for axis in missing):
            remedy = "Give the pmap a name for its axis, and axis_name the same"
        if axis_name is None:
            remedy += "; or axis_name=() if they are the same on all devices already"
        raise ValueError(
            f"{what} may differ between devices along {quoted(missing)}, mapped by a shard_map or "
            f"pmap around, and each device would decide for itself. {remedy}."
        )


def check_own_loss(loss: Any, axes: Axes) -> None:
    """Raises ValueError if a loss is no device's own: its gradients would be averaged twice."""
    if is_tracked(axes) and (same := sorted(set(axes) - varying(loss))):
        raise ValueError(
            f"The loss is the same on all devices along {quoted(same)}, as jax.lax.pmean makes it, "
            f"but it is averaged over them by axis_name={axes!r}. Return the mean over this "
            "device's part of the batch, without a pmean or psum along these axes."
        )


def check_no_sum(loss: Any, params: Sequence[Any]) -> None:
    """Raises ValueError if gradients are the sum over devices of those of their losses."""
    if not is_tracked(mapped_axes()):
        return
    summed = sorted(varying(loss) - frozenset.intersection(*map(varying, params)))
    if summed:
        named = summed[0] if len(summed) == 1 else tuple(summed)
        raise ValueError(
            f"The loss differs between devices along {quoted(summed)}, mapped by a shard_map "
            "around, and parameters do not: their gradients are the sum over devices, not the "
            f"mean. Give axis_name={named!r} for means; or axis_name=() if the sum is meant."
        )


def axes_to_agree(axis_name: Any, grads: Sequence[Any], params: Sequence[Any]) -> Axes:
    """Returns the axes over which devices skip alike: those named, and of parts of parameters.

    Args:
        axis_name: what the user gave: a name, several, or None.
        grads: gradients, reduced.
        params: the parameters they are of; none if they are not known.

    Raises:
        ValueError: if a gradient may differ where its parameter does not, or nothing was named.
    """
    if axis_name is None or not is_tracked(mapped_axes()):
        check_axis_name(axis_name, grads, "Gradients")
        return as_axes(axis_name)
    check_axis_name(axis_name, [], "Gradients")
    axes = set(as_axes(axis_name))
    for grad, param in itertools.zip_longest(grads, params):
        own = frozenset[str]() if param is None else varying(param)
        if not varying(grad) <= own | axes:
            check_axis_name(axis_name, [grad], "Gradients")
    return tuple(sorted(axes.union(*map(varying, grads))))


def quoted(axes: Sequence[str]) -> str:
    """Returns the names of axes, for a message."""
    return ", ".join(map(repr, axes))


def vary(tree: Any, axes: Axes) -> Any:
    """Returns values of the type that differs over axes, so that gradients are a device's own."""

    def leaf_fn(leaf: Any) -> Any:
        missing = tuple(sorted(set(axes) - varying(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(leaf_fn, tree) if is_tracked(axes) else tree


def mean_of(value: jax.Array, axes: Axes) -> jax.Array:
    """Returns the mean over devices."""
    return lax.pmean(vary(value, axes), axes) if axes else value


def mean_gradient(grad: Any, param: Any, axes: Axes, dtype: Any) -> Any:
    """Returns the mean of a gradient over devices, reduced in a dtype.

    That of a parameter of which each device has a part was added up where it was gathered.
    """
    if not axes or not has_gradient(dtype_of(grad)):
        return grad
    own = varying(param) if is_tracked(axes) else frozenset[str]()
    total = reduced(grad, tuple(axis for axis in axes if axis not in own), dtype)
    return total / axis_size(axes)


def axis_size(axes: Axes) -> int:
    """Returns how many devices are along axes."""
    return math.prod(lax.axis_size(axis) for axis in axes)


def least_of_all(number: jax.Array, axes: Axes) -> jax.Array:
    """Returns the least that any device has, as far as they may differ: i32[]."""
    if is_tracked(axes):
        axes = tuple(axis for axis in axes if axis in varying(number))
    return lax.pmin(number, axes) if axes else number


def all_of(flag: jax.Array, axes: Axes) -> jax.Array:
    """Returns whether a flag is true on all devices: bool[]."""
    return least_of_all(flag.astype(jnp.int32), axes) == 1


def reduced(grad: jax.Array, axes: Axes, dtype: Any, *, scatter_axis: int | None = None) -> Any:
    """Returns the sum of gradients over devices, in their dtype, reduced in another.

    In f16 they are multiplied by the power of two with which the sum of the largest stays in range
    whatever the others are, and divided by it after, so that neither their size nor the number of
    devices makes them overflow or vanish.

    Args:
        grad: of this device.
        axes: over which to sum.
        dtype: of what is sent and added, if it is narrower than the gradient.
        scatter_axis: of the gradient, of which each device keeps its own part; None: all.
    """
    if not axes:
        return grad
    if not is_real_float(dtype_of(grad)) or dtype.itemsize >= grad.dtype.itemsize:
        return _summed(grad, axes, scatter_axis)
    if dtype != FLOAT16:
        return _summed(grad.astype(dtype), axes, scatter_axis).astype(grad.dtype)
    factor = _into_range(grad, axes)
    total = _summed((grad * factor).astype(dtype), axes, scatter_axis)
    return total.astype(grad.dtype) / factor


def _summed(x: jax.Array, axes: Axes, scatter_axis: int | None) -> jax.Array:
    if scatter_axis is None:
        return lax.psum(x, axes)
    return lax.psum_scatter(x, axes, scatter_dimension=scatter_axis, tiled=True)


def _into_range(grad: jax.Array, axes: Axes) -> jax.Array:
    """Returns the power of two by which the largest number becomes at most 2^15 / devices."""
    largest = lax.pmax(jnp.max(jnp.abs(grad), initial=0), axes)
    _, exponent = jnp.frexp(largest)
    room = 15 - math.ceil(math.log2(axis_size(axes)))
    # Infinite and NaN gradients stay what they are; a factor that is no normal number would not.
    shift = jnp.clip(room - exponent, -126, 126)
    factor = jnp.ldexp(jnp.ones((), grad.dtype), shift)
    return jnp.where(jnp.isfinite(largest) & (largest > 0), factor, 1)
