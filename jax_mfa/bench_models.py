"""`python -m jax_mfa bench --models`: attention of named models, against stock JAX, and PyTorch and MLX if installed.

The problems are data: what is asked of the attention of a model, or of a kind of model, with the lengths that its users
meet; those of `models.json` name their source. Ratios are of the fastest turns, all candidates of a problem taking
turns in one process.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_mfa.api import decode_attention, dot_product_attention

STOCK, TORCH, MLX = "jax.nn", "PyTorch", "MLX"
FORWARD, TRAINING, TANGENT, COMPILING = "forward", "forward+backward", "forward mode", "compile 24 layers"
BOTH = (FORWARD, TRAINING)
LAYERS = 24
Name = TypeVar("Name")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention problem: T queries of N heads on S columns of K heads, all of head size H; `decode` has lengths."""

    name: str
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    is_causal: bool = False
    dtype: str = "float32"
    decode: bool = False
    passes: tuple[str, ...] = BOTH
    soft_cap: float | None = None

    def __str__(self) -> str:
        heads = f"N{self.N}" if self.K == self.N else f"N{self.N} K{self.K}"
        length = f"T{self.T}" if self.T == self.S else f"T{self.T} S{self.S}"
        facts = [f"B{self.B}", length, heads, f"H{self.H}"]
        facts += (
            ["causal"] * self.is_causal
            + ["cap"] * (self.soft_cap is not None)
            + [self.dtype] * (self.dtype != "float32")
        )
        return " ".join(facts)


def _square(name: str, B: int, T: int, N: int, H: int, **other: Any) -> Problem:
    return Problem(name, B, T, T, N, other.pop("K", N), H, **other)


def _decode(name: str, B: int, S: int, N: int, K: int, H: int, dtype: str = "float32") -> Problem:
    return Problem(name, B, 1, S, N, K, H, dtype=dtype, decode=True, passes=(FORWARD,))


def _of_models() -> tuple[Problem, ...]:
    """Those of `models.json`."""
    found = []
    for model in json.loads(importlib.resources.files("jax_mfa").joinpath("models.json").read_text(encoding="utf-8")):
        sizes = {"B": 1, "S": model["T"]} | {name: x for name, x in model.items() if name != "source"}
        found.append(Problem(**sizes))
    return tuple(found)


PRESET = tuple(  # short problems of many shapes, where what a call costs by itself shows
    _square(f"B{b} T{t} H{h}", b, t, 8, h) for b in (1, 2, 4, 8) for t in (64, 128, 256, 512) for h in (32, 64, 128)
)
PROBLEMS = (
    *_of_models(),
    # lengths that no power of two divides
    _square("one token more than a tile", 1, 513, 8, 64, is_causal=True),
    _square("ViT-B/16 at 384 pixels", 1, 577, 12, 64),
    _square("640 tokens", 1, 640, 8, 64),
    _square("ViT at 512 pixels", 1, 1025, 8, 64),
    _square("DINOv2 ViT-L/14 at 518 pixels", 1, 1370, 16, 64),
    _square("Whisper base, encoder", 1, 1500, 8, 64),
    Problem("Whisper base, cross attention", 1, 1, 1500, 8, 8, 64),
    # one token at a time
    _decode("decoding, Llama 3 8B", 1, 1024, 32, 8, 128),
    _decode("decoding", 1, 4096, 8, 8, 64),
    _decode("decoding", 1, 4096, 8, 8, 64, "bfloat16"),
    _decode("decoding, one key head", 8, 4096, 8, 1, 64),
    # many small ones
    _square("pixels of a patch", 512, 16, 4, 32),
    _square("short sentences", 256, 32, 4, 32),
    _square("Swin, windows of 7 × 7", 64, 49, 4, 32),
    _square("CLIP, text encoder", 16, 77, 8, 64, is_causal=True),
    _square("a line of text", 1, 32, 8, 64, is_causal=True),
    _square("a line of text", 1, 64, 8, 64, is_causal=True),
    # long ones
    _square("GPT-2", 1, 1024, 12, 64, is_causal=True, passes=(*BOTH, TANGENT, COMPILING)),
    _square("Llama 3 8B", 1, 2048, 32, 128, K=8, is_causal=True),
)


def _arrays(problem: Problem) -> list[jax.Array]:
    """Query, key, value, and a cotangent of the output which is a tangent of the query too; random."""
    p = problem
    shapes = (p.B, p.T, p.N, p.H), (p.B, p.S, p.K, p.H), (p.B, p.S, p.K, p.H), (p.B, p.T, p.N, p.H)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, jnp.dtype(p.dtype)) for key, shape in zip(keys, shapes)]


