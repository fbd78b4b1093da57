"""The program report: rows for matmuls, casts, reductions and collectives, from the jaxpr."""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxmp._dataflow import Dataflow, Node, dataflow, reaching
from jaxmp._dtypes import HALF_DTYPES, is_inexact
from jaxmp._jaxpr import is_opaque, is_sum, kernel_name
from jaxmp.audit import _cost
from jaxmp.audit._rows import Cast, Collective, Opaque, Product, Reduction
from jaxmp.audit._trace import Program
from jaxmp.audit._weights import parameter_names

COLLECTIVES = frozenset(
    {
        "psum",
        "psum2",
        "psum_invariant",
        "pmax",
        "pmin",
        "all_gather",
        "all_gather_invariant",
        "reduce_scatter",
        "all_to_all",
        "ragged_all_to_all",
        "ppermute",
        "pbroadcast",
    }
)
SUMMING_COLLECTIVES = frozenset({"psum", "psum2", "psum_invariant", "reduce_scatter"})
_SUMS = frozenset({"reduce_sum", "reduce_prod"})
_CUMULATIVE = frozenset({"cumsum", "cumprod", "cumlogsumexp"})
_SCATTERS = frozenset({"scatter-add", "scatter_add", "scatter-mul", "scatter_mul"})

# What a weight gradient may pass on its way to an output beside elementwise operations.
_GRADIENT_PATH = frozenset(
    {
        "slice",
        "dynamic_slice",
        "pad",
        "concatenate",
        "dynamic_update_slice",
        "split",
        *COLLECTIVES,
    }
)
_NOT_ELEMENTWISE = frozenset(
    {
        *_cost.PRODUCTS,
        *_CUMULATIVE,
        *_SCATTERS,
        "gather",
        "sort",
        "fft",
        "cholesky",
        "triangular_solve",
        "lu",
        "qr",
        "householder_product",
        "reduce_window_sum",
        # Over an axis of one number it would keep the size.
        *_SUMS,
    }
)


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The rows of a program, with the values that they came from.

    Attributes:
        flow: every value.
        gradients: ids of the values that become an output without changing their size, as the
            gradients of parameters do.
        products: pairs (value, row) of matmuls and convolutions.
        casts: pairs of casts between float dtypes.
        reductions: pairs of sums in half precision.
        collectives: pairs of exchanges between devices.
        opaque: pairs of kernels that cannot be looked into.
    """

    flow: Dataflow
    gradients: frozenset[int]
    products: tuple[tuple[Node, Product], ...]
    casts: tuple[tuple[Node, Cast], ...]
    reductions: tuple[tuple[Node, Reduction], ...]
    collectives: tuple[tuple[Node, Collective], ...]
    opaque: tuple[tuple[Node, Opaque], ...]


def analyse(program: Program, platform: str | None) -> Analysis:
    """Returns the rows of a program as `platform` would run it."""
    flow = dataflow(program.jaxpr, platform)
    gradients = _gradients(flow)
    passes = {
        id(node): _pass_name(node, id(node) in gradients)
        for node in flow.nodes
        if node.primitive in _cost.PRODUCTS
    }
    weights = parameter_names(
        [(node, passes[id(node)]) for node in flow.nodes if id(node) in passes],
        program.input_names,
        {i for i, _ in program.state_pairs},
    )
    products, casts, reductions, collectives, opaque = [], [], [], [], []
    for node in flow.nodes:
        name = node.primitive
        if id(node) in passes:
            row = _product(node, weights.get(id(node), ""), passes[id(node)])
            products.append((node, row))
        elif name == "convert_element_type":
            if _changes_float(node):
                casts.append((node, _cast(node)))
        elif name in COLLECTIVES:
            collectives.append((node, _collective(node)))
        elif node.eqn is not None and is_opaque(node.eqn):
            opaque.append((node, _opaque(node)))
        elif node.dtype in HALF_DTYPES and (terms := _terms(node)) > 1:
            reductions.append((node, _reduction(node, terms)))
    return Analysis(
        flow,
        frozenset(gradients),
        tuple(products),
        tuple(casts),
        tuple(reductions),
        tuple(collectives),
        tuple(opaque),
    )


def _changes_float(node: Node) -> bool:
    have, made = node.operands[0].dtype, node.dtype
    # A cast to the same dtype only makes a weakly typed value strong.
    return is_inexact(have) and is_inexact(made) and np.dtype(have) != np.dtype(made)


def _gradients(flow: Dataflow) -> set[int]:
    """Returns the ids of the values that become an output without changing their size.

    A weight gradient does: autodiff accumulates it and the optimizer adds it to something of its
    shape. The gradient of an activation is summed, gathered or multiplied on its way.
    """
    return reaching([node for node in flow.outputs if node.shape], keeps_elements)


def keeps_elements(node: Node, operand: Node) -> bool:
    """Whether a value has one number for each of an operand's, as elementwise results do."""
    if node.kind != "equation" or node.primitive in _GRADIENT_PATH:
        return True
    if node.primitive in _NOT_ELEMENTWISE:
        return False
    return math.prod(node.shape) == math.prod(operand.shape)


