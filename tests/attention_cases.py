"""Attention problems by name: what real models ask for, and corners that are easy to get wrong.

Shared by tests and benchmarks, so it knows nothing of either. Head structure is the model's own, lengths are short:
`dataclasses.replace(case, T=..., S=...)` for others.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_mfa import BlockMask


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention problem without its numbers.

    Letters: B batch, T and S lengths of queries and keys, N query heads, K key/value heads, H and V head sizes.
    `bias` and `mask` name the axes that are not broadcast, out of "BNTS"; None for no such argument.
    """

    name: str
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
    window: Any = None
    offset: int | tuple[int, ...] = 0  # a tuple is an array with one entry for each batch row
    query_lengths: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    documents: int = 0
    ranges: bool = False
    block: tuple[int, int] | None = None
    dropout: float = 0.0

    def arguments(self, dtype="float32", seed: int = 0) -> dict[str, Any]:
        """Random arguments for `jax_mfa.flash_attention`, as numpy arrays rounded to `dtype`."""
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
        if self.window is not None:
            x["local_window_size"] = self.window
        if self.offset:
            x["query_offset"] = self.offset if isinstance(self.offset, int) else np.array(self.offset, np.int32)
        if self.query_lengths is not None:
            x["query_seq_lengths"] = np.array(self.query_lengths, np.int32)
        if self.key_lengths is not None:
            x["key_value_seq_lengths"] = np.array(self.key_lengths, np.int32)
        if self.cap is not None:
            x["logits_soft_cap"] = self.cap
        if self.alibi:
            # the slopes of the paper for a power of two of heads, 2⁻⁸ⁿᐟᴺ
            x["alibi_slopes"] = (2.0 ** (-8.0 * np.arange(1, N + 1) / N)).astype(dtype)
        if self.sinks:
            x["sinks"] = normal(N)
        if self.documents:
            x["query_segment_ids"] = np.sort(rng.integers(0, self.documents, (B, T)).astype(np.int32), axis=1)
            x["key_value_segment_ids"] = np.sort(rng.integers(0, self.documents, (B, S)).astype(np.int32), axis=1)
        if self.ranges:
            x["key_value_ranges"] = rng.integers(-1, S + 2, (B, T, 2)).astype(np.int32)
        if self.block is not None:
            blocks = rng.random((B, N, -(-T // self.block[0]), -(-S // self.block[1]))) < 0.6
            x["block_mask"] = BlockMask(blocks, self.block)
        if self.dropout:
            x["dropout_rate"] = self.dropout
            x["dropout_seed"] = np.array([0x1234567, 0x89ABCDE], np.uint32)
        return x


MODELS = (
    Case("minilm", B=3, T=21, S=21, N=12, K=12, H=32, key_lengths=(21, 5, 13)),
    Case("bert_padding_mask", T=17, S=17, N=4, K=4, H=64, mask="BS", dropout=0.1),
    Case("vit", T=17, S=17, N=3, K=3, H=64),
    Case("gpt2", T=23, S=23, N=3, K=3, H=64, is_causal=True, dropout=0.1),
    Case("llama", B=1, T=19, S=19, N=32, K=8, H=128, is_causal=True),
    Case("llama_prefill_chunk", T=5, S=23, N=8, K=2, H=32, is_causal=True, offset=18),
    Case("falcon_multi_query", T=11, S=11, N=9, K=1, H=16, is_causal=True),
    Case("mistral_window", T=24, S=24, N=8, K=2, H=16, is_causal=True, window=(6, 0)),
    Case("gemma2", B=1, T=18, S=18, N=8, K=4, H=256, is_causal=True, window=(7, None), cap=50.0, scale=256**-0.5),
    Case("gpt_oss", B=1, T=20, S=20, N=16, K=2, H=64, is_causal=True, window=(8, 0), sinks=True),
    Case("bloom", T=15, S=15, N=8, K=8, H=16, is_causal=True, alibi=True),
    Case("alibi_both_ways", T=13, S=17, N=4, K=4, H=16, alibi=True),
    Case("t5_relative_bias", T=14, S=14, N=4, K=4, H=16, bias="NTS", scale=1.0),
    Case("swin_shifted_window", B=3, T=16, S=16, N=3, K=3, H=32, bias="NTS", mask="BTS"),
    Case("longformer", T=25, S=25, N=2, K=2, H=16, window=(4, 4), query_lengths=(25, 11), key_lengths=(25, 11)),
    Case("mla_wide_keys", T=12, S=12, N=4, K=4, H=24, V=16, is_causal=True),
    Case("perceiver", T=4, S=41, N=2, K=2, H=16),
    Case("whisper_cross", T=7, S=30, N=6, K=6, H=64),
    Case("packed_documents", B=2, T=29, S=29, N=4, K=2, H=16, is_causal=True, documents=3),
    Case("decode", B=3, T=1, S=33, N=8, K=2, H=64, is_causal=True, offset=(4, 32, 17), key_lengths=(5, 33, 18)),
)

CORNERS = (
    Case("block_sparse", T=19, S=22, N=4, K=2, block=(4, 8)),
    Case("ranges", B=3, T=41, S=37, N=4, K=2, ranges=True),
    Case("ranges_decode", B=2, T=2, S=600, N=4, K=2, H=16, ranges=True, is_causal=True, offset=598),
    Case("more_queries_than_keys", T=27, S=9, is_causal=True),
    Case("negative_offset", T=13, S=13, is_causal=True, offset=(-3, 2)),
    Case("window_right_only", T=14, S=11, window=(None, 2)),
    Case("window_left_only", T=11, S=14, window=(2, None), offset=-1),
    Case("window_of_itself", T=9, S=9, window=0),
    Case("learnt_temperature", T=10, S=12, traced_scale=True),
    Case("soft_cap_after_bias", T=9, S=9, bias="BNTS", cap=0.8, traced_scale=True),
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
        window=(9, 3),
        offset=(4, 1),
        query_lengths=(18, 19),
        key_lengths=(23, 20),
        cap=4.0,
        alibi=True,
        sinks=True,
        documents=2,
        block=(5, 6),
        dropout=0.2,
    ),
)

CASES = MODELS + CORNERS
BY_NAME = {case.name: case for case in CASES}
