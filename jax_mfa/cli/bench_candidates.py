"""Times problems of `bench_problems`: ours, stock JAX, and PyTorch and MLX where they are installed, side by side.

All candidates of a problem take turns in one process, and ratios are of the fastest turns. Knows how each candidate is
called; not what is made of the times.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mfa.api import decode_attention, dot_product_attention
from jax_mfa.cli.bench_problems import BOTH, COMPILING, DECODE, TANGENT, TRAINING, Problem
from jax_mfa.cli.command_line import named
from jax_mfa.tuning import timing

STOCK, TORCH, MLX = "jax.nn", "PyTorch", "MLX"
LAYERS = 24
Program = Callable[[], Any]
Attention = Callable[..., Any]  # takes query, key, value, and the bias that there may be


def arguments(problem: Problem) -> dict[str, Any]:
    """The arguments of `dot_product_attention` by name, arrays by their shapes; of decoding, those that it sets."""
    p = problem
    query, key = (jax.ShapeDtypeStruct(x, jnp.dtype(p.dtype)) for x in ((p.B, p.T, p.N, p.H), (p.B, p.S, p.K, p.H)))
    of_rows = jax.ShapeDtypeStruct((p.B,), jnp.int32)
    positions = {"query_offset": of_rows} if p.decodes else {}
    if p.decodes or p.mask == "padding":
        positions["key_value_seq_lengths"] = of_rows
    bias = {"bias": jax.ShapeDtypeStruct((1, p.N, p.T, p.S), query.dtype)} if p.pair_bias else {}
    causal = {"is_causal": p.is_causal or p.decodes}
    return {"query": query, "key": key, "value": key, **bias, **positions, **_static(p), **causal}


def arrays(problem: Problem) -> list[jax.Array]:
    """Query, key, value, bias if any, and a cotangent of the output which is a tangent of the query too; random."""
    names = ("query", "key", "value", *["bias"] * problem.pair_bias, "query")
    shaped = [arguments(problem)[name] for name in names]
    keys = jax.random.split(jax.random.key(0), len(shaped))
    return [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, shaped)]


def _static(problem: Problem) -> dict[str, Any]:
    static: dict[str, Any] = {} if problem.soft_cap is None else {"logits_soft_cap": problem.soft_cap}
    return static if problem.window is None else static | {"local_window_size": (problem.window - 1, 0)}


# --- programs: a pass of a candidate on the arrays of a problem


def attention(problem: Problem, name: str) -> Attention:
    """What a candidate of JAX calls for a problem."""
    static, lengths = _static(problem), jnp.asarray(problem.lengths)
    if name == STOCK:
        attend: Attention = jax.nn.dot_product_attention
        if problem.decodes and problem.window is not None:  # stock windows begin at the first column
            return functools.partial(attend, mask=jnp.asarray(problem.visible))
    elif problem.decodes:
        return functools.partial(decode_attention, lengths=lengths, implementation=name, **static)
    else:
        attend = functools.partial(dot_product_attention, implementation=name)
    if problem.decodes or problem.mask == "padding":
        static["key_value_seq_lengths"] = lengths
    return functools.partial(attend, is_causal=problem.is_causal, **static)


def of_pass(kind: str, attention: Attention) -> Callable[..., Any]:
    """What a pass runs: a function of the arrays of `arrays`."""

    def training(*arrays: Any) -> Any:
        out, pullback = jax.vjp(attention, *arrays[:-1])
        return out, pullback(arrays[-1])

    forward = lambda *arrays: attention(*arrays[:-1])
    tangent = lambda *arrays: jax.jvp(attention, arrays[:-1], (arrays[-1], *arrays[1:-1]))
    return {TRAINING: training, TANGENT: tangent}.get(kind, forward)


def _compile_layers(problem: Problem, attention: Attention) -> None:
    """Traces, lowers and compiles anew the gradient of `LAYERS` layers of attention and four matrices each, in a Python
    loop as models have it."""
    p = problem
    heads = lambda x, n: x.reshape(p.B, p.T, n, p.H)

    def loss(x: Any, weights: Any) -> Any:
        for query, key, value, out in weights:
            attended = attention(heads(x @ query, p.N), heads(x @ key, p.K), heads(x @ value, p.K))
            x = x + attended.reshape(x.shape) @ out
        return (x**2).sum()

    size, kv = p.N * p.H, p.K * p.H
    shaped = lambda *shape: jax.ShapeDtypeStruct(shape, p.dtype)
    layer = shaped(size, size), shaped(size, kv), shaped(size, kv), shaped(size, size)
    jax.clear_caches()
    jax.jit(jax.grad(loss, argnums=1)).lower(shaped(p.B, p.T, size), [layer] * LAYERS).compile()


def _in_jax(problem: Problem, kind: str, arrays: list[jax.Array], name: str) -> tuple[Program, int | None]:
    """A program, and the temporary memory that the compiler reports, in bytes."""
    if kind == COMPILING:
        return functools.partial(_compile_layers, problem, attention(problem, name)), None
    compiled = jax.jit(of_pass(kind, attention(problem, name))).lower(*arrays).compile()
    memory = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)
    return functools.partial(timing.call, compiled, arrays), memory


_MASKED = ("window", "padding")  # masks that PyTorch and MLX have no other word for


def _in_torch(problem: Problem, kind: str, arrays: list[jax.Array]) -> Program:
    """The same in PyTorch, on the same arrays."""
    import torch

    tensors = [torch.from_numpy(np.array(x, np.float32)).to(getattr(torch, problem.dtype)) for x in arrays]
    q, k, v, d_out = (x.transpose(1, 2) for x in (*tensors[:3], tensors[-1]))
    keywords: dict[str, Any] = {"enable_gqa": True} if problem.K != problem.N else {}
    if problem.mask in _MASKED:
        keywords["attn_mask"] = torch.from_numpy(problem.visible)
    else:
        keywords["is_causal"] = problem.is_causal
    attend: Any = functools.partial(torch.nn.functional.scaled_dot_product_attention, **keywords)

    def training() -> Any:
        inputs = [x.detach().requires_grad_() for x in (q, k, v, *tensors[3:-1])]
        return torch.autograd.grad(attend(*inputs), inputs, d_out)

    return training if kind == TRAINING else functools.partial(attend, q, k, v, *tensors[3:-1])


def _in_mlx(problem: Problem, kind: str, arrays: list[jax.Array]) -> Program:
    """The same in MLX."""
    import mlx.core as mx

    *given, d_out = (mx.array(np.array(x, np.float32)).astype(getattr(mx, problem.dtype)) for x in arrays)
    q, k, v, d_out = (x.transpose(0, 2, 1, 3) for x in (*given[:3], d_out))
    mask = mx.array(problem.visible) if problem.mask in _MASKED else "causal" if problem.is_causal else None

    def attend(q: Any, k: Any, v: Any, bias: Any = mask) -> Any:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=problem.H**-0.5, mask=bias)

    inputs = [q, k, v, *given[3:]]

    def run() -> Any:
        results = mx.vjp(attend, inputs, [d_out]) if kind == TRAINING else attend(*inputs)
        mx.eval(results)
        return results

    return run


OTHERS = {TORCH: _in_torch, MLX: _in_mlx}


# --- measuring


def _measure(
    problem: Problem, kind: str, candidates: list[str], rounds: int, shortest: float
) -> tuple[dict[str, list[float]], dict[str, int | None], dict[str, str]]:
    """Times by candidate, temporary memory of those of JAX, and why others have none."""
    memory: dict[str, int | None] = {}
    failures: dict[str, str] = {}
    programs: dict[str, Program] = {}
    inputs = [] if kind == COMPILING else arrays(problem)
    in_others = kind in (*BOTH, DECODE) and problem.soft_cap is None
    for name in [*candidates, *(OTHERS if in_others else ())]:
        try:
            if name in OTHERS:
                program = OTHERS[name](problem, kind, inputs)
            else:
                program, memory[name] = _in_jax(problem, kind, inputs, name)
            program()
            programs[name] = program
        except Exception as error:  # list any reason that keeps a candidate from running
            if name not in OTHERS or not isinstance(error, ImportError):
                failures[name] = named(error)
    return timing.timed(programs, rounds, shortest) if programs else {}, memory, failures


def measure(
    problems: Iterable[Problem], candidates: list[str], ours: str, rounds: int, shortest: float
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
