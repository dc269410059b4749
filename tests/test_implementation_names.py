"""Which implementation a call takes: a name, an alias, or the first of several that can."""

import jax
import numpy as np
import pytest
from harness import qkv

import jax_mfa
from jax_mfa import choice

Q, K, V = qkv()


@pytest.fixture(params=["", "no Metal today"], ids=["metal can", "metal cannot"])
def refusal(request, monkeypatch):
    monkeypatch.setattr(choice, "refusal", lambda spec, operands: request.param)
    monkeypatch.setattr(choice, "_small_go_elsewhere", lambda: False)
    return request.param


def asked(implementation):
    """What a call's program leaves to lowering: a name, or None for the choice between Metal and blockwise."""
    run = lambda *x: jax_mfa.dot_product_attention(*x, implementation=implementation)
    equations = jax.make_jaxpr(run)(Q, K, V).jaxpr.eqns
    return [x.params["call"].implementation for x in equations if x.primitive.name == "jax_mfa_attention"] or [
        "reference"
    ]


@pytest.mark.parametrize(
    ("implementation", "can", "cannot"),
    [
        ("xla", "blockwise", "blockwise"),
        (("xla",), "blockwise", "blockwise"),
        (("reference", "blockwise"), "reference", "reference"),
        (("blockwise", "metal"), "blockwise", "blockwise"),
        (("metal", "blockwise"), "metal", "blockwise"),
        (("metal", "xla"), "metal", "blockwise"),
        (("metal", "reference", "blockwise"), "metal", "reference"),
        (("metal", "metal"), "metal", None),
        ("metal", "metal", None),
        (None, "metal", "blockwise"),
    ],
    ids=str,
)
def test_the_first_that_can_is_taken(implementation, can, cannot, refusal):
    wanted = cannot if refusal else can
    if wanted is None:
        for run in (asked, lambda x: jax_mfa.explain(Q, K, V, implementation=x)):
            with pytest.raises(NotImplementedError, match="cannot run this call: metal: no Metal today"):
                run(implementation)
        return
    assert jax_mfa.explain(Q, K, V, implementation=implementation).implementation == wanted
    # between Metal and blockwise the platform decides, which is known when the program is lowered
    open_choice = implementation in (None, ("metal", "blockwise"), ("metal", "xla"))
    assert asked(implementation) == [None if open_choice else wanted]


def test_the_default_device_counts_only_where_there_is_another_choice(monkeypatch):
    monkeypatch.setattr(choice, "refusal", lambda spec, operands: "")
    monkeypatch.setattr(choice, "platform_of", lambda arrays: "toaster")
    assert asked(("metal", "reference")) == ["reference"]
    assert asked("metal") == ["metal"]  # perhaps for a device that is named later
    with pytest.raises(NotImplementedError, match=r"metal: .* on toaster: for Metal kernels keep"):
        jax_mfa.explain(Q, K, V, implementation=("metal",))


@pytest.mark.parametrize("call", [jax_mfa.dot_product_attention, jax_mfa.flash_attention])
def test_a_tuple_runs_as_what_it_chooses(call):
    leaves = lambda implementation: jax.tree.leaves(call(Q, K, V, implementation=implementation))
    for got, wanted in zip(leaves(("blockwise", "reference")), leaves("blockwise")):
        np.testing.assert_array_equal(got, wanted)
