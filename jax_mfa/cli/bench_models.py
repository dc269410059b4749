"""Times problems of `bench_problems`: ours, stock JAX, and PyTorch and MLX where they are installed, side by side.

Ratios are of the fastest turns, all candidates of a problem taking turns in one process.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mfa.api import decode_attention, dot_product_attention
from jax_mfa.cli.bench_problems import BOTH, COMPILING, DECODE, FORWARD, TANGENT, TRAINING, Problem
from jax_mfa.tuning import timing

STOCK, TORCH, MLX = "jax.nn", "PyTorch", "MLX"
LAYERS = 24
Attention = Callable[..., Any]  # of query, key and value
Candidates = dict[str, Callable[[Problem], Attention]]


def arrays(problem: Problem) -> list[jax.Array]:
    """Query, key, value, and a cotangent of the output which is a tangent of the query too; random."""
    p = problem
    shapes = (p.B, p.T, p.N, p.H), (p.B, p.S, p.K, p.H), (p.B, p.S, p.K, p.H), (p.B, p.T, p.N, p.H)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, jnp.dtype(p.dtype)) for key, shape in zip(keys, shapes)]


def _training(attention: Attention) -> Attention:
    def run(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, pullback = jax.vjp(attention, q, k, v)
        return out, pullback(d_out)

    return run


def _tangent(attention: Attention) -> Attention:
    return lambda q, k, v, t: jax.jvp(attention, (q, k, v), (t, k, v))


def _layers(attention: Attention, problem: Problem) -> tuple[Any, tuple[Any, ...]]:
    """A scalar function of `LAYERS` layers of attention and four matrices each, in a Python loop as models have it."""
    p = problem
    heads = lambda x, n: x.reshape(p.B, p.T, n, p.H)

    def run(x: Any, weights: Any) -> Any:
        for query, key, value, out in weights:
            seen = attention(heads(x @ query, p.N), heads(x @ key, p.K), heads(x @ value, p.K))
            x = x + seen.reshape(x.shape) @ out
        return (x**2).sum()

    size, kv = p.N * p.H, p.K * p.H
    x = jax.ShapeDtypeStruct((p.B, p.T, size), p.dtype)
    layer = tuple(
        jax.ShapeDtypeStruct(shape, p.dtype) for shape in ((size, size), (size, kv), (size, kv), (size, size))
    )
    return jax.grad(run, argnums=1), (x, [layer] * LAYERS)


def _keywords(problem: Problem) -> dict[str, Any]:
    found: dict[str, Any] = {} if problem.soft_cap is None else {"logits_soft_cap": problem.soft_cap}
    if problem.window is not None:
        found["local_window_size"] = (problem.window - 1, 0)
    return found


def arguments(problem: Problem) -> dict[str, Any]:
    """The arguments of `dot_product_attention` by name, arrays by their shapes; of decoding, those that it sets."""
    p = problem
    queries, keys = ((p.B, length, heads, p.H) for length, heads in ((p.T, p.N), (p.S, p.K)))
    shapes = {"query": queries, "key": keys, "value": keys}
    found = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(p.dtype)) for name, shape in shapes.items()}
    of_rows = jax.ShapeDtypeStruct((p.B,), jnp.int32)
    if p.decodes:
        found["query_offset"] = of_rows
    if p.decodes or p.mask == "padding":
        found["key_value_seq_lengths"] = of_rows
    return {**found, **_keywords(p), "is_causal": p.is_causal or p.decodes}


def _in_jax(problem: Problem, attention: Attention, decode: Attention) -> Attention:
    keywords, lengths = _keywords(problem), jnp.asarray(problem.lengths)
    if problem.decodes:
        return functools.partial(decode, lengths=lengths, **keywords)
    if problem.mask == "padding":
        keywords["key_value_seq_lengths"] = lengths
    return functools.partial(attention, is_causal=problem.is_causal, **keywords)


def _stock(problem: Problem) -> Attention:
    """Its windows begin at the first column, so what decodes through one needs a mask."""
    stock = jax.nn.dot_product_attention
    if problem.decodes and problem.window is not None:
        return functools.partial(stock, mask=jnp.asarray(problem.visible))
    return _in_jax(problem, stock, lambda q, k, v, lengths: stock(q, k, v, key_value_seq_lengths=lengths))


def candidates(implementations: Sequence[str], stock: bool = True) -> Candidates:
    """By name, what makes the attention of a problem, a function of query, key and value."""
    found: Candidates = {STOCK: _stock} if stock else {}
    for name in implementations:
        attend, decode = (functools.partial(f, implementation=name) for f in (dot_product_attention, decode_attention))
        found[name] = functools.partial(_in_jax, attention=attend, decode=decode)
    return found


def _needs_mask(problem: Problem) -> bool:
    """Whether PyTorch and MLX have no other word for what rows see."""
    return problem.mask in ("window", "padding")


def _in_torch(problem: Problem, kind: str, arrays: list[jax.Array]) -> Callable[[], Any] | None:
    """The same in PyTorch, on the same [B, T, N, H] arrays; None where it is not installed, or has no such thing."""
    try:
        import torch
    except ImportError:
        return None
    if kind not in (*BOTH, DECODE) or problem.soft_cap is not None:
        return None
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    tensors = [torch.from_numpy(np.array(x, np.float32)).to(kinds[problem.dtype]) for x in arrays]
    q, k, v, d_out = (x.transpose(1, 2) for x in tensors)
    grouped: dict[str, Any] = {"enable_gqa": True} if problem.K != problem.N else {}
    if _needs_mask(problem):
        grouped["attn_mask"] = torch.from_numpy(problem.visible)
    elif not problem.decodes:
        grouped["is_causal"] = problem.is_causal
    attend: Any = functools.partial(torch.nn.functional.scaled_dot_product_attention, **grouped)

    def forward() -> Any:
        with torch.no_grad():
            return attend(q, k, v)

    def training() -> Any:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attend(*inputs), inputs, d_out)

    return training if kind == TRAINING else forward


def _in_mlx(problem: Problem, kind: str, arrays: list[jax.Array]) -> Callable[[], Any] | None:
    """The same in MLX; None where it is not installed, or has no such thing."""
    try:
        import mlx.core as mx
    except ImportError:
        return None
    if kind not in (*BOTH, DECODE) or problem.soft_cap is not None:
        return None
    q, k, v, d_out = (
        mx.array(np.array(x, np.float32)).astype(getattr(mx, problem.dtype)).transpose(0, 2, 1, 3) for x in arrays
    )
    mask = mx.array(problem.visible) if _needs_mask(problem) else "causal" if problem.is_causal else None
    attend = functools.partial(mx.fast.scaled_dot_product_attention, scale=problem.H**-0.5, mask=mask)

    def run() -> Any:
        found = mx.vjp(attend, [q, k, v], [d_out]) if kind == TRAINING else attend(q, k, v)
        mx.eval(found)
        return found

    return run


OTHERS = {TORCH: _in_torch, MLX: _in_mlx}


def _compile(problem: Problem, attention: Attention) -> None:
    """From a function to its executable: traced, lowered and compiled, all anew."""
    jax.clear_caches()
    fun, shapes = _layers(attention, problem)
    jax.jit(fun).lower(*shapes).compile()


def _forward(attention: Attention) -> Attention:
    return lambda q, k, v, _: attention(q, k, v)


# of an attention, the function of query, key, value and a fourth array that a pass runs
PROGRAMS = {FORWARD: _forward, DECODE: _forward, TRAINING: _training, TANGENT: _tangent}


def _measure(
    problem: Problem, kind: str, candidates: Candidates, rounds: int, shortest: float
) -> tuple[dict[str, list[float]], dict[str, int | None], dict[str, str]]:
    """Times by candidate, temporary memory of those of JAX, and why others have none."""
    times: dict[str, list[float]] = {}
    memory: dict[str, int | None] = {}
    failures: dict[str, str] = {}
    programs: dict[str, Callable[[], Any]] = {}
    inputs = [] if kind == COMPILING else arrays(problem)

    def attempt(name: str, make: Callable[[], None]) -> None:
        try:
            make()
        except Exception as error:  # whatever keeps a candidate from running belongs in the table
            failures[name] = f"{type(error).__name__}: {error}"

    def prepare(name: str, make: Callable[[Problem], Attention]) -> None:
        if kind == COMPILING:
            program = functools.partial(_compile, problem, make(problem))
        else:
            compiled = jax.jit(PROGRAMS[kind](make(problem))).lower(*inputs).compile()
            program = functools.partial(timing.call, compiled, inputs)
            memory[name] = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)
        program()
        programs[name] = program

    def prepare_other(name: str, make: Callable[..., Callable[[], Any] | None]) -> None:
        program = make(problem, kind, inputs)
        if program is not None:
            program()
            programs[name] = program

    for name, make in candidates.items():
        attempt(name, functools.partial(prepare, name, make))
    if kind != COMPILING:
        for name, other in OTHERS.items():
            attempt(name, functools.partial(prepare_other, name, other))
    if programs:
        times.update(timing.timed(programs, rounds, shortest))
    return times, memory, failures


def measure(
    problems: Iterable[Problem], candidates: Candidates, ours: str, rounds: int, shortest: float
) -> Iterator[dict[str, Any]]:
    """A row for each problem and each of its passes; `ours` is the candidate that the others are compared with.

    `seconds` by candidate, the least, and all `times`; in `ratios` those of each other candidate over ours, in
    `temporary_bytes` what the compiler reports, in `failures` what could not run.
    """
    for problem in problems:
        for kind in problem.passes:
            times, memory, failures = _measure(problem, kind, candidates, rounds, shortest)
            seconds = {name: min(x) for name, x in times.items()}
            best = seconds.get(ours)
            ratios = {} if best is None else {name: x / best for name, x in seconds.items() if name != ours}
            row = dict(name=problem.name, problem=str(problem), kind=kind, seconds=seconds, ratios=ratios, times=times)
            row |= dict(temporary_bytes=memory, sizes=dataclasses.asdict(problem))
            yield {**row, "implementation": ours, "failures": failures}


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f} MiB"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table; a ratio below 1, where another candidate is faster, is marked."""
    met = dict.fromkeys(name for r in rows for name in (*r["seconds"], *r["failures"]))
    ours = {r["implementation"] for r in rows}
    others = [x for x in dict.fromkeys((STOCK, TORCH, MLX, *met)) if x in met and x not in ours]
    more = {"tokens_per_second": "tokens/s", "tflops": "TFLOP/s", "ginstr": "GINSTR/s", "share": "of peak"}
    more = {name: what for name, what in more.items() if any(r.get("figures", {}).get(name) for r in rows)}
    named = any(r["name"] for r in rows)
    heads = [
        *["model"] * named,
        "problem",
        "pass",
        "time",
        *(f"vs {x}" for x in others),
        "median, quartiles",
        *more.values(),
        "memory" + f" ({STOCK}'s)" * (STOCK in others),
    ]
    lines = [f"| {' | '.join(heads)} |", f"{'|---' * len(heads)}|"]
    for r in rows:
        best = r["seconds"].get(r["implementation"])
        cells = [*[r["name"]] * named, r["problem"], r["kind"], "-" if best is None else f"{best * 1e3:.2f} ms"]
        for name in others:
            ratio = r["ratios"].get(name)
            cells.append("-" if ratio is None else f"{ratio:.2f}x" + " (slower)" * (ratio < 1))
        spread = r.get("quartiles", {}).get(r["implementation"])
        cells.append("-" if spread is None else "{1:.2f} ({0:.2f} to {2:.2f}) ms".format(*(x * 1e3 for x in spread)))
        found = r.get("figures", {})
        for name in more:
            number = found.get(name)
            cells.append("-" if number is None else f"{number:.1%}" if name == "share" else f"{number:.4g}")
        memory, of_stock = (_mebibytes(r["temporary_bytes"].get(x)) for x in (r["implementation"], STOCK))
        cells.append(memory + f" ({of_stock})" * (STOCK in others))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """What could not run, and why: a line for each candidate and reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        for name, why in r["failures"].items():
            reasons.setdefault((name, " ".join(why.split())[:300]), []).append(f"{r['problem']} {r['kind']}")
    return [f"{name} did not run {'; '.join(where)}: {why}" for (name, why), where in reasons.items()]
