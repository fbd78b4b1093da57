"""What a program can be compiled for, with or without the hardware being there."""

import dataclasses
import importlib.metadata
import math
import os
import re
from pathlib import Path
from typing import Any

from jaxmp._errors import did_you_mean
from jaxmp.audit._gpus import GPUS, target_config

_GIB = 1 << 30


class TargetError(ValueError):
    """There is no such target, or the program does not fit on it."""


class TargetUnavailableError(ImportError):
    """The compiler for a target is not installed, or not in the version that fits."""


@dataclasses.dataclass(frozen=True)
class _Tpu:
    """A generation of TPU: see https://cloud.google.com/tpu/docs/system-architecture-tpu-vm.

    Attributes:
        rank: dimensions of its interconnect.
        devices_per_chip: JAX devices of one chip.
        chip_memory: bytes of memory of one chip.
        most_chips: in one pod.
        chip_config: a setting of the compiler, where the default is not what Cloud TPUs run.
    """

    rank: int
    devices_per_chip: int
    chip_memory: int
    most_chips: int
    chip_config: str | None = None


_TPUS = {
    # A v4 chip runs its two cores as one JAX device ("megacore"); libtpu alone assumes two.
    "v4": _Tpu(3, 1, 32 * _GIB, 4096, "megacore"),
    "v5e": _Tpu(2, 1, 16 * _GIB, 256),
    "v5p": _Tpu(3, 1, 95 * _GIB, 8960),
    "v6e": _Tpu(2, 1, 32 * _GIB, 256),
    "tpu7x": _Tpu(3, 2, 192 * _GIB, 9216),
}

_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SOLID = (
    *((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8)),
    *((8, 8, 8), (8, 8, 16), (8, 16, 16), (16, 16, 16), (16, 16, 32)),
)
_GPUS_PER_HOST = 8
_MOST_GPU_HOSTS = 1024

TARGETS = (
    *("cpu", "attached"),
    *(f"tpu:{kind}" for kind in _TPUS),
    *(f"cuda:{kind}" for kind in GPUS),
)

# Extra of this package, and what it installs, by platform.
_EXTRAS = {
    "tpu": ("audit-tpu", ("libtpu", "flatbuffers")),
    "cuda": (
        "audit-cuda",
        ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12", "flatbuffers"),
    ),
}
_SAME_VERSION_AS_JAXLIB = ("jax-cuda12-plugin", "jax-cuda12-pjrt")


@dataclasses.dataclass(frozen=True)
class Target:
    """What to compile for.

    Attributes:
        platform: `"cpu"`, `"attached"`, `"tpu"` or `"cuda"`.
        kind: of the chip; empty for `"cpu"` and `"attached"`.
        shape: of the topology: chips of a TPU slice along each dimension, or slices × hosts ×
            GPUs of each host; None for `"cpu"` and `"attached"`.
    """

    platform: str
    kind: str
    shape: tuple[int, ...] | None

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) if self.shape else ""
        return ":".join(part for part in (self.platform, self.kind, shape) if part)

    @property
    def is_here(self) -> bool:
        """Whether this process compiles for it."""
        return self.shape is None

    @property
    def devices(self) -> int | None:
        """JAX devices of the topology; None for those of this process."""
        if self.shape is None:
            return None
        per_chip = _TPUS[self.kind].devices_per_chip if self.platform == "tpu" else 1
        return math.prod(self.shape) * per_chip

    @property
    def device_memory(self) -> int | None:
        """Nominal bytes of memory of one JAX device; the runtime keeps a few percent of them."""
        if self.platform == "tpu":
            tpu = _TPUS[self.kind]
            return tpu.chip_memory // tpu.devices_per_chip
        return GPUS[self.kind].memory if self.platform == "cuda" else None

    @property
    def topology(self) -> dict[str, Any]:
        """Arguments of `jax.experimental.topologies.get_topology_desc`."""
        if self.shape is None:
            raise ValueError(f"Target {str(self)!r} has no topology: its devices are here.")
        shape = "x".join(map(str, self.shape))
        if self.platform == "cuda":
            gpu = target_config(GPUS[self.kind])
            return {
                "platform": "cuda",
                "topology_name": self.kind,
                "target_config": gpu,
                "topology": shape,
            }
        config = _TPUS[self.kind].chip_config
        # A host holds 2x2 chips, or those there are: by default libtpu refuses a lone chip.
        host = (min(2, self.shape[0]), min(2, self.shape[1]), 1)
        return {
            "platform": "tpu",
            "topology_name": f"{self.kind}:{shape}",
            "chips_per_host_bounds": host,
            **({"chip_config_name": config} if config else {}),
        }


