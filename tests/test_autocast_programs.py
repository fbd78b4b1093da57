"""Random programs under autocast, against the same programs in float64.

A program is a tree of steps, each from a matrix [T, D] to one. How far a result may be off is
measured, not guessed: see `Reference`. JAXMP_PROGRAMS=200 runs that many, other ones each time.
"""

import dataclasses
import functools
import os
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

import jaxmp

# Together they take minutes.
pytestmark = pytest.mark.slow

F16, F32 = jnp.float16, jnp.float32
UNIT = {"mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11}
T, D = 6, 8

programs_wanted = int(os.environ.get("JAXMP_PROGRAMS", "0"))


def compiled(fun):
    """Returns `jax.jit(fun)` that spends little time on compilation."""
    return jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0})


def several(count):
    """Settings of a property test that looks at `count` programs, or at as many as are wanted."""
    return settings(
        max_examples=programs_wanted or count,
        deadline=None,
        derandomize=not programs_wanted,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a program: its name in `STEPS`, a number that varies it, and those inside it."""

    name: str
    option: int
    squash: str
    inner: tuple["Step", ...] = ()


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a step does, and what may be asked of it.

    Attributes:
        run: from (Run, matrix, option, inner program) to the next matrix.
        inner: whether it has steps inside.
        smooth: whether its derivative is continuous, so that rounding changes gradients little.
        continuous: whether rounding changes its value little.
        reverse: whether it has a reverse derivative.
        forward: whether it has a forward derivative (a custom_vjp has none).
        batches: whether JAX can vmap it over any axis.
        needs: the qualities that the steps inside must have.
    """

    run: Callable
    inner: bool = False
    smooth: bool = True
    continuous: bool = True
    reverse: bool = True
    forward: bool = True
    batches: bool = True
    needs: tuple[str, ...] = ()


STEPS: dict[str, Kind] = {}


def step(**options):
    def register(fun):
        STEPS[fun.__name__.rstrip("_")] = Kind(fun, **options)
        return fun

    return register


def walk(steps):
    for one in steps:
        yield one
        yield from walk(one.inner)


def every(program, quality):
    return all(getattr(STEPS[one.name], quality) for one in walk(program))


class Run:
    """What a program needs while it runs: its weights and indices, and what stands for rounding.

    Args:
        params: dict of the weights by name; None records their shapes.
        ids: array of shape [T] and dtype int32, from 0 to T - 1.
        noise: None, or (size, seed) of the relative error made wherever a value may be narrow.
    """

    def __init__(self, params, ids, noise=None):
        self.params, self.ids, self.noise = params, ids, noise
        self.shapes, self.path, self.count, self.sites = {}, "", 0, 0

    def w(self, *shape, scale=None):
        """Returns the next weight of this step."""
        name = f"{self.path}w{self.count}"
        self.count += 1
        if self.params is None:
            self.shapes[name] = shape, scale
            return jnp.zeros(shape, F32)
        return self.r(self.params[name])

    def r(self, x):
        """Marks a value that may be narrow."""
        if self.noise is None:
            return x
        self.sites += 1
        size, seed = self.noise
        place = jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) + 0.1 * self.sites
        hashed = jnp.sin(place * 12.9898 + seed * 78.233) * 43758.5453
        return x * (1 + size * (2 * (hashed - jnp.floor(hashed)) - 1))

    def steps(self, steps, h):
        path, count = self.path, self.count
        for i, one in enumerate(steps):
            self.path, self.count = f"{path}{i}{one.name}/", 0
            inner = functools.partial(self.steps, one.inner)
            h = self.r(STEPS[one.name].run(self, h, one.option, inner))
            assert h.shape == (T, D), one.name
            h = self.r(SQUASH[one.squash](h))
        self.path, self.count = path, count
        return h


SQUASH = {
    "none": lambda h: h,
    "tanh": jnp.tanh,
    "rms": lambda h: h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-2),
    "soft": lambda h: h / (1 + h * h / 8),
    "norm": lambda h: (h - h.mean(-1, keepdims=True)) / jnp.sqrt(1e-2 + h.var(-1, keepdims=True)),
}


# Elementwise.

SMOOTH = [
    jax.nn.gelu,
    jax.nn.silu,
    lambda h: jax.nn.gelu(h, approximate=False),
    jax.nn.softplus,
    jax.nn.sigmoid,
    jax.nn.mish,
    lambda h: jnp.sin(h) + jnp.cos(2 * h) / 2,
    lambda h: jnp.sqrt(1 + h * h),
    lambda h: jnp.tanh(h) ** 3 - 0.5 * jnp.tanh(h) ** 2,
    lambda h: jnp.log1p(jnp.exp(jnp.tanh(h))),
    lambda h: jnp.expm1(jnp.tanh(h)),
    lax.erf,
    lambda h: (h * h + 1) ** 0.7,
    lambda h: (1.5 + jnp.tanh(h)) ** jnp.tanh(h),
    lambda h: jnp.arctan2(h, 2 + jnp.tanh(h)),
    lambda h: h / (1 + h * h),
    lambda h: jnp.exp2(jnp.tanh(h)) - jnp.logaddexp(h, -h),
    lambda h: lax.cbrt(2 + jnp.tanh(h)) + jnp.sinh(jnp.tanh(h)),
    lambda h: 3 - h,
    lambda h: jnp.square(h) / 2,
    lambda h: jnp.arcsinh(h) + jnp.arctan(h),
    lambda h: lax.lgamma(2 + jnp.tanh(h)),
    lambda h: jnp.hypot(h, 1 + h * h),
    lambda h: -lax.reciprocal(1 + h * h),
]


@step()
def elementwise(run, h, option, inner):
    return SMOOTH[option % len(SMOOTH)](h)


KINKED = [
    jax.nn.relu,
    jnp.abs,
    lambda h: jnp.clip(h, -0.5, 0.5),
    lambda h: jnp.maximum(h, 0.1),
    jax.nn.relu6,
    jax.nn.leaky_relu,
    lambda h: jnp.where(h > 0, h, 0.1 * h),
    lambda h: jnp.minimum(h, jnp.flip(h, 0)),
    lambda h: jnp.sort(h, axis=-1),
    lambda h: lax.cummax(h, 0),
    lambda h: lax.top_k(h, D)[0],
    lambda h: jnp.max(h, 0, keepdims=True) + h - jnp.min(h, -1, keepdims=True),
    lambda h: jnp.median(h, axis=-1, keepdims=True) + h,
    lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME"),
    lambda h: lax.clamp(jnp.asarray(-1, h.dtype), h, jnp.asarray(1, h.dtype)),
    lambda h: jnp.nan_to_num(jnp.where(jnp.isfinite(h), h, 0)) * jnp.sign(h),
]


