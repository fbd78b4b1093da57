"""Training on a mesh: where parameters and batches lie, and what moves between devices."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmp import _tree
from jaxmp._dtypes import dtype_of, has_gradient, is_real_float
from jaxmp._errors import did_you_mean
from jaxmp._mapped import (
    Axes,
    as_axes,
    check_axis_name,
    is_tracked,
    mapped_axes,
    quoted,
    reduced,
    varying,
)
from jaxmp._placement import Placement
from jaxmp.autocast._region import autocast_scope
from jaxmp.policy import Policy, get_policy

__all__ = ["Layout", "fsdp", "gather"]

_EVERYWHERE = PartitionSpec()


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """How parameters and batches are spread over a mesh, for `make_train_step(layout=...)`.

    A parameter that is sharded over an axis of the batch is gathered where it is multiplied, in the
    dtype it is multiplied in; its gradient is added up over the devices in the policy's
    `reduce_dtype`, and each device keeps its own part of it, of the parameter and of the
    optimizer's state (fully sharded data parallelism, ZeRO-3). Along other axes a product has its
    own part of the parameter (tensor parallelism). A parameter that is sharded over no axis is on
    every device (data parallelism).

    Args:
        mesh: a mesh; its axes become automatic ones.
        specs: for each parameter a `PartitionSpec` or `NamedSharding`, as a tree of the structure
            of the parameters or a prefix of it; by default all are on every device.
        batch_axes: the axis or axes of the mesh that the batch is sharded over; may be left out if
            there is one axis.
        regather: whether the backward pass gathers parameters again, so that no narrow copy of the
            model is kept. What `jax.checkpoint` recomputes is gathered again in any case.
        by_axis: whether a parameter that is sharded over several axes is gathered, and its gradient
            added up, along one axis after the other. For TPU pods: along one axis of 64 chips or
            more the compiler writes sums, which send twice as much as gathers and
            reduce-scatters; along two shorter ones it does not. Leave it off on GPUs.

    Raises:
        ValueError: if an axis is not one of the mesh, or if `batch_axes` is needed.

    Example:
        >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",))
        >>> layout = Layout(mesh, {"w": jax.P("data"), "b": jax.P()})
        >>> params = layout.place({"w": jnp.ones((16, 2)), "b": jnp.ones(2)})
        >>> params["w"].sharding.spec
        P('data',)
    """

    mesh: Any
    specs: Any = _EVERYWHERE
    _: dataclasses.KW_ONLY
    batch_axes: Any = None
    regather: bool = True
    by_axis: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", _automatic(self.mesh))
        object.__setattr__(self, "batch_axes", _batch_axes(self.mesh, self.batch_axes))
        leaves = jax.tree.leaves(self.specs, is_leaf=_is_spec)
        for spec in leaves:
            for axes in _axes_of(spec):
                _check_axes(self.mesh, axes)

    def shardings(self, tree: Any, params: Any = None) -> Any:
        """Returns a `NamedSharding` for each leaf of parameters, or of a state that holds some.

        Args:
            tree: parameters, an optimizer state, a `TrainState`: arrays or shapes. What has the
                name and shape of a parameter lies as that; what has its name and other axes shares
                those that come first; all else is on every device.
            params: the parameters; by default `tree.params`, or `tree` if it has none.

        Raises:
            ValueError: if a parameter has fewer axes than its spec, or one that does not divide.
        """
        own = self._specs_by_name(getattr(tree, "params", tree) if params is None else params)

        def leaf_fn(name: str, leaf: Any) -> NamedSharding:
            shape, found = np.shape(leaf), _parameter_in(name, own)
            spec = () if found is None else _shared(self.mesh, *own[found], shape)
            return NamedSharding(self.mesh, _partition_spec(spec))

        return _tree.map_named(leaf_fn, tree)

    def place(self, tree: Any, params: Any = None) -> Any:
        """Puts parameters, or a state that holds some, where they belong; see `shardings`.

        Raises:
            ValueError: if the mesh is an abstract one; see `shardings` for others.
        """
        if isinstance(self.mesh, AbstractMesh):
            raise ValueError(
                "The mesh of this layout is abstract, so nothing can be put on its devices: make a "
                "layout of a mesh of devices, or use shardings."
            )
        return jax.device_put(tree, self.shardings(tree, params))

    def create(self, make: Callable[[], Any]) -> Any:
        """Returns what a function makes, with each part made where it belongs.

        So a state that no device could hold alone can be made.

        Args:
            make: returns parameters or a state; it is jitted.

        Example:
            >>> layout = Layout(jax.make_mesh((len(jax.devices()),), ("data",)))
            >>> layout.create(lambda: {"w": jnp.zeros((16, 2))})["w"].shape
            (16, 2)
        """
        return jax.jit(make, out_shardings=self.shardings(jax.eval_shape(make)))()

    def place_batch(self, batch: Any) -> Any:
        """Spreads a batch over the mesh, by its leading axis.

        Args:
            batch: a pytree of arrays; of several processes, each gives its own part.

        Raises:
            ValueError: if the leading axis does not divide.
        """
        self.check_batch(batch, processes=jax.process_count())
        sharding = self.batch_sharding()
        return jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(sharding, np.asarray(leaf)), batch
        )

    def batch_sharding(self) -> NamedSharding:
        """Returns the sharding of every leaf of a batch."""
        return NamedSharding(self.mesh, PartitionSpec(self.batch_axes))

    def check_batch(self, batch: Any, *, processes: int = 1, microbatches: int = 1) -> None:
        """Raises ValueError if a batch does not divide over the devices.

        Args:
            batch: a pytree of arrays.
            processes: how many hold a part like this one.
            microbatches: into how many it is split first.
        """
        parts = math.prod(self.mesh.shape[axis] for axis in self.batch_axes)
        split = f" in {microbatches} microbatches" if microbatches > 1 else ""
        other = " or the number of microbatches" if split else ""

        def leaf_fn(name: str, leaf: Any) -> None:
            shape = np.shape(leaf)
            if not shape:
                raise ValueError(
                    f"Batch leaf {name!r} is a scalar, but every leaf of a batch is spread over "
                    "the devices by its leading axis. Broadcast it to one number for each row, or "
                    "let the loss function have it from elsewhere."
                )
            if shape[0] * processes % (parts * microbatches):
                raise ValueError(
                    f"Batch leaf {name!r} has shape {shape}, whose leading axis does not divide"
                    f"{split} over the {parts} devices along {quoted(self.batch_axes)}. Change the "
                    f"batch size{other}, or drop or pad the last batch."
                )

        _tree.map_named(leaf_fn, batch)

    def constrain(self, tree: Any, params: Any = None) -> Any:
        """Returns a tree within a jitted function, laid out as `shardings` says."""
        return lax.with_sharding_constraint(tree, self.shardings(tree, params))

    def constrain_gradients(self, grads: Any, params: Any) -> Any:
        """Returns gradients within a jitted function, each laid out as its parameter."""
        shardings = self.shardings(grads, params)
        return jax.tree.map(
            lambda grad, sharding: (
                lax.with_sharding_constraint(grad, sharding)
                if has_gradient(dtype_of(grad))
                else grad
            ),
            grads,
            shardings,
        )

    def constrain_batch(self, batch: Any, microbatches: int = 1) -> Any:
        """Returns a checked batch within a jitted function, spread over the mesh."""
        self.check_batch(batch, microbatches=microbatches)
        return lax.with_sharding_constraint(batch, self.batch_sharding())

    def scope(self) -> Any:
        """Within a jitted function, has the mesh's axes automatic, whatever mesh is set around.

        Raises:
            ValueError: in a `shard_map` or `pmap`.
        """
        if mapped := mapped_axes():
            raise ValueError(
                "A layout is for what jit alone runs over a whole mesh, but a shard_map or pmap "
                f"around maps {quoted(mapped)}. Give axis_name there, and no layout."
            )
        return jax.sharding.use_abstract_mesh(getattr(self.mesh, "abstract_mesh", self.mesh))

    def placements(self, params: Any, rows: int | None = None) -> list[Placement | None]:
        """Returns where each leaf of parameters lies; None for what has no gradient.

        Args:
            params: the parameters.
            rows: of the batch they meet, if it is known.
        """
        own = self._specs_by_name(params)
        place = Placement(
            self.mesh, (), self.batch_axes, self.regather, rows=rows, by_axis=self.by_axis
        )
        return [
            place.with_spec(own[name][0]) if has_gradient(dtype_of(leaf)) else None
            for name, leaf in zip(_tree.leaf_names(params), jax.tree.leaves(params), strict=True)
        ]

    def _specs_by_name(self, params: Any) -> dict[str, tuple[tuple[Axes, ...], tuple[int, ...]]]:
        """Returns the axes for each dimension of each parameter, and its shape."""
        specs = jax.tree.leaves(_broadcast(self.specs, params), is_leaf=_is_spec)
        leaves = zip(_tree.leaf_names(params), specs, jax.tree.leaves(params), strict=True)
        return {
            name: (_checked(self.mesh, name, spec, np.shape(leaf)), np.shape(leaf))
            for name, spec, leaf in leaves
        }


def fsdp(
    params: Any,
    mesh: Mesh | AbstractMesh,
    *,
    batch_axes: Any = None,
    shard_axes: Any = None,
    specs: Any = _EVERYWHERE,
    min_size: int = 2**14,
    regather: bool = True,
    by_axis: bool = False,
) -> Layout:
    """Returns a layout that shards the largest axis that divides of every large parameter.

    Args:
        params: the parameters, or their shapes. Of three axes or more the first is taken only if no
            other divides: it may be that of stacked layers.
        mesh: a mesh.
        batch_axes: see `Layout`.
        shard_axes: the axes of the mesh that parameters are sharded over; those of the batch if
            left out, a part of them to keep copies (as over the hosts of a cluster).
        specs: what is sharded already, over other axes (tensor parallelism); see `Layout`.
        min_size: elements below which a parameter stays on every device; a small one is not worth
            the exchanges.
        regather: see `Layout`.
        by_axis: see `Layout`.

    Warns:
        UserWarning: if no parameter is sharded.

    Example:
        >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",))
        >>> layout = fsdp({"w": jnp.ones((256, 1024)), "b": jnp.ones(1024)}, mesh)
        >>> layout.specs
        {'b': P(), 'w': P(None, 'data')}
    """
    base = Layout(mesh, specs, batch_axes=batch_axes)
    axes = base.batch_axes if shard_axes is None else as_axes(shard_axes)
    _check_axes(base.mesh, axes)
    parts = math.prod(base.mesh.shape[axis] for axis in axes)
    own = base._specs_by_name(params)

    def leaf_fn(name: str, leaf: Any) -> PartitionSpec:
        spec, shape = own[name]
        used = {axis for each in spec for axis in each}
        free = [i for i, size in enumerate(shape) if not spec[i] and size % parts == 0 and size]
        if used & set(axes) or not free or math.prod(shape) < min_size:
            return _partition_spec(spec)
        last = [i for i in free if i or len(shape) < 3] or free
        best = max(last, key=lambda i: shape[i])
        return _partition_spec([axes if i == best else each for i, each in enumerate(spec)])

    found = _tree.map_named(leaf_fn, params)
    used = [axis for spec in jax.tree.leaves(found, is_leaf=_is_spec) for axis in _axes_of(spec)]
    if own and parts > 1 and not any(used):
        warnings.warn(
            f"fsdp sharded none of {len(own)} parameters: each has fewer than min_size={min_size} "
            f"elements, or no axis that divides over {parts} devices. Give a smaller min_size, or "
            "jaxmp.sharding.Layout(mesh) for data parallelism.",
            stacklevel=2,
        )
    return Layout(
        base.mesh,
        found,
        batch_axes=base.batch_axes,
        regather=regather,
        by_axis=by_axis,
    )


def check_one_of(layout: Layout | None, axis_name: Any) -> None:
    """Raises ValueError if both ways of using several devices are asked for, or none that is."""
    if layout is not None and not isinstance(layout, Layout):
        raise ValueError(
            f"layout is a {type(layout).__name__}, but must be a jaxmp.sharding.Layout: give "
            "Layout(mesh, specs), or fsdp(params, mesh)."
        )
    if layout is not None and axis_name is not None:
        raise ValueError(
            f"Both layout and axis_name={axis_name!r} were given. A layout is for a step over a "
            "whole mesh, in jit alone; axis_name for one in a shard_map or pmap. Use one of them."
        )


def _automatic(mesh: Any) -> Any:
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            f"mesh is a {type(mesh).__name__}, but must be a jax.sharding.Mesh or AbstractMesh, "
            "such as jax.make_mesh((len(jax.devices()),), ('data',))."
        )
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names, axis_types=types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def _batch_axes(mesh: Any, axes: Any) -> Axes:
    if axes is None:
        if len(mesh.axis_names) != 1:
            raise ValueError(
                f"The mesh has the axes {quoted(mesh.axis_names)}. Say which of them the batch is "
                f"sharded over, such as batch_axes={mesh.axis_names[0]!r}."
            )
        return tuple(mesh.axis_names)
    if not isinstance(axes, str | tuple | list):
        raise ValueError(
            f"batch_axes is {axes!r}, but must be the name of an axis of the mesh, or several."
        )
    axes = as_axes(axes)
    _check_axes(mesh, axes)
    if len(set(axes)) < len(axes):
        raise ValueError(f"batch_axes is {axes}, which names an axis twice. Name it once.")
    return axes


def _check_axes(mesh: Any, axes: Axes) -> None:
    for axis in axes:
        if axis not in mesh.axis_names:
            raise ValueError(
                f"The mesh has no axis {axis!r}; it has {quoted(mesh.axis_names)}."
                f"{did_you_mean(str(axis), mesh.axis_names)}"
            )


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec | NamedSharding)


def _axes_of(spec: Any) -> Iterator[Axes]:
    """Yields for each dimension of a spec the axes of the mesh."""
    if not _is_spec(spec):
        raise ValueError(
            f"A spec is {spec!r}, but must be a jax.sharding.PartitionSpec or NamedSharding."
        )
    for axes in spec.spec if isinstance(spec, NamedSharding) else spec:
        if axes is PartitionSpec.UNCONSTRAINED:
            raise ValueError(
                f"A spec is {spec}, but a layout says of every dimension where it lies. Name the "
                "axes of the mesh, or None."
            )
        yield () if axes is None else as_axes(axes)


def _partition_spec(spec: Any) -> PartitionSpec:
    """Returns a spec as a compiled program gives it: nothing stands for the last axes."""
    used = max((i + 1 for i, axes in enumerate(spec) if axes), default=0)
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in spec[:used]))


def _broadcast(specs: Any, params: Any) -> Any:
    try:
        return jax.tree.broadcast(specs, params, is_leaf=_is_spec)
    except ValueError as error:
        raise ValueError(
            f"The specs of a layout do not fit the parameters: {_misfit(specs, params) or error}. "
            "Give a tree of the structure of the parameters, or one spec for all; of an "
            "optimizer's state pass the parameters too: layout.place(opt_state, params)."
        ) from error


def _misfit(specs: Any, params: Any) -> str:
    """Returns which parameter has no spec, or which spec is of none; "" if names do not tell."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec)]
    given = set(map(_tree.path_name, paths))
    found = set(_tree.leaf_names(params))
    lacking = sorted(name for name in found if not any(map(name.startswith, given)))
    unused = sorted(name for name in given if not any(each.startswith(name) for each in found))
    if lacking:
        return f"there is none for {lacking[0]!r}"
    return f"{unused[0]!r} is no parameter" if unused else ""


