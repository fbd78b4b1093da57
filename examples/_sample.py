"""Text from a byte-level model, one byte at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def generate(
    apply: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    prompt: bytes,
    *,
    length: int,
    count: int = 400,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """Continues a prompt.

    Args:
        apply: from parameters and bytes i32[1, T] to the logits [1, T, 256] of the next ones; no
            logit depends on a later byte.
        params: the parameters.
        prompt: at most T bytes.
        length: context length of the model, T.
        count: how many bytes to add.
        temperature: what the logits are divided by.
        seed: of the choices.

    Returns:
        The prompt and what follows.
    """

    @jax.jit
    def sample(params: Any, window: jax.Array, filled: jax.Array, key: jax.Array) -> jax.Array:
        def next_byte(carry: Any, key: jax.Array) -> Any:
            # Shapes are fixed: what lies past `filled` does not matter to a causal model.
            window, filled = carry
            logits = apply(params, window[None])[0, filled - 1]
            byte = jax.random.categorical(key, logits / temperature).astype(jnp.int32)
            window = jnp.where(filled == length, jnp.roll(window, -1), window)
            filled = jnp.minimum(filled + 1, length)
            return (window.at[filled - 1].set(byte), filled), byte

        return jax.lax.scan(next_byte, (window, filled), jax.random.split(key, count))[1]

    window = np.zeros(length, np.int32)
    window[: len(prompt)] = np.frombuffer(prompt, np.uint8)
    sampled = sample(params, window, np.int32(len(prompt)), jax.random.key(seed))
    return (prompt + np.asarray(sampled).astype(np.uint8).tobytes()).decode(errors="replace")
