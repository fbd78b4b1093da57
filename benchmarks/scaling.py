"""What fully sharded training sends: a formula, and what compilers make of the real shapes.

    python -m benchmarks.scaling           # the formula: bytes of one step, for each chip
    python -m benchmarks.scaling audit --target tpu:v5e:2x4 --model 1b --policy mixed_bfloat16
    python -m benchmarks.scaling audit --target cuda:h100:1x1x8 --model 7b --rows

The model is a decoder-only GPT whose layers are one `lax.scan` of a `jax.checkpoint`, each chip has
one sequence, and parameters and batch are sharded over all chips (`jaxmp.sharding.fsdp`). `audit`
needs none of the chips, but the extra of its target: pip install "jaxmp[audit-tpu]". `--smoke` has
a tiny model.
"""

import argparse
import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh

import jaxmp
from benchmarks.autocast import _gpt
from benchmarks.autocast._recipes import NO_CASTS, cross_entropy
from jaxmp._table import render
from jaxmp.sharding import Layout, fsdp

_TINY = _gpt.Shape(width=256, heads=2, layers=2, length=128, vocabulary=4096, batch=1)
_GPT = functools.partial(_gpt.Shape, length=2048, vocabulary=32768, batch=1)
# The batch is that of one chip.
MODELS = {
    name: dataclasses.replace(shape, scan=True, remat=True)
    for name, shape in {
        "tiny": _TINY,
        "1b": _GPT(width=2048, heads=16, layers=24),
        "7b": _GPT(width=4096, heads=32, layers=32),
        "70b": _GPT(width=8192, heads=64, layers=80),
    }.items()
}
POLICIES = {
    "float32": jaxmp.get_policy("float32"),
    "mixed_bfloat16": jaxmp.get_policy("mixed_bfloat16"),
    "reduce=bfloat16": dataclasses.replace(
        jaxmp.get_policy("mixed_bfloat16"), reduce_dtype=np.dtype(jnp.bfloat16)
    ),
    "mixed_float8": jaxmp.get_policy("mixed_float8"),
}
CHIPS = (8, 256, 4096)
_MIN_SIZE = 2**14  # elements; that of `fsdp`
_MIN_CODES = 2**16  # bytes; flags and largest values are fewer


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter, or the same one of all layers.

    Attributes:
        shape: of one layer's.
        layers: how many there are, stacked for the scan; 0 if it is no layer's.
        is_product: whether it is an operand of a matmul.
        gathers: how often a step gathers it.
        fp8_gathers: how often, where codes in fp8 are gathered.
    """

    shape: tuple[int, ...]
    layers: int = 0
    is_product: bool = False
    gathers: int = 0
    fp8_gathers: int = 0

    @property
    def each(self) -> int:
        """Elements of one layer's."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Elements of all."""
        return self.each * max(self.layers, 1)

    def is_cut(self, chips: int) -> bool:
        """Whether `fsdp` shards it."""
        return self.size >= _MIN_SIZE and any(
            n % chips == 0 for n in (*self.shape, self.layers or 1)
        )


@dataclasses.dataclass(frozen=True)
class Bytes:
    """What one step sends and keeps, in bytes of one chip.

    Attributes:
        products: results of all-gathers of what matmuls multiply by.
        others: results of all-gathers of other parameters.
        reduced: gradients that a chip puts into sums over chips.
        stored: parameters and both moments of Adam, in float32.
        layer: the largest parameters that are whole at one time: of a layer, or of the head.
    """

    products: int
    others: int
    reduced: int
    stored: int
    layer: int


def weights(shape: _gpt.Shape, *, tied: bool = True) -> dict[str, Weight]:
    """Returns the parameters of a GPT by name."""
    d, layers = shape.width, shape.layers
    # Once for the forward pass and once for the backward pass, which recomputes a layer and then
    # multiplies by what it has gathered for that. Codes in fp8 it gathers again for the latter, so
    # three times, but for the last matmul of a layer, whose result is not recomputed.
    product = functools.partial(Weight, is_product=True, gathers=2)
    norm = functools.partial(Weight, gathers=2, fp8_gathers=2)
    found = {
        "qkv": product((d, 3 * d), layers, fp8_gathers=3),
        "out": product((d, d), layers, fp8_gathers=3),
        "up": product((d, 4 * d), layers, fp8_gathers=3),
        "down": product((4 * d, d), layers, fp8_gathers=2),
        "norm_1": norm((d,), layers),
        "norm_2": norm((d,), layers),
        "norm": norm((d,)),
        "position": Weight((shape.length, d), gathers=1, fp8_gathers=1),
        "head": product((shape.vocabulary, d), fp8_gathers=2),
    }
    return found if tied else {**found, "embedding": Weight((shape.vocabulary, d))}


