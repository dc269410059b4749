"""Times attention against stock JAX, in one run.

For each length, mask and pass every candidate is compiled, its temporary memory is read from the compiler, and all are
timed in turns, so that the ratio holds on a machine whose speed drifts. Writes a table, `bench.json` and `bench.png`.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import platform
import statistics
import time

import jax
import jax.numpy as jnp

from jax_mfa.api import IMPLEMENTATIONS, dot_product_attention
from jax_mfa.specification import DTYPES

HELP = "time attention against stock jax.nn over a sweep of lengths"
STOCK = "jax.nn"
SHORTEST = 0.5  # seconds of timing for each set of candidates


def _integers(text: str) -> list[int]:
    values = [int(x) for x in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"positive integers, got {text!r}")
    return values


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m jax_mfa bench`."""
    parser.add_argument(
        "--lengths", type=_integers, default=[256, 512, 1024, 2048, 4096], help="T = S, comma separated"
    )
    parser.add_argument("--implementations", type=_names, default=["blockwise"], help="comma separated")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-value-heads", type=int, help="default: --heads")
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES[:3], default="float32")
    parser.add_argument("--rounds", type=int, default=5, help="timed turns of each candidate, at least")
    parser.add_argument("--no-stock", action="store_true", help="leave jax.nn out, for lengths that it cannot hold")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"), help="folder of the two files")


def _passes(attention):
    """Forward, and forward with the gradients of query, key and value."""

    def both(q, k, v, d_out):
        out, pullback = jax.vjp(attention, q, k, v)
        return out, pullback(d_out)

    return {"forward": lambda q, k, v, d_out: attention(q, k, v), "forward+backward": both}


def _median_seconds(programs, arrays, rounds: int) -> list[float]:
    """Median wall time of each program, the programs taking turns.

    A turn is one call that is not timed and one that is: right after a program that gives gigabytes back to the system,
    the next one pays for it. Short programs take further turns until `SHORTEST` seconds have gone.
    """
    times: list[list[float]] = [[] for _ in programs]
    begin = time.perf_counter()
    while len(times[-1]) < rounds or time.perf_counter() < begin + SHORTEST:
        for program, seconds in zip(programs, times):
            jax.block_until_ready(program(*arrays))
            start = time.perf_counter()
            jax.block_until_ready(program(*arrays))
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def measure(options, progress) -> list[dict]:
    """One row for each length, mask, pass and candidate."""
    candidates = {} if options.no_stock else {STOCK: jax.nn.dot_product_attention}
    for name in options.implementations:
        candidates[name] = functools.partial(dot_product_attention, implementation=name)
    rows = []
    for length in options.lengths:
        keys = jax.random.split(jax.random.key(length), 4)
        heads = [options.heads, *[options.key_value_heads or options.heads] * 2, options.heads]
        arrays = [
            jax.random.normal(key, (options.batch, length, n, options.head_size), jnp.dtype(options.dtype))
            for key, n in zip(keys, heads)
        ]
        for mask in ("dense", "causal"):
            for kind in ("forward", "forward+backward"):
                programs = []
                for attention in candidates.values():
                    function = _passes(functools.partial(attention, is_causal=mask == "causal"))[kind]
                    programs.append(jax.jit(function).lower(*arrays).compile())
                seconds = _median_seconds(programs, arrays, options.rounds)
                for name, program, taken in zip(candidates, programs, seconds):
                    memory = program.memory_analysis()
                    row = dict(length=length, mask=mask, kind=kind, implementation=name, seconds=taken)
                    row["temporary_bytes"] = getattr(memory, "temp_size_in_bytes", None)
                    row["speedup"] = None if options.no_stock else seconds[0] / taken
                    rows.append(row)
                    progress()
    return rows


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| T = S | mask | pass | implementation | time | vs jax.nn | temporary memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        memory = "–" if r["temporary_bytes"] is None else f"{r['temporary_bytes'] / 2**20:.1f} MiB"
        speedup = "–" if r["speedup"] is None else f"{r['speedup']:.2f}×"
        lines.append(
            f"| {r['length']} | {r['mask']} | {r['kind']} | {r['implementation']} | {r['seconds'] * 1e3:.1f} ms "
            f"| {speedup} | {memory} |"
        )
    return "\n".join(lines)


def plot(rows: list[dict], path: pathlib.Path, title: str) -> None:
    """Time and temporary memory by length, one line for each implementation and mask."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), sharex=True, layout="constrained")
    names = list(dict.fromkeys(r["implementation"] for r in rows))
    for column, kind in enumerate(("forward", "forward+backward")):
        for name in names:
            for mask, style in (("dense", "-"), ("causal", "--")):
                line = [r for r in rows if (r["implementation"], r["mask"], r["kind"]) == (name, mask, kind)]
                x = [r["length"] for r in line]
                look = dict(color=f"C{names.index(name)}", linestyle=style, marker="o", label=f"{name}, {mask}")
                axes[0, column].plot(x, [r["seconds"] * 1e3 for r in line], **look)
                if all(r["temporary_bytes"] is not None for r in line):
                    axes[1, column].plot(x, [max(r["temporary_bytes"], 1) / 2**20 for r in line], **look)
        axes[0, column].set(title=kind, ylabel="time, ms")
        axes[1, column].set(xlabel="length T = S", ylabel="temporary memory, MiB")
    lengths = sorted({r["length"] for r in rows})
    for axis in axes.flat:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(lengths, [str(x) for x in lengths])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0, 0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def run(options) -> int:
    """Measures, prints the table and writes both files."""
    try:
        import matplotlib  # noqa: F401
        from tqdm import tqdm
    except ImportError as error:
        print(f"bench needs the extra `bench`: pip install 'jax-mfa[bench]' ({error})")
        return 2
    total = len(options.lengths) * 4 * (len(options.implementations) + (not options.no_stock))
    with tqdm(total=total, desc="bench", unit="program") as bar:
        rows = measure(options, bar.update)
    print(table(rows))
    heads = f"{options.heads}" if options.key_value_heads is None else f"{options.heads}/{options.key_value_heads}"
    problem = f"B{options.batch} N{heads} H{options.head_size} {options.dtype}"
    title = f"{problem}; {jax.default_backend()}, {platform.machine()}, JAX {jax.__version__}"
    options.out.mkdir(parents=True, exist_ok=True)
    facts = dict(problem=problem, backend=jax.default_backend(), machine=platform.machine(), jax=jax.__version__)
    (options.out / "bench.json").write_text(json.dumps(dict(**facts, rounds=options.rounds, rows=rows), indent=1))
    plot(rows, options.out / "bench.png", title)
    print(f"\nwrote {options.out / 'bench.json'} and {options.out / 'bench.png'}")
    return 0
