"""The walk over a jaxpr that computes every equation in the dtype that the rules give it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from jaxmp._dtypes import FLOAT32, HALF_DTYPES
from jaxmp._jaxpr import Inner, aval_of, dtype_of_var, inner_jaxprs, is_cast_back, is_promotion
from jaxmp._product import PLAIN_PRODUCTS
from jaxmp._rebind import evaluate, in_place_of, rewritten_in, spec_of
from jaxmp.autocast import _control_flow, _rules
from jaxmp.autocast._activation import (
    Activation,
    find_activations,
    in_one_step,
    is_one_step,
)
from jaxmp.autocast._lookahead import (
    ANGLE,
    DELICATE,
    GRADIENT,
    MULTIPLIED,
    PRODUCT,
    Lookahead,
    Uses,
    is_island,
    is_stored_narrow,
)
from jaxmp.autocast._multiply import multiply, multiply_exactly
from jaxmp.autocast._pick import gather_of, scatter_of
from jaxmp.autocast._places import met, place_of, placed
from jaxmp.autocast._pool import pool_of
from jaxmp.autocast._recipe_use import RecipeUse
from jaxmp.autocast._region import Region, inside
from jaxmp.autocast._send import SENDS, sent
from jaxmp.autocast._softmax import find_softmaxes, normalize
from jaxmp.autocast._values import (
    DATA,
    FULL,
    GIVEN,
    PURE,
    WEIGHTS,
    YIELDING,
    Kind,
    State,
    Value,
    as_written,
    fits,
    float_dtype,
    full_of,
    narrow,
    written_state,
)
from jaxmp.policy import Policy


class Interpreter:
    """Computes jaxprs in mixed precision; lives for one call of an autocast function.

    Attributes:
        lookahead: what values lead to.
        paths: of all modules that were seen, for the rules that matched none.
        primitives: the names of those that were seen.
        recipes: which matmuls they take.
    """

    def __init__(self) -> None:
        self.lookahead = Lookahead()
        self.paths: set[str] = set()
        self.primitives: set[str] = set()
        self.recipes = RecipeUse()
        self._rewritten: dict[Any, Any] = {}
        self._activations: dict[Any, Any] = {}

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Value], uses: Uses, region: Region
    ) -> list[Value]:
        """Returns the outputs of a jaxpr, each in the state it comes out in."""
        values = {var: given(const) for var, const in zip(jaxpr.constvars, consts, strict=True)}
        values |= dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Value:
            if isinstance(atom, Literal):
                return _constant(atom, region.own_policy)
            return values[atom]

        softmaxes = find_softmaxes(jaxpr)
        activations = {} if region.is_full else find_activations(jaxpr)
        computed: set[int] = set()
        for eqn in jaxpr.eqns:
            if id(eqn) in computed:
                continue
            activation = activations.get(id(eqn))
            if activation is not None:
                operands = [read(var) for var in activation.inputs]
                result = self._activation(activation, operands, uses, region)
                if result is not None:
                    values[activation.result] = result
                    computed |= activation.members
                    continue
            args = [read(atom) for atom in eqn.invars]
            softmax = softmaxes.get(id(eqn))
            if softmax is not None and _is_weight(args[0], uses.of(eqn), region.enter(eqn)):
                exponents = values[softmax.exponents]
                results = [_softmax(exponents, args, softmax.axes, region.enter(eqn))]
            else:
                results = self._equation(eqn, args, uses, region)
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def rewrite(
        self,
        inner: Inner,
        entering: Sequence[State | None],
        outputs: Sequence[int],
        region: Region,
        leaving: Sequence[State | None] | None = None,
    ) -> tuple[ClosedJaxpr, list[State | None]]:
        """Returns a jaxpr in mixed precision, and the states that its outputs come out in.

        Args:
            inner: the jaxpr; it is rewritten once for the same states, uses and region.
            entering: the states of its inputs.
            outputs: what its outputs are used for.
            region: where it stands.
            leaving: the states that the outputs are cast to; as they come if left out.
        """
        wanted = None if leaving is None else tuple(leaving)
        key = (id(inner.jaxpr), tuple(entering), tuple(outputs), region, wanted)
        if key not in self._rewritten:
            uses = self.lookahead.uses(inner.jaxpr, outputs, region)
            fun = self.function(inner, entering, uses, region, wanted)
            # The jaxpr is kept, so that its id is not used again.
            self._rewritten[key] = (inner, *trace(fun, inner.jaxpr, entering))
        _, closed, states = self._rewritten[key]
        return closed, states

    def function(
        self,
        inner: Inner,
        entering: Sequence[State | None],
        uses: Uses,
        region: Region,
        leaving: Sequence[State | None] | None = None,
    ) -> Callable[..., list[Value]]:
        """Returns what a jaxpr computes as a function of arrays, for `rewrite`."""

        def fun(*arrays: Any) -> list[Value]:
            args = [Value(array, state) for array, state in zip(arrays, entering, strict=True)]
            results = self.run(inner.jaxpr, inner.consts, args, uses, region)
            if leaving is None:
                return results
            return [r.held_as(state) for r, state in zip(results, leaving, strict=True)]

        return fun

    def _equation(
        self, eqn: JaxprEqn, args: list[Value], uses: Uses, region: Region
    ) -> list[Value]:
        self.primitives.add(eqn.primitive.name)
        region = inside(eqn, region)
        if region.policy.rules:
            self.paths.add(region.path)
        if region.is_written:
            return as_written(eqn, args)
        self._settle(eqn, args, uses, region)
        if inner_jaxprs(eqn):
            results = _control_flow.call(self, eqn, args, uses, region)
        elif eqn.primitive.name == "convert_element_type":
            results = placed(eqn, args, _cast(eqn, args[0]))
        else:
            results = self._operation(eqn, met(eqn, args), uses, region)
            results = placed(eqn, args, results)
        return [
            _narrowed_at_birth(value, uses.of_var.get(var, 0), region)
            for var, value in zip(eqn.outvars, results, strict=True)
        ]

    def _activation(
        self, activation: Activation, operands: Sequence[Value], uses: Uses, region: Region
    ) -> Value | None:
        """Computes an activation function in one step, from narrow to narrow; None if it is not."""
        leads_to = uses.of_var.get(activation.result, 0)
        state = operands[0].state
        if state is None or state.kind is not Kind.NARROW:
            return None
        key = (activation.key, state, leads_to, region)
        if key not in self._activations:
            is_one = is_one_step(activation, state.dtype, leads_to, region)
            step = self._in_one_step(activation, state.dtype, region) if is_one else None
            self._activations[key] = step
        step = self._activations[key]
        if step is None:
            return None
        numbers = [number.cast(FLOAT32) for number in operands[1:]]
        return Value(step(operands[0].array, *numbers), state)

    def _in_one_step(
        self, activation: Activation, dtype: np.dtype, region: Region
    ) -> Callable[..., Any]:
        inner = Inner(activation.jaxpr, (), ())
        entering = [FULL] * len(activation.inputs)
        closed, _ = self.rewrite(inner, entering, [DELICATE], region.in_full())

        def fun(*arrays: Any) -> Any:
            return jaxpr_as_fun(closed)(*arrays)[0]

        return in_one_step(fun, dtype)

    def _settle(self, eqn: JaxprEqn, args: list[Value], uses: Uses, region: Region) -> None:
        """Narrows what was gathered from a table, where it is used for more than being added to.

        Only if it leads to products: an embedding does, the label's entry in a table does not.
        """
        if all(arg.state is None or arg.state.kind is not Kind.DATA for arg in args):
            return
        policy = region.own_policy
        kinds = {arg.state.kind for arg in args if arg.state is not None}
        is_moved = kinds <= YIELDING and _rules.class_of(eqn, policy) == _rules.FOLLOW
        if region.is_full or policy.activation_dtype is not None:
            return
        if not is_moved or inner_jaxprs(eqn):
            for arg, atom in zip(args, eqn.invars, strict=True):
                is_data = arg.state is not None and arg.state == DATA
                if is_data and uses.of_atom(atom) & PRODUCT:
                    arg.settle(narrow(policy.compute_dtype))

    def _operation(
        self, eqn: JaxprEqn, args: list[Value], uses: Uses, region: Region
    ) -> list[Value]:
        policy = _ruled(args) or region.own_policy
        kind = _rules.class_of(eqn, policy)
        if kind == _rules.OPAQUE:
            return as_written(eqn, args)
        if eqn.primitive.name in _rules.PAIRWISE:
            return _each_as_held(eqn, args)
        states = [arg.state for arg in args if arg.state is not None]
        is_full = region.is_full or policy.compute_dtype == FLOAT32 or kind == _rules.FULL
        is_selection = id(eqn) in uses.selections and FULL in states
        is_exact = is_selection or _is_angle(states, uses.of(eqn))
        if is_full or (kind == _rules.LOW and is_exact):
            if eqn.primitive.name in PLAIN_PRODUCTS and any(map(place_of, args)):
                return [multiply_exactly(eqn, args, states, policy)]
            is_plain = region.is_full or policy.compute_dtype == FLOAT32
            compute = evaluate if is_plain else _slim
            return _in_dtype(eqn, args, FLOAT32, full_of(states), compute)
        if kind == _rules.LOW:
            self.recipes.see(eqn, policy)
            return _low(eqn, args, uses.of(eqn), policy)
        return _follow(eqn, args, states, uses.of(eqn), policy)


def trace(
    fun: Callable[..., list[Value]], jaxpr: Jaxpr, entering: Sequence[State | None]
) -> tuple[ClosedJaxpr, list[State | None]]:
    """Traces a function of what enters a jaxpr, and returns the states of its results too."""
    states: list[State | None] = []

    def arrays_of(*arrays: Any) -> list[Any]:
        results = fun(*arrays)
        states[:] = [result.state for result in results]
        return [result.array for result in results]

    specs = [
        spec_of(aval_of(var), dtype_of_var(var) if state is None else state.dtype)
        for var, state in zip(jaxpr.invars, entering, strict=True)
    ]
    return jax.make_jaxpr(arrays_of)(*specs), states


def given(array: Any) -> Value:
    """Returns the value of an input or a constant."""
    return Value(array, written_state(float_dtype(jax.typeof(array))))


def _constant(atom: Literal, policy: Policy) -> Value:
    state = written_state(float_dtype(aval_of(atom)))
    dtype = policy.compute_dtype
    if state == GIVEN and dtype in HALF_DTYPES and not fits(atom.val, dtype):
        state = PURE
    return Value(atom.val, state)


def _is_angle(states: Sequence[State], uses: int) -> bool:
    """Whether a product of positions and frequencies makes the angles of sines and cosines."""
    is_given = all(state.kind in (*YIELDING, Kind.PURE) for state in states)
    return is_given and bool(uses & ANGLE) and is_island(uses)


def _ruled(args: Sequence[Value]) -> Policy | None:
    """Returns the policy of a rule that is found in the path of an operand."""
    return next((arg.state.policy for arg in args if arg.state and arg.state.policy), None)


def _narrows(value: Value, region: Region) -> bool:
    """Whether a value was computed in f32 where the policy stores narrow ones."""
    policy = region.own_policy
    is_narrow = policy.activation_dtype is None and policy.compute_dtype in HALF_DTYPES
    is_mixed = not (region.is_full or region.is_written)
    return is_narrow and is_mixed and value.state is not None and value.state.kind is Kind.FULL


def _is_weight(exponentials: Value, uses: int, region: Region) -> bool:
    """Whether a softmax leads to products only, so that its result can be narrow."""
    return uses & ~MULTIPLIED == PRODUCT and _narrows(exponentials, region)


def _softmax(
    exponents: Value, operands: Sequence[Value], axes: Sequence[int], region: Region
) -> Value:
    dtype = region.own_policy.compute_dtype
    wide = [value.cast(FLOAT32) for value in (exponents, *operands)]
    return Value(normalize(wide, axes, dtype), narrow(dtype))


def _narrowed_at_birth(value: Value, uses: int, region: Region) -> Value:
    """Narrows what is to be multiplied, so that no f32 copy is kept beside the narrow one.

    A gradient that leaves a backward pass is a matter of weights: what is made of it stays f32.
    """
    if uses & GRADIENT and value.state is not None and value.state.dtype == FLOAT32:
        return Value(value.array, PURE)
    if not is_stored_narrow(uses) or not _narrows(value, region):
        return value
    return value.held_as(narrow(region.own_policy.compute_dtype))


def _each_as_held(eqn: JaxprEqn, args: Sequence[Value]) -> list[Value]:
    arrays = evaluate(eqn, [arg.array for arg in args])
    return [Value(array, arg.state) for array, arg in zip(arrays, args, strict=True)]


_SLIM = {
    "gather": gather_of,
    "scatter-add": scatter_of,
    "scatter_add": scatter_of,
    "reduce_window_max": pool_of,
}


def _slim(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Computes an equation; if its gradient would keep or move too much, in another way."""
    find = _SLIM.get(eqn.primitive.name)
    fun = None if find is None else find(eqn)
    if fun is None:
        return evaluate(eqn, args)
    with in_place_of(eqn):
        return [fun(*args)]


