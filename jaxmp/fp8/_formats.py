"""The formats: what a code can hold, and how blocks of them share a scale."""

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

import ml_dtypes
import numpy as np

from jaxmp._errors import nearest

T = TypeVar("T")

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)

# The largest of each; e2m1 and e4m3 have no infinity, e2m1 has no NaN.
LARGEST = {E4M3: 448.0, E5M2: 57344.0, E2M1: 6.0}

_CODES = {"e4m3": E4M3, "e5m2": E5M2}


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """A format in which neighbours along an axis share a scale.

    Attributes:
        codes: the dtype of a number.
        scales: the dtype of what a block shares.
        size: how many numbers a block has along an axis.
    """

    codes: np.dtype
    scales: np.dtype
    size: int


# OCP Microscaling Formats (MX) 1.0, 2023, and NVIDIA's NVFP4, 2025.
_BLOCKS = {
    "mxfp8": BlockFormat(E4M3, E8M0, 32),
    "mxfp8_e5m2": BlockFormat(E5M2, E8M0, 32),
    "nvfp4": BlockFormat(E2M1, E4M3, 16),
}


def code_dtype(name: str) -> np.dtype:
    """Returns the dtype of a format without blocks; ValueError for another name."""
    return _find(name, _CODES)


def block_format(name: str) -> BlockFormat:
    """Returns a format in blocks; ValueError for another name."""
    return _find(name, _BLOCKS)


def _find(name: str, formats: Mapping[str, T]) -> T:
    if name in formats:
        return formats[name]
    near = nearest(str(name), (*_CODES, *_BLOCKS))
    hint = f" Did you mean {near!r}?" if near in formats else ""
    if near and near not in formats:
        other = "quantize" if near in _CODES else "quantize_blocks"
        hint = f" {near!r} is a format of jaxmp.fp8.{other}."
    raise ValueError(f"Unknown format {name!r}: use one of {', '.join(formats)}.{hint}")
