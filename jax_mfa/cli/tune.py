"""Finds the fastest tiles for problems on this machine, and keeps them for this chip: `jax_mfa.tune` as a command.

Each plan of a problem (forward and backward of `blockwise`; where Metal can be used, its kernels, and how decoding
splits the keys) has a line: the usual tiles, and the fastest of those that were tried. Winners serve programs that are
traced from then on. How tiles are tried and judged is `jax_mfa.tuning.tune`'s.
"""

from __future__ import annotations

import argparse

from jax_mfa.arguments import specify_abstract
from jax_mfa.cli import bench_candidates, bench_problems
from jax_mfa.cli.command_line import INTERRUPTED, errors_of, interruptible, positive, positives, start_metal
from jax_mfa.problem import DTYPES
from jax_mfa.tuning import tune as tuning
from jax_mfa.tuning import tuned

HELP = "find the fastest tiles for problems on this machine, and keep them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m jax_mfa tune`."""
    models = "the problems of `bench --models` whose name or shape holds PART"
    parser.add_argument("--models", type=bench_problems.select, metavar="PART", help=models)
    lengths = "T = S, comma separated; default: %(default)s"
    parser.add_argument("--lengths", type=positives, default="1024", help=lengths)
    for flag, default, what in (("--batch", 1, "B"), ("--heads", 8, "N"), ("--head-size", 64, "H = V")):
        parser.add_argument(flag, type=positive, default=default, help=f"{what}, default: %(default)s")
    parser.add_argument("--key-value-heads", type=positive, help="K, a divisor of N, default: --heads")
    parser.add_argument("--dtype", choices=DTYPES[:3], default="float32", help="default: %(default)s")
    parser.add_argument("--causal", action="store_true", help="row t sees columns up to t")
    parser.add_argument("--tries", type=positive, default=12, help="other tiles for each plan, default: %(default)s")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each, at least; default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="keep nothing")


def _named(options: argparse.Namespace) -> list[tuple[tuning.Problem, tuple[str, ...]]]:
    """The problems of the options, with the passes of each."""
    heads, mask = options.key_value_heads or options.heads, "causal" if options.causal else "none"
    sizes = (options.heads, heads, options.head_size, mask, options.dtype)
    chosen = options.models or [bench_problems.Problem("", options.batch, x, x, *sizes) for x in options.lengths]
    passes = lambda p: tuning.PASSES[:1] if p.decodes else tuning.PASSES
    return [(specify_abstract(**bench_candidates.arguments(p)), passes(p)) for p in chosen]


def run(options: argparse.Namespace) -> int:
    """Prints what was found, line by line, and keeps it. 0: done. 1: it could not be kept. 130: interrupted."""
    with errors_of():
        problems = _named(options)
        start_metal()
    print(f"{tuned.chip()}; gains are medians of pairs of calls, in one run", flush=True)
    results: list[tuning.Tuned] = []
    status = 0
    try:
        lines = (x for each, passes in problems for x in tuning.search(*each, passes, options.tries, options.rounds))
        for line in interruptible(lines):
            print(line, flush=True)
            results.append(line)
    except KeyboardInterrupt:
        print("interrupted")
        status = INTERRUPTED
    if options.dry_run:
        return status
    try:
        file = tuning.store(results)
    except (OSError, RuntimeError) as error:
        print(f"tune: nothing could be kept: {error}")
        return status or 1
    print(f"kept in {file}" if file else "nothing is kept")
    return status
