"""True f32 gradients of a function that runs under a policy."""

import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp import _tree
from jaxmp._dtypes import FLOAT16, dtype_of, has_gradient
from jaxmp._fp8_state import check_fp8_state
from jaxmp._loss import check_loss
from jaxmp._mapped import (
    as_axes,
    check_axis_name,
    check_no_sum,
    check_own_loss,
    mean_gradient,
    mean_of,
    vary,
)
from jaxmp._placement import Placement
from jaxmp.autocast import autocast_loss, check_runnable, with_given
from jaxmp.fp8._state import Given, new_meters, scales_for, seen_without
from jaxmp.loss_scale import NoOpLossScale, as_loss_scale
from jaxmp.policy import Policy, get_policy
from jaxmp.sharding import Layout, check_one_of


def value_and_grad(
    fun: Callable[..., Any],
    policy: Policy | str,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    loss_scale: Any = None,
    fp8_state: Any = None,
    layout: Layout | None = None,
    axis_name: str | Sequence[str] | None = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` under a policy: true f32 loss and gradients, whatever was computed in.

    The loss is widened to f32 before it is scaled, and what comes back is unscaled: it can be
    logged, clipped and averaged over devices as it is. An overflow shows as infinite or NaN
    gradients, while the loss stays finite if it is.

    Args:
        fun: returns a scalar loss, or `(loss, aux)` with `has_aux`. It is computed as `autocast`
            does: written for f32, and seeing f32, while its matrix multiplications and
            convolutions run in the policy's compute dtype.
        policy: a policy or the name of one.
        argnums: the argument or arguments to differentiate, as in `jax.value_and_grad`. Their
            float and complex leaves get gradients, other leaves a float0 zero.
        has_aux: whether `fun` returns a pair; `aux` has the dtypes that `fun` gives it.
        loss_scale: a loss scale, usually `get_loss_scale(opt_state)`; none if left out.
        fp8_state: what `init_fp8_state` or `fp8.update_state` gave, for delayed scaling.
        layout: how what is differentiated lies on a mesh, for XLA to cut up; gradients lie alike.
        axis_name: the mapped axis or axes of a `shard_map` or `pmap` around: the function is a mean
            over this device's part of a batch, and the mean over devices of loss and gradients is
            returned, reduced in the policy's `reduce_dtype`; `aux` stays that of the device. `()`
            for what `jax.grad` gives there: the sum over devices if a `shard_map` knows that
            parameters are the same on all, else the gradients of this device.

    Returns:
        A function of the arguments of `fun` that returns `(loss, grads)`, or
        `((loss, aux), grads)`: loss f32[], gradients f32 (f64 and complex leaves in their dtype)
        for parameters of any width. With an `fp8_state` there is a third result, how large the
        operands of products were, f32[..., 3, 256] by their names: what `fp8.update_state` takes.

    Raises:
        ValueError: if the policy names a recipe that is not there, or one that needs an
            `fp8_state`; if a `layout` is given for several arguments, or with an `axis_name`; when
            called, if the loss is no real scalar, if there is nothing to differentiate, if
            gradients would be summed over devices unasked or averaged twice, or if the `fp8_state`
            is of another function, policy or batch size.

    Warns:
        UserWarning: if anything is computed in f16 and no loss scale is given; when called, if the
            policy's recipe takes none of the matmuls.

    Example:
        >>> def loss_fn(params, x):
        ...     return jnp.mean((x @ params["w"]) ** 2)
        >>> grad_fn = value_and_grad(loss_fn, "mixed_bfloat16")
        >>> loss, grads = grad_fn({"w": jnp.ones((3, 1))}, jnp.ones((2, 3)))
        >>> loss, grads["w"].dtype
        (Array(9., dtype=float32), dtype('float32'))
    """
    policy = get_policy(policy)
    if loss_scale is None and FLOAT16 in policy.compute_dtypes():
        warnings.warn(
            "Gradients below 6e-8 vanish in float16. Give value_and_grad a loss_scale, such as "
            "jaxmp.get_loss_scale(opt_state), or jaxmp.NoOpLossScale() if none is wanted.",
            stacklevel=2,
        )
    loss_scale = NoOpLossScale() if loss_scale is None else as_loss_scale(loss_scale)
    check_runnable(policy)
    check_fp8_state(policy, fp8_state)
    check_one_of(layout, axis_name)
    if layout is not None and isinstance(argnums, Sequence):
        raise ValueError(
            f"A layout is of one argument, but argnums is {argnums}: put what is differentiated "
            "into one pytree."
        )
    grad_fn = checked_value_and_grad(
        fun,
        policy,
        argnums=argnums,
        has_aux=has_aux,
        loss_scale=loss_scale,
        fp8_state=fp8_state,
        weights={},
        layout=layout,
    )
    if layout is not None:
        return grad_fn
    if axis_name is None:
        return _not_summed(grad_fn, argnums, has_aux)
    return _averaged(grad_fn, policy, argnums, has_aux, as_axes(axis_name))


def _not_summed(
    grad_fn: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool
) -> Callable[..., Any]:
    """Returns the function, which refuses to add up gradients over devices unasked."""

    @functools.wraps(grad_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, *rest = grad_fn(*args, **kwargs)
        chosen = [args[position] for position in _positions(argnums, len(args))]
        floats = [leaf for leaf in jax.tree.leaves(chosen) if _has_gradient(leaf)]
        check_no_sum(value[0] if has_aux else value, floats)
        return value, *rest

    return wrapped


def _averaged(
    grad_fn: Callable[..., Any],
    policy: Policy,
    argnums: int | Sequence[int],
    has_aux: bool,
    axes: tuple[str, ...],
) -> Callable[..., Any]:
    """Returns what computes the means over devices."""

    @functools.wraps(grad_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        check_axis_name(axes, [], "Gradients")
        positions = _positions(argnums, len(args))
        own = [vary(arg, axes) if i in positions else arg for i, arg in enumerate(args)]
        value, grads, *seen = grad_fn(*own, **kwargs)
        chosen: Any = tuple(args[position] for position in positions)
        mean = functools.partial(mean_gradient, axes=axes, dtype=policy.reduce_dtype)
        grads = jax.tree.map(mean, grads, chosen if isinstance(argnums, Sequence) else chosen[0])
        loss, *aux = value if has_aux else (value,)
        check_own_loss(loss, axes)
        loss = mean_of(loss, axes)
        seen = jax.tree.map(functools.partial(mean_of, axes=axes), seen)
        return ((loss, *aux) if has_aux else loss), grads, *seen

    return wrapped


def checked_value_and_grad(
    fun: Callable[..., Any],
    policy: Policy,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    loss_scale: Any,
    fp8_state: Any,
    weights: Mapping[str, Given],
    layout: Layout | None = None,
) -> Callable[..., Any]:
    """`value_and_grad` of checked arguments, with weights that were quantized before."""
    state = fp8_state or {}
    times = loss_scale.loss_scale
    scales = {name: scales_for(product, times) for name, product in state.items()}

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        positions = _positions(argnums, len(args))
        chosen = tuple(args[position] for position in positions)
        low_fun = autocast_loss(fun, policy, _places(layout, args, positions))
        leaves, treedef = jax.tree.flatten(chosen)
        leaf_names = _tree.leaf_names(chosen)
        # Differentiating f32 copies keeps a narrow parameter's gradient from being rounded.
        floats = [_tree.widen_leaf(leaf) for leaf in leaves if _has_gradient(leaf)]
        if not floats:
            raise ValueError(
                f"Nothing to differentiate: argument {argnums} has no float or complex leaves "
                f"among its {len(leaves)}. Choose another argument with argnums."
            )

        def scaled_loss(floats: list[Any], meters: dict[str, Any]) -> Any:
            values = iter(floats)
            merged = [next(values) if _has_gradient(leaf) else leaf for leaf in leaves]
            full_args = list(args)
            for position, arg in zip(positions, treedef.unflatten(merged), strict=True):
                full_args[position] = arg
            given = dict(weights)
            for name, meter in meters.items():
                own = given.get(name, Given())
                given[name] = own._replace(scales=scales[name], meter=meter)
            is_given = weights or fp8_state is not None
            run = with_given(low_fun, given, state) if is_given else low_fun
            loss, aux = _split_aux(run(*full_args, **kwargs), has_aux)
            loss = check_loss(loss)
            return loss_scale.scale(loss), (loss, aux)

        grad = jax.grad(scaled_loss, (0, 1), has_aux=True)
        (grads, seen), (loss, aux) = grad(floats, new_meters(state))
        if not isinstance(loss_scale, NoOpLossScale):
            seen = {name: seen_without(each, times) for name, each in seen.items()}
        # What is no gradient but a next value was not scaled.
        names = [name for name, leaf in zip(leaf_names, leaves, strict=True) if _has_gradient(leaf)]
        values = iter(
            grad if _tree.is_overwritten(name) else unscaled
            for name, grad, unscaled in zip(names, grads, loss_scale.unscale(grads), strict=True)
        )
        grads = treedef.unflatten(
            [next(values) if _has_gradient(leaf) else _tree.no_gradient(leaf) for leaf in leaves]
        )
        grads = grads if isinstance(argnums, Sequence) else grads[0]
        if layout is not None:
            grads = layout.constrain_gradients(grads, chosen[0])
        value = (loss, aux) if has_aux else loss
        return (value, grads) if fp8_state is None else (value, grads, seen)

    return wrapped if layout is None else _within(layout, wrapped)


def _within(layout: Layout, fun: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with layout.scope():
            return fun(*args, **kwargs)

    return wrapped


def _places(
    layout: Layout | None, args: Sequence[Any], positions: Sequence[int]
) -> list[Placement | None]:
    """Returns where each leaf of the arguments lies, as far as a layout says."""
    if layout is None:
        return []
    places: list[Placement | None] = []
    rest = [arg for position, arg in enumerate(args) if position not in positions]
    rows = next((np.shape(leaf)[0] for leaf in jax.tree.leaves(rest) if np.ndim(leaf)), None)
    for position, arg in enumerate(args):
        if position in positions:
            places += layout.placements(arg, rows)
        else:
            places += [None] * len(jax.tree.leaves(arg))
    return places


def _positions(argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    given = argnums if isinstance(argnums, Sequence) else (argnums,)
    positions = tuple(operator.index(number) for number in given)
    if any(not -count <= position < count for position in positions):
        raise ValueError(
            f"argnums is {argnums}, but the function was called with {count} positional "
            "arguments. Pass what is differentiated by position."
        )
    positions = tuple(position % count for position in positions)
    if len(set(positions)) < len(positions):
        raise ValueError(f"argnums is {argnums}, which names one argument twice. Name it once.")
    return positions


def _has_gradient(leaf: Any) -> bool:
    return has_gradient(dtype_of(leaf))


def _split_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        return result, None
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"With has_aux=True the function must return (loss, aux), got {type(result).__name__}."
        )
    return result
