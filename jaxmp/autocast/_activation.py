"""Activation functions: each is one step from a narrow array to another, and so is its derivative.

Inside of it numbers are f32, and are rounded once. JAX would keep three factors of the derivative
of a GELU for the backward pass, each a narrow array; the derivative itself is one.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.interpreters import ad, batching, mlir

from jaxmp._dtypes import FLOAT16, FLOAT32
from jaxmp._jaxpr import aval_of, inner_jaxprs
from jaxmp._rebind import inlined, part_of
from jaxmp.autocast import _rules
from jaxmp.autocast._lookahead import is_float, is_island, is_stored_narrow
from jaxmp.autocast._region import Region
from jaxmp.autocast._values import fits


class Activation(NamedTuple):
    """An elementwise function of one array, in several equations.

    Attributes:
        jaxpr: of these equations alone.
        inputs: the variables that it takes: the array, and numbers.
        result: the variable that it gives.
        members: the ids of its equations.
        steps: its operations, with those inside of calls.
        key: equal for equal functions in the same scope.
    """

    jaxpr: Jaxpr
    inputs: tuple[Var, ...]
    result: Var
    members: frozenset[int]
    steps: tuple[JaxprEqn, ...]
    key: tuple[object, ...]


def find_activations(jaxpr: Jaxpr) -> dict[int, Activation]:
    """Returns the activation functions in a jaxpr, by the id of the first equation of each."""
    groups = [(array, part) for array, eqns in _groups(jaxpr).items() for part in _parts(eqns)]
    groups = [(array, part) for array, part in groups if _is_curved(part)]
    if not groups:
        return {}
    users, made_at = _users(jaxpr), _made_at(jaxpr)
    found = {}
    for array, eqns in groups:
        members = frozenset(map(id, eqns))
        results = [v for eqn in eqns for v in eqn.outvars if not users.get(v, set()) <= members]
        if len(results) != 1 or not is_float(results[0]):
            continue
        numbers = tuple(_numbers(eqns))
        first = made_at[eqns[0].outvars[0]]
        if all(is_float(number) and made_at[number] < first for number in numbers):
            inputs, (result,) = (array, *numbers), results
            part, key = part_of(eqns, inputs, results), _key(eqns, inputs, result)
            steps = tuple(_steps(eqns))
            found[id(eqns[0])] = Activation(part, inputs, result, members, steps, key)
    return found


def _groups(jaxpr: Jaxpr) -> dict[Var, list[JaxprEqn]]:
    """Returns the elementwise equations of one float array and numbers, by the array."""
    source: dict[Var, Var] = {}
    groups: dict[Var, list[JaxprEqn]] = {}
    for eqn in jaxpr.eqns:
        if not _is_elementwise(eqn):
            continue
        arrays = {source.get(v, v) for v in eqn.invars if isinstance(v, Var) and aval_of(v).shape}
        (out,) = eqn.outvars
        if len(arrays) != 1:
            continue
        (array,) = arrays
        if is_float(array) and aval_of(array).shape == aval_of(out).shape:
            source[out] = array
            groups.setdefault(array, []).append(eqn)
    return groups


def _parts(eqns: Sequence[JaxprEqn]) -> list[list[JaxprEqn]]:
    """Returns equations that use each other's results together, and others apart."""
    parts: list[tuple[set[Var], list[JaxprEqn]]] = []
    for eqn in eqns:
        used = {atom for atom in eqn.invars if isinstance(atom, Var)}
        joined = [part for part in parts if not used.isdisjoint(part[0])]
        parts = [part for part in parts if used.isdisjoint(part[0])]
        made = {*eqn.outvars}.union(*(made for made, _ in joined))
        parts.append((made, [*(each for _, part in joined for each in part), eqn]))
    order = {id(eqn): i for i, eqn in enumerate(eqns)}
    return [sorted(part, key=lambda eqn: order[id(eqn)]) for _, part in parts]


def _is_elementwise(eqn: JaxprEqn) -> bool:
    if len(eqn.outvars) != 1 or eqn.effects:
        return False
    if eqn.primitive.name == "jit":
        return all(_is_elementwise(e) for inner in inner_jaxprs(eqn) for e in inner.jaxpr.eqns)
    return eqn.primitive.name in _rules.OF_ELEMENTS


