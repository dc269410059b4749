"""Times attention against stock JAX, and PyTorch and MLX where they are installed, side by side in one run.

Problems are every combination of the values that the sweep's options name, or those of models. For each problem and
pass every candidate is compiled, its temporary memory is read from the compiler, and all are timed in turns, so that
the ratio holds on a machine whose speed drifts. Prints a table and speed-ups by what was swept, and writes `bench.json`
and `bench.png`. A candidate that cannot run a problem is listed with its reason, and the others go on. Ctrl-C ends the
measuring; the problems that were finished are printed and written.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jax_mfa.choice import IMPLEMENTATIONS
from jax_mfa.cli import bench_candidates, bench_devices, bench_predict, bench_problems, bench_report
from jax_mfa.cli.bench_problems import BOTH, DECODE, MASKS, SWEEP, Problem
from jax_mfa.cli.command_line import INTERRUPTED, errors_of, interruptible, positive, positives, some_of, start_metal
from jax_mfa.problem import DTYPES

HELP = "time attention against stock jax.nn, over sweeps or for named models"
Row = dict[str, Any]
SHORTEST = 0.5  # seconds of timing for each set of candidates


# --- options


# options of a sweep by the names of `SWEEP`: kind and help
_SWEPT: dict[str, tuple[Callable[[str], Sequence[Any]], str]] = {
    "lengths": (positives, "T = S; of decode, S"),
    "batches": (positives, "B"),
    "heads": (positives, "N"),
    "key_value_heads": (positives, "K, divisors of N"),
    "head_sizes": (positives, "H = V"),
    "dtypes": some_of(*DTYPES[:3]),
    "masks": some_of(*MASKS),
    "passes": some_of(*BOTH, DECODE),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m jax_mfa bench`."""
    swept = parser.add_argument_group("sweep", "values, comma separated; every combination of them is timed")
    for name, (kind, what) in _SWEPT.items():
        usual = "as many as N" if SWEEP[name] == [None] else ",".join(map(str, SWEEP[name]))
        swept.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="LIST", help=f"{what}; default: {usual}")
    window = "columns that a row of the mask window sees, default: %(default)s"
    swept.add_argument("--window", type=positive, default=bench_problems.WINDOW, help=window)

    other = parser.add_argument_group("what else to time").add_mutually_exclusive_group()
    models = "the attention of named models instead, those whose name or shape holds PART"
    other.add_argument("--models", nargs="?", const="", type=bench_problems.select, metavar="PART", help=models)
    preset = "a sweep of 48 short problems, over batches, lengths and head sizes, where no option says otherwise"
    other.add_argument("--preset", action="store_true", help=preset)
    devices = (
        "a sweep of causal attention over so many devices each, comma separated: bytes sent and memory per device, "
        "beside the formulas; a CPU is divided into as many"
    )
    other.add_argument("--devices", type=positives, help=devices)
    compare = "time nothing: compare two bench.json, and exit 1 where something got slower beyond noise"
    other.add_argument("--compare", nargs=2, type=pathlib.Path, metavar=("OLD", "NEW"), help=compare)

    kind, what = some_of(*IMPLEMENTATIONS)
    usual = "others are compared with the first; default: metal where it can be used, and blockwise"
    parser.add_argument("--implementations", type=kind, help=f"comma separated, {what}; {usual}")
    predict = (
        "time nothing: print what the Metal kernels would take on Apple's chips, as this module predicts; in a "
        "checkout: compiled, with PYTHONPATH=tests:tests/metal"
    )
    parser.add_argument("--predict", type=bench_predict.model, metavar="MODULE", help=predict)
    kind, what = some_of(*bench_predict.CHIPS)
    chips = f"of --predict, comma separated, {what}; default: %(default)s"
    parser.add_argument("--chips", type=kind, default="M1,M1 Max,M1 Ultra,M3,M3 Max,M4 Max,M5 Max", help=chips)
    parser.add_argument("--no-stock", action="store_true", help="leave jax.nn out, for lengths that it cannot hold")
    rounds = "timed turns of each candidate, at least; default: %(default)s"
    parser.add_argument("--rounds", type=positive, default=5, help=rounds)
    folder = "folder of the two files, default: %(default)s"
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"), help=folder)


def _problems(options: argparse.Namespace) -> list[Problem]:
    """Those of the models that are named, else of the sweep."""
    given = {name: getattr(options, name) for name in SWEEP if getattr(options, name) is not None}
    if options.models is not None:
        if given:
            other = next(iter(given)).replace("_", "-")
            raise argparse.ArgumentTypeError(f"argument --models: not allowed with argument --{other}")
        return options.models
    base = bench_problems.PRESET if options.preset else {"masks": ["causal"]} if options.devices else {}
    values = {**SWEEP, **base, **given}
    for n in values["heads"]:
        for k in values["key_value_heads"]:
            if k is not None and n % k:
                expected = f"expected a divisor of --heads {n}, got {k}"
                raise argparse.ArgumentTypeError(f"argument --key-value-heads: {expected}")
    if options.devices and (values["masks"] != ["causal"] or DECODE in values["passes"]):
        raise argparse.ArgumentTypeError("argument --devices: not allowed with other masks than causal, or decode")
    return bench_problems.sweep(values, options.window)


