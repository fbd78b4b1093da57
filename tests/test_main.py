"""The command line: what it loads, what it prints where, and its exit status."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest

import jaxmp
from jaxmp.__main__ import main
from jaxmp._factory import Program, UsageError, load_factory, make_program
from jaxmp.audit._targets import TargetUnavailableError, parse_target, require_compiler

STEP = """
import sys

import jax
import jax.numpy as jnp

import sibling

print("imported")


def loss(w, x, scale=1.0):
    print("traced")
    return scale * jnp.sum((x @ w).astype(jnp.float32) ** 2)


def make_wide():
    return jax.grad(loss), (jnp.ones((64, 64)), jnp.ones((8, 64)))


def make_narrow(policy):
    print("made")
    w, x = policy.cast_to_compute((jnp.ones((64, 64)), jnp.ones((8, 64))))
    return jax.grad(loss), (w, x), {"scale": jnp.float32(sibling.SCALE)}


def make_by_default(policy=None):
    return make_narrow(policy or sibling.POLICY)


def make_list():
    return [loss, ()]


def make_one():
    return (loss,)


def make_array_args():
    return loss, jnp.ones(3)


def make_text():
    return "loss", ()


def make_bad_kwargs():
    return loss, (), {1: 2}


def make_reserved():
    return loss, (), {"policy": 2}


def make_of_batch(batch_size):
    raise AssertionError("not called")


def make_error():
    raise KeyError("my own error")


def untraceable(x):
    raise ValueError("my function's error")


def make_untraceable():
    return untraceable, (jnp.ones(3),)


class Maker:
    pass


