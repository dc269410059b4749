"""Keys and values as kernels are told of them where they are no plain arrays: the MSL type of their source (see
`metal/core/stored.h`). Knows no kernel."""

from __future__ import annotations

from jax_mfa.problem import Storage

_MOST = 2**30  # of tokens or channels of a block: more than there are


def encoding(storage: Storage | None, scalar: str) -> str:
    """The MSL type of how numbers of type `scalar` are stored."""
    if storage is None:
        return f"Plain<{scalar}>"
    x = storage.scheme
    symmetric = str(x.symmetric).lower()
    tokens, channels, center = (min(n or 0, _MOST) for n in (x.tokens, x.channels, x.center))
    return f"Quantized<{scalar}, {x.kind}_kind, {symmetric}, {tokens}, {channels}, {center}>"


def stored_type(storage: Storage | None, page_size: int | None, scalar: str, size: int) -> str:
    """The MSL type of rows of `size` numbers that lie in a row of an array, or in pages."""
    return f"Stored<{encoding(storage, scalar)}, {size}, {page_size or 0}>"
