"""Why a run went wrong: what makes infinity or NaN."""

from jaxmp.diagnose._nonfinite import NonfiniteReport, Operand, first_nonfinite

__all__ = ["NonfiniteReport", "Operand", "first_nonfinite"]