def _training(attention: Callable[..., Any]) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, d_out: Any) -> tuple[Any, Any]:
        out, pullback = jax.vjp(attention, q, k, v)
        return out, pullback(d_out)

    return run


def _tangent(attention: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v, t: jax.jvp(attention, (q, k, v), (t, k, v))


def _layers(attention: Callable[..., Any], problem: Problem) -> tuple[Any, tuple[Any, ...]]:
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


def _in_jax(problem: Problem, attention: Callable[..., Any], decode: Callable[..., Any]) -> Callable[..., Any]:
    if problem.decode:
        lengths = np.full(problem.B, problem.S, np.int32)
        return functools.partial(decode, lengths=jnp.asarray(lengths))
    keywords = {} if problem.soft_cap is None else {"logits_soft_cap": problem.soft_cap}
    return functools.partial(attention, is_causal=problem.is_causal, **keywords)


def _stock_decode(q: Any, k: Any, v: Any, lengths: Any) -> Array:
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)


def _candidates(implementation: str) -> dict[str, Callable[[Problem], Callable[..., Any]]]:
    attend, decode = (
        functools.partial(f, implementation=implementation) for f in (dot_product_attention, decode_attention)
    )
    return {
        STOCK: lambda problem: _in_jax(problem, jax.nn.dot_product_attention, _stock_decode),
        implementation: lambda problem: _in_jax(problem, attend, decode),
    }


def _in_torch(problem: Problem, kind: str, arrays: Any) -> Callable[[], Any] | None:
    """The same in PyTorch, on the same [B, T, N, H] arrays; None where it is not installed, or has no such thing."""
    try:
        import torch
    except ImportError:
        return None
    if kind not in BOTH or problem.soft_cap is not None:
        return None
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    tensors = [torch.from_numpy(np.array(x, np.float32)).to(kinds[problem.dtype]) for x in arrays]
    q, k, v, d_out = (x.transpose(1, 2) for x in tensors)
    grouped: dict[str, Any] = {"enable_gqa": True} if problem.K != problem.N else {}
    attend: Any = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, is_causal=problem.is_causal, **grouped
    )

    def forward() -> Any:
        with torch.no_grad():
            return attend(q, k, v)

    def training() -> tuple[Any, ...]:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attend(*inputs), inputs, d_out)

    return forward if kind == FORWARD else training


def _in_mlx(problem: Problem, kind: str, arrays: Any) -> Callable[[], Any] | None:
    """The same in MLX; None where it is not installed, or has no such thing."""
    try:
        import mlx.core as mx
    except ImportError:
        return None
    if kind not in BOTH or problem.soft_cap is not None:
        return None
    q, k, v, d_out = (
        mx.array(np.array(x, np.float32)).astype(getattr(mx, problem.dtype)).transpose(0, 2, 1, 3) for x in arrays
    )
    keywords = {"scale": problem.H**-0.5, "mask": "causal" if problem.is_causal else None}
    attend = functools.partial(mx.fast.scaled_dot_product_attention, **keywords)
    if kind == FORWARD:
        return lambda: mx.eval(attend(q, k, v))
    return lambda: mx.eval(mx.vjp(attend, [q, k, v], [d_out]))


OTHERS = {TORCH: _in_torch, MLX: _in_mlx}


def timed(programs: dict[Name, Callable[[], Any]], rounds: int, shortest: float) -> dict[Name, list[float]]:
    """Seconds of calls of each program, the programs taking turns.

    A turn is one call that is not timed and one that is: right after a program that gives gigabytes back to the system,
    the next one pays for it. There are as many turns as `rounds`, or as begin within `shortest` seconds.
    """
    times: dict[Name, list[float]] = {name: [] for name in programs}
    begin, turns = time.perf_counter(), 0
    while turns < rounds or time.perf_counter() < begin + shortest:
        for name, program in programs.items():
            program()
            start = time.perf_counter()
            program()
            times[name].append(time.perf_counter() - start)
        turns += 1
    return times


def call(program: Any, arrays: Any) -> Any:
    """Calls a program of JAX and waits for its results."""
    return jax.block_until_ready(program(*arrays))


def _compile_seconds(problem: Problem, attention: Callable[..., Any]) -> float:
    """Once: a program that was compiled before is compiled faster."""
    fun, shapes = _layers(attention, problem)
    lowered = jax.jit(fun).lower(*shapes)
    start = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - start


# of an attention, the function of query, key, value and a fourth array that a pass runs
PROGRAMS = {FORWARD: lambda attention: lambda q, k, v, _: attention(q, k, v), TRAINING: _training, TANGENT: _tangent}


