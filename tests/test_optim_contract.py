"""Every optimizer and wrapper of optax in `mixed_precision`, with gradients of every kind."""

import functools
import inspect
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jaxmp
from jaxmp import optim

F32 = jnp.float32
everything_wanted = bool(os.environ.get("JAXMP_CONTRACT"))
DTYPES = {"f16": jnp.float16, "bf16": jnp.bfloat16, "f32": F32}
ADAM = functools.partial(optax.adam, 1e-2)

# What optax wants of those that do not run with a learning rate alone.
ARGUMENTS = {
    "adaptive_grad_clip": {"clipping": 0.1},
    "add_noise": {"eta": 0.1, "gamma": 0.5, "seed": 0},
    "apply_if_finite": {"inner": ADAM(), "max_consecutive_errors": 2},
    "clip": {"max_delta": 0.1},
    "clip_by_block_rms": {"threshold": 0.1},
    "clip_by_global_norm": {"max_norm": 0.1},
    "conditionally_mask": {"inner": ADAM(), "should_transform_fn": lambda step: step < 3},
    "conditionally_transform": {"inner": ADAM(), "should_transform_fn": lambda step: step < 3},
    "differentially_private_aggregate": {"l2_norm_clip": 1.0, "noise_multiplier": 0.1, "key": 0},
    "dpsgd": {"learning_rate": 0.1, "l2_norm_clip": 1.0, "noise_multiplier": 0.1, "seed": 0},
    "ema": {"decay": 0.9},
    "flatten": {"inner": ADAM()},
    "freeze": {"mask": {"w": True, "b": False}},
    "inject_hyperparams": {"inner_factory": optax.adam},
    "inject_stateful_hyperparams": {"inner_factory": optax.adam},
    "keep_params_nonnegative": {},
    "masked": {"inner": ADAM(), "mask": {"w": True, "b": False}},
    "mechanize": {"base_optimizer": ADAM()},
    "noisy_sgd": {"learning_rate": 0.1, "seed": 0},
    "sam": {"optimizer": ADAM(), "adv_optimizer": optax.sgd(0.1)},
    "scale": {"step_size": 0.1},
    "scale_by_backtracking_linesearch": {"max_backtracking_steps": 5},
    "scale_by_learning_rate": {"learning_rate": 0.1},
    "scale_by_schedule": {"step_size_fn": optax.linear_schedule(0.1, 0.0, 5)},
    "scale_by_zoom_linesearch": {"max_linesearch_steps": 5},
    "schedule_free": {"base_optimizer": ADAM(), "learning_rate": 1e-2},
    "selective_transform": {"optimizer": ADAM(), "freeze_mask": {"w": True, "b": False}},
    "snapshot": {"measure_name": "norm", "measure": optax.tree.norm},
    "split_real_and_imaginary": {"inner": ADAM()},
    "stateless": {"f": lambda updates, params: updates},
    "stateless_with_tree_map": {"f": lambda update, param: -0.1 * update},
    "trace": {"decay": 0.9},
    "with_extra_args_support": {"tx": ADAM()},
}  # fmt: skip
PARTS = {"transforms": {"a": ADAM(), "b": optax.sgd(0.1)}, "param_labels": {"w": "a", "b": "b"}}
ARGUMENTS |= {"partition": PARTS, "multi_transform": PARTS}
POSITIONAL = {
    "chain": (optax.clip_by_global_norm(1.0), ADAM()),
    "named_chain": (("clip", optax.clip_by_global_norm(1.0)), ("adam", ADAM())),
}


def factories():
    """Every public function of optax that returns a transform."""
    found = {}
    for module in (optax, optax.contrib):
        for name in sorted(dir(module)):
            fun = getattr(module, name)
            if name.startswith("_") or not inspect.isfunction(fun):
                continue
            if "GradientTransformation" in str(inspect.signature(fun).return_annotation):
                found.setdefault(name, fun)
    return found


FACTORIES = factories()


def made(name):
    fun = FACTORIES[name]
    if name in POSITIONAL:
        return fun(*POSITIONAL[name])
    if name in ARGUMENTS:
        tx = fun(**ARGUMENTS[name])
        return tx(learning_rate=1e-2) if name.startswith("inject_") else tx
    return fun(1e-2) if "learning_rate" in inspect.signature(fun).parameters else fun()


PER_EXAMPLE = {"dpsgd", "differentially_private_aggregate"}


KINDS = {
    "plain": lambda g: g, "zero": jnp.zeros_like, "tiny": lambda g: g * 1e-36,
    "huge": lambda g: jnp.sign(g) * 3e38, "inf": lambda g: g.at[..., 0].set(jnp.inf),
    "nan": lambda g: g.at[..., 0].set(jnp.nan), "again": lambda g: g,
}  # fmt: skip


def parameters(dtype):
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(np.abs(rng.standard_normal((4, 8))) + 0.5, dtype),
        "b": jnp.full(8, 0.5, dtype),
    }


def gradients():
    rng = np.random.default_rng(1)
    plain = {"w": jnp.asarray(rng.standard_normal((4, 8)), F32), "b": jnp.full(8, 0.25)}
    return [jax.tree.map(kind, plain) for kind in KINDS.values()]


def value_fn(params):
    return sum(jnp.sum(leaf.astype(F32) ** 2) for leaf in jax.tree.leaves(params))