def _steps(eqns: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    for eqn in eqns:
        inners = inner_jaxprs(eqn)
        for inner in inners:
            yield from _steps(inner.jaxpr.eqns)
        if not inners:
            yield eqn


def _is_curved(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether JAX would keep more than one array: of a curved function, with a factor."""
    names = [step.primitive.name for step in _steps(eqns)]
    return not _rules.CURVED.isdisjoint(names) and len(names) > 1


def _users(jaxpr: Jaxpr) -> dict[Var, set[int]]:
    """Returns the ids of the equations that use each variable, and that of the jaxpr itself."""
    users: dict[Var, set[int]] = {}
    for user in (*jaxpr.eqns, jaxpr):
        for atom in user.outvars if user is jaxpr else user.invars:
            if isinstance(atom, Var):
                users.setdefault(atom, set()).add(id(user))
    return users


def _made_at(jaxpr: Jaxpr) -> dict[Var, int]:
    made = dict.fromkeys((*jaxpr.constvars, *jaxpr.invars), -1)
    return made | {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}


def _numbers(eqns: Sequence[JaxprEqn]) -> dict[Var, None]:
    """Returns the numbers that equations take, in order."""
    atoms = [atom for eqn in eqns for atom in eqn.invars]
    return {atom: None for atom in atoms if isinstance(atom, Var) and not aval_of(atom).shape}


def _parameters(eqn: JaxprEqn) -> object:
    """Returns the parameters of an equation, for a comparison with another."""
    items = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    try:
        hash(items)
    except TypeError:
        return id(eqn)
    return items


def _key(eqns: Sequence[JaxprEqn], inputs: Sequence[Var], result: Var) -> tuple[object, ...]:
    place = {var: i for i, var in enumerate((*inputs, *(v for eqn in eqns for v in eqn.outvars)))}

    def of_atom(atom: Var | Literal) -> object:
        return repr(atom) if isinstance(atom, Literal) else place[atom]

    each = (
        (
            eqn.primitive,
            _parameters(eqn),
            tuple(map(of_atom, eqn.invars)),
            str(eqn.source_info.name_stack),
        )
        for eqn in eqns
    )
    return (place[result], *(aval_of(v) for v in inputs), *each)


def is_one_step(activation: Activation, dtype: np.dtype, leads_to: int, region: Region) -> bool:
    """Whether the result of an activation function can be narrow, and its derivative too.

    Args:
        activation: the function.
        dtype: of its array.
        leads_to: what its result is used for.
        region: where it stands.
    """
    regions = [region.enter(eqn) for eqn in activation.jaxpr.eqns]
    if any(each.is_written or each.is_full for each in regions):
        return False
    policies = [each.own_policy for each in regions]
    if any(policy.activation_dtype is not None or policy.primitives for policy in policies):
        return False
    if not all(_is_in_range(step, dtype) for step in activation.steps):
        return False
    if any(_rules.class_of(step, policies[0]) == _rules.FULL for step in activation.steps):
        return is_stored_narrow(leads_to)
    return not is_island(leads_to)


def _is_in_range(step: JaxprEqn, dtype: np.dtype) -> bool:
    """Whether a step needs no more range than the dtype has, in its constants and its slope."""
    constants = [atom for atom in step.invars if isinstance(atom, Literal) and is_float(atom)]
    if not all(fits(constant.val, dtype) for constant in constants):
        return False
    is_inverse = step.primitive.name == "integer_pow" and step.params["y"] < 0
    return dtype != FLOAT16 or not (is_inverse or step.primitive.name in _rules.STEEP)


# What it is given is kept for the backward pass: compilers for GPU and CPU would rather keep what
# that is computed of, which can be several arrays. The TPU compiler sees that by itself.
kept_p = Primitive("kept_slope")


def _jvp_of_kept(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return kept_p.bind(*primals), tangents[0]


def _batch_kept(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    return kept_p.bind(*args), dims[0]


kept_p.def_impl(lambda slope: slope)
kept_p.def_abstract_eval(lambda slope: slope)
ad.primitive_jvps[kept_p] = _jvp_of_kept
batching.primitive_batchers[kept_p] = _batch_kept
mlir.register_lowering(kept_p, mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False))
mlir.register_lowering(
    kept_p, mlir.lower_fun(lambda slope: slope, multiple_results=False), platform="tpu"
)


def in_one_step(fun: Callable[..., Any], dtype: np.dtype) -> Callable[..., Any]:
    """Returns an elementwise function of f32 as one whose array is narrow, and its result too.

    Args:
        fun: of an array and numbers.
        dtype: of the array and of the result.
    """

    @functools.cache
    def slope(place: int) -> Callable[..., Any]:
        def along(array: Any, *numbers: Any) -> Any:
            primals = (array.astype(FLOAT32), *numbers)
            tangents = [jnp.full_like(x, i == place) for i, x in enumerate(primals)]
            return kept_p.bind(jax.jvp(fun, primals, tuple(tangents))[1].astype(dtype))

        return inlined(along)

    def function(array: Any, *numbers: Any) -> Any:
        return fun(array.astype(FLOAT32), *numbers).astype(dtype)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        moved = []
        for place, tangent in enumerate(tangents):
            if isinstance(tangent, SymbolicZero):
                continue
            factor = slope(place)(*primals)
            # The gradient of a number is a sum.
            wide = factor if place == 0 else factor.astype(FLOAT32)
            moved.append((wide * tangent).astype(dtype))
        return activation(*primals), sum(moved[1:], start=moved[0])

    activation = jax.custom_jvp(inlined(function))
    activation.defjvp(jvp, symbolic_zeros=True)
    return activation
