"""What the `attention_fn`s of linen and nnx share: who runs a call, jax_mfa or flax itself, and flax's conventions in
jax_mfa's terms. Knows arrays and flax's arguments, not its modules.
"""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np

from jax_mfa.api import dot_product_attention
from jax_mfa.specification import DTYPES, accumulation_dtype

logger = logging.getLogger("jax_mfa.flax")


def as_bool(mask):
    """A mask as flax means it, of any dtype: what is not zero is visible."""
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    return mask if mask.dtype == np.bool_ else mask != 0


def seed_of(rng):
    """A dropout seed, uint32[2], from a JAX random key of any kind, new style or raw."""
    return jax.random.bits(rng, (2,), jnp.uint32)


def _widens(x, scores: tuple[int, ...]) -> bool:
    """Whether `x` gives scores more axes, or longer ones, than query and key do."""
    try:
        return np.broadcast_shapes(np.shape(x), scores) != scores
    except ValueError:
        return False  # it does not broadcast at all, and jax_mfa's own check will name it


def _precision_met(precision) -> bool:
    """Whether jax_mfa's products are at least as precise as asked."""
    wanted = precision if isinstance(precision, tuple) else (precision,)
    try:
        levels = {jax.lax.Precision(p) for p in wanted}
    except ValueError:
        return False  # a particular algorithm
    # a CPU multiplies float32 as float32 whatever the precision; other platforms may round inputs by default
    return levels == {jax.lax.Precision.DEFAULT} or jax.default_backend() == "cpu"


def drops(deterministic, dropout_rate, dropout_rng) -> bool:
    """Whether dropout is on, which needs a random key whoever runs the call."""
    on = not deterministic and dropout_rate > 0
    if on and dropout_rng is None:
        raise ValueError(f"dropout_rng must be given with dropout_rate = {dropout_rate}, got None")
    return on


def why_stock(query, key, value, bias, mask, *, broadcast_dropout, dropping, precision, module, custom) -> str | None:
    """Why flax's own function must run a call, starting with the argument's name; None where jax_mfa can.

    Args:
      query, key, value, bias, mask: as flax's function takes them, after promotion.
      broadcast_dropout, precision, module: as flax's function takes them.
      dropping: whether dropout is on.
      custom: flax's arguments that replace the arithmetic, by name.
    """
    if module is not None:
        return "module: weights can be sown only where the whole matrix exists"
    for name, replacement in custom.items():
        if replacement is not None:
            return f"{name}: the arithmetic is replaced"
    if dropping and broadcast_dropout:
        return "broadcast_dropout: one dropout mask for all batches and heads"
    if not _precision_met(precision):
        return f"precision: {precision}"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype.name not in DTYPES:
            return f"{name}: dtype {x.dtype.name}"
    if query.ndim >= 3 and key.ndim >= 3:
        scores = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
        for name, x in (("bias", bias), ("mask", mask)):
            if x is not None and _widens(x, scores):
                return f"{name}: shape {list(np.shape(x))} widens scores of shape {list(scores)}"
    return None


def give_way(reason: str, implementation: str | None):
    """Records that flax's own function runs; refuses where the caller named an implementation."""
    if implementation is not None:
        raise NotImplementedError(
            f"implementation={implementation!r} cannot run this call, only flax's own attention can: {reason}"
        )
    logger.info("flax's own attention runs this call: %s", reason)


def with_causal(mask, is_causal: bool, query, key):
    """`mask` with the causal rule in it, for a function of flax that may not know the rule."""
    if not is_causal:
        return mask
    t, s = query.shape[-3], key.shape[-3]
    rank = max(2, 0 if mask is None else np.ndim(mask))
    causal = jnp.asarray(np.tri(t, s, dtype=bool)).reshape((1,) * (rank - 2) + (t, s))
    return causal if mask is None else jnp.logical_and(as_bool(mask), causal)


def blank_unseeing(out, mask):
    """`out` with zeros in the rows that `mask` leaves nothing to see, so that both routes agree on them."""
    if mask is None:
        return out
    mask = as_bool(mask)
    mask = mask.reshape((1,) * (out.ndim - mask.ndim) + mask.shape)
    return jnp.where(jnp.swapaxes(mask.any(-1), -1, -2)[..., None], out, jnp.zeros_like(out))


def attend(query, key, value, bias, mask, *, dropout_rng, dropout_rate, is_causal, implementation):
    """jax_mfa's attention with flax's conventions for bias, mask and dropout."""
    dropout = {}
    if dropout_rate > 0:
        dropout = {"dropout_rate": dropout_rate, "dropout_seed": seed_of(dropout_rng)}
    if bias is not None:
        bias = jnp.asarray(bias)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            bias = bias.astype(accumulation_dtype(query.dtype))
    return dot_product_attention(
        query, key, value, bias, as_bool(mask), is_causal=is_causal, implementation=implementation, **dropout
    )
