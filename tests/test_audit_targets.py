"""Which targets there are, and what their compilers need."""

import os

import pytest

from jaxmp.audit import _targets
from jaxmp.audit._targets import (
    TARGETS,
    TargetUnavailableError,
    child_environment,
    parse_target,
    require_compiler,
)


@pytest.mark.parametrize(
    ("text", "needed", "full", "devices"),
    [
        ("cpu", 64, "cpu", None),
        ("attached", 1, "attached", None),
        ("tpu:v5e", 1, "tpu:v5e:1x1", 1),
        ("tpu:v5e", 2, "tpu:v5e:2x2", 4),
        ("tpu:v5e", 8, "tpu:v5e:2x4", 8),
        ("tpu:v6e", 200, "tpu:v6e:16x16", 256),
        ("tpu:v4", 8, "tpu:v4:2x2x2", 8),
        ("tpu:v5p", 5, "tpu:v5p:2x2x2", 8),
        ("tpu:tpu7x", 8, "tpu:tpu7x:2x2x1", 8),
        ("tpu:tpu7x", 1, "tpu:tpu7x:1x1x1", 2),
        ("cuda:h100", 1, "cuda:h100:1x1x1", 1),
        ("cuda:h100", 8, "cuda:h100:1x1x8", 8),
        ("cuda:h100", 12, "cuda:h100:1x2x8", 16),
        ("cuda:t4:2x1x4", 8, "cuda:t4:2x1x4", 8),
        ("tpu:v5p:2x2x3", 3, "tpu:v5p:2x2x3", 12),
    ],
)
def test_targets(text, needed, full, devices):
    target = parse_target(text, needed)
    assert str(target) == full
    assert target.devices == devices
    assert parse_target(str(target)) == target


def test_every_listed_target_is_one_and_has_memory():
    for text in TARGETS:
        target = parse_target(text)
        assert (target.device_memory is None) == target.is_here
    sizes = {text: parse_target(text).device_memory for text in TARGETS}
    gib = {text: size >> 30 for text, size in sizes.items() if size}
    assert gib["tpu:v5e"] == 16
    assert gib["tpu:tpu7x"] == 96  # 192 for the two devices of a chip
    assert gib["cuda:a100"] == 80


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tpu:v5",
            r"Unknown target 'tpu:v5'. Use one of cpu, attached, tpu:v4.*Did you mean 'tpu:v",
        ),
        ("cuda:h10", "Did you mean 'cuda:h1?00'"),
        ("cpus", "Did you mean 'cpu'"),
        ("cpu:2", "Unknown target 'cpu:2'"),
        ("tpu", "Unknown target 'tpu'"),
        ("", "Unknown target ''"),
        ("tpu:v5e:0x4", "No topology '0x4' in target 'tpu:v5e:0x4'. A v5e topology is AxB chips"),
        ("tpu:v5e:", "No topology ''"),
        ("tpu:v5e:axb", "such as 'tpu:v5e:2x4'"),
        ("tpu:v5e:2x2x2", "AxB chips"),
        ("tpu:v4:2x2", "AxBxC chips.*'tpu:v4:2x2x2'"),
        ("tpu:v5e:3x3", "1 or even"),
        ("tpu:v5e:16x32", "256 at most"),
        ("cuda:h100:8", "SLICESxHOSTSxGPUS.*'cuda:h100:1x1x8'"),
        ("cuda:h100:1x1x0", "at least 1"),
    ],
)
def test_bad_targets_give_value_rule_and_remedy(text, message):
    with pytest.raises(ValueError, match=message):
        parse_target(text)


def test_a_target_with_too_few_devices_names_one_that_fits():
    with pytest.raises(ValueError, match=r"has 4 devices.*sharded over 8. Use 'tpu:v5e:2x4'"):
        parse_target("tpu:v5e:2x2", 8)
    with pytest.raises(ValueError, match="No topology of 'tpu:v5e' has 300 devices"):
        parse_target("tpu:v5e", 300)
    with pytest.raises(ValueError, match="No topology of 'cuda:l4'"):
        parse_target("cuda:l4", 100_000)


def test_a_compiler_that_is_missing_or_of_another_version(monkeypatch):
    versions = {"jaxlib": "0.10.2", "flatbuffers": "25"}
    monkeypatch.setattr(_targets, "_version", versions.get)
    with pytest.raises(
        TargetUnavailableError, match=r"needs libtpu.*pip install 'jaxmp\[audit-tpu\]'"
    ):
        require_compiler(parse_target("tpu:v4"))
    versions |= dict.fromkeys(("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12"), "0.10.2")
    with pytest.raises(TargetUnavailableError, match=r"needs jax-cuda12-pjrt.*audit-cuda"):
        require_compiler(parse_target("cuda:t4"))
    versions["jax-cuda12-pjrt"] = "0.9.0"
    with pytest.raises(TargetUnavailableError, match=r"0.9.0 does not fit jaxlib 0.10.2.*=0.10.2'"):
        require_compiler(parse_target("cuda:t4"))
    versions["jax-cuda12-pjrt"] = "0.10.2"
    require_compiler(parse_target("cuda:t4"))
    versions["libtpu"] = "0.0.1"
    require_compiler(parse_target("tpu:v4"))
    assert "libtpu 0.0.1 is installed" in _targets.version_hint(parse_target("tpu:v4"))
    assert _targets.version_hint(parse_target("cuda:t4")) == ""


def test_the_child_does_not_inherit_settings_of_compilers(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag --xla_dump_to=here")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "here")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--no_such_flag")
    monkeypatch.setattr(_targets, "_toolkit", lambda: tmp_path)
    for text in ("tpu:v5e", "cuda:t4"):
        environment = child_environment(parse_target(text))
        assert "here" not in str(environment)
        assert "no_such_flag" not in str(environment)
        assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["PATH"].split(os.pathsep)[0] == str(tmp_path / "bin")
