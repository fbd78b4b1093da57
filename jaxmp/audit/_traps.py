"""Traps of a program: what costs accuracy, speed or memory without an error."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jaxmp._dataflow import Node
from jaxmp._dtypes import BFLOAT16, FLOAT16, FLOAT32, HALF_DTYPES, is_inexact
from jaxmp.audit._format import quantity
from jaxmp.audit._program import Analysis
from jaxmp.audit._rows import Trap
from jaxmp.audit._trace import Program
from jaxmp.policy import Policy

TRAPS = {
    "wide-product": "a matmul or convolution has a float32 operand under a half policy",
    "rounded-weight-gradient": "a weight gradient is rounded to half and widened again",
    "ping-pong-cast": "a value is cast away and back, and nothing is done in between",
    "promotion": "type promotion widens a half value to float32",
    "half-softmax": "the exponentials of a softmax are half",
    "half-norm": "the statistics of a normalization are half",
    "half-sum": "a sum, mean or cumulative sum adds up in half",
    "half-loss": "a loss or log-sum-exp is half",
    "half-scatter-add": "a scatter-add, such as an embedding's gradient, adds up in half",
    "narrow-collective": "devices add up in fewer bits than the policy's reduce_dtype",
    "wide-collective": "devices exchange more bits than the policy needs",
    "unscaled-float16": "float16 gradients are not protected by a loss scale",
    "dtype-change": "a state comes out of the function in another dtype than it went in",
    "rounded-carry": "a loop computes in float32 and rounds what it carries at every turn",
    "unused-donation": "a donated buffer is not reused",
    "compiled-wider": "the compiler runs a narrow product in a wider dtype",
}


@dataclasses.dataclass(frozen=True)
class Intent:
    """What the program is meant to be.

    Attributes:
        policy: the policy that it was written for; inferred from the program if none was given.
        given: whether the policy was given.
    """

    policy: Policy
    given: bool

    def is_half(self, path: str) -> bool:
        """Whether the matmuls at a module path are meant to be narrow."""
        policy = self.policy.for_path(path)
        return policy.compute_dtype in HALF_DTYPES or policy.recipe is not None


def infer_intent(analysis: Analysis, policy: Policy | None) -> Intent:
    """Returns the intent of a program: the policy, or the half dtype that most products have."""
    if policy is not None:
        return Intent(policy, given=True)
    flops: collections.Counter[str] = collections.Counter()
    for _, row in analysis.products:
        for dtype in row.operand_dtypes:
            flops[dtype] += row.flops * row.times
    for dtype in (FLOAT16, BFLOAT16):
        # A program that casts to half and then promotes all of it is meant to be half.
        if dtype.name not in flops and any(r.to_dtype == dtype.name for _, r in analysis.casts):
            flops[dtype.name] = 0
    half = [name for name in (FLOAT16.name, BFLOAT16.name) if name in flops]
    narrow = any(np.dtype(name).itemsize == 1 for name in flops)
    if not half and not narrow:
        return Intent(Policy(FLOAT32, FLOAT32, FLOAT32), given=False)
    compute = max(half, key=lambda name: flops[name], default=BFLOAT16.name)
    return Intent(Policy(FLOAT32, compute, FLOAT32), given=False)


@dataclasses.dataclass(frozen=True)
class Scene:
    """What the detectors look at."""

    program: Program
    analysis: Analysis
    intent: Intent
    consumers: dict[int, list[Node]]

    def only_feeds(self, node: Node, targets: Iterable[Node]) -> bool:
        """Whether every use of a value is among `targets`."""
        allowed = {id(target) for target in targets}
        return all(id(user) in allowed for user in self.consumers.get(id(node), ()))


@dataclasses.dataclass(frozen=True)
class Finding:
    """One occurrence of a trap; those of one line and cause become one row."""

    kind: str
    node: Node | None
    amount: int
    unit: str
    cause: str
    remedy: str
    path: str = ""


def consumers_of(analysis: Analysis) -> dict[int, list[Node]]:
    """Returns the users of each value, by the value's id."""
    consumers: dict[int, list[Node]] = collections.defaultdict(list)
    seen: set[int] = set()
    stack = [*analysis.flow.nodes, *analysis.flow.carries, *analysis.flow.outputs]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        for operand in node.operands:
            consumers[id(operand)].append(node)
            stack.append(operand)
    for node in analysis.flow.outputs:
        consumers[id(node)].append(Node("output", node.aval, [node]))
    return dict(consumers)


def merge(findings: Iterable[Finding]) -> tuple[Trap, ...]:
    """Makes one trap of the findings of one kind, path, line and cause."""
    groups: dict[tuple[str, ...], list[Finding]] = collections.defaultdict(list)
    for finding in findings:
        node = finding.node
        path = finding.path or (node.path if node is not None else "")
        where = node.where if node is not None else ""
        groups[finding.kind, path, where, finding.cause].append(finding)
    order = list(TRAPS)
    ranked = sorted(
        groups.items(),
        key=lambda item: (order.index(item[0][0]), -sum(f.amount for f in item[1])),
    )
    return tuple(
        Trap(kind, path, where, _cost(group), cause, group[0].remedy)
        for (kind, path, where, cause), group in ranked
    )


def _cost(group: Sequence[Finding]) -> str:
    total = sum(finding.amount for finding in group)
    places = f" in {len(group)} places" if len(group) > 1 else ""
    return quantity(total, group[0].unit) + places if group[0].unit else f"{total}{places}"


def is_half(node: Node) -> bool:
    """Whether a value is float16 or bfloat16."""
    return node.dtype in HALF_DTYPES


def is_wide(node: Node) -> bool:
    """Whether a value is float32 or wider."""
    return is_inexact(node.dtype) and np.dtype(node.dtype).itemsize >= FLOAT32.itemsize
