"""Which recipes the hardware has matmuls for."""

import dataclasses
import warnings
from typing import Any

import jax

from jaxmp._devices import compute_capability
from jaxmp._dtypes import dtype_name
from jaxmp.fp8._recipes import get_recipe
from jaxmp.policy import Policy, get_policy


def runnable(policy: Policy | str, device: Any = None) -> Policy:
    """Returns a policy, and its rules, without the recipes that a device has no matmuls for.

    CPUs and TPUs run all of them, by way of bf16 where need be. An NVIDIA GPU that is too old would
    too, and slower than without.

    Args:
        policy: any, or its name.
        device: a JAX device; the first of the default ones if left out.

    Raises:
        ValueError: if such a recipe has `strict=True`.

    Warns:
        UserWarning: of each such recipe.

    Example:
        >>> runnable("mixed_float8", jax.devices("cpu")[0]).recipe
        'current'
    """
    policy = get_policy(policy)
    texts = policy.recipes()
    if not texts:
        return policy
    device = jax.local_devices()[0] if device is None else device
    lacking = {text for text in texts if _is_lacking(text, policy, device)}
    if not lacking:
        return policy
    rules = tuple((pattern, _without(rule, lacking)) for pattern, rule in policy.rules)
    return dataclasses.replace(_without(policy, lacking), rules=rules)


def _without(policy: Policy, lacking: set[str]) -> Policy:
    return dataclasses.replace(policy, recipe=None) if policy.recipe in lacking else policy


def _is_lacking(text: str, policy: Policy, device: Any) -> bool:
    recipe = get_recipe(text)
    have = compute_capability(device)
    if have is None or have >= recipe.compute_capability:
        return False
    found, needed = (".".join(map(str, pair)) for pair in (have, recipe.compute_capability))
    reason = (
        f"Recipe {text!r}: {device.device_kind} (compute capability {found} < {needed}) has no "
        "such matmuls"
    )
    if recipe.strict:
        raise ValueError(f"{reason}. Use another recipe, or leave out strict=True.")
    warnings.warn(
        f"{reason}, so they are computed in {dtype_name(policy.compute_dtype)}. strict=True in the "
        "recipe makes this an error.",
        stacklevel=5,
    )
    return True
