"""What this machine is good for: versions, devices, fast dtypes, known faults."""

import collections
import dataclasses
import importlib.metadata
import os
import platform
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jaxmp
from jaxmp._dtype_speed import RULE, DtypeSpeed, SpeedReport, first_line, measure_speeds
from jaxmp._dtypes import FLOAT32, dtype_name
from jaxmp._known_faults import Fault, faults_of, release
from jaxmp._table import render, wrapped
from jaxmp.policy import Recommendation, recommend_policy, short_name

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "jmp", "numpy", "ml_dtypes")
_BACKENDS = re.compile(r"libtpu|jax-metal|jax-(cuda|rocm)\d+-(plugin|pjrt)")
_WIDTH = 100


class DeviceError(RuntimeError):
    """JAX has no device to run on."""


@dataclasses.dataclass(frozen=True)
class DeviceGroup:
    """Devices of one kind on this machine.

    Attributes:
        kind: the backend's name of the device: `"TPU v5 lite"`.
        platform: `"cpu"`, `"gpu"` or `"tpu"`.
        count: how many there are.
        compute_capability: of a GPU, `"9.0"`; None elsewhere.
        memory: bytes of one device that JAX may use; None where the backend does not say.
    """

    kind: str
    platform: str
    count: int
    compute_capability: str | None
    memory: int | None


@dataclasses.dataclass(frozen=True)
class Extra:
    """An optional part of jaxmp, and the packages that it still needs.

    Attributes:
        name: as in `pip install "jaxmp[name]"`.
        missing: requirements that are not installed, or too old: `("matplotlib>=3.9",)`.
    """

    name: str
    missing: tuple[str, ...]

    @property
    def pip(self) -> str | None:
        """The line that installs what is missing; None if nothing is."""
        return f'pip install "jaxmp[{self.name}]"' if self.missing else None


