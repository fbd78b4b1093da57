"""`python -m jaxmp doctor`: what it measures, what it reads, and what it says."""

import importlib.util
import json
import os
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from jaxmp import _doctor
from jaxmp._doctor import Extra, contradiction, diagnose_environment, extras_of
from jaxmp._dtype_speed import CANDIDATES, DtypeSpeed, measure_speeds, verdict
from jaxmp.policy import Recommendation

NO_NOISE = [1.0] * 9
VERDICTS = {"fast", "slow", "as float32", "unclear", "cannot run"}


@pytest.fixture(scope="module")
def report():
    return diagnose_environment(0.2)


# What is measured.


def test_every_dtype_is_measured_or_says_why_not(report):
    speeds = report.speeds.speeds
    assert [(speed.operand_dtype, speed.result_dtype) for speed in speeds] == list(CANDIDATES)
    for speed in speeds:
        assert speed.verdict in VERDICTS
        runs = speed.verdict != "cannot run"
        assert (speed.gflops is not None) == (speed.ratio is not None) == runs
        assert bool(speed.reason) != runs
    assert speeds[0].verdict in {"as float32", "unclear"}, "float32 against itself"
    assert report.speeds.size % 256 == 0


def test_a_dtype_that_the_device_cannot_multiply_is_reported():
    pairs = [("float32", "float32"), ("nonsense", "float32"), ("bfloat16", "float32")]
    report = measure_speeds(0.01, candidates=pairs)
    first, broken, last = report.speeds
    assert broken == DtypeSpeed("nonsense", "float32", None, None, "cannot run", broken.reason)
    assert "nonsense" in broken.reason
    assert "\n" not in broken.reason
    assert first.gflops > 0
    assert last.gflops > 0


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA's CPU backend refuses")
def test_what_xla_refuses_is_reported():
    pairs = [("float32", "float32"), ("float4_e2m1fn", "float32")]
    _, refused = measure_speeds(0.01, candidates=pairs).speeds
    assert refused.verdict == "cannot run"
    assert refused.reason


def test_a_reference_that_cannot_run_leaves_the_others_without_a_ratio():
    pairs = [("nonsense", "float32"), ("float32", "float32")]
    broken, works = measure_speeds(0.01, candidates=pairs).speeds
    assert broken.verdict == "cannot run"
    assert works.gflops > 0
    assert (works.ratio, works.verdict) == (None, "unclear")


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_no_time_to_measure_is_refused(seconds):
    with pytest.raises(ValueError, match="seconds must be positive"):
        measure_speeds(seconds)


# When a dtype counts as fast.


@pytest.mark.parametrize(
    ("ratios", "noise", "expected"),
    [
        ([2.0] * 9, NO_NOISE, "fast"),
        ([0.5] * 9, NO_NOISE, "slow"),
        ([1.0] * 9, NO_NOISE, "as float32"),
        ([1.1] * 9, NO_NOISE, "as float32"),  # below the margin
        ([0.9] * 9, NO_NOISE, "as float32"),
        ([2.0] * 7 + [0.5] * 2, NO_NOISE, "fast"),  # two disturbed rounds of nine
        ([2.0] * 5 + [0.5] * 4, NO_NOISE, "as float32"),
        ([2.0] * 9, [0.4, 2.5] * 5, "as float32"),  # float32 itself varies as much
        ([0.5] * 9, [0.4, 2.5] * 5, "as float32"),
        ([9.0] * 9, [0.4, 2.5] * 5, "fast"),
        ([2.0] * 4, NO_NOISE, "unclear"),
        ([2.0] * 9, [1.0] * 4, "unclear"),
        ([], [], "unclear"),
    ],
)
def test_only_what_noise_does_not_give_counts_as_fast_or_slow(ratios, noise, expected):
    assert verdict(ratios, noise) == expected


def speeds_of(**verdicts):
    return [DtypeSpeed(name, "float32", 1.0, 1.0, said) for name, said in verdicts.items()]


def recommended(name):
    return Recommendation(jaxmp.get_policy(name), "")


@pytest.mark.parametrize(
    ("policy", "verdicts", "words"),
    [
        ("mixed_bfloat16", {"bfloat16": "fast"}, ""),
        ("mixed_bfloat16", {"bfloat16": "as float32"}, "bfloat16 only saves memory"),
        ("mixed_bfloat16", {"bfloat16": "as float32", "float16": "fast"}, "but float16 did"),
        ("mixed_bfloat16", {"bfloat16": "unclear"}, "use more seconds"),
        ("mixed_bfloat16", {"bfloat16": "cannot run"}, "No half precision dtype measured faster"),
        ("mixed_float16", {"bfloat16": "slow", "float16": "fast"}, ""),
        ("mixed_bfloat16", {}, ""),
        ("float32", {"bfloat16": "as float32", "float16": "slow"}, ""),
        ("float32", {"bfloat16": "fast", "float16": "slow"}, "bfloat16 measured faster"),
    ],
)
def test_a_measurement_against_the_recommendation_is_said(policy, verdicts, words):
    said = contradiction(recommended(policy), speeds_of(**verdicts))
    assert (words in said) if words else not said


def test_one_fast_result_dtype_is_enough():
    speeds = [
        DtypeSpeed("bfloat16", "float32", 1.0, 2.0, "fast"),
        DtypeSpeed("bfloat16", "bfloat16", 1.0, 0.9, "as float32"),
    ]
    assert not contradiction(recommended("mixed_bfloat16"), speeds)


