"""Relative error of a GPT's gradients, for each weight, against float64."""

import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.autocast import _gpt
from benchmarks.autocast._recipes import AUTOCAST, AUTOCAST_WIDE, BASE, BY_HAND
from jaxmp._table import render

RECIPES = (BASE, BY_HAND, AUTOCAST, AUTOCAST_WIDE)


def run(layers: Sequence[int], seeds: int, recipe: Sequence[str] | None) -> None:
    """Prints a table for each number of layers."""
    for count in layers:
        shape = _gpt.Shape(128, 4, count, length=128, vocabulary=256)
        errors = _measure(shape, recipe or RECIPES, seeds)
        title = f"{count} layers, mean of {seeds} seeds, JAX {jax.__version__}"
        header = ("recipe", "median", "of by hand", "worst", "of by hand", "worst weight")
        rows = [_row(name, errors) for name in errors]
        print(render(title, header, rows, right=range(1, 5)), "\n", flush=True)


def _measure(shape: _gpt.Shape, recipes: Sequence[str], seeds: int) -> dict[str, dict[str, float]]:
    """Returns the error of each weight's gradient under each recipe."""
    grads = {name: jax.jit(_gpt.gradient(shape, name)) for name in recipes}
    sums: dict[str, dict[str, float]] = {name: {} for name in recipes}
    for seed in range(seeds):
        params = _gpt.init(jax.random.key(seed), shape)
        tokens = _gpt.tokens(shape, seed)
        exact = _exact(shape, params, tokens)
        for name, grad in grads.items():
            for path, error in _errors(grad(params, tokens)[1], exact).items():
                sums[name][path] = sums[name].get(path, 0.0) + error / seeds
    return sums


def _exact(shape: _gpt.Shape, params: Any, tokens: jax.Array) -> Any:
    """Returns the gradients of the model without casts in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), params)
        grads = jax.jit(_gpt.gradient(shape, BASE))(wide, tokens)[1]
        assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(grads))
        return jax.tree.map(np.asarray, grads)


def _errors(grads: Any, exact: Any) -> dict[str, float]:
    """Returns the norm of the difference over that of the exact gradient, by the weight's path."""
    named = jax.tree_util.tree_leaves_with_path(exact)
    pairs = zip(named, jax.tree.leaves(grads), strict=True)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): _relative(leaf, reference)
        for (path, reference), leaf in pairs
    }


def _relative(leaf: jax.Array, reference: np.ndarray) -> float:
    difference = np.asarray(leaf, np.float64) - reference
    return float(np.linalg.norm(difference) / np.linalg.norm(reference))


def _row(name: str, errors: dict[str, dict[str, float]]) -> list[str]:
    own, base = errors[name], errors.get(BY_HAND)
    worst = max(own, key=own.__getitem__)
    row = [name, f"{statistics.median(own.values()):.2e}", "–", f"{own[worst]:.2e}", "–", worst]
    if base:
        row[2] = f"{statistics.median(own.values()) / statistics.median(base.values()):.3f}"
        row[4] = f"{own[worst] / max(base.values()):.3f}"
    return row