@step(smooth=False)
def kinked(run, h, option, inner):
    return KINKED[option % len(KINKED)](h)


JUMPS = [
    lambda h: jnp.sign(h) * jnp.tanh(h) ** 2,
    lambda h: jax.nn.one_hot(jnp.argmax(h, -1), D, dtype=h.dtype) + h,
    lambda h: jnp.round(4 * h) / 4,
    lambda h: jnp.floor(h) + h,
    lambda h: h[jnp.argsort(h[:, 0])],
    lambda h: jnp.where((h > 0) & (h < 1), h, 0),
    lambda h: (h > 0).astype(h.dtype) * h + jnp.fmod(h, 0.3),
    lambda h: lax.cond(jnp.sum(h) > 0, jnp.sin, lambda h: h, h),
    lambda h: h + jnp.sum(h > 0).astype(h.dtype) / 10,
    lambda h: h + (4 * h).astype(jnp.int32).astype(h.dtype) / 4,
    lambda h: jnp.take_along_axis(h, jnp.argsort(h, axis=0), axis=0),
    lambda h: h + jnp.searchsorted(jnp.sort(h[0]), h[1]).astype(h.dtype) / 10,
]


@step(smooth=False, continuous=False)
def jump(run, h, option, inner):
    return JUMPS[option % len(JUMPS)](h)


@step()
def mixed_dtypes(run, h, option, inner):
    """Integers and bools among the floats."""
    ids, dtype = run.ids, h.dtype
    column = ids[:, None]
    return [
        lambda: h * (ids % 3 + 1).astype(dtype)[:, None] / 2,
        lambda: jnp.where(column > 2, h, 0),
        lambda: jnp.where(column > 2, h, run.w(T, D)),
        lambda: h + lax.iota(dtype, T)[:, None] / T,
        lambda: h * (column != 1).astype(dtype),
        lambda: lax.select(jnp.broadcast_to(column < 3, h.shape), h, jnp.full_like(h, 0.5)),
        lambda: jnp.tanh(h - (column == 0).astype(dtype) * 1e10),
        lambda: jnp.where(column == 0, jnp.zeros((), dtype), h / column.astype(dtype).clip(1)),
        lambda: h + jnp.linspace(0, 1, D, dtype=dtype),
        lambda: h * np.asarray([1, 2, 3, 4, 5, 6, 7, 8], dtype) / 4 + np.ones((T, 1), dtype),
        lambda: h / (jnp.linalg.norm(h, axis=-1, keepdims=True) + 1e-9),
        lambda: lax.select_n(jnp.broadcast_to(column % 3, h.shape), h, -h, run.w(T, D)),
        lambda: lax.integer_pow(h, 2) * jnp.asarray(1e-9, dtype) * 1e9,
        lambda: h + jnp.bitwise_and(ids, 3).astype(dtype)[:, None] / jnp.sum(ids + 1).astype(dtype),
    ][option % 14]()


REDUCTIONS = [
    lambda h: h - jnp.mean(h),
    lambda h: h / (1 + jnp.sum(h * h)),
    lambda h: jnp.cumsum(h, 0) / T,
    lambda h: h - lax.stop_gradient(jnp.max(h, -1, keepdims=True)),
    lambda h: h / (0.5 + jnp.var(h, 0)),
    lambda h: h - jax.nn.logsumexp(h, 0),
    lambda h: jnp.prod(1 + 0.1 * jnp.tanh(h), 0) + h,
    lambda h: jnp.cumprod(1 + 0.1 * jnp.tanh(h), 1),
    lambda h: lax.cumlogsumexp(h, 0) - 1,
    lambda h: lax.associative_scan(jnp.add, h) / T,
    lambda h: lax.associative_scan(
        lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (jnp.tanh(h), h)
    )[1],
    lambda h: lax.reduce_window(h, 0.0, lax.add, (3, 1), (1, 1), "SAME") / 3,
    lambda h: h + jnp.linalg.norm(h) / 10,
    lambda h: lax.reduce(h, jnp.zeros((), h.dtype), lax.add, (0,)) / T + h,
    lambda h: jnp.trapezoid(h, axis=0) / T + h,
    lambda h: jnp.diff(h, axis=0, append=h[:1]),
    lambda h: jnp.average(h, axis=0, weights=jnp.arange(1, T + 1).astype(h.dtype)) - h,
    lambda h: jnp.cov(h)[:, :1] + h,
]  # fmt: skip


@step()
def reduction(run, h, option, inner):
    return REDUCTIONS[option % len(REDUCTIONS)](h)


