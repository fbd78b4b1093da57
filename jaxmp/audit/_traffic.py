"""Memory traffic of loops, which XLA's cost analysis counts for one turn only."""

from collections.abc import Iterable

from jaxmp.audit._hlo import Array, Computation, Instruction, Module, arrays

# These name memory, or run other instructions, and move nothing themselves.
_FREE = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "conditional",
        "call",
        "after-all",
        "copy-done",
        "opt-barrier",
        "partition-id",
        "replica-id",
    }
)
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})


def repeated_bytes(module: Module) -> int:
    """Returns the bytes that the turns of loops after the first read and write.

    Each kernel reads its operands and writes its results once; of an operand of which it only takes
    a slice it reads the slice, and of a result that it updates in place it writes the update. That
    is how XLA's `HloCostAnalysis` counts, which takes every loop to turn once.
    """
    return sum(
        _kernel_bytes(module, computation, instruction) * (module.times[computation.name] - 1)
        for computation, instruction in module.walk()
        if computation.name not in module.fused and module.times[computation.name] > 1
    )


def _kernel_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return 0
    operands = computation.operands(instruction)
    if instruction.opcode in _SLICES:
        return 2 * _size(arrays(instruction.shape))
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _size(arrays(operands[1].shape))
    if instruction.opcode != "fusion":
        return _size(arrays(instruction.shape)) + sum(_size(arrays(o.shape)) for o in operands)
    inner = module.computations[instruction.attributes["calls"].lstrip("%")]
    read = sum(_read(module, inner, index, operand) for index, operand in enumerate(operands))
    return read + _written(inner, instruction)


def _size(items: Iterable[Array]) -> int:
    return sum(array.bytes for array in items)


def _read(module: Module, inner: Computation, index: int, operand: Instruction) -> int:
    """Bytes that a fused kernel reads of an operand."""
    whole = _size(arrays(operand.shape))
    parameter = inner.parameter(index)
    total = 0
    for user in inner.instructions.values():
        if parameter.name not in user.operands:
            continue
        if user.opcode in _SLICES and user.operands[0] == parameter.name:
            total += _size(arrays(user.shape))
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
            continue
        elif user.opcode == "fusion":
            nested = module.computations[user.attributes["calls"].lstrip("%")]
            total += _read(module, nested, user.operands.index(parameter.name), operand)
        else:
            return whole
    return min(total, whole)


def _written(inner: Computation, instruction: Instruction) -> int:
    """Bytes that a fused kernel writes."""
    roots = inner.operands(inner.root) if inner.root.opcode == "tuple" else [inner.root]
    return sum(
        _size(arrays(inner.operands(root)[1].shape))
        if root.opcode == "dynamic-update-slice"
        else _size(arrays(root.shape))
        for root in roots
    ) or _size(arrays(instruction.shape))
