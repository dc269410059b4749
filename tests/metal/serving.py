"""Problems whose keys and values are quantised, in pages or both, their launch plans, and the oracle's judgement."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import harness
import numpy as np
import oracle
import plans
from runners import DTYPES, Ran, run

from jax_mfa import Scheme, metal, quantize
from jax_mfa.arguments import specify
from jax_mfa.metal import kernels, tiles
from jax_mfa.metal.plan import Plan
from jax_mfa.specification import Specification
from jax_mfa.storage import PagedArray

NOBODYS = 987654321  # an entry of a table that nobody may read


@dataclasses.dataclass(frozen=True)
class Serving:
    """The newest tokens of sequences against all of theirs.

    Attributes:
      rows: new tokens of each sequence.
      lengths: tokens of each, the new ones included.
      schemes: of keys and of values; None where they are plain.
      page: tokens of a page; 0 where those of a sequence lie side by side.
      features: further arguments of `dot_product_attention`.
    """

    rows: int = 20
    lengths: tuple[int, ...] = (45, 30)
    schemes: tuple[Scheme | None, Scheme | None] = (None, None)
    page: int = 0
    h: int = 16
    v: int = 0
    n: int = 4
    k: int = 2
    dtype: str = "float32"
    variant: str | tiles.Tiles = "staged"
    features: tuple[tuple[str, Any], ...] = (("is_causal", True),)
    shift: float = 0.0  # of all keys and values

    def __str__(self) -> str:
        default = Serving()
        kinds = "-".join(x.kind if x else "plain" for x in self.schemes)
        differs = (x.name for x in dataclasses.fields(self) if x.name not in ("schemes", "features"))
        given = [f"{x}={getattr(self, x)}" for x in differs if getattr(self, x) != getattr(default, x)]
        return " ".join([kinds, *given, *(name for name, _ in self.features)])

    @functools.cached_property
    def both(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The problem as it is stored, and as it is meant: with plain keys and values, one after another."""
        rng = np.random.default_rng(5)
        lengths, batch = np.array(self.lengths, np.int32), len(self.lengths)
        width = -(-max(self.lengths) // self.page) + 1 if self.page else 0
        count = sum(-(-x // self.page) for x in self.lengths) + 2 if self.page else batch
        s = self.page or max(self.lengths)
        tables = np.full((batch, width), NOBODYS, np.int32)
        free = iter(rng.permutation(count))
        for table, length in zip(tables, self.lengths):
            used = -(-length // self.page) if self.page else 0
            table[:used] = [next(free) for _ in range(used)]
        stored, meant = {}, {}
        for name, size, scheme in zip(("key", "value"), (self.h, self.v or self.h), self.schemes):
            x = rng.standard_normal((count, s, self.k, size)) + self.shift
            x = x.astype(DTYPES[self.dtype])
            if self.page and scheme is None:  # what nobody may read
                for unused in free:
                    x[unused] = np.nan
            kept = x if scheme is None else quantize(x, scheme)
            plain = x if scheme is None else np.asarray(kept.dequantize(np.float32))
            stored[name] = PagedArray(kept, tables) if self.page else kept
            if self.page:
                plain = plain[np.minimum(tables, count - 1)].reshape(batch, -1, *plain.shape[2:])
            meant[name] = plain
        features = dict(self.features)
        common = {
            "query": rng.standard_normal((batch, self.rows, self.n, self.h)).astype(DTYPES[self.dtype]),
            "query_offset": lengths - self.rows,
            "key_value_seq_lengths": lengths,
            **{
                name: np.float32(x) if isinstance(x, tuple) and name != "local_window_size" else x
                for name, x in features.items()
            },
        }
        return {**common, **stored}, {**common, **meant}

    @functools.cached_property
    def launched(self) -> tuple[Specification, dict[str, np.ndarray]]:
        """The problem as plans are made of it."""
        spec, operands = specify(**self.both[0])
        return spec, {name: np.asarray(x) for name, x in metal.launch_arrays(spec, operands).items()}

    def plans(self, wanted: tuple[str, ...] = ()) -> list[Plan]:
        """Of the forward pass, and of the backward pass for the gradients in `wanted`."""
        spec, arrays = self.launched
        found = [kernels.forward(spec, arrays, variant=self.variant)]
        if wanted:
            found.append(kernels.backward(spec, arrays, wanted=wanted, variant=self.variant))
        return found

    def run(self, wanted: tuple[str, ...] = (), **how: Any) -> Ran:
        """These passes; `how` is for `runners.run`."""
        made, arrays = self.plans(wanted), self.launched[1]
        if not wanted:
            return run(made[0], arrays, **how)
        both = dict(zip(("forward", "backward"), made))
        return plans.both(both.__getitem__, arrays, harness.cotangents(self.both[1]), **how)

    def assert_right(self, ran: Ran) -> None:
        """Nothing was reported, and every result is the oracle's over what is meant."""
        assert ran.reports == [], "\n".join(ran.reports[:10])
        meant = self.both[1]
        d_out, d_lse = harness.cotangents(meant)
        answer = oracle.attention(**meant, d_out=d_out, d_lse=d_lse)
        dtype = DTYPES[self.dtype]
        common = {"terms": harness.terms_of(meant), "largest_score": answer.largest_score}
        harness.assert_close(ran.arrays["out"], answer.out, dtype, what="out", **common)
        harness.assert_close(plans.log_sum_exp(ran.arrays), answer.lse, "float32", what="lse", **common)
        for name in ("query", "key", "value"):
            if f"d_{name}" in ran.arrays:
                size = answer.sizes.get(name, 0.0)
                gradient = ran.arrays[f"d_{name}"]
                harness.assert_close(
                    gradient, answer.gradients[name], dtype, gradient=True, size=size, what=f"d_{name}", **common
                )
