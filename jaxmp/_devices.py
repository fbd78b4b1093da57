"""What a device is good at: which half precision dtype its hardware multiplies fast."""

import functools
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxmp._dtypes import BFLOAT16, FLOAT16, FLOAT32

BF16_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "FEAT_BF16"})


def best_compute_dtype(device: Any) -> tuple[np.dtype, str]:
    """Returns the compute dtype that fits `device`, and why.

    Args:
        device: a JAX device; its `platform`, `device_kind` and, on a GPU, `compute_capability`
            are looked at.
    """
    if device.platform == "tpu":
        return BFLOAT16, f"{device.device_kind}: a TPU multiplies bfloat16 natively."
    if device.platform == "gpu":
        return _best_on_gpu(device)
    if device.platform == "cpu":
        return _best_on_cpu(cpu_flags())
    return FLOAT32, f"{device.platform} is not known to multiply half precision faster."


def compute_capability(device: Any) -> tuple[int, int] | None:
    """Returns the compute capability of an NVIDIA GPU; None for all else."""
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(found[1]), int(found[2])) if found else None


def _best_on_gpu(device: Any) -> tuple[np.dtype, str]:
    capability, kind = compute_capability(device), device.device_kind
    if capability is None:
        return BFLOAT16, f"{kind}: not an NVIDIA GPU; AMD's matrix cores multiply bfloat16."
    text = ".".join(map(str, capability))
    if capability >= (8, 0):
        return BFLOAT16, f"{kind} (compute capability {text}) multiplies bfloat16 natively."
    return FLOAT16, (
        f"{kind} (compute capability {text} < 8.0) has tensor cores for float16 only; "
        "bfloat16 products would be compiled as float32. Use dynamic loss scaling."
    )


def _best_on_cpu(flags: frozenset[str]) -> tuple[np.dtype, str]:
    found = sorted(flags & BF16_CPU_FLAGS)
    if found:
        return BFLOAT16, f"This processor multiplies bfloat16 ({', '.join(found)})."
    return FLOAT32, "This processor has no bfloat16 instructions, so float32 is the fastest."


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Returns the names of the processor's features, as the operating system spells them."""
    readers: dict[str, Callable[[], frozenset[str]]] = {
        "Linux": _linux_cpu_flags,
        "Darwin": _darwin_cpu_flags,
    }
    try:
        return readers.get(platform.system(), frozenset)()
    except (OSError, subprocess.SubprocessError):
        return frozenset()


def _linux_cpu_flags() -> frozenset[str]:
    return parse_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))


def parse_cpuinfo(text: str) -> frozenset[str]:
    """Returns the features that Linux lists for the first processor in `/proc/cpuinfo`."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _darwin_cpu_flags() -> frozenset[str]:
    command = ["sysctl", "-n", "hw.optional.arm.FEAT_BF16"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    return frozenset({"FEAT_BF16"}) if output.strip() == "1" else frozenset()
