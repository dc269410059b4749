"""Prints the figures of the README: processor time of the attention program, checked and unchecked."""

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import emulator
import numpy as np


def main() -> None:
    rows, head = 512, 64
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((rows, head)).astype(np.float32) for _ in range(3))
    out = np.zeros_like(q)
    shape = np.array([rows, rows], np.uint32).tobytes() + np.float32(head**-0.5).tobytes()
    # A function that changes each time keeps the cache out of the measurement of the compiler.
    source = (pathlib.Path(__file__).parent / "msl" / "attention.metal").read_text()
    source += f"inline ulong unused() {{ return {time.time_ns()}ul; }}\n"
    start = time.perf_counter()
    library = emulator.compile(source)
    print(f"front end      {time.perf_counter() - start:.2f} s")
    for checked in (True, False):
        start = time.perf_counter()
        kernel = library.kernel(checked=checked)
        compiled = time.perf_counter() - start
        best = float("inf")
        for _ in range(5):
            start = time.thread_time()
            result = kernel(
                [q, k, v, out, shape], threadgroups=rows // 32, threadgroup=128, checked=checked, host_threads=1
            )
            best = min(best, time.thread_time() - start)
        products = result.counters.matrix_multiply_accumulates
        print(
            f"{'checked' if checked else 'unchecked':<14} {best:.3f} s, {best / products * 1e6:.2f} us per product "
            f"of {products}, compiled in {compiled:.2f} s"
        )


if __name__ == "__main__":
    main()