@step()
def norm(run, h, option, inner):
    def layer(h):
        mean = jnp.mean(h, -1, keepdims=True)
        var = jnp.mean(jnp.square(h - mean), -1, keepdims=True)
        return (h - mean) * lax.rsqrt(var + 1e-2) * run.w(D, scale=1.0) + run.w(D)

    def batch(h):
        mean, square = jnp.mean(h, 0), jnp.mean(h * h, 0)
        return (h - mean) / jnp.sqrt(square - mean**2 + 1e-1) * (1 + run.w(D))

    def group(h):
        return jax.nn.standardize(h.reshape(T, 2, D // 2), axis=-1, epsilon=1e-2).reshape(T, D)

    def power(h):
        return h * run.w(D, scale=1.0) / (jnp.sum(h**2, -1, keepdims=True) + 1) ** 0.5

    return [layer, batch, group, power][option % 4](h)


@step()
def softmax(run, h, option, inner):
    mask = jnp.tri(T, D, dtype=bool)
    return [
        lambda: jax.nn.softmax(h),
        lambda: jax.nn.softmax(h, axis=0) * h,
        lambda: jax.nn.log_softmax(h),
        lambda: jax.nn.softmax(jnp.where(mask, h, float(jnp.finfo(F32).min))),
        lambda: jax.nn.softmax(jnp.where(mask, h, -jnp.inf)),
        lambda: jax.nn.softmax(h, where=mask, axis=-1),
        lambda: jnp.exp(h - jnp.max(h)) @ run.w(D, D),
        lambda: jax.nn.softmax(h @ run.w(D, 16)) @ run.w(16, D),
    ][option % 8]()


@step()
def attention(run, h, option, inner):
    heads = [1, 2, 4][option % 3]
    q, k, v = (run.r((h @ run.w(D, D)).reshape(T, heads, D // heads)) for _ in range(3))
    causal = option % 4 < 3
    # JAX's own computes in float32 at most.
    if option % 2 and h.dtype == F32:
        out = jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=causal)[0]
    else:
        scores = run.r(jnp.einsum("qhd,khd->hqk", q, k)) / (D // heads) ** 0.5
        if causal:
            mask = jnp.tri(T, dtype=bool)
            scores = jnp.where(mask, scores, [-1e9, -jnp.inf, -1e30][option % 3])
        out = jnp.einsum("hqk,khd->qhd", run.r(jax.nn.softmax(scores)), v)
    return run.r(out.reshape(T, D)) @ run.w(D, D) + h


@step()
def product(run, h, option, inner):
    r, w = run.r, run.w
    return [
        lambda: h @ w(D, D),
        lambda: h @ w(D, D).T + w(D),
        lambda: jnp.einsum("td,de->te", h, w(D, D)),
        lambda: jnp.einsum("thd,hde->the", h.reshape(T, 2, 4), w(2, 4, 4)).reshape(T, D),
        lambda: r(h @ h.T) @ h / T,
        lambda: h * r(h @ w(D))[:, None],
        lambda: jnp.tensordot(w(T, T), h, 1),
        lambda: h @ r(w(D, D) @ w(D, D)),
        lambda: r(r(h @ w(D, 4)) @ w(4, D)) + h,
        lambda: lax.batch_matmul(h[:, None], jnp.broadcast_to(w(D, D), (T, D, D)))[:, 0],
        lambda: jnp.outer(h[:, 0], h[0]) + h,
        lambda: jnp.concatenate([h, r(h @ w(D, D))], -1) @ w(2 * D, D),
        lambda: (h @ w(D, D)) * jax.nn.sigmoid(h @ w(D, D)),
        lambda: jnp.einsum("td,se,de->ts", h, h, w(D, D)) @ h / D,
        lambda: jnp.dot(h, w(D, D), precision="highest", preferred_element_type=h.dtype),
        lambda: jnp.vdot(h, h) / (T * D) + h,
        lambda: h @ w(D, 1) + h,
        lambda: jnp.kron(h[:3, :4], w(2, 2)),
        lambda: jnp.einsum("ij,ij->i", h, h)[:, None] / D + h,
        lambda: jnp.convolve(h.ravel(), w(3), mode="same").reshape(T, D),
    ][option % 20]()


@step()
def convolution(run, h, option, inner):
    r, w = run.r, run.w
    conv = functools.partial(lax.conv_general_dilated, dimension_numbers=("NWC", "WIO", "NWC"))

    def up_and_down():
        up = lax.conv_transpose(h[None], w(2, D, D), (2,), "SAME")
        return conv(r(up), w(3, D, D), (2,), "SAME")[0]

    def image():
        x = lax.conv_general_dilated(h[None, None], w(2, 1, 3, 3), (1, 1), "SAME")
        return jnp.mean(x, 1)[0]

    return [
        lambda: conv(h[None], w(3, D, D), (1,), "SAME")[0],
        lambda: conv(h[None], w(3, 1, D), (1,), "SAME", feature_group_count=D)[0],
        lambda: conv(h[None], w(3, D, D), (1,), "SAME", rhs_dilation=(2,))[0],
        lambda: conv(h[None], w(1, D, D), (1,), "SAME")[0],
        lambda: conv(h[None], w(2, D, D), (1,), [(1, 0)])[0] + h,
        up_and_down,
        image,
        lambda: jnp.repeat(conv(h[None], w(2, D, D), (2,), "VALID")[0], 2, 0),
    ][option % 8]()


@step(batches=False)
def ragged(run, h, option, inner):
    return lax.ragged_dot(h, run.w(3, D, D), jnp.array([2, 0, 4], jnp.int32))


@step()
def moves(run, h, option, inner):
    ids, r = run.ids, run.r
    return [
        lambda: h[ids],
        lambda: jnp.roll(h, 2, 0) + jnp.flip(h, 1),
        lambda: jnp.take_along_axis(h, (ids[:, None] + jnp.arange(D, dtype=ids.dtype)) % D, 1),
        lambda: lax.dynamic_slice_in_dim(jnp.concatenate([h, run.w(T, D)]), ids[0], T),
        lambda: lax.dynamic_update_slice(h, run.w(1, D), (ids[1], ids[2] * 0)),
        lambda: jnp.pad(h[1:, :-1], ((0, 1), (1, 0)), constant_values=0.5),
        lambda: jnp.stack(jnp.split(h, 2, -1), 1).reshape(T, D),
        lambda: h.reshape(D, T).T.reshape(T, D)[::-1],
        lambda: jnp.tile(h[:, :4], (1, 2)) + h[:1],
        lambda: h.at[0].set(run.w(D)),
        lambda: jnp.where(jnp.eye(T, D, dtype=bool), h, jnp.squeeze(h[None], 0).mean()),
        lambda: jnp.concatenate([h[:2], run.w(2, D), jnp.ones((2, D), h.dtype)]),
        lambda: lax.optimization_barrier(h),
        lambda: r(run.w(12, D)[ids]) + h,
        lambda: jax.nn.one_hot(ids, 12, dtype=h.dtype) @ run.w(12, D) * h,
        lambda: jnp.repeat(h[::2], 2, 0, total_repeat_length=T),
        lambda: jnp.take(h, ids + 3, axis=0, mode="fill", fill_value=0),
        lambda: jnp.append(h, h[:1], 0)[1:],
        lambda: jnp.triu(h) + jnp.diagonal(h)[:, None],
        lambda: lax.rev(h, (0,)) * lax.expand_dims(h[0], (0,)),
    ][option % 20]()


@step()
def scatter(run, h, option, inner):
    ids = run.ids
    return [
        lambda: jnp.zeros_like(h).at[ids].add(h) / 2,
        lambda: run.w(T, D).at[ids].add(h),
        lambda: jax.ops.segment_sum(h, ids, T) / 2 + h,
        lambda: h.at[::2].mul(1 + run.w(3, D)),
        lambda: h.at[ids[0], ids[1]].add(run.w()) + h,
        lambda: h.at[ids].add(1.0) / 2,
    ][option % 6]()


# The functions of the user that say how they are differentiated.


@jax.custom_jvp
def softened(x, scale):
    return jnp.log1p(jnp.exp(x * scale))


@softened.defjvp
def _softened_jvp(primals, tangents):
    (x, scale), (dx, ds) = primals, tangents
    slope = jax.nn.sigmoid(x * scale)
    return softened(x, scale), slope * (scale * dx + x * ds)


@jax.custom_vjp
def layer(x, w):
    return jnp.tanh(x @ w)


def _layer_forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def _layer_backward(residuals, g):
    x, w, y = residuals
    g = g * (1 - y * y)
    return g @ w.T, x.T @ g


layer.defvjp(_layer_forward, _layer_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def applied(fun, x):
    return fun(x)


def _applied_forward(fun, x):
    return fun(x), (x, x.size)


def _applied_backward(fun, residuals, g):
    x, _ = residuals
    return jax.vjp(fun, x)[1](g)


applied.defvjp(_applied_forward, _applied_backward)


def with_constants(dtype):
    """A function of one argument that closes over arrays, in both of its rules."""
    table = jnp.asarray(np.linspace(-1, 1, D * D).reshape(D, D), dtype)

    @jax.custom_vjp
    def fun(x):
        return x @ table

    fun.defvjp(lambda x: (fun(x), None), lambda _, g: (g @ table.T,))
    return fun


@jax.custom_vjp
def clipped_gradient(x):
    return x


clipped_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.tanh(g),))


@step(forward=False)
def custom_vjp(run, h, option, inner):
    return [
        lambda: layer(h, run.w(D, D)),
        lambda: applied(jnp.sin, h),
        lambda: clipped_gradient(h),
        lambda: with_constants(h.dtype)(h),
        lambda: applied(lambda x: jax.nn.softmax(x) * x, h) @ run.w(D, D),
    ][option % 5]()


@step()
def custom_jvp(run, h, option, inner):
    scale = [jnp.asarray(1.5, h.dtype), run.w(D), h][option % 3]
    return softened(h, jnp.broadcast_to(scale, h.shape))


# Control flow and calls.


@step(inner=True)
def scan_(run, h, option, inner):
    """The inner program at every step, with stacked weights, a counter, a sum, stacked outputs."""
    weights = run.w(3, D, D)

    def body(carry, xs):
        h, total, count = carry
        w, i = xs
        h = jnp.tanh(inner(run.r(h @ w)))
        return (h, total + jnp.mean(h), count + 1), (run.r(h[i]), count)

    init = h, jnp.zeros((), h.dtype), jnp.zeros((), jnp.int32)
    (h, total, count), (rows, counts) = lax.scan(
        body, init, (weights, jnp.arange(3, dtype=jnp.int32)),
        reverse=option % 2 == 1, unroll=1 + option % 3,
    )  # fmt: skip
    rows = jnp.concatenate([rows, rows * (1 + counts).astype(h.dtype)[:, None]])
    return h + total / count.astype(h.dtype) + rows


@step(inner=True)
def scan_outputs(run, h, option, inner):
    """No carry, or one that starts as a constant, and may stay unused."""

    def body(carry, row):
        out = jnp.broadcast_to(row, (T, D))
        out = inner(out)[0]
        return (carry * 0.5 + out if option % 2 else carry), out

    carry, rows = lax.scan(body, jnp.zeros((D,), h.dtype), h)
    return rows + carry


@step(inner=True)
def fori(run, h, option, inner):
    w = run.w(D, D)
    if option % 3 == 0:
        return lax.fori_loop(0, 2, lambda _, h: jnp.tanh(inner(h)), h)
    if option % 3 == 1:
        # The other half of the carry is a weight that each turn replaces by a narrow value.
        turn = lambda _, c: (c[1] + h, jnp.tanh(inner(c[0]) @ w))  # noqa: E731
        return lax.fori_loop(0, 2, turn, (h, w[:T]))[1]
    return lax.fori_loop(
        0, 3, lambda i, h: h.at[i].set(jnp.tanh(h[i] @ w + i.astype(h.dtype))), inner(h)
    )


@step(inner=True, reverse=False)
def while_(run, h, option, inner):
    if option % 2:
        _, h, _ = lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(inner(c[1])), c[2]),
            (jnp.zeros((), jnp.int32), h, run.w(D)),
        )  # fmt: skip
        return h
    # A square root by Newton's method, until it no longer changes.
    y = 1 + inner(h) ** 2

    def improve(state):
        x, _ = state
        new = (x + y / x) / 2
        return new, jnp.max(jnp.abs(new - x))

    return lax.while_loop(lambda s: s[1] > 1e-5, improve, (y, jnp.ones((), y.dtype)))[0]


@step(inner=True)
def cond(run, h, option, inner):
    w = run.w(D, D)
    index = run.ids[option % T]
    if option % 3 == 0:
        return lax.cond(index > 2, inner, lambda h: h, h)
    if option % 3 == 1:
        return lax.switch(index % 3, [inner, lambda h: run.r(h @ w), lambda h: w[:T]], h)
    out, flag, extra = lax.cond(
        index > 2, lambda h: (inner(h), 1, h), lambda h: (h @ w, 2, jnp.zeros_like(h)), h
    )
    return out * (flag + 0 * index).astype(h.dtype) / 2 + extra


@step(inner=True)
def jit_twice(run, h, option, inner):
    table = jnp.asarray(np.ones((T, D)), h.dtype)
    fun = jax.jit(lambda h: inner(h) + table, inline=option % 4 == 3)
    return fun(fun(h) if option % 2 else h + run.w(D)) + fun(run.w(T, D))


@step(inner=True)
def remat(run, h, option, inner):
    policies = jax.checkpoint_policies
    policy = [None, policies.dots_saveable, policies.everything_saveable][option % 3]
    return jax.checkpoint(inner, policy=policy, prevent_cse=option % 2 == 0)(h)


@step(inner=True, needs=("batches",))
def vmap(run, h, option, inner):
    pair = jnp.stack([h, h * 0.5], option % 3)
    if option % 2:
        return jnp.mean(jax.vmap(inner, option % 3)(pair), 0)
    weights = run.w(2, D, D)
    fun = jax.vmap(lambda h, w: inner(run.r(h @ w)), (option % 3, 0), 1)
    return fun(pair, weights).sum(1)


@step(inner=True, needs=("smooth", "continuous", "reverse"))
def gradient(run, h, option, inner):
    """A derivative inside the program, as of an energy."""
    weigh = run.w(T, D)
    energy = lambda h: jnp.sum(jnp.tanh(inner(h)) * weigh)  # noqa: E731
    return h - jax.grad(energy)(h) if option % 2 else jax.value_and_grad(energy)(h)[1]


@step(inner=True, needs=("smooth", "continuous", "forward"))
def derivative(run, h, option, inner):
    return jax.jvp(inner, (h,), (run.w(T, D),))[1] + h


@step(inner=True)
def residual(run, h, option, inner):
    return h + inner(SQUASH["rms"](h))


@step(inner=True)
def named(run, h, option, inner):
    with jax.named_scope("block"):
        return inner(h)


@step()
def linalg(run, h, option, inner):
    square = run.r(h @ h.T) / D
    matrix = jnp.eye(T, dtype=h.dtype) * 2 + 0.1 * square
    return [
        lambda: jnp.linalg.solve(matrix, h),
        lambda: jnp.linalg.cholesky(matrix) @ h,
        lambda: h + jnp.linalg.slogdet(matrix)[1],
        lambda: jnp.linalg.inv(matrix) @ h,
        lambda: h + jnp.linalg.eigvalsh(matrix)[:, None],
    ][option % 5]()


@step()
def complex_(run, h, option, inner):
    return jnp.fft.irfft(jnp.fft.rfft(h, axis=0) * (1 + 0.5j), T, axis=0).astype(h.dtype)


@step()
def dropout(run, h, option, inner):
    key = jax.random.fold_in(jax.random.key(option), run.ids[0])
    keep = jax.random.bits(key, h.shape, jnp.uint32) % 4 != 0
    noise = jax.random.normal(key, h.shape, F32).astype(h.dtype)
    return jnp.where(keep, h / 0.75, 0) if option % 2 else h + noise / 4


@step()
def user_cast(run, h, option, inner):
    """What the user rounds is rounded in the reference, too."""
    if option % 2:
        return h.astype(jnp.int32).astype(h.dtype) * 0 + h
    return h + run.w(D).astype(F16).astype(h.dtype)


@step()
def callback(run, h, option, inner):
    if option % 2:
        jax.debug.callback(lambda x: None, h)
        return h
    return (
        h
        + jax.pure_callback(
            lambda i: np.asarray(i) + 1, jax.ShapeDtypeStruct((T,), jnp.int32), run.ids
        ).astype(h.dtype)[:, None]
        / T
    )


if hasattr(jaxmp, "full_precision"):

    @step(inner=True)
    def full_precision(run, h, option, inner):
        if option % 2:
            return jaxmp.full_precision()(inner)(h)
        with jaxmp.full_precision():
            return inner(h)

    @step(inner=True)
    def nested(run, h, option, inner):
        if run.noise is not None:
            return inner(h)
        return jaxmp.autocast(inner, ["float32", "mixed_float16"][option % 2])(h)


LEAVES = [name for name, kind in STEPS.items() if not kind.inner]
NESTS = [name for name, kind in STEPS.items() if kind.inner]


def having(*qualities, names=tuple(STEPS)):
    """Returns the names of the steps with all these qualities."""
    return [name for name in names if all(getattr(STEPS[name], q) for q in qualities)]


def grow(pick, names=tuple(STEPS), depth=2, width=4):
    """Returns a program: a tuple of steps, chosen by `pick(sequence)`."""
    steps = []
    for _ in range(pick(range(1, width + 1))):
        # Products are what this is about: every third step is one.
        group = pick([["product"], LEAVES, NESTS] if depth else [["product"], LEAVES, LEAVES])
        name = pick([name for name in group if name in names])
        within = having(*STEPS[name].needs, names=names)
        inner = grow(pick, within, depth - 1, 2) if STEPS[name].inner else ()
        steps.append(Step(name, pick(range(120)), pick(list(SQUASH)), inner))
    return tuple(steps)


@st.composite
def programs(draw, *qualities):
    size = {} if programs_wanted else {"depth": 1, "width": 3}
    return grow(lambda options: draw(st.sampled_from(options)), having(*qualities), **size)


def initial(program):
    """Returns the arguments of a program, as numpy arrays: weights, x and ids."""
    run = Run(None, jnp.zeros((T,), jnp.int32))
    jax.eval_shape(lambda h: run.steps(program, h), jax.ShapeDtypeStruct((T, D), F32))
    params = {}
    for name, (shape, scale) in run.shapes.items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        fan_in = np.prod(shape[:-1][-2:]) if len(shape) > 1 else 4
        params[name] = rng.normal(size=shape).astype(np.float32) * np.float32(1 / fan_in**0.5)
        if scale is not None:
            params[name] = (1 + 0.1 * params[name]) * np.float32(scale)
    rng = np.random.default_rng(len(params))
    x = rng.normal(size=(T, D)).astype(np.float32)
    return params, x, np.array([3, 1, 4, 1, 5, 0], np.int32)


def running(program, noise=None):
    """Returns the program as fun(params, x, ids) -> (scalar, tree of all sorts of outputs)."""
    weigh = np.random.default_rng(7).normal(size=(T, D))

    def fun(params, x, ids):
        run = Run(params, ids, noise)
        h = run.steps(program, run.r(x))
        loss = jnp.sum(h * weigh.astype(h.dtype)) + jnp.mean(h**2)
        outputs = {
            "h": h,
            "sums": (jnp.sum(h, 0), [jnp.max(h), None]),
            "ids": ids + 1,
            "mask": ids > 2,
            "input": x,
            "doubled": {name: 2 * w for name, w in params.items() if name.endswith("w0")},
        }
        return loss, outputs

    return fun


def norms(tree):
    """The norm of each float leaf; complex and integer leaves count as well."""
    return [np.linalg.norm(np.asarray(leaf, np.float64).ravel()) for leaf in jax.tree.leaves(tree)]


def minus(a, b):
    return jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), a, b)


