"""Flax NNX: models in mixed precision, by rules on the paths and types of their modules.

`wrap(model, policy)` is the model with its calls in mixed precision, and `value_and_grad` gives
true f32 gradients for `nnx.Optimizer(model, jaxmp.mixed_precision(tx, policy), wrt=nnx.Param)`.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx

from jaxmp import _fp8_report, _fp8_state, _gradients, _tree
from jaxmp._dtypes import FLOAT32, HALF_DTYPES
from jaxmp._modules import (
    Found,
    ModuleRules,
    PolicyTable,
    call,
    own_param_dtype,
    policy_table,
)
from jaxmp._nnx_modules import (
    enter_scopes,
    find_all,
    is_container,
    is_wrapped,
    leaves_by_module,
    modules_of,
    parent_of,
    subclass,
)
from jaxmp.audit import audit
from jaxmp.optim._skip import CLEAN, LARGEST_GRADIENT
from jaxmp.policy import Policy, get_policy

__all__ = ["fp8_report", "init_fp8_state", "unwrap", "value_and_grad", "wrap"]

M = TypeVar("M", bound=nnx.Module)


def wrap(
    model: M,
    policy: Policy | str,
    *,
    rules: Mapping[Any, Any] | Iterable[tuple[Any, Any]] | None = None,
    methods: Sequence[str] = ("__call__",),
) -> M:
    """Returns an NNX model whose calls are computed under a policy.

    The state, its paths and what is shared in it are those of `model`, of which this is a copy:
    checkpoints fit both. It works with `nnx.jit`, `nnx.split`, `nnx.Optimizer` and the rest, and
    inside may be `nnx.scan`, `nnx.vmap` and `nnx.remat`. Parameters (`nnx.Param`) are stored in
    `param_dtype`; batch statistics, RNG state and other variables stay as they are. A call computes
    as `jaxmp.autocast` does, its operations are named by the paths of modules
    ("blocks/0/attn/query"), and its result is cast to `output_dtype`.

    Args:
        model: an instance of `nnx.Module`.
        policy: a policy or the name of one. Its rules are regular expressions that are found in
            the path of a module, or of one of its parameters ("blocks/0/attn/query/kernel"). A rule
            holds for the modules inside too; of several the last wins. A module that is shared has
            the first of its paths, in the order of `nnx.iter_modules`.
        rules: more of them, after those of the policy; the pattern may be a type of modules too,
            such as `nnx.LayerNorm`, and then holds for its subclasses.
        methods: those that compute. Others, and modules inside that are called from outside, are
            not changed; a loss function in `jaxmp.nnx.value_and_grad` may call them all.

    A module that was given a `dtype` computes in that, whatever the rules say, and parameters that
    it is told to store in half stay half. `wrapped.policy_table(*args)`, with the arguments of a
    call, shows which module computes in what.

    Raises:
        TypeError: if `model` is no NNX module, or a class instead of an instance.
        ValueError: if it is wrapped already, lacks a method, or a rule holds for nothing.

    Example:
        >>> model = wrap(nnx.Linear(2, 4, rngs=nnx.Rngs(0)), "mixed_bfloat16")
        >>> model.kernel.dtype, model(jnp.ones((1, 2))).dtype
        (dtype('float32'), dtype('float32'))
        >>> print(model.policy_table(jnp.ones((1, 2))))
        Policies of modules
         module   type     params    products     policy           from
         ────────────────────────────────────────────────────────────────
         (root)   Linear   float32   1 bfloat16   mixed_bfloat16   policy
    """
    _check(model)
    missing = [name for name in methods if not callable(getattr(type(model), name, None))]
    if missing:
        raise ValueError(
            f"{type(model).__name__} has no method {missing[0]!r}: name those that compute, "
            "wrap(model, policy, methods=[...])."
        )
    parsed = ModuleRules.parse(policy, rules)
    modules = modules_of(model)
    leaves = leaves_by_module(model, modules)
    names = [f"{path}/{name}".lstrip("/") for path, own in leaves.items() for name in own]
    unused = parsed.unused(modules, names)
    if unused:
        raise ValueError(parsed.message_of_unused(unused, modules, map(type, modules.values())))
    copy = _stored(model, modules, find_all(parsed, modules, leaves))
    copy.__class__ = _wrapped_class(type(model), parsed, tuple(methods))
    return copy


def unwrap(model: M) -> M:
    """Returns the model that was wrapped: a copy with the state of now, in the dtypes of now.

    Example:
        >>> model = wrap(nnx.Linear(2, 4, rngs=nnx.Rngs(0)), "mixed_bfloat16")
        >>> type(unwrap(model)) is nnx.Linear
        True
    """
    if not is_wrapped(model):
        raise TypeError(f"{type(model).__name__} is not wrapped: pass what jaxmp.nnx.wrap gave.")
    copy = nnx.clone(model)
    copy.__class__ = vars(type(model))["wrapped_class"]
    return copy


def value_and_grad(
    loss_fn: Callable[..., Any],
    policy: Policy | str,
    *,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    loss_scale: Any = None,
    fp8_state: Any = None,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` under a policy: true f32 loss and gradients.

    The whole loss function is computed under the policy, with its modules under the rules that the
    model was wrapped with, if it was. If a gradient is not finite, so that the optimizer will skip
    the step, batch statistics, RNG state and all other variables stay as they were, bit for bit.

    Args:
        loss_fn: called as `loss_fn(model, ...)`; returns a scalar loss, or `(loss, aux)`.
        policy: a policy or the name of one.
        wrt: which variables of the model are differentiated: a filter of NNX.
        has_aux: whether `loss_fn` returns a pair.
        loss_scale: a loss scale, usually `jaxmp.get_loss_scale(optimizer.opt_state)`.
        fp8_state: what `init_fp8_state` or `jaxmp.fp8.update_state` gave, for delayed scaling.

    Returns:
        A function of the arguments of `loss_fn` that returns `(loss, grads)`, or
        `((loss, aux), grads)`: loss f32[], gradients f32 in an `nnx.State`, for
        `optimizer.update(model, grads)`. With an `fp8_state` there is a third result, what
        `jaxmp.fp8.update_state` takes.

    Warns:
        UserWarning: if anything is computed in f16 and no loss scale is given.

    Example:
        >>> model = wrap(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), "mixed_bfloat16")
        >>> grad_fn = value_and_grad(lambda model, x: jnp.mean(model(x)), "mixed_bfloat16")
        >>> loss, grads = grad_fn(model, jnp.ones((3, 2)))
        >>> loss.dtype, grads["kernel"].shape, grads["kernel"].dtype
        (dtype('float32'), (2, 1), dtype('float32'))
    """
    policy = get_policy(policy)

    @functools.wraps(loss_fn)
    def wrapped(model: Any, *args: Any, **kwargs: Any) -> Any:
        nodes = (model, args, kwargs)
        fun, states = _functional(loss_fn, policy, nodes, wrt, has_aux=has_aux)
        grad_fn = _gradients.value_and_grad(
            fun,
            policy,
            has_aux=True,
            loss_scale=_without_variables(loss_scale),
            fp8_state=fp8_state,
        )
        (loss, (aux, changed)), grads, *seen = grad_fn(*states)
        finite = _tree.first_nonfinite(grads, LARGEST_GRADIENT) == CLEAN
        _update(nodes, changed, finite)
        return ((loss, aux) if has_aux else loss), grads[0], *seen

    return wrapped


