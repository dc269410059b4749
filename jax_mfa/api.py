"""The public functions: check, specify, choose an implementation, call it, and give the caller's layout back."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_mfa import metal, primitives, reference, sharding
from jax_mfa.block_mask import BlockMask
from jax_mfa.specification import accumulation_dtype, known_lengths, specify

Implementation = Literal["metal", "blockwise", "reference"]
IMPLEMENTATIONS: tuple[str, ...] = ("metal", "blockwise", "reference")


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation a call takes, and why not another.

    Attributes:
      implementation: the name of the one taken.
      reasons: for each implementation its verdict in one line.
    """

    implementation: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{'→' if name == self.implementation else ' '} {name}: {why}" for name, why in self.reasons.items()]
        return "\n".join(lines)


def _named(implementation: str | None) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")


def _elsewhere() -> str:
    """Why Metal cannot run what is compiled for the default device; empty where it can."""
    config: Any = jax.config
    device = config.jax_default_device  # a device, a platform, or None
    platform = jax.default_backend() if device is None else getattr(device, "platform", device)
    return "" if platform == "cpu" else f"it runs on JAX's platform cpu, and the default backend is {platform}"


def _choose(implementation: str | None, spec, operands, elsewhere: str = "") -> Explanation:
    refusal = metal.refusal(spec, operands) or elsewhere
    reasons = {
        "metal": refusal or f"{metal.runtime.get().device.get('name', 'Metal')}, on JAX's platform cpu",
        "blockwise": "jnp in tiles, O(T + S) memory; any platform of JAX",
        "reference": "the O(T·S) definition; only by name",
    }
    if implementation == "metal" and refusal:
        raise NotImplementedError(f"implementation='metal' cannot run this call: {refusal}")
    return Explanation(implementation or ("blockwise" if refusal else "metal"), reasons)


def _attend(query, key, value, bias, mask, implementation, **keywords):
    """The output and, as a function that computes it, the log-sum-exp; both in the caller's shape."""
    _named(implementation)
    spec, operands = specify(query, key, value, bias, mask, **keywords)
    if implementation == "metal":
        _choose(implementation, spec, operands)
    b, t, n, _ = operands.query.shape
    v = operands.value.shape[-1]
    lead = np.shape(query)[:-3]
    if b * t * operands.key.shape[1] == 0:  # nobody looks, or there is nothing to see
        out = jnp.zeros((b, t, n, v), operands.query.dtype)
        lse = lambda: jnp.full((b, t, n), -jnp.inf, accumulation_dtype(out.dtype))
    elif implementation == "reference":
        out, values = reference.attention(spec, operands)
        lse = lambda: values
    else:
        out, statistic = primitives.attention(spec, operands, implementation)
        lse = lambda: primitives.statistic_to_lse(statistic)
    return out.reshape(*lead, t, n, v), lambda: lse().reshape(*lead, t, n)


def dot_product_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal: bool = False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_offset=0,
    logits_soft_cap: float | None = None,
    alibi_slopes=None,
    sinks=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    key_value_ranges=None,
    block_mask: BlockMask | None = None,
    dropout_rate: float = 0.0,
    dropout_seed=None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
):
    """Scaled dot-product attention: the arguments of `jax.nn.dot_product_attention`, and more.

    For each head, `softmax(scale · q kᵀ + bias) v` (Vaswani et al., arXiv:1706.03762, equation 1) over the columns
    that every mask given allows. The softmax is taken in float32, the output rounded once. A row that sees nothing
    gives zeros, where `jax.nn` gives the mean of the values.

    Under `jax.checkpoint`, `jax.checkpoint_policies.save_only_these_names("jax_mfa_out", "jax_mfa_statistic")` keeps
    what the backward pass needs (the output, and one number for each row): attention is then not computed twice.

    Letters: B batch, T query length, S key length, N query heads, K key/value heads (N a multiple of K: query head n
    uses key head n // (N // K), as in grouped-query attention, arXiv:2305.13245), H and V head sizes. The batch axis
    may be missing, and more leading axes may stand in its place.

    Args:
      query: `[B, T, N, H]`, float16, bfloat16, float32 or float64.
      key: `[B, S, K, H]` of the query's dtype.
      value: `[B, S, K, V]` of the query's dtype.
      bias: floating, broadcastable to `[B, N, T, S]`; added to the scaled scores, before any soft cap.
      mask: bool, broadcastable to `[B, N, T, S]`; True where a score counts.
      scale: number or traced scalar; default 1/√H.
      is_causal: row t sees columns s ≤ t + query_offset. For T ≠ S this aligns top-left, as in `jax.nn`;
        `query_offset = S − T` aligns bottom-right.
      query_seq_lengths: integers `[B]`; rows from there on see nothing.
      key_value_seq_lengths: integers `[B]`; columns from there on are invisible.
      local_window_size: `(left, right)` or one number for both, None for no limit: row t sees columns
        t + query_offset − left … t + query_offset + right (Longformer, arXiv:2004.05150).
      query_offset: integer or integers `[B]`: the position of the first row.
      logits_soft_cap: scores become `cap · tanh(score / cap)` (Gemma 2, arXiv:2408.00118, section 2).
      alibi_slopes: `[N]` or `[B, N]`, positive: adds `slope · (s − t − query_offset)` (ALiBi, arXiv:2108.12409,
        section 3).
      sinks: `[N]` or `[B, N]`: the logit of one more column that has no value (arXiv:2309.17453; one learnt logit per
        head).
      query_segment_ids: integers `[B, T]`, with
      key_value_segment_ids: integers `[B, S]`: a row sees columns of its own segment (packed sequences).
      key_value_ranges: integers `[B, T, 2]`: row t sees columns `ranges[t, 0]` … `ranges[t, 1] − 1`, a mask in O(T).
      block_mask: a `BlockMask`.
      dropout_rate: probability in [0, 1) of dropping a probability; the others grow by 1 / (1 − rate).
      dropout_seed: an integer, integers `[2]`, or a `jax.random` key; needed with a rate. The same seed drops the
        same scores in every implementation.
      implementation: None for the best that can, or "metal", "blockwise" or "reference". A named implementation
        never falls back.
      return_residual: also return the log-sum-exp.

    Returns:
      `[B, T, N, V]` of the query's dtype; with `return_residual` also the log-sum-exp of each row's scores,
      `[B, T, N]` float32 (float64 for float64). It includes the sink where sinks are given, and is −inf for a row that
      sees nothing, sink or not.

    Raises:
      ValueError, TypeError: naming the argument, what was seen and what was expected.
      NotImplementedError: where a named implementation cannot run the call.
    """
    arguments = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **_keywords(locals())}

    def run(arguments):
        out, lse = _attend(implementation=implementation, **arguments)
        return (out, lse()) if return_residual else out

    return sharding.automatically(run, arguments, return_residual)


