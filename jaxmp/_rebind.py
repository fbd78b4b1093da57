"""Computing an equation anew: with other values, other dtypes, or other jaxprs inside."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, Var, jaxpr_as_fun
from jax.interpreters.partial_eval import DynamicJaxprTracer

from jaxmp._jaxpr import inner_jaxprs, open_jaxpr


def spec_of(aval: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns shape, sharding and manual axes of an abstract value, in another dtype."""
    explicit = None if aval.sharding.mesh.empty else aval.sharding
    manual = {}
    if getattr(aval, "vma", None):
        manual["vma"] = aval.vma
    elif getattr(getattr(aval, "manual_axis_type", None), "varying", None):
        manual["manual_axis_type"] = aval.manual_axis_type
    return jax.ShapeDtypeStruct(aval.shape, dtype, sharding=explicit, **manual)


@functools.cache
def _empty_jaxpr(inputs: int, outputs: int) -> Jaxpr:
    """Returns a jaxpr of so many inputs and outputs, as something to be filled in."""
    return jax.make_jaxpr(lambda *_: (0.0,) * outputs)(*(0.0,) * inputs).jaxpr


def evaluate(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Computes an equation with other values, at the source line and in the scopes it has."""
    operation = _operation_of(eqn, args)
    if operation is None:
        return _evaluate_alone(eqn, args)
    with in_place_of(eqn):
        results = operation(*args)
    return list(results) if eqn.primitive.multiple_results else [results]


@contextlib.contextmanager
def in_place_of(eqn: JaxprEqn) -> Iterator[None]:
    """Gives what is computed the source line and the scopes that an equation has."""
    scopes = source_info_util.current_name_stack() + eqn.source_info.name_stack
    line = source_info_util.user_context(eqn.source_info.traceback, name_stack=scopes)
    with line, eqn.ctx.manager:
        yield


def _evaluate_alone(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    # A constant among the inputs is given as an argument too: its dtype may be another one.
    inputs = _empty_jaxpr(len(args), len(args)).invars
    jaxpr = part_of([eqn.replace(invars=list(inputs))], inputs, eqn.outvars)
    return list(jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*args))


def part_of(eqns: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Var]) -> Jaxpr:
    """Returns the jaxpr of some equations."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return _empty_jaxpr(len(inputs), len(outputs)).replace(
        invars=list(inputs), outvars=list(outputs), eqns=list(eqns), effects=effects
    )


def in_front(args: Sequence[Any], dims: Sequence[Any]) -> list[Any]:
    """Returns the operands of a vmapped operation, all with the mapped axis in front."""
    size = next(a.shape[dim] for a, dim in zip(args, dims, strict=True) if isinstance(dim, int))
    return [
        jnp.moveaxis(arg, dim, 0)
        if isinstance(dim, int)
        else jnp.broadcast_to(arg, (size, *jnp.shape(arg)))
        for arg, dim in zip(args, dims, strict=True)
    ]


def shard_map_arguments(eqn: JaxprEqn) -> dict[str, Any]:
    """Returns the keyword arguments of `jax.shard_map` that make an equation like this one."""
    params = eqn.params
    axes = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
    return {
        "mesh": params["mesh"],
        "in_specs": tuple(params["in_specs"]),
        "out_specs": tuple(params["out_specs"]),
        "axis_names": set(axes),
        "check_vma": params["check_vma"],
    }


def inlined(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a jitted function that leaves no call in a jaxpr, as those of jax.numpy."""
    kinds: Any = getattr(jax, "Inline", None)  # JAX 0.12 has several
    early = True if kinds is None else kinds.JAX_EARLY
    return jax.jit(fun, inline=early)


def _operation_of(eqn: JaxprEqn, args: Sequence[Any]) -> Callable[..., Any] | None:
    """Returns a plain operation as a function of its operands.

    Where it is differentiated that is a jitted function, the same for the same operation, since JAX
    differentiates and transposes a call once, and an operation each time; so does jax.numpy.
    """
    if inner_jaxprs(eqn) or eqn.effects:
        return None
    if all(isinstance(arg, DynamicJaxprTracer) for arg in args if isinstance(arg, Tracer)):
        return functools.partial(eqn.primitive.bind, **eqn.params)
    try:
        return _operation(eqn.primitive, tuple(sorted(eqn.params.items())))
    except TypeError:  # parameters that have no hash
        return None


@functools.lru_cache(maxsize=8192)
def _operation(primitive: Primitive, params: Sequence[tuple[str, Any]]) -> Callable[..., Any]:
    def operation(*args: Any) -> Any:
        return primitive.bind(*args, **dict(params))

    return inlined(operation)


def with_jaxprs(eqn: JaxprEqn, jaxprs: Sequence[ClosedJaxpr]) -> JaxprEqn:
    """Returns an equation with other jaxprs inside, in the order of `inner_jaxprs`."""
    name, params = eqn.primitive.name, dict(eqn.params)
    if name == "while":
        params |= dict(zip(("cond_jaxpr", "body_jaxpr"), jaxprs, strict=True))
    elif name == "cond":
        params["branches"] = tuple(jaxprs)
    else:
        (key,) = (k for k, value in params.items() if isinstance(value, ClosedJaxpr | Jaxpr))
        (closed,) = jaxprs
        params[key] = closed if isinstance(params[key], ClosedJaxpr) else closed.jaxpr
    return eqn.replace(params=params)


def rewritten_in(eqn: JaxprEqn, dtype: Any) -> JaxprEqn:
    """Returns an equation whose parameters say that it computes floats of another dtype."""
    names = [name for name in ("preferred_element_type", "out_dtype") if eqn.params.get(name)]
    changed: dict[str, Any] = dict.fromkeys(names, dtype)
    update = eqn.params.get("update_jaxpr")
    if update is not None:
        changed["update_jaxpr"] = _update_in(update, dtype)
    return eqn.replace(params={**eqn.params, **changed}) if changed else eqn


def _update_in(update: Jaxpr, dtype: Any) -> Jaxpr:
    """Returns the jaxpr of how a scatter combines two numbers, for numbers of another dtype."""
    closed = ClosedJaxpr(open_jaxpr(update), ())
    number = jax.ShapeDtypeStruct((), dtype)
    return jax.make_jaxpr(jaxpr_as_fun(closed))(number, number).jaxpr
