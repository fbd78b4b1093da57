"""One trace of the audited function, as a flat program that any compiler target can take."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, NamedSharding

from jaxmp._dtypes import dtype_of
from jaxmp._jaxpr import meshes_of
from jaxmp._tree import is_key, path_name
from jaxmp._widen import widen, widen_spec


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function, flat.

    Attributes:
        name: of the function.
        jaxpr: the whole program.
        inputs: shape, dtype and (over an abstract mesh) sharding of each input.
        input_names: `"state/params/kernel"`, by the function's parameter names.
        donated: which inputs may be overwritten.
        output_names: of each output; a lone output has an empty name.
        mesh: that of the inputs' shardings, or None for a program of one device.
        state_pairs: pairs (input, output) that have the same place in one structure: a state that
            goes in and comes out.
    """

    name: str
    jaxpr: ClosedJaxpr
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    input_names: tuple[str, ...]
    donated: tuple[bool, ...]
    output_names: tuple[str, ...]
    mesh: AbstractMesh | None
    state_pairs: tuple[tuple[int, int], ...]

    @functools.cached_property
    def function(self) -> Callable[..., list[jax.Array]]:
        """The program as a function from flat inputs to flat outputs."""
        return jaxpr_as_fun(self.jaxpr)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the donated inputs."""
        return tuple(i for i, donated in enumerate(self.donated) if donated)


def trace_program(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Program:
    """Traces `fun` once and returns it as a flat program.

    Args:
        fun: any function that `jax.jit` takes, or a jitted one: its donated and static arguments
            and its shardings are kept.
        args: arrays, numbers, `jax.ShapeDtypeStruct`s and pytrees of them.
        kwargs: arguments by name.

    Raises:
        TypeError: if an argument is no array.
        ValueError: if the arguments are sharded over several meshes.
    """
    traced = fun.trace(*args, **kwargs) if isinstance(fun, jax.stages.Wrapped) else None
    within = getattr(traced, "traced", None)
    if isinstance(within, jax.stages.Traced):
        # A wrapper such as nnx.jit: what it traces is a function of the state of its arguments.
        return _from_traced(fun, within)
    traced = traced if isinstance(traced, jax.stages.Traced) else None
    dynamic, kwargs, call = _without_static(fun, args, kwargs, traced)
    names = _names(fun, {i: args[i] for i in dynamic}, kwargs)
    args = tuple(args[i] for i in dynamic)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    specs = [_spec(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    spec_args, spec_kwargs = treedef.unflatten(specs)
    outer = jax.jit(call).trace(*spec_args, **spec_kwargs)
    donated = [False] * len(specs)
    if traced is not None:
        donated = [info.donated for info in jax.tree.leaves(traced.args_info)]
    shardings = [_sharding(spec.sharding) for spec in specs]
    jitted = _lone_jit(outer.jaxpr)
    if jitted is not None:
        shardings = [
            _sharding(inner) or given
            for inner, given in zip(jitted["in_shardings"], shardings, strict=True)
        ]
    inputs = [
        jax.ShapeDtypeStruct(spec.shape, spec.dtype, weak_type=spec.weak_type, sharding=sharding)
        for spec, sharding in zip(specs, shardings, strict=True)
    ]
    trees = (spec_args, spec_kwargs, outer.out_info)
    return _program(fun, outer.jaxpr, inputs, trees, names=names, donated=donated)


def _from_traced(fun: Callable[..., Any], traced: Any) -> Program:
    args, kwargs = traced.args_info
    infos = jax.tree_util.tree_leaves_with_path((args, kwargs))
    names = [path_name(path[1:]) for path, _ in infos]
    inputs = [
        jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in traced.jaxpr.jaxpr.invars
    ]
    donated = [info.donated for _, info in infos]
    trees = (args, kwargs, traced.out_info)
    return _program(fun, traced.jaxpr, inputs, trees, names=names, donated=donated)


def _program(
    fun: Callable[..., Any],
    jaxpr: ClosedJaxpr,
    inputs: Sequence[jax.ShapeDtypeStruct],
    trees: tuple[Any, Any, Any],
    *,
    names: Sequence[str],
    donated: Sequence[bool],
) -> Program:
    args, kwargs, out = trees
    outputs = jax.tree_util.tree_leaves_with_path(out)
    return Program(
        name=getattr(fun, "__name__", type(fun).__name__),
        jaxpr=jaxpr,
        inputs=tuple(inputs),
        input_names=tuple(names),
        donated=tuple(donated),
        output_names=tuple(path_name(path) for path, _ in outputs),
        mesh=_mesh([_sharding(spec.sharding) for spec in inputs], jaxpr),
        state_pairs=_state_pairs(args, kwargs, out),
    )


def in_float32(program: Program) -> Program:
    """Returns the same program with every float narrower than float32 widened."""
    return dataclasses.replace(
        program,
        jaxpr=widen(program.jaxpr),
        inputs=tuple(map(widen_spec, program.inputs)),
    )


def _without_static(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], traced: Any
) -> tuple[tuple[int, ...], dict[str, Any], Callable[..., Any]]:
    """Returns the positions and names of the traced arguments, and a function of them alone.

    A jitted function does not say which of its arguments are static; they are those that are not
    in its traced arguments.
    """
    if traced is None:
        return tuple(range(len(args))), dict(kwargs), fun
    traced_args, traced_kwargs = traced.args_info
    dynamic = _align(args, traced_args)

    def call(*a: Any, **k: Any) -> Any:
        whole = list(args)
        for position, value in zip(dynamic, a, strict=True):
            whole[position] = value
        return fun(*whole, **{**kwargs, **k})

    kept = {name: value for name, value in kwargs.items() if name in traced_kwargs}
    return dynamic, kept, call


def _align(args: Sequence[Any], traced: Sequence[Any]) -> tuple[int, ...]:
    """Returns the positions of `args` that were traced: the rest is static."""
    positions = range(len(args))
    # Numbers can be either; arrays cannot be static.
    likely = sorted(positions, key=lambda i: not _has_arrays(args[i]))
    for kept in itertools.combinations(likely, len(traced)):
        if all(map(_fits, (args[i] for i in sorted(kept)), traced)):
            return tuple(sorted(kept))
    return tuple(positions)


def _fits(arg: Any, traced: Any) -> bool:
    if jax.tree.structure(arg) != jax.tree.structure(traced):
        return False
    pairs = zip(jax.tree.leaves(arg), jax.tree.leaves(traced), strict=True)
    return all(np.shape(leaf) == info.shape and _same_dtype(leaf, info) for leaf, info in pairs)


def _same_dtype(leaf: Any, info: Any) -> bool:
    return dtype_of(leaf) is None or dtype_of(leaf) == info.dtype


def _has_arrays(tree: Any) -> bool:
    return any(map(_is_array, jax.tree.leaves(tree)))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _names(
    fun: Callable[..., Any], args: Mapping[int, Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """Returns the name of each leaf of the arguments, which are given by position and by name."""
    try:
        parameters = [
            parameter.name
            for parameter in inspect.signature(fun).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        parameters = []
    names = (parameters[i] if i < len(parameters) else f"args[{i}]" for i in args)
    pairs = [*zip(names, args.values(), strict=True), *sorted(kwargs.items())]
    return [
        "/".join(filter(None, (name, path_name(path))))
        for name, tree in pairs
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _spec(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
    if dtype_of(leaf) is None and not _is_key(leaf):
        raise TypeError(
            f"Argument {name!r} is {leaf!r} of type {type(leaf).__name__}. An audited function "
            "takes arrays, numbers and jax.ShapeDtypeStructs: close over anything else, with "
            "functools.partial or a lambda."
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        # As jit takes a NumPy array: of 64 bits only where they are enabled.
        return leaf if _is_key(leaf) else leaf.update(dtype=dtype_of(leaf))
    aval = jax.typeof(leaf)
    sharding = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        weak_type=getattr(aval, "weak_type", False),
        sharding=sharding if isinstance(sharding, NamedSharding) else None,
    )


def _is_key(leaf: Any) -> bool:
    abstract = isinstance(leaf, jax.ShapeDtypeStruct)
    return is_key(leaf) or (abstract and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _lone_jit(jaxpr: ClosedJaxpr) -> Mapping[str, Any] | None:
    """Returns the parameters of the jit that is the whole program, or None."""
    eqns = jaxpr.jaxpr.eqns
    if len(eqns) != 1 or "donated_invars" not in eqns[0].params:
        return None
    return eqns[0].params if list(eqns[0].invars) == list(jaxpr.jaxpr.invars) else None


def _sharding(sharding: Any) -> NamedSharding | None:
    """Returns a sharding over an abstract mesh, or None for one device."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return None
    return NamedSharding(_abstract(sharding.mesh), sharding.spec)


