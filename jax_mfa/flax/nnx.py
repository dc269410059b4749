"""jax_mfa for `flax.nnx`: the `attention_fn` of flax's own module, and `FlashMultiHeadAttention`.

Here are only what flax.nnx calls for: signatures, parameters, `nnx.Cache` variables, random streams.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import attention as _flax_attention
from flax.nnx.nn.dtypes import promote_dtype as _promote_dtype
from flax.typing import Initializer, PrecisionLike
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jax_mfa import checks
from jax_mfa.choice import Implementation
from jax_mfa.flax import _drop_in, _multi_head
from jax_mfa.flex.program import MaskMod, ScoreMod

if TYPE_CHECKING:
    from jax_mfa.typing import Integer, Lists, Scores, Shaped

__all__ = ["FlashMultiHeadAttention", "attention_fn"]

# bound now: flax's name may be patched to mean `attention_fn`
_stock_attention: Callable[..., Array] = _flax_attention.dot_product_attention


def attention_fn(
    query: Shaped[ArrayLike, "*B T N H"],
    key: Shaped[ArrayLike, "*B S K H"],
    value: Shaped[ArrayLike, "*B S K V"],
    bias: Scores | None = None,
    mask: Scores | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    module: nnx.Module | None = None,
    promote_dtype: Callable[..., Any] = _promote_dtype,
    is_causal: bool = False,
    *,
    rope: Callable[..., Array] | None = None,
    input_positions: Integer[ArrayLike, "*#B T"] | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    implementation: Implementation | None = None,
    sequence_axis: Any = None,
) -> Shaped[Array, "*B T N V"]:
    """`flax.nnx.dot_product_attention` through jax_mfa: the `attention_fn` of `nnx.MultiHeadAttention`.

    `nnx.MultiHeadAttention(..., attention_fn=attention_fn)`; `functools.partial` sets rope and implementation. Results,
    what flax's own function runs instead, arguments and errors are those of `jax_mfa.flax.linen.attention_fn`, which
    also replaces einsums.

    Args:
      promote_dtype: takes (query, key, value) and dtype, returns them in one dtype.
      rope: an `nnx.RoPE`, which turns query and key; not for flax's decode mode, which keeps keys unturned.
      input_positions: `[T]` or `[..., T]`, for rope; by default 0, 1, 2, …

    Returns:
      `[..., T, N, V]` of the computation's dtype.

    Raises:
      ValueError, TypeError, NotImplementedError: as `jax_mfa.flax.linen.attention_fn` does; also for input_positions
        without rope.
    """
    query, key, value = _drop_in.promotable(query, key, value, dtype)
    if rope is not None:
        if not callable(rope):
            raise TypeError(f"rope must be an nnx.RoPE or None, got {checks.seen(rope)}")
        query, key = (_turned(rope, x, input_positions) for x in (query, key))
    elif input_positions is not None:
        raise ValueError("input_positions must be given with rope: nothing else here asks for positions")
    q, k, v = promote_dtype((query, key, value), dtype=dtype)
    return _drop_in.attention(
        _stock_attention,
        q,
        k,
        v,
        bias,
        mask,
        _drop_in.Dropout(broadcast_dropout, dropout_rng, dropout_rate, deterministic),
        is_causal=is_causal,
        precision=precision,
        module=module,
        implementation=implementation,
        sequence_axis=sequence_axis,
        functions={"score_mod": score_mod, "mask_mod": mask_mod},
    )


def _turned(rope: Callable[..., Array], x: ArrayLike, positions: ArrayLike | None) -> Array:
    """`x`, `[..., T, N, H]`, turned by what takes `[..., T, H]` and positions `[T]`."""
    turn = jax.vmap(rope, in_axes=(-2, None), out_axes=-2)
    for _ in range(0 if positions is None else jnp.ndim(positions) - 1):  # the leading axes, where positions have them
        turn = jax.vmap(turn)
    return turn(x, positions)


def _get(variable: Any) -> Any:
    return variable.get_value() if hasattr(variable, "get_value") else variable.value


def _set(variable: Any, value: Any) -> None:
    if hasattr(variable, "set_value"):
        variable.set_value(value)
    else:
        variable.value = value


_LECUN_NORMAL = nnx.initializers.lecun_normal()
_ZEROS = nnx.initializers.zeros_init()

# flax from 0.11 wants to be told which attributes may come to hold arrays
_data = getattr(nnx, "data", lambda x: x)


@dataclasses.dataclass(eq=False, repr=False)
class FlashMultiHeadAttention(nnx.Module):
    """Multi-head attention with grouped heads, rotary embedding and a decode cache, in O(T + S) memory.

    The computation, its letters, attributes and arguments are those of `jax_mfa.flax.linen.FlashMultiHeadAttention`.
    Parameters have the same names and shapes, those of flax's `nnx.MultiHeadAttention` too, whose weights fit where
    nothing but what it knows is set.

    Decoding: `init_cache` makes an empty cache (`nnx.Cache` variables `cached_key` and `cached_value` [..., M, K, H],
    `cache_index` [...]). With `decode=True` each call then takes the next tokens, one or many, as those of linen do.

    Args:
      num_heads: N.
      in_features: features of inputs_q.
      in_kv_features: features of inputs_k and inputs_v; default in_features.
      rngs: random streams: 'params', and 'dropout' with a dropout_rate.
      keep_rngs: keep a stream for dropout in the module; without, each call that drops needs `rngs`.

    Raises:
      TypeError: where a number of heads or features is no integer.
      ValueError: where heads do not divide, or head_dim and qkv_features contradict each other.
    """

    num_heads: int
    in_features: int
    _: dataclasses.KW_ONLY
    in_kv_features: int | None = None
    num_key_value_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    qkv_features: int | None = None
    out_features: int | None = None
    use_bias: bool = True
    rotary_base: float | None = None
    rotary_fraction: float = 1.0
    is_causal: bool = False
    local_window_size: int | tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    use_sinks: bool = False
    normalize_qk: bool = False
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    decode: bool = False
    ring_cache: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = _LECUN_NORMAL
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = _ZEROS
    out_bias_init: Initializer | None = None
    sinks_init: Initializer = _ZEROS
    implementation: Implementation | None = None
    sequence_axis: Any = None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    rngs: nnx.Rngs
    keep_rngs: bool = True

    def __post_init__(self) -> None:
        rngs = self.rngs
        heads, head_dim = self.num_key_value_heads, self.head_dim = _multi_head.head_sizes(self, self.in_features)
        inner, outer = _multi_head.projection_keywords(self)
        in_kv_features = self.in_features if self.in_kv_features is None else self.in_kv_features
        out_features = self.in_features if self.out_features is None else self.out_features
        self.query = nnx.LinearGeneral(self.in_features, (self.num_heads, head_dim), **inner, rngs=rngs)
        self.key = nnx.LinearGeneral(in_kv_features, (heads, head_dim), **inner, rngs=rngs)
        self.value = nnx.LinearGeneral(in_kv_features, (heads, head_dim), **inner, rngs=rngs)
        if self.normalize_qk:
            normalize = functools.partial(
                nnx.LayerNorm, head_dim, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype, rngs=rngs
            )
            self.query_ln, self.key_ln = normalize(), normalize()
        self.out = nnx.LinearGeneral((self.num_heads, head_dim), out_features, axis=(-2, -1), **outer, rngs=rngs)
        sinks = lambda: nnx.Param(self.sinks_init(rngs.params(), (self.num_heads,), self.param_dtype))
        self.sinks = _data(sinks() if self.use_sinks else None)
        self.rngs = _data(None)
        if self.keep_rngs and self.dropout_rate > 0:
            stream = rngs.dropout
            # older streams cannot fork; there flax's own modules keep the whole of rngs too
            self.rngs = _data(stream.fork() if hasattr(stream, "fork") else rngs)
        self.cached_key, self.cached_value, self.cache_index = (_data(None) for _ in _multi_head.Cache._fields)

    def __call__(
        self,
        inputs_q: Shaped[ArrayLike, "*B T features"],
        inputs_k: Shaped[ArrayLike, "*B S key_features"] | None = None,
        inputs_v: Shaped[ArrayLike, "*B S value_features"] | None = None,
        *,
        bias: Scores | None = None,
        mask: Scores | None = None,
        query_seq_lengths: Integer[ArrayLike, "*#B"] | Lists | None = None,
        key_value_seq_lengths: Integer[ArrayLike, "*#B"] | Lists | None = None,
        query_segment_ids: Integer[ArrayLike, "*#B T"] | Lists | None = None,
        key_value_segment_ids: Integer[ArrayLike, "*#B S"] | Lists | None = None,
        query_offset: Integer[ArrayLike, "*#B"] | Lists = 0,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        deterministic: bool | None = None,
        decode: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> Shaped[Array, "*B T out_features"]:
        """Projects, attends, projects, with the arguments of `jax_mfa.flax.linen.FlashMultiHeadAttention`, and these:

        Args:
          decode: goes before the attribute.
          rngs: `nnx.Rngs` or one of its streams; goes before the stream that the module keeps.

        Returns:
          `[..., T, out_features]`.

        Raises:
          ValueError, TypeError: naming the argument, what was seen and what was expected.
        """
        inputs = _multi_head.module_inputs(inputs_q, inputs_k, inputs_v)
        layers = {"inputs_q": self.query, "inputs_k": self.key, "inputs_v": self.value}
        for x, (name, layer) in zip(inputs, layers.items()):
            if (x.shape[-1],) != layer.in_features:
                raise ValueError(f"{name} must have {layer.in_features[0]} features, got shape {list(x.shape)}")
        query, key, value = (layer(x) for x, layer in zip(inputs, layers.values()))
        if self.normalize_qk:
            query, key = self.query_ln(query), self.key_ln(key)

        decode = checks.boolean("decode", self.decode if decode is None else decode)
        variables = (self.cached_key, self.cached_value, self.cache_index)
        if decode and any(variable is None for variable in variables):
            raise ValueError("decode=True needs a cache: call init_cache first")
        out, cache = _multi_head.attend(
            self,
            query,
            key,
            value,
            decode=decode,
            cache=_multi_head.Cache(*map(_get, variables)) if decode else None,
            bias=bias,
            mask=mask,
            sinks=None if self.sinks is None else _get(self.sinks),
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
            query_offset=query_offset,
            functions={"score_mod": score_mod, "mask_mod": mask_mod},
            **_multi_head.dropout_keywords(self, deterministic, lambda: self._random_key(rngs)),
        )
        for variable, new in zip(variables, cache or ()):
            _set(variable, new)
        return self.out(out)

    def _random_key(self, rngs: nnx.Rngs | nnx.RngStream | None) -> Array:
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError("rngs must be given to the call: the module was made with keep_rngs=False")
        stream = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
        return stream()

    def init_cache(self, input_shape: Sequence[int], dtype: DTypeLike | None = None) -> None:
        """Makes an empty cache, or empties the one there is.

        Args:
          input_shape: `[..., M, in_features]`: that of inputs as long as the cache shall be.
          dtype: of the cached keys and values; default the module's dtype, or else param_dtype. The computation keeps
            its own dtype.
        """
        input_shape = checks.integers("input_shape", input_shape, least=0)
        if len(input_shape) < 2:
            raise ValueError(f"input_shape must be (..., length, features), got {input_shape}")
        dtype = checks.floating_dtype("dtype", (self.dtype or self.param_dtype) if dtype is None else dtype)
        cache = _multi_head.empty_cache(self, (*input_shape[:-1], *self.key.out_features), dtype)
        self.cached_key, self.cached_value, self.cache_index = map(nnx.Cache, cache)

    def set_view(self, deterministic: bool | None = None, decode: bool | None = None) -> None:
        """For `nnx.view`.

        Args:
          deterministic: no dropout.
          decode: use the cache.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
