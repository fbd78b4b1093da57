"""Operations whose gradients keep and move less than JAX's: picked entries, max pooling, calls."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmp
from tests.autocast_tools import BF16, F32, UNIT, autocast, both, eqns_in, normal, traced

ROWS, COLUMNS = 6, 300  # more columns than a byte counts
LOGITS, WEIGHTS = normal(0, ROWS, 16), normal(1, 16, COLUMNS)
LABELS = np.asarray([0, 255, 299, 7, 128, 7])


def names(fun, *args):
    return [eqn.primitive.name for eqn in traced(fun, *args)]


def along(logits, labels, **options):
    return jnp.take_along_axis(logits, labels[..., None], axis=-1, **options)[..., 0]


def of_rows(logits, labels):
    return jax.vmap(lambda row, label: row[label])(logits, labels)


def of_columns(logits, labels):
    return jnp.take_along_axis(logits.T, labels[None], axis=0)[0]


PICKS = {
    "along": along,
    "clipped": lambda x, i: along(x, i, mode="clip"),
    "promised": lambda x, i: along(x, i, mode="promise_in_bounds"),
    "of rows": of_rows,
    "of columns": of_columns,
}


def exact(pick, scale=1.0):
    """What is picked of a product that is exact in bf16, weighted, so that gradients are too."""
    weights = jnp.arange(1, ROWS + 1, dtype=F32) * scale

    def fun(x, labels):
        return (pick(x @ jnp.eye(COLUMNS), labels) * weights).sum()

    return fun


@pytest.mark.parametrize("name", list(PICKS))
@pytest.mark.parametrize("dtype", [np.uint32, np.int16])
def test_the_gradient_of_picked_entries_is_a_selection(name, dtype):
    x = jnp.round(normal(2, ROWS, COLUMNS) * 8)
    fun, labels = exact(PICKS[name]), LABELS.astype(dtype)
    found = jax.jit(jax.grad(autocast(fun)))(x, labels)
    np.testing.assert_array_equal(found, jax.grad(fun)(x, labels))
    assert found.dtype == F32
    gradient = jax.make_jaxpr(jax.grad(autocast(fun)))(x, labels)
    wide = [e for e in eqns_in(gradient) if e.outvars[0].aval.size == x.size]
    assert not {"scatter-add", "scatter_add"} & {eqn.primitive.name for eqn in wide}


@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_indices_out_of_bounds(mode):
    x = jnp.round(normal(2, ROWS, COLUMNS) * 8)
    labels = np.asarray([-1, -COLUMNS, -COLUMNS - 1, COLUMNS, 2**31 - 1, 0], np.int32)
    pick = lambda x, i: jnp.nan_to_num(along(x, i, mode=mode), nan=-1.0)  # noqa: E731
    fun = exact(pick)
    found = jax.value_and_grad(autocast(fun))(x, labels)
    jax.tree.map(np.testing.assert_array_equal, found, jax.value_and_grad(fun)(x, labels))


def test_a_byte_as_an_index():
    x, labels = jnp.round(normal(2, ROWS, 100)), np.asarray([0, 99, 5, -1, 3, -100], np.int8)
    fun = lambda x, i: along(x @ jnp.eye(100), i).sum()  # noqa: E731
    np.testing.assert_array_equal(jax.grad(autocast(fun))(x, labels), jax.grad(fun)(x, labels))


@both
def test_a_loss_with_labels(compute):
    def loss(x, w, labels):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()

    assert "pick" in names(autocast(loss, compute), LOGITS, WEIGHTS, LABELS)
    found = jax.grad(autocast(loss, compute), (0, 1))(LOGITS, WEIGHTS, LABELS)
    for mine, plain in zip(found, jax.grad(loss, (0, 1))(LOGITS, WEIGHTS, LABELS), strict=True):
        bound = 8 * UNIT[compute] * np.abs(plain).max()
        np.testing.assert_allclose(mine, plain, rtol=0, atol=bound)


def test_picks_under_transformations():
    x, direction = jnp.round(normal(2, ROWS, COLUMNS) * 8), jnp.round(normal(3, ROWS, COLUMNS))
    square = lambda x, i: jnp.square(along(x, i))  # noqa: E731
    fun = exact(square)
    mine, labels = autocast(fun), jnp.asarray(LABELS)
    pushed = [jax.jvp(lambda x: f(x, labels), (x,), (direction,)) for f in (mine, fun)]  # noqa: B023
    jax.tree.map(np.testing.assert_array_equal, *pushed)
    curved = [
        jax.jvp(jax.grad(lambda x: f(x, labels)), (x,), (direction,))  # noqa: B023
        for f in (mine, fun)
    ]
    jax.tree.map(np.testing.assert_array_equal, *curved)
    batches = [jax.vmap(jax.grad(f), (0, None))(jnp.stack([x, 2 * x]), labels) for f in (mine, fun)]
    np.testing.assert_array_equal(*batches)
    batches = [
        jax.vmap(jax.grad(f), (None, 0))(x, jnp.stack([labels, labels[::-1]])) for f in (mine, fun)
    ]
    np.testing.assert_array_equal(*batches)


def test_a_loss_in_chunks_keeps_indices_only():
    """The mask of a chunk would be as many bytes as it has logits."""

    def loss(x, w, labels):
        def chunk(total, part):
            x, labels = part
            return total + along(x @ w, labels).sum(), None

        parts = (x.reshape(3, 2, 16), labels.reshape(3, 2))
        return lax.scan(chunk, jnp.float32(0), parts)[0]

    labels = jnp.asarray(LABELS)
    _, backward = jax.vjp(lambda x, w: autocast(loss)(x, w, labels), LOGITS, WEIGHTS)
    kept = [leaf.shape for leaf in jax.tree.leaves(backward) if hasattr(leaf, "shape")]
    assert (3, 2, COLUMNS) not in kept


def test_around_a_gradient_the_scatter_is_a_selection_too():
    x = jnp.round(normal(2, ROWS, COLUMNS) * 8)
    fun = exact(lambda x, i: jnp.square(along(x, i)))
    whole = autocast(jax.grad(fun))
    np.testing.assert_array_equal(whole(x, LABELS), jax.grad(fun)(x, LABELS))
    wide = [e for e in traced(whole, x, LABELS) if e.outvars[0].aval.size == x.size]
    assert "scatter-add" not in {eqn.primitive.name for eqn in wide}


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, i: (x @ jnp.eye(COLUMNS))[i].sum(),
        lambda x, i: jnp.take_along_axis(x @ jnp.eye(COLUMNS), i[None].repeat(ROWS, 0), 1).sum(),
        lambda x, i: along(x, i).sum(),
    ],
    ids=["whole rows", "several of a row", "of an input"],
)
def test_other_gathers_stay(fun):
    x, labels = normal(2, ROWS, COLUMNS), jnp.asarray(LABELS) % ROWS
    assert "pick" not in names(autocast(fun), x, labels)


def test_of_nothing():
    empty, labels = jnp.zeros((0, 16)), np.zeros(0, np.int32)
    fun = autocast(lambda x, w: along(x @ w, labels).sum())
    assert jax.grad(fun)(empty, WEIGHTS).shape == (0, 16)


def pool(window, strides, padding):
    def fun(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)

    return fun


POOLS = {
    "overlapping": ((2, 9, 8, 3), pool((1, 3, 3, 1), (1, 2, 2, 1), "SAME")),
    "apart": ((2, 9, 8, 3), pool((1, 2, 2, 1), (1, 2, 2, 1), "VALID")),
    "dense": ((5, 7), pool((1, 3), (1, 1), ((0, 0), (2, 1)))),
    "with gaps": ((4, 11), pool((1, 2), (1, 4), "VALID")),
    "uneven": ((2, 6, 6), pool((1, 2, 5), (1, 2, 3), ((0, 0), (1, 0), (3, 0)))),
    "padding alone": ((2, 6), pool((1, 2), (1, 2), ((0, 0), (4, 0)))),
}
each_pool = pytest.mark.parametrize("name", list(POOLS))


def pooled(name):
    """A pooling of a product that is exact, as are its weighted gradients."""
    shape, pooling = POOLS[name]
    weights = jnp.round(normal(4, *jax.eval_shape(pooling, jnp.zeros(shape)).shape) * 4)
    identity = jnp.eye(shape[-1])

    def fun(x):
        largest = pooling(x @ identity)
        return jnp.where(jnp.isfinite(largest), largest * weights, 0).sum()

    return jnp.round(normal(5, *shape) * 3), fun


@each_pool
@pytest.mark.parametrize("change", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_gradient_of_max_pooling(name, change):
    # Of equals the first is the largest, for JAX as well: rounded numbers are full of them.
    x, fun = pooled(name)
    found = change(jax.value_and_grad(autocast(fun)))(x)
    jax.tree.map(np.testing.assert_array_equal, found, jax.value_and_grad(fun)(x))


@pytest.mark.parametrize("name", ["overlapping", "uneven"])
def test_max_pooling_under_transformations(name):
    x, fun = pooled(name)
    mine, direction = autocast(fun), jnp.round(normal(6, *x.shape) * 2)
    value, moved = jax.jvp(mine, (x,), (direction,))
    assert moved == (jax.grad(fun)(x) * direction).sum()
    assert value == fun(x)
    batch = jnp.stack([x, -x, jnp.roll(x, 1)])
    np.testing.assert_array_equal(jax.vmap(jax.grad(mine))(batch), jax.vmap(jax.grad(fun))(batch))
    assert not jax.jvp(jax.grad(mine), (x,), (direction,))[1].any()

    def turn(total, x):
        return total + mine(x), None

    scanned = jax.grad(lambda batch: lax.scan(turn, jnp.float32(0), batch)[0])(batch)
    np.testing.assert_array_equal(scanned, jax.vmap(jax.grad(fun))(batch))


@both
def test_max_pooling_keeps_a_byte_for_each_window(compute):
    pooling = pool((1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    def fun(x, w):
        return pooling(x @ w).mean()

    x, w = normal(5, 2, 8, 8, 16), normal(6, 16, 32)
    _, backward = jax.vjp(jax.jit(autocast(fun, compute)), x, w)
    kept = [leaf for leaf in jax.tree.leaves(backward) if hasattr(leaf, "shape")]
    places = [leaf for leaf in kept if leaf.dtype == np.int8]
    assert [leaf.shape for leaf in places] == [(2, 4, 4, 32)]
    compiled = jax.jit(jax.grad(autocast(fun, compute))).lower(x, w).compile().as_text()
    assert "select-and-scatter" not in compiled


def test_sums_of_overlapping_windows_are_f32():
    """Of 25 windows that share their largest, a sum in bf16 would lose the last ones."""
    x = jnp.zeros((1, 9, 9, 1)).at[0, 4, 4, 0].set(1)
    pooling = pool((1, 5, 5, 1), (1, 1, 1, 1), "VALID")
    weights = jnp.asarray([256.0] + [1.0] * 24, BF16).reshape(1, 5, 5, 1)
    found = jax.grad(autocast(lambda x: (pooling(x * 1) * weights).sum()))(x.astype(BF16))
    assert float(found[0, 4, 4, 0]) == 280


def test_a_tpu_keeps_its_instruction():
    x, fun = pooled("overlapping")
    lowered = jax.jit(jax.grad(autocast(fun))).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert "select_and_scatter" in lowered


def test_large_windows_stay():
    x, pooling = normal(5, 2, 8, 8, 4), pool((1, 7, 7, 1), (1, 1, 1, 1), "VALID")
    fun = autocast(lambda x: pooling(x @ jnp.eye(4)).sum())
    assert "pool" not in names(jax.grad(fun), x)


@jax.jit
def halve(x):
    return jnp.where(x > 0, x, x / 2)


def calls(fun, *args):
    return [e.params["name"] for e in traced(autocast(fun), *args) if e.primitive.name == "jit"]


def test_a_small_call_is_computed_in_its_place():
    x, w = normal(7, 4, 16), normal(8, 16, 16)
    assert "halve" not in calls(lambda x, w: halve(x @ w) @ w, x, w)


@pytest.mark.parametrize(
    "options",
    [
        {"donate_argnums": 0},
        {"out_shardings": jax.sharding.SingleDeviceSharding(jax.devices()[0])},
    ],
    ids=["donated", "placed"],
)
def test_calls_that_say_more_stay(options):
    x, w = normal(7, 4, 16), normal(8, 16, 16)
    inner = jax.jit(halve.__wrapped__, **options)
    assert "halve" in calls(lambda x, w: inner(x @ w) @ w, x, w)


def test_calls_of_the_same_jaxpr_stay():
    """JAX differentiates and lowers it once for all of them."""
    x, w = normal(7, 4, 16), normal(8, 16, 16)
    found = calls(lambda x, w: halve(halve(x @ w) @ w) @ w, x, w)
    assert found.count("halve") == 2


def test_a_scope_around_a_call_holds_inside():
    x, w = normal(7, 4, 16), normal(8, 16, 16)

    @jax.jit
    def head(x, w):
        return x @ w

    def fun(x, w):
        with jax.named_scope("head"):
            return head(x, w)

    policy = jaxmp.Policy(rules=[("head", "float32")])
    np.testing.assert_array_equal(jaxmp.autocast(fun, policy)(x, w), x @ w)
    (product,) = jaxmp.audit(autocast(fun), x, w, target=None).products
    assert product.path == "head"