def init_fp8_state(
    loss_fn: Callable[..., Any], policy: Policy | str, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """`jaxmp.init_fp8_state` for a loss function of an NNX model, which stays as it is.

    Args:
        loss_fn: called as `loss_fn(model, ...)`; returns a scalar loss, or `(loss, aux)`.
        policy: a policy or the name of one.
        model: an NNX module.
        *args: the other arguments of `loss_fn`.
        **kwargs: those by name.

    Returns:
        What `jaxmp.init_fp8_state` does, and it raises and warns as that does.

    Example:
        >>> model = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
        >>> policy = jaxmp.Policy(recipe="delayed(history=16)")
        >>> state = init_fp8_state(lambda m, x: jnp.mean(m(x)), policy, model, jnp.ones((16, 32)))
        >>> [product.history.shape for product in state.values()]
        [(3, 16)]
    """
    policy = get_policy(policy)
    nodes = (model, args, kwargs)
    fun, states = _functional(loss_fn, policy, nodes, nnx.Param, has_aux=None)
    return _fp8_state.init_fp8_state(fun, policy, *states)


def fp8_report(
    loss_fn: Callable[..., Any],
    policy: Policy | str,
    model: Any,
    *args: Any,
    fp8_state: Any = None,
    **kwargs: Any,
) -> _fp8_report.Fp8Report:
    """`jaxmp.fp8_report` for a loss function of an NNX model, which stays as it is.

    Args:
        loss_fn: called as `loss_fn(model, ...)`; returns a scalar loss, or `(loss, aux)`.
        policy: a policy or the name of one.
        model: an NNX module.
        *args: the other arguments of `loss_fn`.
        fp8_state: the state of delayed scaling, for the scales that it has.
        **kwargs: arguments by name.

    Returns:
        What `jaxmp.fp8_report` does, and it raises and warns as that does.

    Example:
        >>> model, x = nnx.Linear(32, 16, rngs=nnx.Rngs(0)), jnp.ones((16, 32))
        >>> fp8_report(lambda m, x: jnp.mean(m(x)), "mixed_float8", model, x).recommended()
        {'product': 'current'}
    """
    policy = get_policy(policy)
    nodes = (model, args, kwargs)
    fun, states = _functional(loss_fn, policy, nodes, nnx.Param, has_aux=None)
    return _fp8_report.fp8_report(fun, policy, *states, fp8_state=fp8_state)


def _functional(
    loss_fn: Callable[..., Any], policy: Policy, nodes: Any, wrt: Any, *, has_aux: bool | None
) -> tuple[Callable[..., Any], tuple[Any, Any, Any]]:
    """Returns a loss of a model as a function of states, and these states.

    Args:
        loss_fn: a function of the model and more.
        policy: what it is computed under.
        nodes: the model, other arguments, and those by name.
        wrt: which variables of the model are the first of the states.
        has_aux: whether `loss_fn` returns a pair; None if that is to be seen.

    Returns:
        A function of three states that returns the loss, and a pair: what else `loss_fn` returns,
        and what it has changed. And the states: what is differentiated, other parameters, the rest.
    """
    model = nodes[0]
    _check_module(model)
    rules = _rules_of(model, policy)

    def of_model(path: Any, value: Any) -> bool:
        return path[0] == 0 and nnx.filterlib.to_predicate(wrt)(path[1:], value)

    graphdef, wanted, params, rest = nnx.split(nodes, of_model, nnx.Param, ...)

    def fun(wanted: Any, params: Any, rest: Any) -> Any:
        inner, args, kwargs = _merged(graphdef, wanted, params, rest)
        before, statics = _values(inner, args, kwargs), _statics(inner)
        enter_scopes(inner, rules, policy)
        results = loss_fn(inner, *args, **kwargs)
        _check_statics(statics, inner)
        is_pair = isinstance(results, tuple) if has_aux is None else has_aux
        loss, aux = results if is_pair else (results, None)
        return loss, (aux, _changed(before, inner, args, kwargs))

    low = fun if policy.compute_dtypes() & HALF_DTYPES else rules.autocast(fun)
    return low, (wanted, _tree.cast_floats(params, FLOAT32), rest)


def _check_module(model: Any) -> None:
    if isinstance(model, type) and issubclass(model, nnx.Module):
        raise TypeError(
            f"{model.__name__} is a class: pass an instance, {model.__name__}(..., rngs=...)."
        )
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"{type(model).__name__} is no NNX module. Pass an instance of nnx.Module; for Linen "
            "use jaxmp.linen, for functions jaxmp.autocast and jaxmp.value_and_grad."
        )


