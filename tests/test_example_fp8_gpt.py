"""The fp8 example: every layer is computed in the policy's recipe, and every policy learns."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxmp

EXAMPLES = Path(__file__).parents[1] / "examples"

# The examples are scripts that import their neighbours, as Python does for `python fp8_gpt.py`.
sys.path.insert(0, str(EXAMPLES))
fp8_gpt = importlib.import_module("fp8_gpt")

RECIPES = {"fp8-current": "current", "fp8-delayed": "delayed", "mxfp8": "mxfp8"}


@pytest.mark.parametrize("size", [fp8_gpt.Size(), fp8_gpt.SMOKE], ids=["default", "smoke"])
@pytest.mark.parametrize("name", RECIPES)
def test_all_matmuls_of_layers_are_in_fp8(name, size):
    policy, model = fp8_gpt.POLICIES[name], fp8_gpt.GPT(size.width, size.depth)
    assert policy.recipe == RECIPES[name]
    tokens = jax.ShapeDtypeStruct((size.batch, size.length + 1), np.int32)
    with jax.numpy_dtype_promotion("standard"):  # Flax's layers rely on implicit promotion
        params = jax.eval_shape(lambda x: model.init(jax.random.key(0), x[:1, 1:]), tokens)
        grad_fn = jax.grad(jaxmp.autocast(fp8_gpt.make_loss(model), policy))
        report = jaxmp.audit(grad_fn, params, tokens, target=None, policy=policy)
    of_layers = [row for row in report.products if row.parameter]
    assert len(of_layers) == 3 * (6 * size.depth + 1)  # fprop, dgrad and wgrad
    for row in of_layers:
        assert all(dtype.startswith("float8") for dtype in row.operand_dtypes)


@pytest.mark.slow
def test_smoke(tmp_path):
    script = str(EXAMPLES / "fp8_gpt.py")
    names = ["bfloat16", "fp8-delayed"]
    options = ["--smoke", "--policy", ",".join(names), "--out", str(tmp_path)]
    command = [sys.executable, "-W", "error", script, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert re.search("policy .* train loss +val loss", done.stdout)
    for name in names:
        shown = re.findall(rf"^{name}: step .* val=(\S+)", done.stderr, re.MULTILINE)
        first, *_, last = map(float, shown)
        assert len(shown) == fp8_gpt.CHUNKS
        assert last < first - 0.5
        row = re.search(rf"^ *{name} +\S+ +\S+ +(\S+) +(\S+)", done.stdout, re.MULTILINE)
        assert float(row[1]) < first - 0.5
        assert abs(float(row[2]) - last) < 1e-3  # three decimals are shown while it trains


def test_an_unknown_policy_is_an_error_in_a_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        fp8_gpt.main(["--policy", "fp8-current,mxfp9"])
    assert "--policy names 'mxfp9', but knows only float32" in capsys.readouterr().err
