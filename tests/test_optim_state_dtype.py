"""Optimizer state in fewer bytes (case B13), and what everything takes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp import checkpoint, optim
from jaxmp.optim._blocks import decode, encode
from tests.test_mixed_precision import assert_same_bits

BF16, F32 = jnp.bfloat16, jnp.float32
EIGHT_BITS = {"mu": "block8", "nu": "block8_square"}
SHAPES = [(), (1,), (255,), (256,), (1000,), (3, 3, 64, 128), (7, 300), (2, 0), (5, 1)]


def spread(shape, *, is_square):
    """Numbers of sizes over the range that a block has."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(shape) * np.exp2(rng.uniform(-6, 0, shape)) * 1e-5
    return jnp.asarray(values**2 if is_square else values, F32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_square", [False, True], ids=["signed", "square"])
def test_blocks_keep_numbers_to_their_three_bits(shape, is_square):
    array = spread(shape, is_square=is_square)
    bits = jax.random.bits(jax.random.key(0), shape)
    stored = jax.jit(encode, static_argnames="is_square")(array, bits, is_square=is_square)
    assert stored.codes.shape == shape
    assert stored.codes.dtype.itemsize == 1
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in stored)
    assert size <= array.size + 4 * max(1, array.size / 256 + np.prod(shape[:-1] or (1,)))
    found = decode(stored, is_square=is_square)
    assert (found.shape, found.dtype) == (shape, F32)
    # One step of three bits, and twice that for a square; below, steps of the smallest number.
    largest = float(jnp.max(jnp.abs(array), initial=0))
    floor = largest * (2.0**-17) ** (1 + is_square)
    error = np.abs(found - array)
    assert np.all(error <= (2 if is_square else 1) * 2.0**-3 * 1.07 * np.abs(array) + floor)
    assert np.all(found * array >= 0)
    if is_square:
        assert np.all((np.asarray(found) > 0) == (np.asarray(array) > 0))


def test_blocks_are_unbiased():
    array = spread((512,), is_square=False)
    keys = jax.random.split(jax.random.key(0), 2000)

    def once(key):
        return decode(encode(array, jax.random.bits(key, array.shape), is_square=False),
                      is_square=False)  # fmt: skip

    mean = np.asarray(jax.jit(jax.vmap(once))(keys), np.float64).mean(0)
    step = np.maximum(np.abs(array) * 2.0**-3, float(jnp.max(jnp.abs(array))) * 2.0**-17)
    assert np.all(np.abs(mean - array) <= 6 * step / 2 / np.sqrt(2000))


@pytest.mark.parametrize("stored", [BF16, "block8_square", F32], ids=str)
def test_a_second_moment_decays(stored):
    """Case B13: a gradient of 30, then 1000 of 0."""
    params = {"w": jnp.ones(4096, BF16)}
    tx = optim.state_dtype(optax.adam(1e-3), {"nu": stored})
    update, state = jax.jit(tx.update), tx.init(params)

    def nu(state):
        moment = state.inner_state[0].nu["w"]
        return decode(moment, is_square=True) if isinstance(moment, optim.Blocks) else moment

    _, state = update({"w": jnp.full(4096, 30.0)}, state, params)
    first = float(nu(state).astype(F32).mean())
    np.testing.assert_allclose(first, 0.9, rtol=0.01)

    def body(_, state):
        return tx.update({"w": jnp.zeros(4096)}, state, params)[1]

    state = jax.jit(lambda s: jax.lax.fori_loop(0, 1000, body, s))(state)
    last = float(nu(state).astype(F32).mean())
    np.testing.assert_allclose(last / first, 0.999**1000, rtol=0.05)
    assert state.inner_state[0].mu["w"].dtype == F32


def test_bytes_of_eight_bit_moments():
    params = {
        "w": jax.ShapeDtypeStruct((1024, 1024), BF16),
        "b": jax.ShapeDtypeStruct((1024,), BF16),
    }
    tx = optim.state_dtype(optax.adam(1e-3), EIGHT_BITS)
    account = optim.memory_account(params, jax.eval_shape(tx.init, params))
    moments = account.bytes["mu"] + account.bytes["nu"]
    assert 2.0 < moments / account.parameters <= 2.1
    assert account.bytes["params"] == 2 * account.parameters


