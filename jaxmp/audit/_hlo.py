"""Reads optimized HLO text (`compiled.as_text()`) into computations and instructions.

Strict: what it does not understand is an error, not a wrong count. The syntax is that of XLA's
`HloModule::ToString`, see https://openxla.org/xla/operation_semantics and `hlo_parser.cc`.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

# Computations that an instruction runs, by the attribute that names them. `to_apply` is left out:
# save for a `call` it is the scalar function of a reduction.
_CALLS = ("calls", "body", "condition", "called_computations", "branch_computations")
_BRANCHES = ("true_computation", "false_computation")

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_SCAN = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_SEPARATOR = re.compile(r"[,\s]*")
_INDEX_COMMENT = re.compile(r"/\*index=\d+\*/")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_BITS = re.compile(r"\D+(\d+)")


class HloError(ValueError):
    """Text that is not the HLO this module knows."""


@dataclasses.dataclass(frozen=True)
class Array:
    """The shape of an array: `bf16[8,128]{1,0:T(8,128)(2,1)}`."""

    hlo_dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def dtype(self) -> str:
        """The dtype in JAX's spelling."""
        return jax_dtype(self.hlo_dtype)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without the padding of the layout."""
        bits = 8 if self.hlo_dtype == "pred" else int((_BITS.match(self.hlo_dtype) or [0, 0])[1])
        return -(-self.size * bits // 8)


# A tuple's shape is the tuple of its elements' shapes.
Shape = Array | tuple["Shape", ...]


def jax_dtype(name: str) -> str:
    """Returns JAX's name of an HLO dtype.

    Example:
        >>> [jax_dtype(name) for name in ("bf16", "f8e4m3fn", "s32", "pred", "c64")]
        ['bfloat16', 'float8_e4m3fn', 'int32', 'bool', 'complex64']
    """
    if name in ("pred", "bf16"):
        return {"pred": "bool", "bf16": "bfloat16"}[name]
    if match := re.fullmatch(r"(f\d+)(e\d+m\d+\w*)", name):
        return f"float{match[1][1:]}_{match[2]}"
    if match := re.fullmatch(r"([fsuc])(\d+)", name):
        kinds = {"f": "float", "s": "int", "u": "uint", "c": "complex"}
        return kinds[match[1]] + match[2]
    return name


def arrays(shape: Shape) -> tuple[Array, ...]:
    """Returns the arrays of a shape, in order."""
    if isinstance(shape, Array):
        return (shape,)
    return tuple(array for element in shape for array in arrays(element))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction; `attributes` hold the text behind each `name=`."""

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]
    attributes: dict[str, str]
    is_root: bool

    @property
    def base_opcode(self) -> str:
        """The opcode without the `-start` of an asynchronous one."""
        return self.opcode.removesuffix("-start")

    @property
    def op_name(self) -> str:
        """Name stack and primitive of the traced operation behind it, or an empty string."""
        match = _OP_NAME.search(self.attributes.get("metadata", ""))
        return match[1] if match else ""

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The backend's own record about it; empty where there is none."""
        text = self.attributes.get("backend_config", "{}")
        try:
            config = json.loads(text)
            config = json.loads(config) if isinstance(config, str) else config
        except ValueError:  # a custom call may put anything there
            return {}
        return config if isinstance(config, dict) else {}

    @property
    def target(self) -> str:
        """What a custom call calls, or an empty string."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs."""
        keys = (*_CALLS, *_BRANCHES, *(("to_apply",) if self.base_opcode == "call" else ()))
        lists = (self.attributes.get(key, "").strip("{}").split(",") for key in keys)
        return tuple(name.strip().lstrip("%") for names in lists for name in names if name.strip())

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """Returns the numbers of an attribute such as `lhs_contracting_dims={1}`."""
        return tuple(
            int(number) for number in re.findall(r"\d+", self.attributes.get(attribute, ""))
        )


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation: its instructions by name, in the order of the schedule."""

    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose value it returns."""
        return next(i for i in self.instructions.values() if i.is_root)

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions that compute the operands."""
        return [self.instructions[name] for name in instruction.operands]

    def parameter(self, index: int) -> Instruction:
        """Returns the parameter of that number."""
        wanted = (str(index),)
        values = self.instructions.values()
        return next(i for i in values if i.opcode == "parameter" and i.operands == wanted)


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: its computations, callees first."""

    computations: dict[str, Computation]
    entry: str
    devices: int

    @functools.cached_property
    def times(self) -> dict[str, int]:
        """How often each computation runs: loops that the compiler counted, multiplied.

        A loop of unknown length counts once, and so does each branch of a conditional.
        """
        times = dict.fromkeys(self.computations, 0)
        times[self.entry] = 1
        for computation in reversed(self.computations.values()):
            for instruction in computation.instructions.values():
                for called in instruction.called:
                    runs = times[computation.name] * self.trips(computation, instruction)
                    times[called] += runs
        return times

    @functools.cached_property
    def fused(self) -> frozenset[str]:
        """Computations inside a fused kernel: what they compute is not stored, save the result."""
        fused: set[str] = set()
        for computation in reversed(self.computations.values()):
            for instruction in computation.instructions.values():
                if instruction.base_opcode == "fusion" or computation.name in fused:
                    fused.update(instruction.called)
        return frozenset(fused)

    @functools.cached_property
    def caller_op_names(self) -> dict[str, str]:
        """The `op_name` of the instruction that calls a computation."""
        names: dict[str, str] = {}
        for _, instruction in self.walk():
            if instruction.op_name:
                names.update(dict.fromkeys(instruction.called, instruction.op_name))
        return names

    def walk(self) -> Iterator[tuple[Computation, Instruction]]:
        """Yields every instruction that runs, with its computation."""
        for computation in self.computations.values():
            if self.times[computation.name]:
                for instruction in computation.instructions.values():
                    yield computation, instruction

    def trips(self, computation: Computation, instruction: Instruction) -> int:
        """Returns how often the instruction runs its computations."""
        if instruction.opcode != "while":
            return 1
        known = instruction.config.get("known_trip_count", {}).get("n")
        return int(known) if known is not None else self._counted_trips(computation, instruction)

    def _counted_trips(self, computation: Computation, loop: Instruction) -> int:
        """Returns the trips of `for (i = start; i < end; i += step)` with constants, else 1.

        The TPU compiler keeps no `known_trip_count` in its optimized program.
        """
        condition = self.computations[loop.attributes["condition"].lstrip("%")]
        test = condition.root
        if test.opcode != "compare" or test.attributes.get("direction") != "LT":
            return 1
        counter, bound = condition.operands(test)
        if counter.opcode != "get-tuple-element":
            return 1
        index = int(counter.attributes["index"])
        start = _tuple_constant(computation, loop.operands[0], index)
        step = self._step(loop, index)
        end = _constant(condition, bound)
        if start is None or end is None or not step:
            return 1
        return max(0, -(-(end - start) // step))

    def _step(self, loop: Instruction, index: int) -> int | None:
        """Returns the constant that the body adds to the counter, or None."""
        body = self.computations[loop.attributes["body"].lstrip("%")]
        if body.root.opcode != "tuple":
            return None
        update = body.operands(body.root)[index]
        if update.opcode != "add":
            return None
        constants = [_constant(body, operand) for operand in body.operands(update)]
        return next((value for value in constants if value is not None), None)


def _tuple_constant(computation: Computation, name: str, index: int) -> int | None:
    value = computation.instructions[name]
    if value.opcode != "tuple":
        return None
    return _constant(computation, computation.operands(value)[index])


def _constant(computation: Computation, value: Instruction) -> int | None:
    while value.opcode in ("copy", "bitcast"):
        (value,) = computation.operands(value)
    is_number = value.opcode == "constant" and re.fullmatch(r"-?\d+", value.operands[0])
    return int(value.operands[0]) if is_number else None


def parse(text: str) -> Module:
    """Reads the text of a compiled program.

    Raises:
        HloError: for a line that is not HLO, or text without an entry computation.
    """
    header = text[: text.find("\n")] if "\n" in text else text
    counts = [re.search(rf"\b{key}=(\d+)", header) for key in ("num_partitions", "replica_count")]
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is not None and line.startswith("}"):
            current = None
        elif current is not None and line.strip():
            instruction = _parse_instruction(line)
            current.instructions[instruction.name] = instruction
        elif current is None and (match := _HEADER.match(line)):
            current = computations[match[2]] = Computation(match[2], {})
            entry = match[2] if match[1] else entry
    if not entry:
        raise HloError(f"Not an HLO module: it has no ENTRY computation. It begins {text[:80]!r}.")
    return Module(computations, entry, math.prod(int(count[1]) for count in counts if count))


def _parse_instruction(line: str) -> Instruction:
    line = _INDEX_COMMENT.sub("", line)
    start = _INSTRUCTION.match(line)
    if not start:
        raise HloError(f"Not an HLO instruction: {line.strip()[:200]!r}.")
    shape, position = _parse_shape(line, start.end())
    opcode = _OPCODE.match(line, position)
    if not opcode:
        raise HloError(f"No opcode after the shape in {line.strip()[:200]!r}.")
    operands, position = _split(line, opcode.end())
    if opcode[1] not in ("constant", "parameter"):  # operands may be printed with their shapes
        operands = [operand.split(" ")[-1].lstrip("%") for operand in operands]
    pairs = (part.partition("=") for part in _split(line, position)[0])
    attributes = {key: value for key, _, value in pairs if key}
    return Instruction(start[2], shape, opcode[1], tuple(operands), attributes, bool(start[1]))


def _parse_shape(line: str, position: int) -> tuple[Shape, int]:
    if line.startswith("(", position):
        elements, end = [], position + 1
        while not line.startswith(")", end):
            element, end = _parse_shape(line, end)
            elements.append(element)
            separator = _SEPARATOR.match(line, end)
            end = separator.end() if separator else end
        return tuple(elements), end + 1
    match = _ARRAY.match(line, position)
    if not match:
        raise HloError(f"Not a shape: {line[position : position + 80]!r}.")
    dims = (dim.strip().removeprefix("<=") for dim in match[2].split(","))  # "<=8" may be fewer
    end = match.end()
    layout = ""
    if line.startswith("{", end):
        _, end = _split(line, end + 1)
        layout = line[match.end() : end]
    return Array(match[1], tuple(int(dim) for dim in dims if dim), layout), end


def _split(line: str, position: int) -> tuple[list[str], int]:
    """Splits at the commas outside brackets, up to the bracket that closes the surrounding one.

    Returns:
        The parts, and the position behind the closing bracket (or the end of the line).
    """
    parts, start, depth = [], position, 0
    end = len(line)
    for match in _SCAN.finditer(line, position):
        token = match[0]
        if token in "([{":
            depth += 1
        elif token == "," and depth == 0:
            parts.append(line[start : match.start()].strip())
            start = match.end()
        elif token in ")]}":
            depth -= 1
            if depth < 0:
                end = match.start()
                break
    parts.append(line[start:end].strip())
    return [part for part in parts if part], end + 1
