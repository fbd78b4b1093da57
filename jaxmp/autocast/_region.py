"""Where in a program an equation stands, and which policy holds there."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from jaxmp._dtypes import FLOAT32
from jaxmp._jaxpr import (
    AUTOCAST_SCOPE,
    FULL_PRECISION_SCOPE,
    POLICY_SCOPE,
    dtype_of_var,
    inner_jaxprs,
    module_path,
)
from jaxmp.policy import Policy, get_policy


def full_precision(fun: Callable[..., Any] | None = None) -> Any:
    """Within an autocast function, computes in f32 what is inside, and its gradient too.

    A context manager, and a decorator of functions. It marks the operations that are traced inside,
    so it means nothing outside of `jaxmp.autocast`, and nothing is left of it afterwards.

    Example:
        >>> import jax.numpy as jnp, jaxmp
        >>> def router(x, w):
        ...     with jaxmp.full_precision():
        ...         return x @ w
        >>> x, w = jnp.full((1, 2), 1.001), jnp.ones((2, 2))
        >>> jaxmp.autocast(router, "mixed_bfloat16")(x, w).tolist() == (x @ w).tolist()
        True
    """
    return _in_full_precision() if fun is None else _in_full_precision()(fun)


@contextlib.contextmanager
def _in_full_precision() -> Iterator[None]:
    with jax.named_scope(FULL_PRECISION_SCOPE):
        yield


def policy_scope(policy: Policy) -> Any:
    """Within an autocast function, computes what is traced inside under another policy.

    Args:
        policy: without rules.
    """
    return jax.named_scope(f"{POLICY_SCOPE}[{policy}]")


def autocast_scope() -> Any:
    """Marks what an autocast function computes, for an autocast around it."""
    return jax.named_scope(AUTOCAST_SCOPE)


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of a program under one policy.

    Attributes:
        policy: that of the whole function, with its rules, or of the innermost `policy_scope`.
        stack: the name stack of the equations around; empty if no rule looks at it.
        is_written: whether another autocast has been here: dtypes stay as they are.
        is_full: whether all is computed in f32.
    """

    policy: Policy
    stack: str = ""
    is_written: bool = False
    is_full: bool = False

    def enter(self, eqn: JaxprEqn) -> "Region":
        """Returns the region of an equation that stands in this one."""
        return _enter(self, eqn.source_info.name_stack)

    @property
    def path(self) -> str:
        """The names that modules and users gave to where this is."""
        return module_path(self.stack)

    def in_full(self) -> "Region":
        """Returns this region, in f32."""
        return dataclasses.replace(self, is_full=True)

    @functools.cached_property
    def own_policy(self) -> Policy:
        """The policy of what is computed here."""
        if not self.policy.rules:
            return self.policy
        return self.policy.for_path(self.path)


_POLICY = re.compile(rf"{re.escape(POLICY_SCOPE)}\[([^\]]*)\]")


@functools.lru_cache(maxsize=65536)
def _enter(region: Region, name_stack: Any) -> Region:
    names = str(name_stack)
    is_written = region.is_written or AUTOCAST_SCOPE in names
    policies = _POLICY.findall(names)
    if policies:
        region, names = Region(get_policy(policies[-1])), names.rpartition(POLICY_SCOPE)[2]
    is_full = region.is_full or FULL_PRECISION_SCOPE in names
    stack = f"{region.stack}/{names}" if region.policy.rules and names else region.stack
    entered = Region(region.policy, stack, is_written, is_full)
    if not entered.is_full and entered.own_policy.compute_dtype == FLOAT32:
        return dataclasses.replace(entered, is_full=True)
    return entered


_TRANSPOSE = re.compile(r"transpose\(")


@functools.lru_cache(maxsize=65536)
def _depth(name_stack: Any) -> int:
    return len(_TRANSPOSE.findall(str(name_stack)))


def backward_depth(eqn: JaxprEqn) -> int:
    """Returns how many backward passes an equation is in, counted from the jaxpr it stands in."""
    return _depth(eqn.source_info.name_stack)


def inside(eqn: JaxprEqn, region: Region) -> Region:
    """Returns the region of the jaxprs inside an equation.

    A loop that ends when a float says so is a solver, and would not end if its steps were rounded.
    """
    entered = region.enter(eqn)
    return entered.in_full() if _is_solver(eqn) else entered


def _is_solver(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "while":
        return False
    condition, _ = inner_jaxprs(eqn)
    read = {atom for eqn in condition.jaxpr.eqns for atom in eqn.invars if isinstance(atom, Var)}
    return any(
        var in read and jnp.issubdtype(dtype_of_var(var), jnp.floating)
        for var in condition.jaxpr.invars
    )
