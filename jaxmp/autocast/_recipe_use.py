"""Whether the recipe of a policy takes any matmul of a program."""

import warnings

from jax.extend.core import JaxprEqn

from jaxmp._dtypes import dtype_name
from jaxmp._jaxpr import aval_of
from jaxmp._product import DOT_GENERAL
from jaxmp.fp8 import get_recipe
from jaxmp.policy import Policy


class RecipeUse:
    """Sees the matmuls of layers that recipes take, and pass over for their sizes."""

    def __init__(self) -> None:
        self._taken = 0
        self._passed_over: list[tuple[Policy, tuple[int, int, int]]] = []

    def see(self, eqn: JaxprEqn, policy: Policy) -> None:
        """Notes an equation, if it is a matmul without batch axes that a recipe is for."""
        recipe = get_recipe(policy.recipe)
        if recipe is None or eqn.primitive is not DOT_GENERAL:
            return
        shapes = [aval_of(atom).shape for atom in eqn.invars]
        numbers = eqn.params["dimension_numbers"]
        if recipe.takes(*shapes, numbers, ("x", "w")):
            self._taken += 1
        elif not numbers[1][0]:
            self._passed_over.append((policy, recipe.sizes(*shapes, numbers)))

    def warn_of_none(self) -> None:
        """Warns if there are matmuls for recipes, and none is taken."""
        if self._taken or not self._passed_over:
            return
        policy, sizes = self._passed_over[0]
        recipe = get_recipe(policy.recipe)
        least = f" and at least {recipe.min_size}" if recipe.min_size > recipe.multiple else ""
        warnings.warn(
            f"The recipe {policy.recipe!r} takes none of {len(self._passed_over)} matmuls: rows, "
            f"columns and what is contracted must be multiples of {recipe.multiple}{least}, but "
            f"are {sizes[1]}, {sizes[2]} and {sizes[0]} in the first. They are computed in "
            f"{dtype_name(policy.compute_dtype)}. Choose other sizes, of the batch too, or a "
            "policy without a recipe.",
            stacklevel=6,
        )
