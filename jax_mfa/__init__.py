"""Flash attention for JAX on Apple GPUs, and lean, fast attention everywhere else.

`dot_product_attention` takes the place of `jax.nn.dot_product_attention`. See the README for a tour.
"""

from jax_mfa.api import Explanation, decode_attention, dot_product_attention, explain, flash_attention
from jax_mfa.block_mask import BlockMask
from jax_mfa.metal.runtime import register_targets

__version__ = "0.1.0"

__all__ = ["BlockMask", "Explanation", "decode_attention", "dot_product_attention", "explain", "flash_attention"]

register_targets()
