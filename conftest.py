"""Settings for every test, the doctests of the package and the code blocks of the README."""

import os

# Several virtual devices, for the tests of meshes; read when JAX starts.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import settings
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

import jaxmp

jax.config.update("jax_numpy_dtype_promotion", "strict")

# The same examples in every run, and no verdict by the clock: compilation takes its time.
settings.register_profile("jaxmp", deadline=None, derandomize=True)
settings.load_profile("jaxmp")


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    names = {"jax": jax, "jaxmp": jaxmp, "jnp": jnp, "np": np, "optax": optax}
    doctest_namespace.update(names)


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()], patterns=["README.md", "docs/*.md"]
).pytest()
