"""The strict dialect check over every kernel of `metal/`, as the project's own launch plans instantiate them."""

from __future__ import annotations

import dataclasses
import re

import emulator
import jax
import ml_dtypes
import numpy as np
import pytest
from jax import ShapeDtypeStruct as Shape

from jax_mfa import Scheme, metal
from jax_mfa.api import with_modifiers
from jax_mfa.arguments import specify
from jax_mfa.metal import append, source, tiles
from jax_mfa.metal import plans as launch_plans
from jax_mfa.metal.plan import LANGUAGE, Plan, instantiations
from jax_mfa.problem import Specification, Storage

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
VARIANTS = tiles.NAMES
TEMPLATE = re.compile(r"\[\[kernel[^\n]*\]\] void (\w+)\(")


def plans(dtype: str, variant: str) -> list[Plan]:
    """Plans that between them launch every kernel: few rows and many, small heads, odd ones and the largest."""
    spec, kind, found = Specification(is_causal=True), np.dtype(DTYPES[dtype]), []
    for rows, columns, head, wanted in [
        (64, 64, 64, ("query", "key", "value", "bias", "scale")),
        (40, 72, 84, ("query", "key", "value")),
        (64, 64, 576, ("query", "key", "value")),
        (1, 2048, 64, ()),
        (9, 2048, 64, ()),
    ]:
        keys = Shape((1, columns, 1, head), kind)
        arrays = {"query": Shape((1, rows, 2, head), kind), "key": keys, "value": keys}
        scores = (1, 2, rows, columns)
        if "bias" in wanted:
            arrays |= {"bias": Shape(scores, kind), "mask": Shape(scores, np.dtype(bool))}
        found.append(launch_plans.forward(spec, arrays, variant=variant))
        if wanted:
            found.append(launch_plans.backward(spec, arrays, wrt=wanted, variant=variant))
    return [*found, *stored_plans(kind, variant), *modified_plans(kind, variant)]


def modified_plans(kind: np.dtype, variant: str) -> list[Plan]:
    """A bias that heads share, and a function of scores that reads an array."""
    x, table = np.ones((1, 40, 2, 24), kind), np.arange(79, dtype=np.float32)
    given = {"query": x, "key": x, "value": x, "bias": np.ones((1, 1, 40, 40), kind)}
    mods = {"score_mod": lambda score, b, n, t, s: score + jax.numpy.asarray(table)[t - s + 39]}
    spec, operands = specify(**with_modifiers(given | mods))
    wrt = ("query", "key", "value", "bias", "captured_floats")
    return [metal.plan_of(spec, operands, "backward", variant, wrt)]


def stored_plans(kind: np.dtype, variant: str) -> list[Plan]:
    """Keys and values quantised, side by side and in pages; new tokens of both into pages."""
    schemes = Scheme("int4", channels=8, center=16), Scheme("fp8", True, 2, None)
    storages = Storage(schemes[0], 24), Storage(schemes[1], 24)
    byte, data = np.dtype(np.uint8), {"key": 12, "value": 24}
    spec = Specification(is_causal=True, key_storage=storages[0], value_storage=storages[1])
    paged = dataclasses.replace(spec, page_size=16)
    found = []
    for rows, columns in ((40, 64), (1, 1024)):
        query = {"query": Shape((1, rows, 2, 24), kind)}
        for pages, tokens, more in (
            (1, columns, {}),
            (9, 16, {"block_tables": Shape((1, columns // 16), np.dtype("i4"))}),
        ):
            arrays = query | {name: Shape((pages, tokens, 1, size), byte) for name, size in data.items()}
            groups = {"key": (tokens, 3), "value": (tokens // 2, 1)}
            arrays |= {f"{name}_scales": Shape((pages, n, 1, x), kind) for name, (n, x) in groups.items()}
            arrays |= {
                "key_zeros": arrays["key_scales"],
                "key_means": Shape((pages, tokens // 16, 1, 24), kind),
                **more,
            }
            which = paged if more else spec
            found.append(launch_plans.forward(which, arrays, variant=variant))
            wanted = ("query",) if more else ("query", "key", "value")
            found.append(launch_plans.backward(which, arrays, wrt=wanted, variant=variant))
    new = {name: Shape((3, 1, 24), kind) for name in data} | dict.fromkeys(append.WHERE, Shape((3,), np.dtype("i4")))
    written = dataclasses.replace(schemes[0], center=None), dataclasses.replace(schemes[1], tokens=1)
    pool = {f"{name}_data": Shape((9, 16, 1, size), byte) for name, size in data.items()}
    pool |= {"key_scales": Shape((9, 16, 1, 3), kind), "key_zeros": Shape((9, 16, 1, 3), kind)}
    pool["value_scales"] = Shape((9, 16, 1, 1), kind)
    storages = Storage(written[0], 24), Storage(written[1], 24)
    return [*found, append.plan(tuple((new | pool).items()), storages)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_keep_to_metals_dialect(dtype: str, variant: str) -> None:
    kernels = [d.kernel for plan in plans(dtype, variant) for d in plan.dispatches]
    text = source.base() + "\n" + instantiations(kernels)
    assert emulator.strict_check(text, language_version=LANGUAGE, fast_math=False, file_name="program.metal") == ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_is_among_them(dtype: str) -> None:
    made = [plan for variant in VARIANTS for plan in plans(dtype, variant)]
    assert {d.kernel.template[0] for plan in made for d in plan.dispatches} == set(TEMPLATE.findall(source.base()))


def test_the_check_would_find_a_mixed_address_space() -> None:
    plan = plans("float32", "staged")[0]
    slip = "inline float slip(device const float *p) { thread const float *q = (thread const float *)p; return *q; }\n"
    found = emulator.strict_check(source.base() + slip + plan.instantiations, language_version=LANGUAGE)
    assert "changes the address space" in found
