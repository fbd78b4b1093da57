"""What the tests of autocast share: inputs, and looking into jaxprs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp._jaxpr import inner_jaxprs, open_jaxpr

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


UNIT = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24}


PLAIN = ("dot_general", "conv_general_dilated", "ragged_dot_general")


both = pytest.mark.parametrize("compute", [BF16, F16], ids=["bf16", "f16"])


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), F32)


def drawn(init, *args):
    """Variables of a model without the time to compile how it draws them."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        fan_in = max(1, int(np.prod(leaf.shape[:-1])))
        return jnp.asarray(rng.standard_normal(leaf.shape) / fan_in**0.5, leaf.dtype)

    return jax.tree.map(draw, jax.eval_shape(init, *args))


def autocast(fun, compute=BF16):
    return jaxmp.autocast(fun, jaxmp.Policy(F32, compute, F32))


def eqns_in(jaxpr):
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from eqns_in(inner.jaxpr)


def traced(fun, *args):
    return list(eqns_in(jax.make_jaxpr(fun)(*args)))


def dtypes_of(eqns, *names):
    """The dtypes of what goes into the operations of these names, in the order of the program."""
    return [
        tuple(v.aval.dtype.type for v in eqn.invars) for eqn in eqns if eqn.primitive.name in names
    ]


def computed_in(eqns):
    """The dtype that each product of floats is computed in, in the order of the program."""
    return [
        np.dtype(eqn.params.get("compute_dtype", eqn.outvars[0].aval.dtype)).type
        for eqn in eqns
        if eqn.primitive.name in ("mixed_product", *PLAIN)
        and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
    ]
