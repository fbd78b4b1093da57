"""How jaxprs are laid out: inner jaxprs, name stacks, source lines.

Only this module knows it; what is said here holds for JAX 0.10 to 0.12.
"""

import dataclasses
import functools
import math
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Sharding

# Kernels and foreign code: what is inside is not JAX's to look at.
OPAQUE_PRIMITIVES = frozenset(
    {
        "pallas_call",
        "ffi_call",
        "pure_callback",
        "io_callback",
        "debug_callback",
        "tpu_custom_call",
        "triton_kernel_call",
        "mosaic_gpu_call",
        "scaled_matmul",
        "scaled_matmul_wrapper",
        "cudnn_fusion",
        "dot_product_attention_fwd_wrapper",
        "dot_product_attention_bwd_wrapper",
    }
)


@dataclasses.dataclass(frozen=True, eq=False)
class Inner:
    """A jaxpr inside an equation, and how its variables meet the equation's.

    Attributes:
        jaxpr: the inner jaxpr.
        inputs: for each input of the jaxpr, the position among the equation's inputs.
        outputs: for each output of the jaxpr, the position among the equation's outputs, or None.
        carries: pairs (output of the jaxpr, input of the jaxpr): what one turn hands to the next.
        times: turns of the loop for one execution of the equation. A while loop counts as one.
        consts: the values of the jaxpr's constants.
        devices: how many devices run it, each with its own part of the arrays.
    """

    jaxpr: Jaxpr
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    carries: tuple[tuple[int, int], ...] = ()
    times: int = 1
    devices: int = 1
    consts: Sequence[Any] = ()


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """Returns the values of the constants of a closed jaxpr."""
    return getattr(jaxpr, "consts", None) or ()


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """Returns the jaxpr of a closed jaxpr, or the jaxpr itself."""
    inner = getattr(jaxpr, "jaxpr", None)
    return inner if isinstance(inner, Jaxpr) else jaxpr


def aval_of(atom: Any) -> Any:
    """Returns the abstract value of a variable or constant."""
    return atom.aval


def dtype_of_var(atom: Any) -> Any:
    """Returns the dtype that a program gives to a variable or constant; None if it is no array."""
    return getattr(atom.aval, "dtype", None)


# Their jaxprs say how two numbers are combined.
_COMBINING = frozenset({"reduce", "reduce_window", "select_and_scatter", "reduce_scatter"})


def inner_jaxprs(eqn: JaxprEqn) -> tuple[Inner, ...]:
    """Returns the jaxprs inside an equation; none for opaque primitives and plain operations."""
    name = eqn.primitive.name
    if not eqn.params or name in OPAQUE_PRIMITIVES or name in _COMBINING:
        return ()
    if name == "scan":
        return (_scan(eqn),)
    if name == "while":
        return _while(eqn)
    if name == "cond":
        return tuple(_branches(eqn))
    if name == "custom_linear_solve":
        return (_linear_solve(eqn),)
    jaxprs = _jaxprs_in(eqn.params)
    return tuple(_calls(eqn, jaxprs)) if jaxprs else ()