def to64(tree):
    return jax.tree.map(
        lambda x: np.asarray(x, np.float64) if np.asarray(x).dtype == np.float32 else np.asarray(x),
        tree,
    )


class Reference:
    """A transformed program in float64, and how far roundings move its results.

    Wherever a value may be narrow, a relative error of size u with changing signs is made, in the
    cotangents and tangents likewise (the error is a factor, and those meet the same factor). What
    that does to each result, in norm, is its share of u times the number of roundings on the way
    there, each amplified as the program does; the largest of eight such runs stands for it. A step
    rounds more than once, so the bound is a multiple of it, plus some roundings of the result.
    """

    ROUNDINGS = 4

    def __init__(self, transform, program, args):
        with jax.enable_x64(True):
            self.fun = compiled(
                lambda size, seed, *args: transform(running(program, (size, seed)))(*args)
            )
            self.args = to64(args)
            self.value = self.run(0.0, 0.0)

    def run(self, size, seed):
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, self.fun(size, seed, *self.args))

    def bounds(self, unit):
        spread = [norms(minus(self.run(unit, 1.0 + i), self.value)) for i in range(8)]
        return self.ROUNDINGS * (np.max(spread, 0) + unit * (np.array(norms(self.value)) + 2.0**-4))

    def assert_near(self, result, unit):
        errors, bounds = norms(minus(result, self.value)), self.bounds(unit)
        paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(result)]
        far = {
            path: f"{error:.2e} > {bound:.2e}, {error / bound * self.ROUNDINGS:.1f} roundings"
            for path, error, bound in zip(paths, errors, bounds, strict=True)
            if not error <= bound
        }
        assert not far, far


