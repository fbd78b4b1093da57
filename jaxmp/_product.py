"""One primitive for a matmul or convolution in mixed precision, closed under differentiation.

Its operands stay as they are, f32 masters too: they are narrowed where the product is computed.
Its derivative is itself, so all three products (fprop, dgrad, wgrad) have narrow operands, and the
gradient of an operand comes out in the operand's own dtype, straight from the accumulator.

How a product is differentiated and batched is JAX's own knowledge: its rule for the plain product
is traced in float32 and replayed with this primitive in the place of the plain one.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Primitive, primitives
from jax.interpreters import ad, batching

from jaxmp._dtypes import FLOAT32, is_inexact
from jaxmp._mapped import varying
from jaxmp._placement import Placement
from jaxmp._rebind import spec_of

DOT_GENERAL = primitives.dot_general_p
CONVOLUTION = primitives.conv_general_dilated_p
_RAGGED = "ragged_dot_general"
PLAIN_PRODUCTS = frozenset({DOT_GENERAL.name, CONVOLUTION.name, _RAGGED})

# Operands: the two that are multiplied, and the sizes of groups if the product is ragged.
# Parameters: `base`, the plain primitive; `params`, its parameters as sorted pairs;
# `compute_dtype` of the multiplied operands; `accum_dtype` of the sums; `out_dtype` of the result;
# `recipe`, by which the operands are quantized, or None; `roles`, what each of them is.
# `extras`, names of further operands: for a recipe the `scales` of a state, f32[3], and of a weight
# that was quantized before the `codes` and the `code_scale`; `GATHERED`, of operands that were
# gathered before. `places`, where each of the two operands lies on a mesh, and `reduce_dtype`, what
# their gradients are summed in across it.
product_p = Primitive("mixed_product")


# Names of extras: what is multiplied in the place of the first and of the second operand.
GATHERED = ("gathered_lhs", "gathered_rhs")


class Dtypes(NamedTuple):
    """Of a mixed product: of what is multiplied, of the sums, and of the result.

    Attributes:
        compute_dtype: of the operands.
        accum_dtype: of the sums.
        out_dtype: of the result.
        recipe: how the operands are quantized to fewer bits, or None: the methods `takes`,
            `shares_codes`, `dtypes` and `product` of a `jaxmp.fp8.Recipe`.
        roles: what each operand is: "x" for activations, "w" for a weight, "g" for a gradient.
        extras: the names of the operands that follow.
        places: of the two operands, for those that are gathered where they are multiplied.
        reduce_dtype: of gradients, where they are added up over devices, for operands with a place.
    """

    compute_dtype: np.dtype
    accum_dtype: np.dtype
    out_dtype: np.dtype
    recipe: Any = None
    roles: tuple[str, str] = ("x", "w")
    extras: tuple[str, ...] = ()
    places: tuple[Placement | None, Placement | None] = (None, None)
    reduce_dtype: np.dtype = FLOAT32

    def for_operands(self, base: Primitive, params: dict[str, Any], lhs: Any, rhs: Any) -> "Dtypes":
        """Returns these without a recipe that does not take such a product."""
        if self.recipe is None or base is not DOT_GENERAL:
            return self._replace(recipe=None)
        takes = self.recipe.takes(lhs.shape, rhs.shape, params["dimension_numbers"], self.roles)
        return self if takes else self._replace(recipe=None)

    def for_batch(self, params: dict[str, Any]) -> "Dtypes":
        """Returns these without a recipe that has more than one scale, if there are batch axes."""
        if self.recipe is None or not params["dimension_numbers"][1][0]:
            return self
        return self if self.recipe.shares_codes() else self._replace(recipe=None)


class Route(NamedTuple):
    """How a platform multiplies what a recipe has quantized.

    Attributes:
        dot: `lax.dot_general` of operands in 8 bits or bfloat16.
        takes_blocks: whether XLA has a call for operands in blocks: for NVIDIA GPUs.
    """

    dot: Callable[..., Any]
    takes_blocks: bool = False


def product(base: Primitive, params: dict[str, Any], dtypes: Dtypes, *operands: Any) -> jax.Array:
    """Binds the primitive to the parameters of a plain product, as a jaxpr has them."""
    return product_p.bind(*vary_alike(operands), **product_params(base, params, dtypes))


def product_params(base: Primitive, params: dict[str, Any], dtypes: Dtypes) -> dict[str, Any]:
    """Returns the parameters of the mixed primitive for those of a plain product."""
    return {"base": base, "params": tuple(sorted(params.items())), **dtypes._asdict()}


def traced_params(
    fun: Callable[..., Any], *operands: jax.Array
) -> tuple[Primitive, dict[str, Any]]:
    """Returns the primitive and the parameters of the product that `fun(*operands)` is."""
    jaxpr = jax.make_jaxpr(fun)(*map(_float32_spec, vary_alike(operands)))
    (eqn,) = jaxpr.jaxpr.eqns
    return eqn.primitive, dict(eqn.params)


def vary_alike(operands: Sequence[Any]) -> tuple[Any, ...]:
    """Lets all operands vary over the axes that any does, as JAX's own operations do."""
    axes = frozenset[str]().union(*map(varying, operands))
    missing = [tuple(sorted(axes - varying(operand))) for operand in operands]
    return tuple(
        lax.pcast(operand, names, to="varying") if names else operand
        for operand, names in zip(operands, missing, strict=True)
    )


