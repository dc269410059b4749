"""`flex_attention`: attention with functions of the user's for scores and masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, overload

import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_mfa.api import Columns, Keywords, attend_by_name, refuse_unknown
from jax_mfa.choice import Implementation
from jax_mfa.flex.program import modifiers
from jax_mfa.problem import accumulation_dtype

if TYPE_CHECKING:
    from jax_mfa.typing import Bias, Float, Mask

ScoreMod: TypeAlias = Callable[[Array, Array, Array, Array, Array], Array]
MaskMod: TypeAlias = Callable[[Array, Array, Array, Array], Array]


@overload
def flex_attention(
    query: Float[Columns, "*B T N H"],
    key: Float[Columns, "*B S K H"],
    value: Float[Columns, "*B S K V"],
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    bias: Bias | None = None,
    mask: Mask | None = None,
    implementation: Implementation | None = None,
    return_residual: Literal[False] = False,
    **keywords: Unpack[Keywords[ArrayLike]],
) -> Float[Array, "*B T N V"]: ...
@overload
def flex_attention(
    query: Float[Columns, "*B T N H"],
    key: Float[Columns, "*B S K H"],
    value: Float[Columns, "*B S K V"],
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    bias: Bias | None = None,
    mask: Mask | None = None,
    implementation: Implementation | None = None,
    return_residual: Literal[True],
    **keywords: Unpack[Keywords[ArrayLike]],
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]: ...
def flex_attention(
    query: Float[Columns, "*B T N H"],
    key: Float[Columns, "*B S K H"],
    value: Float[Columns, "*B S K V"],
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    bias: Bias | None = None,
    mask: Mask | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    **keywords: Unpack[Keywords[ArrayLike]],
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Attention whose scores and mask are functions of the caller's.

    Both are functions of scalars, plain JAX, which may read arrays that they close over (relative-position tables,
    document ids, coordinates) by indexing them with the scalars; names, order and meaning as in PyTorch's
    `flex_attention` (arXiv:2412.05496). They are traced once and run on tiles of scores: memory grows with T + S and
    the arrays read, never with T · S. Query, key, value and every floating array that `score_mod` reads get gradients.

        def relative(score, b, n, t, s):
            return score + table[n, jnp.clip(t - s + 128, 0, 255)]

        out = jax_mfa.flex_attention(query, key, value, score_mod=relative)

    Args:
      query, key, value, bias, mask: as in `dot_product_attention`.
      score_mod: `score_mod(score, b, n, t, s) -> floating scalar`, of the scaled score after bias and ALiBi, float32
        (float64 for float64), and before the soft cap; b, n, t and s are int32: batch index (of flattened leading
        axes), query head, position of the query (with `query_offset`) and of the key. Where it makes −∞ of a score
        that is not, the key is hidden, unless there is a soft cap.
      mask_mod: `mask_mod(b, n, t, s) -> bool scalar`, true where the key may be seen: one more mask.
      implementation: as there.
      return_residual: also return the log-sum-exp, float32 and differentiable, as `flash_attention` does.
      **keywords: those of `dot_product_attention`; a `block_mask` made of the same `mask_mod`
        (`BlockMask.from_function`) skips blocks in which nothing is visible, and the function in those that are wholly.

    Returns:
      As `dot_product_attention`.

    Raises:
      TypeError, ValueError: as there, and for functions with other arguments or results, or with side effects.
      NotImplementedError: where a named implementation cannot run the call.
    """
    refuse_unknown("flex_attention", keywords, {})
    arguments = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **keywords}
    return attend_by_name(arguments | with_modifiers(query, score_mod, mask_mod), implementation, return_residual)


def with_modifiers(query: Any, score_mod: ScoreMod | None, mask_mod: MaskMod | None) -> dict[str, Any]:
    """The functions as an argument of `specify`. They are traced here, for within explicit sharding what they read has
    no types."""
    dtype = getattr(query, "dtype", np.dtype(np.float32))
    return {"modifiers": modifiers(score_mod, mask_mod, accumulation_dtype(dtype))}
