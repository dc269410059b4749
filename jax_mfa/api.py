"""The public functions: check, specify, choose an implementation, call it, and give the caller's layout back."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_mfa import checks, choice, partial, primitives, recording, reference, sharding
from jax_mfa.arguments import as_columns, as_rows, clipped, known_lengths, specify, specify_abstract, unwrapped
from jax_mfa.choice import Explanation, Implementation, explained, names_of
from jax_mfa.flex.block_mask import BlockMask
from jax_mfa.flex.program import MaskMod, ScoreMod, modifiers
from jax_mfa.kv_cache.storage import QuantizedArray
from jax_mfa.metal import runtime
from jax_mfa.problem import MAX_POSITION, accumulation_dtype

if TYPE_CHECKING:
    from jax_mfa.typing import Bias, Float, Integer, Key, Lists, Mask

AbstractArray: TypeAlias = ArrayLike | jax.ShapeDtypeStruct
_Array = TypeVar("_Array", bound=AbstractArray)


# an array, or one that `jax_mfa.quantize` has made of it
Columns: TypeAlias = ArrayLike | QuantizedArray


class Features(TypedDict, Generic[_Array], total=False):
    """Keyword arguments that say nothing of where rows and columns stand; see `dot_product_attention`."""

    value_size: int | None
    scale: Float[_Array, ""] | int | None
    query_seq_lengths: Integer[_Array, "*#B"] | Lists | None
    local_window_size: int | tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    alibi_slopes: Float[_Array, "*#B N"] | Lists | None
    sinks: Float[_Array, "*#B N"] | Lists | None
    query_segment_ids: Integer[_Array, "*#B T"] | Lists | None
    key_value_segment_ids: Integer[_Array, "*#B S"] | Lists | None
    key_value_ranges: Integer[_Array, "*#B T 2"] | Lists | None
    block_mask: BlockMask | None
    dropout_rate: float
    dropout_seed: Integer[_Array, ""] | Integer[_Array, "2"] | Key[_Array, ""] | Lists | None


class Keywords(Features[_Array], total=False):
    """The keyword arguments of `dot_product_attention` that specify the problem."""

    is_causal: bool
    key_value_seq_lengths: Integer[_Array, "*#B"] | Lists | None
    query_offset: Integer[_Array, "*#B"] | Lists


def _attend(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, implementation: Any = None, **keywords: Any
) -> tuple[Array, Any]:
    """The output and, as a function that computes it, the log-sum-exp; both in the caller's shape."""
    names_of(implementation)  # reject unknown names before checking arrays
    spec, operands = specify(query, key, value, bias, mask, **keywords)
    decided = choice.decided(implementation, spec, operands)
    b, t, n, _ = operands.query.shape
    lead, v = np.shape(query)[:-3], spec.value_size or np.shape(value)[-1]
    if 0 in (b, t, n, np.shape(key)[-3]):  # nobody looks, or there is nothing to see
        out = jnp.zeros((b, t, n, v), operands.query.dtype)
        lse = lambda: jnp.full((b, t, n), -jnp.inf, accumulation_dtype(out.dtype))
    elif decided == "reference":
        summary = lambda: spec.summary(spec.viewed(operands))
        taken = lambda: recording.Choice("forward", summary(), "reference", "the definition", "by name")
        recording.choose(lambda: (taken(), (spec, operands)))
        out, values = reference.attention(spec, operands)
        lse = lambda: values
    else:
        out, row_max, row_sum = primitives.attention(spec, operands, decided)
        lse = lambda: partial.log_sum_exp(row_max, row_sum)
    if v == 0:
        out = out[..., :0]
    return out.reshape(*lead, t, n, v), lambda: lse().reshape(*lead, t, n)


def record() -> contextlib.AbstractContextManager[recording.Recorder]:
    """Records what attention does within the context: what is compiled there, and what runs on Metal.

    `with jax_mfa.record() as seen: step(x)`, then `print(seen)`, `seen.as_dict()`, `seen.prometheus()`. Contexts nest.
    What was compiled before is not compiled again, so that its choices are not seen; its calls of Metal are.

    Returns:
      A context manager that gives a `Recorder`.

    Raises:
      ValueError: where JAX_MFA_DEVICE is wrong.
    """
    return recording.recorded(runtime.get().module)


