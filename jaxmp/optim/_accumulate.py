"""Gradients of several calls, averaged in f32, for one update."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmp import _tree
from jaxmp._dtypes import widened
from jaxmp._errors import check_count
from jaxmp._mapped import vary, varying
from jaxmp.optim._checks import check_structure, inner_update
from jaxmp.optim._skip import fill_updates, inexact_only, minus_zeros


class AccumulateState(NamedTuple):
    """State of `accumulate`.

    Attributes:
        inner_state: the state of the wrapped transform.
        sums: weighted sums of the gradients of this window, at least f32; None for leaves without
            a gradient.
        weight: f32[], the sum of their weights.
        calls: i32[], how many calls of this window have been made.
    """

    inner_state: Any
    sums: Any
    weight: jax.Array
    calls: jax.Array


def accumulate(tx: optax.GradientTransformation, k: int) -> optax.GradientTransformationExtraArgs:
    """Runs a transform once in `k` calls, with the weighted mean of their gradients, in f32.

    Around `jaxmp.mixed_precision`: a window has one check, one loss scale and one skip then, and
    an overflow in any call ends with the window. The updates of the other calls are -0.0, the one
    number that changes no parameter when added. For microbatches inside of one jitted step,
    `jaxmp.make_train_step(..., microbatches=k)` needs no such state.

    `update` takes the extra argument `weight`, f32[], such as the number of tokens in the batch;
    1 if left out. Other extra arguments go to the transform with the last call of a window.

    Args:
        tx: any optax transform or chain.
        k: the number of calls, at least 1.

    Raises:
        ValueError: if `k` is no such number.

    Example:
        >>> tx, params = accumulate(optax.sgd(1.0), 2), {"w": jnp.ones(2)}
        >>> first, state = tx.update({"w": jnp.full(2, 1.0)}, tx.init(params), params, weight=1.0)
        >>> second, state = tx.update({"w": jnp.full(2, 4.0)}, state, params, weight=3.0)
        >>> first["w"], second["w"]
        (Array([-0., -0.], dtype=float32), Array([-3.25, -3.25], dtype=float32))
    """
    check_count(k, "k")
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        return AccumulateState(
            inner_state=_tree.strong(inner.init(params)),
            sums=jax.tree.map(_zeros, inexact_only(params, params)),
            weight=jnp.float32(0),
            calls=jnp.int32(0),
        )

    def update(
        updates: Any, state: Any, params: Any = None, *, weight: Any = 1.0, **extra_args: Any
    ) -> tuple[Any, Any]:
        check_structure(updates, params)
        leaves_like = updates if params is None else params
        factor = jnp.asarray(weight, jnp.float32)
        grads = inexact_only(jax.tree.map(_tree.widen_leaf, updates), leaves_like)
        sums = jax.tree.map(
            lambda s, g: s + factor.astype(s.dtype) * lax.convert_element_type(g, s.dtype),
            state.sums,
            grads,
        )
        total = state.weight + factor

        def run(sums: Any, total: Any, inner_state: Any, params: Any) -> tuple[Any, Any]:
            means = jax.tree.map(
                lambda s: s / jnp.where(total == 0, 1, total).astype(s.dtype), sums
            )
            merged = jax.tree.map(
                lambda mean, given: given if mean is None else mean,
                means,
                updates,
                is_leaf=lambda leaf: leaf is None,
            )
            new, new_state = inner_update(inner, merged, inner_state, params, extra_args)
            return inexact_only(new, leaves_like), new_state

        def wait(sums: Any, total: Any, inner_state: Any, params: Any) -> tuple[Any, Any]:
            shapes, _ = jax.eval_shape(run, sums, total, inner_state, params)
            return jax.tree.map(_no_update, shapes), inner_state

        last = state.calls == k - 1
        arguments = (sums, total, state.inner_state, params)
        if _tree.is_traced(last):
            new, inner_state = lax.cond(last, run, wait, *arguments)
        else:
            new, inner_state = run(*arguments) if last else wait(*arguments)
        kept = jax.tree.map(lambda s: jnp.where(last, jnp.zeros_like(s), s), sums)
        return fill_updates(new, leaves_like), AccumulateState(
            inner_state=inner_state,
            sums=kept,
            weight=jnp.where(last, jnp.float32(0), total),
            calls=jnp.where(last, jnp.int32(0), state.calls + 1),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _no_update(like: jax.ShapeDtypeStruct) -> jax.Array:
    return vary(minus_zeros(like), tuple(varying(like)))  # of the type that a shard_map gives it


def _zeros(param: Any) -> jax.Array:
    return jnp.zeros_like(param, dtype=widened(jnp.result_type(param)))  # where the parameter lies
