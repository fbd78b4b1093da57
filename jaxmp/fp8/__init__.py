"""Arrays and matmuls in 8 and 4 bits a number, with scales: fp8, MXFP8 and NVFP4."""

from jaxmp.fp8._blocks import quantize_blocks
from jaxmp.fp8._hardware import runnable
from jaxmp.fp8._quantize import Quantized, dequantize, quantize, scale_for
from jaxmp.fp8._recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    get_recipe,
)
from jaxmp.fp8._state import ProductState, update_state

__all__ = [
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "ProductState",
    "Quantized",
    "Recipe",
    "dequantize",
    "get_recipe",
    "quantize",
    "quantize_blocks",
    "runnable",
    "scale_for",
    "update_state",
]
