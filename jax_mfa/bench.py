"""Times attention against stock JAX, in one run.

For each length, mask and pass every candidate is compiled, its temporary memory is read from the compiler, and all are
timed in turns, so that the ratio holds on a machine whose speed drifts. Prints a table, and writes `bench.json` and
`bench.png`. A candidate that cannot run a problem is listed with its reason, and the others go on. Ctrl-C ends the
measuring; the problems that were finished are printed and written.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jax_mfa import bench_devices, bench_figures, bench_models
from jax_mfa.api import IMPLEMENTATIONS, dot_product_attention
from jax_mfa.bench_models import BOTH, STOCK
from jax_mfa.command_line import INTERRUPTED, interruptible, positive, positives, start_metal
from jax_mfa.specification import DTYPES

HELP = "time attention against stock jax.nn over a sweep of lengths"
MASKS = ("dense", "causal")
SHORTEST = 0.5  # seconds of timing for each set of candidates


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m jax_mfa bench`."""
    parser.add_argument(
        "--lengths",
        type=positives,
        default="256,512,1024,2048,4096",
        help="T = S, comma separated; default: %(default)s",
    )
    parser.add_argument(
        "--implementations",
        type=_names,
        help=f"comma separated, of {', '.join(IMPLEMENTATIONS)}; default: metal where it can be used, and blockwise",
    )
    parser.add_argument("--batch", type=positive, default=1, help="B, default: %(default)s")
    parser.add_argument("--heads", type=positive, default=8, help="N, default: %(default)s")
    parser.add_argument("--key-value-heads", type=positive, help="K, a divisor of N, default: --heads")
    parser.add_argument("--head-size", type=positive, default=64, help="H = V, default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES[:3], default="float32", help="default: %(default)s")
    parser.add_argument(
        "--rounds", type=positive, default=5, help="timed turns of each candidate, at least; default: %(default)s"
    )
    parser.add_argument(
        "--models",
        nargs="?",
        const="",
        metavar="PART",
        help="time the attention of named models instead, those whose name or shape holds PART, against jax.nn and, "
        "where they are installed, PyTorch and MLX",
    )
    parser.add_argument(
        "--preset", action="store_true", help="likewise 48 short problems, over batches, lengths and head sizes"
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=pathlib.Path,
        metavar=("OLD", "NEW"),
        help="time nothing: compare two bench_models.json, and exit 1 where something got slower beyond noise",
    )
    parser.add_argument(
        "--devices",
        type=positives,
        help="time causal attention over so many devices each, comma separated, instead: bytes sent and memory per "
        "device, beside the formulas; a CPU is divided into as many",
    )
    parser.add_argument("--no-stock", action="store_true", help="leave jax.nn out, for lengths that it cannot hold")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("results"),
        help="folder of the two files, default: %(default)s",
    )


def _arrays(options: argparse.Namespace, length: int) -> list[jax.Array]:
    """Query, key, value and the cotangent of the output, random."""
    keys = jax.random.split(jax.random.key(length), 4)
    heads = [options.heads, *[options.key_value_heads or options.heads] * 2, options.heads]
    return [
        jax.random.normal(key, (options.batch, length, n, options.head_size), jnp.dtype(options.dtype))
        for key, n in zip(keys, heads)
    ]


def _time(functions: dict[str, Any], arrays: Any, rounds: int, progress: Any) -> dict[str, dict[str, Any]]:
    """For each candidate its time in seconds and temporary memory, or the failure that kept it from running."""
    found: dict[str, dict[str, Any]] = {}
    programs: dict[str, Callable[[], Any]] = {}
    for name, function in functions.items():
        found[name] = dict(seconds=None, temporary_bytes=None, speedup=None, failure="")
        try:
            program = jax.jit(function).lower(*arrays()).compile()
            bench_models.call(program, arrays())
        except Exception as error:  # whatever keeps a candidate from running belongs in the table
            found[name]["failure"] = f"{type(error).__name__}: {error}"
        else:
            programs[name] = functools.partial(bench_models.call, program, arrays())
            found[name]["temporary_bytes"] = getattr(program.memory_analysis(), "temp_size_in_bytes", None)
        progress()
    if programs:
        medians = {name: statistics.median(x) for name, x in bench_models.timed(programs, rounds, SHORTEST).items()}
        for name, seconds in medians.items():
            found[name]["seconds"] = seconds
            if STOCK in medians:
                found[name]["speedup"] = medians[STOCK] / seconds
    return found


