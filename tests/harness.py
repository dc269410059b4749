"""The shared test base: implementations with what they can do, one way to run them, and one statement of tolerance.

An implementation that refuses a problem must do so by `NotImplementedError`, naming itself and the argument: see
`refused`. A further implementation is one more row of `IMPLEMENTATIONS`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh

import jax_mfa

DIFFERENTIABLE = ("query", "key", "value", "bias", "scale", "alibi_slopes", "sinks")
STATIC = ("is_causal", "local_window_size", "logits_soft_cap", "dropout_rate")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation and the promises it makes beyond the common ones.

    Attributes:
      dtypes: the dtypes it takes.
      refuses: names of arguments that it does not take.
      linear_memory: temporary memory grows with T + S, not T · S.
      forward_mode: `jax.jvp` and second derivatives work.
      finite_inside: no intermediate array holds an infinity, so `debug_infs` stays silent eagerly too.
      own_rules: how it differentiates, batches and lowers is its own; otherwise it is plain jnp and JAX's.
      in_jnp: its work shows in the compiled program as jnp would write it.
      available: whether this machine can run it; if not, every call must say so.
    """

    name: str
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64")
    refuses: frozenset[str] = frozenset()
    linear_memory: bool = True
    forward_mode: bool = True
    finite_inside: bool = True
    own_rules: bool = True
    in_jnp: bool = True
    available: bool = True

    @property
    def disabled_checks(self):
        """What `jax.export` must be told to let the custom calls through."""
        return () if self.in_jnp else jax_mfa.DISABLE_EXPORT_CHECKS

    def attend(self, *args, **keywords):
        return jax_mfa.dot_product_attention(*args, implementation=self.name, **keywords)

    def flash(self, *args, **keywords):
        return jax_mfa.flash_attention(*args, implementation=self.name, **keywords)


IMPLEMENTATIONS = (
    Implementation("reference", linear_memory=False, finite_inside=False, own_rules=False),
    Implementation("blockwise"),
    Implementation(
        "metal",
        dtypes=("float16", "bfloat16", "float32"),
        forward_mode=False,
        in_jnp=False,
        # judged without starting the device: some tests count what lives on it
        available=os.environ.get("JAX_MFA_DEVICE", "").startswith("emulator")
        or bool(importlib.util.find_spec("jax_mfa._metal")),
    ),
)
AVAILABLE = tuple(x for x in IMPLEMENTATIONS if x.available)
# where sizes or rules of JAX are what is tested, plain jnp adds nothing
own = pytest.mark.parametrize("implementation", [x for x in AVAILABLE if x.own_rules], ids=lambda x: x.name)


def refused(implementation: Implementation, arguments: dict) -> bool:
    """Whether a problem is beyond an implementation; if so, asserts that it says so in the promised words."""
    dtype = np.asarray(arguments["query"]).dtype.name
    words = sorted(implementation.refuses & set(arguments)) or ([dtype] if dtype not in implementation.dtypes else [])
    if not words:
        return False
    with pytest.raises(NotImplementedError) as caught:
        implementation.attend(**arguments)
    assert implementation.name in str(caught.value) and words[0] in str(caught.value)
    return True


def x64():
    """64-bit types within a `with` block."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64()


def types_of(dtype: str):
    return x64() if dtype == "float64" else contextlib.nullcontext()


def is_static(name: str, x) -> bool:
    return name in STATIC or isinstance(x, (int, float, str)) or x is None


def split(arguments: dict) -> tuple[dict, dict]:
    """Arguments that are arrays, and those that are static."""
    static = {name: x for name, x in arguments.items() if is_static(name, x)}
    return {name: x for name, x in arguments.items() if name not in static}, static


# LLVM's optimiser takes most of the time of a small program and knows nothing of attention: for tests of many programs
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def evaluate(implementation: Implementation, arguments: dict, d_out, d_lse, jit=quick_jit):
    """Output, log-sum-exp and the gradients of every differentiable array argument, as one jitted program."""
    arrays, static = split(arguments)
    program = _program(implementation, tuple(static.items()), tuple(arrays), jit)
    return jax.tree.map(np.asarray, program(arrays, d_out, d_lse))


@functools.cache
def _program(implementation, static, names, jit):
    moving = tuple(name for name in DIFFERENTIABLE if name in names)

    def run(arrays, d_out, d_lse):
        fun = lambda varying: implementation.flash(**{**arrays, **varying}, **dict(static))
        (out, lse), pullback = jax.vjp(fun, {name: jnp.asarray(arrays[name]) for name in moving})
        return out, lse, pullback((jnp.asarray(d_out, out.dtype), jnp.asarray(d_lse, lse.dtype)))[0]

    return jit(run)


def cotangents(arguments: dict, seed: int = 1):
    """Random cotangents of output and log-sum-exp, the first rounded to the output's dtype."""
    rng = np.random.default_rng(seed)
    *lead, t, n, _ = arguments["query"].shape
    d_out = rng.standard_normal((*lead, t, n, arguments["value"].shape[-1])).astype(arguments["query"].dtype)
    return d_out, rng.standard_normal((*lead, t, n)).astype(np.promote_types(d_out.dtype, np.float32))