def _in_dtype(
    eqn: JaxprEqn,
    args: Sequence[Value],
    dtype: np.dtype,
    state: State,
    compute: Callable[..., list[Any]] = evaluate,
) -> list[Value]:
    """Computes an equation with all floats in one dtype."""
    arrays = [arg.cast(dtype) for arg in args]
    if any(float_dtype(aval_of(atom)) not in (None, dtype) for atom in eqn.invars):
        eqn = rewritten_in(eqn, dtype)
    return [
        Value(array, None if float_dtype(aval_of(var)) is None else state)
        for var, array in zip(eqn.outvars, compute(eqn, arrays), strict=True)
    ]


def _cast(eqn: JaxprEqn, arg: Value) -> list[Value]:
    """Casts as the user wrote, but for promotions, and for sums that JAX rounds again."""
    source, target = dtype_of_var(eqn.invars[0]), eqn.params["new_dtype"]
    if arg.state is None or float_dtype(aval_of(eqn.outvars[0])) is None:
        return as_written(eqn, [arg])
    if source == target or (target == FLOAT32 and is_promotion(eqn)):
        return [arg]
    if target == FLOAT32:
        return [arg.held_as(FULL)]
    if arg.state.kind in (Kind.FULL, Kind.PURE) and is_cast_back(eqn):
        return [arg]
    (array,) = evaluate(eqn, [arg.array])
    return [Value(array, narrow(target))]


