"""Finds the fastest tiles for a problem on this machine: `jax_mfa.tune`.

Each plan of a problem (forward and backward of `blockwise`; where Metal can be used, its kernels, and how decoding
splits the keys) is run with the usual tiles and with others that the planner would accept, nearest first. What gives
another result, or does not compile, is left out before anything is timed. All take turns; the fastest is then timed
anew against the usual tiles, call by call, and wins if the median of these ratios is a gain beyond noise. Winners are
kept for this chip (`tuned`), and serve programs that are traced from then on.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mfa import blockwise, checks, choice, metal
from jax_mfa.arguments import specify_abstract
from jax_mfa.problem import Operands, Specification
from jax_mfa.recording import Recorder
from jax_mfa.tuning import timing, tuned

LEAST_GAIN = 1.03  # less is noise, or not worth a program of its own
SHORTEST = 0.3  # seconds of timing, each time
PASSES = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What was found for one plan of a problem.

    Attributes:
      plan: "blockwise forward", …
      problem: as text.
      usual, best: tiles, those of tables and rules and the fastest; the same where nothing was faster beyond noise.
      seconds: of a call with the usual tiles, the median.
      gain: the time of the usual tiles over that of the best, the median of pairs of calls; 1 where they are the same.
      tried, wrong: how many other tiles were tried, and how many of them failed or gave another result.
    """

    plan: str
    problem: str
    usual: tuple[int, ...]
    best: tuple[int, ...]
    seconds: float
    gain: float
    tried: int
    wrong: int

    def __str__(self) -> str:
        won = f"{list(self.best)}, {self.gain:.2f} times as fast" if self.best != self.usual else "nothing faster"
        others = f"{self.tried} others tried, {self.wrong} of them wrong"
        return f"{self.plan} {self.problem}: {list(self.usual)}, {self.seconds * 1e3:.3g} ms; {won} ({others})"


Problem = tuple[Specification, Operands]


def _problems(of: Mapping[str, Any] | Recorder) -> list[Problem]:
    if isinstance(of, Recorder):
        return list(of.problems.values())
    if isinstance(of, Mapping):
        return [specify_abstract(**of)]
    raise TypeError(f"problems: expected arguments by name or a Recorder, got {type(of).__name__}")


def _filled(spec: Specification, operands: Operands) -> Operands:
    """Arrays for abstract operands: random numbers, and whatever hides nothing."""
    rng = np.random.default_rng(0)
    (_, t, _, h), s = operands.query.shape, operands.key.shape[1]
    constant: dict[str, Any] = {
        "scale": h**-0.5,
        "query_lengths": t,
        "key_lengths": s,
        "query_offset": max(s - t, 0),
        "alibi_slopes": 0.1,
        "key_ranges": (0, s),
    }

    def array(name: str, x: Any) -> jax.Array:
        if name in constant:
            return jnp.broadcast_to(jnp.asarray(constant[name], x.dtype), x.shape)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(rng.standard_normal(x.shape), x.dtype)
        return jnp.ones(x.shape, x.dtype)

    return Operands(**{name: None if x is None else array(name, x) for name, x in operands._asdict().items()})


def _program(
    module: Any, spec: Specification, operands: Operands, wrt: tuple[str, ...] | None
) -> tuple[Callable[..., Any], list[Any]]:
    """A function and its arguments: the forward pass, or where `wrt` names operands, their gradients."""
    forward = functools.partial(module.forward, spec)
    if wrt is None:
        return forward, [operands]
    results = jax.jit(forward)(operands)
    cotangents = results[0], jnp.zeros(results[1].shape, results[1].dtype)
    return lambda o, found, d: module.backward(spec, o, found, wrt, d), [operands, results, cotangents]


def relative_error(got: Any, expected: Any) -> float:
    """The largest error over the largest entry; infinite or NaN where what is not finite differs."""
    got, expected = (np.asarray(x).astype(np.float64) for x in (got, expected))
    finite = np.isfinite(expected)
    if not np.array_equal(got[~finite], expected[~finite], equal_nan=True):
        return float("inf")
    largest = np.abs(expected[finite]).max(initial=np.finfo(np.float32).tiny)
    return float(np.abs(got[finite] - expected[finite]).max(initial=0.0) / largest)


def error_of_sums(terms: int, dtype: Any) -> float:
    """What `relative_error` may be of float32 sums of so many terms that are rounded to a dtype.

    Errors add up like a random walk, beside a handful for exp and division; and three units of the dtype: one for the
    rounding at the end, and two because the rounded output enters the row sums of gradients.
    """
    eps = lambda x: float(jnp.finfo(x).eps)
    return eps(np.float32) * (8 + terms**0.5) + 3 * eps(dtype)