number = 3
"""
SIBLING = "import jaxmp\nSCALE = 2.0\nPOLICY = jaxmp.get_policy('mixed_bfloat16')\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a script, its sibling, and a package with the same; it is the current one."""
    for place in (tmp_path, tmp_path / "pkg"):
        place.mkdir(exist_ok=True)
        (place / "step_script.py").write_text(STEP)
        (place / "sibling.py").write_text(SIBLING)
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "lacking.py").write_text("import no_such_package\n")
    (tmp_path / "lacks_too").mkdir()
    (tmp_path / "lacks_too" / "__init__.py").write_text("import no_such_package\n")
    (tmp_path / "lacks_too" / "inner.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        origin = getattr(sys.modules[name], "__file__", None)
        if origin and Path(origin).is_relative_to(tmp_path):
            del sys.modules[name]


def made(text, policy=None):
    return make_program(load_factory(text), policy)


# What is loaded.


@pytest.mark.parametrize("module", ["step_script.py", "step_script", "./step_script.py"])
def test_a_module_of_the_current_folder_is_found(folder, module):
    program = made(f"{module}:make_wide")
    assert isinstance(program, Program)
    assert (len(program.args), program.kwargs) == (2, {})


@pytest.mark.parametrize("module", ["pkg/step_script.py", "pkg.step_script"])
def test_a_module_finds_its_siblings(folder, module):
    (folder / "sibling.py").unlink()
    factory = load_factory(f"{module}:make_wide")
    assert Path(sys.modules["sibling"].__file__) == folder / "pkg" / "sibling.py"
    assert factory.__module__ == module.removeprefix("pkg/").removesuffix(".py")


def test_a_module_elsewhere_is_found_by_its_path(folder, monkeypatch):
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert made("../step_script.py:make_wide").args
    assert made(f"{folder / 'step_script.py'}:make_wide").args


def test_a_script_may_have_the_name_of_a_library(folder):
    (folder / "optax.py").write_text("def make():\n    return len, ((),)\n")
    before = sys.modules["optax"]
    assert made("optax.py:make").function is len
    assert sys.modules["optax"] is before


def test_a_package_does_not_hide_the_standard_library(folder):
    (folder / "pkg" / "colorsys.py").write_text("raise AssertionError('hidden')\n")
    (folder / "pkg" / "uses.py").write_text("import colorsys\n\ndef make():\n    return len, ()\n")
    sys.modules.pop("colorsys", None)
    assert made("pkg.uses:make").function is len


def test_the_policy_goes_to_a_factory_that_takes_one(folder):
    policy = jaxmp.get_policy("mixed_float16")
    args = made("step_script.py:make_narrow", policy).args
    assert {leaf.dtype.name for leaf in jax.tree.leaves(args)} == {"float16"}
    args = made("step_script.py:make_by_default").args
    assert {leaf.dtype.name for leaf in jax.tree.leaves(args)} == {"bfloat16"}
    args = made("step_script.py:make_wide", policy).args
    assert {leaf.dtype.name for leaf in jax.tree.leaves(args)} == {"float32"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step_script", "is not MODULE:FACTORY"),
        ("step_script:", "is not MODULE:FACTORY"),
        (":make_wide", "is not MODULE:FACTORY"),
        ("step_script:make wide", "is not MODULE:FACTORY"),
        ("step_scrpt.py:make_wide", "No file 'step_scrpt.py'"),
        ("pkg/step_script:make_wide", "No file 'pkg/step_script'"),
        ("no_such_module:make", "No module 'no_such_module'"),
        ("pkg.no_such:make", "No module 'pkg.no_such'"),
        ("step_script.deeper:make", "No module 'step_script.deeper'"),
        ("no_such.deeper:make", "No module 'no_such.deeper'"),
        (".step_script:make", "No module '.step_script'"),
        ("a b:make", "No module 'a b'"),
        ("step_script.py:make_wied", "has no function 'make_wied'. Did you mean 'make_wide'?"),
        ("step_script.py:qqq", "It has loss, make_wide, make_narrow"),
        ("step_script.py:number", "has a int, no function, 'number'"),
        ("step_script.py:make_list", "returned a list. A factory returns (function, args)"),
        ("step_script.py:make_one", "returned a tuple of 1."),
        ("step_script.py:make_array_args", "as args. A factory returns"),
        ("step_script.py:make_text", "returned a str as function."),
        ("step_script.py:make_bad_kwargs", "returned {1: 2} as kwargs."),
        ("step_script.py:make_reserved", "keyword argument 'policy', a name that jaxmp.audit"),
        ("step_script.py:make_of_batch", "missing a required argument: 'batch_size'. Wrap it"),
        ("step_script.py:make_narrow", "argument: 'policy'. Give it a policy with --policy"),
        ("step_script.py:Maker", "returned a Maker."),
    ],
)
def test_what_is_not_there_is_an_error_of_usage(folder, capsys, text, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        made(text)
    capsys.readouterr()
    assert main(["audit", text]) == 2
    output, errors = capsys.readouterr()
    last = errors.splitlines()[-1]
    assert output == ""
    assert last.startswith("jaxmp audit: error: ")
    assert words in last


@pytest.mark.parametrize("module", ["lacking.py", "lacking", "lacks_too.inner", "lacks_too"])
def test_what_a_module_itself_lacks_is_its_own_error(folder, module):
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        made(f"{module}:make")


# What is printed.


def audit(*args):
    return main(["audit", *args])


def test_audit_prints_a_report_and_nothing_else_to_stdout(folder, capsys):
    assert audit("step_script.py:make_narrow", "--policy", "mixed_bfloat16") == 0
    output, errors = capsys.readouterr()
    assert not {"imported", "made", "traced"} & set(output.splitlines())
    assert {"imported", "made", "traced"} <= set(errors.splitlines())
    assert "bfloat16" in output


def test_json_is_a_list_of_one_report_per_target(folder, capsys):
    command = ["step_script.py:make_wide", "--json"]
    assert audit(*command) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["compiled"]["target"] == "cpu"
    assert audit(*command, "--target", "cpu", "--target", "attached") == 0
    found = json.loads(capsys.readouterr().out)
    assert [report["compiled"]["target"] for report in found] == ["cpu", "attached"]


def test_the_policy_is_what_the_program_is_held_against(folder, capsys):
    assert audit("step_script.py:make_wide", "--policy", "mixed_float16", "--json") == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert jaxmp.get_policy(report["policy"]) == jaxmp.get_policy("mixed_float16")
    assert report["policy_inferred"] is False


def test_low_precision_can_be_asked_for(folder, capsys):
    wide, narrow = "step_script.py:make_wide", "step_script.py:make_by_default"
    assert audit(wide) == 0
    capsys.readouterr()
    assert audit(wide, "--assert-low-precision") == 1
    output, errors = capsys.readouterr()
    assert "float32" in output, "the report is printed all the same"
    assert "0.0% of the FLOPs" in errors
    assert "Traceback" not in errors
    assert audit(wide, "--assert-low-precision", "0") == 0
    assert audit(narrow, "--assert-low-precision", "0.9", "--target", "cpu") == 0


def test_every_target_is_held_to_the_fraction(folder, capsys):
    command = ("step_script.py:make_wide", "--target=cpu", "--target=attached", "--json")
    assert audit(*command, "--assert-low-precision=0.5") == 1
    output, errors = capsys.readouterr()
    assert len(json.loads(output)) == 2
    assert errors.count("0.0% of the FLOPs") == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "cpuu"], "Unknown target 'cpuu'"),
        (["--target", "cpu", "--target", "tpu:v9"], "Unknown target 'tpu:v9'"),
        (["--target", "tpu:v5e:3x7"], "No topology '3x7'"),
    ],
)
def test_an_unknown_target_is_an_error_before_anything_is_loaded(folder, capsys, options, words):
    assert audit("step_script.py:make_error", *options) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("jaxmp audit: error: ")
    assert words in errors
    assert "imported" not in errors