def _checked(mesh: Any, name: str, spec: Any, shape: tuple[int, ...]) -> tuple[Axes, ...]:
    """Returns the axes for each dimension of a parameter."""
    axes = tuple(_axes_of(spec))
    if len(axes) > len(shape):
        raise ValueError(
            f"Parameter {name!r} has shape {shape}, but its spec {spec} has {len(axes)} axes."
        )
    axes = axes + ((),) * (len(shape) - len(axes))
    # As a compiled program gives it: along an axis of one device nothing is cut.
    axes = tuple(tuple(axis for axis in each if mesh.shape[axis] > 1) for each in axes)
    for size, each in zip(shape, axes, strict=True):
        parts = math.prod(mesh.shape[axis] for axis in each)
        if size % parts:
            raise ValueError(
                f"Parameter {name!r} has shape {shape}, of which an axis of {size} does not divide "
                f"over the {parts} devices along {quoted(each)}. Shard another axis, or none: "
                "jaxmp.sharding.fsdp finds one that divides."
            )
    return axes


def _parameter_in(name: str, known: Any) -> str | None:
    """Returns the parameter that a leaf is of: its name is a part, the longest and the last."""
    parts = name.split("/")
    for length in range(len(parts), 0, -1):
        for start in range(len(parts) - length, -1, -1):
            part = "/".join(parts[start : start + length])
            if part in known:
                return part
    # Parameters that are one array have no name.
    return "" if "" in known else None


