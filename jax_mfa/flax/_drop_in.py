"""What the `attention_fn`s of linen and nnx share: who runs a call, jax_mfa or flax itself, and flax's conventions in
jax_mfa's terms. Knows arrays and flax's arguments, not its modules.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_mfa import checks
from jax_mfa.api import Implementation, dot_product_attention
from jax_mfa.arguments import as_array
from jax_mfa.context_parallel.api import SequenceSharding
from jax_mfa.context_parallel.layout import axis_size
from jax_mfa.problem import DTYPES, accumulation_dtype

logger = logging.getLogger("jax_mfa.flax")

BROADCAST_DROPOUT = "broadcast_dropout: one dropout mask for all batches and heads"


def as_bool(mask: ArrayLike) -> Array:
    """A mask as flax means it, of any dtype: what is not zero is visible."""
    mask = as_array("mask", mask, "fibc", "bool or numbers")
    return mask if mask.dtype == np.bool_ else mask != 0


def promotable(query: Any, key: Any, value: Any, dtype: Any) -> tuple[Array, Array, Array]:
    """What flax may promote: arrays of numbers, and a dtype that is one.

    Raises:
      TypeError: naming the argument.
    """
    try:
        jnp.dtype(jnp.float32 if dtype is None else dtype)
    except TypeError:
        raise TypeError(f"dtype must be a dtype or None, got {checks.seen(dtype)}") from None
    letters = {"query": "[..., T, N, H]", "key": "[..., S, K, H]", "value": "[..., S, K, V]"}
    given = zip(letters.items(), (query, key, value))
    query, key, value = (as_array(name, x, "fibc", f"numbers {shape}") for (name, shape), x in given)
    return query, key, value


def sharding_of(sequence_axis: Any) -> SequenceSharding:
    """How sequences are split. Raises `TypeError` or `ValueError`, naming sequence_axis, where it is no mesh axis."""
    if not isinstance(sequence_axis, SequenceSharding):
        for axis in sequence_axis if isinstance(sequence_axis, (tuple, list)) else (sequence_axis,):
            axis_size(axis, "sequence_axis")
    return SequenceSharding.of(sequence_axis)


def seed_of(rng: Array) -> Array:
    """A dropout seed, uint32[2], from a JAX random key of any kind, new style or raw."""
    return jax.random.bits(rng, (2,), jnp.uint32)


def _widens(x: ArrayLike, scores: tuple[int, ...]) -> bool:
    """Whether `x` gives scores more axes, or longer ones, than query and key do."""
    try:
        return np.broadcast_shapes(np.shape(x), scores) != scores
    except ValueError:
        return False  # it does not broadcast at all, and jax_mfa's own check will name it


def _precision_met(precision: Any) -> bool:
    """Whether jax_mfa's products are at least as precise as asked."""
    wanted = precision if isinstance(precision, tuple) else (precision,)
    try:
        levels = {jax.lax.Precision(p) for p in wanted}
    except ValueError:
        return False  # a particular algorithm
    # a CPU multiplies float32 as float32 whatever the precision; other platforms may round inputs by default
    return levels == {jax.lax.Precision.DEFAULT} or jax.default_backend() == "cpu"


def drops(deterministic: bool, dropout_rate: float, dropout_rng: Array | None) -> bool:
    """Whether dropout is on, which needs a random key whoever runs the call."""
    if not 0 <= checks.number("dropout_rate", dropout_rate) < 1:
        raise ValueError(f"dropout_rate must be in the range [0, 1), got {dropout_rate}")
    on = not deterministic and dropout_rate > 0
    if on and dropout_rng is None:
        raise ValueError(f"dropout_rng is required with dropout_rate = {dropout_rate}, got None")
    return on


def why_stock(
    query: Array,
    key: Array,
    value: Array,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    *,
    broadcast_dropout: bool,
    dropping: bool,
    precision: Any,
    module: Any,
    custom: Mapping[str, Any],
) -> str | None:
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
        return BROADCAST_DROPOUT
    if not _precision_met(precision):
        return f"precision: {precision}"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype.name not in DTYPES:
            return f"{name}: dtype {x.dtype.name}"
    if query.ndim >= 3 and key.ndim >= 3:
        scores = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
        for name, term in (("bias", bias), ("mask", mask)):
            if term is not None and _widens(term, scores):
                return f"{name}: shape {list(jnp.shape(term))} widens scores of shape {list(scores)}"
    return None


def give_way(reason: str, implementation: Implementation | None, sequence_axis: Any) -> None:
    """Records that flax's own function runs; refuses where the caller named an implementation or a mesh axis."""
    if sequence_axis is not None:
        raise NotImplementedError(
            f"sequence_axis={sequence_axis!r} cannot run this call, only flax's own attention of whole sequences can: "
            f"{reason}"
        )
    if implementation is not None:
        raise NotImplementedError(
            f"implementation={implementation!r} cannot run this call, only flax's own attention can: {reason}"
        )
    logger.info("flax's own attention runs this call: %s", reason)
    if reason == BROADCAST_DROPOUT:
        _warn_of_broadcast_dropout()


@functools.cache
def _warn_of_broadcast_dropout() -> None:
    """Once in a process: flax broadcasts dropout by default, so few ask for it, or know what it costs."""
    warnings.warn(
        "attention with broadcast_dropout=True, flax's default, runs as flax's own function, in O(T * S) memory: "
        "pass broadcast_dropout=False to the module to train with dropout in O(T + S)",
        stacklevel=4,  # the caller of attention_fn
    )


def with_causal(mask: ArrayLike | None, is_causal: bool, query: Array, key: Array) -> ArrayLike | None:
    """`mask` with the causal rule in it, for a function of flax that may not know the rule."""
    if not is_causal:
        return mask
    t, s = query.shape[-3], key.shape[-3]
    rank = max(2, 0 if mask is None else np.ndim(mask))
    causal = jnp.asarray(np.tri(t, s, dtype=bool)).reshape((1,) * (rank - 2) + (t, s))
    return causal if mask is None else jnp.logical_and(as_bool(mask), causal)


def blank_unseeing(out: Array, mask: ArrayLike | None) -> Array:
    """`out` with zeros in the rows that `mask` leaves nothing to see, so that both routes agree on them."""
    if mask is None:
        return out
    mask = as_bool(mask)
    mask = mask.reshape((1,) * (out.ndim - mask.ndim) + mask.shape)
    return jnp.where(jnp.swapaxes(mask.any(-1), -1, -2)[..., None], out, jnp.zeros_like(out))


def attend(
    query: Array,
    key: Array,
    value: Array,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    *,
    dropout_rng: Array | None,
    dropout_rate: float,
    is_causal: bool,
    implementation: Implementation | None,
    sequence_axis: Any,
) -> Array:
    """jax_mfa's attention with flax's conventions for bias, mask and dropout."""
    dropout: dict[str, Any] = {}
    if dropout_rng is not None and dropout_rate > 0:
        dropout = {"dropout_rate": dropout_rate, "dropout_seed": seed_of(dropout_rng)}
    if bias is not None:
        bias = as_array("bias", bias, "fibc", "numbers")
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            bias = bias.astype(accumulation_dtype(query.dtype))
    mask = None if mask is None else as_bool(mask)
    attention = dot_product_attention if sequence_axis is None else sharding_of(sequence_axis).attend
    return attention(query, key, value, bias, mask, is_causal=is_causal, implementation=implementation, **dropout)
