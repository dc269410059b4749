"""Problems of the kernels, their launch plans with any tile sizes, and the oracle's judgement of what they give.

Plans run where `runners` says. Here is the one statement of how far results may lie from the oracle.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import harness
import jax
import ml_dtypes
import numpy as np
import oracle
from attention_cases import Case
from runners import DTYPES, Ran, run

from jax_mfa import metal
from jax_mfa.arguments import specify
from jax_mfa.cli import show
from jax_mfa.metal import tiles
from jax_mfa.metal.plan import Plan
from jax_mfa.problem import Operands, Specification

ROWS = ("row_max", "row_sum")  # what the forward pass leaves of each row for the backward pass
# the implementation behind the fixture `on_device`, whatever the process was started with
ON_METAL = dataclasses.replace(harness.BY_NAME_OF_IMPLEMENTATION["metal"], available=True)
SINGLE = 2e-6  # of the largest output: what float32 arithmetic may cost a forward pass


# what a problem of the kernels may have
PLANNED = ("is_causal", "local_window_size", "query_offset", "query_seq_lengths", "key_value_seq_lengths")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(Case):
    """A case of the kernels, of the features `PLANNED`, and how it is planned. Windows may also end before a row.

    Attributes:
      variant: a key of `tiles.VARIANTS`, or tiles.
      planted: whether NaN and infinity stand wherever nobody may look.
    """

    T: int = 37
    S: int = 53
    K: int = 1
    variant: str | tiles.Tiles = "staged"
    planted: bool = False

    def __post_init__(self):
        others = [x for x in dataclasses.fields(Case) if x.name not in (*PLANNED, "name", "dtype", *"BTSNKHV")]
        beyond = [x.name for x in others if getattr(self, x.name) != x.default]
        assert not beyond, f"a Problem has no {beyond[0]}"

    @property
    def of_rows(self) -> bool:
        """Whether offset and lengths differ by batch row."""
        lengths = self.query_seq_lengths, self.key_value_seq_lengths
        return isinstance(self.query_offset, tuple) or lengths != (None, None)

    @property
    def window(self) -> tuple[int | None, int | None]:
        return (None, None) if self.local_window_size is None else self.local_window_size

    @property
    def specification(self) -> Specification:
        offset = 0 if isinstance(self.query_offset, tuple) else self.query_offset
        return Specification(is_causal=self.is_causal, window=self.window, scale=self.H**-0.5, query_offset=offset)

    def arguments(self, dtype: str | None = None, seed: int = 3) -> dict[str, Any]:
        """The problem as the public functions and the oracle take it."""
        found = super().arguments(dtype, seed)
        if self.planted:
            see = self.visible()
            found["query"][~see.any(2)] = np.nan
            found["key"][~see.any(1)] = np.inf
            found["value"][~see.any(1)] = np.nan
        return found

    def visible(self) -> np.ndarray:
        """[B, T, S]: which rows see which columns."""
        lengths = lambda x, size: np.array([size] * self.B if x is None else x)[:, None, None]
        t, s = np.arange(self.T)[None, :, None], np.arange(self.S)[None, None, :]
        position = t + np.broadcast_to(self.query_offset, (self.B,))[:, None, None]
        see = (t < lengths(self.query_seq_lengths, self.T)) & (s < lengths(self.key_value_seq_lengths, self.S))
        left, right = self.window
        if self.is_causal:
            see = see & (s <= position)
        if left is not None:
            see = see & (s >= position - left)
        return see if right is None else see & (s <= position + right)

    def cotangents(self, arguments) -> tuple[np.ndarray, np.ndarray]:
        d_out, d_lse = harness.cotangents(arguments)
        if self.planted:
            blind = ~self.visible().any(2)
            d_out[blind], d_lse[blind] = np.nan, np.nan
        return d_out, d_lse

    def arrays(self, arguments) -> dict[str, np.ndarray]:
        """The inputs of the forward plan."""
        found = {name: arguments[name] for name in ("query", "key", "value")}
        if self.of_rows:
            columns = {"query_offset": (self.query_offset, 0), "query_lengths": (self.query_seq_lengths, self.T)}
            columns["key_lengths"] = (self.key_value_seq_lengths, self.S)
            for name, (x, default) in columns.items():
                found[name] = np.broadcast_to(default if x is None else x, (self.B,)).astype(np.int32)
        return found

    def plan(self, of_pass: str = "forward") -> Plan:
        shaped = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, DTYPES[dtype])
        of_rows = shaped("int32", self.B) if self.of_rows else None
        operands = Operands(
            shaped(self.dtype, self.B, self.T, self.N, self.H),
            shaped(self.dtype, self.B, self.S, self.K, self.H),
            shaped(self.dtype, self.B, self.S, self.K, self.V or self.H),
            query_offset=of_rows,
            query_lengths=of_rows,
            key_lengths=of_rows,
        )
        return show.plan_of(self.specification, operands, of_pass, self.variant)


def both(plan: Callable[[str], Plan], arrays, cotangents, **how) -> Ran:
    """The plans "forward" and "backward", the second fed by the first: the arrays and dispatches of both."""
    forward = run(plan("forward"), arrays, **how)
    d_out, d_lse = cotangents
    passed = {x: forward.arrays[x] for x in ("out", *ROWS)} | {"d_out": d_out, "d_lse": d_lse}
    return forward | run(plan("backward"), arrays | passed, **how)


def run_call(arguments: dict[str, Any], *, variant: str | tiles.Tiles = "staged", **how) -> Ran:
    """Both passes of a call of `flash_attention` with these arguments, with random cotangents; `how` is for `run`."""
    spec, operands = specify(**arguments)
    arrays = {name: np.asarray(x) for name, x in metal.launch_arrays(spec, operands).items()}
    plan = lambda of_pass: show.plan_of(spec, operands, of_pass, variant)
    return both(plan, arrays, harness.cotangents(arguments), **how)


def evaluate(problem: Problem, **how) -> Ran:
    """Both passes of a problem, the arrays and dispatches of both; `how` is for `run`."""
    arguments = problem.arguments()
    return both(problem.plan, problem.arrays(arguments), problem.cotangents(arguments), **how)


@functools.lru_cache(maxsize=64)
def answer(problem: Problem) -> oracle.Answer:
    arguments = problem.arguments()
    d_out, d_lse = problem.cotangents(arguments)
    return oracle.attention(**arguments, d_out=d_out, d_lse=d_lse)


@functools.lru_cache(maxsize=64)
def largest_term(problem: Problem) -> float:
    """Of the sums behind dq and dk, the largest term before it cancels.

    dS = P ∘ (dO·v - D) is a difference of two sums over V, which cancel wholly where a row sees one column; each is
    known to an ulp of the root of the sum of its terms' squares.
    """
    x = problem.arguments()
    d_out, _ = problem.cotangents(x)
    group = problem.N // problem.K
    wide = lambda a, repeat=1: np.repeat(np.nan_to_num(a.astype(np.float64), posinf=0, neginf=0), repeat, axis=2)
    q, k, v, d_out = wide(x["query"]), wide(x["key"], group), wide(x["value"], group), wide(d_out)
    lse = answer(problem).lse.transpose(0, 2, 1)[..., None]
    scores = np.einsum("btnh,bsnh->bnts", q, k) * problem.H**-0.5
    see = problem.visible()[:, None] & np.isfinite(lse)
    p = np.exp(np.where(see, scores - np.where(np.isfinite(lse), lse, 0), -np.inf))
    root = np.sqrt(np.einsum("btnv,bsnv->bnts", d_out**2, v**2))
    return float((p * root).max() * problem.H**-0.5 * max(np.abs(k).max(), np.abs(q).max()))


def ulp(x: np.ndarray, dtype: str) -> np.ndarray:
    """A unit in the last place of numbers of a dtype."""
    about = ml_dtypes.finfo(DTYPES[dtype])
    exponent = np.frexp(np.maximum(np.abs(x), float(about.smallest_normal)))[1] - 1
    return float(about.eps) * 2.0**exponent


def assert_forward(got: np.ndarray, expected: np.ndarray, dtype: str, what: str = "out") -> None:
    """Float32: 2e-6 of the largest output. 16 bits: one unit in the last place beside that."""
    allowed = SINGLE * np.abs(expected).max(initial=0.0) + (0 if dtype == "float32" else ulp(expected, dtype))
    harness.assert_within(got, expected, allowed, what)


def log_sum_exp(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The log-sum-exp of maximum and sum of each row, in float64; minus infinity where a row sees nothing."""
    row_max, row_sum = (arrays[name].astype(np.float64) for name in ROWS)
    assert (np.isfinite(row_max) | np.isnan(row_sum)).all()
    with np.errstate(divide="ignore"):
        return row_max + np.log(row_sum)


