"""Every optimizer and wrapper of optax inside of `mixed_precision`, with gradients of every kind."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jaxmp
from jaxmp import optim

F32 = jnp.float32
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
    "scale": {"step_size": 0.1},
    "scale_by_backtracking_linesearch": {"max_backtracking_steps": 5},
    "scale_by_learning_rate": {"learning_rate": 0.1},
    "scale_by_schedule": {"step_size_fn": optax.linear_schedule(0.1, 0.0, 5)},
    "scale_by_zoom_linesearch": {"max_linesearch_steps": 5},
    "schedule_free": {"base_optimizer": ADAM(), "learning_rate": 1e-2},
    "selective_transform": {"optimizer": ADAM(), "freeze_mask": {"w": True, "b": False}},
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


def stepping(tx, traces=None):
    def step(params, state, grads):
        if traces is not None:
            traces.append(1)
        extra = {"value": value_fn(params), "grad": grads, "value_fn": value_fn, "loss": F32(1.0)}
        updates, state = tx.update(grads, state, params, **extra)
        return optim.apply_updates(params, updates), state, updates

    return step


def run(tx, params, mode):
    """Returns the parameters, the state and the updates after every gradient."""
    traces = []
    step, state = stepping(tx, traces), tx.init(params)
    if mode == "scan":
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients())

        def body(carry, grads):
            params, state, updates = step(*carry, grads)
            return (params, state), (params, state, updates)

        _, histories = jax.jit(lambda c: jax.lax.scan(body, c, stacked))((params, state))
        history = [jax.tree.map(lambda leaf, i=i: leaf[i], histories) for i in range(len(KINDS))]
    else:
        step, history = jax.jit(step) if mode == "jit" else step, []
        for grads in gradients():
            history.append(step(params, state, grads))
            params, state, _ = history[-1]
        if mode == "jit":
            assert len(traces) == 1
            assert step._cache_size() == 1
    return dict(zip(KINDS, history, strict=True))


def kinds_of(tree):
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree)


def check(tx, dtype, mode):
    params = parameters(dtype)
    state, first = tx.init(params), params
    for kind, (after, new_state, updates) in run(tx, params, mode).items():
        assert kinds_of(new_state) == kinds_of(state), kind
        assert kinds_of(after) == kinds_of(first), kind
        assert bool(jaxmp.all_finite((updates, after))), kind
        assert bool(jaxmp.all_finite(optim.full_weights(new_state, after))), kind
        if kind in ("huge", "inf", "nan"):
            assert not bool(new_state.finite), kind
            assert all(np.all(np.asarray(u) == 0) for u in jax.tree.leaves(updates)), kind
        if kind in ("plain", "again"):
            assert bool(new_state.finite), kind
        yield kind, optim.full_weights(new_state, after)


@pytest.mark.parametrize("name", sorted(FACTORIES))
def test_of_optax(name):
    tx = jaxmp.mixed_precision(made(name), "mixed_float16")
    for dtype in DTYPES.values():
        for mode in ("jit", "scan", "eager"):
            list(check(tx, dtype, mode))
