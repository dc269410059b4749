"""Programs that go on after attention: XLA runs them on the thread that completes the call. macOS gives threads 512 KiB
of stack unless told, so the emulated device's have as much, and here every other thread of the process too. A callback
of each program overflows such a stack, and looks at the size of the one that it got."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import types

import pytest

TESTS = pathlib.Path(__file__).resolve().parents[1]

# glibc gives what pthread_create is not told from a default that can be set; macOS's cannot, and is 512 KiB
START = """
import ctypes, os, sys
sys.path[:0] = [{tests!r}, {tests!r} + "/metal", {root!r}]
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
class Attributes(ctypes.Union):
    _fields_ = [("size", ctypes.c_char * 64), ("align", ctypes.c_long)]
libc, attributes = ctypes.CDLL(None), Attributes()
assert libc.pthread_attr_init(ctypes.byref(attributes)) == 0
assert libc.pthread_attr_setstacksize(ctypes.byref(attributes), ctypes.c_size_t(512 * 1024)) == 0
assert libc.pthread_setattr_default_np(ctypes.byref(attributes)) == 0
import jax, jax.numpy as jnp, numpy as np
import jax_mfa
from jax_mfa.metal import runtime
assert not runtime.get().reason, runtime.get().reason
x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 64, 2, 32)), jnp.float32)
attend = lambda x: jax_mfa.dot_product_attention(x, x, x, implementation="metal")
def stack_bytes():
    "Of this thread."
    libc.pthread_self.restype = ctypes.c_ulong
    own, start, size = Attributes(), ctypes.c_void_p(), ctypes.c_size_t()
    assert libc.pthread_getattr_np(ctypes.c_ulong(libc.pthread_self()), ctypes.byref(own)) == 0
    assert libc.pthread_attr_getstack(ctypes.byref(own), ctypes.byref(start), ctypes.byref(size)) == 0
    return size.value
def deep(n, x):
    "Recursion that goes through C at each level, as callbacks do that map, sort or parse."
    return x if n == 0 else next(map(lambda x: deep(n - 1, x), [x]))
stacks = []
def called(x):
    stacks.append(stack_bytes())
    return np.asarray(deep(4000, x))
callback = lambda x: jax.pure_callback(called, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
sys.setrecursionlimit(20000)
"""

PROGRAMS = {
    "lapack": """
@jax.jit
def run(x):
    y = attend(x)[0].reshape(64, 64)
    q, r = jnp.linalg.qr(y)
    u, s, v = jnp.linalg.svd(attend(x)[0].reshape(64, 64))
    big = jnp.tile(y, (6, 6)) + jnp.eye(384)
    return q @ r - y, (u * s) @ v - y, callback(jnp.linalg.svd(big)[1]), callback(jnp.linalg.eigh(big @ big.T)[0])
a, b, *rest = run(x)
assert abs(a).max() < 1e-4 and abs(b).max() < 1e-4 and all(np.isfinite(y).all() for y in rest)
""",
    "callback": """
y = jax.jit(lambda x: attend(callback(attend(x))) + 0)(x)
np.testing.assert_array_equal(y, jax.jit(lambda x: attend(attend(x)))(x))
def inside(x):
    "A callback that waits for attention itself, while the thread that it runs on waits for it."
    stacks.append(stack_bytes())
    return np.asarray(jax.jit(attend)(jnp.asarray(np.asarray(x))))
nested = lambda x: jax.pure_callback(inside, jax.ShapeDtypeStruct(x.shape, x.dtype), attend(x))
np.testing.assert_array_equal(jax.jit(nested)(x), y)
""",
    "callback_in_a_gradient": """
d = jax.jit(lambda x: callback(jax.grad(lambda x: attend(x).sum())(x)))(x)
assert np.isfinite(d).all()
""",
    "collectives": """
from functools import partial
mesh = jax.make_mesh((4,), ("device",))
spec = jax.sharding.PartitionSpec("device")
shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map
import inspect
unchecked = {{"check_vma" if "check_vma" in inspect.signature(shard_map).parameters else "check_rep": False}}
@jax.jit
@partial(shard_map, mesh=mesh, in_specs=spec, out_specs=spec, **unchecked)
def run(x):
    for _ in range(3):
        x = attend(x) + jax.lax.psum(attend(x), "device")
        q, _ = jnp.linalg.qr(x[0].reshape(64, 64))
        x = x + callback(q).reshape(x.shape)
    return x
many = jnp.concatenate([x, 2 * x, 3 * x, 4 * x])
many = jax.device_put(many, jax.sharding.NamedSharding(mesh, spec))
for _ in range(3):
    assert np.isfinite(run(many)).all()
step = lambda x: callback(jax.lax.pmean(jax.grad(lambda x: attend(x).sum())(x), "device"))
assert np.isfinite(jax.pmap(step, axis_name="device")(many[:, None])).all()
""",
    "scan": """
def step(x, _):
    y = attend(x)
    return y / jnp.linalg.norm(jnp.linalg.svd(y[0].reshape(64, 64))[1]), callback(y).sum()
_, sums = jax.jit(lambda x: jax.lax.scan(step, x, None, length=20))(x)
assert np.isfinite(sums).all()
""",
}


MACHINES = dict(zip(PROGRAMS, ("m1", "m3", "m5", "paravirtual", "intel"), strict=True))


@pytest.mark.share(8)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_goes_on_after_attention(name: str, native: types.ModuleType) -> None:
    # 8 MiB, of which glibc leaves out the main thread's arguments and environment
    end = "assert stacks and min(stacks) >= 7 << 20, stacks\n"
    code = START.format(tests=str(TESTS), root=str(TESTS.parent)) + PROGRAMS[name].format() + end
    environment = {**os.environ, "JAX_MFA_DEVICE": f"emulator:{MACHINES[name]}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, f"{done.stdout}{done.returncode}\n{done.stderr[-2000:]}"
