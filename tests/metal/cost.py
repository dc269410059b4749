"""What the kernels cost, counted by the emulator: multiply-accumulates, bytes, barriers. `python tests/metal/cost.py`
prints the table, with `--decoding` that of bytes for each token of a context.

A counter is exact and the same in every run, so a bound on it is a test (`test_cost.py`). It says nothing of time.
The yardstick is MLX's forward kernel: 32 query rows a threadgroup, 8 for each simdgroup, K and V staged.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import plans  # noqa: E402
import runners  # noqa: E402
import serving  # noqa: E402
from plans import Problem  # noqa: E402

from jax_mfa import Scheme  # noqa: E402
from jax_mfa.metal import tiles  # noqa: E402

# device and threadgroup bytes per multiply-accumulate, and barriers per threadgroup, at T = S = 512, H = 64, float16
YARDSTICK = {"device": 33.0, "threadgroup": 144.0, "barriers": 66.0}
# of the yardstick, for staged tiles; threadgroup bytes where a simdgroup has 16 rows, and where it has 8
BOUND = {"device": 0.55, "threadgroup": 0.6, "barriers": 0.5}
THREADGROUP_OF_8_ROWS = 0.9
KERNELS = ("attention_forward", "attention_d_query", "attention_d_key_value")
LINE = 128  # bytes of a cache line, see emu_counters
# multiply-accumulates of a head in units of T·S·H/512, where V = H
PRODUCTS = {"attention_forward": 2, "attention_d_query": 3, "attention_d_key_value": 4}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one kernel of a problem.

    Attributes:
      products: 8×8×8 multiply-accumulates.
      device, threadgroup: bytes loaded from there per multiply-accumulate.
      lines: bytes of different lines of 128 that a threadgroup loads from the device, per multiply-accumulate: what is
        fetched if a cache keeps them all as long as the threadgroup runs, and nothing for the next.
      barriers: per threadgroup.
    """

    products: int
    device: float
    lines: float
    threadgroup: float
    barriers: float
    exponentials: int
    threadgroup_memory: int
    fragment_bytes: int


def dense(h: int, length: int = 512, variant: str = "staged", dtype: str = "float16", causal: bool = False) -> Problem:
    """One head, T = S, nothing ragged."""
    return Problem(T=length, S=length, H=h, B=1, N=1, K=1, dtype=dtype, variant=variant, is_causal=causal)


def measure(problem: Problem, backward: bool = True) -> dict[str, Cost]:
    """By kernel. Runs the problem under the checker."""
    chosen = [problem.plan(), problem.plan("backward")] if backward else [problem.plan()]
    on = runners.Core(lines=True)
    if backward:
        ran = plans.evaluate(problem, on=on)
    else:
        ran = plans.run(chosen[0], problem.arrays(problem.arguments()), on=on)
    assert ran.reports == []
    kernels = {d.kernel.template[0]: d.kernel for plan in chosen for d in plan.dispatches}
    found = {}
    for name, c in ran.counters.items():
        if name in KERNELS:
            products = c.matrix_multiply_accumulates
            found[name] = Cost(
                products,
                c.device_bytes_loaded / products,
                c.device_lines_loaded * LINE / products,
                c.threadgroup_bytes_loaded / products,
                c.barriers / c.threadgroups,
                c.exponentials,
                kernels[name].threadgroup_memory,
                kernels[name].fragment_bytes,
            )
    return found


