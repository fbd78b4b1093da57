"""Optax transforms that make an optimizer safe in mixed precision."""

from jaxmp.optim._apply import apply_updates
from jaxmp.optim._mixed_precision import (
    MixedPrecisionState,
    get_loss_scale,
    get_mixed_precision_state,
    mixed_precision,
    raise_for_skips,
)

__all__ = [
    "MixedPrecisionState",
    "apply_updates",
    "get_loss_scale",
    "get_mixed_precision_state",
    "mixed_precision",
    "raise_for_skips",
]