def _linear_solve(eqn: JaxprEqn) -> Inner:
    """Of the functions that describe a linear system, the one that runs: it solves it."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    first = lengths.matvec + lengths.vecmat
    rest = first + lengths.solve + lengths.transpose_solve
    inputs = (*range(first, first + lengths.solve), *range(rest, len(eqn.invars)))
    return Inner(open_jaxpr(jaxprs.solve), inputs, tuple(range(len(eqn.outvars))))


def is_opaque(eqn: JaxprEqn) -> bool:
    """Whether an equation may compute what is not to be seen: kernels, and what is not known."""
    name = eqn.primitive.name
    if name in OPAQUE_PRIMITIVES:
        return True
    unknown = name.startswith("bcoo_") or name == "call_hi_primitive"
    hidden = bool(_jaxprs_in(eqn.params)) and name not in _COMBINING and not _combines(name)
    return not inner_jaxprs(eqn) and (unknown or hidden)


def _combines(name: str) -> bool:
    return name.startswith(("scatter", "reduce", "select_and", "custom_"))


def _calls(eqn: JaxprEqn, jaxprs: Sequence[Any]) -> Iterator[Inner]:
    """Jaxprs that take all inputs and give all outputs: jit, remat, custom rules, shard_map."""
    for closed in jaxprs:
        jaxpr = open_jaxpr(closed)
        if len(jaxpr.invars) == len(eqn.invars) and len(jaxpr.outvars) == len(eqn.outvars):
            yield Inner(
                jaxpr,
                tuple(range(len(eqn.invars))),
                tuple(range(len(eqn.outvars))),
                devices=_devices(eqn),
                consts=consts_of(closed),
            )


def is_plain_call(eqn: JaxprEqn) -> bool:
    """Whether an equation is a jit that says nothing of shardings, layouts, memory or compilers."""
    if eqn.primitive.name != "jit" or len(inner_jaxprs(eqn)) != 1 or is_placed_call(eqn):
        return False
    inline = eqn.params["inline"]
    is_inline = getattr(inline, "value", inline) not in (False, "auto")
    return not is_inline and not any(eqn.params["donated_invars"])


def is_placed_call(eqn: JaxprEqn) -> bool:
    """Whether a jit says something of shardings, layouts or compilers."""
    params = eqn.params
    shardings = (*params["in_shardings"], *params["out_shardings"])
    layouts = (*params["in_layouts"], *params["out_layouts"])
    says = (any(isinstance(each, Sharding) for each in shardings), *layouts)
    return any((*says, params["compiler_options_kvs"]))


_JAXPRS = (ClosedJaxpr, Jaxpr)


def _jaxprs_in(params: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for value in params.values():
        if isinstance(value, _JAXPRS):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [item for item in value if isinstance(item, _JAXPRS)]
    return found


def _devices(eqn: JaxprEqn) -> int:
    if eqn.primitive.name != "shard_map":
        return 1
    params = eqn.params
    axes = params.get("newly_manual_axes", params.get("manual_axes", ()))
    return math.prod(params["mesh"].shape[axis] for axis in axes)


def _rank(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))


def _scan(eqn: JaxprEqn) -> Inner:
    # Counts are read off the ranks, since the parameters that state them changed with JAX 0.12: a
    # scanned array has one axis more outside.
    jaxpr = open_jaxpr(eqn.params["jaxpr"])
    inputs, outputs = len(eqn.invars), len(eqn.outvars)
    scanned = sum(map(rank_differs, eqn.invars, jaxpr.invars))
    stacked = sum(map(rank_differs, eqn.outvars, jaxpr.outvars))
    carried = outputs - stacked
    consts = inputs - scanned - carried
    return Inner(
        jaxpr,
        tuple(range(inputs)),
        tuple(range(outputs)),
        tuple((i, consts + i) for i in range(carried)),
        times=eqn.params["length"],
        consts=consts_of(eqn.params["jaxpr"]),
    )


def meshes_of(jaxpr: Any) -> Iterator[Any]:
    """Yields the meshes of several devices that a program names itself, outermost first."""
    for eqn in open_jaxpr(jaxpr).eqns:
        shardings = [
            eqn.params.get("sharding"),
            *(eqn.params.get("in_shardings") or ()),
            *(eqn.params.get("out_shardings") or ()),
        ]
        named = [getattr(sharding, "mesh", None) for sharding in shardings]
        for mesh in (eqn.params.get("mesh"), *named):
            if getattr(mesh, "size", 1) > 1:
                yield mesh
        for inner in inner_jaxprs(eqn):
            yield from meshes_of(inner.jaxpr)


def rank_differs(outer: Any, inner: Any) -> bool:
    """Whether an array has another number of axes inside: it is sliced or stacked by a scan."""
    return _rank(outer) != _rank(inner)


def consts_of_scan(eqn: JaxprEqn, inner: Inner) -> int:
    """Returns how many inputs of a scan are the same in every turn; they come first."""
    scanned = sum(map(rank_differs, eqn.invars, inner.jaxpr.invars))
    return len(eqn.invars) - scanned - len(inner.carries)


def _while(eqn: JaxprEqn) -> tuple[Inner, Inner]:
    cond, body = (open_jaxpr(eqn.params[key]) for key in ("cond_jaxpr", "body_jaxpr"))
    cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    first = cond_consts + body_consts
    carried = len(eqn.invars) - first
    carry = tuple(range(first, len(eqn.invars)))
    return (
        Inner(
            cond,
            (*range(cond_consts), *carry),
            (None,),
            consts=consts_of(eqn.params["cond_jaxpr"]),
        ),
        Inner(
            body,
            (*range(cond_consts, first), *carry),
            tuple(range(carried)),
            tuple((i, body_consts + i) for i in range(carried)),
            consts=consts_of(eqn.params["body_jaxpr"]),
        ),
    )


def _branches(eqn: JaxprEqn) -> Iterator[Inner]:
    inputs, outputs = tuple(range(1, len(eqn.invars))), tuple(range(len(eqn.outvars)))
    for branch in eqn.params["branches"]:
        yield Inner(open_jaxpr(branch), inputs, outputs, consts=consts_of(branch))


def is_sum(eqn: JaxprEqn) -> bool:
    """Whether a `reduce` or `reduce_window` adds or multiplies."""
    jaxpr = open_jaxpr(eqn.params.get("jaxpr"))
    # Of several arrays reduced at once it is not known which are added up.
    return len(eqn.invars) == 2 and any(
        inner.primitive.name in ("add", "mul") for inner in jaxpr.eqns
    )


def is_jax_code(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr is that of a function of JAX itself, such as `jnp.where`."""
    debug_info = getattr(jaxpr, "debug_info", None)
    file_name = getattr(debug_info, "func_filename", None)
    return file_name is not None and file_name.startswith(_skipped_prefixes()[0])


def function_name(jaxpr: Any) -> str:
    """Returns the name of the function that a jaxpr is of."""
    return getattr(getattr(jaxpr, "debug_info", None), "func_name", None) or ""


