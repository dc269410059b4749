"""jax_mfa for `flax.nnx`: the `attention_fn` of flax's own module, and `FlashMultiHeadAttention`.

Here are only what flax.nnx calls for: signatures, parameters, `nnx.Cache` variables, random streams.
"""

from __future__ import annotations

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
from jax_mfa.api import Implementation
from jax_mfa.flax import _drop_in, _multi_head

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
      others: as in `jax_mfa.flax.linen.attention_fn`.

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


class FlashMultiHeadAttention(nnx.Module):
    """Multi-head attention with grouped heads, rotary embedding and a decode cache, in O(T + S) memory.

    Letters: N = num_heads, K = num_key_value_heads, H = head_dim, T and S lengths of queries and keys, M length of the
    cache. Parameters bear the names and shapes of flax's `nnx.MultiHeadAttention`, whose weights fit where nothing but
    what it knows is set: `query` [in_features, N, H], `key` and `value` [in_kv_features, K, H], `out` [N, H,
    out_features], each a kernel and, with use_bias, a bias; `query_ln` and `key_ln` with normalize_qk; `sinks` [N] with
    use_sinks.

    Decoding: `init_cache` makes an empty cache (`nnx.Cache` variables `cached_key` and `cached_value` [..., M, K, H],
    `cache_index` [...]). With `decode=True` each call then takes the next tokens, one or many, and gives what the
    causal run over all tokens gives for them. Each batch row has an index of its own: prompts of different lengths are
    padded at their end, and key_value_seq_lengths given with them. A scalar `cache_index`, as flax's own module makes
    it, is taken for all rows. Decoding is causal whatever is_causal says. More tokens than the cache holds raise a
    ValueError where the count is known while tracing; under `jit`, where only the number of new tokens is, the outputs
    of a batch row that runs over are NaN.

    Args:
      num_heads: N.
      in_features: features of inputs_q.
      in_kv_features: features of inputs_k and inputs_v; default in_features.
      num_key_value_heads, num_kv_heads: K, a divisor of N, by either name (the second is flax's); default N. Query
        head n uses key head n // (N // K) (grouped-query attention, arXiv:2305.13245).
      head_dim: H; default qkv_features / N.
      qkv_features: N · H; default in_features.
      out_features: features of the result; default in_features.
      use_bias: whether projections have a bias.
      rotary_base: None for no rotary embedding, else its base, usually 10000. See `jax_mfa.flax.rotary_embedding`:
        pairs are (i, i + R/2). The first query has position query_offset (while decoding, the number of cached
        tokens), the first key 0.
      rotary_fraction: the part of the H features that is turned.
      is_causal: row t sees columns s ≤ t + query_offset.
      local_window_size: `(left, right)` or one number, as in `jax_mfa.dot_product_attention`.
      logits_soft_cap: scores become `cap · tanh(score / cap)`.
      use_sinks: one learnt logit per head for a column without a value (arXiv:2309.17453).
      normalize_qk: layer normalisation of each head's queries and keys before the rotary embedding (arXiv:2302.05442).
      dropout_rate: probability of dropping a weight; a mask of its own for every batch and head.
      deterministic: no dropout; here or in the call, needed with a dropout_rate.
      decode: use the cache.
      ring_cache: the cache is a ring of the `left + 1` columns that a query sees through local_window_size, for any
        number of tokens; mask, bias and segment ids cannot be given while decoding.
      dtype: of the computation; by default promoted from inputs and parameters.
      param_dtype: of the parameters.
      precision: of the projections.
      kernel_init, bias_init: initialisers of the projections.
      out_kernel_init, out_bias_init: of the last; default kernel_init and bias_init.
      sinks_init: initialiser of the sinks.
      implementation: as in `jax_mfa.dot_product_attention`.
      sequence_axis: the mesh axis over whose devices sequences are split, within `shard_map`; or a
        `jax_mfa.SequenceSharding`. Rotary positions follow; not while decoding.
      rngs: random streams: 'params', and 'dropout' with a dropout_rate.
      keep_rngs: keep a stream for dropout in the module; without, each call that drops needs `rngs`.

    Raises:
      TypeError: where a number of heads or features is no integer.
      ValueError: where heads do not divide, or head_dim and qkv_features contradict each other.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        in_kv_features: int | None = None,
        num_key_value_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qkv_features: int | None = None,
        out_features: int | None = None,
        use_bias: bool = True,
        rotary_base: float | None = None,
        rotary_fraction: float = 1.0,
        is_causal: bool = False,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        use_sinks: bool = False,
        normalize_qk: bool = False,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        decode: bool = False,
        ring_cache: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = _LECUN_NORMAL,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = _ZEROS,
        out_bias_init: Initializer | None = None,
        sinks_init: Initializer = _ZEROS,
        implementation: Implementation | None = None,
        sequence_axis: Any = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ) -> None:
        self.num_heads = num_heads
        self.in_features = in_features
        self.num_key_value_heads, self.head_dim = _multi_head.head_sizes(
            in_features, num_heads, num_key_value_heads, num_kv_heads, head_dim, qkv_features
        )
        self.rotary_base = rotary_base
        self.rotary_fraction = rotary_fraction
        self.is_causal = is_causal
        self.local_window_size = local_window_size
        self.logits_soft_cap = logits_soft_cap
        self.normalize_qk = normalize_qk
        self.dropout_rate = dropout_rate
        self.deterministic = deterministic
        self.decode = decode
        self.ring_cache = ring_cache
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.implementation = implementation
        self.sequence_axis = sequence_axis

        common: dict[str, Any] = {
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "rngs": rngs,
        }
        project = functools.partial(nnx.LinearGeneral, kernel_init=kernel_init, bias_init=bias_init, **common)
        in_kv_features = in_features if in_kv_features is None else in_kv_features
        self.query = project(in_features=in_features, out_features=(num_heads, self.head_dim))
        self.key = project(in_features=in_kv_features, out_features=(self.num_key_value_heads, self.head_dim))
        self.value = project(in_features=in_kv_features, out_features=(self.num_key_value_heads, self.head_dim))
        if normalize_qk:
            normalize = functools.partial(
                nnx.LayerNorm, self.head_dim, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs
            )
            self.query_ln, self.key_ln = normalize(), normalize()
        self.out = nnx.LinearGeneral(
            (num_heads, self.head_dim),
            in_features if out_features is None else out_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
            **common,
        )
        self.sinks = _data(nnx.Param(sinks_init(rngs.params(), (num_heads,), param_dtype)) if use_sinks else None)
        self.rngs = _data(None)
        if keep_rngs and dropout_rate > 0:
            stream = rngs.dropout
            # older streams cannot fork; there flax's own modules keep the whole of rngs too
            self.rngs = _data(stream.fork() if hasattr(stream, "fork") else rngs)
        self.cached_key = _data(None)
        self.cached_value = _data(None)
        self.cache_index = _data(None)

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
        deterministic: bool | None = None,
        decode: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> Shaped[Array, "*B T out_features"]:
        """Projects, attends, projects.

        Args:
          inputs_q: `[..., T, in_features]`.
          inputs_k: `[..., S, in_kv_features]`; default inputs_q.
          inputs_v: `[..., S, in_kv_features]`; default inputs_k.
          bias: floating, broadcastable to `[..., N, T, S]`; while decoding S = M, here and below.
          mask: bool or numbers, broadcastable to `[..., N, T, S]`; what is not zero is visible.
          query_seq_lengths, key_value_seq_lengths: integers `[...]`; rows and columns from there on are padding. While
            decoding key_value_seq_lengths says how many of this call's tokens count: a batch row's others are not
            cached and see nothing, and its next token takes the place behind those that counted.
          query_segment_ids, key_value_segment_ids: integers `[..., T]` and `[..., S]`; a row sees its own segment.
          query_offset: integer or integers `[...]`: position of the first query; not while decoding.
          deterministic: goes before the attribute.
          decode: goes before the attribute.
          rngs: `nnx.Rngs` or one of its streams; goes before the stream that the module keeps.

        Returns:
          `[..., T, out_features]`.

        Raises:
          ValueError, TypeError: naming the argument, what was seen and what was expected.
        """
        x_q, x_k, x_v = _multi_head.module_inputs(inputs_q, inputs_k, inputs_v)
        for name, x, linear in (
            ("inputs_q", x_q, self.query),
            ("inputs_k", x_k, self.key),
            ("inputs_v", x_v, self.value),
        ):
            if (x.shape[-1],) != linear.in_features:
                raise ValueError(f"{name} must have {linear.in_features[0]} features, got shape {list(x.shape)}")
        query, key, value = self.query(x_q), self.key(x_k), self.value(x_v)
        if self.normalize_qk:
            query, key = self.query_ln(query), self.key_ln(key)

        decode = checks.boolean("decode", self.decode if decode is None else decode)
        variables = (self.cached_key, self.cached_value, self.cache_index)
        if decode and any(variable is None for variable in variables):
            raise ValueError("decode=True needs a cache: call init_cache first")
        out, cache = _multi_head.attend(
            query,
            key,
            value,
            cache=_multi_head.Cache(*map(_get, variables)) if decode else None,
            bias=bias,
            mask=mask,
            sinks=None if self.sinks is None else _get(self.sinks),
            is_causal=self.is_causal,
            local_window_size=self.local_window_size,
            logits_soft_cap=self.logits_soft_cap,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
            query_offset=query_offset,
            rotary_base=self.rotary_base,
            rotary_fraction=self.rotary_fraction,
            ring_cache=self.ring_cache,
            implementation=self.implementation,
            sequence_axis=self.sequence_axis,
            **self._dropout(deterministic, rngs),
        )
        if cache is not None:
            for variable, new in zip(variables, cache):
                _set(variable, new)
        return self.out(out)

    def _dropout(self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None) -> dict[str, Any]:
        """The keywords of dropout; none where it is off."""
        if self.dropout_rate == 0.0 or _multi_head.first_given("deterministic", deterministic, self.deterministic):
            return {}
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError("rngs must be given to the call: the module was made with keep_rngs=False")
        stream = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
        return {"dropout_rate": self.dropout_rate, "dropout_seed": _drop_in.seed_of(stream())}

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
        cache = _multi_head.empty_cache(
            tuple(input_shape[:-2]),
            input_shape[-2],
            self.num_key_value_heads,
            self.head_dim,
            dtype,
            self.ring_cache,
            self.local_window_size,
        )
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
