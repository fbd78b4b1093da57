"""Reads the rows of a compiled report from optimized HLO."""

import collections
import math
import re
from collections.abc import Iterator

from jaxmp._jaxpr import module_path
from jaxmp.audit._flops import product_flops
from jaxmp.audit._hlo import Array, Computation, Instruction, Module, Shape, arrays
from jaxmp.audit._rows import CompiledCollective, CompiledProduct, WideCopy

_PRODUCTS = ("dot", "convolution", "ragged-dot")
_LIBRARY_PRODUCT = re.compile(
    r"__cublas\$(gemm|lt\$matmul|lt\$groupedMatmul)"
    r"|__cudnn\$(conv|blockScaledDot|fmha)"
    r"|__onednn\$(matmul|conv)"
)
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_HALF = ("bf16", "f16")
_MOVES = ("convert", "bitcast", "reshape", "transpose", "copy")
_MIN_WIDE_BYTES = 1 << 20
# Parts of an `op_name` that no one named: jitted functions, loops and branches.
_WRAPPERS = ("jit(", "jit_", "pjit(", "call_exported", "closed_call")
_CONTROL_FLOW = re.compile(r"/while/(body|cond)(?=/)|/cond/branch_\d+_fun(?=/)")
# The compiler gives the largest integer to a kernel that it cannot estimate.
_NO_ESTIMATE = 2**62
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')


def op_path(op_name: str) -> str:
    """Returns the module path in an `op_name`: without the primitive, wrappers and transforms.

    Example:
        >>> op_path("jit(call)/call_exported/jit(step)/transpose(jvp(Block_0))/Dense_1/dot")
        'Block_0/Dense_1'
    """
    stack, _, _ = _CONTROL_FLOW.sub("/", f"/{op_name}").rpartition("/")
    parts = (part for part in stack.split("/") if not part.startswith(_WRAPPERS))
    return module_path("/".join(parts))


def products(module: Module) -> tuple[CompiledProduct, ...]:
    """Returns every matmul and convolution, also those inside fused kernels."""
    rows = []
    for computation, instruction in module.walk():
        if not _is_product(instruction):
            continue
        lhs, rhs = (arrays(operand.shape)[0] for operand in computation.operands(instruction)[:2])
        result = _result(instruction)[0]
        rows.append(
            CompiledProduct(
                path=_path(module, computation, instruction),
                instruction=instruction.target or instruction.opcode,
                operand_dtypes=(lhs.dtype, rhs.dtype),
                result_dtype=result.dtype,
                operand_shapes=(lhs.dims, rhs.dims),
                result_shape=result.dims,
                flops=product_flops(instruction, lhs, rhs, result),
                times=module.times[computation.name],
            )
        )
    return tuple(rows)


def _is_product(instruction: Instruction) -> bool:
    if instruction.base_opcode == "custom-call":
        return bool(_LIBRARY_PRODUCT.match(instruction.target))
    return instruction.base_opcode in _PRODUCTS


def collectives(module: Module) -> tuple[CompiledCollective, ...]:
    """Returns every exchange between devices; one row for each dtype that it sends."""
    rows = []
    overlapped: set[str] = set()
    for computation, instruction in module.walk():
        kind = instruction.base_opcode
        if kind not in _COLLECTIVES:
            continue
        # A TPU repeats one that it overlaps with compute in each kernel that takes part.
        channel = instruction.attributes.get("channel_id", "")
        if channel and computation.name in module.fused:
            if channel in overlapped:
                continue
            overlapped.add(channel)
        rows.extend(_collective_rows(module, computation, instruction, kind))
    return tuple(rows)


def _collective_rows(
    module: Module, computation: Computation, instruction: Instruction, kind: str
) -> Iterator[CompiledCollective]:
    sent = _result(instruction)
    if kind == "all-reduce" and _is_scattered(module, computation):
        kind, sent = "reduce-scatter", arrays(computation.root.shape)
    size: dict[str, int] = collections.Counter()
    for array in sent:
        size[array.dtype] += array.bytes
    for dtype, total in size.items():
        yield CompiledCollective(
            path=_path(module, computation, instruction),
            instruction=kind,
            dtype=dtype,
            bytes=total,
            group_size=group_size(instruction, module.devices),
            times=module.times[computation.name],
        )


def _is_scattered(module: Module, computation: Computation) -> bool:
    """Whether a TPU kernel keeps only this device's part: it reduces and slices in one."""
    return computation.name in module.fused and computation.root.opcode == "dynamic-slice"