LINE_SEARCHES = ("lbfgs", "scale_by_backtracking_linesearch", "scale_by_zoom_linesearch")
MORE = {name: {"value_fn": value_fn} for name in LINE_SEARCHES} | {
    "sam": None,  # takes no extra arguments
    "momo": {"loss": F32(1.0)}, "momo_adam": {"loss": F32(1.0)}, "sophia": {"obj_fn": value_fn},
}  # fmt: skip


def stepping(tx, traces, more):
    def step(params, state, grads):
        traces.append(1)
        extra = {} if more is None else {"value": value_fn(params), "grad": grads, **more}
        updates, state = tx.update(grads, state, params, **extra)
        return optim.apply_updates(params, updates), state, updates

    return step


def run(tx, params, mode, grads, more):
    """Returns the parameters, the state and the updates after every gradient."""
    traces = []
    step, state = stepping(tx, traces, more), tx.init(params)
    if mode == "scan":
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)

        def body(carry, grads):
            params, state, updates = step(*carry, grads)
            return (params, state), (params, state, updates)

        _, histories = jax.jit(lambda c: jax.lax.scan(body, c, stacked))((params, state))
        history = [jax.tree.map(lambda leaf, i=i: leaf[i], histories) for i in range(len(KINDS))]
    else:
        step, history = jax.jit(step) if mode == "jit" else step, []
        for grad in grads:
            history.append(step(params, state, grad))
            params, state, _ = history[-1]
        if mode == "jit":
            assert len(traces) == 1
            assert step._cache_size() == 1
    return dict(zip(KINDS, history, strict=True))


def kinds_of(tree):
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree)


def case(name, dtype):
    """Returns a transform, parameters and gradients."""
    params, grads = parameters(dtype), gradients()
    if name in PER_EXAMPLE:
        grads = [jax.tree.map(lambda g: jnp.stack([g, g, g]), grad) for grad in grads]
    if name == "scale_by_muon":  # takes one array, or a tree of what its axes are
        params, grads = params["w"], [grad["w"] for grad in grads]
    return made(name), params, grads


@functools.cache
def moves(name):
    """Which float32 parameters the bare transform moves by its first gradient."""
    tx, params, grads = case(name, F32)
    with jax.numpy_dtype_promotion("standard"):
        step = stepping(optax.with_extra_args_support(tx), [], MORE.get(name, {}))
        after, _, _ = jax.jit(step)(params, tx.init(params), grads[0])
    return jax.tree.map(lambda a, b: bool(jnp.any(a != b)), params, after)


def check(name, dtype, mode):
    tx, params, grads = case(name, dtype)
    tx = jaxmp.mixed_precision(tx, "mixed_float16")
    state, first = tx.init(params), params
    before = optim.full_weights(state, params)
    for kind, (after, new, updates) in run(tx, params, mode, grads, MORE.get(name, {})).items():
        assert kinds_of(new) == kinds_of(state), kind
        assert kinds_of(after) == kinds_of(first), kind
        assert bool(jaxmp.all_finite((updates, after))), kind
        full = optim.full_weights(new, after)
        assert bool(jaxmp.all_finite(full)), kind
        if kind in ("huge", "inf", "nan"):
            assert not bool(new.finite), kind
            assert all(np.all(np.asarray(u) == 0) for u in jax.tree.leaves(updates)), kind
        if kind in ("plain", "again"):
            assert bool(new.finite), kind
        if kind == "plain":
            moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), before, full)
            assert moved == moves(name)


MODES = [(dtype, mode) for mode in ("jit", "scan", "eager") for dtype in DTYPES.values()]


def modes(place):
    """All but most of the slow ones, or one in turn."""
    if everything_wanted:
        return [pair for i, pair in enumerate(MODES) if pair[1] != "eager" or i % 3 == place % 3]
    return [MODES[place % len(MODES)]]


def test_a_state_that_grows_cannot_go_inside():
    """A measure has no value before the first step; a scan cannot carry it, wrapped or not."""
    measure = optax.measure_with_ema(optax.tree.norm, 0.9)
    tx = jaxmp.mixed_precision(optax.monitor({"norm": measure}), "float32")
    params = parameters(F32)
    with pytest.raises(ValueError, match="a state of another structure than it was given"):
        tx.update(params, tx.init(params), params)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(FACTORIES.keys() - {"lookahead", "measure_with_ema"}))
def test_of_optax(name):
    for dtype, mode in modes(sorted(FACTORIES).index(name)):
        check(name, dtype, mode)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_lookahead_goes_around_the_wrapper(dtype):
    """Its parameters are two trees, so it cannot go inside."""
    inner = jaxmp.mixed_precision(optax.adam(1e-2), "mixed_float16")
    tx = optax.lookahead(inner, sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(parameters(DTYPES[dtype]))
    state, update = tx.init(params), jax.jit(tx.update)
    with jax.numpy_dtype_promotion("standard"):
        for grads in gradients():
            updates, new_state = update(grads, state, params)
            params = optim.apply_updates(params, updates)
            assert kinds_of(new_state) == kinds_of(state)
            assert bool(jaxmp.all_finite(params))
            state = new_state
    # Of seven gradients three are infinite, NaN, or too large to be squared.
    assert int(optim.get_mixed_precision_state(state).skipped_steps) == 3
