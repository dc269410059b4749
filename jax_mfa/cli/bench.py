"""Times attention against stock JAX, and PyTorch and MLX where they are installed, side by side in one run.

Problems are every combination of the values that the sweep's options name, or those of models. For each problem and
pass every candidate is compiled, its temporary memory is read from the compiler, and all are timed in turns, so that
the ratio holds on a machine whose speed drifts. Prints a table and speed-ups by what was swept, and writes `bench.json`
and `bench.png`. A candidate that cannot run a problem is listed with its reason, and the others go on. Ctrl-C ends the
measuring; the problems that were finished are printed and written.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jax_mfa.choice import IMPLEMENTATIONS
from jax_mfa.cli import bench_devices, bench_figures, bench_models, bench_predictions, bench_problems
from jax_mfa.cli.bench_problems import BOTH, DECODE, MASKS, SWEEP, Problem
from jax_mfa.cli.command_line import INTERRUPTED, interruptible, positive, positives, start_metal
from jax_mfa.problem import DTYPES

HELP = "time attention against stock jax.nn, over sweeps or for named models"
Rows = list[dict[str, Any]]
SHORTEST = 0.5  # seconds of timing for each set of candidates


def _some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Different ones of these names, comma separated."""

    def names(text: str) -> list[str]:
        found = list(dict.fromkeys(text.split(",")))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return found

    return names