def parse_target(text: str, devices_needed: int = 1) -> Target:
    """Returns the target that `text` names.

    Args:
        text: one of `TARGETS`, with a topology if need be: `"tpu:v5e:2x4"` (chips along each
            dimension), `"cuda:h100:1x2x8"` (slices, hosts of each, GPUs of each host). Without,
            it is the smallest usual topology with enough devices.
        devices_needed: how many the program is sharded over.

    Raises:
        TargetError: for an unknown target, a topology that does not exist, or one too small.

    Example:
        >>> str(parse_target("tpu:v5e", devices_needed=8)), str(parse_target("cuda:h100"))
        ('tpu:v5e:2x4', 'cuda:h100:1x1x1')
    """
    platform, _, rest = text.partition(":")
    kind, _, shape_text = rest.partition(":")
    name = f"{platform}:{kind}" if kind else platform
    if name not in TARGETS or (text != name and platform not in ("tpu", "cuda")):
        raise TargetError(
            f"Unknown target {text!r}. Use one of {', '.join(TARGETS)}; tpu and cuda take a "
            f"topology too, as in 'tpu:v5e:2x4' or 'cuda:h100:1x1x8'.{did_you_mean(name, TARGETS)}"
        )
    if platform in ("cpu", "attached"):
        return Target(platform, "", None)
    smallest = Target(platform, kind, _smallest_shape(platform, kind, devices_needed))
    if text == name:
        return smallest
    target = Target(platform, kind, _parse_shape(text, platform, kind, shape_text))
    devices = target.devices or 0
    if devices < devices_needed:
        raise TargetError(
            f"Target {text!r} has {devices} devices, but the program is sharded over "
            f"{devices_needed}. Use {str(smallest)!r}."
        )
    return target


def _parse_shape(text: str, platform: str, kind: str, shape_text: str) -> tuple[int, ...]:
    rule, example = _shape_rule(platform, kind)
    shape = (
        tuple(map(int, shape_text.split("x"))) if re.fullmatch(r"\d+(x\d+)*", shape_text) else ()
    )
    is_valid = _is_gpu_shape(shape) if platform == "cuda" else _is_tpu_shape(kind, shape)
    if not is_valid:
        raise TargetError(
            f"No topology {shape_text!r} in target {text!r}. {rule} "
            f"Use one such as {example!r}, or leave it out."
        )
    return shape


def _shape_rule(platform: str, kind: str) -> tuple[str, str]:
    if platform == "cuda":
        rule = "A GPU topology is SLICESxHOSTSxGPUS, three numbers of at least 1."
        return rule, f"cuda:{kind}:1x1x{_GPUS_PER_HOST}"
    tpu = _TPUS[kind]
    form, example = ("AxB", "2x4") if tpu.rank == 2 else ("AxBxC", "2x2x2")
    rule = (
        f"A {kind} topology is {form} chips, {tpu.most_chips} at most; "
        "A and B are 1 or even, since a host holds 2x2 chips."
    )
    return rule, f"tpu:{kind}:{example}"