class _Linear(NamedTuple):
    """What is known of an operand that a gradient is for: no value."""

    aval: Any


def _float32_spec(value: Any) -> jax.ShapeDtypeStruct:
    """Returns shape, sharding and manual axes of a value, as float32 if it is a float."""
    aval: Any = value.aval if isinstance(value, _Linear) else jax.typeof(value)
    return spec_of(aval, FLOAT32 if is_inexact(np.dtype(aval.dtype)) else aval.dtype)


def _plain(base: Primitive, params: Sequence[tuple[str, Any]], *operands: Any) -> Any:
    return base.bind(*operands, **dict(params))


def _replay(
    jaxpr: ClosedJaxpr,
    args: Sequence[Any],
    dtypes: Dtypes,
    extras: Mapping[str, Any],
    *,
    places: Sequence[Placement | None],
    of_gradient: bool = False,
    into: Placement | None = None,
) -> Any:
    """Runs a traced rule of one result with the mixed product for the plain one.

    Args:
        jaxpr: the rule.
        args: its arguments.
        dtypes: of the product, and what its operands are.
        extras: what the product is given for its recipe, by name.
        places: of the arguments.
        of_gradient: whether the first argument is the gradient of a result. The role of the other
            one is then the first of `dtypes`.
        into: where the result is to lie.
    """
    gradients = set(jaxpr.jaxpr.invars[:1]) if of_gradient else set()
    values = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    values |= dict(zip(jaxpr.jaxpr.invars, args, strict=True))
    placed = dict(zip(jaxpr.jaxpr.invars, places, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    def place_of(atom: Any) -> Placement | None:
        return None if isinstance(atom, Literal) else placed.get(atom)

    for eqn in jaxpr.jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in PLAIN_PRODUCTS:
            own = dtypes.for_batch(eqn.params)
            if of_gradient:
                role = dtypes.roles[0]
                is_left = _is_among(eqn.invars[0], gradients)
                own = dtypes._replace(roles=("g", role) if is_left else (role, "g"))
                own = own.for_operands(eqn.primitive, eqn.params, *operands[:2])
            if into is not None:
                operands = into.for_grouped_sum(eqn, operands)
            kept = extras if own.recipe is not None else {}
            left, right = map(place_of, eqn.invars[:2])
            own = own._replace(extras=tuple(kept), places=(left, right))
            results = product(eqn.primitive, eqn.params, own, *operands, *kept.values())
        else:
            if any(_is_among(atom, gradients) for atom in eqn.invars):
                gradients.update(eqn.outvars)
            place = place_of(eqn.invars[0])
            if place is not None:
                placed[eqn.outvars[0]] = place.moved(eqn)
            results = eqn.primitive.bind(*operands, **eqn.params)
        results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))
    (result,) = jaxpr.jaxpr.outvars
    return read(result)


def _is_among(atom: Any, variables: set[Any]) -> bool:
    return not isinstance(atom, Literal) and atom in variables


def _arity(base: Primitive) -> int:
    """Returns how many operands the plain product has; extras come after them."""
    return 3 if base.name == _RAGGED else 2


@product_p.def_abstract_eval
def _abstract(*operands: Any, base: Primitive, params: Any, out_dtype: Any, **_: Any) -> Any:
    wide = [
        aval.update(dtype=FLOAT32, weak_type=False) if is_inexact(np.dtype(aval.dtype)) else aval
        for aval in operands[: _arity(base)]
    ]
    found = base.abstract_eval(*wide, **dict(params))
    aval = found[0] if isinstance(found, tuple) else found
    return aval.update(dtype=out_dtype, weak_type=False)


def _with_tangent(operands: Sequence[Any], side: int, params: dict[str, Any]) -> Any:
    """Binds a product of which one operand is another than what was quantized or gathered."""
    arity = _arity(params["base"])
    extras = dict(zip(params["extras"], operands[arity:], strict=True))
    extras.pop(GATHERED[side], None)
    if params["roles"][side] == "w":
        extras = {name: x for name, x in extras.items() if name in ("scales", *GATHERED)}
    params = params | {"extras": tuple(extras)}
    return product_p.bind(*operands[:arity], *extras.values(), **params)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    terms = []
    for side in (0, 1):
        if not isinstance(tangents[side], ad.Zero):
            operands = [*primals[:side], tangents[side], *primals[side + 1 :]]
            terms.append(_with_tangent(operands, side, params))
    result = product_p.bind(*primals, **params)
    if not terms:
        return result, ad.Zero(jax.typeof(result))
    return result, functools.reduce(lax.add, terms)