def formula(shape: _gpt.Shape, chips: int, policy: str, *, tied: bool = True) -> Bytes:
    """Returns what one step is to send and keep, but for activations.

    Args:
        shape: of the model.
        chips: over which parameters and batch are sharded.
        policy: one of `POLICIES`.
        tied: whether the embedding is the head. One of its own is only counted in what is stored.
    """
    recipe = POLICIES[policy].recipe
    width = 1 if recipe else POLICIES[policy].compute_dtype.itemsize
    reduced = POLICIES[policy].reduce_dtype.itemsize
    every = weights(shape, tied=tied)
    result = collections.Counter[str]()
    for weight in every.values():
        is_cut = weight.is_cut(chips)
        gathers = (weight.fp8_gathers if recipe else weight.gathers) * is_cut
        if weight.is_product:
            result["products"] += gathers * weight.size * width
        else:
            result["others"] += gathers * weight.size * 4
        result["stored"] += 12 * weight.size // (chips if is_cut else 1)
        if weight.gathers:
            result["reduced"] += weight.size * (reduced if weight.is_product else 4)
    layer = sum(weight.each for weight in every.values() if weight.is_product and weight.layers)
    return Bytes(**result, layer=width * max(layer, every["head"].size))


def run_formula(*, chips: int, untied: bool, smoke: bool) -> None:
    """Prints what a step sends and keeps by the formula."""
    models = ("tiny",) if smoke else ("1b", "7b", "70b")
    rows, stored = [], []
    for name in models:
        for policy in POLICIES:
            found = formula(MODELS[name], chips, policy, tied=not untied)
            sizes = (found.products, found.others, found.reduced, found.layer)
            rows.append([name, policy, *(f"{size / 1e9:,.3f}" for size in sizes)])
        kept = (formula(MODELS[name], each, "float32", tied=not untied).stored for each in CHIPS)
        stored.append([name, *(f"{size / 1e9:,.3f}" for size in kept)])
    title = f"GB for each of {chips} chips and step"
    header = ("model", "policy", "weights gathered", "others", "reduced", "largest whole")
    print(title, render(None, header, rows, right=range(2, 6)), sep="\n")
    title = (
        f"GB stored on each chip, {'embedding and head' if untied else 'the embedding is the head'}"
    )
    header = ("model", *(f"{each} chips" for each in CHIPS))
    print(title, render(None, header, stored, right=range(1, 4)), sep="\n")


def case(shape: _gpt.Shape, chips: int, policy: str) -> tuple[Callable[..., Any], Any, Any]:
    """Returns a training step, and the shapes of its state and batch over so many chips."""
    shape = dataclasses.replace(shape, batch=shape.batch * chips)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        return cross_entropy(_gpt.model(params, tokens[:, :-1], shape, NO_CASTS), tokens[:, 1:])

    def create() -> jaxmp.TrainState:
        return jaxmp.TrainState.create(_gpt.init(jax.random.key(0), shape), tx)

    tx = jaxmp.mixed_precision(optax.adamw(3e-4), POLICIES[policy])
    state = jax.eval_shape(create)
    layout = fsdp(state.params, AbstractMesh((chips,), ("data",)))
    step = jaxmp.make_train_step(loss_fn, tx, POLICIES[policy], layout=layout)
    size = (shape.batch, shape.length + 1)
    tokens = jax.ShapeDtypeStruct(size, jnp.int32, sharding=layout.batch_sharding())
    return step, _placed(state, layout), tokens


def _placed(state: Any, layout: Layout) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        layout.shardings(state),
    )


@dataclasses.dataclass(frozen=True)
class Part:
    """What a collective of a compiled step sends of one kind.

    Attributes:
        kind: one of `KINDS`.
        collective: its instruction and dtype.
        bytes: in one step.
    """

    kind: str
    collective: str
    bytes: int


PRODUCTS = "weights gathered"
OTHERS = "other parameters gathered"
REDUCED = "gradients reduced"
EMBEDDING = "embedding"
FLAGS = "tokens and flags"
KINDS = (PRODUCTS, OTHERS, REDUCED, EMBEDDING, FLAGS)


