"""The strict dialect check over every kernel of `metal/`, as the project's own launch plans instantiate them."""

from __future__ import annotations

import re

import emulator
import ml_dtypes
import numpy as np
import pytest

from jax_mfa.metal import kernels, source, tiles
from jax_mfa.metal.plan import LANGUAGE, Plan
from jax_mfa.metal.problem import Shape
from jax_mfa.specification import Specification

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
    ]:
        keys = Shape((1, columns, 1, head), kind)
        arrays = {"query": Shape((1, rows, 2, head), kind), "key": keys, "value": keys}
        scores = (1, 2, rows, columns)
        if "bias" in wanted:
            arrays |= {"bias": Shape(scores, kind), "mask": Shape(scores, np.dtype(bool))}
        found.append(kernels.forward(spec, arrays, variant=variant))
        if wanted:
            found.append(kernels.backward(spec, arrays, wanted=wanted, variant=variant))
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_keep_to_metals_dialect(dtype: str, variant: str) -> None:
    lines = "".join(plan.instantiations for plan in plans(dtype, variant)).splitlines(keepends=True)
    text = source.base() + "\n" + "".join(dict.fromkeys(lines))
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
