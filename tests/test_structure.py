"""The shape of the package: layers, public names, docstrings."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import jmp
import pytest

import jaxmp
import jaxmp.checkpoint
import jaxmp.optim
from jaxmp import diagnose, fp8, linen, nnx, sharding

PACKAGE = Path(jaxmp.__file__).parent

# A module imports only from lower layers, or from its own package.
LAYERS = {
    "_errors": 0,
    "_dtypes": 0,
    "_tree": 0,
    "_rounding": 0,
    "_devices": 0,
    "_checksum": 0,
    "_table": 0,
    "policy": 1,
    "loss_scale": 1,
    "_jaxpr": 1,
    "_rebind": 1,
    "_dataflow": 1,
    "_widen": 1,
    "_mapped": 1,
    "_placement": 1,
    "_product": 2,
    "_product_lowering": 2,
    "fp8": 2,
    "matmul": 2,
    "autocast": 3,
    "optim": 3,
    "_loss": 4,
    "_fp8_state": 4,
    "_fp8_report": 4,
    "_microbatch": 4,
    "_manifest": 4,
    "checkpoint": 4,
    "sharding": 4,
    "_spread": 4,
    "_gradients": 4,
    "train": 4,
    "audit": 5,
    "diagnose": 5,
    "_modules": 5,
    "_nnx_modules": 5,
    "linen": 5,
    "nnx": 5,
    "_dtype_speed": 6,
    "_known_faults": 6,
    "_doctor": 6,
    "_factory": 6,
    "__main__": 8,
    "__init__": 7,
}
# Within layer 0 and within layer 4 the order is the one above.
ORDER = list(LAYERS)


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py"))


def unit_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_imports_only_lower_layers(path):
    unit = unit_of(path)
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "jaxmp" or len(parts) < 2 or parts[1] == unit:
            continue
        other = parts[1]
        assert LAYERS[other] <= LAYERS[unit], f"{unit} imports {other}"
        assert ORDER.index(other) < ORDER.index(unit), f"{unit} imports {other}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_imports_nothing_private_of_jax_and_flax_only_in_its_leaves(path):
    for name in imports_of(path):
        assert not name.startswith("jax._src")
        assert not name.startswith("flax") or unit_of(path) in {"linen", "nnx", "_nnx_modules"}


PUBLIC_MODULES = {"checkpoint", "diagnose", "fp8", "optim", "sharding"}


def test_public_names_are_exactly_all():
    public = {
        name
        for name, value in vars(jaxmp).items()
        if not name.startswith("_") and (not inspect.ismodule(value) or name in PUBLIC_MODULES)
    }
    assert public == set(jaxmp.__all__)


def test_every_name_of_jmp_is_there():
    assert set(jmp.__all__) <= set(jaxmp.__all__)


@pytest.mark.parametrize(
    "module", [jaxmp, jaxmp.optim, jaxmp.checkpoint, diagnose, fp8, linen, nnx, sharding]
)
def test_every_public_thing_has_a_docstring(module):
    for name in module.__all__:
        thing = getattr(module, name)
        if name != "LossScale":
            assert (inspect.getdoc(thing) or "").strip(), name


def test_import_is_quiet_and_does_not_import_flax():
    code = "import sys, jaxmp; assert 'flax' not in sys.modules; assert 'orbax' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
