"""Flash attention for JAX on Apple GPUs, and lean, fast attention everywhere else.

`dot_product_attention` takes the place of `jax.nn.dot_product_attention`. See docs/getting-started.md for a tour.
"""

import sys

from jax.export import DisabledSafetyCheck

from jax_mfa.api import decode_attention, dot_product_attention, explain, flash_attention, record
from jax_mfa.choice import Explanation
from jax_mfa.context_parallel.api import SequenceSharding, context_parallel_attention, ring_attention, ulysses_attention
from jax_mfa.context_parallel.costs import explain_context_parallel
from jax_mfa.context_parallel.decode import sharded_append, sharded_decode_attention
from jax_mfa.context_parallel.layout import unzigzag, zigzag
from jax_mfa.flex import masks
from jax_mfa.flex.api import flex_attention
from jax_mfa.flex.block_mask import BlockMask
from jax_mfa.kv_cache import contiguous as cache
from jax_mfa.kv_cache.page_book import OutOfPages, PageBook
from jax_mfa.kv_cache.paged import paged_attention
from jax_mfa.kv_cache.pool import PagedKVCache
from jax_mfa.kv_cache.quantized import quantize
from jax_mfa.kv_cache.storage import QuantizedArray, Scheme
from jax_mfa.metal.runtime import TARGETS, register_targets
from jax_mfa.override import override_jax_nn
from jax_mfa.partial import merge
from jax_mfa.recording import Choice, Recorder
from jax_mfa.tuning.tune import Tuned, tune
from jax_mfa.varlen import flash_attention_varlen

__version__ = "0.1.0"

__all__ = [
    "DISABLE_EXPORT_CHECKS",
    "BlockMask",
    "Choice",
    "Explanation",
    "OutOfPages",
    "PageBook",
    "PagedKVCache",
    "QuantizedArray",
    "Recorder",
    "Scheme",
    "SequenceSharding",
    "Tuned",
    "cache",
    "context_parallel_attention",
    "decode_attention",
    "dot_product_attention",
    "explain",
    "explain_context_parallel",
    "flash_attention",
    "flash_attention_varlen",
    "flex_attention",
    "masks",
    "merge",
    "override_jax_nn",
    "paged_attention",
    "quantize",
    "record",
    "ring_attention",
    "sharded_append",
    "sharded_decode_attention",
    "tune",
    "ulysses_attention",
    "unzigzag",
    "zigzag",
]

# what `jax.export.export(..., disabled_checks=...)` needs for programs that hold Metal calls
DISABLE_EXPORT_CHECKS: tuple[DisabledSafetyCheck, ...] = tuple(map(DisabledSafetyCheck.custom_call, TARGETS))

# `import jax_mfa.cache` too
sys.modules[f"{__name__}.cache"] = cache
sys.modules[f"{__name__}.masks"] = masks
register_targets()