def _tuned(
    plan: str,
    problem: str,
    run: Callable[..., Any],
    arguments: list[Any],
    tiles: list[tuple[int, ...]],
    terms: int,
    rounds: int,
) -> Tuned:
    """`tiles`: the usual ones first."""
    usual = tiles[0]
    programs: dict[tuple[int, ...], Callable[[], Any]] = {}
    expected: Any = None
    for each in tiles:
        try:
            with tuned.trial(plan, each):
                compiled = jax.jit(lambda *x: run(*x)).lower(*arguments).compile()  # a new function is traced anew
            program = functools.partial(timing.call, compiled, arguments)
            found = program()
        except Exception:  # what the device or its compiler does not take
            if each == usual:
                raise
            continue
        if expected is None:
            expected = found
        # both may err, and in another order
        if all(relative_error(x, y) <= 2 * error_of_sums(terms, y.dtype) for x, y in zip(found, expected)):
            programs[each] = program
    times = timing.timed(programs, rounds, SHORTEST)
    ratio = lambda times, x: statistics.median(a / b for a, b in zip(times[usual], times[x]))
    best = max(programs, key=lambda x: ratio(times, x))
    gain, seconds = 1.0, statistics.median(times[usual])
    if best != usual:  # the luckiest of many: once more, on its own
        both = timing.timed({x: programs[x] for x in (usual, best)}, 2 * rounds + 1, SHORTEST)
        gain, seconds = ratio(both, best), statistics.median(both[usual])
        faster = sum(a > b for a, b in zip(both[usual], both[best]))
        if gain < LEAST_GAIN or faster < 0.75 * len(both[best]):
            best, gain = usual, 1.0
    return Tuned(plan, problem, usual, best, seconds, gain, len(tiles) - 1, len(tiles) - len(programs))


def _plans(spec: Specification, operands: Operands, of_pass: str) -> Iterator[tuple[Any, ...]]:
    """Of each plan: its name, the module that runs it, the gradients that it makes, and its tiles, the usual first."""
    backward = of_pass == "backward"
    usual = blockwise.tiling_of(spec, operands, backward)
    tiles = [dataclasses.astuple(x) for x in blockwise.candidates(spec, operands, usual)]
    yield f"blockwise {of_pass}", blockwise, ("query", "key", "value") if backward else None, tiles
    if not choice.refusal(spec, operands):
        for part, wrt in metal.PARTS[of_pass].items():
            yield f"metal {part}", metal, wrt, list(metal.candidates(spec, operands, part))


def search(spec: Specification, operands: Operands, passes: Any, tries: int, rounds: int) -> Iterator[Tuned]:
    """Times the tiles of each plan of a problem; what was found for one after another."""
    arrays = _filled(spec, operands)
    terms = max(operands.key.shape[1], operands.query.shape[1] * operands.query.shape[2]) + operands.query.shape[3]
    for of_pass in passes:
        for plan, module, wrt, tiles in _plans(spec, operands, of_pass):
            if len(tiles) > 1:
                run, arguments = _program(module, spec, arrays, wrt)
                yield _tuned(plan, spec.summary(operands), run, arguments, tiles[: 1 + tries], terms, rounds)


def tune(
    *problems: Mapping[str, Any] | Recorder,
    passes: tuple[str, ...] = PASSES,
    tries: int = 12,
    rounds: int = 5,
    keep: bool = True,
) -> list[Tuned]:
    """Times tiles for problems on this machine, and keeps the fastest for this chip.

    Programs that are traced from then on take them; those that were traced before stay as they are. Results do not
    depend on tiles but for rounding.

    Args:
      problems: each the arguments of `dot_product_attention` by name, arrays or `jax.ShapeDtypeStruct`s; or a
        `Recorder`, for the problems that it saw. Quantised keys, pages and batches of unknown size are left out.
      passes: of "forward" and "backward".
      tries: how many other tiles to try for each plan.
      rounds: turns of each, at least; more where calls are short.
      keep: whether to write what was found (see `jax_mfa.tuning.tuned`).

    Returns:
      What was found, a `Tuned` for each plan.

    Raises:
      ValueError, TypeError: as `dot_product_attention`, and for passes that are none.
      OSError: where the file cannot be written.
    """
    if not passes or any(x not in PASSES for x in passes):
        raise ValueError(f"passes: expected some of {PASSES}, got {passes!r}")
    checks.integer("tries", tries, 1)
    checks.integer("rounds", rounds, 1)
    todo = [x for each in problems for x in _problems(each)]
    fit = [(spec, o) for spec, o in todo if spec.is_plain and isinstance(o.query.shape[0], int)]
    found = [x for each in fit for x in search(*each, passes, tries, rounds)]
    if keep:
        store(found)
    return found


def store(found: list[Tuned]) -> Any:
    """Keeps winners; the file, or None where there is nothing to keep or JAX_MFA_TILES forbids it."""
    won = {f"{x.plan} {x.problem}": x.best for x in found if x.best != x.usual}
    if not won:
        return None
    source = f"`python -m jax_mfa tune`, {datetime.date.today().isoformat()}, JAX {jax.__version__}"
    file = tuned.store(won, source)
    jax.clear_caches()  # or programs of the same shapes would not be traced anew
    return file