def group_size(instruction: Instruction, devices: int) -> int:
    """Returns how many devices take part together.

    Groups are written as lists (`{{0,1},{2,3}}`), as a shape over all devices (`[2,4]<=[8]`) or as
    axes of a mesh (`mesh['a'=2,'b'=4] {'b'}`); empty means all devices.
    """
    if pairs := instruction.attributes.get("source_target_pairs"):
        return _connected(re.findall(r"\{(\d+),(\d+)\}", pairs))
    groups = instruction.attributes.get("replica_groups", "{}")
    if match := re.match(r"\[([\d,]+)\]<=", groups):
        return int(match[1].split(",")[-1])
    if match := re.match(r"@?mesh\[(.*?)\].*?\{(.*)\}", groups):
        return _axes_size(match[1], match[2])
    if match := re.match(r"\{\{([\d,\s]+)\}", groups):
        return len(match[1].split(","))
    return devices


def _axes_size(mesh: str, axes: str) -> int:
    """Returns the devices along `axes`; `'a':(2)4` is a part of axis `'a'`, of size 4."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    used = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", axes)
    return math.prod(int(part) if part else sizes[name] for name, part in used)


def _connected(pairs: list[tuple[str, str]]) -> int:
    """Returns the size of the largest set of devices that send to each other."""
    groups: dict[str, set[str]] = {}
    for source, target in pairs:
        group = groups.get(source, {source}) | groups.get(target, {target})
        groups.update(dict.fromkeys(group, group))
    return max((len(group) for group in groups.values()), default=1)


def _result(instruction: Instruction) -> tuple[Array, ...]:
    """Returns the arrays that an instruction makes, not the operands that its start passes on."""
    shape: Shape = instruction.shape
    starts = instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start"
    return arrays(shape[1] if starts and not isinstance(shape, Array) else shape)


def wide_copies(module: Module) -> tuple[WideCopy, ...]:
    """Returns float32 arrays of a mebibyte or more that only repeat a half array."""
    rows = []
    for computation, instruction in module.walk():
        if computation.name in module.fused:
            continue
        for origin, array in _widened(module, computation, instruction):
            rows.append(
                WideCopy(
                    path=_path(module, computation, instruction),
                    from_dtype=origin.dtype,
                    shape=array.dims,
                    bytes=array.bytes,
                    times=module.times[computation.name],
                )
            )
    return tuple(rows)


def _widened(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Array, Array]]:
    """Yields (half array, float32 array) of each result that is a widened operand."""
    if instruction.opcode not in ("fusion", "convert"):
        return
    for index, array in enumerate(arrays(instruction.shape)):
        if array.hlo_dtype != "f32" or array.bytes < _MIN_WIDE_BYTES:
            continue
        source = _origin(module, computation, instruction, index)
        if source and source.hlo_dtype in _HALF and source.size == array.size:
            yield source, array


def _origin(
    module: Module, computation: Computation, instruction: Instruction, index: int
) -> Array | None:
    """Returns the operand that a result repeats, or None where there is arithmetic in between."""
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.attributes["calls"].lstrip("%")]
        parameter = _moved_parameter(module, inner, index)
        if parameter is None:
            return None
        source = computation.operands(instruction)[int(parameter.operands[0])]
    else:
        (source,) = computation.operands(instruction)
    return source.shape if isinstance(source.shape, Array) else None


def _moved_parameter(module: Module, inner: Computation, index: int) -> Instruction | None:
    """Follows a result of a fused computation through converts and moves to a parameter."""
    value = inner.operands(inner.root)[index] if inner.root.opcode == "tuple" else inner.root
    while value.opcode != "parameter":
        if value.opcode in _MOVES:
            (value,) = inner.operands(value)
        elif value.opcode == "fusion":  # a TPU fusion nests others that only rearrange
            nested = module.computations[value.attributes["calls"].lstrip("%")]
            parameter = _moved_parameter(module, nested, 0)
            if parameter is None:
                return None
            value = inner.operands(value)[int(parameter.operands[0])]
        else:
            return None
    return value


def fusions(module: Module) -> int:
    """Returns the number of fused kernels; one fused into another is part of it."""
    return sum(
        instruction.base_opcode == "fusion" and computation.name not in module.fused
        for computation, instruction in module.walk()
    )


def estimated_cycles(module: Module) -> int | None:
    """Returns the sum of the compiler's estimates for the kernels of one step, or None.

    Kernels that it cannot estimate, such as some gathers and copies, count for nothing.
    """
    found = [
        int(match[1]) * module.times[computation.name]
        for computation, instruction in module.walk()
        if computation.name not in module.fused
        if (match := _CYCLES.search(instruction.attributes.get("backend_config", "")))
        and int(match[1]) < _NO_ESTIMATE
    ]
    return sum(found) if found else None


def _path(module: Module, computation: Computation, instruction: Instruction) -> str:
    op_name = instruction.op_name or module.caller_op_names.get(computation.name, "")
    return op_path(op_name)