def attend_by_name(arguments: dict[str, Any], implementation: Implementation | None, with_lse: bool) -> Any:
    """The output, or with `with_lse` the output and the log-sum-exp, for arguments of `specify` by name; there may be
    score_mod and mask_mod in place of its modifiers."""

    checks.boolean("return_residual", with_lse)
    arguments = with_modifiers(arguments)

    def run(arguments: dict[str, Any]) -> Any:
        out, lse = _attend(implementation=implementation, **arguments)
        return (out, lse()) if with_lse else out

    return sharding.automatically(run, arguments, with_lse)


def with_modifiers(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, unwrapped, with `modifiers` in place of the functions score_mod and mask_mod."""
    found = {name: unwrapped(x) for name, x in arguments.items()}
    functions = found.pop("score_mod", None), found.pop("mask_mod", None)
    # traced here: where sharding is explicit, what functions read has another type within `sharding.automatically`
    dtype = accumulation_dtype(getattr(found["query"], "dtype", np.float32))
    traced = modifiers(*functions, dtype)
    return found if traced is None else {**found, "modifiers": traced}


def refuse_unknown(function: str, keywords: Mapping[str, Any], hints: dict[str, str]) -> None:
    """Raises `TypeError` for a keyword that `specify` does not take, with a hint where there is one."""
    for name in sorted(set(keywords) - set(_SPECIFIED)):
        hint = hints.get(name, "it takes those of dot_product_attention")
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}: {hint}")


@overload
def dot_product_attention(
    query: Float[Columns, "*B T N H"],
    key: Float[Columns, "*B S K H"],
    value: Float[Columns, "*B S K V"] | None,
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    implementation: Implementation | None = None,
    return_residual: Literal[False] = False,
    **keywords: Unpack[Keywords[ArrayLike]],
) -> Float[Array, "*B T N V"]: ...
@overload
def dot_product_attention(
    query: Float[Columns, "*B T N H"],
    key: Float[Columns, "*B S K H"],
    value: Float[Columns, "*B S K V"] | None,
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    implementation: Implementation | None = None,
    return_residual: Literal[True],
    **keywords: Unpack[Keywords[ArrayLike]],
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]: ...
def dot_product_attention(
    query: Float[Columns, "*B T N H"],
    key: Float[Columns, "*B S K H"],
    value: Float[Columns, "*B S K V"] | None,
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    value_size: int | None = None,
    scale: Float[ArrayLike, ""] | int | None = None,
    is_causal: bool = False,
    query_seq_lengths: Integer[ArrayLike, "*#B"] | Lists | None = None,
    key_value_seq_lengths: Integer[ArrayLike, "*#B"] | Lists | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_offset: Integer[ArrayLike, "*#B"] | Lists = 0,
    logits_soft_cap: float | None = None,
    alibi_slopes: Float[ArrayLike, "*#B N"] | Lists | None = None,
    sinks: Float[ArrayLike, "*#B N"] | Lists | None = None,
    query_segment_ids: Integer[ArrayLike, "*#B T"] | Lists | None = None,
    key_value_segment_ids: Integer[ArrayLike, "*#B S"] | Lists | None = None,
    key_value_ranges: Integer[ArrayLike, "*#B T 2"] | Lists | None = None,
    block_mask: BlockMask | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: Integer[ArrayLike, ""] | Integer[ArrayLike, "2"] | Key[ArrayLike, ""] | Lists | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Scaled dot-product attention: the arguments of `jax.nn.dot_product_attention`, and more.

    For each head, `softmax(scale · q kᵀ + bias) v` (Vaswani et al., arXiv:1706.03762, equation 1) over the columns
    that every mask given allows. The softmax is taken in float32, the output rounded once. A row that sees nothing
    gives zeros, where `jax.nn` gives the mean of the values.

    Under `jax.checkpoint`, `jax.checkpoint_policies.save_only_these_names("jax_mfa_out", "jax_mfa_lse")` keeps what the
    backward pass needs (the output, and each row's maximum and sum, which make up its log-sum-exp): attention is then
    not computed twice.

    Letters: B batch, T query length, S key length, N query heads, K key/value heads (N a multiple of K: query head n
    uses key head n // (N // K), as in grouped-query attention, arXiv:2305.13245), H and V head sizes. The batch axis
    may be missing, and more leading axes may stand in its place.

    Args:
      query: `[B, T, N, H]`, float16, bfloat16, float32 or float64; may be quantised (`jax_mfa.quantize`).
      key: `[B, S, K, H]` of the query's dtype; may be quantised, and is then read and dequantised a tile at a time.
      value: `[B, S, K, V]` of the query's dtype; may be quantised, also by another scheme than the key. None where the
        values are channels of the key, see value_size.
      bias: floating, broadcastable to `[B, N, T, S]`; added to the scaled scores, before any soft cap.
      mask: bool, broadcastable to `[B, N, T, S]`; True where a score counts.
      value_size: V where the first V channels of the key are the values (absorbed latent attention, DeepSeek-V2,
        arXiv:2405.04434, section 2.1: one key head of 576 channels whose first 512 are the values). One array is then
        stored, read, and given the gradient. The kernels take multiples of 32.
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
      implementation: None for the best that can; "metal", "blockwise" (or, as `jax.nn` says, "xla") or "reference",
        which never falls back; or a tuple of these names, of which the first that can is taken. None, and a tuple that
        begins with "metal" and "blockwise", leave small problems to blockwise: see `explain`.
      return_residual: also return the log-sum-exp.

    Returns:
      `[B, T, N, V]` of the query's dtype; with `return_residual` also the log-sum-exp of each row's scores, `[B, T, N]`
      of the query's dtype and without a gradient, as in `jax.nn`; `flash_attention` gives all of its digits, and its
      gradient. It includes the sink where sinks are given, and is −inf for a row that sees nothing, sink or not.

    Raises:
      ValueError, TypeError: naming the argument, what was seen and what was expected.
      NotImplementedError: where a named implementation cannot run the call.
    """
    given = locals()
    found = attend_by_name({name: given[name] for name in _SPECIFIED}, implementation, return_residual)
    return (found[0], jax.lax.stop_gradient(found[1].astype(found[0].dtype))) if return_residual else found


def flash_attention(
    query: Float[Columns, "*B T N H"],
    key: Float[Columns, "*B S K H"],
    value: Float[Columns, "*B S K V"] | None,
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    implementation: Implementation | None = None,
    **keywords: Unpack[Keywords[ArrayLike]],
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Attention with its log-sum-exp, both differentiable.

    Args:
      query, key, value, bias, mask, implementation: as in `dot_product_attention`.
      **keywords: the keyword arguments of `dot_product_attention`, but for `return_residual`.

    Returns:
      out: `[B, T, N, V]` of the query's dtype.
      lse: `[B, T, N]`, natural logarithm, float32 (float64 for float64); see FlashAttention-2, arXiv:2307.08691,
        section 3.1. It includes the sink where sinks are given, and is −inf for a row that sees nothing, sink or not.

    Raises:
      ValueError, TypeError, NotImplementedError: as there.
    """
    hint = "the log-sum-exp is always returned; leave it away, or call dot_product_attention"
    refuse_unknown("flash_attention", keywords, {"return_residual": hint})
    arguments = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **keywords}
    return attend_by_name(arguments, implementation, True)


@overload
def decode_attention(
    query: Float[Columns, "*B T N H"],
    key: Float[Columns, "*B S K H"],
    value: Float[Columns, "*B S K V"] | None,
    lengths: Integer[ArrayLike, "*#B"] | Lists,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    bias: Bias | None = None,
    mask: Mask | None = None,
    implementation: Implementation | None = None,
    return_residual: Literal[False] = False,
    **keywords: Unpack[Features[ArrayLike]],
) -> Float[Array, "*B T N V"]: ...
@overload
def decode_attention(
    query: Float[Columns, "*B T N H"],
    key: Float[Columns, "*B S K H"],
    value: Float[Columns, "*B S K V"] | None,
    lengths: Integer[ArrayLike, "*#B"] | Lists,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    bias: Bias | None = None,
    mask: Mask | None = None,
    implementation: Implementation | None = None,
    return_residual: Literal[True],
    **keywords: Unpack[Features[ArrayLike]],
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]: ...
def decode_attention(
    query: Float[Columns, "*B T N H"],
    key: Float[Columns, "*B S K H"],
    value: Float[Columns, "*B S K V"] | None,
    lengths: Integer[ArrayLike, "*#B"] | Lists,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    bias: Bias | None = None,
    mask: Mask | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    **keywords: Unpack[Features[ArrayLike]],
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Causal attention of the newest queries against a padded cache of keys and values.

    The T queries stand at the end of what the cache holds: with `lengths` tokens filled, row t has position
    `lengths − T + t`. Nothing beyond a batch entry's length is read or matters. For T ≤ 16 the Metal implementation
    splits the keys among simdgroups and loads each once for all heads of a group (Flash-Decoding, Dao et al., 2023).

    Args:
      query: `[B, T, N, H]`, the newest positions.
      key, value: `[B, S, K, H]` and `[B, S, K, V]`, caches that already hold the newest tokens; value None with a
        value_size, as in `dot_product_attention`.
      lengths: integers `[B]` (or one for all), how many tokens of each batch entry are filled, the newest included.
      score_mod, mask_mod: as in `flex_attention`; t and s are positions in the cache.
      bias, mask, implementation: as in `dot_product_attention`.
      return_residual: also return the log-sum-exp, as `flash_attention` does.
      **keywords: other keyword arguments of `dot_product_attention`; masks by position are set here.

    Returns:
      `[B, T, N, V]` of the query's dtype; with `return_residual` also the log-sum-exp, `[B, T, N]` float32 (float64
      for float64).

    Raises:
      ValueError, TypeError: as there, and where a keyword contradicts what is set here.
    """
    taken = {"is_causal", "query_offset", "key_value_seq_lengths"} & keywords.keys()
    if taken:
        raise ValueError(f"{sorted(taken)[0]} must not be given: decode_attention derives it from lengths")
    refuse_unknown("decode_attention", keywords, {})
    q, k = as_rows("query", query, "[..., T, N, H]"), as_columns("key", key, "[..., S, K, H]")
    filled = known_lengths("lengths", lengths, k.shape[-3], q.shape[:-3])
    arguments: dict[str, Any] = {"query": q, "key": k, "value": value, "bias": bias, "mask": mask, **keywords}
    arguments |= {"score_mod": score_mod, "mask_mod": mask_mod, "is_causal": True, "key_value_seq_lengths": filled}
    arguments["query_offset"] = clipped(filled, 0, MAX_POSITION) - q.shape[-3]
    return attend_by_name(arguments, implementation, return_residual)


def explain(
    query: Float[AbstractArray | QuantizedArray, "*B T N H"],
    key: Float[AbstractArray | QuantizedArray, "*B S K H"],
    value: Float[AbstractArray | QuantizedArray, "*B S K V"] | None,
    bias: Bias | jax.ShapeDtypeStruct | None = None,
    mask: Mask | jax.ShapeDtypeStruct | None = None,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    **keywords: Unpack[Keywords[AbstractArray]],
) -> Explanation:
    """Which implementation `dot_product_attention` (with score_mod or mask_mod, `flex_attention`) would take
    for the same arguments, and why: on the device that an array is bound to (`jax.device_put`), or the default one.

    Arguments are checked as there; arrays may be `jax.ShapeDtypeStruct`s, and nothing is computed.

    Returns:
      An `Explanation`; print it.

    Raises:
      ValueError, TypeError, NotImplementedError: as there.
    """
    checks.boolean("return_residual", return_residual)
    refuse_unknown("explain", keywords, {})
    names_of(implementation)  # reject unknown names before checking arrays
    arguments = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **keywords}
    arguments |= {"score_mod": score_mod, "mask_mod": mask_mod}
    platform = choice.platform_of(arguments)
    return explained(implementation, *specify_abstract(**with_modifiers(arguments)), platform)


_SPECIFIED = ("query", "key", "value", "bias", "mask", *sorted(Keywords.__optional_keys__))
