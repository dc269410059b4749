"""JAX's strict modes in what takes lengths, tables, bounds and schemes: no rank or dtype is promoted."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import arrays, mesh_of, needs_eight_devices

import jax_mfa
from jax_mfa import Scheme
from jax_mfa.compat import x64

MODES = [(False, "int64"), (True, "int64"), (True, "uint8"), (True, "list")]
SCHEMES = (
    Scheme("int8", tokens=3, channels=5, center=7),
    Scheme("int4", True, channels=None, center=4),
    Scheme("fp8", tokens=None, channels=3),
)
PER_HEAD = arrays((4,), (2, 4), seed=3)
FEATURES = {"sinks": PER_HEAD[0], "alibi_slopes": abs(PER_HEAD[1]), "local_window_size": 4, "logits_soft_cap": 2.0}


def integers(kind, *given):
    return given if kind == "list" else tuple(np.array(x, kind) for x in given)


def lowered(attend, query, indices):
    """Lowers the gradient of the query, with these indices as they are, and where they are arrays also traced."""
    gradient = jax.grad(lambda query, *indices: attend(query, *indices).astype(jnp.float32).sum())
    jax.jit(lambda query: gradient(query, *indices)).lower(query)
    if all(isinstance(x, np.ndarray) for x in indices):
        jax.jit(gradient).lower(query, *indices)


def paged(kind, implementation):
    q, rows, pool = arrays((2, 3, 4, 8), (6, 4, 8), (3, 8, 2, 8))
    tables, lengths, starts = integers(kind, [[0, 1], [2, 0]], [11, 5], [0, 4, 6])

    def attend(pages, q, tables, lengths, starts=None):
        keywords = {**FEATURES, "query_start_locs": starts, "implementation": implementation}
        return jax_mfa.paged_attention(q, pages, pages, tables, lengths, **keywords)

    for pages in (pool, jax_mfa.quantize(pool, Scheme("int4", channels=4))):
        lowered(functools.partial(attend, pages), q, (tables, lengths))
        lowered(functools.partial(attend, pages), rows, (tables, lengths, starts))


def packed(kind, implementation):
    q, k = arrays((7, 4, 8), (7, 2, 8))
    bounds, offsets = integers(kind, [0, 3, 7], [2, 1])

    def attend(q, bounds, offsets=0):
        keywords = {"is_causal": True, "query_offset": offsets, "implementation": implementation}
        return jax_mfa.flash_attention_varlen(q, k, k, bounds, **keywords)[0]

    lowered(attend, q, (bounds,))
    lowered(attend, q, (bounds, offsets))


def cached(kind, implementation):
    cache, new, q = arrays((2, 5, 2, 8), (2, 3, 2, 8), (2, 3, 4, 8))

    def attend(ring, q, lengths, counts):
        keywords = {"ring": ring, "local_window_size": (4, 0), "implementation": implementation}
        return jax_mfa.cache.attend(q, new, new, cache, cache, lengths, counts, **keywords)[0]

    for ring in (False, True):
        lowered(functools.partial(attend, ring), q, integers(kind, [1, 2], [2, 3]))


def quantised(kind, implementation):
    q, k = arrays((2, 5, 4, 8), (2, 19, 2, 8))
    attend = lambda q, lengths: jax_mfa.dot_product_attention(
        q, kept, kept, is_causal=True, key_value_seq_lengths=lengths, implementation=implementation
    )
    for scheme in SCHEMES:
        kept = jax_mfa.quantize(k, scheme)
        kept.dequantize()
        lowered(attend, q, integers(kind, [12, 19]))


@contextlib.contextmanager
def strict(wide):
    with x64() if wide else contextlib.nullcontext():
        with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
            yield


@pytest.mark.share(16)
@pytest.mark.parametrize("wide, kind", MODES, ids=[f"{kind} in x64" if wide else kind for wide, kind in MODES])
@pytest.mark.parametrize("call", [paged, packed, cached, quantised], ids=lambda x: x.__name__)
def test_nothing_is_promoted(call, wide, kind):
    with strict(wide):
        call(kind, "blockwise")
        if kind == "uint8":
            call(kind, "reference")


@pytest.mark.share(2)
@needs_eight_devices
@pytest.mark.parametrize("wide", [False, True], ids=["", "x64"])
def test_nothing_is_promoted_over_devices(wide):
    (q,), where = arrays((2, 16, 4, 8)), {"mesh": mesh_of(4), "axis_name": "ring"}
    lengths = np.array([3, 9])
    features = {name: x for name, x in FEATURES.items() if name != "alibi_slopes"}
    calls = (
        lambda q: jax_mfa.ring_attention(q, q, q, order="zigzag", is_causal=True, **where),
        lambda q: jax_mfa.ulysses_attention(q, q, q, key_value_seq_lengths=lengths, **where),
        lambda q: jax_mfa.sharded_decode_attention(q[:, :2], q, q, lengths, **where, **features),
        lambda q: jax_mfa.sharded_append(q, q, lengths, q[:, :2], q[:, :2], **where)[0],
    )
    with strict(wide):
        for call in calls:
            lowered(call, q, ())
