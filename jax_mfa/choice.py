"""Which implementation computes a call, and why not Metal: by name, by what kernels take, by what pays.

`why_not_metal` is asked by lowering, which knows the platform, and by `explain`, which says the same of the platform
that arrays are bound to, or else of the default device. Knows shapes and static facts, the device, and what calls
cost; reads no array and traces nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import jax

from jax_mfa import checks
from jax_mfa.metal import DTYPES, functions, runtime
from jax_mfa.metal.tiles import LATENT, MAX_GRID, MAX_HEAD
from jax_mfa.problem import Operands, Specification
from jax_mfa.tuning import crossover

IMPLEMENTATIONS: tuple[str, ...] = ("metal", "blockwise", "reference")
_OPEN = ("metal", "blockwise")  # leaves the choice between the two to lowering, which knows platform and sizes
_ALIASES = {"xla": "blockwise"}  # as `jax.nn` calls what runs everywhere
_Name: TypeAlias = Literal["metal", "blockwise", "reference", "xla"]
Implementation: TypeAlias = _Name | tuple[_Name, ...]

# as reported of hosted runners: kernels that leave zeros (Metal.jl issue 309) or never end (llama.cpp issue 8617), and
# other results than an M2's (lattice issue 899)
_VIRTUAL = "of a virtual machine, or older than Apple silicon: there are reports of wrong results from such GPUs"

# platforms without an Apple GPU; a Mac's are those of plugins, by whatever name
_NO_MACS = frozenset({"cpu", "cuda", "gpu", "rocm", "tpu"})
HOW_TO_STAY = (
    "for Metal kernels keep the program on JAX's CPU backend (JAX_PLATFORMS=cpu, or jax.default_device), or attention "
    "alone (jax.device_put its arrays to jax.devices('cpu')[0])"
)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation a call takes, and why not another.

    Attributes:
      implementation: the name of the one taken.
      reasons: for each implementation its verdict in one line.
    """

    implementation: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        mark = lambda name: "->" if name == self.implementation else "  "
        return "\n".join(f"{mark(name)} {name}: {why}" for name, why in self.reasons.items())


# --- which implementations a caller allows


def names_of(implementation: Implementation | None) -> tuple[str, ...]:
    """The implementations that a caller allows, the preferred one first. Raises `ValueError` for unknown names."""
    if implementation is None:
        return _OPEN
    names = implementation if isinstance(implementation, tuple) else (implementation,)
    known = (*IMPLEMENTATIONS, *_ALIASES)
    if not names or any(not isinstance(name, str) or name not in known for name in names):
        raise ValueError(
            f"implementation must be None, one of {known} or a tuple of them, got {checks.seen(implementation)}"
        )
    return tuple(dict.fromkeys(_ALIASES.get(name, name) for name in names))


def explained(
    implementation: Implementation | None, spec: Specification, o: Operands, platform: str = "cpu"
) -> Explanation:
    """The implementation that a problem takes on a platform, and why. Raises `NotImplementedError` where none can."""
    choices = names_of(implementation)
    elsewhere = f"it runs on JAX's platform cpu, and the arrays or the default backend are on {platform}: {HOW_TO_STAY}"
    refused = why_not_metal(spec, o, "" if platform == "cpu" else elsewhere, small_too=choices[:2] != _OPEN)
    reasons = {
        "metal": refused or _expected_of_metal(spec, o),
        "blockwise": "jnp in tiles, O(T + S) memory; any platform of JAX",
        "reference": "the O(T * S) definition; only by name",
    }
    able = [name for name in choices if name != "metal" or not refused]
    if not able:
        raise NotImplementedError(f"implementation={implementation!r} cannot run this call: metal: {refused}")
    return Explanation(able[0], reasons)


def decided(implementation: Implementation | None, spec: Specification, o: Operands) -> str | None:
    """The implementation to take; None where lowering decides, by platform, between Metal and blockwise."""
    choices = names_of(implementation)
    if choices[:2] == _OPEN:
        return None
    if choices[0] != "metal":
        return choices[0]
    # alone, Metal may be meant for another device than the default one
    return explained(implementation, spec, o, platform_of(o) if len(choices) > 1 else "cpu").implementation


def at_lowering(implementation: str | None, spec: Specification, o: Operands) -> str:
    """Why an attention compiled for `cpu` runs as blockwise; empty where Metal takes it, and where Metal was named.

    Warns once where Metal was to be expected on this host and cannot be used.
    """
    if implementation is not None:
        return "" if implementation == "metal" else "by name"
    return _warned(why_not_metal(spec, o))