ad.primitive_jvps[product_p] = _jvp


def _transpose(cotangent: Any, *operands: Any, **params: Any) -> list[Any]:
    """Returns the gradient of the operand that is linear, in the dtype of that operand."""
    (side,) = (i for i, operand in enumerate(operands) if ad.is_undefined_primal(operand))
    gradients: list[Any] = [None] * len(operands)
    aval = operands[side].aval
    if isinstance(cotangent, ad.Zero):
        gradients[side] = ad.Zero(aval)
        return gradients
    base, plain, dtypes = params.pop("base"), params.pop("params"), Dtypes(**params)
    arity = _arity(base)
    operands, extras = operands[:arity], dict(zip(dtypes.extras, operands[arity:], strict=True))
    pairs = zip(operands, (*dtypes.places, None), strict=False)
    rest = [(x, place) for i, (x, place) in enumerate(pairs) if i != side]
    gathered = extras.pop(GATHERED[1 - side], None)
    if gathered is not None:
        rest[0] = (gathered, None)
    elif rest[0][1] is not None:
        # Else the compiler would keep what the forward pass gathered.
        rest[0] = (lax.optimization_barrier(rest[0][0]), rest[0][1])
    others, places = zip(*rest, strict=True)
    specs = tuple(map(_float32_spec, (cotangent, *others)))
    jaxpr = _traced_gradient(base, plain, side, _float32_spec(_Linear(aval)), specs)
    role = dtypes.roles[1 - side]
    place = dtypes.places[side]
    out_dtype = aval.dtype if place is None else _narrower(aval.dtype, dtypes.reduce_dtype)
    own = dtypes._replace(out_dtype=out_dtype, roles=(role, role))
    gradient = _replay(
        jaxpr,
        (cotangent, *others),
        own,
        extras,
        places=(None, *places),
        of_gradient=True,
        into=place,
    )
    if place is not None:
        gradient = lax.convert_element_type(place.scatter(gradient), aval.dtype)
    gradients[side] = gradient
    return gradients


def _narrower(a: np.dtype, b: np.dtype) -> np.dtype:
    return b if b.itemsize < a.itemsize else a


@functools.lru_cache(maxsize=4096)
def _traced_gradient(base: Primitive, plain: Any, side: int, spec: Any, specs: Any) -> ClosedJaxpr:
    """Traces the gradient of one operand from the cotangent and the other operands."""

    def gradient(cotangent: Any, *others: Any) -> Any:
        def fun(value: Any) -> Any:
            return _plain(base, plain, *others[:side], value, *others[side:])

        (result,) = jax.linear_transpose(fun, spec)(cotangent)
        return result

    return jax.make_jaxpr(gradient)(*specs)


ad.primitive_transposes[product_p] = _transpose


def _batch(args: Any, dims: Any, *, base: Primitive, params: Any, **dtypes: Any) -> tuple[Any, Any]:
    axes = tuple(dim if isinstance(dim, int) else None for dim in dims)
    arity = _arity(base)
    extras = dict(zip(dtypes["extras"], zip(args[arity:], axes[arity:], strict=True), strict=True))
    if any(axis is not None for name, (_, axis) in extras.items() if name != "scales"):
        extras = {name: extra for name, extra in extras.items() if name == "scales"}
    # One scale for all, as where it is of what the arrays have.
    extras = {
        name: x if axis is None else lax.reduce_max(x, (axis,))
        for name, (x, axis) in extras.items()
    }
    args, axes = args[:arity], axes[:arity]
    own = Dtypes(**dtypes)._replace(extras=tuple(extras))
    if all(axis is None for axis in axes):
        params = product_params(base, dict(params), own)
        return product_p.bind(*args, *extras.values(), **params), None
    batched = jax.vmap(functools.partial(_plain, base, params), in_axes=axes)
    jaxpr = jax.make_jaxpr(batched)(*map(_float32_spec, args))
    places = [
        place if axis is None else None for place, axis in zip(own.places, axes, strict=False)
    ]
    places += [None] * (len(args) - len(places))
    return _replay(jaxpr, args, own, extras, places=places), 0


batching.primitive_batchers[product_p] = _batch


@functools.lru_cache(maxsize=4096)
def _compiled(params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(product_p.bind, **dict(params)))


@product_p.def_impl
def _eager(*args: Any, **params: Any) -> Any:
    # It is compiled like any primitive, also where jit is disabled to look into functions.
    with jax.disable_jit(False):
        return _compiled(tuple(sorted(params.items())))(*args)