def _check(model: Any) -> None:
    _check_module(model)
    for path, module in nnx.iter_modules(model):
        if is_wrapped(module):
            name = "/".join(map(str, path))
            where = f", at {name!r}" if name else ""
            raise ValueError(
                f"This {type(module).__name__}{where} is wrapped already. Wrap the outermost "
                "module once, with all rules; jaxmp.nnx.unwrap gives the model without."
            )


def _policy_table(self: Any, *args: Any, **kwargs: Any) -> PolicyTable:
    """Returns which module computes in what, for the arguments of a call; runs nothing."""
    graphdef, params, rest = nnx.split((self, args, kwargs), nnx.Param, ...)
    applied = _applied(type(self), self.computing_methods[0], graphdef)
    report = audit(applied, _tree.cast_floats(params, FLOAT32), rest, target=None)
    products = [(row.path, row.operand_dtypes) for row in report.products]
    modules = modules_of(self)
    leaves = leaves_by_module(self, modules)
    found = find_all(self.module_rules, modules, leaves)
    shown = {
        path: (_as_written(module), found[path])
        for path, module in modules.items()
        if not is_container(module)
    }
    return policy_table(self.module_rules, shown, leaves, products)


def _as_written(module: Any) -> Any:
    return unwrap(module) if is_wrapped(module) else module


@functools.lru_cache(maxsize=1024)
def _wrapped_class(cls: Any, rules: ModuleRules, methods: Sequence[str]) -> Any:
    def computing(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(cls, name))
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            nodes = (self, args, kwargs)
            graphdef, params, rest = nnx.split(nodes, nnx.Param, ...)
            full = _tree.cast_floats(params, FLOAT32)
            results, changed = call(_applied, (type(self), name, graphdef), full, rest)
            _update(nodes, changed)
            return results

        return method

    namespace = {
        "wrapped_class": cls,
        "module_rules": rules,
        "computing_methods": methods,
        "policy_table": _policy_table,
        "__reduce__": lambda self: (_rewrap, (unwrap(self), rules, methods)),
    }
    return subclass(cls, namespace | {name: computing(name) for name in methods})