def _shared(
    mesh: Any, spec: tuple[Axes, ...], like: tuple[int, ...], shape: tuple[int, ...]
) -> list[Axes]:
    """Returns the axes for what is kept of a parameter, which shares its first dimensions."""
    shared: list[Axes] = []
    for axes, before, after in zip(spec, like, shape, strict=False):
        if before != after:
            break
        shared.append(axes)
    return shared + [()] * (len(shape) - len(shared))


def gather(
    x: Any,
    axis_name: str | Sequence[str],
    *,
    policy: Policy | str,
    axis: int = 0,
) -> jax.Array:
    """Returns all of a parameter of which each device has a part, within a `jax.shard_map`.

    What is sent is in the policy's compute dtype. The gradient is added up in its `reduce_dtype`,
    and each device keeps that of its own part, in the dtype of the parameter. Under
    `jax.checkpoint` the backward pass gathers again, and nothing whole is kept.

    Args:
        x: this device's part: f32, bf16 or f16[...].
        axis_name: the mapped axis or axes that it is cut over.
        policy: that of the step: gives `compute_dtype` and `reduce_dtype`.
        axis: of the parameter, along which it is cut.

    Returns:
        All of it, in the dtype of `x`: numbers of the compute dtype.

    Raises:
        ValueError: outside of a `shard_map` with this axis, or in one that does not know which
            values differ between devices (`check_vma=False`, `pmap`).

    Example:
        >>> auto = (jax.sharding.AxisType.Auto,)
        >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=auto)
        >>> def local(w, x):
        ...     return x @ gather(w, "data", policy="mixed_bfloat16")
        >>> specs = {"in_specs": (jax.P("data"), jax.P("data")), "out_specs": jax.P("data")}
        >>> y = jax.shard_map(local, mesh=mesh, **specs)(jnp.ones((16, 2)), jnp.ones((8, 16)))
        >>> y.shape
        (8, 2)
    """
    policy, axes = get_policy(policy), as_axes(axis_name)
    x = jnp.asarray(x)
    check_axis_name(axes, [], "Parameters")
    if not is_tracked(axes):
        raise ValueError(
            f"gather over {quoted(axes)} needs a shard_map that knows which values differ between "
            "devices, for the gradient: leave check_vma as it is, and use shard_map, not pmap."
        )
    if not set(axes) <= varying(x):
        raise ValueError(
            f"What is to be gathered over {quoted(axes)} is the same on all devices there: give it "
            "to the shard_map with a spec that cuts it."
        )
    with autocast_scope():
        return _gathered(x, axes, axis, policy.compute_dtype, policy.reduce_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gathered(
    x: jax.Array, axes: Axes, axis: int, compute_dtype: np.dtype, _reduce_dtype: np.dtype
) -> jax.Array:
    is_float = is_real_float(dtype_of(x))
    narrow = x.astype(compute_dtype) if is_float else x
    return lax.all_gather(narrow, axes, axis=axis, tiled=True).astype(x.dtype)


def _forward(x: jax.Array, *how: Any) -> tuple[jax.Array, None]:
    return _gathered(x, *how), None


def _backward(
    axes: Axes, axis: int, _dtype: np.dtype, reduce_dtype: np.dtype, _: None, grad: jax.Array
) -> tuple[jax.Array]:
    return (reduced(grad, axes, reduce_dtype, scatter_axis=axis),)


_gathered.defvjp(_forward, _backward)