def kernel_name(eqn: JaxprEqn) -> str:
    """Returns the name of an opaque kernel: its own, its function's or its foreign target's."""
    names = (
        eqn.params.get("name"),
        function_name(eqn.params.get("jaxpr")),
        eqn.params.get("target_name"),
    )
    return next((str(name) for name in names if name), "")


# The backward pass of remat names the forward modules again.
_REPEATED = re.compile(r"(transpose\(jvp\((.*?)\)\))/jvp\(\2\)")
_TRANSFORM = re.compile(r"(?:^|(?<=[/(]))\w+\((?=.*\))")
# Names of scopes by which autocast marks what it made, and what it is to leave in float32.
AUTOCAST_SCOPE, FULL_PRECISION_SCOPE = "jaxmp.autocast", "jaxmp.full_precision"
# A scope with a policy of its own, which stands in the brackets.
POLICY_SCOPE = "jaxmp.policy"
_NOT_MODULES = frozenset(
    {"", "rematted_computation", "checkpoint", AUTOCAST_SCOPE, FULL_PRECISION_SCOPE}
)


def module_path(name_stack: str) -> str:
    """Returns the names that modules and users gave, without those of JAX's transformations.

    Example:
        >>> module_path("transpose(jvp(GPT))/block_0/rematted_computation/Dense_1")
        'GPT/block_0/Dense_1'
    """
    names = _TRANSFORM.sub("", _REPEATED.sub(r"\1", name_stack)).replace(")", "").split("/")
    # jnp.einsum names what it makes by its subscripts.
    return "/".join(filter(_is_module, names))


def _is_module(name: str) -> bool:
    # jnp.einsum names what it makes by its subscripts.
    return name not in _NOT_MODULES and "->" not in name and not name.startswith(POLICY_SCOPE)


@functools.cache
def _skipped_prefixes() -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Returns the folders of JAX, of this and other libraries on top, and of Python's own."""
    import jax  # noqa: PLC0415
    import jaxlib  # noqa: PLC0415

    packages = [Path(jax.__file__).parent, Path(jaxlib.__file__).parent]
    libraries = [Path(__file__).parent, *(packages[0].parent / name for name in _LIBRARIES)]
    return (
        tuple(f"{path}/" for path in packages),
        tuple(f"{path}/" for path in libraries),
        f"{sysconfig.get_path('stdlib')}/",
    )


_LIBRARIES = ("flax", "optax", "jmp", "chex", "haiku", "equinox", "einops")


@functools.lru_cache(maxsize=65536)
def _is_users(file_name: str) -> bool:
    packages, libraries, python = _skipped_prefixes()
    if file_name.startswith(python) and "site-packages" not in file_name:
        return False
    return not file_name.startswith(("<frozen", *packages, *libraries))


@functools.lru_cache(maxsize=65536)
def _is_librarys(file_name: str) -> bool:
    return file_name.startswith(_skipped_prefixes()[1])


@functools.lru_cache(maxsize=65536)
def _base_name(file_name: str) -> str:
    return Path(file_name).name


def source_line(eqn: JaxprEqn) -> str:
    """Returns the innermost line of user code that made an equation: `"model.py:35 (attend)"`."""
    for frame in _frames(eqn):
        if _is_users(frame.file_name):
            return f"{_base_name(frame.file_name)}:{frame.line_num} ({frame.function_name})"
    return ""


def _frames(eqn: JaxprEqn) -> Sequence[Any]:
    traceback = eqn.source_info.traceback
    return traceback.frames if traceback is not None else ()


def is_cast_back(eqn: JaxprEqn) -> bool:
    """Whether a cast is the rounding that JAX gives to sums of half values it took in float32."""
    for frame in _frames(eqn):
        if _is_users(frame.file_name) or _is_librarys(frame.file_name):
            return False
        if _base_name(frame.file_name) == "reductions.py":
            return True
    return False


_PRODUCTS_OF_LINALG = frozenset({"matmul", "multi_dot", "tensordot", "vecdot", "outer"})


def is_linear_algebra(eqn: JaxprEqn) -> bool:
    """Whether JAX's own decompositions, solvers and their derivatives made an equation."""
    inside = False
    for frame in _frames(eqn):
        if _is_users(frame.file_name) or _is_librarys(frame.file_name):
            return inside
        inside = inside or _base_name(frame.file_name) == "linalg.py"
        if frame.function_name in _PRODUCTS_OF_LINALG:
            return False
    return inside


_EXPLICIT_CASTS = frozenset(
    {"astype", "_astype", "convert_element_type", "_convert_element_type", "asarray", "array"}
)


def is_promotion(eqn: JaxprEqn) -> bool:
    """Whether a cast was made by type promotion in user code, and not written by anyone."""
    names = []
    for frame in _frames(eqn):
        if _is_librarys(frame.file_name):
            return False
        if _is_users(frame.file_name):
            break
        names.append(frame.function_name)
    if any("promote" in name for name in names):
        return True
    return bool(names) and not _EXPLICIT_CASTS.intersection(names)
