"""Attention over sequences that are split over devices, of one host or of many: context parallelism on JAX's own
runtime.

`order` says which tokens a device holds, `ring` sends keys and values around, `attend` exchanges heads and has the
derivative, `api` takes the caller's arguments. Nothing here knows how attention of one device is computed.
"""

from jax_mfa.context_parallel.api import (
    context_parallel_attention,
    explain_context_parallel,
    ring_attention,
    ulysses_attention,
)
from jax_mfa.context_parallel.choice import Choice
from jax_mfa.context_parallel.costs import Machine
from jax_mfa.context_parallel.order import unzigzag, zigzag

__all__ = [
    "Choice",
    "Machine",
    "context_parallel_attention",
    "explain_context_parallel",
    "ring_attention",
    "ulysses_attention",
    "unzigzag",
    "zigzag",
]