def _mesh(shardings: Sequence[NamedSharding | None], jaxpr: ClosedJaxpr) -> AbstractMesh | None:
    meshes: list[Any] = list(dict.fromkeys(s.mesh for s in shardings if s is not None))
    if not meshes:
        meshes = [_abstract(mesh) for mesh in meshes_of(jaxpr)][:1]
    if len(meshes) > 1:
        shapes = " and ".join(str(dict(mesh.shape)) for mesh in meshes)
        raise ValueError(
            f"The arguments are sharded over several meshes: {shapes}. An audited program runs on "
            "one: put all arguments on the same mesh."
        )
    return meshes[0] if meshes else None


def _abstract(mesh: Any) -> AbstractMesh:
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def _state_pairs(args: Any, kwargs: Any, out: Any) -> tuple[tuple[int, int], ...]:
    """Pairs the leaves of each argument with those of an output of the same structure."""
    candidates = list(_subtrees(out, 0))
    pairs, used, first = [], set(), 0
    for tree in [*args, *(kwargs[name] for name in sorted(kwargs))]:
        count = len(jax.tree.leaves(tree))
        for i, (candidate, begin) in enumerate(candidates):
            if i not in used and _alike(tree, candidate):
                used.add(i)
                pairs += [(first + k, begin + k) for k in range(count)]
                break
        first += count
    return tuple(pairs)


def _subtrees(tree: Any, begin: int, depth: int = 2) -> Iterator[tuple[Any, int]]:
    """Yields what a function returns, and the parts of its tuples, with their first leaf."""
    yield tree, begin
    if depth and type(tree) in (tuple, list):
        for part in tree:
            yield from _subtrees(part, begin, depth - 1)
            begin += len(jax.tree.leaves(part))


def _alike(tree: Any, other: Any) -> bool:
    if jax.tree.structure(tree) != jax.tree.structure(other):
        return False
    # A lone array is no state: a step count and a loss look the same, and so do activations.
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(tree)):
        return False
    shapes = [leaf.shape for leaf in jax.tree.leaves(tree)]
    return any(shapes) and shapes == [leaf.shape for leaf in jax.tree.leaves(other)]