@dataclasses.dataclass(frozen=True)
class DoctorReport:
    """What `diagnose_environment` found; `str` of it is for people.

    Attributes:
        versions: of Python, jaxmp and what it builds on.
        devices: of this machine.
        speeds: measured on the default device.
        recommendation: the policy that fits the default device, and why.
        contradiction: what the measurement says against the recommendation; empty if nothing.
        extras: None if jaxmp is not installed as a package.
        faults: known ones of this release of JAX on the default device.
    """

    versions: Mapping[str, str]
    devices: tuple[DeviceGroup, ...]
    speeds: SpeedReport
    recommendation: Recommendation
    contradiction: str
    extras: tuple[Extra, ...] | None
    faults: tuple[Fault, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report in dicts, lists, text and numbers, as JSON takes them."""
        extras = None
        if self.extras is not None:
            extras = [
                {"name": extra.name, "missing": list(extra.missing), "pip": extra.pip}
                for extra in self.extras
            ]
        return {
            "versions": dict(self.versions),
            "devices": [dataclasses.asdict(group) for group in self.devices],
            "speeds": {
                **dataclasses.asdict(self.speeds),
                "speeds": [dataclasses.asdict(speed) for speed in self.speeds.speeds],
                "rule": RULE,
            },
            "recommendation": {
                "policy": short_name(self.recommendation.policy),
                "reason": self.recommendation.reason,
                "contradiction": self.contradiction,
            },
            "extras": extras,
            "faults": [dataclasses.asdict(fault) for fault in self.faults],
        }

    def __str__(self) -> str:
        sections = [
            render("Versions", ["package", "version"], list(self.versions.items())),
            _devices_table(self.devices),
            _speeds_table(self.speeds),
            _recommendation_text(self),
            _extras_text(self.extras),
            _faults_text(self.faults, self.versions["jax"]),
        ]
        return "\n\n".join(sections)


def diagnose_environment(seconds: float = 3.0) -> DoctorReport:
    """Looks at this machine, and measures which dtypes its default device multiplies fast.

    Args:
        seconds: for the measurement; compilation comes on top.

    Raises:
        DeviceError: if JAX cannot start its device.
        ValueError: if `seconds` is not positive.
    """
    device, local = _default_device()
    speeds = measure_speeds(seconds)
    recommendation = recommend_policy(device)
    capability = _compute_capability(device)
    return DoctorReport(
        versions=_versions(),
        devices=_group(local),
        speeds=speeds,
        recommendation=recommendation,
        contradiction=contradiction(recommendation, speeds.speeds),
        extras=_extras(),
        faults=faults_of(jax.__version__, device.platform, capability),
    )


def _default_device() -> tuple[Any, list[Any]]:
    """Returns the device that computations run on, and all of this process."""
    try:
        local = jax.local_devices()
        # Where jax_default_device is set, that is not the first one.
        (device,) = jnp.zeros(()).devices()
    except Exception as error:  # the class depends on the backend: RuntimeError, AssertionError
        chosen = os.environ.get("JAX_PLATFORMS")
        where = f" with JAX_PLATFORMS={chosen!r}" if chosen else ""
        # JAX only asserts that a backend started, without a word.
        reason = first_line(error) if str(error) else "no backend started"
        raise DeviceError(
            f"JAX cannot start a device{where}: {reason}. Install the backend (such as "
            '`pip install "jax[cuda12]"` or `"jax[tpu]"`), or unset JAX_PLATFORMS to let JAX '
            "choose."
        ) from error
    return device, local


def _versions() -> dict[str, str]:
    versions = {"Python": platform.python_version(), "jaxmp": jaxmp.__version__}
    versions |= {name: _installed_version(name) or "not installed" for name in _LIBRARIES}
    found = {
        _normalized(distribution.name): distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.name and _BACKENDS.fullmatch(_normalized(distribution.name))
    }
    return versions | dict(sorted(found.items()))


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _group(devices: Iterable[Any]) -> tuple[DeviceGroup, ...]:
    counts = collections.Counter(
        (device.device_kind, device.platform, _compute_capability(device), _memory(device))
        for device in devices
    )
    return tuple(
        DeviceGroup(kind, platform_, count, capability, memory)
        for (kind, platform_, capability, memory), count in counts.items()
    )


def _compute_capability(device: Any) -> str | None:
    capability = getattr(device, "compute_capability", None)
    return str(capability) if capability else None


def _memory(device: Any) -> int | None:
    try:
        stats = device.memory_stats()
    except Exception:  # not every backend has it, and each says so in its own way
        return None
    return stats.get("bytes_limit") if stats else None


def contradiction(recommendation: Recommendation, speeds: Iterable[DtypeSpeed]) -> str:
    """Returns what the measured speeds say against a recommended policy, or an empty string."""
    compute = recommendation.policy.compute_dtype
    verdicts: dict[str, set[str]] = collections.defaultdict(set)
    for speed in speeds:
        verdicts[speed.operand_dtype].add(speed.verdict)
    fast = [name for name in ("bfloat16", "float16") if "fast" in verdicts[name]]
    if compute == FLOAT32:
        return f"{' and '.join(fast)} measured faster than float32 here." if fast else ""
    name = dtype_name(compute)
    if name in fast or not verdicts[name]:
        return ""
    if "unclear" in verdicts[name]:
        return f"Too few rounds to tell whether {name} is faster than float32: use more seconds."
    if fast:
        return f"{name} measured no faster than float32 here, but {fast[0]} did."
    return f"No half precision dtype measured faster than float32 here: {name} only saves memory."


def _extras() -> tuple[Extra, ...] | None:
    try:
        distribution = importlib.metadata.distribution("jaxmp")
    except importlib.metadata.PackageNotFoundError:
        return None
    names = distribution.metadata.get_all("Provides-Extra") or []
    return extras_of(names, distribution.requires or [])


def extras_of(names: Iterable[str], requirements: Iterable[str]) -> tuple[Extra, ...]:
    """Returns the extras with what each is missing.

    Args:
        names: of the extras.
        requirements: as package metadata has them: `"rich>=13; extra == 'plot'"`. A further
            condition in the marker is taken as met, and of the bounds only `>=` is looked at.

    Example:
        >>> extras_of(["a"], ["numpy>=1; extra == 'a'", "no-such>=2; extra == 'a'", "jax"])
        (Extra(name='a', missing=('no-such>=2',)),)
    """
    requirements = list(requirements)
    return tuple(Extra(name, tuple(_missing(name, requirements))) for name in names)


def _missing(extra: str, requirements: Iterable[str]) -> Iterator[str]:
    """Yields the requirements of an extra that are not met, those of other packages' extras too."""
    for requirement in requirements:
        what, _, marker = requirement.partition(";")
        found = _EXTRA.search(marker)
        if not found or _normalized(found[1]) != _normalized(extra):
            continue
        if not _is_installed(what):
            yield what.strip()
            continue
        for package, nested in _PACKAGE.findall(what)[:1]:
            for name in filter(None, nested.split(",")):
                yield from _missing(name.strip(), importlib.metadata.requires(package) or ())


_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
_PACKAGE = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?")


def _is_installed(requirement: str) -> bool:
    name = _PACKAGE.match(requirement)
    at_least = re.search(r">=\s*([\d.]*\d)", requirement)
    version = _installed_version(name[1]) if name else None
    if version is None:
        return False
    return not at_least or release(version) >= release(at_least[1])


def _devices_table(groups: Iterable[DeviceGroup]) -> str:
    rows = [
        [
            group.kind,
            group.platform,
            str(group.count),
            group.compute_capability or "–",
            f"{group.memory / 2**30:.1f} GiB" if group.memory else "–",
        ]
        for group in groups
    ]
    header = ["device", "platform", "count", "compute capability", "memory"]
    return render("Devices", header, rows, right={2, 4})


def _speeds_table(report: SpeedReport) -> str:
    rows = [
        [
            speed.operand_dtype,
            speed.result_dtype,
            f"{speed.gflops:,.0f}" if speed.gflops is not None else "–",
            f"{speed.ratio:.2f}" if speed.ratio is not None else "–",
            ": ".join(filter(None, (speed.verdict, textwrap.shorten(speed.reason, 160)))),
        ]
        for speed in report.speeds
    ]
    size, rounds = report.size, report.rounds
    table = render(
        f"Matmuls of {size} x {size} matrices, medians of up to {rounds} rounds",
        ["operands", "result", "GFLOP/s", "to float32", "verdict"],
        rows,
        right={2, 3},
    )
    return f"{table}\n{wrapped(f'{RULE[0].upper()}{RULE[1:]}.', _WIDTH)}"


def _recommendation_text(report: DoctorReport) -> str:
    name, reason = short_name(report.recommendation.policy), report.recommendation.reason
    lines = [f"Recommended: jaxmp.get_policy({name!r})", wrapped(reason, _WIDTH)]
    if report.contradiction:
        lines.append(wrapped(f"But: {report.contradiction}", _WIDTH))
    return "\n".join(lines)


def _extras_text(extras: tuple[Extra, ...] | None) -> str:
    if extras is None:
        return wrapped(
            "Extras of jaxmp: unknown, since it is imported from a folder and not installed. "
            "Run `pip install -e .` in that folder.",
            _WIDTH,
        )
    rows = [
        [extra.name, ", ".join(extra.missing) or "–", extra.pip or "installed"] for extra in extras
    ]
    return render("Extras of jaxmp", ["extra", "missing", "to install"], rows)


def _faults_text(faults: Iterable[Fault], version: str) -> str:
    lines = [f"Known faults of JAX {version} on this device"]
    for fault in faults:
        lines.append(wrapped(fault.symptom, _WIDTH, "- "))
        lines.append(wrapped(fault.remedy, _WIDTH, "  -> "))
    return "\n".join(lines)
