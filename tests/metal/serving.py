"""Problems whose keys and values are quantised, in pages or both, their launch plans, and the oracle's judgement."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import harness
import numpy as np
import oracle
import plans
from attention_cases import Case
from runners import DTYPES, Ran, run

from jax_mfa import Scheme, metal, quantize
from jax_mfa.arguments import specify
from jax_mfa.kv_cache.storage import PagedArray
from jax_mfa.metal import plans as launch_plans
from jax_mfa.metal import tiles
from jax_mfa.metal.plan import Plan
from jax_mfa.problem import Specification

NOBODYS = 987654321  # an entry of a table that nobody may read


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving(Case):
    """A case of the newest T tokens of sequences against all of theirs, which `key_value_seq_lengths` counts, the new
    ones included. These say B and S too, and where rows stand.

    Attributes:
      schemes: of keys and of values; None where they are plain.
      page: tokens of a page; 0 where those of a sequence lie side by side.
      shift: of all keys and values.
    """

    T: int = 20
    N: int = 4
    is_causal: bool = True
    key_value_seq_lengths: tuple[int, ...] = (45, 30)
    schemes: tuple[Scheme | None, Scheme | None] = (None, None)
    page: int = 0
    variant: str | tiles.Tiles = "staged"
    shift: float = 0.0

    def __post_init__(self):
        lengths = self.key_value_seq_lengths
        object.__setattr__(self, "B", len(lengths))
        object.__setattr__(self, "S", max(lengths))
        object.__setattr__(self, "query_offset", tuple(x - self.T for x in lengths))

    def __str__(self) -> str:
        kinds = "-".join(x.kind if x else "plain" for x in self.schemes)
        return f"{kinds} {Case.__str__(dataclasses.replace(self, schemes=(None, None)))}"

    @functools.cached_property
    def both(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The problem as it is stored, and as it is meant: with plain keys and values, one after another."""
        rng = np.random.default_rng(5)
        lengths, batch = self.key_value_seq_lengths, self.B
        width = -(-self.S // self.page) + 1 if self.page else 0
        count = sum(-(-x // self.page) for x in lengths) + 2 if self.page else batch
        tables = np.full((batch, width), NOBODYS, np.int32)
        free = iter(rng.permutation(count))
        for table, length in zip(tables, lengths):
            used = -(-length // self.page) if self.page else 0
            table[:used] = [next(free) for _ in range(used)]
        meant = self.arguments()
        stored = dict(meant)
        for name, scheme in zip(("key", "value"), self.schemes):
            size = meant[name].shape[-1]
            x = rng.standard_normal((count, self.page or self.S, self.K, size)) + self.shift
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
        return stored, meant

    @functools.cached_property
    def launched(self) -> tuple[Specification, dict[str, np.ndarray]]:
        """The problem as plans are made of it."""
        spec, operands = specify(**self.both[0])
        return spec, {name: np.asarray(x) for name, x in metal.launch_arrays(spec, operands).items()}

    def plans(self, wanted: tuple[str, ...] = ()) -> list[Plan]:
        """Of the forward pass, and of the backward pass for the gradients in `wanted`."""
        spec, arrays = self.launched
        found = [launch_plans.forward(spec, arrays, variant=self.variant)]
        if wanted:
            found.append(launch_plans.backward(spec, arrays, wrt=wanted, variant=self.variant))
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