def flash_attention(
    query, key, value, bias=None, mask=None, *, implementation: Implementation | None = None, **keywords
):
    """Attention with its log-sum-exp, both differentiable.

    Args:
      query, key, value, bias, mask, implementation: as in `dot_product_attention`.
      **keywords: the keyword arguments of `dot_product_attention`, but for `return_residual`.

    Returns:
      out: `[B, T, N, V]` of the query's dtype.
      lse: `[B, T, N]`, natural logarithm, float32 (float64 for float64); see FlashAttention-2, arXiv:2307.08691,
        section 3.1. It includes the sink where sinks are given, and is −inf for a row that sees nothing, sink or not.
    """
    return dot_product_attention(
        query, key, value, bias, mask, implementation=implementation, return_residual=True, **keywords
    )


def decode_attention(
    query,
    key,
    value,
    lengths,
    *,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    **keywords,
):
    """Causal attention of the newest queries against a padded cache of keys and values.

    The T queries stand at the end of what the cache holds: with `lengths` entries filled, row t has position
    `lengths − T + t`. Nothing beyond a batch row's length is read or matters. For T ≤ 16 the Metal implementation
    splits the keys among simdgroups and loads each once for all heads of a group (Flash-Decoding, Dao et al., 2023).

    Args:
      query: `[B, T, N, H]`, the newest positions.
      key, value: `[B, S, K, H]` and `[B, S, K, V]`, caches that already hold the newest entries.
      lengths: integers `[B]` (or one for all), how many entries of each batch row are filled, the newest included.
      implementation, return_residual: as in `dot_product_attention`.
      **keywords: other arguments of `dot_product_attention`; masks by position are set here.

    Returns:
      As `dot_product_attention`.

    Raises:
      ValueError, TypeError: as there, and where a keyword contradicts what is set here.
    """
    taken = {"is_causal", "query_offset", "key_value_seq_lengths"} & keywords.keys()
    if taken:
        raise ValueError(f"{sorted(taken)[0]} must not be given: decode_attention derives it from lengths")
    if np.ndim(query) < 3 or np.ndim(key) < 3:
        specify(query, key, value)  # says what is wrong with them
    lead = np.shape(query)[:-3]
    lengths = known_lengths("lengths", lengths, np.shape(key)[-3])
    if lengths.shape not in ((), lead):
        raise ValueError(f"lengths must have shape [B] = {list(lead)}, got {list(lengths.shape)}")
    return dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        query_offset=jnp.asarray(lengths, jnp.int32) - np.shape(query)[-3],
        key_value_seq_lengths=lengths,
        implementation=implementation,
        return_residual=return_residual,
        **keywords,
    )


def explain(query, key, value, bias=None, mask=None, *, implementation: Implementation | None = None, **keywords):
    """Which implementation `dot_product_attention` would take on the default device for the same arguments, and why.

    Arguments are checked as there; arrays may be `jax.ShapeDtypeStruct`s, and nothing is computed.

    Returns:
      An `Explanation`; print it.

    Raises:
      ValueError, TypeError, NotImplementedError: as there.
    """
    keywords.pop("return_residual", None)
    for name in sorted(keywords.keys() - set(_SPECIFIED)):
        raise TypeError(
            f"explain() got an unexpected keyword argument {name!r}: it takes those of dot_product_attention"
        )
    _named(implementation)
    arguments = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **keywords}
    leaves, tree = jax.tree.flatten(arguments)
    abstract = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)}
    known = {}

    def check(arrays):
        whole = [arrays.get(i, x) for i, x in enumerate(leaves)]
        known["spec"], operands = specify(**jax.tree.unflatten(tree, whole))
        return operands

    operands = jax.eval_shape(check, abstract)
    return _choose(implementation, known["spec"], operands, _elsewhere())


_SPECIFIED = tuple(inspect.signature(specify).parameters)[5:]


def _keywords(arguments):
    """The arguments of `dot_product_attention` that belong to `specify`."""
    return {name: arguments[name] for name in _SPECIFIED}
