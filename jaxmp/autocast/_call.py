"""An equation with jaxprs inside, as it is to be computed."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxmp._jaxpr import Inner, inner_jaxprs
from jaxmp.autocast._region import Region
from jaxmp.autocast._values import State, Value

if TYPE_CHECKING:
    from jaxmp.autocast._interpret import Interpreter


@dataclasses.dataclass(frozen=True)
class Call:
    """A call, a loop or a branch.

    Attributes:
        interpreter: what computes the jaxprs inside.
        eqn: the equation.
        args: its operands.
        wanted: what its results are used for.
        region: where the jaxprs inside stand.
    """

    interpreter: "Interpreter"
    eqn: JaxprEqn
    args: list[Value]
    wanted: list[int]
    region: Region

    @property
    def entering(self) -> list[State | None]:
        """The states of the operands."""
        return [arg.state for arg in self.args]

    @property
    def arrays(self) -> list[Any]:
        """The operands as they are held."""
        return [arg.array for arg in self.args]

    def inner_outputs(self) -> list[tuple[int, ...]]:
        """Returns the uses of the outputs of each jaxpr inside."""
        return self.interpreter.lookahead.inner_outputs(self.eqn, self.wanted, self.region)

    def rewrite(
        self,
        inner: Inner | None = None,
        entering: Sequence[State | None] | None = None,
        outputs: Sequence[int] | None = None,
        leaving: Sequence[State | None] | None = None,
    ) -> tuple[ClosedJaxpr, list[State | None]]:
        """Returns a jaxpr inside in mixed precision, and the states of its outputs.

        Args:
            inner: if left out, the only one, which takes the operands and gives the results.
            entering: the states of its inputs.
            outputs: the uses of its outputs.
            leaving: the states that the outputs are cast to; as they come if left out.
        """
        inner = inner_jaxprs(self.eqn)[0] if inner is None else inner
        entering = self.entering if entering is None else entering
        outputs = self.wanted if outputs is None else outputs
        return self.interpreter.rewrite(inner, entering, outputs, self.region, leaving)
