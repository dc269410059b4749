"""Which token follows: greedy, or drawn by temperature, top-k and top-p.

What is drawn depends on the logits, the request's seed and the token's position alone, so a request gets the same
tokens whatever else is in its batch, in however many steps they are computed, and after it was preempted.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen.

    Attributes:
      temperature: 0 takes the likeliest token; the nearer to 0, the surer it is taken.
      top_k: only so many of the likeliest; 0 for all.
      top_p: only the likeliest that together have this probability.
      seed: of what is drawn.

    Raises:
      ValueError: naming the attribute.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must not be negative, and finite, got {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must lie in 0..2**31 - 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie in 0..2**32 - 1, got {self.seed}")


GREEDY = Sampling()


def rows(samplings: list[Sampling], positions: list[int], size: int) -> dict[str, np.ndarray]:
    """What `choose` needs, for `size` rows, of which the first are these."""
    made = {
        "temperature": np.zeros(size, np.float32),
        "top_k": np.zeros(size, np.int32),
        "top_p": np.ones(size, np.float32),
        "seed": np.zeros(size, np.uint32),
        "position": np.zeros(size, np.int32),
    }
    for i, (x, position) in enumerate(zip(samplings, positions)):
        for name in ("temperature", "top_k", "top_p", "seed"):
            made[name][i] = getattr(x, name)
        made["position"][i] = position
    return made


def choose(logits, temperature, top_k, top_p, seed, position):
    """A token for each row of float32 `logits` `[R, vocabulary]`, which stands at `position` `[R]`.

    Adding Gumbel noise and taking the largest draws from the softmax; noise belongs to a token's number, whichever
    tokens are left out.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    largest = logits.max(axis=-1, keepdims=True)
    # rows whose largest logit is not finite have no softmax, and no number smaller than the least normal one divides
    draws = (temperature > 0) & jnp.isfinite(largest[:, 0])
    divisor = jnp.where(draws, jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny), 1)

    def drawn():
        # differences from the largest logit: a quotient may be -inf then, and never inf
        scaled = jnp.where(draws[:, None], logits - largest, 0) / divisor[:, None]
        noise = jax.vmap(lambda s, p: jax.random.gumbel(jax.random.fold_in(jax.random.key(s), p), logits.shape[1:]))(
            seed, position
        )

        def filtered():
            order = jnp.argsort(scaled, axis=-1, descending=True)
            ranked = jnp.take_along_axis(scaled, order, axis=-1)
            likely = jax.nn.softmax(ranked, axis=-1)
            before = jnp.cumsum(likely, axis=-1) - likely
            rank = jnp.arange(logits.shape[-1])
            most = jnp.where(top_k > 0, top_k, logits.shape[-1])[:, None]
            keep = (rank == 0) | (rank < most) & ((before < top_p[:, None]) | (top_p >= 1)[:, None])
            best = jnp.argmax(jnp.where(keep, ranked + jnp.take_along_axis(noise, order, axis=-1), -jnp.inf), axis=-1)
            return jnp.take_along_axis(order, best[:, None], axis=-1)[:, 0].astype(jnp.int32)

        anyone = jnp.any((top_k > 0) | (top_p < 1))
        chosen = jax.lax.cond(anyone, filtered, lambda: jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32))
        return jnp.where(draws, chosen, greedy)

    return jax.lax.cond(jnp.any(draws), drawn, lambda: greedy)
