"""One function for each kind of trap in a program."""

import collections
import math
from collections.abc import Callable, Iterator

import numpy as np

from jaxmp._dataflow import SHAPE_PRIMITIVES, Node, reaching, unmoved
from jaxmp._dtypes import FLOAT16, FLOAT32, is_inexact
from jaxmp._jaxpr import is_promotion
from jaxmp.audit import _cost
from jaxmp.audit._format import short
from jaxmp.audit._program import (
    SUMMING_COLLECTIVES,
    Analysis,
    is_backward,
    keeps_elements,
)
from jaxmp.audit._rows import Product, Trap
from jaxmp.audit._trace import Program
from jaxmp.audit._traps import Finding, Intent, Scene, consumers_of, is_half, is_wide, merge


def _itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def _wide_products(scene: Scene) -> Iterator[Finding]:
    for node, row in scene.analysis.products:
        sizes = [_itemsize(dtype) for dtype in row.operand_dtypes]
        floats = all(is_inexact(np.dtype(dtype)) for dtype in row.operand_dtypes)
        if not floats or max(sizes) < FLOAT32.itemsize or not scene.intent.is_half(row.path):
            continue
        cause, remedy = _why_wide(row, scene.intent.policy.for_path(row.path).compute_dtype.name)
        yield Finding("wide-product", node, row.flops * row.times, "FLOP", cause, remedy)


def _why_wide(row: Product, half: str) -> tuple[str, str]:
    left, right = row.operand_dtypes
    mixed = left != right
    cause = f"{row.pass_name} multiplies {short(left)} with {short(right)}"
    if mixed and row.pass_name in ("dgrad", "wgrad"):
        return (
            f"{cause}: the cotangent of a {short('float32')} result",
            f"cast the forward product's result to {half} in the forward pass, or drop "
            "preferred_element_type there, so that its cotangent comes back narrow",
        )
    if mixed:
        wide = "left" if _itemsize(left) > _itemsize(right) else "right"
        return cause, f"cast the {wide} operand to {half} before the product"
    if row.pass_name in ("dgrad", "wgrad"):
        return cause, f"cast both operands of the forward product to {half}"
    return cause, f"cast both operands to {half}"


def _rounded_weight_gradients(scene: Scene) -> Iterator[Finding]:
    products = {id(node): node for node, _ in scene.analysis.products}
    for node, row in scene.analysis.casts:
        source = node.operands[0]
        if not (is_half(source) and is_wide(node) and _is_gradient(scene, node)):
            continue
        made_of = reaching([source], _through_half).intersection(products)
        yield Finding(
            "rounded-weight-gradient",
            products[min(made_of)] if made_of else node,
            math.prod(row.shape) * FLOAT32.itemsize * row.times,
            "B",
            f"a gradient is rounded to {short(row.from_dtype)}, then cast to {short(row.to_dtype)}",
            "ask the product of the backward pass for float32 and cast nothing: it accumulates in "
            "float32 anyway",
        )


def _is_gradient(scene: Scene, node: Node) -> bool:
    return is_backward(node) and id(node) in scene.analysis.gradients


def _through_half(node: Node, operand: Node) -> bool:
    moved = node.kind != "equation" or node.primitive in SHAPE_PRIMITIVES
    return (is_half(node) or moved) and keeps_elements(node, operand)


def _ping_pong_casts(scene: Scene) -> Iterator[Finding]:
    for node, row in scene.analysis.casts:
        between = _chain(node.operands[0])
        first = between[-1]
        if first.primitive != "convert_element_type":
            continue
        source = first.operands[0]
        if not is_inexact(source.dtype) or np.dtype(source.dtype) != np.dtype(node.dtype):
            continue
        if _is_gradient(scene, node):
            continue
        users = [node, *between]
        if not all(scene.only_feeds(value, users) for value in between):
            continue
        there = short(np.dtype(first.dtype).name)
        yield Finding(
            "ping-pong-cast",
            node,
            row.bytes * row.times,
            "B",
            f"{short(row.to_dtype)} is cast to {there} and back, and only that",
            f"leave out both casts{'' if is_wide(first) else ', or keep the rounded value'}",
        )


def _chain(node: Node) -> list[Node]:
    """Returns a value, and those that it was before it was moved, up to the first not moved."""
    last, chain = unmoved(node), [node]
    while chain[-1] is not last:
        chain.append(chain[-1].operands[0])
    return chain