def at_lowering_elsewhere(
    implementation: str | None, spec: Specification, o: Operands, platforms: Iterable[str]
) -> str:
    """Why an attention compiled for other platforms than `cpu` runs as blockwise.

    Warns once for each that a Mac's plugin brings, where Metal was to be expected on the CPU backend. Raises
    NotImplementedError where Metal was named.
    """
    where = ", ".join(platforms)
    if implementation == "metal":
        expected = "implementation='metal' runs on JAX's platform cpu of an Apple silicon host"
        raise NotImplementedError(f"{expected}, and is being compiled for {where}: {HOW_TO_STAY}")
    plugins = sorted({*platforms} - _NO_MACS)
    if implementation is None and plugins and not _warned(why_not_metal(spec, o)):
        for platform in plugins:
            runtime.warn_once(f"it is compiled for JAX's platform {platform}; {HOW_TO_STAY}")
    return f"compiled for {where}"


def _warned(why_not: str) -> str:
    """The same; warns once where it is that Metal was to be expected on this host and cannot be used."""
    found = runtime.get()
    if found.reason and why_not == found.reason and not found.expected:
        runtime.warn_once(found.reason)
    return why_not


# --- why not Metal


def why_not_metal(spec: Specification, o: Operands, other_platform: str = "", small_too: bool = False) -> str:
    """Why Metal does not take a problem, which may be the `other_platform` of its arrays; empty where it does, with
    `small_too` also where blockwise is expected to be faster."""
    return refusal(spec, o) or other_platform or ("" if small_too else _too_small(spec, o))


def lacking(spec: Specification, o: Operands) -> str:
    """Which argument of a problem the kernels do not take; empty where they take it. Knows no device."""
    dtype = o.query.dtype.name
    if dtype not in DTYPES:
        return f"query: Metal has no {dtype}; it takes {', '.join(DTYPES)}"
    if o.bias is not None and o.bias.dtype.name not in DTYPES:
        return f"bias: Metal has no {o.bias.dtype.name}; it takes {', '.join(DTYPES)}"
    for name in ("captured_floats", "captured_integers"):
        x = getattr(o, name)
        if x is not None and x.dtype.itemsize > 4:
            return f"{name}: Metal has no {x.dtype.name}, and score_mod or mask_mod reads such an array"
    if why := functions.refusal(spec.score_mod, spec.mask_mod):
        return why
    b, _, n, h = o.query.shape
    v = spec.viewed(o).value.shape[-1]
    if not isinstance(b, int):
        return f"query: a launch plan is made for a known batch, got B = {b}"
    if max(h, v) > MAX_HEAD:
        return f"query, key, value: head sizes go to {MAX_HEAD}, got H = {h}, V = {v}"
    if spec.value_size is not None and (h % LATENT or v % LATENT):
        return f"value_size: the kernels read values from keys in multiples of {LATENT} channels, got H = {h}, V = {v}"
    if max(b, n) > MAX_GRID:
        return f"query: batch and heads go to {MAX_GRID}, got B = {b}, N = {n}"
    return ""


def refusal(spec: Specification, o: Operands) -> str:
    """Why Metal cannot run a problem on this host; empty where it can."""
    return lacking(spec, o) or runtime.get().reason


def platform_of(arrays: Any) -> str:
    """JAX's platform for what is computed from these arrays: that which one is bound to, or the default device's."""
    for x in jax.tree.leaves(arrays):
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed:
            return next(iter(x.devices())).platform
    config: Any = jax.config
    device = config.jax_default_device  # a device, a platform, or None
    return jax.default_backend() if device is None else getattr(device, "platform", device)


def _small_go_elsewhere() -> bool:
    """Whether small problems stay away from Metal: not where JAX_MFA_DEVICE names a module and no machine to act as."""
    module, machine = runtime.named()
    return not module or machine is not None


def _on_device(spec: Specification, o: Operands) -> tuple[str, crossover.Estimate | None]:
    """The name of the device, and how long a problem is expected to take there if that is known."""
    found = runtime.get().device
    name = found.get("name", "Metal")
    return name, crossover.estimate(spec, o, name) if found else None


def _too_small(spec: Specification, o: Operands) -> str:
    """Why a problem that Metal can run is better off elsewhere; empty where it is not, or nobody knows."""
    if not _small_go_elsewhere():
        return ""
    device, estimate = _on_device(spec, o)
    if runtime.get().virtual:
        return f"{device} is {_VIRTUAL}; implementation='metal' uses it all the same"
    return "" if estimate is None or estimate.pays else f"does not pay on {device}: {estimate}"


def _expected_of_metal(spec: Specification, o: Operands) -> str:
    """The device that would run a problem, and how long that is expected to take."""
    device, estimate = _on_device(spec, o)
    where = f"{device}, on JAX's platform cpu" + (f" ({_VIRTUAL})" if runtime.get().virtual else "")
    if estimate is None:
        return where
    if not estimate.pays and not _small_go_elsewhere():
        return f"{where}: {estimate}; JAX_MFA_DEVICE={runtime.named()[0]} takes it all the same"
    return f"{where}: {estimate}"
