"""Kernels over quantised and paged keys and values: right over what is stored, silent over tables that hold garbage.

The long sweep is marked `sweep`: `python -m pytest -m sweep tests/metal/test_serving.py`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from runners import needs_core, planted
from serving import Serving

from jax_mfa import Scheme

ALL = ("query", "key", "value")
EVERYTHING = {"local_window_size": (25, None), "logits_soft_cap": 2.0, "sinks": True, "alibi_slopes": True}
MIXED = (Scheme("int8", channels=8), Scheme("int4", True, channels=None))
FEW = [
    # rows side by side: both passes, every head of every group
    (Serving(schemes=(Scheme("int4", tokens=3, channels=5, center=7), Scheme("fp8", tokens=None)), V=11), ALL),
    (Serving(schemes=MIXED, variant="portable", **EVERYTHING), ALL),
    # pages: chunks of prefill, and decoding
    (Serving(schemes=MIXED, page=8, **EVERYTHING), ("query",)),
    (
        Serving(
            T=2,
            key_value_seq_lengths=(530, 3),
            schemes=(Scheme("int4", True), Scheme("int8")),
            page=16,
            H=32,
            dtype="float16",
        ),
        (),
    ),
    (Serving(T=1, key_value_seq_lengths=(600, 257), page=32, dtype="bfloat16", **EVERYTHING), ()),
]


@pytest.mark.share(8)
@pytest.mark.parametrize(("problem", "wanted"), FEW, ids=str)
def test_results_are_those_over_what_is_stored(problem, wanted):
    problem.assert_right(problem.run(wanted))


# decoding without the matrix unit: one, two, three and four rows a group; scales applied to sums, or element by element
FEW_ROWS = [
    Serving(T=1, N=2, schemes=(Scheme("int8"), Scheme("int4", channels=None)), H=72, V=40, **EVERYTHING),
    Serving(T=2, N=2, schemes=(Scheme("fp8", True), Scheme("int8", True, 16, 32)), page=16, H=128, dtype="bfloat16"),
    Serving(T=1, N=3, K=1, schemes=(None, Scheme("fp8", channels=8)), H=24, V=33, dtype="float16", **EVERYTHING),
    Serving(T=2, schemes=(Scheme("int4", True, None, None), Scheme("int4", center=9)), H=64, V=128, dtype="float16"),
    Serving(T=1, K=1, schemes=(Scheme("fp8"), Scheme("int8", tokens=8, channels=None)), page=16, H=128),
]


# three and four rows of 16 bits that stand twice in a fragment, over units
PAIRED_ROWS = [
    Serving(T=1, N=4, K=1, schemes=(Scheme("int8"), Scheme("int4")), H=128, dtype="float16", **EVERYTHING),
    Serving(T=2, schemes=(Scheme("fp8"), Scheme("int8", True, channels=None)), page=16, H=64, dtype="float16"),
    Serving(T=3, N=2, schemes=(Scheme("int4", True, channels=32), Scheme("fp8", True)), H=96, V=32, dtype="float16"),
    Serving(T=1, N=3, K=1, schemes=(Scheme("int4", channels=32), Scheme("int4", tokens=8)), H=192, dtype="float16"),
    Serving(T=2, schemes=(Scheme("int4"), Scheme("fp8")), page=16, H=128, dtype="bfloat16", **EVERYTHING),
    Serving(T=1, N=4, K=1, schemes=(Scheme("int8", True), Scheme("int8")), H=64, V=32, dtype="bfloat16"),
]


# more rows, with the matrix unit: units as its operands where runs of channels share scales, else element by element
MORE_ROWS = [
    Serving(T=3, schemes=(Scheme("int8"), Scheme("int4")), H=128, dtype="float16", **EVERYTHING),
    Serving(T=8, schemes=(Scheme("int4", True, channels=32), Scheme("fp8")), page=16, H=64, dtype="bfloat16"),
    Serving(T=4, schemes=(Scheme("fp8", True, 16), Scheme("int8", True, None, None)), H=96, V=64),
    Serving(T=5, schemes=(Scheme("int8", channels=None), None), H=32, V=40, dtype="float16"),
    Serving(T=3, schemes=(None, Scheme("int4", channels=32)), page=32, H=40, V=96, dtype="float16", **EVERYTHING),
    Serving(T=8, schemes=(Scheme("int4"), Scheme("int8", channels=128)), H=256, dtype="float16"),  # slices of values
    Serving(T=4, schemes=(Scheme("int8", center=9), Scheme("fp8", channels=24)), H=72, dtype="float16"),
]


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("problem", "kernel"),
    [
        *((x, ("attention_decode_rows", False)) for x in FEW_ROWS),
        *((x, ("attention_decode", True)) for x in PAIRED_ROWS),
        *((x, ("attention_decode", False)) for x in MORE_ROWS),
    ],
    ids=str,
)
def test_decoding_is_right(problem, kernel):
    problem = dataclasses.replace(problem, key_value_seq_lengths=(2100, 77))
    (plan,) = problem.plans()
    function, *_, last = plan.dispatches[0].kernel.template
    assert (function, last is True) == kernel
    problem.assert_right(problem.run())


@pytest.mark.share(2)
@pytest.mark.parametrize("T", [1, 2, 5])
def test_a_capped_score_of_an_infinite_query_is_the_cap(T):
    """Units and zeros of its keys would come to infinities of both signs."""
    schemes = Scheme("int8"), Scheme("int8")
    problem = Serving(T=T, key_value_seq_lengths=(600,), schemes=schemes, H=64, dtype="float16", logits_soft_cap=2.0)
    for x in problem.both:
        query = np.array(x["query"])
        query[0, -1, :, 7] = np.inf
        x["query"] = query
    problem.assert_right(problem.run())


@pytest.mark.share(2)
@pytest.mark.parametrize("rows", [2, 4, 8])
def test_values_that_would_leave_their_type_are_held_within_it(rows):
    schemes = Scheme("int8"), Scheme("int8", channels=None)
    problem = Serving(T=rows // 2, key_value_seq_lengths=(600, 520), schemes=schemes, H=32, dtype="float16")
    stored, meant = problem.both
    scales = np.array(stored["value"].scales)
    scales[:, ::50] *= np.float16(40_000)  # 255 of them are more than 65504
    stored["value"] = dataclasses.replace(stored["value"], scales=scales)
    meant["value"] = np.asarray(stored["value"].dequantize(np.float32))
    assert np.abs(meant["value"]).max() == 65504
    problem.assert_right(problem.run())


@pytest.mark.share(2)
@pytest.mark.parametrize("T", [2, 5])
def test_rows_and_scales_of_bfloat_that_no_half_holds(T):
    """Queries of 2^-100 to 2^-60 beside keys of 2^60 and more, and values of 2^-60."""
    schemes = Scheme("int8"), Scheme("int4")
    problem = Serving(T=T, key_value_seq_lengths=(600, 520), schemes=schemes, H=64, dtype="bfloat16")
    stored, meant = problem.both
    query = np.array(stored["query"], np.float32) * 2.0 ** np.array([-60, -64, -62, -100])[:, None]
    stored["query"] = query.astype(stored["query"].dtype)
    meant["query"] = stored["query"].astype(meant["query"].dtype)
    for name, power in (("key", 60), ("value", -60)):
        x = stored[name]
        times = lambda y, power=power: (np.asarray(y, np.float32) * 2.0**power).astype(np.asarray(y).dtype)
        stored[name] = dataclasses.replace(x, scales=times(x.scales), zeros=times(x.zeros))
        meant[name] = np.asarray(stored[name].dequantize(np.float32))
    problem.assert_right(problem.run())


@pytest.mark.share(2)
@pytest.mark.parametrize("T", [2, 5])
def test_an_undefined_element_reaches_its_channel_where_it_is_visible(T):
    schemes = Scheme("int8"), Scheme("fp8", True)
    problem = Serving(T=T, key_value_seq_lengths=(600, 520), schemes=schemes, H=64, dtype="float16")
    wanted = problem.run().arrays["out"]
    stored = dataclasses.replace(problem).both[0]
    data = np.array(stored["value"].data)
    data[0, 599, 1, 5] = data[1, 300, 0, 7] = 0x7F  # the first is visible to the last row alone
    data[1, 525] = 0xFF  # beyond the length
    undefined = dataclasses.replace(problem)
    undefined.both[0]["value"] = dataclasses.replace(stored["value"], data=data)
    ran = undefined.run()
    assert ran.reports == []
    seen = np.zeros(wanted.shape, bool)
    seen[0, -1, 2:, 5] = seen[1, :, :2, 7] = True
    assert np.array_equal(np.isnan(ran.arrays["out"]), seen)
    assert np.allclose(ran.arrays["out"][~seen], wanted[~seen], rtol=2**-10, atol=2**-14)


PAGED = Serving(T=4, page=8)
ONE = Scheme("int8", channels=None)
FAR = Serving(T=4, schemes=(ONE, ONE), shift=3)
# (what the kernels say, what they would say) by name, and the problem that finds it out
MISTAKES = {
    "a table strided by the number of physical pages": (
        "ulong(uint(length / (PAGE != 0 ? PAGE : 1)))",
        f"{PAGED.both[0]['key'].pages.shape[0]}ul",
        PAGED,
        (),
    ),
    "causality by the row of a table": (
        "column - (row + offset) <= p->right",
        "column - (row + batch) <= p->right",
        PAGED,
        (),
    ),
    "a page looked up beyond a length": ("source.token(first + min(i, last))", "source.token(first + i)", PAGED, ()),
    "zero points in 8 bits": ("fma(x, scale, zero)", "(x + float(char(int(zero / scale)))) * scale", FAR, ()),
    "nibbles in the other order": (
        "(word >> (bits * e))",
        "(word >> (bits * (KIND == int4_kind ? e ^ 1 : e)))",
        Serving(T=4, schemes=(Scheme("int4"), None)),
        (),
    ),
    "scales of the first token for all": (
        "within / per;",
        "0;",
        Serving(T=4, schemes=(Scheme("int8", True, 4), None)),
        (),
    ),
    "one head of a group in the backward pass": (
        "const int end_head = first_head + heads_of_group;",
        "const int end_head = first_head + 1;",
        FAR,
        ALL,
    ),
}


def test_every_mistake_can_be_planted():
    for old, new, *_ in MISTAKES.values():
        planted(old, new)


@pytest.mark.share(8)
@needs_core
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_others_is_found_out(mistake):
    old, new, problem, wanted = MISTAKES[mistake]
    text = planted(old, new)
    problem.assert_right(problem.run(wanted))
    with pytest.raises(AssertionError):
        problem.assert_right(problem.run(wanted, text=text))


SCHEMES = [
    *(
        Scheme(kind, symmetric, tokens, channels, center)
        for kind in ("int8", "int4", "fp8")
        for symmetric in (False, True)
        for tokens, channels, center in [
            (1, 64, None),
            (1, None, None),
            (None, None, None),
            (4, 3, None),
            (None, 4, 6),
            (1, 32, 1000),
        ]
    ),
]
NOT_CAUSAL = {"is_causal": False}
WINDOW = {"local_window_size": (9, None)}
SIZES = ((16, 16), (11, 7), (64, 40), (128, 128), (264, 8))


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(SCHEMES)))
@pytest.mark.parametrize("decode", [False, True])
def test_every_scheme(at, decode):
    schemes = SCHEMES[at], SCHEMES[(at * 7 + 3) % len(SCHEMES)]
    h, v = SIZES[at % len(SIZES)]
    features = (EVERYTHING, NOT_CAUSAL, WINDOW)[at % 3]
    dtype = ("float32", "float16", "bfloat16")[at // 2 % 3]
    rows, lengths = (3, (515, 77)) if decode else (21, (43, 30))
    page = (0, 8, 16)[at % 3]
    problem = Serving(
        T=rows, key_value_seq_lengths=lengths, schemes=schemes, page=page, H=h, V=v, dtype=dtype, **features
    )
    problem.assert_right(problem.run(ALL if page == 0 else ("query",)))


@pytest.mark.sweep
@pytest.mark.parametrize("page", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("schemes", [(None, None), MIXED, (None, Scheme("fp8"))], ids=["plain", "mixed", "half"])
@pytest.mark.parametrize("rows", [1, 70])
def test_every_page_size(page, schemes, rows):
    problem = Serving(
        T=rows, key_value_seq_lengths=(page * 2 + 500, 71, 90), schemes=schemes, page=page, V=24, N=6, K=3
    )
    problem.assert_right(problem.run())


@pytest.mark.sweep
@pytest.mark.parametrize("variant", ["direct", "portable"])
@pytest.mark.parametrize("problem", [x for x, _ in FEW], ids=str)
def test_every_variant(problem, variant):
    changed = dataclasses.replace(problem, variant=variant)
    changed.assert_right(changed.run(("query",)))
