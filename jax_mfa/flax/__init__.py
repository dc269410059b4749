"""jax_mfa in flax: `attention_fn` for flax's own multi-head modules, and modules of its own, for linen and nnx alike.

`linen` and `nnx` hold the same two names, `attention_fn` and `FlashMultiHeadAttention`. What they share, `_drop_in` for
the first and `_multi_head` for the second, knows arrays and a module's attributes: no variable, no random stream.
"""

try:
    import flax as _flax  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("jax_mfa.flax needs flax: pip install flax", name=error.name) from error

from jax_mfa.flax import linen, nnx
from jax_mfa.flax._multi_head import rotary_embedding

__all__ = ["linen", "nnx", "rotary_embedding"]