def _pass_name(node: Node, is_gradient: bool) -> str:
    stack = node.name_stack
    if "rematted_computation" in stack:
        return "recompute"
    if "transpose(" not in stack:
        return "fprop"
    return "wgrad" if is_gradient else "dgrad"


def _product(node: Node, parameter: str, pass_name: str) -> Product:
    eqn = _equation(node)
    left, right = (atom.aval for atom in eqn.invars[:2])
    dtypes = _cost.operand_dtypes(eqn)
    return Product(
        path=node.path,
        where=node.where,
        parameter=parameter,
        primitive=_cost.name_of(eqn),
        pass_name=pass_name,
        operand_dtypes=(dtypes[0].name, dtypes[1].name),
        accumulation_dtype=_cost.accumulation_dtype(eqn).name,
        result_dtype=np.dtype(node.dtype).name,
        operand_shapes=(tuple(left.shape), tuple(right.shape)),
        result_shape=node.shape,
        flops=_cost.flops(eqn),
        bytes=_cost.nbytes(left) + _cost.nbytes(right) + _cost.nbytes(node.aval),
        times=node.context.times * node.context.devices,
    )


def _equation(node: Node) -> Any:
    if node.eqn is None:
        raise TypeError(f"A value of kind {node.kind!r} has no equation.")
    return node.eqn


def _cast(node: Node) -> Cast:
    return Cast(
        path=node.path,
        where=node.where,
        from_dtype=np.dtype(node.operands[0].dtype).name,
        to_dtype=np.dtype(node.dtype).name,
        shape=node.shape,
        bytes=_cost.nbytes(node.operands[0].aval) + _cost.nbytes(node.aval),
        times=node.context.times * node.context.devices,
    )


def _terms(node: Node) -> int:
    """Returns how many numbers meet in one result of a sum; 0 for any other operation."""
    name = node.primitive
    if name in _SUMS or (name == "reduce" and is_sum(_equation(node))):
        return _ratio(math.prod(node.operands[0].shape), math.prod(node.shape))
    if name in _CUMULATIVE:
        return node.operands[0].shape[_equation(node).params["axis"]]
    if name == "reduce_window_sum" or (name == "reduce_window" and is_sum(_equation(node))):
        return math.prod(_equation(node).params["window_dimensions"])
    if name in _SCATTERS:
        updates = node.operands[2].shape
        numbers = _equation(node).params["dimension_numbers"]
        window = numbers.update_window_dims
        count = math.prod(size for i, size in enumerate(updates) if i not in window)
        # Each element of a batch axis has its own part of the operand.
        operand = node.operands[0].shape
        return _ratio(count, math.prod(operand[i] for i in numbers.operand_batching_dims))
    return 0


def _ratio(whole: int, part: int) -> int:
    return whole // part if part else 0


def _reduction(node: Node, terms: int) -> Reduction:
    return Reduction(
        path=node.path,
        where=node.where,
        primitive=node.primitive,
        dtype=np.dtype(node.dtype).name,
        shape=node.operands[0].shape,
        terms=terms,
        times=node.context.times * node.context.devices,
    )


def _collective(node: Node) -> Collective:
    operands = _equation(node).invars
    return Collective(
        path=node.path,
        where=node.where,
        primitive=node.primitive,
        dtype=np.dtype(operands[0].aval.dtype).name,
        shape=tuple(operands[0].aval.shape),
        bytes=sum(_cost.nbytes(atom.aval) for atom in operands),
        times=node.context.times,
    )


def _opaque(node: Node) -> Opaque:
    return Opaque(
        path=node.path,
        where=node.where,
        primitive=node.primitive,
        name=kernel_name(_equation(node)),
        times=node.context.times * node.context.devices,
    )
