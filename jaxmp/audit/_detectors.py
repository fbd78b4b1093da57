"""Detectors of traps in matmuls and casts: one function for each kind."""

import math
from collections.abc import Iterator

import numpy as np

from jaxmp._dataflow import SHAPE_PRIMITIVES, Node, reaching, unmoved
from jaxmp._dtypes import FLOAT32, HALF_DTYPES, is_inexact
from jaxmp._jaxpr import is_promotion
from jaxmp.audit import _cost
from jaxmp.audit._format import short
from jaxmp.audit._program import keeps_elements
from jaxmp.audit._rows import Product
from jaxmp.audit._traps import (
    OF_A_PRODUCT,
    Finding,
    Scene,
    float_operands,
    is_backward,
    is_half,
    is_wide,
)

# Casts and promotions of less, such as the scale of a norm, are not worth a line.
_FEW_NUMBERS = 64


def wide_products(scene: Scene) -> Iterator[Finding]:
    """A float32 operand under a half policy."""
    from_gradients = scene.made_of(
        node for node, row in scene.analysis.products if row.pass_name in ("dgrad", "wgrad")
    )
    for node, row in scene.analysis.products:
        dtypes = float_operands(row)
        wide = any(dtype.itemsize >= FLOAT32.itemsize for dtype in dtypes)
        if not wide or not scene.intent.is_half(row.path, row.parameter):
            continue
        # Norms, tables of angles, and what an optimizer does with gradients are meant to be wide.
        optimizer = row.pass_name == "fprop" and id(node) in from_gradients
        if optimizer or not row.result_shape or not _contracts(row):
            continue
        half = scene.intent.at(row.path, row.parameter).compute_dtype.name
        cause, remedy = _why_wide(scene, node, row, half)
        flops = row.flops * row.times
        yield Finding("wide-product", node, flops, "FLOP", cause, remedy, row.parameter)


def _contracts(row: Product) -> bool:
    """Whether a product sums anything: an outer product does not."""
    return row.flops > 2 * math.prod(row.result_shape)


def _why_wide(scene: Scene, node: Node, row: Product, half: str) -> tuple[str, str]:
    left, right = map(short, row.operand_dtypes)
    cause = f"{row.pass_name} multiplies {left} with {right}"
    if row.pass_name in ("dgrad", "wgrad"):
        remedy = (
            f"make the forward product {half}, operands and result, or use jaxmp.matmul: a float32 "
            "result, as with preferred_element_type, has a float32 cotangent"
        )
        return cause, remedy
    begins = [_begins_wide(scene, operand) for operand in node.operands[:2] if is_wide(operand)]
    origins = " and ".join(dict.fromkeys(filter(None, begins)))
    since = f", float32 since {origins}" if origins else ""
    return f"{cause}{since}", f"cast to {half} before the product, or where it became float32"


def _begins_wide(scene: Scene, node: Node) -> str:
    """Returns where a float32 value came from: the cast or promotion, or the argument."""
    seen, stack, inputs = set(), [node], []
    while stack and len(seen) < 500:
        value = stack.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value.primitive == "convert_element_type" and is_half(value.operands[0]):
            return value.where or value.path
        if value.kind == "input" and is_wide(value):
            inputs.append(f"argument {scene.program.input_names[value.index]}")
        if value.primitive not in _cost.PRODUCTS:
            stack.extend(operand for operand in value.operands if is_wide(operand))
    return inputs[0] if inputs else ""


def narrow_products(scene: Scene) -> Iterator[Finding]:
    """Narrower operands than a given policy says, or the other half dtype."""
    if not scene.intent.given or scene.intent.policy.recipe is not None:
        return
    for node, row in scene.analysis.products:
        wanted = scene.intent.at(row.path, row.parameter).compute_dtype
        dtypes = float_operands(row)
        if not any(dtype in HALF_DTYPES and dtype != wanted for dtype in dtypes):
            continue
        left, right = map(short, row.operand_dtypes)
        yield Finding(
            "narrow-product",
            node,
            row.flops * row.times,
            "FLOP",
            f"{row.pass_name} multiplies {left} with {right}, compute_dtype is "
            f"{short(wanted.name)}",
            f"cast to {wanted.name} there, or audit with the policy that is meant",
            row.parameter,
        )


