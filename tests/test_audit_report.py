"""The report as text, JSON, comparison, figure and assertions."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from jaxmp.audit import Report, audit
from jaxmp.audit._format import parse_bytes, quantity, short

BF16, F32 = jnp.bfloat16, jnp.float32


def step(w, x):
    def loss(w):
        return jnp.sum(jnp.tanh(x @ w).astype(F32) ** 2)

    return jax.value_and_grad(loss)(w)


def spec(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def report_of(dtype, **options):
    return audit(step, spec(64, 32, dtype=dtype), spec(128, 64, dtype=dtype), **options)


@pytest.fixture(scope="module")
def half():
    return report_of(BF16)


@pytest.fixture(scope="module")
def full():
    return report_of(F32)


class TestText:
    def test_says_what_matters(self, half):
        text = str(half)
        assert "Audit of step, policy mixed_bfloat16 (read off the program)" in text
        assert "bf16 × bf16" in text
        assert "524 kFLOP" in text
        assert "100.0%" in text
        assert "Compiled for cpu" in text
        assert "temporary" in text

    def test_of_an_empty_program(self):
        text = str(audit(lambda x: x, spec(3), target=None))
        assert "No matmuls or convolutions." in text
        assert "No traps." in text

    def test_without_rich(self, half):
        code = (
            "import sys; sys.modules['rich'] = None\n"
            "from jaxmp._table import render\n"
            "rows = [['fprop', '1'], ['dgrad', '25']]\n"
            "print(render('Title', ['pass', 'count'], rows, right={1}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines() == [
            "Title",
            "pass   count",
            "-----  -----",
            "fprop      1",
            "dgrad     25",
        ]

    def test_many_traps_are_cut(self):
        def fun(x):
            for i in range(15):
                with jax.named_scope(f"layer_{i}"):
                    x = x @ x
            return x

        report = audit(fun, spec(4, 4), target=None, policy="mixed_bfloat16")
        assert len(report.traps) == 15
        assert "Traps: 15" in str(report)
        assert "… and 11 more" in str(report)


class TestData:
    def test_json_is_the_same_and_complete(self, half):
        data = half.to_dict()
        assert data == json.loads(half.to_json(indent=2))
        assert data["products"][0]["operand_dtypes"] == ["bfloat16", "bfloat16"]
        assert data["compiled"]["memory"]["arguments"] == 2 * (64 * 32 + 128 * 64)
        assert set(data) == set(Report.__dataclass_fields__)

    def test_flops_by_dtype_and_pass(self, half):
        forward = 2 * 128 * 64 * 32
        assert half.flops() == 2 * forward
        assert half.flops(("bfloat16", "bfloat16"), "wgrad") == forward
        assert half.flops(("float32", "float32")) == 0

    def test_float32_is_compiled_if_asked(self, full):
        report = report_of(BF16, float32=True)
        assert report.compiled_float32.memory.arguments == full.compiled.memory.arguments
        assert "The same in float32" in str(report)
        assert full.compiled_float32 is None

    def test_program_that_is_float32_has_nothing_to_compare(self):
        assert report_of(F32, float32=True).compiled_float32 is None


class TestDiff:
    def test_side_by_side(self, full, half):
        diff = full.diff(half)
        values = diff.to_dict()
        assert values["flops"] == [full.flops(), half.flops()]
        assert values["low_precision_fraction"] == [0.0, 1.0]
        assert values["argument_bytes"][1] * 2 == values["argument_bytes"][0]
        text = str(diff)
        assert "float32" in text
        assert "mixed_bfloat16" in text
        assert "0.5×" in text

    def test_names_of_two_functions(self, half):
        other = audit(jax.jit(lambda x: x @ x), spec(4, 4), target=None)
        assert "<lambda>" in str(half.diff(other))
        assert "left" in str(half.diff(half))


class TestPlot:
    def test_draws_and_writes_only_if_asked(self, half, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        figure = half.plot()
        assert not list(tmp_path.iterdir())
        flops, memory = figure.axes
        assert sum(bar.get_height() for bar in flops.patches) == pytest.approx(half.flops() / 1e9)
        assert memory.get_ylabel() == "GB of one device"
        half.plot(tmp_path / "report.png")
        assert (tmp_path / "report.png").stat().st_size > 1000
        assert len(audit(step, spec(4, 4), spec(4, 4), target=None).plot().axes) == 1


class TestAssertions:
    def test_low_precision(self, full, half):
        half.assert_low_precision()
        full.assert_low_precision(min_fraction=0.0)
        with pytest.raises(AssertionError, match=r"0.0% of the FLOPs of step .* 99.0%") as error:
            full.assert_low_precision()
        assert "fprop float32 × float32, 524 kFLOP" in str(error.value)

    def test_low_precision_of_nothing(self):
        report = audit(lambda x: x, spec(3), target=None)
        with pytest.raises(AssertionError, match="no matmul"):
            report.assert_low_precision()

    def test_no_traps(self, half):
        def fun(h):
            return jax.nn.softmax(h)

        report = audit(fun, spec(8, 8, dtype=BF16), target=None)
        half.assert_no_traps(allow=["rounded-weight-gradient"])
        report.assert_no_traps(allow=["half-softmax"])
        with pytest.raises(AssertionError, match=r"half-softmax at test_audit_report\.py"):
            report.assert_no_traps()
        with pytest.raises(ValueError, match="Did you mean 'half-softmax'"):
            report.assert_no_traps(allow=["half-sofmax"])

    def test_fits(self, half):
        half.assert_fits("1GB")
        with pytest.raises(AssertionError, match=r"step needs .* 1 kB are there"):
            half.assert_fits("1kB")
        with pytest.raises(ValueError, match="Give a size"):
            half.assert_fits()
        with pytest.raises(ValueError, match="target"):
            report_of(BF16, target=None).assert_fits("1GB")
        with pytest.raises(ValueError, match="Bad size"):
            half.assert_fits("many")


class TestPolicy:
    def test_is_read_off_the_program(self):
        assert report_of(F32, target=None).policy == "float32"
        assert report_of(jnp.float16, target=None).policy == "mixed_float16"
        assert report_of(BF16, target=None).policy_inferred

    def test_is_held_against_the_program(self):
        report = report_of(F32, target=None, policy="mixed_bfloat16")
        assert not report.policy_inferred
        assert {trap.kind for trap in report.traps} == {"wide-product"}
        with pytest.raises(ValueError, match="Unknown dtype or preset"):
            report_of(F32, target=None, policy="mixed_bfloat")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GB", 16 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("7", 7),
        (9, 9),
        ("2kb", 2000),
        ("3TB", 3 * 10**12),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1 parsec", "nanGB"])
def test_bad_sizes(text):
    with pytest.raises(ValueError, match="Bad size"):
        parse_bytes(text)


def test_numbers_for_people():
    assert [quantity(n, "B") for n in (0, 999, 999_499, 1_000_000)] == [
        "0 B",
        "999 B",
        "999 kB",
        "1 MB",
    ]
    assert [short(name) for name in ("float8_e5m2", "bool", "uint8")] == ["e5m2", "bool", "u8"]


def test_reports_are_frozen_and_equal_ones_equal():
    report = report_of(BF16, target=None)
    assert report == report_of(BF16, target=None)
    with pytest.raises(AttributeError):
        report.function = "other"


def test_name_in_the_package_is_the_function():
    assert jaxmp.audit is audit
