"""The values of a program, with every call and loop opened: what is made of what."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxmp._jaxpr import (
    Inner,
    inner_jaxprs,
    is_jax_code,
    module_path,
    open_jaxpr,
    rank_differs,
    source_line,
)

# Primitives that move numbers and do not change them.
SHAPE_PRIMITIVES = frozenset(
    {
        "reshape",
        "transpose",
        "broadcast_in_dim",
        "squeeze",
        "expand_dims",
        "slice",
        "dynamic_slice",
        "gather",
        "rev",
        "copy",
        "copy_p",
        "stop_gradient",
        "optimization_barrier",
        "sharding_constraint",
        "mesh_cast",
        "reshard",
        "name",
        "device_put",
        "pvary",
        "pcast",
        "split",
    }
)


@dataclasses.dataclass(frozen=True)
class Context:
    """Where an equation stands.

    Attributes:
        name_stack: of the equations around it, joined by slashes.
        times: how often it is executed.
        devices: how many devices each execute it on their own part.
        call: the equation that calls the function of JAX it is in; None for other code.
    """

    name_stack: str = ""
    times: int = 1
    devices: int = 1
    call: JaxprEqn | None = None

    def enter(self, eqn: JaxprEqn, inner: Inner) -> "Context":
        """Returns the context of the equations of a jaxpr inside `eqn`."""
        call = self.call or (eqn if is_jax_code(inner.jaxpr) else None)
        return Context(
            self.stack_of(eqn), self.times * inner.times, self.devices * inner.devices, call
        )

    def line_of(self, eqn: JaxprEqn) -> str:
        """Returns the user's line of an equation.

        The jaxpr of a function of JAX may be cached, and then its lines are another caller's.
        """
        called = source_line(self.call) if self.call is not None else ""
        return called or source_line(eqn)

    def stack_of(self, eqn: JaxprEqn) -> str:
        """Returns the whole name stack of an equation."""
        own = str(eqn.source_info.name_stack)
        return f"{self.name_stack}/{own}" if own and self.name_stack else own or self.name_stack


class Node:
    """A value of the program, with calls and loops opened.

    Attributes:
        eqn: the equation that makes it; None for inputs, constants and what a loop carries.
        operands: the values it is made of. What a loop carries has two: the value before the loop
            and the one at the end of a turn.
        context: where the equation stands.
        kind: `"input"`, `"constant"`, `"carry"`, `"choice"` (the results of several branches,
            and what decides between them),
            `"scanned"` (a slice of a scanned array), `"stacked"` (the results of all turns) or
            `"equation"`.
        aval: shape and dtype.
        index: of an input: its position.
        value: of a number written in the program.
    """

    __slots__ = ("aval", "context", "eqn", "index", "kind", "operands", "value")

    def __init__(
        self,
        kind: str,
        aval: Any,
        operands: Sequence["Node"] = (),
        *,
        eqn: JaxprEqn | None = None,
        context: Context = Context(),
        index: int = -1,
        value: Any = None,
    ) -> None:
        self.kind = kind
        self.aval = aval
        self.operands = list(operands)
        self.eqn = eqn
        self.context = context
        self.index = index
        self.value = value

    @property
    def primitive(self) -> str:
        """Name of the primitive; empty for a value that no equation makes."""
        return self.eqn.primitive.name if self.eqn is not None else ""

    @property
    def dtype(self) -> Any:
        """Dtype of the value."""
        return getattr(self.aval, "dtype", None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def name_stack(self) -> str:
        """The whole name stack."""
        return self.context.stack_of(self.eqn) if self.eqn is not None else self.context.name_stack

    @property
    def path(self) -> str:
        """The module path."""
        return module_path(self.name_stack)

    @property
    def where(self) -> str:
        """The user's line that made the value: `"model.py:35 (attend)"`, or an empty string."""
        return "" if self.eqn is None else self.context.line_of(self.eqn)


@dataclasses.dataclass(frozen=True)
class Dataflow:
    """The values of a program.

    Attributes:
        inputs: one node for each input.
        nodes: one for each equation that is no call or loop and whose result is used, in the
            order of the program.
        carries: what the loops carry.
        outputs: one node for each output.
        equations: the results of each equation that is no call or loop, used or not, in the order
            of the program.
    """

    inputs: tuple[Node, ...]
    nodes: tuple[Node, ...]
    carries: tuple[Node, ...]
    outputs: tuple[Node, ...]
    equations: tuple[tuple[Node, ...], ...]

    @functools.cached_property
    def users(self) -> dict[int, list[Node]]:
        """The values that are made of each value, by the value's id; an output counts as one."""
        users: dict[int, list[Node]] = collections.defaultdict(list)
        seen: set[int] = set()
        stack = [*self.nodes, *self.carries, *self.outputs]
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            for operand in node.operands:
                users[id(operand)].append(node)
                stack.append(operand)
        for node in self.outputs:
            users[id(node)].append(Node("output", node.aval, [node]))
        return dict(users)

    def made_of(self, starts: Iterable[Node]) -> set[int]:
        """Returns the ids of all values that depend on one of `starts`, and their own."""
        seen: set[int] = set()
        stack = list(starts)
        while stack:
            node = stack.pop()
            if id(node) not in seen:
                seen.add(id(node))
                stack.extend(self.users.get(id(node), ()))
        return seen