def assert_like(result, wanted):
    """The same tree, shapes and dtypes, and no value that is not finite."""
    assert jax.tree.structure(result) == jax.tree.structure(wanted)
    for leaf, spec in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
        assert (leaf.shape, leaf.dtype) == (spec.shape, spec.dtype)
        assert np.all(np.isfinite(np.asarray(leaf, np.float64)))


def splitting(result):
    """Splits off the outputs that have no derivative."""
    loss, outputs = result
    return (loss, outputs["h"], outputs["doubled"]), outputs["ids"]


SMOOTH_REVERSE = ("smooth", "continuous", "reverse")
# What each of the transformations asks of a program.
NEEDS = {
    "value": ("continuous",),
    "grad": SMOOTH_REVERSE,
    "jvp": ("smooth", "continuous", "forward"),
    "vmap": ("continuous", "batches"),
    "grad of vmap": (*SMOOTH_REVERSE, "batches"),
    "vmap of grad": (*SMOOTH_REVERSE, "batches"),
}
VMAPS = ["vmap", "grad of vmap", "vmap of grad"]
TRANSFORMS = {
    "value": lambda f: f,
    "grad": lambda f: jax.value_and_grad(f, (0, 1), has_aux=True),
    "jvp": lambda f: (
        lambda p, x, i: jax.jvp(
            lambda p, x: splitting(f(p, x, i)), (p, x), (p, jnp.sin(x)), has_aux=True
        )
    ),
    "vmap": lambda f: lambda p, x, i: jax.vmap(f, (None, 0, None))(p, two(x), i),
    "grad of vmap": lambda f: jax.grad(
        lambda p, x, i: jnp.sum(jax.vmap(f, (None, 1, None))(p, two(x, 1), i)[0])
    ),
    "vmap of grad": lambda f: (
        lambda p, x, i: jax.vmap(jax.grad(f, has_aux=True), (None, 0, None))(p, two(x), i)
    ),
}


