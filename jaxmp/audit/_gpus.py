"""NVIDIA GPUs as their data sheets describe them, in the form that XLA compiles for."""

import dataclasses

_GIB = 1 << 30
_KIB = 1 << 10
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the compiler asks of a GPU.

    Figures are those of NVIDIA's data sheets and architecture white papers, for the SXM form where
    there are several; limits of a compute capability are those of the CUDA programming guide.

    Attributes:
        name: as the driver states it.
        capability: compute capability, (major, minor).
        cores: streaming multiprocessors.
        lanes: float32 lanes of one multiprocessor.
        threads: the most threads that one multiprocessor holds.
        shared: bytes of shared memory of one multiprocessor.
        memory: bytes of device memory.
        bandwidth: of the device memory, in bytes per second.
        cache: bytes of second-level cache.
        clock: boost clock, in GHz.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    lanes: int
    threads: int
    shared: int
    memory: int
    bandwidth: int
    cache: int
    clock: float

    @property
    def shared_per_block(self) -> int:
        """Bytes that one block may use: from 8.0 on the system keeps 1 KiB."""
        return self.shared - (_KIB if self.capability >= (8, 0) else 0)


GPUS = {
    "v100": Gpu(
        "Tesla V100-SXM2-16GB", (7, 0), 80, 64, 2048, 96 * _KIB,
        16 * _GIB, 900_000_000_000, 6 * _MIB, 1.53,
    ),
    "t4": Gpu(
        "Tesla T4", (7, 5), 40, 64, 1024, 64 * _KIB,
        16 * _GIB, 320_000_000_000, 4 * _MIB, 1.59,
    ),
    "a100": Gpu(  # the 80 GB form
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 164 * _KIB,
        80 * _GIB, 2_039_000_000_000, 40 * _MIB, 1.41,
    ),
    "l4": Gpu(
        "NVIDIA L4", (8, 9), 58, 128, 1536, 100 * _KIB,
        24 * _GIB, 300_000_000_000, 48 * _MIB, 2.04,
    ),
    "rtx4090": Gpu(
        "NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 1536, 100 * _KIB,
        24 * _GIB, 1_008_000_000_000, 72 * _MIB, 2.52,
    ),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 228 * _KIB,
        80 * _GIB, 3_352_000_000_000, 50 * _MIB, 1.98,
    ),
    "h200": Gpu(
        "NVIDIA H200", (9, 0), 132, 128, 2048, 228 * _KIB,
        141 * _GIB, 4_800_000_000_000, 50 * _MIB, 1.98,
    ),
    "b200": Gpu(  # 192 GB of memory, of which the HGX data sheet grants 180
        "NVIDIA B200", (10, 0), 148, 128, 2048, 228 * _KIB,
        180 * _GIB, 8_000_000_000_000, 126 * _MIB, 1.965,
    ),
    "rtx5090": Gpu(
        "NVIDIA GeForce RTX 5090", (12, 0), 170, 128, 1536, 100 * _KIB,
        32 * _GIB, 1_792_000_000_000, 96 * _MIB, 2.41,
    ),
}  # fmt: skip


def target_config(gpu: Gpu) -> str:
    """Returns the text of XLA's `GpuTargetConfigProto` (`xla/service/gpu_target_config.proto`)."""
    major, minor = gpu.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  threads_per_core_limit: {gpu.threads}  core_count: {gpu.cores}  fpus_per_core: {gpu.lanes}
  shared_memory_per_block: {48 * _KIB}  shared_memory_per_core: {gpu.shared}
  shared_memory_per_block_optin: {gpu.shared_per_block}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth}  l2_cache_size: {gpu.cache}  clock_rate_ghz: {gpu.clock}
  device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{gpu.name}"
"""