# --- measuring and reporting


def _side_by_side(options: argparse.Namespace, problems: list[Problem], chip: str) -> Iterator[Row]:
    """A row for each problem and pass; the first implementation is compared with the others."""
    ours = options.implementations[0]
    candidates = [bench_candidates.STOCK] * (not options.no_stock) + options.implementations
    for row in bench_candidates.measure(problems, candidates, ours, options.rounds, SHORTEST):
        problem, kind = Problem(**row["sizes"]), row["kind"]
        row["quartiles"] = {name: bench_report.quartiles(x) for name, x in row["times"].items()}
        if ours in row["seconds"] and kind in (*BOTH, DECODE):
            row["figures"] = bench_report.figures(problem, kind, row["quartiles"][ours][1], chip)
            row["intensity"] = bench_report.intensity(problem, kind)
        yield {**row, "resident_bytes": _resident()}


def _resident() -> int | None:
    """The most memory that this process has held, in bytes; None where the system does not say."""
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _report(rows: list[Row]) -> list[str]:
    lines = [*bench_report.table(rows), "", *bench_report.summary(rows)]
    if (held := rows[-1]["resident_bytes"]) is not None:
        lines.append(f"the process held {held / 2**20:.0f} MiB of memory at most")
    return [*lines, "", *bench_report.failures(rows)]


def _write(rows: list[Row], facts: Row, options: argparse.Namespace) -> Iterator[str]:
    """Writes the files, and says so of each."""
    path = options.out / ("bench_devices.json" if options.devices else "bench.json")
    path.write_text(json.dumps(dict(**facts, rows=rows), indent=1))
    yield f"wrote {path}"
    if not options.devices and any(r["seconds"] for r in rows):
        title = f"{options.implementations[0]} on {facts['chip'] or facts['machine']}, JAX {facts['jax']}"
        bench_report.plot(rows, options.out / "bench.png", title, facts["chip"])
        yield f"wrote {options.out / 'bench.png'}"


def _prepare(options: argparse.Namespace) -> str:
    """Makes the folder, the devices and the list of implementations; the name of the chip where Metal comes first."""
    with errors_of("--out"):
        options.out.mkdir(parents=True, exist_ok=True)
    if options.devices:
        bench_devices.force_devices(max(options.devices))
    with errors_of():
        if options.implementations is None:
            options.implementations = ["blockwise"] if start_metal().reason else ["metal", "blockwise"]
        metal_first = options.implementations[0] == "metal" and not options.devices
        chip: str = start_metal().device.get("name", "") if metal_first else ""
    if options.devices and len(jax.devices()) < max(options.devices):
        raise argparse.ArgumentTypeError(f"argument --devices: there are {len(jax.devices())}")
    return chip


def run(options: argparse.Namespace) -> int:
    """Measures, writes the files and prints the table.

    0: done. 1: one of our implementations failed, a file could not be written, or with --compare something got slower.
    2: an option or the extra is amiss. 130: interrupted.
    """
    if options.compare:
        with errors_of("--compare"):
            lines, worse = bench_report.compare(*options.compare)
        print("\n".join(lines))
        return 1 if worse else 0
    problems = _problems(options)
    if options.predict:
        for line in bench_predict.report(options.predict, problems, options.chips):
            print(line, flush=True)
        return 0
    try:
        import matplotlib  # noqa: F401
        from tqdm import tqdm
    except ImportError as error:
        print(f"bench needs the packages of the extra `bench`: pip install matplotlib tqdm ({error})", file=sys.stderr)
        return 2
    chip = _prepare(options)
    if options.devices:
        cases = bench_devices.cases(problems, options.devices)
        total, steps = len(cases), bench_devices.measure(cases, options.implementations[0], options.rounds)
    else:
        total, steps = sum(len(p.passes) for p in problems), _side_by_side(options, problems, chip)
    rows: list[Row] = []
    interrupted = False
    try:
        for row in tqdm(interruptible(steps), total=total, desc="bench", unit="measurement"):
            rows.append(row)
    except KeyboardInterrupt:
        interrupted = True
        print(f"interrupted: {len(rows)} of {total} measurements were made", file=sys.stderr)
        if not rows:
            return INTERRUPTED
    # write the files first: who reads the table may stop reading
    facts: Row = dict(backend=jax.default_backend(), machine=platform.machine(), jax=jax.__version__)
    facts |= dict(rounds=options.rounds, interrupted=interrupted)
    if not options.devices:
        facts |= dict(chip=chip, resident_bytes=rows[-1]["resident_bytes"])
    written: list[str] = []
    unwritten = False
    try:
        written += _write(rows, facts, options)
    except OSError as error:
        unwritten = True
        print(f"bench: --out: {error}", file=sys.stderr)
    report = bench_devices.report(rows) if options.devices else _report(rows)
    print("\n".join([*report, *written]))
    if interrupted:
        return INTERRUPTED
    ours_failed = any(r["failure"] if options.devices else {*r["failures"]} & {*options.implementations} for r in rows)
    return 1 if unwritten or ours_failed else 0