def rounded_weight_gradients(scene: Scene) -> Iterator[Finding]:
    """A gradient of a parameter goes through half on its way to float32."""
    products = {id(node): (node, row) for node, row in scene.analysis.products}
    order = {key: i for i, key in enumerate(products)}
    for node, row in scene.analysis.casts:
        source = node.operands[0]
        if not (is_half(source) and is_wide(node) and scene.is_gradient(node)):
            continue
        made_of = reaching([source], _through_half).intersection(products)
        place, product = products[min(made_of, key=order.__getitem__)] if made_of else (node, None)
        yield Finding(
            "rounded-weight-gradient",
            place,
            math.prod(row.shape) * FLOAT32.itemsize * row.times,
            "B",
            f"{OF_A_PRODUCT if product else 'the gradient of a parameter'} is rounded to "
            f"{short(row.from_dtype)}, then cast to {short(row.to_dtype)}",
            "use jaxmp.matmul, einsum or conv_general_dilated, which narrow the float32 parameter "
            "themselves: its gradient is float32, straight from the accumulator"
            if product
            else "use the float32 parameter in float32 arithmetic, and narrow the result",
            product.parameter if product else "",
        )


def _through_half(node: Node, operand: Node) -> bool:
    moved = node.kind != "equation" or node.primitive in SHAPE_PRIMITIVES
    return (is_half(node) or moved) and keeps_elements(node, operand)


def ping_pong_casts(scene: Scene) -> Iterator[Finding]:
    """A cast and its reverse with only moves in between."""
    for node, row in scene.analysis.casts:
        between = _chain(node.operands[0])
        first = between[-1]
        if first.primitive != "convert_element_type" or math.prod(row.shape) < _FEW_NUMBERS:
            continue
        source = first.operands[0]
        if not is_inexact(source.dtype) or np.dtype(source.dtype) != np.dtype(node.dtype):
            continue
        # To round to 8 bits and go on in half is how fp8 is simulated, and what XLA looks for.
        if scene.is_gradient(node) or np.dtype(first.dtype).itemsize == 1:
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


def promotions(scene: Scene) -> Iterator[Finding]:
    """A float32 constant or argument widens a half value."""
    states = {i for i, _ in scene.program.state_pairs}
    for node, row in scene.analysis.casts:
        if node.eqn is None or is_backward(node) or math.prod(row.shape) < _FEW_NUMBERS:
            continue
        if not (is_half(node.operands[0]) and is_wide(node) and is_promotion(node.eqn)):
            continue
        users = scene.users(node)
        other = _other_operand(users, node)
        if other is None or all(user.primitive in _cost.PRODUCTS for user in users):
            continue
        origin = unmoved(other)
        if origin.kind == "input":
            if origin.index in states and any(id(u) in scene.analysis.gradients for u in users):
                # A half update of a float32 state: it is the state that must stay wide.
                continue
            what = f"argument {scene.program.input_names[origin.index]}"
            fix = f"cast the argument to {row.from_dtype}, or do this in float32 and narrow after"
        elif _is_constant(origin):
            what = "constant"
            fix = f"make the constant a Python number, or cast it to {row.from_dtype}"
        else:
            # What was computed in float32 was meant to be, as the statistics of a norm.
            continue
        if _is_narrowed_again(scene, users):
            continue
        yield Finding(
            "promotion",
            node,
            row.bytes * row.times,
            "B",
            f"{short(row.from_dtype)} meets a {short(row.to_dtype)} {what} in {users[0].primitive}",
            fix,
        )


def _is_narrowed_again(scene: Scene, users: list[Node]) -> bool:
    """Whether the widened result is only cast back: a float32 operation between half values."""
    results = [after for user in users for after in scene.users(user)]
    return bool(results) and all(
        after.primitive == "convert_element_type" and is_half(after) for after in results
    )


def _is_constant(node: Node) -> bool:
    """Whether a value is made of constants only: a number, a table."""
    stack, seen = [node], set()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        starts = value.kind == "constant" or value.primitive == "iota"
        if not starts and (value.kind != "equation" or not value.operands):
            return False
        stack.extend(value.operands)
    return True


def _other_operand(users: list[Node], node: Node) -> Node | None:
    for user in users:
        for operand in user.operands:
            same = operand is not node and is_inexact(operand.dtype)
            if same and np.dtype(operand.dtype) == np.dtype(node.dtype):
                return operand
    return None
