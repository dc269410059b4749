"""Attention in 40 lines: a call, its gradient, a mask, a cache, and what was chosen.

python examples/attention.py
"""

import jax
import jax.numpy as jnp

import jax_mfa
from jax_mfa.cli.command_line import fit_output_to_the_terminal


def main() -> None:
    fit_output_to_the_terminal()
    keys = jax.random.split(jax.random.key(0), 3)
    # batch entries, tokens, heads, channels: eight query heads share two key heads
    query = jax.random.normal(keys[0], (2, 1024, 8, 64))
    key, value = (jax.random.normal(x, (2, 1024, 2, 64)) for x in keys[1:])

    # the arguments are those of jax.nn.dot_product_attention
    attend = jax.jit(lambda q, k, v: jax_mfa.dot_product_attention(q, k, v, is_causal=True, local_window_size=(255, 0)))
    out = attend(query, key, value)
    print("output   ", out.shape, out.dtype)

    gradients = jax.jit(jax.grad(lambda *x: jnp.square(attend(*x)).sum(), argnums=(0, 1, 2)))(query, key, value)
    print("gradients", *(x.shape for x in gradients))

    # decoding: a cache with a length of its own for each batch entry
    caches = jnp.zeros((2, 2048, 2, 64)), jnp.zeros((2, 2048, 2, 64))
    lengths = jnp.zeros(2, jnp.int32)
    step = jax.jit(lambda q, k, v, caches, lengths: jax_mfa.cache.attend(q, k, v, *caches, lengths))
    _, *caches, lengths = step(query, key, value, caches, lengths)
    token, *caches, lengths = step(query[:, :1], key[:, :1], value[:, :1], caches, lengths)
    print("decoding ", token.shape, "after", lengths)

    print(jax_mfa.explain(query, key, value, is_causal=True))


if __name__ == "__main__":
    main()