def table(sizes: list[int], length: int, dtype: str) -> str:
    """Markdown: each kernel and variant at each head size, and causal over dense."""
    lines = [
        f"T = S = {length}, {dtype}; a unit is T·S·H/512 multiply-accumulates (MAC)",
        "",
        "| variant | kernel | H | units | device B/MAC | in lines | threadgroup B/MAC | barriers/threadgroup "
        "| causal/dense | threadgroup memory | fragments B/thread |",
        "|---" * 11 + "|",
    ]
    for variant in tiles.VARIANTS:
        for h in sizes:
            whole = measure(dense(h, length, variant, dtype))
            half = measure(dense(h, length, variant, dtype, causal=True))
            for name in KERNELS:
                c = whole[name]
                unit = length * length * tiles.padded(h) / 512
                lines.append(
                    f"| {variant} | {name.removeprefix('attention_')} | {h} | {c.products / unit:.2f} | {c.device:.1f} "
                    f"| {c.lines:.1f} | {c.threadgroup:.1f} | {c.barriers:.0f} "
                    f"| {half[name].products / c.products:.3f} | {c.threadgroup_memory} | {c.fragment_bytes} |"
                )
    yardstick = ", ".join(f"{name} {value:g} (bound {value * BOUND[name]:.4g})" for name, value in YARDSTICK.items())
    return "\n".join([*lines, "", f"yardstick, forward at H = 64: {yardstick}"])


# --- decoding, by how keys and values are stored

STORED = {
    "float16": None,
    "int8": Scheme("int8"),
    "int8, symmetric": Scheme("int8", True),
    "fp8, symmetric": Scheme("fp8", True),
    "int4": Scheme("int4"),
    "int4, symmetric": Scheme("int4", True),
    "int4, groups of 32": Scheme("int4", channels=32),
}


def _decoded(scheme: Scheme | None, page: int, *lengths: int) -> serving.Serving:
    return serving.Serving(
        T=1, key_value_seq_lengths=lengths, schemes=(scheme, scheme), page=page, H=64, N=8, dtype="float16"
    )


def whole_decoding(scheme: Scheme | None) -> int:
    """Bytes that kernels load for one new token of a context of 4096: of keys and values, rows, splits and parameters,
    of which each lane that reads one counts."""
    ran = _decoded(scheme, 0, 4096).run()
    assert not ran.reports
    return sum(x.device_bytes_loaded for x in ran.counters.values())


@functools.cache
def decoding(scheme: Scheme | None, page: int = 0) -> tuple[float, float, float]:
    """Of one new token for each further token of its context, H = 64, float16: bytes that are stored for it, bytes that
    kernels load, and multiply-accumulates."""
    long, short = (_decoded(scheme, page, 1024, x) for x in (1024, 512))
    whole, half = long.run(), short.run()
    assert not whole.reports and not half.reports
    total = lambda ran, name: sum(getattr(x, name) for x in ran.counters.values())
    each = lambda name: (total(whole, name) - total(half, name)) / 512
    columns = [long.both[0][name] for name in ("key", "value")]
    rows = [x.pages if page else x for x in columns]
    stored = sum(x.nbytes / (x.shape[0] * x.shape[1]) for x in rows)
    return stored, each("device_bytes_loaded"), each("matrix_multiply_accumulates")


def table_of_decoding() -> str:
    """Markdown: what each way of storing costs, over float16."""
    dense, whole = decoding(None), whole_decoding(None)
    lines = [
        "decoding, H = V = 64, K = 2: for each token of the context; at last, all that a token costs at S = 4096",
        "",
        "| stored as | bytes stored | bytes loaded | over float16 | in pages of 16 | MAC | S = 4096, over float16 |",
        "|---" * 7 + "|",
    ]
    for name, scheme in STORED.items():
        stored, loaded, products = decoding(scheme)
        _, paged, _ = decoding(scheme, 16)
        lines.append(
            f"| {name} | {stored:.0f} | {loaded:.0f} | {loaded / dense[1]:.3f} | {paged / dense[1]:.3f} "
            f"| {products:.1f} | {whole_decoding(scheme) / whole:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=lambda x: [int(y) for y in x.split(",")], default=[16, 32, 64, 96, 128, 256])
    parser.add_argument("--length", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument(
        "--decoding", action="store_true", help="what decoding costs, by how keys and values are stored"
    )
    options = parser.parse_args()
    if options.decoding:
        print(table_of_decoding())
    else:
        print(table(options.sizes, options.length, options.dtype))


if __name__ == "__main__":
    main()
