"""What goes wrong in mixed precision with which release of JAX, and what to do about it.

A fault gets into the table when it has been seen in a release, and its range ends where it was
seen to be gone. `tests/test_known_faults.py` runs each one that a CPU can show.
"""

import dataclasses
import re
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of JAX or XLA, or something in them that surprises.

    Attributes:
        name: a short name.
        since: the first release of JAX that is known to have it.
        until: the first release that is known not to have it; None if there is none yet.
        platform: `"cpu"`, `"gpu"` or `"tpu"`; None for all.
        below_capability: NVIDIA GPUs below this compute capability have it; None for all devices.
        symptom: what happens, in a sentence.
        remedy: what to do, or what jaxmp does.
    """

    name: str
    since: str
    until: str | None = None
    platform: str | None = None
    below_capability: str | None = None
    symptom: str
    remedy: str

    def in_release(self, version: str) -> bool:
        """Tells whether a release of JAX has the fault.

        Example:
            >>> fault = Fault(name="", since="0.9.0", until="0.11.0", symptom="", remedy="")
            >>> [fault.in_release(version) for version in ("0.9.0", "0.10.2", "0.11.0")]
            [True, True, False]
        """
        have = release(version)
        return release(self.since) <= have and (self.until is None or have < release(self.until))

    def on_device(self, platform: str, compute_capability: str | None) -> bool:
        """Tells whether a device is of the kind that has the fault."""
        if self.platform not in (None, platform):
            return False
        if self.below_capability is None:
            return True
        # Only NVIDIA's are two numbers; AMD's are names such as gfx942.
        if not compute_capability or not re.fullmatch(r"\d+\.\d+", compute_capability):
            return False
        return release(compute_capability) < release(self.below_capability)


def release(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version, as they compare.

    Example:
        >>> release("0.12.0.1") > release("0.12.0") > release("0.9.2.dev20260101")
        True
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def faults_of(
    version: str, platform: str, compute_capability: str | None = None
) -> tuple[Fault, ...]:
    """Returns the known faults of a JAX release on a device.

    Example:
        >>> "mixed-operands" in [fault.name for fault in faults_of("0.10.2", "tpu")]
        True
    """
    return tuple(_matching(FAULTS, version, platform, compute_capability))


def _matching(
    faults: Iterable[Fault], version: str, platform: str, compute_capability: str | None
) -> Iterable[Fault]:
    for fault in faults:
        if fault.in_release(version) and fault.on_device(platform, compute_capability):
            yield fault


FAULTS = (
    Fault(
        name="transposed-bfloat16-matmul",
        since="0.9.0",
        platform="cpu",
        symptom=(
            "A bfloat16 matmul with a float32 result that is transposed afterwards fails at run "
            "time: 'UNIMPLEMENTED: Unsupported element type for DotThunk::Execute'. Autodiff "
            "writes such transposes itself."
        ),
        remedy=(
            "Put jax.lax.optimization_barrier around operands and result, or ask for a bfloat16 "
            "result."
        ),
    ),
    Fault(
        name="nan-lost-by-maximum",
        since="0.10.2",
        platform="cpu",
        symptom=(
            "jnp.max and jnp.min of a large array that holds NaN may be finite, so max(abs(x)) "
            "tells nothing about NaN."
        ),
        remedy="Ask jnp.isfinite(x).all(), as jaxmp.all_finite does.",
    ),
    Fault(
        name="float16-attention",
        since="0.9.0",
        platform="cpu",
        symptom=(
            "jax.nn.dot_product_attention raises in float16 under jit: 'The precision "
            "F16_F16_F32 is not supported by dot_general on CPU'."
        ),
        remedy="Use bfloat16, or cast query, key and value to float32.",
    ),
    Fault(
        name="scaled-matmul",
        since="0.9.0",
        until="0.11.0",
        platform="cpu",
        symptom="jax.nn.scaled_matmul (mxfp8, nvfp4) raises: it has no lowering for CPU.",
        remedy="Widen the operands and multiply by their scales, or use JAX 0.11 or newer.",
    ),
    Fault(
        name="mixed-operands",
        since="0.9.0",
        symptom=(
            "jax.lax.dot_general of a bfloat16 and a float32 array runs in float32, without a "
            "warning and whatever jax_numpy_dtype_promotion says."
        ),
        remedy="Cast both operands to one dtype; jaxmp.audit lists such matmuls.",
    ),
    Fault(
        name="wide-cotangent",
        since="0.9.0",
        symptom=(
            "With preferred_element_type=float32 both backward matmuls of a half precision matmul "
            "get a float32 cotangent and run in float32, and the weight gradient is rounded to "
            "half precision all the same. Flax's preferred_element_type does this too."
        ),
        remedy=(
            "Leave preferred_element_type out: GPUs and TPUs accumulate in float32 anyway. "
            "jaxmp.audit lists such matmuls."
        ),
    ),
    Fault(
        name="fp8-does-not-saturate",
        since="0.9.0",
        symptom=(
            "A cast of a number that is too large gives NaN in float8_e4m3fn (from 465 on) and "
            "infinity in float8_e5m2, not the largest number."
        ),
        remedy="Clip first: to ±448 for float8_e4m3fn, to ±57344 for float8_e5m2.",
    ),
    Fault(
        name="bfloat16-as-float32",
        since="0.9.0",
        platform="gpu",
        below_capability="8.0",
        symptom=(
            "XLA compiles bfloat16 matmuls and convolutions as float32 on this GPU, which has no "
            "bfloat16 tensor cores (T4, V100)."
        ),
        remedy="Use mixed_float16 with dynamic loss scaling; jaxmp.get_policy('auto') does.",
    ),
    Fault(
        name="excess-precision",
        since="0.9.0",
        platform="gpu",
        symptom=(
            "XLA may drop a round trip float32 -> bfloat16 -> float32 inside jit "
            "(xla_allow_excess_precision), so a result that relies on that rounding is not rounded."
        ),
        remedy="Round with jax.lax.reduce_precision, which is never dropped; jaxmp does.",
    ),
    Fault(
        name="half-convolution-as-float32",
        since="0.9.0",
        platform="gpu",
        symptom=(
            "A half precision convolution with preferred_element_type=float32 is compiled as a "
            "float32 convolution on NVIDIA GPUs, forward and both gradients."
        ),
        remedy="Leave preferred_element_type out: cuDNN accumulates in float32 anyway.",
    ),
    Fault(
        name="grouped-convolution-on-a-mesh",
        since="0.10.0",
        symptom=(
            "Where a batch is sharded over some axes of a mesh only, as beside tensor parallel "
            "layers, the partitioner multiplies the weight gradient of a grouped or depthwise "
            "convolution by the number of devices along the others."
        ),
        remedy=(
            "Shard the batch over all axes, or give jaxmp the layout (jaxmp.sharding.Layout): it "
            "does so for that gradient."
        ),
    ),
)
