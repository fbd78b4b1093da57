"""Optax transforms that make an optimizer safe in mixed precision."""

from jaxmp.optim._accumulate import AccumulateState, accumulate
from jaxmp.optim._apply import apply_updates
from jaxmp.optim._blocks import Blocks
from jaxmp.optim._ema import EmaState, ema, get_ema
from jaxmp.optim._full_weights import full_weights
from jaxmp.optim._kahan import KahanState, kahan
from jaxmp.optim._master_weights import (
    MasterWeightsState,
    master_weights,
    replace_master_weights,
)
from jaxmp.optim._memory import MemoryAccount, memory_account
from jaxmp.optim._mixed_precision import (
    MixedPrecisionState,
    get_loss_scale,
    get_mixed_precision_state,
    mixed_precision,
)
from jaxmp.optim._skip import SkipNonfiniteState, raise_for_skips, skip_nonfinite
from jaxmp.optim._state_dtype import StateDtypeState, state_dtype
from jaxmp.optim._stochastic_rounding import StochasticRoundingState, stochastic_rounding

__all__ = [
    "AccumulateState",
    "Blocks",
    "EmaState",
    "KahanState",
    "MasterWeightsState",
    "MemoryAccount",
    "MixedPrecisionState",
    "SkipNonfiniteState",
    "StateDtypeState",
    "StochasticRoundingState",
    "accumulate",
    "apply_updates",
    "ema",
    "full_weights",
    "get_ema",
    "get_loss_scale",
    "get_mixed_precision_state",
    "kahan",
    "master_weights",
    "memory_account",
    "mixed_precision",
    "raise_for_skips",
    "replace_master_weights",
    "skip_nonfinite",
    "state_dtype",
    "stochastic_rounding",
]
