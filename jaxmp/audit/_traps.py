"""Traps of a program: what costs accuracy, speed or memory without an error."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np

from jaxmp._dataflow import Node
from jaxmp._dtypes import BFLOAT16, FLOAT16, FLOAT32, HALF_DTYPES, is_inexact
from jaxmp.audit._format import quantity
from jaxmp.audit._program import Analysis
from jaxmp.audit._rows import Product, Trap
from jaxmp.audit._trace import Program
from jaxmp.policy import Policy

# In the order of a report: what spoils a run first, then what costs speed, then accuracy.
TRAPS = {
    "compiled-wider": "the compiler runs a narrow product in a wider dtype",
    "unscaled-float16": "float16 gradients are not protected by a loss scale",
    "narrow-state": "parameters or optimizer state are kept narrower than the policy says",
    "dtype-change": "a state comes out of the function in another dtype than it went in",
    "wide-product": "a matmul or convolution has a float32 operand under a half policy",
    "narrow-product": "a matmul or convolution has narrower operands than the policy says",
    "promotion": "type promotion widens a half value to float32",
    "half-loss": "a loss or log-sum-exp is half",
    "half-softmax": "the exponentials of a softmax are half",
    "half-norm": "the statistics of a normalization are half",
    "half-scatter-add": "a scatter-add, such as an embedding's gradient, adds up in half",
    "rounded-carry": "a loop rounds what it carries to half at every turn",
    "rounded-weight-gradient": "a gradient is rounded to half and widened again",
    "half-sum": "a sum, mean or cumulative sum adds up in half",
    "narrow-collective": "devices add up in fewer bits than the policy's reduce_dtype",
    "wide-collective": "devices exchange more bits than the policy needs",
    "unused-donation": "a donated buffer is not reused",
    "ping-pong-cast": "a value is cast away and back, and nothing is done in between",
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

    def at(self, path: str, parameter: str = "") -> Policy:
        """Returns the policy of a place: that of the last rule that matches it, else the policy.

        A rule is written for the tree that the policy casts, so it may match the name of the
        parameter, or the module path, from any level on.
        """
        names = [*_from_each_level(path), *_from_each_level(parameter)]
        for pattern, policy in reversed(self.policy.rules):
            if any(re.search(pattern, name) for name in names):
                return policy
        return self.policy

    def is_half(self, path: str, parameter: str = "") -> bool:
        """Whether the matmuls at a place are meant to be narrow."""
        policy = self.at(path, parameter)
        return policy.compute_dtype in HALF_DTYPES or policy.recipe is not None


def _from_each_level(path: str) -> list[str]:
    names = path.split("/")
    return ["/".join(names[i:]) for i in range(len(names))]


def infer_intent(analysis: Analysis, policy: Policy | None) -> Intent:
    """Returns the intent of a program: the policy, or the half dtype that most products have."""
    if policy is not None:
        return Intent(policy, given=True)
    flops: collections.Counter[str] = collections.Counter()
    for _, row in analysis.products:
        for dtype in row.operand_dtypes:
            flops[dtype] += row.flops * row.times
    for dtype in (FLOAT16, BFLOAT16):
        # A program whose products are all made of half values, and promoted, is meant to be half.
        if dtype.name not in flops and _reaches_product(analysis, dtype.name):
            flops[dtype.name] = 0
    half = [name for name in (FLOAT16.name, BFLOAT16.name) if name in flops]
    narrow = any(is_inexact(np.dtype(name)) and np.dtype(name).itemsize == 1 for name in flops)
    if not half and not narrow:
        return Intent(Policy(FLOAT32, FLOAT32, FLOAT32), given=False)
    compute = max(half, key=lambda name: flops[name], default=BFLOAT16.name)
    return Intent(Policy(FLOAT32, compute, FLOAT32), given=False)


def _reaches_product(analysis: Analysis, dtype: str) -> bool:
    casts = [node for node, row in analysis.casts if row.to_dtype == dtype]
    dependent = analysis.flow.made_of(casts)
    return any(id(node) in dependent for node, _ in analysis.products)


@dataclasses.dataclass(frozen=True)
class Scene:
    """What the detectors look at."""

    program: Program
    analysis: Analysis
    intent: Intent

    def users(self, node: Node) -> list[Node]:
        """Returns the values that are made of a value."""
        return self.analysis.flow.users.get(id(node), [])

    def only_feeds(self, node: Node, targets: Iterable[Node]) -> bool:
        """Whether every use of a value is among `targets`."""
        allowed = {id(target) for target in targets}
        return all(id(user) in allowed for user in self.users(node))

    def made_of(self, starts: Iterable[Node]) -> set[int]:
        """Returns the ids of all values that depend on one of `starts`."""
        return self.analysis.flow.made_of(starts)

    def is_gradient(self, node: Node) -> bool:
        """Whether a value of the backward pass becomes the gradient of a parameter."""
        return is_backward(node) and id(node) in self.analysis.gradients


def is_backward(node: Node) -> bool:
    """Whether autodiff made the value on its way back."""
    return "transpose(" in node.name_stack


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


def is_rounded_product(trap: Trap) -> bool:
    """Whether a trap is the rounded weight gradient of a matmul or convolution."""
    return trap.kind == "rounded-weight-gradient" and OF_A_PRODUCT in trap.cause


OF_A_PRODUCT = "the gradient of a product"


def merge(findings: Iterable[Finding]) -> tuple[Trap, ...]:
    """Makes one trap of the findings of one kind, line and cause."""
    groups: dict[tuple[str, ...], list[Finding]] = collections.defaultdict(list)
    for finding in findings:
        where = finding.node.where if finding.node is not None else ""
        # What a line makes for several parameters is one trap; without a line the name is needed.
        module = finding.node.path if finding.node is not None else ""
        groups[finding.kind, where, module or finding.path * (not where), finding.cause].append(
            finding
        )
    order = list(TRAPS)
    ranked = sorted(
        groups.items(),
        key=lambda item: (order.index(item[0][0]), -sum(f.amount for f in item[1])),
    )
    return tuple(
        Trap(kind, _path(module, group), where, _cost(group), cause, group[0].remedy)
        for (kind, where, module, cause), group in ranked
    )


def _path(module: str, group: Sequence[Finding]) -> str:
    names = list(dict.fromkeys(finding.path for finding in group if finding.path))
    if module or not names:
        return module
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"


def _cost(group: Sequence[Finding]) -> str:
    total = sum(finding.amount for finding in group)
    places = f" in {len(group)} places" if len(group) > 1 else ""
    return quantity(total, group[0].unit) + places


def is_half(node: Node) -> bool:
    """Whether a value is float16 or bfloat16."""
    return node.dtype in HALF_DTYPES


def is_wide(node: Node) -> bool:
    """Whether a value is float32 or wider."""
    return is_inexact(node.dtype) and np.dtype(node.dtype).itemsize >= FLOAT32.itemsize


def float_operands(row: Product) -> list[np.dtype]:
    """Returns the dtypes of both operands, or nothing for a product of integers."""
    dtypes = [np.dtype(dtype) for dtype in row.operand_dtypes]
    return dtypes if all(map(is_inexact, dtypes)) else []