def two(x, axis=0):
    return jnp.stack([x, jnp.sin(3 * x)], axis)


def check(program, transform, policy, orders=("inside", "outside"), jits=(True,)):
    """Compares autocast inside and outside of a transformation with float64."""
    change = TRANSFORMS[transform]
    fun, args = running(program), initial(program)
    wanted = jax.eval_shape(change(fun), *args)
    near = all(every(program, quality) for quality in NEEDS[transform])
    reference = Reference(change, program, args) if near else None
    unit = max(UNIT.get(policy, 0), 2.0**-20)
    if any(one.name == "nested" for one in walk(program)):
        unit = max(unit, UNIT["mixed_float16"])
    for order in orders:
        cast = functools.partial(jaxmp.autocast, policy=policy) if policy else lambda f: f
        ours = change(cast(fun)) if order == "inside" else cast(change(fun))
        for jit in jits:
            result = (compiled(ours) if jit else ours)(*args)
            if near or transform == "value":
                assert_like(result, wanted)
            if near:
                try:
                    reference.assert_near(result, unit)
                except AssertionError as error:
                    raise AssertionError(f"{order}, jit={jit}: {error}") from None


POLICIES = st.sampled_from(list(UNIT))


class TestRandomPrograms:
    """Each against float64; what autocast gives inside of a transformation, and around it."""

    @several(3)
    @given(programs(*NEEDS["grad"]), POLICIES)
    def test_values_and_gradients(self, program, policy):
        check(program, "grad", policy)

    @several(2)
    @given(programs(*NEEDS["value"]), POLICIES)
    def test_values_in_jit_and_eagerly(self, program, policy):
        check(program, "value", policy, ("inside",), (False, True))

    @several(2)
    @given(programs(*NEEDS["jvp"]), POLICIES)
    def test_tangents(self, program, policy):
        check(program, "jvp", policy)

    @several(3)
    @given(programs(*NEEDS["vmap of grad"]), POLICIES, st.sampled_from(VMAPS))
    def test_vmap(self, program, policy, transform):
        check(program, transform, policy)

    @several(4)
    @given(programs(), POLICIES)
    def test_programs_that_jump_run_and_keep_their_dtypes(self, program, policy):
        check(program, "value", policy)

    @several(6)
    @given(programs())
    def test_float32_policy_leaves_the_program_as_it_is(self, program):
        fun, args = running(program), initial(program)
        ours = jax.make_jaxpr(jaxmp.autocast(fun, "float32"))(*args)
        assert str(ours) == str(jax.make_jaxpr(fun)(*args))


@pytest.mark.parametrize("name", having("continuous"))
def test_each_step(name):
    """Every step once, in one of its variants, before a product: its gradient if it has one."""
    transform = "grad" if name in having(*NEEDS["grad"]) else "value"
    product, policy = Step("product", 0, "none"), list(UNIT)[len(name) % 2]
    for option in range(20) if programs_wanted else [len(name)]:
        after = () if STEPS[name].inner else (product,)
        check((Step(name, option, "none", (product,)), *after), transform, policy, ("inside",))


# Programs in which one wrong dtype shows at once.

N = 2048


def normal(seed, *shape, scale=1.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def positive(seed, *shape):
    return np.abs(normal(seed, *shape)) + np.float32(0.5)


def relative(result, wanted):
    """The errors of the leaves in norm, relative to the norm of each."""
    return [e / n for e, n in zip(norms(minus(result, wanted)), norms(wanted), strict=True)]


def in_float64(fun, *args):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, compiled(fun)(*to64(args)))