def run_audit(
    *, target: str, model: str, policy: str, vocabulary: int | None, every: bool, smoke: bool
) -> None:
    """Prints what a compiler makes of the step, beside the formula."""
    name = "tiny" if smoke else model
    shape = MODELS[name]
    if vocabulary:
        shape = dataclasses.replace(shape, vocabulary=vocabulary)
    chips = math.prod(int(size) for size in target.rpartition(":")[2].split("x"))
    step, state, tokens = case(shape, chips, policy)
    report = jaxmp.audit(step, state, tokens, target=target, float32=False, timeout=1800)
    compiled, expected = report.compiled, formula(shape, chips, policy)
    if every:
        for row in compiled.collectives:
            size = f"{row.bytes:,} bytes over {row.group_size}, {row.times} times"
            print(f"{row.instruction} {row.dtype}, {size}")
    found = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
    for part in parts(compiled.collectives, shape, chips, policy):
        found[part.kind][part.collective] += part.bytes
    sizes = {PRODUCTS: expected.products, OTHERS: expected.others, REDUCED: expected.reduced}
    if POLICIES[policy].compute_dtype == np.float32:
        sizes = {PRODUCTS: expected.products + expected.others, REDUCED: expected.reduced}
    rows = []
    for kind in (kind for kind in KINDS if found[kind]):
        hows = (f"{how} {size / 1e6:,.1f}" for how, size in found[kind].most_common())
        rows.append([kind, *_compared(sizes.get(kind), found[kind].total()), ", ".join(hows)])
    stored = compiled.memory.arguments
    rows.append(["stored", *_compared(expected.stored, stored), "arguments of the step"])
    header = ("what", "formula MB", "compiled MB", "ratio", "as")
    versions = f"JAX {jax.__version__}, {compiled.target}, compiled in"
    print(f"{name}, {policy}, {versions} {compiled.compile_seconds:.0f} s")
    print(render(None, header, rows, right={1, 2, 3}))


def _compared(expected: int | None, found: int) -> tuple[str, str, str]:
    if not expected:
        return "–", f"{found / 1e6:,.1f}", "–"
    return f"{expected / 1e6:,.1f}", f"{found / 1e6:,.1f}", f"{found / expected:.3f}"


def parts(rows: Iterable[Any], shape: _gpt.Shape, chips: int, policy: str) -> Iterator[Part]:
    """Yields what compiled collectives send, told apart by dtype and size: none has a name.

    Of gathers, this is what a chip has in the end; of sums, what it puts in; of permutations, in
    rings of which a TPU sums, what it sends.
    """
    head = shape.vocabulary * shape.width
    activations = chips * shape.batch * shape.length * shape.width
    # How often something of the head's size is the head; after that, it is looked up.
    left = collections.Counter({"all-gather": 2, "sum": 1})
    wide = POLICIES[policy].compute_dtype.itemsize
    for row in rows:
        dtype = jnp.dtype(row.dtype)
        collective = f"{row.instruction} {row.dtype}"
        group = row.group_size if row.instruction == "reduce-scatter" else 1
        total, size = row.bytes * group * row.times, row.bytes * group // dtype.itemsize
        kind = _kind(row, dtype, policy)
        # What is in the loop over layers is of a layer. A compiler may have padded an array.
        if kind == FLAGS or row.times > 1:
            pass
        elif activations <= size <= 1.01 * activations:
            kind = EMBEDDING
        elif size >= head:
            use = "sum" if kind == REDUCED else "all-gather"
            is_lookup = not left[use] or (use == "all-gather" and dtype.itemsize > wide)
            left[use] -= not is_lookup
            # What more there is has been joined to it.
            yield Part(EMBEDDING if is_lookup else kind, collective, head * dtype.itemsize)
            total -= head * dtype.itemsize
        yield Part(kind, collective, total)


def _kind(row: Any, dtype: np.dtype, policy: str) -> str:
    """Returns what is sent, if it is neither activations nor looked up."""
    dtypes = POLICIES[policy]
    # A TPU gathers some weights as a sum with zeros: codes four in a word, all others in a dtype
    # that gradients do not have.
    if dtype == np.uint32 and row.bytes >= _MIN_CODES:
        return PRODUCTS
    if not jnp.issubdtype(dtype, jnp.floating):
        return FLAGS
    if row.instruction == "all-to-all":
        return EMBEDDING
    if row.instruction == "all-gather":
        return OTHERS if dtype.itemsize > dtypes.compute_dtype.itemsize else PRODUCTS
    return PRODUCTS if dtype.itemsize < dtypes.reduce_dtype.itemsize else REDUCED


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table of the formula, or one of an audit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", type=int, default=256, help="of the first table (256)")
    parser.add_argument("--untied", action="store_true", help="a head of its own")
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    parser.set_defaults(run=run_formula)
    commands = parser.add_subparsers()
    text = "what a compiler makes of a step, beside the formula"
    audit = commands.add_parser("audit", help=text, description=text)
    audit.add_argument("--target", default="tpu:v5e:2x4", help="with a topology (tpu:v5e:2x4)")
    audit.add_argument("--model", choices=tuple(MODELS), default="1b", help="(1b)")
    audit.add_argument("--policy", choices=tuple(POLICIES), default="mixed_bfloat16")
    audit.add_argument("--vocabulary", type=int, help="tokens of the embedding (32768)")
    audit.add_argument("--rows", action="store_true", dest="every", help="print each collective")
    audit.add_argument("--smoke", action="store_true", help="a tiny model")
    audit.set_defaults(run=run_audit)
    args = vars(parser.parse_args(arguments))
    run = args.pop("run")
    if run is run_audit:
        del args["untied"], args["chips"]
    run(**args)


if __name__ == "__main__":
    main()
