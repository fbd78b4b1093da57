"""Detectors of traps in what should be float32, in states and between devices."""

import collections
import math
from collections.abc import Callable, Iterator

import numpy as np

from jaxmp._dataflow import Node, unmoved
from jaxmp._dtypes import FLOAT16, HALF_DTYPES, is_inexact, is_real_float
from jaxmp.audit import _cost, _detectors
from jaxmp.audit._format import short
from jaxmp.audit._program import SUMMING_COLLECTIVES, Analysis
from jaxmp.audit._rows import Reduction, Trap
from jaxmp.audit._trace import Program
from jaxmp.audit._traps import (
    Finding,
    Intent,
    Scene,
    is_backward,
    is_half,
    is_wide,
    merge,
)

# Rounding errors of shorter sums are of the size of one rounding.
_FEW_TERMS = 8


def _name(node: Node) -> str:
    return short(np.dtype(node.dtype).name)


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
                f"exp of {_name(node)}, after the maximum is subtracted",
                "cast the scores to float32 before the softmax, and its result back",
            )


def _half_norm(scene: Scene) -> Iterator[Finding]:
    for node in scene.analysis.flow.nodes:
        if node.primitive not in ("rsqrt", "sqrt") or not is_half(node) or is_backward(node):
            continue
        if any(_is_statistic(value) for value in _back(node, 6)):
            yield Finding(
                "half-norm",
                node,
                math.prod(node.shape),
                "statistics",
                f"{node.primitive} of a sum in {_name(node)}",
                "cast the input to float32 before its statistics, and the normalized value back",
            )


def _is_statistic(node: Node) -> bool:
    """Whether a value is a sum, or a sum of squares written as a product with itself."""
    squares = node.primitive == "dot_general" and unmoved(node.operands[0]) is unmoved(
        node.operands[1]
    )
    return node.primitive == "reduce_sum" or squares


def _half_sums(scene: Scene) -> Iterator[Finding]:
    for node, row in scene.analysis.reductions:
        if row.terms < _FEW_TERMS:
            continue
        kind = "half-scatter-add" if row.primitive.startswith("scatter") else "half-sum"
        cause, remedy = _why_half(row, backward=is_backward(node))
        yield Finding(kind, node, row.terms * row.times, "terms", cause, remedy)


def _why_half(row: Reduction, *, backward: bool) -> tuple[str, str]:
    cause = f"{row.primitive}{' of a backward pass' if backward else ''} in {short(row.dtype)}"
    if not row.primitive.startswith("scatter"):
        if backward:
            return cause, (
                "do what broadcasts the parameter (a bias add, a scale) in float32 and narrow the "
                "result, (h.astype(float32) + b).astype(h.dtype): its gradient is that sum"
            )
        return cause, "cast to float32 before the sum"
    cause += f", which stops growing at {256 if row.dtype == 'bfloat16' else 2048} equal terms"
    if backward:
        return cause, "gather from the float32 table, and narrow what was gathered"
    return cause, "add up in a float32 array, and narrow the result"


def _half_losses(scene: Scene) -> Iterator[Finding]:
    remedy = "cast the logits to float32 before the loss"
    for node in scene.analysis.flow.nodes:
        if node.primitive != "log" or not is_half(node) or is_backward(node):
            continue
        if any(value.primitive == "reduce_sum" for value in _back(node, 3)):
            cause = f"log-sum-exp in {_name(node)}"
            yield Finding("half-loss", node, math.prod(node.shape), "values", cause, remedy)
    states = {o for _, o in scene.program.state_pairs}
    outputs = zip(scene.analysis.flow.outputs, scene.program.output_names, strict=True)
    for i, (node, name) in enumerate(outputs):
        if is_half(node) and not node.shape and node.kind != "input" and i not in states:
            cause = f"a scalar result is {_name(node)}"
            path = name or "(the result)"
            yield Finding("half-loss", node, 1, "value", cause, remedy, path)


def _collectives(scene: Scene) -> Iterator[Finding]:
    for node, row in scene.analysis.collectives:
        if not is_inexact(np.dtype(row.dtype)) or math.prod(row.shape) <= 1:
            continue
        wanted = scene.intent.at(row.path).reduce_dtype
        size = np.dtype(row.dtype).itemsize
        cost = row.bytes * row.times
        if row.primitive in SUMMING_COLLECTIVES:
            if size == wanted.itemsize:
                continue
            yield Finding(
                "narrow-collective" if size < wanted.itemsize else "wide-collective",
                node,
                cost,
                "B",
                f"{row.primitive} in {short(row.dtype)}, reduce_dtype is {short(wanted.name)}",
                f"cast to {wanted.name} before {row.primitive}",
            )
        elif is_wide(node) and _is_narrowed(scene, node):
            cause = f"{row.primitive} in {short(row.dtype)} of what is narrowed after"
            remedy = f"cast before {row.primitive}"
            yield Finding("wide-collective", node, cost, "B", cause, remedy)


