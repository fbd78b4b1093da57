"""In which dtype a value is held, and why."""

import enum
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._dtypes import FLOAT32, HALF_DTYPES, is_real_float
from jaxmp._jaxpr import aval_of, dtype_of_var
from jaxmp._placement import Placement
from jaxmp._rebind import evaluate
from jaxmp.policy import Policy


class Kind(enum.Enum):
    """Of a float value.

    GIVEN: f32, an input or constant, or made of those alone: narrowed where it meets a half value.
    DATA: as GIVEN, and taken from a table by indices, as an embedding is: no weight.
    NARROW: held in a half dtype.
    PURE: f32, computed in full precision, of GIVEN values alone (a normalized weight).
    FULL: f32, computed in full precision.
    """

    GIVEN = "given"
    DATA = "data"
    NARROW = "narrow"
    PURE = "pure"
    FULL = "full"


class State(NamedTuple):
    """How a value of real floats is held. Other values have no state: None.

    Attributes:
        kind: why it has its dtype.
        dtype: f16, bf16 or f32.
        policy: of the rule that is found in the path of the argument it is.
        place: of a weight on a mesh.
    """

    kind: Kind
    dtype: np.dtype = FLOAT32
    policy: Policy | None = None
    place: Placement | None = None


GIVEN, DATA, PURE, FULL = map(State, (Kind.GIVEN, Kind.DATA, Kind.PURE, Kind.FULL))
# They are narrowed where they meet a half value.
YIELDING = frozenset({Kind.GIVEN, Kind.DATA})
# They are parameters, or made of parameters alone.
WEIGHTS = frozenset({Kind.GIVEN, Kind.PURE})


def narrow(dtype: np.dtype) -> State:
    """Returns the state of a value that is held in a half dtype."""
    return State(Kind.NARROW, dtype)


def float_dtype(aval: Any) -> np.dtype | None:
    """Returns the dtype of an array of f16, bf16 or f32; None for references and all else."""
    dtype = getattr(aval, "dtype", None)
    is_array = isinstance(dtype, np.dtype) and not hasattr(aval, "inner_aval")
    return dtype if is_array and is_real_float(dtype) else None


def written_state(
    dtype: np.dtype | None, *, computed_of: Sequence[State | None] = ()
) -> State | None:
    """Returns the state of a value in the dtype that the program gives it.

    Args:
        dtype: what `float_dtype` gives.
        computed_of: the states of what it is computed of.
    """
    if dtype is None:
        return None
    if dtype in HALF_DTYPES:
        return narrow(dtype)
    floats = [state for state in computed_of if state is not None]
    return full_of(floats) if floats else GIVEN


def full_of(states: Sequence[State]) -> State:
    """Returns the state of what is computed in f32 of values in these states."""
    return PURE if all(state.kind in (Kind.GIVEN, Kind.PURE) for state in states) else FULL


def join(a: State | None, b: State | None) -> State | None:
    """Returns the state of a value that is one or the other: a loop's carry, a branch's result.

    Such a value stays f32 if either was computed in full precision, is narrow if either is, and
    else is as given.
    """
    if a == b or a is None or b is None:
        return a
    kinds = {a.kind, b.kind}
    if kinds <= YIELDING:
        return DATA if Kind.DATA in kinds else GIVEN
    if kinds <= {Kind.GIVEN, Kind.PURE}:
        return PURE
    halves = {state.dtype for state in (a, b) if state.kind is Kind.NARROW}
    if kinds <= {*YIELDING, Kind.NARROW} and len(halves) == 1:
        return narrow(halves.pop())
    return FULL


class Value:
    """An array, the state it is held in, and its casts, so that each is made once."""

    __slots__ = ("_casts", "_gathered", "array", "state")

    def __init__(self, array: Any, state: State | None) -> None:
        self.array, self.state = array, state
        self._casts: dict[np.dtype, Any] = {}
        self._gathered: dict[np.dtype, Any] = {}

    def cast(self, dtype: np.dtype) -> Any:
        """Returns the array in another float dtype."""
        if self.state is None or self.state.dtype == dtype:
            return self.array
        if dtype not in self._casts:
            self._casts[dtype] = cast(self.array, dtype)
        return self._casts[dtype]

    def gathered(self, place: Placement, dtype: np.dtype) -> Any:
        """Returns a constant: the array in a dtype, gathered from its place."""
        if dtype not in self._gathered:
            narrow = lax.convert_element_type(lax.stop_gradient(self.array), dtype)
            self._gathered[dtype] = place.gather(narrow)
        return self._gathered[dtype]

    def settle(self, state: State) -> None:
        """Holds the value in another state from now on."""
        self.array, self.state, self._casts = self.cast(state.dtype), state, {}

    def held_as(self, state: State | None) -> "Value":
        """Returns the value in another state."""
        if state == self.state or state is None or self.state is None:
            return self
        return Value(self.cast(state.dtype), state)


def values_of(arrays: Sequence[Any], states: Sequence[State | None]) -> list[Value]:
    """Returns arrays as values in these states."""
    return [Value(array, state) for array, state in zip(arrays, states, strict=True)]


def arrays_as(values: Sequence[Value], states: Sequence[State | None]) -> list[Any]:
    """Returns the arrays of values, cast to these states."""
    return [value.held_as(state).array for value, state in zip(values, states, strict=True)]


def as_written(eqn: JaxprEqn, args: Sequence[Value]) -> list[Value]:
    """Computes an equation in the dtypes that the program gives it."""
    arrays = [
        arg.array if arg.state is None else arg.cast(dtype_of_var(atom))
        for arg, atom in zip(args, eqn.invars, strict=True)
    ]
    states = [arg.state for arg in args]
    return [
        Value(array, written_state(float_dtype(aval_of(var)), computed_of=states))
        for var, array in zip(eqn.outvars, evaluate(eqn, arrays), strict=True)
    ]


def cast(array: Any, dtype: np.dtype) -> Any:
    """Casts an array or a number; numbers stay constants of the program."""
    if isinstance(array, jax.Array):
        return lax.convert_element_type(array, dtype)
    return np.asarray(array).astype(dtype)


def fits(number: Any, dtype: np.dtype) -> bool:
    """Whether a half dtype holds a finite number: it neither overflows nor loses its digits."""
    if np.size(number) != 1:
        return True
    return _fits(float(np.asarray(number, np.float64).reshape(())), dtype)


@functools.lru_cache(maxsize=4096)
def _fits(value: float, dtype: np.dtype) -> bool:
    if not math.isfinite(value):
        return True
    with np.errstate(over="ignore"):
        held = float(np.asarray(value).astype(dtype))
    # Half a unit in the last place of a normal number; 2^-9 and 2^-12 of it at least.
    tolerance = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype.name]
    return abs(held - value) <= tolerance * abs(value)
