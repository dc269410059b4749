"""Every feature on the kernels that other chips take, acting as those: fragments straight from device memory, and no
simdgroup functions.

The rest of the tests run what the emulated chip takes by itself, tiles staged in threadgroup memory.
"""

import pytest
from attention_cases import BY_NAME
from emulator import device
from harness import IMPLEMENTATIONS, check_case, needs_emulator

from jax_mfa.metal import runtime

pytestmark = needs_emulator
METAL = next(x for x in IMPLEMENTATIONS if x.name == "metal")


CHIPS = ["direct on m3", "portable on paravirtual", "portable on intel with 64 lanes"]


@pytest.fixture(scope="module")
def variant(request):
    name, machine = request.param.split(" on ")
    machine, *lanes = machine.split(" with ")
    control = device.load()
    with runtime.variant(name), control.profile(machine):
        control.set(device.Option.SIMD_WIDTH, 64 if lanes else 32)
        runtime.get().module.reset()
        runtime._prepare.cache_clear()
        yield name
    runtime.get().module.reset()
    runtime._prepare.cache_clear()


RICHEST = ("everything", "gpt_oss", "llama", "block_sparse")
CASES = [(name, "float32") for name in BY_NAME] + [(name, "bfloat16") for name in RICHEST]


# the richest cases on all chips, of the others each on one; sweeps have them all
TRIED = [
    pytest.param(chip, *case, marks=() if case[0] in RICHEST or i % len(CHIPS) == j else pytest.mark.sweep)
    for j, chip in enumerate(CHIPS)
    for i, case in enumerate(CASES)
]


@pytest.mark.share(16)
@pytest.mark.parametrize("variant,name,dtype", TRIED, indirect=["variant"])
def test_values_and_gradients_are_right(variant, name, dtype):
    check_case(METAL, BY_NAME[name], dtype)