def assert_log_sum_exp(got: np.ndarray, lse: np.ndarray) -> None:
    """2e-6 of the largest, which counts as 1 at least."""
    harness.assert_within(got, lse, SINGLE * np.abs(lse[np.isfinite(lse)]).max(initial=1.0), "lse")


def assert_right(problem: Problem, ran: Ran) -> None:
    """Nothing was reported, and every result is the oracle's."""
    assert ran.reports == [], "\n".join(ran.reports[:10])
    wanted, arguments = answer(problem), problem.arguments()
    assert_forward(ran.arrays["out"], wanted.out, problem.dtype)
    assert_log_sum_exp(log_sum_exp(ran.arrays), wanted.lse)
    for name in ("query", "key", "value"):
        if f"d_{name}" not in ran.arrays:  # the forward pass alone
            continue
        harness.assert_close(
            ran.arrays[f"d_{name}"],
            wanted.gradients[name],
            DTYPES[problem.dtype],
            terms=harness.terms_of(arguments),
            largest_score=wanted.largest_score,
            gradient=True,
            size=0.0 if name == "value" else largest_term(problem),
            what=f"d_{name}",
        )


def check(problem: Problem, *, seed: int = 0) -> Ran:
    ran = evaluate(problem, seed=seed)
    assert_right(problem, ran)
    return ran