def _is_narrowed(scene: Scene, node: Node) -> bool:
    """Whether every use of a value is a cast to half."""
    users = scene.users(node)
    return bool(users) and all(
        is_half(user) if user.primitive == "convert_element_type" else _moves_to_half(scene, user)
        for user in users
    )


def _moves_to_half(scene: Scene, node: Node) -> bool:
    return bool(node.operands) and unmoved(node) is not node and _is_narrowed(scene, node)


def _unscaled_float16(scene: Scene) -> Iterator[Finding]:
    backward = [
        (node, row)
        for node, row in scene.analysis.products
        if row.pass_name in ("dgrad", "wgrad") and FLOAT16.name in row.operand_dtypes
    ]
    if not backward or _checks_finite(scene, [node for node, _ in backward]):
        return
    for _, row in backward:
        yield Finding(
            "unscaled-float16",
            None,
            row.flops * row.times,
            "FLOP",
            "f16 products in a backward pass, and no check of the gradients for overflow",
            "use jaxmp.value_and_grad with a loss scale and jaxmp.mixed_precision, or bfloat16",
        )


def _checks_finite(scene: Scene, gradients: list[Node]) -> bool:
    """Whether something that depends on the gradients is compared with infinity, or itself."""
    tests = [node for node in scene.analysis.flow.nodes if _is_finite_test(node)]
    if not tests:
        return False
    dependent = scene.made_of(gradients)
    return any(id(node) in dependent for node in tests)


def _is_finite_test(node: Node) -> bool:
    if node.primitive == "is_finite":
        return True
    if node.primitive not in ("eq", "ne", "lt", "le", "gt", "ge"):
        return False
    left, right = map(unmoved, node.operands)
    values = [operand.value for operand in (left, right) if operand.value is not None]
    return left is right or any(np.isinf(np.asarray(value, np.float64)) for value in values)


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


def _narrow_states(scene: Scene) -> Iterator[Finding]:
    """Parameters that are updated in half, though the policy keeps float32."""
    outputs = scene.analysis.flow.outputs
    # Of other states, such as moments, the dtype is the optimizer's option.
    parameters = {row.parameter for _, row in scene.analysis.products}
    for i, o in scene.program.state_pairs:
        spec, name = scene.program.inputs[i], scene.program.input_names[i]
        if name not in parameters:
            continue
        wanted = scene.intent.at("", name).param_dtype
        changed = outputs[o].kind != "input"
        if not (changed and spec.shape and spec.dtype in HALF_DTYPES and is_real_float(wanted)):
            continue
        if wanted.itemsize <= np.dtype(spec.dtype).itemsize:
            continue
        yield Finding(
            "narrow-state",
            None,
            _cost.nbytes(spec),
            "B",
            f"a state is kept in {short(str(spec.dtype))}, param_dtype is {short(wanted.name)}: "
            "small updates round away",
            f"keep {wanted.name} and cast where it is used, or audit with the policy that is meant",
            path=name,
        )


def _rounded_carries(scene: Scene) -> Iterator[Finding]:
    for carry in scene.analysis.flow.carries:
        if not is_half(carry) or len(carry.operands) < 2:
            continue
        result = unmoved(carry.operands[1])
        cause = _rounding(scene, carry, result)
        if cause:
            yield Finding(
                "rounded-carry",
                result,
                carry.context.times,
                "roundings",
                f"{_name(carry)} is {cause} in each turn",
                "carry float32, and narrow what is used elsewhere",
            )


def _rounding(scene: Scene, carry: Node, result: Node) -> str:
    """Returns what a loop does to a half carry that costs a rounding each turn, or nothing."""
    users = scene.users(carry)
    widened = any(user.primitive == "convert_element_type" and is_wide(user) for user in users)
    if result.primitive == "convert_element_type" and is_wide(result.operands[0]) and widened:
        return "widened, changed and rounded"
    adds = result.primitive in ("add", "add_any") and any(
        unmoved(operand) is carry for operand in result.operands
    )
    # A residual stream is added to as well, but the layers read it.
    return "only added to, and rounded," if adds and scene.only_feeds(carry, [result]) else ""


def _unused_donations(scene: Scene) -> Iterator[Finding]:
    program = scene.program
    free = collections.Counter(
        (node.shape, str(node.dtype)) for node in scene.analysis.flow.outputs
    )
    inputs = zip(program.inputs, program.input_names, program.donated, strict=True)
    for spec, name, donated in inputs:
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
    _detectors.wide_products,
    _detectors.narrow_products,
    _detectors.rounded_weight_gradients,
    _detectors.ping_pong_casts,
    _detectors.promotions,
    _half_softmax,
    _half_norm,
    _half_sums,
    _half_losses,
    _collectives,
    _unscaled_float16,
    _dtype_changes,
    _narrow_states,
    _rounded_carries,
    _unused_donations,
)


def find_traps(program: Program, analysis: Analysis, intent: Intent) -> tuple[Trap, ...]:
    """Returns the traps of a program, in the order of `TRAPS`, the costliest of a kind first."""
    scene = Scene(program, analysis, intent)
    return merge(finding for detector in _DETECTORS for finding in detector(scene))
