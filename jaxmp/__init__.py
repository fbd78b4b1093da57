"""jaxmp: mixed precision for any JAX training step."""

from jaxmp import checkpoint, diagnose, fp8, optim, sharding
from jaxmp._dtypes import half_dtype
from jaxmp._fp8_report import fp8_report
from jaxmp._fp8_state import init_fp8_state
from jaxmp._gradients import value_and_grad
from jaxmp._loss import LossOutput
from jaxmp._tree import all_finite, cast_to_full, cast_to_half, select_tree
from jaxmp.audit import audit
from jaxmp.autocast import autocast, full_precision
from jaxmp.loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from jaxmp.matmul import (
    conv_general_dilated,
    dot_general,
    einsum,
    matmul,
    ragged_dot,
    remat_policy,
)
from jaxmp.optim import MixedPrecisionState, get_loss_scale, mixed_precision
from jaxmp.policy import Policy, Recommendation, get_policy, recommend_policy
from jaxmp.train import StepInfo, TrainState, make_train_step

__version__ = "0.1.0"

__all__ = [
    "DynamicLossScale",
    "LossOutput",
    "LossScale",
    "MixedPrecisionState",
    "NoOpLossScale",
    "Policy",
    "Recommendation",
    "StaticLossScale",
    "StepInfo",
    "TrainState",
    "all_finite",
    "audit",
    "autocast",
    "cast_to_full",
    "cast_to_half",
    "checkpoint",
    "conv_general_dilated",
    "diagnose",
    "dot_general",
    "einsum",
    "fp8",
    "fp8_report",
    "full_precision",
    "get_loss_scale",
    "get_policy",
    "half_dtype",
    "init_fp8_state",
    "make_train_step",
    "matmul",
    "mixed_precision",
    "optim",
    "ragged_dot",
    "recommend_policy",
    "remat_policy",
    "select_tree",
    "sharding",
    "value_and_grad",
]
