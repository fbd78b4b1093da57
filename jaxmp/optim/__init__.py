"""Optax transforms that make an optimizer safe in mixed precision."""

from jaxmp.optim._apply import apply_updates
from jaxmp.optim._full_weights import full_weights
from jaxmp.optim._kahan import KahanState, kahan
from jaxmp.optim._master_weights import (
    MasterWeightsState,
    master_weights,
    replace_master_weights,
)
from jaxmp.optim._mixed_precision import (
    MixedPrecisionState,
    get_loss_scale,
    get_mixed_precision_state,
    mixed_precision,
)
from jaxmp.optim._skip import SkipNonfiniteState, raise_for_skips, skip_nonfinite
from jaxmp.optim._stochastic_rounding import StochasticRoundingState, stochastic_rounding

__all__ = [
    "KahanState",
    "MasterWeightsState",
    "MixedPrecisionState",
    "SkipNonfiniteState",
    "StochasticRoundingState",
    "apply_updates",
    "full_weights",
    "get_loss_scale",
    "get_mixed_precision_state",
    "kahan",
    "master_weights",
    "mixed_precision",
    "raise_for_skips",
    "replace_master_weights",
    "skip_nonfinite",
    "stochastic_rounding",
]
