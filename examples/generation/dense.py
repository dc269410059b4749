"""One request at a time, through a padded cache, with attention of JAX's own or of `jax_mfa`: what paged and batched
generation is compared with. It shares the decoder with it, and nothing else."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_mfa
from generation import sampling
from generation.model import Decoder
from generation.sampling import GREEDY, Sampling


class Dense:
    """A decoder with caches `[1, S, K, H]`.

    Args:
      dtype: of the caches.
      stock: attend by `jax.nn.dot_product_attention`, or where a decoder caps its scores, which that cannot, by plain
        `jax.numpy`.
    """

    def __init__(self, decoder: Decoder, length: int, dtype: str = "float32", stock: bool = False, jit=jax.jit):
        self.config, self.length, self.dtype, self.stock = decoder.config, length, jnp.dtype(dtype), stock
        self._graph, self._state = nnx.split(decoder)
        self._step = jit(self._traced, donate_argnums=1)

    def generate(self, prompt: list[int], count: int, choice: Sampling = GREEDY, ends=frozenset()) -> list[int]:
        """What follows a prompt: `count` tokens, fewer where one of `ends` comes."""
        config = self.config
        empty = lambda: jnp.zeros((1, self.length, config.kv_heads, config.head_size), self.dtype)
        caches = [(empty(), empty()) for _ in range(config.layers)]
        chunk, start, tokens = prompt, 0, list(prompt)
        for _ in range(count):
            # prompts in powers of four; what stands behind them is overwritten later, and seen by none of them
            size = 1 if len(chunk) == 1 else next(4**i for i in range(2, 16) if 4**i >= len(chunk))
            size = min(size, self.length - start)
            padded = np.pad(np.array(chunk, np.int32), (0, size - len(chunk)))
            row = sampling.rows([choice], [len(tokens)], 1)
            token, caches = self._step(self._state, caches, padded, np.int32(start), np.int32(len(chunk)), row)
            start += len(chunk)
            chunk = [int(token)]
            tokens += chunk
            if chunk[0] in ends:
                break
        return tokens[len(prompt) :]

    def _traced(self, state, caches, tokens, start, count, row):
        decoder, caches = nnx.merge(self._graph, state), list(caches)
        lengths = start[None] + len(tokens)

        def attend(layer, q, k, v, **facts):
            new = [x.astype(self.dtype)[None] for x in (k, v)]
            caches[layer] = tuple(
                jax.lax.dynamic_update_slice(cache, x, (0, start, 0, 0)) for cache, x in zip(caches[layer], new)
            )
            q_ = q.astype(self.dtype)[None]
            if self.stock:
                return _stock(q_, *caches[layer], lengths, **facts)[0].astype(q.dtype)
            return jax_mfa.decode_attention(q_, *caches[layer], lengths, **facts)[0].astype(q.dtype)

        hidden = decoder(tokens, start + jnp.arange(len(tokens)), attend)
        logits = decoder.logits(jax.lax.dynamic_index_in_dim(hidden, count - 1, keepdims=True))
        return sampling.choose(logits, **row)[0], caches


def _stock(q, k, v, lengths, scale, local_window_size, logits_soft_cap):
    t, s = q.shape[1], k.shape[1]
    position, column = lengths[:, None, None, None] - t + jnp.arange(t)[:, None], jnp.arange(s)
    mask = column <= position
    if local_window_size is not None:
        mask &= column >= position - local_window_size[0]
    if logits_soft_cap is None:
        wide = q.dtype if q.dtype != jnp.float16 else jnp.float32  # XLA's CPU backend has no float16 there
        attend = functools.partial(jax.nn.dot_product_attention, mask=mask, scale=scale)
        return attend(q.astype(wide), k.astype(wide), v.astype(wide))
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v)