def quadratic(tx, steps=400):
    """A badly conditioned problem with noisy gradients; returns the distance that is left."""
    rng = np.random.default_rng(0)
    scale = jnp.asarray(np.exp2(rng.uniform(-4, 4, (64, 256))), F32)
    goal = jnp.asarray(rng.standard_normal((64, 256)), F32)

    def step(carry, key):
        params, state = carry
        noise = jax.random.normal(key, goal.shape) * 0.1
        updates, state = tx.update({"w": scale * (params["w"] - goal + noise)}, state, params)
        return (optim.apply_updates(params, updates), state), None

    params = {"w": jnp.zeros_like(goal)}
    keys = jax.random.split(jax.random.key(1), steps)
    (params, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, keys))((params, tx.init(params)))
    return float(jnp.sqrt(jnp.mean((params["w"] - goal) ** 2)))


def test_eight_bit_adam_converges_like_adam():
    with jax.numpy_dtype_promotion("standard"):
        plain = quadratic(optax.adam(1e-2))
    assert quadratic(optim.state_dtype(optax.adam(1e-2), EIGHT_BITS)) <= 1.1 * plain


def test_where_nothing_is_said_state_is_f32():
    tx = optim.state_dtype(optax.adam(1e-3), {"mu": "bf16", "nu|mu": F32})
    adam = tx.init({"w": jnp.ones(2, BF16)}).inner_state[0]
    assert adam.nu["w"].dtype == adam.mu["w"].dtype == F32
    bare = optim.state_dtype(optax.adam(1e-3), {})
    assert bare.init({"w": jnp.ones(2, BF16)}).inner_state[0].mu["w"].dtype == F32


@pytest.mark.parametrize("wrap", ["alone", "mixed_precision", "kahan", "accumulate"])
def test_in_other_wrappers_and_in_a_checkpoint(wrap, tmp_path):
    own = optim.state_dtype(optax.adamw(1e-3), EIGHT_BITS)
    tx = {
        "alone": lambda: own,
        "mixed_precision": lambda: jaxmp.mixed_precision(own, "mixed_float16"),
        "kahan": lambda: optim.kahan(own),
        "accumulate": lambda: optim.accumulate(own, 2),
    }[wrap]()
    params = {"w": jnp.ones((4, 300), BF16 if wrap in ("mixed_precision", "kahan") else F32)}
    state, traces = tx.init(params), []

    @jax.jit
    def step(params, state, grads):
        traces.append(1)
        updates, state = tx.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    for seed in range(4):
        grads = {"w": jax.random.normal(jax.random.key(seed), (4, 300))}
        params, state = step(params, state, grads)
    assert len(traces) == 1
    assert bool(jaxmp.all_finite(params))
    checkpoint.save(tmp_path, (params, state), step=0)
    again = checkpoint.restore(tmp_path, (params, tx.init(params)))
    assert_same_bits(again, (params, state))
    assert_same_bits(step(*again, grads), step(params, state, grads))


def test_a_skipped_step_keeps_every_bit_of_blocks_and_key():
    tx = jaxmp.mixed_precision(optim.state_dtype(optax.adam(0.1), EIGHT_BITS), "mixed_float16")
    params = {"w": jnp.ones(300)}
    update = jax.jit(tx.update)
    _, state = update({"w": jnp.ones(300)}, tx.init(params), params)
    _, after = update({"w": jnp.full(300, jnp.inf)}, state, params)
    assert_same_bits(after.inner_state, state.inner_state)


def test_bad_input():
    with pytest.raises(ValueError, match="must be one of float32, bfloat16, float16, block8"):
        optim.state_dtype(optax.adam(0.1), {"mu": "int8"})
    with pytest.raises(ValueError, match="float64 would gain nothing"):
        optim.state_dtype(optax.adam(0.1), {"mu": "float64"})
    with pytest.raises(ValueError, match=r"'trace': no float.*\n  0/mu/w\n  0/nu/w"):
        optim.state_dtype(optax.adam(0.1), {"trace": BF16}).init({"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="give a seed or a PRNG key"):
        optim.state_dtype(optax.adam(0.1), {}, key=None)


def test_the_account_prints_as_a_table():
    params = {"w": jnp.ones((64, 64), BF16), "head": {"w": jnp.ones(64)}}
    tx = jaxmp.mixed_precision(optax.adam(1e-3), "mixed_bfloat16")
    account = optim.memory_account(params, tx.init(params))
    assert account.parameters == 64 * 64 + 64
    assert account.bytes["masters"] == 4 * 64 * 64
    assert account.bytes["mu"] == account.bytes["nu"] == 4 * account.parameters
    assert account.bytes["params"] == 2 * 64 * 64 + 4 * 64
    text = str(account)
    assert "4,160 parameters" in text
    assert "masters" in text
    assert optim.memory_account({}, ()).bytes_per_parameter == 0
