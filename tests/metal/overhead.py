"""Prints what a launch costs inside jitted programs on the emulated device, above an FFI call that does nothing,
and whether time, memory or objects grow over many calls.

    python tests/metal/overhead.py [--growth 100000]

The kernel does nothing and the checker is off, so the figure is the launcher's and the emulated device's own work.
`chain` is a program of 200 calls, each taking the last one's result; `single` a program of one call, waited for. A
caller who waits is woken by another thread, which costs more than the launch: `handed over` is an FFI call that
does nothing but let another thread complete its future, for comparison.
"""

from __future__ import annotations

import argparse
import ctypes
import pathlib
import resource
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import jax
import jax.numpy as jnp
from emulator import device, host_module
from launcher import TARGET, Program, ffi, register

CHAIN = 200
ROUNDS = 15
SOURCE = """
#include <metal_stdlib>
using namespace metal;
kernel void nothing(device const float* x [[buffer(0)]], device float* out [[buffer(1)]]) {}
"""
EMPTY = """
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
struct Other {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<ffi::Promise> queue;
  Other() { std::thread([this] { serve(); }).detach(); }
  void serve() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex);
      wake.wait(lock, [this] { return !queue.empty(); });
      ffi::Promise promise = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      promise.SetAvailable();
    }
  }
};
static ffi::Error nothing(ffi::Dictionary, ffi::RemainingArgs, ffi::RemainingRets) { return ffi::Error::Success(); }
static ffi::Future later(ffi::Dictionary, ffi::RemainingArgs, ffi::RemainingRets) {
  static Other* other = new Other;
  ffi::Promise promise;
  ffi::Future future(promise);
  std::lock_guard<std::mutex> guard(other->mutex);
  other->queue.push_back(std::move(promise));
  other->wake.notify_one();
  return future;
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(empty_call, nothing, ffi::Ffi::Bind().Attrs().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(handed_over, later, ffi::Ffi::Bind().Attrs().RemainingArgs().RemainingRets());
"""
TARGETS = (TARGET, "empty_call", "handed_over")


def register_empty_calls() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "empty_call.cc"
        source.write_text(EMPTY)
        library = device.host([source], include_dirs=[host_module.ffi_include_dir()], std="c++17", defines=["NDEBUG"])
    handlers = ctypes.CDLL(str(library))
    for name in TARGETS[1:]:
        ffi.register_ffi_target(name, ffi.pycapsule(getattr(handlers, name)), platform="cpu")


def compiled(target: str, plan: str, shape: tuple[int, ...], calls: int) -> Callable[[jax.Array], jax.Array]:
    call = ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, jnp.float32))

    def run(x: jax.Array) -> jax.Array:
        for _ in range(calls):
            x = call(x, plan=plan)
        return x

    return jax.jit(run).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile()


def microseconds(run: Callable[[jax.Array], jax.Array], x: jax.Array, calls: int) -> float:
    """Per call, median of ROUNDS rounds of at least CHAIN calls each."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CHAIN // calls):
            run(x).block_until_ready()
        times.append((time.perf_counter() - start) / CHAIN * 1e6)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Launch overhead on the emulated device.")
    parser.add_argument("--growth", type=int, default=0, metavar="CALLS", help="also watch this many calls for growth")
    growth = parser.parse_args().growth
    metal, module = device.load(), register()
    register_empty_calls()
    print(f"{'us a call':24} {'launch':>8} {'empty':>8} {'above':>8} {'handed over':>12}")
    with metal.option(device.Option.CHECKED, 0), metal.option(device.Option.RECORD, 0):
        for route, shape in (("staged 4 KiB", (1024,)), ("no copy 4 MiB", (1024, 1024))):
            program = Program("nothing", SOURCE, threads=1)
            program.buffer("x", "input", "float32", shape).buffer("out", "output", "float32", shape)
            plan = program.dispatch("nothing", [1, 1, 1], ["x", "out"]).text()
            x = jnp.zeros(shape, jnp.float32)
            for kind, calls in (("single", 1), ("chain", CHAIN)):
                runs = [compiled(target, plan, shape, calls) for target in TARGETS]
                launch, empty, handed = (microseconds(run, x, calls) for run in runs)
                print(f"{kind + ', ' + route:24} {launch:8.2f} {empty:8.2f} {launch - empty:8.2f} {handed:12.2f}")
        if growth:
            watch(metal, module, runs[0], x, growth)


def watch(
    metal: device.Control,
    module: types.ModuleType,
    run: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    calls: int,
) -> None:
    print(f"\n{'calls':>8} {'us a call':>10} {'peak MiB':>9}  objects")
    done = 0
    while done < calls:
        start, before = time.perf_counter(), done
        while done - before < max(CHAIN, calls // 5):
            run(x).block_until_ready()
            done += CHAIN
        spent = (time.perf_counter() - start) / (done - before) * 1e6
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{done:8} {spent:10.2f} {peak:9.1f}  {metal.live_objects()}, {module.statistics()['staging_bytes']} staged"
        )


if __name__ == "__main__":
    main()
