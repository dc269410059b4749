"""jax_mfa for `flax.linen`: the `attention_fn` of flax's own modules, and `FlashMultiHeadAttention`.

Here are only what flax.linen calls for: signatures, parameters, the 'cache' collection, the 'dropout' stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import attention as _flax_attention
from flax.linen.dtypes import promote_dtype as _promote_dtype
from flax.typing import Initializer, PrecisionLike
from jax import Array
from jax.typing import ArrayLike, DTypeLike

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
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Any] | None = None,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
    *,
    is_causal: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    implementation: Implementation | None = None,
    sequence_axis: Any = None,
) -> Shaped[Array, "*B T N V"]:
    """`flax.linen.dot_product_attention` through jax_mfa: the `attention_fn` of flax's multi-head modules.

    `nn.MultiHeadDotProductAttention(..., attention_fn=attention_fn)`; `functools.partial` sets the keyword-only
    arguments. Results equal flax's but for two things: a row whose mask allows nothing gives zeros, where flax gives
    the mean of the values; and the softmax is always taken in float32 (float64 for float64).

    Flax's own function runs, with O(T·S) memory, what only it can do: sown weights (`module`), broadcast dropout,
    replaced einsums or `einsum_dot_general`, complex dtypes and others that jax_mfa has not, a bias or mask with a
    larger batch than the queries, and, on platforms other than CPU, a precision above the default. Note that flax's
    modules ask for broadcast dropout by default: set `broadcast_dropout=False` to train with dropout in O(T + S)
    memory; the first such call warns. The logger "jax_mfa.flax" says, at level INFO, which calls those are.

    Args:
      query: `[..., T, N, H]`.
      key: `[..., S, K, H]`; K divides N (flax itself asks for K = N).
      value: `[..., S, K, V]`.
      bias: broadcastable to `[..., N, T, S]`; added to the scaled scores.
      mask: bool or numbers, broadcastable to `[..., N, T, S]`; what is not zero is visible. An additive mask belongs
        in bias.
      broadcast_dropout: one dropout mask for all batches and heads; flax's own function.
      dropout_rng: random key; where dropout is on without broadcast, it seeds jax_mfa's counter-based mask.
      dropout_rate: probability of dropping a weight.
      deterministic: no dropout.
      dtype: of the computation; by default promoted from query, key and value.
      precision: of the products.
      module: module that sows the weights; flax's own function.
      force_fp32_for_softmax: always so here.
      einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: replace the arithmetic; flax's own
        function.
      is_causal: row t sees columns s ≤ t. Not for flax's decode mode, which masks by itself.
      score_mod, mask_mod: as in `jax_mfa.flex_attention`. They never give way to flax's own function, and cannot be
        given with sequence_axis.
      implementation: as in `jax_mfa.dot_product_attention`. A named one never gives way to flax's own function.
      sequence_axis: the mesh axis over whose devices sequences are split, within `shard_map`; or a
        `jax_mfa.SequenceSharding`. It never gives way either.

    Returns:
      `[..., T, N, V]` of the computation's dtype.

    Raises:
      ValueError, TypeError: as `jax_mfa.dot_product_attention` does; also for dropout without dropout_rng.
      NotImplementedError: where only flax's own function can run a call and an implementation is named.
    """
    q, k, v = _promote_dtype(*_drop_in.promotable(query, key, value, dtype), dtype=dtype)
    return _drop_in.attention(
        functools.partial(_stock_attention, force_fp32_for_softmax=force_fp32_for_softmax),
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
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )


class FlashMultiHeadAttention(nn.Module):
    """Multi-head attention with grouped heads, rotary embedding and a decode cache, in O(T + S) memory.

    Letters: N = num_heads, K = num_key_value_heads, H = head_dim, T and S lengths of queries and keys, M length of the
    cache. Parameters bear the names and shapes of flax's `MultiHeadDotProductAttention`, whose weights fit where K = N
    and nothing else is set: `query` [features, N, H], `key` and `value` [features, K, H], `out` [N, H, out_features],
    each a kernel and, with use_bias, a bias; `query_ln` and `key_ln` with normalize_qk; `sinks` [N] with use_sinks.

    Decoding: with `decode=True`, `init` on inputs of the length M makes an empty cache in the collection 'cache'
    (`cached_key` and `cached_value` [..., M, K, H], `cache_index` [...]). Each `apply(..., mutable=["cache"])` then
    takes the next tokens, one or many, and gives what the causal run over all tokens gives for them. Each batch entry
    has an index of its own: prompts of different lengths are padded at their end, and key_value_seq_lengths given with
    them. A scalar `cache_index`, as flax's own modules make it, is taken for all rows. Decoding is causal whatever
    is_causal says. More tokens than the cache holds raise a ValueError where the count is known while tracing; under
    `jit`, where only the number of new tokens is, the outputs of a batch entry that runs over are NaN.

    Attributes:
      num_heads: N.
      num_key_value_heads, num_kv_heads: K, a divisor of N, by either name (the second is flax's); default N. Query
        head n uses key head n // (N // K) (grouped-query attention, arXiv:2305.13245).
      head_dim: H; default qkv_features / N.
      qkv_features: N · H; default the features of inputs_q.
      out_features: features of the result; default those of inputs_q.
      use_bias: whether projections have a bias.
      rotary_base: None for no rotary embedding, else its base, usually 10000. See `jax_mfa.flax.rotary_embedding`:
        pairs are (i, i + R/2). The first query has position query_offset (while decoding, the number of cached
        tokens), the first key 0.
      rotary_fraction: the part of the H features that is turned.
      is_causal: row t sees columns s ≤ t + query_offset.
      local_window_size, logits_soft_cap, implementation: as in `jax_mfa.dot_product_attention`.
      use_sinks: one learnt logit per head for a column without a value (arXiv:2309.17453).
      normalize_qk: layer normalisation of each head's queries and keys before the rotary embedding (arXiv:2302.05442).
      dropout_rate: probability of dropping a weight; a mask of its own for every batch and head.
      deterministic: no dropout; here or in the call, needed with a dropout_rate.
      decode: use a cache.
      ring_cache: the cache is a ring of the `left + 1` columns that a query sees through local_window_size, for any
        number of tokens; mask, bias and segment ids cannot be given while decoding.
      dtype: of the computation; by default promoted from inputs and parameters.
      param_dtype: of the parameters.
      precision: of the projections.
      kernel_init, bias_init: initialisers of the projections.
      out_kernel_init, out_bias_init: of the last; default kernel_init and bias_init.
      sinks_init: initialiser of the sinks.
      sequence_axis: as `attention_fn` takes it; rotary positions follow. Not while decoding.
      score_mod, mask_mod: as in `jax_mfa.flex_attention`; those of a call go before them.
    """

    num_heads: int
    num_key_value_heads: int | None = None
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
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros_init()
    out_bias_init: Initializer | None = None
    sinks_init: Initializer = nn.initializers.zeros_init()
    implementation: Implementation | None = None
    num_kv_heads: int | None = None
    ring_cache: bool = False
    sequence_axis: Any = None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None

    @nn.compact
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
        dropout_rng: Array | None = None,
    ) -> Shaped[Array, "*B T out_features"]:
        """Projects, attends, projects.

        Args:
          inputs_q: `[..., T, features]`.
          inputs_k: `[..., S, features of keys]`; default inputs_q.
          inputs_v: `[..., S, features of values]`; default inputs_k.
          bias: floating, broadcastable to `[..., N, T, S]`; while decoding S = M, here and below.
          mask: bool or numbers, broadcastable to `[..., N, T, S]`; what is not zero is visible.
          query_seq_lengths, key_value_seq_lengths: integers `[...]`; rows and columns from there on are padding. While
            decoding key_value_seq_lengths says how many of this call's tokens count: a batch entry's others are not
            cached and see nothing, and its next token takes the place behind those that counted.
          query_segment_ids, key_value_segment_ids: integers `[..., T]` and `[..., S]`; a row sees its own segment.
          query_offset: integer or integers `[...]`: position of the first query; not while decoding.
          score_mod, mask_mod: as in `jax_mfa.flex_attention`, while decoding too; not with sequence_axis or a ring.
          deterministic: goes before the attribute.
          dropout_rng: random key; default the stream 'dropout'.

        Returns:
          `[..., T, out_features]`.

        Raises:
          ValueError, TypeError: naming the argument, what was seen and what was expected.
        """
        x_q, x_k, x_v = _multi_head.module_inputs(inputs_q, inputs_k, inputs_v)
        heads, head_dim = _multi_head.head_sizes(self, x_q.shape[-1])
        inner, outer = _multi_head.projection_keywords(self)
        query = nn.DenseGeneral((self.num_heads, head_dim), name="query", **inner)(x_q)
        key = nn.DenseGeneral((heads, head_dim), name="key", **inner)(x_k)
        value = nn.DenseGeneral((heads, head_dim), name="value", **inner)(x_v)
        if self.normalize_qk:
            normalize = functools.partial(nn.LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)
            query, key = normalize(name="query_ln")(query), normalize(name="key_ln")(key)
        sinks = self.param("sinks", self.sinks_init, (self.num_heads,), self.param_dtype) if self.use_sinks else None

        variables, cache = self._cache(key) if self.decode else ([], None)
        random_key = lambda: self.make_rng("dropout") if dropout_rng is None else dropout_rng
        out, cache = _multi_head.attend(
            self,
            query,
            key,
            value,
            decode=self.decode,
            cache=cache,
            bias=bias,
            mask=mask,
            sinks=sinks,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
            query_offset=query_offset,
            functions={"score_mod": score_mod, "mask_mod": mask_mod},
            **_multi_head.dropout_keywords(self, deterministic, random_key),
        )
        for variable, new in zip(variables, cache or ()):
            variable.value = new
        features = x_q.shape[-1] if self.out_features is None else self.out_features
        return nn.DenseGeneral(features, axis=(-2, -1), name="out", **outer)(out)

    def _cache(self, key: Array) -> tuple[list[nn.Variable[Any]], _multi_head.Cache | None]:
        """The variables of the cache, and the cache in them; None while `init` makes them."""
        exists = self.has_variable("cache", "cached_key")
        if not exists and not self.is_initializing():
            raise ValueError(
                "decode=True needs the collection 'cache': make it with `init` on inputs as long as the cache shall be"
            )
        empty = lambda i: _multi_head.empty_cache(self, key.shape, key.dtype)[i]
        names = ("cached_key", "cached_value", "cache_index")
        variables = [self.variable("cache", name, empty, i) for i, name in enumerate(names)]
        return variables, _multi_head.Cache(*(variable.value for variable in variables)) if exists else None