def _is_gpu_shape(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and min(shape) >= 1


def _is_tpu_shape(kind: str, shape: tuple[int, ...]) -> bool:
    tpu = _TPUS[kind]
    if len(shape) != tpu.rank or not 1 <= math.prod(shape) <= tpu.most_chips:
        return False
    return all(side == 1 or side % 2 == 0 for side in shape[:2])


def _smallest_shape(platform: str, kind: str, devices_needed: int) -> tuple[int, ...]:
    if platform == "cuda":
        if devices_needed <= _GPUS_PER_HOST:
            return (1, 1, devices_needed)
        hosts = -(-devices_needed // _GPUS_PER_HOST)
        if hosts <= _MOST_GPU_HOSTS:
            return (1, hosts, _GPUS_PER_HOST)
    else:
        tpu = _TPUS[kind]
        for shape in _FLAT if tpu.rank == 2 else _SOLID:
            chips = math.prod(shape)
            if devices_needed <= chips * tpu.devices_per_chip and chips <= tpu.most_chips:
                return shape
    raise TargetError(
        f"No topology of '{platform}:{kind}' has {devices_needed} devices. "
        "Shard the program over fewer, or use another target."
    )


def require_compiler(target: Target) -> None:
    """Checks that the compiler for a target is installed, before a process starts for it.

    Raises:
        TargetUnavailableError: with the line that installs it.
    """
    extra, packages = _EXTRAS[target.platform]
    versions = {package: _version(package) for package in packages}
    missing = [package for package, version in versions.items() if version is None]
    if missing:
        raise TargetUnavailableError(
            f"Target {str(target)!r} needs {', '.join(missing)}, not installed here. "
            f"Install with: pip install 'jaxmp[{extra}]' (no {target.platform} hardware is needed)."
        )
    jaxlib = _version("jaxlib") or ""
    other = [p for p in packages if p in _SAME_VERSION_AS_JAXLIB and versions[p] != jaxlib]
    if other:
        pins = " ".join(f"'{package}=={jaxlib}'" for package in _SAME_VERSION_AS_JAXLIB)
        raise TargetUnavailableError(
            f"{other[0]} {versions[other[0]]} does not fit jaxlib {jaxlib}: the versions must be "
            f"the same. Install with: pip install {pins}"
        )


def version_hint(target: Target) -> str:
    """Returns a remark on a libtpu that is not the one JAX is released with, or an empty string.

    Most programs compile all the same, but jaxlib may not read what a newer libtpu writes.
    """
    if target.platform != "tpu":
        return ""
    requirements = " ".join(importlib.metadata.requires("jax") or ())
    wanted = re.search(r"libtpu==([\d.]+)\.\*", requirements)
    installed = _version("libtpu") or ""
    if not wanted or f"{installed}.".startswith(f"{wanted[1]}."):
        return ""
    return (
        f" libtpu {installed} is installed, but jax {_version('jax')} is released with "
        f"{wanted[1]}. Try: pip install 'libtpu=={wanted[1]}.*'"
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# Noise and waits of libtpu on a machine without a TPU: no metadata server, no log files.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # this process may hold a TPU
}

# Autotuning would need the device; cuBLAS calls name their operands, Triton kernels hide them.
_CUDA_FLAGS = ("--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false")


def child_environment(target: Target) -> dict[str, str]:
    """Returns the environment of the process that compiles for a target.

    Settings of JAX, XLA and libtpu do not pass on to it: the program is traced already, a flag of
    one compiler is a fatal error in another, and caches and dumps would write files. So a report is
    about the compiler's defaults.
    """
    ours = ("JAX_", "XLA_", "TPU_", "LIBTPU_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    environment.update(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")
    if target.platform == "tpu":
        return environment | _TPU_ENVIRONMENT
    flags = _CUDA_FLAGS
    # XLA takes the first `ptxas` it finds; one of another CUDA release may not know the chip.
    toolkit = _toolkit()
    environment["PATH"] = os.pathsep.join((str(toolkit / "bin"), os.environ.get("PATH", "")))
    if " " not in str(toolkit):  # XLA splits its flags at spaces
        flags = (*flags, f"--xla_gpu_cuda_data_dir={toolkit}")
    return environment | {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": " ".join(flags),
    }


def _toolkit() -> Path:
    """Returns the folder of `nvidia-cuda-nvcc-cu12`, which has the `ptxas` that fits."""
    distribution = importlib.metadata.distribution("nvidia-cuda-nvcc-cu12")
    return Path(str(distribution.locate_file("nvidia/cuda_nvcc")))