def _promotions(scene: Scene) -> Iterator[Finding]:
    names = scene.program.input_names
    for node, row in scene.analysis.casts:
        if is_backward(node) or node.eqn is None:
            continue
        if not (is_half(node.operands[0]) and is_wide(node) and is_promotion(node.eqn)):
            continue
        users = scene.consumers.get(id(node), [])
        other = _other_operand(users, node)
        if other is None or all(user.primitive in _cost.PRODUCTS for user in users):
            continue
        origin = unmoved(other)
        if origin.kind == "input":
            what, fix = f"argument {names[origin.index]}", "cast the argument"
        elif _is_constant(origin):
            what, fix = "constant", "make the constant a Python number or cast it"
        else:
            # What was computed in float32 was meant to be, as the statistics of a norm.
            continue
        yield Finding(
            "promotion",
            node,
            row.bytes * row.times,
            "B",
            f"{short(row.from_dtype)} meets a {short(row.to_dtype)} {what} in {users[0].primitive}",
            f"{fix} to {row.from_dtype}",
        )


def _is_constant(node: Node) -> bool:
    """Whether a value is made of constants only: a number, a table."""
    made_of = _back(node, 12)
    return all(value.kind in ("constant", "equation") and _starts(value) for value in made_of)


def _starts(value: Node) -> bool:
    return value.kind == "constant" or bool(value.operands) or value.primitive == "iota"


def _other_operand(users: list[Node], node: Node) -> Node | None:
    for user in users:
        for operand in user.operands:
            if operand is not node and np.dtype(operand.dtype) == np.dtype(node.dtype):
                return operand
    return None


def _back(node: Node, steps: int) -> Iterator[Node]:
    """Yields a value and those that it is made of, up to a number of steps back."""
    yield node
    if steps:
        for operand in node.operands:
            yield from _back(operand, steps - 1)


def _half_softmax(scene: Scene) -> Iterator[Finding]:
    for node in scene.analysis.flow.nodes:
        if node.primitive not in ("exp", "exp2") or not is_half(node) or is_backward(node):
            continue
        if any(value.primitive == "reduce_max" for value in _back(node, 6)):
            yield Finding(
                "half-softmax",
                node,
                math.prod(node.shape),
                "exponentials",
                f"exp of {short(np.dtype(node.dtype).name)}, after the maximum is subtracted",
                "cast the scores to float32 before the softmax, and its result back",
            )


def _half_norm(scene: Scene) -> Iterator[Finding]:
    for node in scene.analysis.flow.nodes:
        if node.primitive not in ("rsqrt", "sqrt") or not is_half(node) or is_backward(node):
            continue
        if any(value.primitive in ("reduce_sum", "dot_general") for value in _back(node, 6)):
            yield Finding(
                "half-norm",
                node,
                math.prod(node.shape),
                "statistics",
                f"{node.primitive} of a sum in {short(np.dtype(node.dtype).name)}",
                "cast the input to float32 before its statistics, and the normalized value back",
            )


def _half_sums(scene: Scene) -> Iterator[Finding]:
    for node, row in scene.analysis.reductions:
        dtype = short(row.dtype)
        if row.primitive.startswith("scatter"):
            yield Finding(
                "half-scatter-add",
                node,
                row.terms * row.times,
                "updates",
                f"updates are added up in {dtype}, where a sum stops growing at "
                f"{_stops_at(row.dtype)} times what is added",
                "gather from the float32 table and narrow what was gathered",
            )
            continue
        in_pass = " of a backward pass" if is_backward(node) else ""
        yield Finding(
            "half-sum",
            node,
            row.terms * row.times,
            "terms",
            f"{row.primitive}{in_pass} in {dtype}",
            "cast to float32 before the sum"
            if not in_pass
            else "widen the value that is broadcast in the forward pass (a bias, a scale), so "
            "that its gradient is summed in float32",
        )


def _stops_at(dtype: str) -> int:
    """Returns how often a number can be added to itself: to 2 / eps of the format."""
    return 256 if dtype == "bfloat16" else 2048


def _half_losses(scene: Scene) -> Iterator[Finding]:
    remedy = "cast the logits to float32 before the loss"
    for node in scene.analysis.flow.nodes:
        if node.primitive != "log" or not is_half(node) or is_backward(node):
            continue
        if any(value.primitive == "reduce_sum" for value in _back(node, 3)):
            cause = f"log-sum-exp in {short(np.dtype(node.dtype).name)}"
            yield Finding("half-loss", node, math.prod(node.shape), "values", cause, remedy)
    outputs = zip(scene.analysis.flow.outputs, scene.program.output_names, strict=True)
    for node, name in outputs:
        if is_half(node) and not node.shape:
            dtype = short(np.dtype(node.dtype).name)
            cause = f"output {name or '(the result)'} is a {dtype} scalar"
            yield Finding("half-loss", node, 1, "value", cause, remedy)