def _rewrap(model: Any, rules: ModuleRules, methods: Sequence[str]) -> Any:
    model.__class__ = _wrapped_class(type(model), rules, methods)
    return model


def _applied(cls: Any, method: str, graphdef: Any) -> Callable[..., Any]:
    """Returns what a method computes, as a function of the state of a model and its arguments."""
    rules = cls.module_rules

    def fun(params: Any, rest: Any) -> Any:
        model, args, kwargs = _merged(graphdef, params, rest)
        before, statics = _values(model, args, kwargs), _statics(model)
        enter_scopes(model, rules, rules.policy)
        results = getattr(model, method)(*args, **kwargs)
        _check_statics(statics, model)
        return rules.policy.cast_to_output(results), _changed(before, model, args, kwargs)

    return rules.autocast(fun)


def _merged(graphdef: Any, *states: Any) -> Any:
    """Returns nodes with variables of their own, which may be changed where this is called."""
    return nnx.merge(graphdef, *jax.tree.map(lambda leaf: leaf, states))


def _values(*nodes: Any) -> dict[Any, Any]:
    """Returns the values of all variables by path."""
    flat = nnx.to_flat_state(nnx.state(nodes))
    return {path: jax.tree.leaves(variable) for path, variable in flat}


def _changed(before: dict[Any, Any], *nodes: Any) -> nnx.State:
    """Returns the state of the variables that have other values than before, or are new."""
    flat = nnx.to_flat_state(nnx.state(nodes))
    changed = [(path, new) for path, new in flat if not _is_same(new, before.get(path))]
    return nnx.from_flat_state(changed)


def _is_same(variable: Any, before: Sequence[Any] | None) -> bool:
    leaves = jax.tree.leaves(variable)
    if before is None or len(leaves) != len(before):
        return False
    return all(new is old for new, old in zip(leaves, before, strict=True))


def _update(nodes: Any, changed: nnx.State, finite: Any = None) -> None:
    """Writes what a call has changed into the variables outside, in the dtypes that they have."""
    old = dict(nnx.to_flat_state(nnx.state(nodes)))
    kept, new = [], []
    for path, variable in nnx.to_flat_state(changed):
        if path not in old:
            new.append((path, variable))
        elif jax.tree.structure(variable) != jax.tree.structure(old[path]):
            kept.append((path, variable))  # what is sown grows
        else:
            value = _tree.like(variable, old[path])
            if finite is not None:
                value = _tree.select_tree(finite, value, old[path])
            kept.append((path, value))
    nnx.update(nodes, nnx.from_flat_state(kept))
    for path, variable in new:
        parent = nodes
        for key in path[:-1]:
            is_item = isinstance(key, int) or isinstance(parent, dict)
            parent = parent[key] if is_item else getattr(parent, str(key))
        setattr(parent, path[-1], variable)


def _statics(model: Any) -> dict[tuple[str, str], str]:
    """Returns as text the modules' types and the numbers and texts among their attributes."""
    found: dict[tuple[str, str], str] = {}
    for path, module in modules_of(model).items():
        found[path, ""] = type(module).__name__
        for name, value in vars(module).items():
            if isinstance(value, bool | int | float | str | None) and not name.startswith("_"):
                found[path, name] = repr(value)
    return found


def _check_statics(before: dict[tuple[str, str], str], model: Any) -> None:
    """Raises ValueError if a call changed what is no array: nobody outside would see it."""
    for (path, name), value in _statics(model).items():
        if before.get((path, name)) == value:
            continue
        where = f"{type(model).__name__}{f' at {path!r}' if path else ''}"
        if name:
            raise ValueError(
                f"A call of this {where} sets {name!r} to {value}, which would be lost: the call "
                "is traced. Keep it in an nnx.Variable, or set it outside of the call."
            )
        raise ValueError(
            f"A call of this {where} makes a {value}, which would be lost: the call is traced. "
            "Make modules in __init__."
        )


def _without_variables(tree: Any) -> Any:
    """Returns a pytree with the arrays of variables, as of the state of an `nnx.Optimizer`."""
    return jax.tree.map(
        lambda x: x[...] if isinstance(x, nnx.Variable) else x,
        tree,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


def _stored(model: Any, modules: Mapping[str, Any], found: Mapping[str, Found]) -> Any:
    """Returns a copy of a model with parameters in the dtypes that their policies store."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def store(name: str, leaf: Any) -> Any:
        path = parent_of(name, found)
        own = own_param_dtype(modules[path])
        return _tree.cast_leaf(leaf, found[path].policy.param_dtype if own is None else own)

    return _merged(graphdef, _tree.map_named(store, params), rest)


def _rules_of(model: Any, policy: Policy) -> ModuleRules:
    return model.module_rules if is_wrapped(model) else ModuleRules.parse(policy, None)
