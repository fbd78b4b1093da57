"""Running an update only if it is wanted, in the form that each platform does best."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxmp import _tree


def run_or_skip(
    wanted: jax.Array, run: Callable[..., Any], skip: Callable[..., Any], *args: Any
) -> Any:
    """Returns `run(*args)` if `wanted` else `skip(*args)`, whose results are of the same kind.

    On a CPU this is a conditional: selecting would keep XLA from updating a donated state in
    place (3 times the time and the temporary memory of an Adam update). Elsewhere both are
    computed and selected, which fuses into the update; a conditional would move twice the bytes
    on a TPU, and may wait for the host on a GPU. Outside of jit it is a plain `if`.

    Args:
        wanted: bool[].
        run: traced once.
        skip: cheap; traced twice.
        *args: pytrees of arrays.
    """
    if not _tree.is_traced(wanted):
        return run(*args) if wanted else skip(*args)
    run = jax.jit(run)

    def select(*args: Any) -> Any:
        return _tree.select_tree(wanted, run(*args), skip(*args))

    def conditional(*args: Any) -> Any:
        return lax.cond(wanted, run, skip, *args)

    return lax.platform_dependent(*args, cpu=conditional, default=select)