def _collectives(scene: Scene) -> Iterator[Finding]:
    for node, row in scene.analysis.collectives:
        if not is_inexact(np.dtype(row.dtype)) or math.prod(row.shape) <= 1:
            continue
        wanted = scene.intent.policy.for_path(row.path).reduce_dtype
        if row.primitive in SUMMING_COLLECTIVES:
            if _itemsize(row.dtype) < wanted.itemsize:
                yield Finding(
                    "narrow-collective",
                    node,
                    row.bytes * row.times,
                    "B",
                    f"{row.primitive} in {short(row.dtype)}, reduce_dtype is {short(wanted.name)}",
                    f"cast to {wanted.name} before {row.primitive}",
                )
            elif _itemsize(row.dtype) > wanted.itemsize:
                yield Finding(
                    "wide-collective",
                    node,
                    row.bytes * row.times,
                    "B",
                    f"{row.primitive} in {short(row.dtype)}, reduce_dtype is {short(wanted.name)}",
                    f"cast to {wanted.name} before {row.primitive}",
                )
        elif is_wide(node) and _is_narrowed(scene, node):
            yield Finding(
                "wide-collective",
                node,
                row.bytes * row.times,
                "B",
                f"{row.primitive} in {short(row.dtype)} of what is narrowed after",
                f"cast before {row.primitive}",
            )


def _is_narrowed(scene: Scene, node: Node) -> bool:
    """Whether every use of a value is a cast to half."""
    users = scene.consumers.get(id(node), [])
    return bool(users) and all(
        is_half(user) if user.primitive == "convert_element_type" else _moves_to_half(scene, user)
        for user in users
    )


def _moves_to_half(scene: Scene, node: Node) -> bool:
    return bool(node.operands) and unmoved(node) is not node and _is_narrowed(scene, node)


def _unscaled_float16(scene: Scene) -> Iterator[Finding]:
    if any(node.primitive == "is_finite" for node in scene.analysis.flow.nodes):
        return
    for _, row in scene.analysis.products:
        if row.pass_name in ("dgrad", "wgrad") and FLOAT16.name in row.operand_dtypes:
            yield Finding(
                "unscaled-float16",
                None,
                row.flops * row.times,
                "FLOP",
                "f16 products in a backward pass, and no check for overflow",
                "use jaxmp.value_and_grad with a loss scale and jaxmp.mixed_precision, or bfloat16",
            )


def _dtype_changes(scene: Scene) -> Iterator[Finding]:
    outputs = scene.analysis.flow.outputs
    for i, o in scene.program.state_pairs:
        given, result = scene.program.inputs[i], outputs[o]
        if given.dtype == result.dtype:
            continue
        names = (str(given.dtype), str(result.dtype))
        yield Finding(
            "dtype-change",
            None,
            _cost.nbytes(result.aval),
            "B",
            f"{names[0]} goes in, {names[1]} comes out",
            f"cast the result to {names[0]}: each call with the new dtype compiles again",
            path=scene.program.input_names[i],
        )


def _rounded_carries(scene: Scene) -> Iterator[Finding]:
    for carry in scene.analysis.flow.carries:
        if not is_half(carry) or len(carry.operands) < 2:
            continue
        result = unmoved(carry.operands[1])
        widened = [
            user
            for user in scene.consumers.get(id(carry), [])
            if user.primitive == "convert_element_type" and is_wide(user)
        ]
        narrowed = result.primitive == "convert_element_type" and is_wide(result.operands[0])
        if narrowed and widened:
            yield Finding(
                "rounded-carry",
                result,
                carry.context.times,
                "roundings",
                f"{short(np.dtype(carry.dtype).name)} is widened, changed and rounded in each turn",
                "carry float32 and cast where it is used",
            )


def _unused_donations(scene: Scene) -> Iterator[Finding]:
    program = scene.program
    free = collections.Counter(
        (node.shape, str(node.dtype)) for node in scene.analysis.flow.outputs
    )
    for spec, name, donated in zip(
        program.inputs, program.input_names, program.donated, strict=True
    ):
        if not donated:
            continue
        key = (tuple(spec.shape), str(spec.dtype))
        if free[key]:
            free[key] -= 1
            continue
        yield Finding(
            "unused-donation",
            None,
            _cost.nbytes(spec),
            "B",
            f"no output has the shape and dtype of {short(str(spec.dtype))}{list(spec.shape)}",
            "return an array of the same shape and dtype, or do not donate the argument",
            path=name,
        )


_DETECTORS: tuple[Callable[[Scene], Iterator[Finding]], ...] = (
    _wide_products,
    _rounded_weight_gradients,
    _ping_pong_casts,
    _promotions,
    _half_softmax,
    _half_norm,
    _half_sums,
    _half_losses,
    _collectives,
    _unscaled_float16,
    _dtype_changes,
    _rounded_carries,
    _unused_donations,
)


def find_traps(program: Program, analysis: Analysis, intent: Intent) -> tuple[Trap, ...]:
    """Returns the traps of a program, the costliest of each kind first."""
    scene = Scene(program, analysis, intent, consumers_of(analysis))
    return merge(finding for detector in _DETECTORS for finding in detector(scene))
