import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmp import _dtypes


@pytest.mark.parametrize(
    ("value", "want"),
    [
        ("float32", jnp.float32),
        ("f32", jnp.float32),
        ("fp32", jnp.float32),
        ("full", jnp.float32),
        ("bf16", jnp.bfloat16),
        ("float16", jnp.float16),
        ("half", jnp.float16),
        ("f64", jnp.float64),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.dtype("bfloat16"), jnp.bfloat16),
        (ml_dtypes.bfloat16, jnp.bfloat16),
        (np.float16, jnp.float16),
        (float, jnp.float64),
    ],
)
def test_parse_dtype_gives_canonical_np_dtypes(value, want):
    got = _dtypes.parse_dtype(value)
    assert type(got) is type(np.dtype(want))
    assert got == np.dtype(want)
    assert hash(got) == hash(np.dtype(want))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            "fp61",
            "Unknown dtype 'fp61'. Use one of float32, bfloat16, float16, float64. "
            "Did you mean 'float16'?",
        ),
        ("flaot32", "Did you mean 'float32'?"),
        ("float8_e4m3fn", "recipe"),
        (jnp.float8_e5m2, "recipe"),
        (jnp.int32, "Unknown dtype"),
        (object(), "Unknown dtype"),
        ("", "Unknown dtype ''"),
        (None, "Unknown dtype 'None'"),
    ],
)  # fmt: skip
def test_parse_dtype_names_value_rule_and_remedy(value, words):
    with pytest.raises(ValueError, match="Unknown dtype") as error:
        _dtypes.parse_dtype(value)
    assert words in str(error.value)


def test_dtype_of_knows_what_jax_makes_of_a_leaf():
    want_float64 = jax.dtypes.canonicalize_dtype(np.float64)
    assert _dtypes.dtype_of(np.ones(2)) == want_float64
    assert _dtypes.dtype_of(np.float64(1)) == want_float64
    assert _dtypes.dtype_of(1.0) == want_float64
    assert _dtypes.dtype_of(True) == jnp.bool_
    assert _dtypes.dtype_of(jnp.ones(2, jnp.float8_e4m3fn)) == jnp.float8_e4m3fn
    assert _dtypes.dtype_of(jax.ShapeDtypeStruct((2,), jnp.bfloat16)) == jnp.bfloat16
    float0 = np.zeros((2,), jax.dtypes.float0)
    for opaque in (None, "x", print, object(), jax.random.key(0), float0, np.array(["a"])):
        assert _dtypes.dtype_of(opaque) is None


def test_no_device_is_needed_to_name_a_dtype():
    # NumPy finds np.dtype("float16") == "half", and "half" depends on the device.
    code = (
        "import numpy as np, jaxmp\n"
        "assert jaxmp.get_policy('mixed_float16').compute_dtype == np.float16\n"
        "assert jaxmp.Policy(compute_dtype=np.dtype('float16')).compute_dtype == np.float16\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