def test_a_target_whose_compiler_is_missing_says_how_to_get_it(folder, capsys):
    try:
        require_compiler(parse_target("tpu:v5e"))
    except TargetUnavailableError:
        pass
    else:
        pytest.skip("the compiler is installed")
    assert audit("step_script.py:make_error", "--target", "tpu:v5e") == 2
    assert "pip install" in capsys.readouterr().err


def test_a_target_that_is_too_small_is_an_error_of_usage(folder, capsys):
    (folder / "sharded.py").write_text(
        textwrap.dedent(
            """
            import jax
            import jax.numpy as jnp
            from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

            def make():
                sharding = NamedSharding(AbstractMesh((64,), ("data",)), PartitionSpec("data"))
                x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)
                return lambda x: x * 2, (x,)
            """
        )
    )
    assert audit("sharded.py:make", "--target", "cpu") == 2
    errors = capsys.readouterr().err
    assert errors.startswith("jaxmp audit: error: Target 'cpu' has ")
    assert "sharded over 64" in errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "mixed_bfloat61"], "Did you mean 'mixed_bfloat16'?"),
        (["--assert-low-precision", "1.5"], "'1.5' is not a fraction from 0 to 1."),
        (["--assert-low-precision", "nan"], "'nan' is not a fraction from 0 to 1."),
        (["--assert-low-precision", "x.py:make"], "Write MODULE:FACTORY first"),
        (["--timeout", "0"], "'0' is not a positive number."),
        (["--timeout", "inf"], "'inf' is not a positive number."),
        (["--timeout", "soon"], "'soon' is not a positive number."),
    ],
)
def test_an_option_that_is_wrong_is_an_error_of_usage(folder, capsys, options, words):
    with pytest.raises(SystemExit) as exit_:
        audit("step_script.py:make_wide", *options)
    assert exit_.value.code == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert "jaxmp audit: error: " in errors
    assert words in errors


@pytest.mark.parametrize("argv", [[], ["doctr"], ["audit"], ["doctor", "--seconds", "-1"]])
def test_a_command_that_is_wrong_is_an_error_of_usage(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert "error: " in capsys.readouterr().err


# As a person runs it.


def run(*args, cwd=None):
    command = [sys.executable, "-W", "error", "-m", "jaxmp", *args]
    # XLA writes to stderr of features of some processors when it loads what was compiled before.
    env = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, check=False)


def test_an_error_of_the_program_keeps_its_traceback(folder):
    for factory, error in [
        ("make_error", "KeyError: 'my own error'"),
        ("make_untraceable", "ValueError: my function's error"),
    ]:
        done = run("audit", f"step_script.py:{factory}", cwd=folder)
        assert (done.returncode, done.stdout) == (1, "")
        assert "Traceback" in done.stderr
        assert "step_script.py" in done.stderr
        assert error in done.stderr


def test_audit_runs_from_a_shell(folder):
    done = run("audit", "step_script.py:make_wide", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["compiled"]["target"] == "cpu"


def test_doctor_runs_from_a_shell():
    done = run("doctor", "--json", "--seconds", "0.1")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["versions"]["jax"] == jax.__version__
    assert found["speeds"]["speeds"][0]["operand_dtype"] == "float32"


def test_doctor_prints_text(capsys):
    assert main(["doctor", "--seconds", "0.1"]) == 0
    output, errors = capsys.readouterr()
    assert "Recommended: " in output
    assert errors == ""