def _measure(problem: Problem, kind: str, candidates: Any, rounds: int, shortest: float) -> tuple[Any, ...]:
    """Times by candidate, temporary memory of those of JAX, and why others have none."""
    times: dict[str, list[float]] = {}
    memory: dict[str, int | None] = {}
    failures: dict[str, str] = {}
    programs: dict[str, Callable[[], Any]] = {}
    arrays = [] if kind == COMPILING else _arrays(problem)

    def attempt(name: str, make: Callable[..., Any]) -> None:
        try:
            make()
        except Exception as error:  # whatever keeps a candidate from running belongs in the table
            failures[name] = f"{type(error).__name__}: {error}"

    def prepare(name: str, make: Callable[..., Any]) -> None:
        if kind == COMPILING:
            times[name] = [_compile_seconds(problem, make(problem))]
        else:
            compiled = jax.jit(PROGRAMS[kind](make(problem))).lower(*arrays).compile()
            program = functools.partial(call, compiled, arrays)
            program()
            programs[name] = program
            memory[name] = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)

    def prepare_other(name: str, make: Callable[..., Any]) -> None:
        program = make(problem, kind, arrays)
        if program is not None:
            program()
            programs[name] = program

    for name, make in candidates.items():
        attempt(name, functools.partial(prepare, name, make))
    if kind != COMPILING:
        for name, make in OTHERS.items():
            attempt(name, functools.partial(prepare_other, name, make))
        times.update(timed(programs, rounds, shortest))
    return times, memory, failures


def measure(
    problems: Iterable[Problem], implementation: str, rounds: int, shortest: float, progress: Any
) -> Iterator[dict[str, Any]]:
    """A row for each problem and each of its passes.

    `seconds` by candidate, the least, and all `times`; in `ratios` those of each other candidate over ours, in
    `temporary_bytes` what the compiler reports, in `failures` what could not run.
    """
    candidates = _candidates(implementation)
    for problem in problems:
        for kind in problem.passes:
            times, memory, failures = _measure(problem, kind, candidates, rounds, shortest)
            seconds = {name: min(x) for name, x in times.items()}
            ours = seconds.get(implementation)
            others = {name: x for name, x in seconds.items() if name != implementation}
            ratios = {} if ours is None else {name: x / ours for name, x in others.items()}
            row = dict(name=problem.name, problem=str(problem), kind=kind, seconds=seconds, ratios=ratios, times=times)
            progress()
            row |= dict(temporary_bytes=memory, sizes=dataclasses.asdict(problem))
            yield {**row, "implementation": implementation, "failures": failures}


def select(pattern: str) -> list[Problem]:
    """The problems whose name or shape contains `pattern`, whatever its case."""
    return [p for p in PROBLEMS if pattern.lower() in f"{p.name} {p}".lower()]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table; a ratio below 1, where another candidate is faster, is marked."""
    others = [x for x in (STOCK, *OTHERS) if x != MLX or any(MLX in r["ratios"] for r in rows)]
    more = {"tokens_per_second": "tokens/s", "tflops": "TFLOP/s", "ginstr": "GINSTR/s", "share": "of peak"}
    more = {name: what for name, what in more.items() if any(r.get("figures", {}).get(name) for r in rows)}
    heads = [
        "model",
        "problem",
        "pass",
        "time",
        *(f"vs {x}" for x in others),
        "median, quartiles",
        *more.values(),
        "memory",
    ]
    lines = [f"| {' | '.join(heads)} |", f"{'|---' * len(heads)}|"]
    for r in rows:
        ours = r["seconds"].get(r["implementation"])
        cells = [r["name"], r["problem"], r["kind"], "–" if ours is None else f"{ours * 1e3:.2f} ms"]
        for name in others:
            ratio = r["ratios"].get(name)
            cells.append("–" if ratio is None else f"{ratio:.2f}×" + " (slower)" * (ratio < 1))
        spread = r.get("quartiles", {}).get(r["implementation"])
        cells.append("–" if spread is None else "{1:.2f} ({0:.2f} … {2:.2f}) ms".format(*(x * 1e3 for x in spread)))
        found = r.get("figures", {})
        for name in more:
            number = found.get(name)
            cells.append("–" if number is None else f"{number:.1%}" if name == "share" else f"{number:.4g}")
        memory = r["temporary_bytes"].get(r["implementation"])
        cells.append("–" if memory is None else f"{memory / 2**20:.1f} MiB")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """What could not run, and why: a line for each."""
    return [
        f"{name} did not run {r['problem']} {r['kind']}: {' '.join(why.split())[:300]}"
        for r in rows
        for name, why in r["failures"].items()
    ]
