"""Settings for every test, the doctests of the package and the code blocks of the README."""

import os

# Read when JAX starts. Several virtual devices, for the tests of meshes, which wait for each other
# as long as it takes: by default XLA ends the process after 40 seconds, and a busy machine may need
# them. Each works in the order of the program: XLA otherwise lets devices begin with different ones
# of two collectives that need nothing of each other, and where threads are few they wait for ever.
# Most programs run once, on little data, so that compilation takes the time: it optimizes less, and
# what one worker, script or run has compiled the others load.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600 "
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
)
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", os.path.join(os.path.dirname(__file__), ".jax_cache")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

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


def pytest_addoption(parser):
    """Adds the option for the breadth of the tests without their depth."""
    parser.addoption(
        "--first-parameters",
        action="store_true",
        help="run each parametrized test with the first of its sets of parameters only",
    )


def pytest_collection_modifyitems(config, items):
    """Leaves each test its first parameters, if asked for."""
    if not config.getoption("--first-parameters"):
        return
    first = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = first.values()


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    names = {"jax": jax, "jaxmp": jaxmp, "jnp": jnp, "np": np, "optax": optax}
    doctest_namespace.update(names)


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()], patterns=["README.md", "docs/*.md"]
).pytest()