# the options of a sweep, by the names of `SWEEP`
_SWEPT: dict[str, tuple[Callable[[str], list[Any]], str]] = {
    "lengths": (positives, "T = S; of decode, S"),
    "batches": (positives, "B"),
    "heads": (positives, "N"),
    "key_value_heads": (positives, "K, divisors of N"),
    "head_sizes": (positives, "H = V"),
    "dtypes": (_some_of(DTYPES[:3]), f"of {', '.join(DTYPES[:3])}"),
    "masks": (_some_of(MASKS), f"of {', '.join(MASKS)}"),
    "passes": (_some_of((*BOTH, DECODE)), f"of {', '.join((*BOTH, DECODE))}"),
}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m jax_mfa bench`."""
    swept = parser.add_argument_group("sweep", "values, comma separated; every combination of them is timed")
    for name, (kind, what) in _SWEPT.items():
        usual = "as many as N" if SWEEP[name] == [None] else ",".join(map(str, SWEEP[name]))
        swept.add_argument(_flag(name), type=kind, metavar="LIST", help=f"{what}; default: {usual}")
    swept.add_argument(
        "--window",
        type=positive,
        default=bench_problems.WINDOW,
        help="columns that a row of the mask window sees, default: %(default)s",
    )
    other = parser.add_argument_group("what else to time").add_mutually_exclusive_group()
    other.add_argument(
        "--models",
        nargs="?",
        const="",
        metavar="PART",
        help="the attention of named models instead, those whose name or shape holds PART",
    )
    other.add_argument(
        "--preset",
        action="store_true",
        help="a sweep of 48 short problems, over batches, lengths and head sizes, where no option says otherwise",
    )
    other.add_argument(
        "--devices",
        type=positives,
        help="a sweep of causal attention over so many devices each, comma separated: bytes sent and memory per "
        "device, beside the formulas; a CPU is divided into as many",
    )
    other.add_argument(
        "--compare",
        nargs=2,
        type=pathlib.Path,
        metavar=("OLD", "NEW"),
        help="time nothing: compare two bench.json, and exit 1 where something got slower beyond noise",
    )
    parser.add_argument(
        "--implementations",
        type=_some_of(IMPLEMENTATIONS),
        help=f"comma separated, of {', '.join(IMPLEMENTATIONS)}; others are compared with the first; default: metal "
        "where it can be used, and blockwise",
    )
    parser.add_argument(
        "--predict",
        type=bench_predictions.predictor,
        metavar="MODULE",
        help="also print the share of its cycles that an M1 would spend in the matrix unit, for each Metal kernel, as "
        "matrix_shares(plan) of this module predicts; in a checkout: compiled, with PYTHONPATH=tests:tests/metal",
    )
    parser.add_argument("--no-stock", action="store_true", help="leave jax.nn out, for lengths that it cannot hold")
    parser.add_argument(
        "--rounds", type=positive, default=5, help="timed turns of each candidate, at least; default: %(default)s"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("results"),
        help="folder of the two files, default: %(default)s",
    )


def _problems(options: argparse.Namespace) -> list[Problem]:
    """Those of the models that are named, else of the sweep."""
    given = {name: getattr(options, name) for name in SWEEP if getattr(options, name) is not None}
    if options.models is not None:
        if given:
            raise argparse.ArgumentTypeError(f"argument --models: not allowed with argument {_flag(next(iter(given)))}")
        found = bench_problems.select(options.models)
        if not found:
            names = ", ".join(dict.fromkeys(p.name for p in bench_problems.PROBLEMS))
            raise argparse.ArgumentTypeError(f"argument --models: expected a part of a name of {names}")
        return found
    base = bench_problems.PRESET if options.preset else {"masks": ["causal"]} if options.devices else {}
    values = {**SWEEP, **base, **given}
    for n in values["heads"]:
        for k in values["key_value_heads"]:
            if k is not None and n % k:
                raise argparse.ArgumentTypeError(
                    f"argument --key-value-heads: expected a divisor of --heads {n}, got {k}"
                )
    if options.devices and (values["masks"] != ["causal"] or DECODE in values["passes"]):
        raise argparse.ArgumentTypeError("argument --devices: not allowed with other masks than causal, or decode")
    return bench_problems.sweep(values, options.window)


@dataclasses.dataclass(frozen=True)
class _Benchmark:
    """What `run` does with one of the benchmarks."""

    total: int  # of rows
    measure: Callable[[], Iterator[dict[str, Any]]]
    table: Callable[[Rows], str]
    failures: Callable[[Rows], list[str]]
    failed: Callable[[dict[str, Any]], bool]  # whether one of our implementations did, in a row
    write: Callable[[Rows, dict[str, Any]], Iterator[str]]  # files of rows and facts, and their names as they are there


def _of_problems(options: argparse.Namespace, problems: list[Problem]) -> _Benchmark:
    """Side by side; the first implementation is compared with the others."""
    ours = options.implementations[0]
    chip = start_metal().device.get("name", "") if ours == "metal" else ""
    predicted = bench_predictions.predict(options.predict, problems) if options.predict else {}

    def measure() -> Iterator[dict[str, Any]]:
        candidates = bench_models.candidates(options.implementations, not options.no_stock)
        for row in bench_models.measure(problems, candidates, ours, options.rounds, SHORTEST):
            problem, kind = Problem(**row["sizes"]), row["kind"]
            row["quartiles"] = {name: bench_figures.quartiles(x) for name, x in row["times"].items()}
            if ours in row["seconds"] and kind in (*BOTH, DECODE):
                row["figures"] = bench_figures.figures(problem, kind, row["quartiles"][ours][1], chip)
                row["intensity"] = bench_figures.intensity(problem, kind)
            if predicted:
                row["predicted"] = predicted[str(problem), kind]
            yield {**row, "resident_bytes": _resident()}

    def write(rows: Rows, facts: dict[str, Any]) -> Iterator[str]:
        facts |= dict(chip=chip, resident_bytes=rows[-1]["resident_bytes"])
        yield _write_json(options.out / "bench.json", dict(**facts, rows=rows))
        if any(r["seconds"] for r in rows):
            title = f"{ours} on {chip or facts['machine']}, JAX {facts['jax']}"
            bench_figures.plot(rows, options.out / "bench.png", title, chip)
            yield str(options.out / "bench.png")

    return _Benchmark(
        total=sum(len(p.passes) for p in problems),
        measure=measure,
        table=lambda rows: "\n".join(
            [bench_models.table(rows), "", *bench_figures.summary(rows), *_held(rows), *bench_predictions.lines(rows)]
        ),
        failures=bench_models.failures,
        failed=lambda row: any(name in row["failures"] for name in options.implementations),
        write=write,
    )


def _of_devices(options: argparse.Namespace, problems: list[Problem]) -> _Benchmark:
    """Attention over several devices, of which the first implementation is timed."""
    if len(jax.devices()) < max(options.devices):
        raise argparse.ArgumentTypeError(f"argument --devices: there are {len(jax.devices())}")

    def write(rows: Rows, facts: dict[str, Any]) -> Iterator[str]:
        yield _write_json(options.out / "bench_devices.json", dict(**facts, rows=rows))

    return _Benchmark(
        total=sum(len(p.passes) for p in problems) * sum(len(bench_devices.programs(n)) for n in options.devices),
        measure=functools.partial(
            bench_devices.measure, problems, options.devices, options.implementations[0], options.rounds
        ),
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


def _held(rows: Rows) -> list[str]:
    most = rows[-1]["resident_bytes"]
    return [] if most is None else [f"the process held {most / 2**20:.0f} MiB of memory at most"]


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
    problems = _problems(options)
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
    chosen = (_of_devices if options.devices else _of_problems)(options, problems)
    rows: Rows = []
    interrupted = False
    try:
        with tqdm(total=chosen.total, desc="bench", unit="measurement") as bar:
            for row in interruptible(chosen.measure()):
                rows.append(row)
                bar.update()
    except KeyboardInterrupt:
        interrupted = True
        print(f"interrupted: {len(rows)} of {chosen.total} measurements were made", file=sys.stderr)
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
