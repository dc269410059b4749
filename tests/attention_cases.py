"""Attention problems: how tests say one, what real models ask for, and corners that are easy to get wrong.

Shared by tests of the package, of kernels and benchmarks, so it knows nothing of any. Head structure is the model's
own, lengths are short: `dataclasses.replace(case, T=..., S=...)` for others.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_mfa import BlockMask


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention problem without its numbers.

    Letters: B batch, T and S lengths of queries and keys, N query heads, K key/value heads, H and V head sizes (V = H
    if None). Features bear the names of the arguments of `jax_mfa.dot_product_attention`: those that are arrays are
    given as what makes them. `bias` and `mask` name the axes that are not broadcast, out of "BNTS"; None for no such
    argument. `block_mask` is the size of a block, `documents` a number of segments.
    """

    name: str = ""
    _: dataclasses.KW_ONLY
    B: int = 2
    T: int = 16
    S: int = 16
    N: int = 2
    K: int = 2
    H: int = 16
    V: int | None = None
    bias: str | None = None
    mask: str | None = None
    scale: float | None = None
    traced_scale: bool = False
    is_causal: bool = False
    local_window_size: Any = None
    query_offset: int | tuple[int, ...] = 0  # a tuple is an array with one entry for each batch entry
    query_seq_lengths: tuple[int, ...] | None = None
    key_value_seq_lengths: tuple[int, ...] | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: bool = False
    sinks: bool = False
    documents: int = 0
    key_value_ranges: bool = False
    block_mask: tuple[int, int] | None = None
    dropout_rate: float = 0.0
    dtype: str = "float32"

    def __str__(self) -> str:
        default, sizes = type(self)(), " ".join(f"{x}{getattr(self, x)}" for x in "BTSNKH")
        rest = [x.name for x in dataclasses.fields(self) if x.name not in ("name", "dtype", *"BTSNKHV")]
        given = [f"{x}={getattr(self, x)}" for x in rest if getattr(self, x) != getattr(default, x)]
        return " ".join([*filter(None, [self.name]), sizes, f"V{self.V or self.H} {self.dtype}", *given])

    def arguments(self, dtype: str | None = None, seed: int = 0) -> dict[str, Any]:
        """Random arguments for `jax_mfa.flash_attention`, as numpy arrays rounded to `dtype`, by default the case's."""
        dtype = dtype or self.dtype
        rng = np.random.default_rng([seed, *self.name.encode()])
        normal = lambda *shape: rng.standard_normal(shape).astype(dtype)
        B, T, S, N = self.B, self.T, self.S, self.N
        scores = lambda axes: tuple(d if axis in axes else 1 for axis, d in zip("BNTS", (B, N, T, S)))
        x: dict[str, Any] = {
            "query": normal(B, T, N, self.H),
            "key": normal(B, S, self.K, self.H),
            "value": normal(B, S, self.K, self.V or self.H),
        }
        if self.bias is not None:
            x["bias"] = normal(*scores(self.bias))
        if self.mask is not None:
            x["mask"] = rng.random(scores(self.mask)) < 0.7
        if self.scale is not None or self.traced_scale:
            scale = self.H**-0.5 * 1.3 if self.scale is None else self.scale
            x["scale"] = np.asarray(scale, np.promote_types(dtype, np.float32)) if self.traced_scale else scale
        if self.is_causal:
            x["is_causal"] = True
        if self.query_offset:
            of_rows = isinstance(self.query_offset, tuple)
            x["query_offset"] = np.array(self.query_offset, np.int32) if of_rows else self.query_offset
        for name in ("local_window_size", "logits_soft_cap"):
            if getattr(self, name) is not None:
                x[name] = getattr(self, name)
        for name in ("query_seq_lengths", "key_value_seq_lengths"):
            if getattr(self, name) is not None:
                x[name] = np.array(getattr(self, name), np.int32)
        if self.alibi_slopes:
            # the slopes of the paper for a power of two of heads, 2⁻⁸ⁿᐟᴺ
            x["alibi_slopes"] = (2.0 ** (-8.0 * np.arange(1, N + 1) / N)).astype(dtype)
        if self.sinks:
            x["sinks"] = normal(N)
        if self.documents:
            x["query_segment_ids"] = np.sort(rng.integers(0, self.documents, (B, T)).astype(np.int32), axis=1)
            x["key_value_segment_ids"] = np.sort(rng.integers(0, self.documents, (B, S)).astype(np.int32), axis=1)
        if self.key_value_ranges:
            x["key_value_ranges"] = rng.integers(-1, S + 2, (B, T, 2)).astype(np.int32)
        if self.block_mask is not None:
            blocks = rng.random((B, N, -(-T // self.block_mask[0]), -(-S // self.block_mask[1]))) < 0.6
            x["block_mask"] = BlockMask(blocks, self.block_mask)
        if self.dropout_rate:
            x["dropout_rate"] = self.dropout_rate
            x["dropout_seed"] = np.array([0x1234567, 0x89ABCDE], np.uint32)
        return x


MODELS = (
    Case("minilm", B=3, T=21, S=21, N=12, K=12, H=32, key_value_seq_lengths=(21, 5, 13)),
    Case("bert_padding_mask", T=17, S=17, N=4, K=4, H=64, mask="BS", dropout_rate=0.1),
    Case("vit", T=17, S=17, N=3, K=3, H=64),
    Case("gpt2", T=23, S=23, N=3, K=3, H=64, is_causal=True, dropout_rate=0.1),
    Case("llama", B=1, T=19, S=19, N=32, K=8, H=128, is_causal=True),
    Case("llama_prefill_chunk", T=5, S=23, N=8, K=2, H=32, is_causal=True, query_offset=18),
    Case("falcon_multi_query", T=11, S=11, N=9, K=1, H=16, is_causal=True),
    Case("mistral_window", T=24, S=24, N=8, K=2, H=16, is_causal=True, local_window_size=(6, 0)),
    Case(
        "gemma2",
        B=1,
        T=18,
        S=18,
        N=8,
        K=4,
        H=256,
        is_causal=True,
        local_window_size=(7, None),
        logits_soft_cap=50.0,
        scale=256**-0.5,
    ),
    Case("gpt_oss", B=1, T=20, S=20, N=16, K=2, H=64, is_causal=True, local_window_size=(8, 0), sinks=True),
    Case("bloom", T=15, S=15, N=8, K=8, H=16, is_causal=True, alibi_slopes=True),
    Case("alibi_both_ways", T=13, S=17, N=4, K=4, H=16, alibi_slopes=True),
    Case("t5_relative_bias", T=14, S=14, N=4, K=4, H=16, bias="NTS", scale=1.0),
    Case("swin_shifted_window", B=3, T=16, S=16, N=3, K=3, H=32, bias="NTS", mask="BTS"),
    Case(
        "longformer",
        T=25,
        S=25,
        N=2,
        K=2,
        H=16,
        local_window_size=(4, 4),
        query_seq_lengths=(25, 11),
        key_value_seq_lengths=(25, 11),
    ),
    Case("mla_wide_keys", T=12, S=12, N=4, K=4, H=24, V=16, is_causal=True),
    Case("perceiver", T=4, S=41, N=2, K=2, H=16),
    Case("whisper_cross", T=7, S=30, N=6, K=6, H=64),
    Case("packed_documents", B=2, T=29, S=29, N=4, K=2, H=16, is_causal=True, documents=3),
    Case(
        "decode",
        B=3,
        T=1,
        S=33,
        N=8,
        K=2,
        H=64,
        is_causal=True,
        query_offset=(4, 32, 17),
        key_value_seq_lengths=(5, 33, 18),
    ),
)

CORNERS = (
    Case("block_sparse", T=19, S=22, N=4, K=2, block_mask=(4, 8)),
    Case("ranges", B=3, T=41, S=37, N=4, K=2, key_value_ranges=True),
    Case("ranges_decode", B=2, T=2, S=600, N=4, K=2, H=16, key_value_ranges=True, is_causal=True, query_offset=598),
    Case("more_queries_than_keys", T=27, S=9, is_causal=True),
    Case("negative_offset", T=13, S=13, is_causal=True, query_offset=(-3, 2)),
    Case("window_right_only", T=14, S=11, local_window_size=(None, 2)),
    Case("window_left_only", T=11, S=14, local_window_size=(2, None), query_offset=-1),
    Case("window_of_itself", T=9, S=9, local_window_size=0),
    Case("learnt_temperature", T=10, S=12, traced_scale=True),
    Case("soft_cap_after_bias", T=9, S=9, bias="BNTS", logits_soft_cap=0.8, traced_scale=True),
    Case("single_everything", B=1, T=1, S=1, N=1, K=1, H=1, V=1),
    Case(
        "everything",
        T=19,
        S=23,
        N=4,
        K=2,
        H=12,
        V=10,
        bias="NTS",
        mask="BTS",
        traced_scale=True,
        is_causal=True,
        local_window_size=(9, 3),
        query_offset=(4, 1),
        query_seq_lengths=(18, 19),
        key_value_seq_lengths=(23, 20),
        logits_soft_cap=4.0,
        alibi_slopes=True,
        sinks=True,
        documents=2,
        block_mask=(5, 6),
        dropout_rate=0.2,
    ),
)

CASES = MODELS + CORNERS
BY_NAME = {case.name: case for case in CASES}
