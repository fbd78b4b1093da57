"""The rows of a report: plain frozen records, of text and numbers only."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Product:
    """A matmul or convolution of the program.

    Attributes:
        path: module path, from the name stack: `"Block_0/Dense_1"`.
        where: the user's line, `"model.py:35 (attend)"`, or an empty string.
        parameter: name of the input that it multiplies with, or whose gradient it is:
            `"params/blocks/0/kernel"`; empty for a product of activations.
        primitive: `"dot_general"`, `"conv_general_dilated"`, ...
        pass_name: `"fprop"`, `"dgrad"`, `"wgrad"` or `"recompute"` (of the forward, by remat).
        operand_dtypes: as the program states them.
        accumulation_dtype: what the program asks the product to accumulate in.
        result_dtype: the dtype of the result.
        operand_shapes: of both operands.
        result_shape: of the result.
        flops: floating point operations of one execution; a multiply-add counts as two.
        bytes: of operands and result, for one execution.
        times: how often it is executed: the product of the lengths of the scans around it.
    """

    path: str
    where: str
    parameter: str
    primitive: str
    pass_name: str
    operand_dtypes: tuple[str, str]
    accumulation_dtype: str
    result_dtype: str
    operand_shapes: tuple[tuple[int, ...], tuple[int, ...]]
    result_shape: tuple[int, ...]
    flops: int
    bytes: int
    times: int


@dataclasses.dataclass(frozen=True)
class Cast:
    """A cast between float dtypes; `bytes` are those read and written by one execution."""

    path: str
    where: str
    from_dtype: str
    to_dtype: str
    shape: tuple[int, ...]
    bytes: int
    times: int


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A sum, product, cumulative sum or scatter-add in half precision.

    Attributes:
        path: module path.
        where: the user's line.
        primitive: `"reduce_sum"`, `"cumsum"`, `"scatter-add"`, ...
        dtype: the half dtype it runs in.
        shape: of the reduced operand.
        terms: how many numbers meet in one result, at most.
        times: how often it is executed.
    """

    path: str
    where: str
    primitive: str
    dtype: str
    shape: tuple[int, ...]
    terms: int
    times: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that the program states; `bytes` are those of its operands on one device."""

    path: str
    where: str
    primitive: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    times: int


@dataclasses.dataclass(frozen=True)
class Opaque:
    """A kernel or foreign call that cannot be looked into: Pallas, FFI, callbacks.

    Attributes:
        path: module path.
        where: the user's line.
        primitive: `"pallas_call"`, ...
        name: the kernel's own name, if it has one.
        times: how often it is executed.
    """

    path: str
    where: str
    primitive: str
    name: str
    times: int


@dataclasses.dataclass(frozen=True)
class CompiledProduct:
    """A matmul or convolution of the optimized program.

    Attributes:
        path: module path, from the instruction's `op_name`.
        instruction: `"dot"`, `"convolution"`, or the library call: `"__cublas$lt$matmul$f8"`.
        operand_dtypes: of the two multiplied operands, in JAX's names (`"bfloat16"`).
        result_dtype: of the result, in JAX's names.
        operand_shapes: of both operands, on one device.
        result_shape: of the result.
        flops: of one execution on one device.
        times: how often it is executed, where the compiler knows the loops' lengths.
    """

    path: str
    instruction: str
    operand_dtypes: tuple[str, str]
    result_dtype: str
    operand_shapes: tuple[tuple[int, ...], tuple[int, ...]]
    result_shape: tuple[int, ...]
    flops: int
    times: int


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """A collective of the optimized program.

    Attributes:
        path: module path.
        instruction: `"all-gather"`, `"all-reduce"`, `"reduce-scatter"`, `"all-to-all"`, ...
        dtype: of what is sent, in JAX's names.
        bytes: of the result on one device, for one execution.
        group_size: devices that take part together.
        times: how often it is executed.
    """

    path: str
    instruction: str
    dtype: str
    bytes: int
    group_size: int
    times: int


@dataclasses.dataclass(frozen=True)
class WideCopy:
    """A float32 array in memory that only repeats one that is there in half: bytes lost."""

    path: str
    from_dtype: str
    shape: tuple[int, ...]
    bytes: int
    times: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of one device, in bytes, as the compiler states it.

    Attributes:
        arguments: of the inputs.
        outputs: of the results.
        aliased: of results that live in a donated input's buffer.
        temporary: of everything in between.
        code: of the program itself.
        peak: the most that is in use at once, where the compiler says.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int
    peak: int | None

    @property
    def total(self) -> int:
        """Bytes that the step needs: arguments, outputs and temporaries, aliased ones once."""
        return self.arguments + self.outputs - self.aliased + self.temporary + self.code


@dataclasses.dataclass(frozen=True)
class CompiledReport:
    """What the compiler made of the program for one target.

    Attributes:
        target: as it was asked for, with its shape: `"tpu:v5e:2x4"`.
        device_kind: the compiler's name of the device.
        devices: how many the program was compiled for.
        device_memory: bytes of memory of one device; None for a CPU.
        products: matmuls and convolutions.
        collectives: exchanges between devices.
        wide_copies: float32 copies of half arrays.
        memory: what the step needs.
        fusions: how many fused kernels there are.
        bytes_accessed: of memory in one step, where the compiler estimates it (TPU, CPU); for the
            turns of a loop after the first the operands and results of its kernels are counted.
        estimated_cycles: of one step, where the compiler estimates them (TPU); without the few
            kernels, such as gathers, for which it does not.
        compile_seconds: how long the compiler took.
    """

    target: str
    device_kind: str
    devices: int
    device_memory: int | None
    products: tuple[CompiledProduct, ...]
    collectives: tuple[CompiledCollective, ...]
    wide_copies: tuple[WideCopy, ...]
    memory: Memory
    fusions: int
    bytes_accessed: int | None
    estimated_cycles: int | None
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Trap:
    """Something that costs accuracy, speed or memory without an error.

    Attributes:
        kind: one of `jaxmp.audit.TRAPS`.
        path: module path, or the name of the parameter, argument or output.
        where: the user's line.
        cost: what it costs, with a figure.
        cause: what is there.
        remedy: what to write instead.
    """

    kind: str
    path: str
    where: str
    cost: str
    cause: str
    remedy: str