def _follow(
    eqn: JaxprEqn, args: Sequence[Value], states: Sequence[State], uses: int, policy: Policy
) -> list[Value]:
    kinds = {state.kind for state in states}
    if _is_sent_weight(eqn, kinds, uses, policy):
        with in_place_of(eqn):
            array = sent(eqn, policy.compute_dtype)(args[0].array)
        return [Value(array, args[0].state)]
    if kinds <= YIELDING:
        is_data = Kind.DATA in kinds or eqn.primitive.name == "gather"
        # A rule for an argument holds for its slices and transposes too.
        kept = states[0].policy if eqn.primitive.name in _rules.MOVES else None
        return _in_dtype(eqn, args, FLOAT32, (DATA if is_data else GIVEN)._replace(policy=kept))
    halves = {state.dtype for state in states if state.kind is Kind.NARROW}
    if kinds & {Kind.FULL, Kind.PURE} or len(halves) > 1:
        return _in_dtype(eqn, args, FLOAT32, full_of(states), _slim)
    if is_island(uses) or policy.activation_dtype == FLOAT32:
        return _in_dtype(eqn, args, FLOAT32, FULL, _slim)
    (half,) = halves
    if eqn.primitive.name in _rules.REPEATS:
        # What is repeated is summed in the backward pass: in f32, if it is repeated in f32.
        (repeated,) = _in_dtype(eqn, args, FLOAT32, FULL, _slim)
        return [repeated.held_as(narrow(half))]
    shape = aval_of(eqn.outvars[0]).shape
    repeated = [_repeated(arg, shape, eqn.primitive.name) for arg in args]
    return _in_dtype(eqn, repeated, half, narrow(half), _slim)