W, X = normal(0, D, D, scale=D**-0.5), normal(1, N, D)
OFFSET = 1e3 * positive(3, D)
IDS = np.arange(N, dtype=np.int32) % 4


def rms(h):
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-5)


def heads(x, w):
    return jnp.moveaxis((x @ w).reshape(-1, 2, D // 2), 1, 0)


def masked(mask):
    def fun(x, w):
        q = heads(x[:16], w)
        scores = q @ jnp.swapaxes(q, 1, 2)
        # Nothing may be attended to from the first row.
        allowed = jnp.tri(16, k=-1, dtype=bool)
        return jnp.sum(jnp.sin(jax.nn.softmax(mask(scores, allowed), -1) @ q))

    return fun


def accumulated(x, w):
    def body(carry, row):
        total, gram = carry
        h = row[None] @ w
        return (total + jnp.mean(h * h), gram + h.T @ h), None

    start = jnp.zeros((), x.dtype), jnp.zeros((D, D), x.dtype)
    return lax.scan(body, start, x)[0]


def summed_over_steps(x, w, b):
    def body(total, row):
        return total + jnp.sum(jnp.tanh(row[None] @ w + b)), None

    return lax.scan(body, jnp.zeros((), x.dtype), x)[0]


def cross_attended(steps):
    """A narrow value that each turn of a loop uses: its gradient is a sum over the turns."""

    def fun(x, w):
        memory = jnp.tanh(x[:4] @ w)

        def body(total, row):
            return total + jnp.sum(jnp.sin(memory @ row)), None

        return lax.scan(body, jnp.zeros((), x.dtype), x[:steps])[0]

    return fun


def rotary(x, w):
    position = jnp.arange(N, dtype=jnp.int32).astype(x.dtype)[:, None]
    angle = position * jnp.asarray([1.0, 0.3, 0.1, 0.03], x.dtype)
    a, b = jnp.split(x @ w, 2, -1)
    turned = jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1
    )
    return jnp.sum(jnp.sin(turned @ w), 0)


def cross_entropy(x, w, head):
    logits = jnp.tanh(x[:64] @ w) @ head
    labels = jnp.arange(64, dtype=jnp.int32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    return -jnp.mean(chosen)


def conv_bias(image, kernel, bias):
    y = lax.conv_general_dilated(image, kernel, (1, 1), "SAME") + bias[:, None, None]
    return jnp.sum(jax.nn.sigmoid(y))


def layer_norm(x, w, scale, bias):
    h = x @ w
    h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
    return jnp.sum(jax.nn.sigmoid((h * scale + bias) @ w))


ABS, SMALL = np.abs(W), np.abs(X) / 4
# Name: (function, arguments, bound of the values, bound of the gradients), in unit roundoffs.
# Sums of positive numbers: what the rounding of the weights does to all of them alike remains.
DIRECTED = {
    "long sum": (lambda x, w: jnp.sum(x @ w), (np.abs(X), ABS), 0.5, 1),
    "sum over rows": (lambda x, w: jnp.sum(jnp.tanh(x @ w), 0), (SMALL, ABS), 0.5, 2),
    "cumulative sum": (lambda x, w: jnp.cumsum(x @ w, 0), (np.abs(X), ABS), 0.5, 1),
    "overflow": (lambda x, w: jnp.sum(jnp.sin(rms(900 * (x @ w)) @ w), 0), (X, W), 2, 4),
    "overflowing mean": (lambda x, w: jnp.mean((900 * jnp.tanh(x @ w)) ** 2), (X, W), 0.5, 3),
    "small loss": (lambda x, w: 1e-9 * jnp.sum((x[:9] @ w) ** 2), (X, W), 1, None),
    "probabilities": (lambda x, w: jax.nn.softmax(x @ w), (X[:64], normal(2, D, N)), 5, None),
    "log of probabilities": (
        lambda x, w: -jnp.mean(jnp.log(jax.nn.softmax(x @ w) + 1e-9)),
        (X[:64], normal(2, D, N)), 1, None,
    ),
    "entropy": (
        lambda x, w: jnp.sum(jax.scipy.special.entr(jax.nn.softmax(x @ w))),
        (X[:64], normal(2, D, N)), 0.5, 6,
    ),
    "cross entropy": (cross_entropy, (X, W, normal(2, D, N)), 1, 4),
    "accumulators": (accumulated, (np.abs(X), ABS), 0.6, None),
    "gradient over steps": (summed_over_steps, (SMALL, ABS, normal(3, D)), 1, 1),
    "memory": (cross_attended(64), (np.abs(X), ABS / 4), 1, 8),
    "bias": (lambda x, w, b: jnp.sum(jax.nn.sigmoid(x @ w + b)), (X, W, normal(3, D)), 0.5, 1),
    "bias and more": (
        lambda x, w, b: jnp.sum(jax.nn.sigmoid(jnp.tanh(x @ w + b) @ jnp.abs(w))),
        (X, W, normal(3, D)), 0.5, 3,
    ),
    "scalar": (lambda x, w, s: jnp.sum(jnp.tanh(s * (x @ w)) @ w), (SMALL, ABS, positive(3)), 1, 2),
    "embedding": (lambda table, w: jnp.sum(jax.nn.sigmoid(table[IDS] @ w)), (X[:4], W), 0.5, 2),
    "narrow embedding": (
        lambda table, w: jnp.sum(jax.nn.sigmoid((table @ w)[IDS] @ w)), (X[:4], W), 1, 3,
    ),
    "segments": (lambda x, w: jax.ops.segment_sum(x @ w, IDS, 4), (np.abs(X), ABS), 0.5, 1),
    "convolution": (
        conv_bias, (normal(0, 4, 3, 32, 32), normal(1, 2, 3, 3, 3), normal(2, 2)), 0.5, 3,
    ),
    "layer norm": (layer_norm, (X, W, positive(3, D), normal(4, D)), 0.5, 3),
    # These go on into a product: that their results leave the function keeps nothing in f32.
    "softmax weights": (
        lambda x, w, v: jax.nn.softmax(x @ w) @ v,
        (X[:64] / 4, normal(2, D, N), np.ones((N, D), np.float32)), 0.1, None,
    ),
    "exact logits": (
        lambda x, w, v: jax.nn.softmax(0.3 * (x @ w)) @ v,
        (np.round(2 * X[:64]), np.round(2 * normal(2, D, N)), positive(3, N, D)), 1, None,
    ),
    "segments and a product": (
        lambda x, w: jnp.sin(jax.ops.segment_sum(x @ w, IDS, 4) / N) @ w, (np.abs(X), ABS), 1.5, 2,
    ),
    "cumulative sum and a product": (
        lambda x, w: jnp.sin(jnp.cumsum(x @ w, 0) / N) @ w, (np.abs(X), ABS), 1.5, 2,
    ),
    "accumulator and a product": (
        lambda x, w: jnp.sin(accumulated(x, w)[1] / N) @ w, (SMALL, ABS), 2, None,
    ),
    "rotary": (rotary, (X, W), 4, None),
    "offset": (
        lambda x, w, b, y: jnp.mean((x @ w + b - y) ** 2),
        (X, W, OFFSET, OFFSET + normal(4, N, D)), 2, 3,
    ),
    "mask -1e9": (masked(lambda s, m: jnp.where(m, s, -1e9)), (X, W), 2, 6),
    "mask finfo": (
        masked(lambda s, m: jnp.where(m, s, float(jnp.finfo(F32).min))), (X, W), 2, 6,
    ),
    "added mask": (
        masked(lambda s, m: s + (1 - m.astype(s.dtype)) * float(jnp.finfo(F32).min)), (X, W), 2, 6,
    ),
    "zero rows": (
        lambda x, w: (x * 0 @ w) / (jnp.linalg.norm(x * 0 @ w, axis=-1, keepdims=True) + 1e-9) + x,
        (X, W), 1e-3, None,
    ),
    "small change": (lambda x, w: x + 1e-4 * jnp.tanh(x @ w), (X, W), 2e-4, None),
    "moving average": (
        lambda x, w, m: 0.999 * m + 0.001 * jnp.mean(jnp.tanh(x @ w), 0),
        (X, W, normal(3, D)), 2e-3, None,
    ),
    "update": (
        lambda x, w: w - 1e-3 * jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2))(w),
        (X, W), 2e-3, None,
    ),
}  # fmt: skip