def measure(options: argparse.Namespace, progress: Any) -> Iterator[dict[str, Any]]:
    """One row for each length, mask, pass and candidate."""
    candidates: dict[str, Callable[..., Any]] = {} if options.no_stock else {STOCK: jax.nn.dot_product_attention}
    for name in options.implementations:
        candidates[name] = functools.partial(dot_product_attention, implementation=name)
    for length in options.lengths:
        arrays = functools.cache(functools.partial(_arrays, options, length))
        for mask, kind in itertools.product(MASKS, BOTH):
            functions = {
                name: bench_models.PROGRAMS[kind](functools.partial(attention, is_causal=mask == "causal"))
                for name, attention in candidates.items()
            }
            found = _time(functions, arrays, options.rounds, progress)
            for name, facts in found.items():
                yield dict(length=length, mask=mask, kind=kind, implementation=name, **facts)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| T = S | mask | pass | implementation | time | vs jax.nn | temporary memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = [str(r[name]) for name in ("length", "mask", "kind", "implementation")]
        for name, factor, form in (
            ("seconds", 1e3, "{:.1f} ms"),
            ("speedup", 1, "{:.2f}×"),
            ("temporary_bytes", 2**-20, "{:.1f} MiB"),
        ):
            cells.append("–" if r[name] is None else form.format(r[name] * factor))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """What could not run, and why: a line for each candidate and reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        if r["failure"]:
            why = " ".join(r["failure"].split())[:300]
            reasons.setdefault((r["implementation"], why), []).append(f"{r['length']} {r['mask']} {r['kind']}")
    return [f"{name} did not run {', '.join(where)}: {why}" for (name, why), where in reasons.items()]


def plot(rows: list[dict[str, Any]], path: pathlib.Path, title: str) -> None:
    """Time and temporary memory by length, one line for each implementation and mask."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), sharex=True, layout="constrained")
    names = list(dict.fromkeys(r["implementation"] for r in rows))
    for column, kind in enumerate(BOTH):
        for name in names:
            for mask, style in zip(MASKS, ("-", "--")):
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
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0, 0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@dataclasses.dataclass(frozen=True)
class _Benchmark:
    """What `run` does with one of the benchmarks."""

    total: int
    unit: str
    measure: Callable[[Callable[[], object]], Iterator[dict[str, Any]]]  # rows, of what to call as one is done
    table: Callable[[list[dict[str, Any]]], str]
    failures: Callable[[list[dict[str, Any]]], list[str]]
    failed: Callable[[dict[str, Any]], bool]  # whether one of our implementations did, in a row
    # files of rows and facts, and their names as they are there
    write: Callable[[list[dict[str, Any]], dict[str, Any]], Iterator[str]]


def _of_lengths(options: argparse.Namespace) -> _Benchmark:
    heads = f"{options.heads}" if options.key_value_heads is None else f"{options.heads}/{options.key_value_heads}"
    problem = f"B{options.batch} N{heads} H{options.head_size} {options.dtype}"

    def write(rows: Any, facts: dict[str, Any]) -> Iterator[str]:
        yield _write_json(options.out / "bench.json", dict(problem=problem, **facts, rows=rows))
        ran = [r for r in rows if not r["failure"]]
        if ran:
            title = f"{problem}; {facts['backend']}, {facts['machine']}, JAX {facts['jax']}"
            plot(ran, options.out / "bench.png", title)
            yield str(options.out / "bench.png")

    return _Benchmark(
        total=len(options.lengths) * len(MASKS) * len(BOTH) * (len(options.implementations) + (not options.no_stock)),
        unit="program",
        measure=functools.partial(measure, options),
        table=table,
        failures=failures,
        failed=lambda row: bool(row["failure"]) and row["implementation"] != STOCK,
        write=write,
    )


