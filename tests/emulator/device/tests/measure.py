"""Prints what the emulated device costs on this machine: microseconds per command buffer, empty and with one thread.

python tests/emulator/device/tests/measure.py
"""

import ctypes
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from emulator import device

TIMES = 5000


def main() -> None:
    metal = device.load()
    program = pathlib.Path(__file__).resolve().parent / "programs" / "probe.cc"
    probe = ctypes.CDLL(str(device.host([program], flags=["-fno-delete-null-pointer-checks"])))
    for name, checked in (("repeat_empty", 0), ("repeat", 0), ("repeat", 1)):
        with metal.option(device.Option.CHECKED, checked):
            run = getattr(probe, name)
            run(TIMES // 10)
            best = float("inf")
            for _ in range(5):
                start = time.perf_counter()
                run(TIMES)
                best = min(best, time.perf_counter() - start)
        what = "no command" if name == "repeat_empty" else f"one thread, {'checked' if checked else 'fast'}"
        print(f"{what:24} {best / TIMES * 1e6:7.1f} us")


if __name__ == "__main__":
    main()