@functools.cache
def directed(name):
    """Returns a function, what adds its gradients, arguments, results in float64, and bounds."""
    fun, args, *bounds = DIRECTED[name]
    change = functools.partial(_with_gradients, gradients=bounds[1] is not None)
    return fun, change, args, in_float64(change(fun), *args), bounds


def _with_gradients(fun, gradients):
    if not gradients:
        return lambda *args: (fun(*args), ())

    def total(*args):
        value = fun(*args)
        return jnp.sum(value), value

    def both(*args):
        grads, value = jax.grad(total, tuple(range(len(args))), has_aux=True)(*args)
        return value, grads

    return both


# Of some only the value is of interest.
ORDERS = [(name, "inside") for name in DIRECTED] + [
    (name, "outside") for name, row in DIRECTED.items() if row[-1] is not None
]


@pytest.mark.parametrize(("name", "order"), ORDERS)
def test_one_wrong_dtype_would_show(name, order):
    fun, change, args, wanted, bounds = directed(name)
    for policy in UNIT if programs_wanted else [list(UNIT)[(order == "inside") ^ len(name) % 2]]:
        cast = functools.partial(jaxmp.autocast, policy=policy)
        result = compiled(change(cast(fun)) if order == "inside" else cast(change(fun)))(*args)
        assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {jnp.dtype(F32)}
        for found, right, bound in zip(result, wanted, bounds, strict=True):
            errors = np.array(relative(found, right)) / UNIT[policy]
            # What float32 itself rounds comes on top.
            assert np.all(errors <= (bound or 0) + 3e-6 / UNIT[policy]), (policy, errors)


@pytest.mark.parametrize("name", ["softmax weights", "exact logits"])
def test_a_narrow_softmax_does_show(name):
    """That the bounds above are tight enough to tell."""
    fun, _, args, wanted, bounds = directed(name)
    narrow = dict.fromkeys(["exp", "reduce_sum"], "follow")
    policy = jaxmp.Policy(compute_dtype="bfloat16", primitives=narrow)
    result = compiled(jaxmp.autocast(fun, policy))(*args)
    assert relative(result, wanted[0])[0] > 1.5 * bounds[0] * UNIT["mixed_bfloat16"]


def test_probabilities_sum_to_one():
    fun = jaxmp.autocast(lambda x, w: jax.nn.softmax(x @ w))
    result = fun(X[:8], normal(2, D, N))
    np.testing.assert_allclose(np.sum(np.asarray(result, np.float64), -1), 1, atol=1e-5)


@pytest.mark.parametrize("policy", list(UNIT))
def test_solvers_run_in_float32(policy):
    matrix = (np.eye(D) * 2 + W @ W.T).astype(np.float32)

    def newton(x):
        step = lambda y: (y + x / y) / 2  # noqa: E731
        return lax.while_loop(lambda y: jnp.max(jnp.abs(step(y) - y)) > 1e-5, step, x)

    def power(v):
        """The largest eigenvalue, by products."""

        def improve(state):
            v, _ = state
            new = matrix.astype(v.dtype) @ v
            new = new / jnp.linalg.norm(new)
            return new, jnp.linalg.norm(new - v)

        v, _ = lax.while_loop(lambda s: s[1] > 1e-4, improve, (v, jnp.ones((), v.dtype)))
        return jnp.vdot(v, matrix.astype(v.dtype) @ v)

    def conjugate(b):
        operator = lambda v: matrix.astype(v.dtype) @ v  # noqa: E731
        return jax.scipy.sparse.linalg.cg(operator, b, tol=1e-6)[0]

    for fun in (newton, conjugate):
        wanted = in_float64(fun, np.abs(X[0]))
        assert relative(jaxmp.autocast(fun, policy)(np.abs(X[0])), wanted)[0] < 1e-5
    # The last product is no part of the solver.
    error = relative(jaxmp.autocast(power, policy)(X[0]), in_float64(power, X[0]))
    assert error[0] < 2 * UNIT[policy]


@pytest.mark.parametrize("policy", list(UNIT))
def test_full_precision_region(policy):
    @jaxmp.full_precision()
    def fun(x, w):
        return jnp.sum(jnp.tanh(x @ w) @ w, 0)

    change = lambda f: jax.value_and_grad(lambda *a: jnp.sum(f(*a)), (0, 1))  # noqa: E731
    wanted = in_float64(change(fun), X, W)
    for ours in (change(jaxmp.autocast(fun, policy)), jaxmp.autocast(change(fun), policy)):
        assert max(relative(ours(X, W), wanted)) < 1e-5