def _of_models(options: argparse.Namespace) -> _Benchmark:
    """The problems of `bench_models`, of which the first implementation is timed."""
    ours = options.implementations[0]
    problems = list(bench_models.PRESET) if options.preset else bench_models.select(options.models)
    chip = start_metal().device.get("name", "")
    if not problems:
        names = ", ".join(dict.fromkeys(p.name for p in bench_models.PROBLEMS))
        raise argparse.ArgumentTypeError(f"argument --models: expected a part of a name of {names}")

    def measure(progress: Any) -> Iterator[dict[str, Any]]:
        for row in bench_models.measure(problems, ours, options.rounds, SHORTEST, progress):
            problem, kind = bench_models.Problem(**row["sizes"]), row["kind"]
            row["quartiles"] = {name: bench_figures.quartiles(x) for name, x in row["times"].items()}
            if ours in row["seconds"] and kind in BOTH:
                row["figures"] = bench_figures.figures(problem, kind, row["quartiles"][ours][1], chip)
                row["intensity"] = bench_figures.intensity(problem, kind)
            yield row

    def write(rows: Any, facts: dict[str, Any]) -> Iterator[str]:
        facts |= dict(chip=chip, resident_bytes=_resident())
        yield _write_json(options.out / "bench_models.json", dict(**facts, rows=rows))
        if any("figures" in r for r in rows):
            title = f"{ours} on {chip or facts['machine']}, JAX {facts['jax']}"
            bench_figures.plot(rows, options.out / "bench_models.png", title, chip)
            yield str(options.out / "bench_models.png")

    return _Benchmark(
        total=sum(len(p.passes) for p in problems),
        unit="measurement",
        measure=measure,
        table=lambda rows: "\n".join([bench_models.table(rows), "", *bench_figures.summary(rows)]),
        failures=bench_models.failures,
        failed=lambda row: ours in row["failures"],
        write=write,
    )


def _of_devices(options: argparse.Namespace) -> _Benchmark:
    """Attention over several devices, of which the first implementation is timed."""
    if options.models is not None or options.preset:
        raise argparse.ArgumentTypeError("argument --devices: not allowed with --models or --preset")
    if len(jax.devices()) < max(options.devices):
        raise argparse.ArgumentTypeError(f"argument --devices: there are {len(jax.devices())}")

    def write(rows: Any, facts: dict[str, Any]) -> Iterator[str]:
        yield _write_json(options.out / "bench_devices.json", dict(**facts, rows=rows))

    return _Benchmark(
        total=len(options.lengths) * len(BOTH) * sum(len(bench_devices.programs(n)) for n in options.devices),
        unit="program",
        measure=functools.partial(bench_devices.measure, options),
        table=bench_devices.table,
        failures=bench_devices.failures,
        failed=lambda row: bool(row["failure"]),
        write=write,
    )


def _resident() -> int | None:
    """The most memory that this process has held, in bytes."""
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _compare(old: pathlib.Path, new: pathlib.Path) -> int:
    try:
        lines, worse = bench_figures.compare(old, new)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"argument --compare: {error}") from None
    print("\n".join(lines))
    return 1 if worse else 0


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> str:
    path.write_text(json.dumps(content, indent=1))
    return str(path)


def run(options: argparse.Namespace) -> int:
    """Measures, writes the files and prints the table.

    0: done. 1: one of our implementations failed, a file could not be written, or with --compare something got slower.
    2: an option or the extra is amiss. 130: interrupted.
    """
    if options.compare:
        return _compare(*options.compare)
    if options.key_value_heads is not None and options.heads % options.key_value_heads:
        raise argparse.ArgumentTypeError(
            f"argument --key-value-heads: expected a divisor of --heads {options.heads}, got {options.key_value_heads}"
        )
    try:
        import matplotlib  # noqa: F401
        from tqdm import tqdm
    except ImportError as error:
        print(f"bench needs the extra `bench`: pip install 'jax-mfa[bench]' ({error})", file=sys.stderr)
        return 2
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"argument --out: {error}") from None
    if options.devices:
        bench_devices.force_devices(max(options.devices))
    if options.implementations is None:
        try:
            options.implementations = ["blockwise"] if start_metal().reason else ["metal", "blockwise"]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    named = options.models is not None or options.preset
    kind = _of_devices if options.devices else _of_models if named else _of_lengths
    chosen = kind(options)
    rows: list[dict[str, Any]] = []
    interrupted = False
    try:
        with tqdm(total=chosen.total, desc="bench", unit=chosen.unit) as bar:
            for row in interruptible(chosen.measure(bar.update)):
                rows.append(row)
    except KeyboardInterrupt:
        interrupted = True
        print(f"interrupted: {len(rows)} of {chosen.total} {chosen.unit}s were timed", file=sys.stderr)
        if not rows:
            return INTERRUPTED
    # the files first: who reads the table may stop reading
    facts = dict(backend=jax.default_backend(), machine=platform.machine(), jax=jax.__version__)
    said, unwritten = [], False
    try:
        said += [
            f"wrote {name}"
            for name in chosen.write(rows, dict(**facts, rounds=options.rounds, interrupted=interrupted))
        ]
    except OSError as error:
        unwritten = True
        print(f"bench: --out: {error}", file=sys.stderr)
    print("\n".join([chosen.table(rows), "", *chosen.failures(rows), *said]))
    if interrupted:
        return INTERRUPTED
    return 1 if unwritten or any(chosen.failed(r) for r in rows) else 0
