"""The first operation of a program that makes infinity or NaN."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from jaxmp import _tree
from jaxmp._dataflow import Dataflow, Node, dataflow, reaching
from jaxmp._dtypes import is_inexact
from jaxmp._gradients import value_and_grad
from jaxmp._jaxpr import aval_of, dtype_of_var, is_opaque, kernel_name
from jaxmp._widen import CannotWidenError, widen
from jaxmp.autocast import autocast
from jaxmp.diagnose._observe import Loop, Observer, Place, Record, places_of
from jaxmp.loss_scale import NoOpLossScale, as_loss_scale
from jaxmp.policy import Policy, get_policy


@dataclasses.dataclass(frozen=True)
class Operand:
    """What went into an operation.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        smallest: the least finite number in it; NaN if there is none.
        largest: the greatest.
        nonfinite: how many of its numbers are infinite or NaN.
    """

    dtype: str
    shape: tuple[int, ...]
    smallest: float
    largest: float
    nonfinite: int

    def __str__(self) -> str:
        text = f"{self.dtype}{list(self.shape)} from {self.smallest:.4g} to {self.largest:.4g}"
        return f"{text}, {self.nonfinite} not finite" if self.nonfinite else text


@dataclasses.dataclass(frozen=True)
class NonfiniteReport:
    """Where infinity or NaN comes from; what `first_nonfinite` returns.

    Attributes:
        nonfinite: names of the results that are not finite; all else is empty without any.
        path: the module that the operation is in.
        where: the user's line: `"model.py:35 (attend)"`.
        operation: name of the primitive, or of the kernel.
        backward: whether the loss does not need it, but its gradient.
        turns: for each loop around, outermost first, in which turn: its index among what is
            scanned, or the number of the turn of a while loop.
        makes: `"inf"` or `"nan"`.
        dtype: of its result.
        operands: the floats that went into it.
        blame: `"dtype"` if the same in float32 is finite, `"scale"` if it is finite without the
            loss scale, else `"model"`; `"input"` if what was given is not finite.
        inputs: names of the arguments that are not finite.
    """

    nonfinite: tuple[str, ...] = ()
    path: str = ""
    where: str = ""
    operation: str = ""
    backward: bool = False
    turns: tuple[int, ...] = ()
    makes: str = ""
    dtype: str = ""
    operands: tuple[Operand, ...] = ()
    blame: str = ""
    inputs: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.nonfinite)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain dicts, lists, text and numbers: what JSON can hold."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def __str__(self) -> str:
        if not self:
            return "All results are finite."
        shown = ", ".join(self.nonfinite[:5]) + (", …" if len(self.nonfinite) > 5 else "")
        lines = [f"Not finite: {shown}"]
        if self.inputs:
            return "\n".join([*lines, f"These arguments are not: {', '.join(self.inputs)}"])
        if not self.operation:
            return "\n".join(
                [*lines, "They come of constants of the program, not of an operation."]
            )
        turns = f", in turn {', '.join(map(str, self.turns))}" if self.turns else ""
        direction = "backward" if self.backward else "forward"
        lines += [
            f"The first {self.makes} is made by {self.operation} ({self.dtype}), "
            f"{direction}{turns}",
            f"  in {self.path or 'no module'} at {self.where or 'no line of yours'}",
            *(f"  of {operand}" for operand in self.operands),
            f"To blame: {_BLAME[self.blame]}",
        ]
        return "\n".join(lines)


_BLAME = {
    "dtype": "the dtype; the same in float32 is finite. Keep this module in float32 by a rule.",
    "scale": "the loss scale; without it all is finite. A dynamic one lowers itself.",
    "model": "the model; in float32 it is not finite either.",
}


def first_nonfinite(
    fun: Callable[..., Any],
    *args: Any,
    policy: Policy | str = "float32",
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    loss_scale: Any = None,
) -> NonfiniteReport:
    """Finds the first operation that makes infinity or NaN which reaches a result.

    The program is run once more, operation by operation, with a look at every value: through calls,
    scans, loops, branches and what is recomputed. Infinities that reach no result, such as
    those of a mask, are none. Kernels, and what a `shard_map` runs, are one operation.

    Args:
        fun: any function; with `argnums` a loss.
        *args: its arguments.
        policy: it is computed under.
        argnums: what to differentiate: then the gradients are looked at too.
        has_aux: whether the loss returns a pair; for gradients.
        loss_scale: of the gradients.

    Returns:
        The operation with its place, its operands and what is to blame, by running the program
        again without a scale and in float32. False if all results are finite.

    Raises:
        ValueError: if there is a `loss_scale` and no `argnums`, if the loss is no real scalar, or
            within a function that is traced.

    Example:
        >>> report = first_nonfinite(lambda x: jnp.log(x - 1), jnp.ones(3))
        >>> report.operation, report.makes, report.blame
        ('log', 'inf', 'model')
    """
    if loss_scale is not None and argnums is None:
        raise ValueError(
            "A loss_scale was given, but no argnums: it is for gradients. Say what is "
            "differentiated, such as argnums=0."
        )
    if any(map(_tree.is_traced, jax.tree.leaves(args))):
        raise ValueError(
            "first_nonfinite needs numbers, but was called while a function is traced. Call it "
            "outside of jax.jit, with the function that is jitted."
        )
    scale = NoOpLossScale() if loss_scale is None else as_loss_scale(loss_scale)
    target = _Target(fun, get_policy(policy), argnums, has_aux, scale)
    # Those would end the run where it is to be looked at.
    with jax.debug_nans(False), jax.debug_infs(False):
        found = _look(target.function(), args, has_loss=argnums is not None)
        return dataclasses.replace(found, blame=_blame(target, args)) if found.operation else found


@dataclasses.dataclass(frozen=True)
class _Target:
    """The program that is looked at; see `first_nonfinite`."""

    fun: Callable[..., Any]
    policy: Policy
    argnums: int | Sequence[int] | None
    has_aux: bool
    loss_scale: Any

    def function(self) -> Callable[..., Any]:
        if self.argnums is None:
            return autocast(self.fun, self.policy)
        grad_fn = value_and_grad(
            self.fun,
            self.policy,
            argnums=self.argnums,
            has_aux=self.has_aux,
            loss_scale=self.loss_scale,
        )

        def named(*args: Any) -> dict[str, Any]:
            value, grads = grad_fn(*args)
            loss, *aux = value if self.has_aux else (value,)
            return {"loss": loss, "gradients": grads, "aux": aux}

        return named


def _blame(target: _Target, args: Sequence[Any]) -> str:
    plain = dataclasses.replace(target, loss_scale=NoOpLossScale())
    if not isinstance(target.loss_scale, NoOpLossScale) and _is_finite(plain.function(), args):
        return "scale"
    full = dataclasses.replace(plain, policy=get_policy("float32"))
    return "dtype" if _is_finite(_in_float32(full.function(), args), args) else "model"


def _in_float32(fun: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """Returns a function without the half dtypes that are written in it, where that can be done."""
    try:
        wide = widen(jax.make_jaxpr(fun)(*args))
    except CannotWidenError:
        return fun

    def in_float32(*args: Any) -> Any:
        return jaxpr_as_fun(wide)(*map(_tree.widen_leaf, jax.tree.leaves(args)))

    return in_float32


def _is_finite(fun: Callable[..., Any], args: Sequence[Any]) -> bool:
    return not any(map(_has_nonfinite, jax.tree.leaves(jax.jit(fun)(*args))))


def _has_nonfinite(value: Any) -> bool:
    return _is_float(value) and not bool(jnp.all(jnp.isfinite(jnp.asarray(value))))


def _is_float(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    dtype = jnp.result_type(value) if dtype is None else dtype
    return is_inexact(dtype)


def _look(fun: Callable[..., Any], args: Sequence[Any], *, has_loss: bool) -> NonfiniteReport:
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    leaves = jax.tree.leaves(args)
    outputs, records = _observed(closed, leaves, None)
    names = _tree.leaf_names(shapes)
    bad = [i for i, value in enumerate(outputs) if _has_nonfinite(value)]
    results = tuple(names[i] or "the result" for i in bad)
    inputs = tuple(
        name or f"argument {i}"
        for i, (name, leaf) in enumerate(zip(_tree.leaf_names(args), leaves, strict=True))
        if _has_nonfinite(leaf)
    )
    if not bad or inputs:
        return NonfiniteReport(results, inputs=inputs if bad else ())
    flow, places = dataflow(closed), places_of(closed.jaxpr)
    position = _first(flow, [flow.outputs[i] for i in bad], records, places)
    if position is None:
        return NonfiniteReport(results)
    _, records = _observed(closed, leaves, position)
    node, record, place = flow.equations[position][0], records[position], places[position]
    backward = "transpose(" in node.name_stack
    if has_loss:
        outputs = zip(names, flow.outputs, strict=True)
        forward = [node for name, node in outputs if not _is_gradient(name)]
        needed = reaching(forward, lambda node, operand: True)
        backward = not any(id(node) in needed for node in flow.equations[position])
    return dataclasses.replace(
        _described(node, record, place), nonfinite=results, backward=backward
    )


def _is_gradient(name: str) -> bool:
    return name == "gradients" or name.startswith("gradients/")


def _observed(
    closed: ClosedJaxpr, leaves: Sequence[Any], position: int | None
) -> tuple[list[Any], list[Record]]:
    """Runs a program and returns its outputs and records, with the operands of one equation."""

    def look(index: int, _: JaxprEqn, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        given, made = (list(filter(_is_float, values)) for values in (operands, results))
        return _flags(given, made), _ranges(given) if index == position else []

    observer = Observer(look, lambda value: jnp.any(_makes(value[0])))
    # Operation by operation: a program of so many results would take long to compile.
    outputs, records = observer.run(closed.jaxpr, closed.consts, list(leaves))
    return outputs, jax.device_get(records)


@jax.jit
def _flags(operands: Sequence[Any], results: Sequence[Any]) -> jax.Array:
    """Whether what goes in is not finite; whether infinity and NaN come out: bool[3]."""
    given = _any(jnp.isinf, operands) | _any(jnp.isnan, operands)
    return jnp.stack([given, _any(jnp.isinf, results), _any(jnp.isnan, results)])


def _any(test: Callable[[Any], Any], values: Iterable[Any]) -> jax.Array:
    flags = [jnp.any(test(value)) for value in values]
    return jnp.any(jnp.stack(flags)) if flags else jnp.bool_(False)


def _makes(flags: Any) -> Any:
    """Whether what comes out is not finite, and what goes in is."""
    return (flags[..., 1] | flags[..., 2]) & ~flags[..., 0]


@jax.jit
def _ranges(values: Sequence[Any]) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    return list(map(_range, values))


def _range(value: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    wide = _tree.widen_leaf(value)
    wide = jnp.abs(wide) if jnp.iscomplexobj(wide) else wide
    finite = jnp.isfinite(wide)
    least = jnp.min(wide, initial=math.inf, where=finite)
    greatest = jnp.max(wide, initial=-math.inf, where=finite)
    return least, greatest, jnp.sum(~finite, dtype=jnp.int32)


def _first(
    flow: Dataflow, bad: Sequence[Node], records: Sequence[Record], places: Sequence[Place]
) -> int | None:
    """Returns the position of the first equation that makes what reaches a result."""
    positions = {id(node): i for i, results in enumerate(flow.equations) for node in results}
    is_bad = [bool(np.any(record.value[0][..., 1:])) for record in records]

    def follows(_: Node, operand: Node) -> bool:
        position = positions.get(id(operand))
        return operand.kind not in ("input", "constant") and (position is None or is_bad[position])

    reached = reaching(bad, follows)
    found = [
        ((*_turn(record, place.loops)[1], position), position)
        for position, (results, record, place) in enumerate(
            zip(flow.equations, records, places, strict=True)
        )
        if np.any(_makes(record.value[0])) and any(id(node) in reached for node in results)
    ]
    return min(found)[1] if found else None


def _turn(
    record: Record, loops: Sequence[Loop]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns where an equation first makes what is not finite.

    Returns:
        Its index along the axes of scans; what orders it among others; the turn in each loop.
    """
    scans = [loop for loop in loops if loop.length is not None]
    made = _makes(record.value[0])
    backward = tuple(i for i, loop in enumerate(scans) if loop.is_reversed)
    index = list(np.unravel_index(int(np.argmax(np.flip(made, backward))), made.shape))
    for i in backward:
        index[i] = made.shape[i] - 1 - index[i]
    order: list[int] = []
    turns: list[int] = []
    seen, whiles = 0, iter(record.turns)
    for loop in loops:
        if loop.length is None:
            turn = executed = int(next(whiles)[tuple(index[:seen])])
        else:
            turn = int(index[seen])
            executed = loop.length - 1 - turn if loop.is_reversed else turn
            seen += 1
        order += [loop.position, executed]
        turns.append(turn)
    return tuple(map(int, index)), tuple(order), tuple(turns)


def _described(node: Node, record: Record, place: Place) -> NonfiniteReport:
    index, _, turns = _turn(record, place.loops)
    flags, ranges = jax.tree.map(lambda leaf: leaf[index], record.value)
    eqn = place.eqn
    floats = [aval for aval in map(aval_of, eqn.invars) if is_inexact(aval.dtype)]
    name = getattr(eqn.params.get("base"), "name", eqn.primitive.name)
    return NonfiniteReport(
        path=node.path,
        where=node.where,
        operation=(is_opaque(eqn) and kernel_name(eqn)) or name,
        turns=turns,
        makes="nan" if flags[2] else "inf",
        dtype=str(dtype_of_var(eqn.outvars[0])),
        operands=tuple(
            Operand(str(aval.dtype), aval.shape, float(least), float(greatest), int(count))
            for aval, (least, greatest, count) in zip(floats, ranges, strict=True)
        ),
    )
