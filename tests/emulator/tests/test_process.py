"""The threads that the runtime keeps survive fork, and do not hold up the end of the process."""

import pathlib
import subprocess
import sys

START = f"""
import os, sys, threading, time
sys.path.insert(0, {str(pathlib.Path(__file__).resolve().parents[2])!r})
import emulator, numpy as np
TEXT = "#include <metal_stdlib>\\nusing namespace metal;\\n"
TEXT += "kernel void f(device float *o [[buffer(0)]], uint i [[thread_position_in_grid]]) {{ BODY }}"
def made(body):
    return emulator.compile(TEXT.replace("BODY", body)).kernel(checked=False)
counting, endless = made("o[i] = i;"), made("float x = 0; while (o[1] < 1e30f && x < 1e30f) x += o[1] * 0; o[i] = x;")
def count():
    out = np.zeros(4096, np.float32)
    result = counting([out], threads=4096, threadgroup=64, checked=False, host_threads=3)
    assert result.ok and (out == np.arange(4096)).all()
def spin(limit):
    return endless([np.zeros(64, np.float32)], threads=64, threadgroup=64, checked=False, time_limit=limit).status
count()
"""


def run(body: str) -> None:
    done = subprocess.run([sys.executable, "-c", START + body], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_forked_child_runs_and_stops_kernels():
    run("""
busy = True
def others():
    while busy:
        count()
threads = [threading.Thread(target=others) for _ in range(2)]
[thread.start() for thread in threads]
children = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        count()
        os._exit(0 if spin(0.05) is emulator.Status.TIMEOUT else 1)
    children.append(child)
ends = [os.waitpid(child, 0)[1] for child in children]
busy = False
[thread.join() for thread in threads]
assert ends == [0] * 8, ends
""")


def test_a_process_ends_while_a_kernel_runs():
    run("threading.Thread(target=spin, args=[60], daemon=True).start()\ntime.sleep(0.1)\n")
