"""The same program in float32: what mixed precision is compared with."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import NamedSharding

from jaxmp._dtypes import FLOAT32, is_inexact, widened
from jaxmp._jaxpr import OPAQUE_PRIMITIVES, inner_jaxprs
from jaxmp._rebind import shard_map_arguments

_DTYPE_PARAMS = frozenset(
    {"new_dtype", "dtype", "preferred_element_type", "compute_dtype", "accum_dtype", "out_dtype"}
)
# Rules for differentiation are not needed where nothing is differentiated any more.
_INLINED = frozenset(
    {"custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "linear_call", "closed_call"}
)


def widen_spec(spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns an input as float32 if it is a narrower float, else as it is."""
    if jnp.issubdtype(spec.dtype, jax.dtypes.extended):
        return spec
    sharding = spec.sharding if isinstance(spec.sharding, NamedSharding) else None
    dtype = widened(np.dtype(spec.dtype))
    weak_type = getattr(spec, "weak_type", False)
    return jax.ShapeDtypeStruct(spec.shape, dtype, weak_type=weak_type, sharding=sharding)


class CannotWidenError(ValueError):
    """The program has a part that cannot be rewritten in float32."""


def widen(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program in which every float narrower than float32 is float32.

    Kernels that cannot be looked into, and bit casts, keep their dtypes: values are cast for them.

    Raises:
        CannotWidenError: if it mutates references, or is of another kind that is not known here.
    """
    if any(not hasattr(var.aval, "dtype") or _is_reference(var.aval) for var in jaxpr.jaxpr.invars):
        raise CannotWidenError("it mutates references")
    specs = [_spec_of(var.aval) for var in jaxpr.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: _run(jaxpr.jaxpr, jaxpr.consts, args))(*specs)


def _is_reference(aval: Any) -> bool:
    return hasattr(aval, "inner_aval")


def _spec_of(aval: Any) -> jax.ShapeDtypeStruct:
    weak_type = getattr(aval, "weak_type", False)
    return widen_spec(jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak_type))


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values = dict(zip(jaxpr.constvars, map(_widen_value, consts), strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return _widen_value(atom.val) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        results = _equation(eqn, [read(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _widen_value(value: Any) -> Any:
    dtype = _dtype(value)
    if dtype is None or not _is_narrow(dtype):
        return value
    if isinstance(value, jax.Array):
        return jax.lax.convert_element_type(value, FLOAT32)
    return np.asarray(value, FLOAT32)


def _equation(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name in OPAQUE_PRIMITIVES or name == "bitcast_convert_type":
        return list(map(_widen_value, _as_written(eqn, args)))
    if name in _INLINED:
        (inner,) = inner_jaxprs(eqn)
        return _run(inner.jaxpr, (), args)
    if name == "shard_map":
        return _shard_map(eqn, args)
    params = {key: _widen_param(key, value) for key, value in eqn.params.items()}
    return _bind(eqn, args, params)


def _bind(eqn: JaxprEqn, args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    results = eqn.primitive.bind(*args, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _as_written(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    wanted = [_dtype(atom.aval) for atom in eqn.invars]
    cast = [
        arg if _dtype(arg) == dtype else jax.lax.convert_element_type(arg, dtype)
        for arg, dtype in zip(args, wanted, strict=True)
    ]
    return _bind(eqn, cast, eqn.params)


def _dtype(value: Any) -> Any:
    return getattr(value, "dtype", None)


def _widen_param(key: str, value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return widen(value)
    if isinstance(value, Jaxpr):
        return widen(ClosedJaxpr(value, ())).jaxpr
    if isinstance(value, tuple) and value and isinstance(value[0], ClosedJaxpr | Jaxpr):
        items = [_widen_param(key, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if key in _DTYPE_PARAMS and value is not None and _is_narrow(value):
        return FLOAT32
    if key == "precision" and isinstance(value, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        return None
    return value


def _is_narrow(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    return is_inexact(np.dtype(dtype)) and widened(np.dtype(dtype)) != np.dtype(dtype)


def _shard_map(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
    (inner,) = inner_jaxprs(eqn)
    fun = jax.shard_map(
        lambda *local: tuple(_run(inner.jaxpr, (), local)), **shard_map_arguments(eqn)
    )
    return list(fun(*args))