# What is read.


def test_versions(report):
    versions = report.versions
    assert versions["Python"] == platform.python_version()
    assert versions["jaxmp"] == jaxmp.__version__
    assert versions["jax"] == jax.__version__
    assert {"jaxlib", "flax", "optax", "jmp", "numpy", "ml_dtypes"} <= set(versions)


def test_backends_are_listed_where_they_are_installed(tmp_path, monkeypatch):
    for name in ("libtpu-0.0.30", "jax_cuda12_plugin-0.9.0", "jax_cuda_helper-1.0"):
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        package, version = name.split("-")
        (folder / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    versions = _doctor._versions()
    assert versions["libtpu"] == "0.0.30"
    assert versions["jax-cuda12-plugin"] == "0.9.0"
    assert not any("helper" in name for name in versions)


def test_devices_of_one_kind_are_one_row(report):
    local = jax.local_devices()
    assert sum(group.count for group in report.devices) == len(local)
    assert {group.kind for group in report.devices} == {device.device_kind for device in local}


def test_the_default_device_is_the_one_looked_at():
    last = jax.local_devices()[-1]
    with jax.default_device(last):
        device, local = _doctor._default_device()
    assert device == last
    assert local == jax.local_devices()


class Gpu:
    platform = "gpu"
    device_kind = "NVIDIA H100 80GB HBM3"
    compute_capability = "9.0"

    def memory_stats(self):
        return {"bytes_limit": 60 * 2**30}


class Silent(Gpu):
    compute_capability = None

    def memory_stats(self):
        raise NotImplementedError("no memory stats")


def test_devices_say_what_they_can():
    groups = _doctor._group([Gpu(), Gpu(), Silent()])
    assert [(g.count, g.compute_capability, g.memory) for g in groups] == [
        (2, "9.0", 60 * 2**30),
        (1, None, None),
    ]
    table = _doctor._devices_table(groups)
    assert "60.0 GiB" in table
    assert "9.0" in table


def test_recommendation_is_jaxmps_own(report):
    assert report.recommendation == jaxmp.recommend_policy()


def test_extras_name_what_is_missing_or_too_old():
    requirements = [
        "jax>=0.9",
        "numpy>=1; extra == 'works'",
        "no-such-package>=2; extra == 'broken'",
        'numpy>=999.1; extra == "broken"',
        "NumPy ; (sys_platform != 'nowhere') and extra == 'works'",
        "ml_dtypes<9,>=0.1 ; extra == 'works'",
        "another; extra == 'audit-tpu'",
    ]
    names = ["works", "broken", "audit_tpu", "empty"]
    works, broken, audit_tpu, empty = extras_of(names, requirements)
    assert works == Extra("works", ())
    assert works.pip is None
    assert broken.missing == ("no-such-package>=2", "numpy>=999.1")
    assert broken.pip == 'pip install "jaxmp[broken]"'
    assert audit_tpu.missing == ("another",)
    assert empty == Extra("empty", ())


def test_without_a_distribution_the_extras_are_unknown(monkeypatch):
    def nothing(name):
        raise _doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(_doctor.importlib.metadata, "distribution", nothing)
    assert _doctor._extras() is None
    assert "pip install -e ." in " ".join(_doctor._extras_text(None).split())


# What is said.


def test_text_has_every_section(report):
    text = str(report)
    for words in ("Versions", "Devices", "Matmuls of", "Recommended: ", "Extras", "Known faults"):
        assert words in text
    assert report.recommendation.reason.split()[0] in text
    for fault in report.faults:
        assert fault.remedy.split()[0] in text


def test_the_recommended_policy_can_be_pasted(report):
    line = next(line for line in str(report).splitlines() if line.startswith("Recommended: "))
    policy = eval(line.removeprefix("Recommended: "), {"jaxmp": jaxmp})
    assert policy == report.recommendation.policy


def test_dict_survives_json(report):
    found = report.to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["versions"]["jax"] == jax.__version__
    assert jaxmp.get_policy(found["recommendation"]["policy"]) == report.recommendation.policy
    assert [fault["name"] for fault in found["faults"]] == [f.name for f in report.faults]


def test_strict_promotion_and_64_bit_types_do_not_matter():
    with jax.enable_x64(True):
        report = measure_speeds(0.01)
        assert jnp.zeros(()).dtype == jnp.float64
    assert all(speed.verdict != "cannot run" for speed in report.speeds[:3])


@pytest.mark.parametrize("name", ["cuda", "bogus"])
def test_without_the_device_there_is_a_message_and_no_traceback(name):
    if name == jax.default_backend() or jax.default_backend() == "gpu":
        pytest.skip("it is there")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jaxmp", "doctor"],
        env={**os.environ, "JAX_PLATFORMS": name},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert f"jaxmp doctor: error: JAX cannot start a device with JAX_PLATFORMS='{name}'" in (
        done.stderr
    )
    assert "Traceback" not in done.stderr


def test_an_extra_of_another_package_is_looked_into():
    (extra,) = extras_of(
        ["a"], ["jax[tpu, no-such-extra]; extra == 'a'", "jax[cuda12]; extra == 'b'"]
    )
    assert all(requirement.startswith(("libtpu", "requests")) for requirement in extra.missing)
    assert bool(extra.missing) == (importlib.util.find_spec("libtpu") is None)