def tolerance(expected, dtype, *, terms: int, largest_score: float = 0.0, gradient: bool = False, size: float = 0.0):
    """How far a result may lie from the float64 answer computed from the same rounded inputs.

    * One ulp of the result's own dtype for the single rounding at the end.
    * Sums of `terms` numbers in the accumulation dtype: errors of one ulp each that add up like a random walk, beside
      a handful for exp, log and division; a score is known to an ulp of its own size, and exp makes that relative.
    * A gradient is also computed from the rounded output: two more ulps of the dtype, relative to the largest entry.
    * `size`, where a sum may cancel: the root of the sum of its terms' squares, which then counts as the largest entry.
    """
    expected = np.abs(np.asarray(expected, np.float64))
    expected = np.where(np.isfinite(expected), expected, 0)
    largest = max(expected.max(initial=0.0), size)
    ulp = lambda d: float(jnp.finfo(d).eps)
    accumulation = np.promote_types(dtype, np.float32)
    allowed = ulp(dtype) * expected + ulp(accumulation) * (8 + terms**0.5 + largest_score) * max(largest, 1e-30)
    return allowed + (2 * ulp(dtype) * largest if gradient else 0)


def assert_within(got, expected, allowed, what=""):
    """Numbers no farther from those expected than is allowed, of any shape that broadcasts; NaN and infinities equal.

    Raises `AssertionError` naming the worst: where it stands, what it is, what was expected and what was allowed.
    """
    got, expected = (np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in (got, expected))
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, np.abs(got - expected))
    allowed = np.broadcast_to(allowed, error.shape)
    beyond = np.where(np.isfinite(error), error / np.maximum(allowed, 1e-300), np.inf)
    if beyond.size and not beyond.max() <= 1:
        at = tuple(int(i) for i in np.unravel_index(beyond.argmax(), beyond.shape))
        raise AssertionError(
            f"{what}: worst at {list(at)}: {got[at]}, expected {expected[at]}, allowed {allowed[at]:.3g}, "
            f"{beyond[at]:.3g} times that; {(beyond > 1).sum()} of {beyond.size} are beyond it"
        )


def assert_close(got, expected, dtype, *, terms, what="", **keywords):
    """Within `tolerance`."""
    assert_within(got, expected, tolerance(expected, dtype, terms=terms, **keywords), what)


def assert_allclose(got, expected, rtol=1e-7, atol=0.0, err_msg=""):
    """numpy's, of arrays that broadcast, naming the worst as `assert_within` does."""
    got, expected = np.broadcast_arrays(got, expected)
    size = np.abs(expected if np.iscomplexobj(expected) else expected.astype(np.float64))
    assert_within(got, expected, atol + rtol * np.where(np.isfinite(size), size, 0), err_msg)


def terms_of(arguments: dict) -> int:
    """The longest sum of a problem: over head sizes, over keys, or over the queries of a group."""
    *_, t, n, h = arguments["query"].shape
    *_, s, k, v = arguments["value"].shape
    return max(s, t * n // k) + max(h, v)


@functools.lru_cache(maxsize=256)
def _answer_of_case(case, dtype, seed):
    arguments = case.arguments(dtype, seed)
    d_out, d_lse = cotangents(arguments)
    return arguments, d_out, d_lse, oracle.attention(**arguments, d_out=d_out, d_lse=d_lse)


def assert_matches_oracle(
    implementation, arguments, *, d_out=None, d_lse=None, answer=None, jit=quick_jit, cancelled=False
):
    """Values and gradients of a problem against the oracle.

    Args:
      cancelled: whether all sums of a gradient, or all differences in it, may be of numbers much larger than they are,
        as where there is a single key: no more than an ulp of those is known of them.
    """
    if refused(implementation, arguments):
        return
    if d_out is None:
        d_out, d_lse = cotangents(arguments)
    if answer is None:
        answer = oracle.attention(**arguments, d_out=d_out, d_lse=d_lse)
    out, lse, gradients = evaluate(implementation, arguments, d_out, d_lse, jit)
    dtype = arguments["query"].dtype
    accumulation = np.promote_types(dtype, np.float32)
    common = {"largest_score": answer.largest_score}
    terms = terms_of(arguments)
    assert out.dtype == dtype and lse.dtype == accumulation
    assert_close(out, answer.out, dtype, terms=terms, what="out", **common)
    assert_close(lse, answer.lse, accumulation, terms=terms, what="lse", **common)
    for name, got in gradients.items():
        assert got.dtype == arguments[name].dtype
        sizes = answer.sizes | (answer.cancelled if cancelled else {})
        wanted, size = answer.gradients[name], sizes.get(name, 0.0)
        assert_close(got, wanted, dtype, terms=terms, what=f"d{name}", gradient=True, size=size, **common)


def check_case(implementation, case, dtype="float32", seed=0, **keywords):
    """`assert_matches_oracle` of a case."""
    with types_of(dtype):
        arguments, d_out, d_lse, answer = _answer_of_case(case, dtype, seed)
        assert_matches_oracle(implementation, arguments, d_out=d_out, d_lse=d_lse, answer=answer, **keywords)


def mesh_of(*shape, names=("ring", "heads")):
    """A mesh of the first devices."""
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names[: len(shape)])


def arrays(*shapes, dtype="float32", seed=0):
    """Random normal numpy arrays."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def qkv(B=2, T=7, S=9, N=4, K=2, H=8, V=None, dtype="float32", seed=0):
    """Random query, key and value."""
    return arrays((B, T, N, H), (B, S, K, H), (B, S, K, V or H), dtype=dtype, seed=seed)


needs_eight_devices = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
needs_emulator = pytest.mark.skipif(
    not os.environ.get("JAX_MFA_DEVICE", "").startswith("emulator"),
    reason="needs the emulated device, which could not be built",
)
BY_NAME_OF_IMPLEMENTATION = {x.name: x for x in IMPLEMENTATIONS}


def shard_map(fun, mesh, in_specs, out_specs):
    """JAX's own `shard_map`, with its checks."""
    if hasattr(jax, "shard_map"):
        return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    from jax.experimental.shard_map import shard_map

    return shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
