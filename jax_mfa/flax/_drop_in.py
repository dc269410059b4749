"""What the `attention_fn`s of linen and nnx share: who runs a call, jax_mfa or flax itself, and flax's conventions in
jax_mfa's terms. Knows arrays and flax's arguments, not its modules.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_mfa import checks
from jax_mfa.arguments import as_array
from jax_mfa.choice import Implementation
from jax_mfa.context_parallel.api import SequenceSharding
from jax_mfa.context_parallel.layout import axis_size
from jax_mfa.flex.api import flex_attention
from jax_mfa.problem import DTYPES, accumulation_dtype

logger = logging.getLogger("jax_mfa.flax")

BROADCAST_DROPOUT = "broadcast_dropout: one dropout mask for all batches and heads"


def as_bool(mask: ArrayLike) -> Array:
    """A mask as flax means it, of any dtype: what is not zero is visible."""
    mask = as_array("mask", mask, "fibc", "bool or numbers")
    return mask if mask.dtype == np.bool_ else mask != 0


def promotable(query: Any, key: Any, value: Any, dtype: Any) -> tuple[Array, Array, Array]:
    """What flax may promote, as arrays of numbers. Raises `TypeError` for others, and for a dtype that is none."""
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


def refuse_split(functions: Mapping[str, Any], sequence_axis: Any) -> dict[str, Any]:
    """Those functions of scores that there are. Raises `NotImplementedError` where sequences are split: a part of one
    does not know its positions."""
    given = {name: x for name, x in functions.items() if x is not None}
    if given and sequence_axis is not None:
        raise NotImplementedError(f"{next(iter(given))} cannot be given with sequence_axis={sequence_axis!r}")
    return given


def seed_of(rng: Array) -> Array:
    """A dropout seed, uint32[2], from a JAX random key of any kind, new style or raw."""
    return jax.random.bits(rng, (2,), jnp.uint32)


class Dropout(NamedTuple):
    """Flax's arguments of dropout, in flax's order."""

    broadcast_dropout: bool
    dropout_rng: Array | None
    dropout_rate: float
    deterministic: bool

    def drops(self) -> bool:
        """Whether dropout is on. Raises `TypeError` or `ValueError` for a bad rate or a missing random key."""
        if not 0 <= checks.number("dropout_rate", self.dropout_rate) < 1:
            raise ValueError(f"dropout_rate must be in the range [0, 1), got {self.dropout_rate}")
        on = not self.deterministic and self.dropout_rate > 0
        if on and self.dropout_rng is None:
            raise ValueError(f"dropout_rng is required with dropout_rate = {self.dropout_rate}, got None")
        return on


def attention(
    stock: Callable[..., Array],
    query: Array,
    key: Array,
    value: Array,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    dropout: Dropout,
    *,
    is_causal: bool,
    precision: Any,
    module: Any,
    implementation: Implementation | None,
    sequence_axis: Any,
    functions: Mapping[str, Any],
    **replaced: Any,
) -> Array:
    """Attention with flax's conventions: by jax_mfa, or by `stock`, flax's own function, where only that can run the
    call. Arguments are as `attention_fn` takes them, after promotion: `functions` are its score_mod and mask_mod, and
    `replaced` those that replace the arithmetic, by name.
    """
    given = refuse_split(functions, sequence_axis)
    mask = None if mask is None else as_bool(mask)
    drops = dropout.drops()
    arrays = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    reason = _why_stock(arrays, drops and dropout.broadcast_dropout, precision, module, replaced)
    if reason is None:
        keywords: dict[str, Any] = {"is_causal": is_causal, "implementation": implementation}
        if drops and dropout.dropout_rng is not None:
            keywords |= {"dropout_rate": dropout.dropout_rate, "dropout_seed": seed_of(dropout.dropout_rng)}
        if bias is not None:
            bias = as_array("bias", bias, "fibc", "numbers")
            if not jnp.issubdtype(bias.dtype, jnp.floating):
                bias = bias.astype(accumulation_dtype(query.dtype))
        attend = flex_attention if sequence_axis is None else sharding_of(sequence_axis).attend
        return attend(query, key, value, bias=bias, mask=mask, **keywords, **given)

    refusal = "cannot run this call, only flax's own attention"
    if sequence_axis is not None:
        raise NotImplementedError(f"sequence_axis={sequence_axis!r} {refusal} of whole sequences can: {reason}")
    for name in given:
        raise NotImplementedError(f"{name} {refusal} can: {reason}")
    if implementation is not None:
        raise NotImplementedError(f"implementation={implementation!r} {refusal} can: {reason}")
    logger.info("flax's own attention runs this call: %s", reason)
    if reason == BROADCAST_DROPOUT:
        _warn_of_broadcast_dropout()
    if is_causal:  # as a mask: flax before 0.11 does not know the rule
        causal = jnp.asarray(np.tri(query.shape[-3], key.shape[-3], dtype=bool))
        mask = causal if mask is None else mask & causal.reshape((1,) * (mask.ndim - 2) + causal.shape)
    keywords = {"precision": precision, "module": module, **dropout._asdict(), **replaced}
    out = stock(query, key, value, bias=bias, mask=mask, **keywords)
    return out if mask is None else _blank_unseeing(out, mask)


def _why_stock(
    arrays: Mapping[str, Any], broadcast_dropout: bool, precision: Any, module: Any, replaced: Mapping[str, Any]
) -> str | None:
    """Why flax's own function must run a call, starting with the argument's name; None where jax_mfa can."""
    if module is not None:
        return "module: weights can be sown only where the whole matrix exists"
    for name, replacement in replaced.items():
        if replacement is not None:
            return f"{name}: the arithmetic is replaced"
    if broadcast_dropout:
        return BROADCAST_DROPOUT
    if not _precision_met(precision):
        return f"precision: {precision}"
    for name in ("query", "key", "value"):
        if (dtype := arrays[name].dtype.name) not in DTYPES:
            return f"{name}: dtype {dtype}"
    query, key = arrays["query"], arrays["key"]
    if query.ndim >= 3 and key.ndim >= 3:
        scores = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
        for name in ("bias", "mask"):
            if arrays[name] is not None and _widens(arrays[name], scores):
                return f"{name}: shape {list(jnp.shape(arrays[name]))} widens scores of shape {list(scores)}"
    return None


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


def _blank_unseeing(out: Array, mask: Array) -> Array:
    """`out` with zeros in the rows that `mask` leaves nothing to see, so that both routes agree on them."""
    mask = mask.reshape((1,) * (out.ndim - mask.ndim) + mask.shape)
    return jnp.where(jnp.swapaxes(mask.any(-1), -1, -2)[..., None], out, jnp.zeros_like(out))


@functools.cache
def _warn_of_broadcast_dropout() -> None:
    """Once in a process: flax broadcasts dropout by default, so few ask for it, or know what it costs."""
    warnings.warn(
        "attention with broadcast_dropout=True, flax's default, runs as flax's own function, in O(T * S) memory: "
        "pass broadcast_dropout=False to the module to train with dropout in O(T + S)",
        stacklevel=4,  # the caller of attention_fn
    )