def _is_sent_weight(eqn: JaxprEqn, kinds: set[Kind], uses: int, policy: Policy) -> bool:
    """Whether the program sends a weight between devices that is multiplied, and nothing else."""
    is_half = policy.compute_dtype in HALF_DTYPES and policy.recipe is None
    is_weight = kinds <= WEIGHTS and uses & ~MULTIPLIED == PRODUCT
    return eqn.primitive.name in SENDS and is_half and is_weight


def _repeated(arg: Value, shape: Sequence[int], primitive: str) -> Value:
    """Broadcasts an operand that an elementwise operation would broadcast, in f32."""
    if (
        arg.state is None
        or primitive not in _rules.ELEMENTWISE
        or not isinstance(arg.array, jax.Array)
    ):
        return arg
    if arg.array.shape == tuple(shape):
        return arg
    wide = arg.cast(FLOAT32)
    axes = range(len(shape) - wide.ndim, len(shape))
    return Value(lax.broadcast_in_dim(wide, shape, tuple(axes)), arg.state._replace(dtype=FLOAT32))


def _low(eqn: JaxprEqn, args: Sequence[Value], uses: int, policy: Policy) -> list[Value]:
    if eqn.primitive.name in PLAIN_PRODUCTS:
        return [multiply(eqn, args, uses, policy)]
    dtype = policy.compute_dtype
    return _in_dtype(eqn, args, dtype, narrow(dtype))