def dataflow(jaxpr: Any, platform: str | None = None) -> Dataflow:
    """Opens every call and loop of a program and returns its values.

    Args:
        jaxpr: an open or closed jaxpr.
        platform: `"cpu"`, `"cuda"` or `"tpu"`: of `jax.lax.platform_dependent` only the branch of
            this platform is entered. None enters all.
    """
    jaxpr = open_jaxpr(jaxpr)
    builder = _Builder(platform)
    inputs = tuple(Node("input", var.aval, index=i) for i, var in enumerate(jaxpr.invars))
    outputs = builder.run(jaxpr, inputs, Context())
    effects = [results[0] for results in builder.equations if _has_effect(results[0])]
    live = reaching([*outputs, *effects], lambda node, operand: True)
    nodes = [results[0] for results in builder.equations if live.intersection(map(id, results))]
    carries = [node for node in builder.carries if id(node) in live]
    equations = tuple(map(tuple, builder.equations))
    return Dataflow(inputs, tuple(nodes), tuple(carries), tuple(outputs), equations)


def _has_effect(node: Node) -> bool:
    return node.eqn is not None and bool(node.eqn.effects)


class _Builder:
    def __init__(self, platform: str | None) -> None:
        self.platform = platform
        self.equations: list[list[Node]] = []
        self.carries: list[Node] = []

    def run(self, jaxpr: Jaxpr, inputs: Sequence[Node], context: Context) -> list[Node]:
        values: dict[Var, Node] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            values[var] = Node("constant", var.aval)

        def read(atom: Any) -> Node:
            if isinstance(atom, Literal):
                return Node("constant", atom.aval, value=atom.val)
            return values[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            results = self.equation(eqn, operands, context)
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, operands: list[Node], context: Context) -> list[Node]:
        inners = inner_jaxprs(eqn)
        if inners and eqn.primitive.name == "cond":
            inners = self.possible_branches(operands[0], inners)
        if not inners:
            results = _results(eqn, operands, context)
            self.equations.append(results)
            return results[: len(eqn.outvars)]
        choices: list[list[Node]] = [[] for _ in eqn.outvars]
        deciding = operands[:1] if eqn.primitive.name == "cond" else []
        for inner in inners:
            outputs = self.enter(eqn, inner, operands, context)
            for i, node in zip(inner.outputs, outputs, strict=True):
                if i is None:
                    deciding = [node]
                else:
                    choices[i].append(node)
        if len(inners) == 1:
            return [node for (node,) in choices]
        return [
            Node("choice", var.aval, [*nodes, *deciding], context=context)
            for nodes, var in zip(choices, eqn.outvars, strict=True)
        ]

    def enter(
        self, eqn: JaxprEqn, inner: Inner, operands: list[Node], context: Context
    ) -> list[Node]:
        within = context.enter(eqn, inner)
        carried = {i for _, i in inner.carries}
        inputs = []
        for i, (var, outer) in enumerate(zip(inner.jaxpr.invars, inner.inputs, strict=True)):
            node = operands[outer]
            if i in carried:
                node = Node("carry", var.aval, [node], context=within)
                self.carries.append(node)
            elif rank_differs(eqn.invars[outer], var):
                node = Node("scanned", var.aval, [node], context=within)
            inputs.append(node)
        outputs = self.run(inner.jaxpr, inputs, within)
        for result, i in inner.carries:
            inputs[i].operands.append(outputs[result])
        for i, (var, outer) in enumerate(zip(inner.jaxpr.outvars, inner.outputs, strict=True)):
            if outer is not None and rank_differs(eqn.outvars[outer], var):
                aval = eqn.outvars[outer].aval
                outputs[i] = Node("stacked", aval, [outputs[i]], context=context)
        return outputs

    def possible_branches(self, index: Node, inners: tuple[Inner, ...]) -> tuple[Inner, ...]:
        """Of a choice by platform, the branch of this one; else all branches."""
        if self.platform is None:
            return inners
        while index.eqn is not None and index.primitive != "platform_index":
            made_of = [node for node in index.operands if node.kind != "constant"]
            if len(made_of) != 1:
                return inners
            index = made_of[0]
        if index.eqn is None:
            return inners
        for inner, platforms in zip(inners, index.eqn.params["platforms"], strict=False):
            if platforms is None or self.platform in platforms:
                return (inner,)
        return inners


def _results(eqn: JaxprEqn, operands: list[Node], context: Context) -> list[Node]:
    """Returns a node for each output of an equation, one for an equation without outputs."""
    if eqn.primitive.name == "optimization_barrier":
        return [
            Node("equation", operand.aval, [operand], eqn=eqn, context=context)
            for operand in operands
        ]
    avals = [var.aval for var in eqn.outvars] or [None]
    return [Node("equation", aval, operands, eqn=eqn, context=context) for aval in avals]


def reaching(starts: Sequence[Node], follows: Callable[[Node, Node], bool]) -> set[int]:
    """Returns the ids of the nodes that reach one of `starts`.

    Args:
        starts: nodes to go back from.
        follows: `follows(node, operand)` says whether to go from a node to its operand.
    """
    seen = {id(node) for node in starts}
    stack = list(starts)
    while stack:
        node = stack.pop()
        for operand in node.operands:
            if id(operand) not in seen and follows(node, operand):
                seen.add(id(operand))
                stack.append(operand)
    return seen


def unmoved(node: Node) -> Node:
    """Returns the value that `node` only moves: what it was before reshapes, transposes, slices."""
    while node.operands and (
        node.kind in ("scanned", "stacked") or node.primitive in SHAPE_PRIMITIVES
    ):
        node = node.operands[0]
    return node
