"""The scoped stand-in for `jax.nn.dot_product_attention`."""

import inspect

import jax
import numpy as np
import pytest
from harness import assert_allclose, qkv

import jax_mfa
from jax_mfa import override

Q, K, V = qkv()


def taken(function, *arguments) -> list:
    """The implementations that the attention in a function's program asks for; "stock" for JAX's own."""
    equations = jax.make_jaxpr(lambda *x: function(*x))(*arguments).jaxpr.eqns  # JAX traces a function once
    return [x.params["call"].implementation for x in equations if x.primitive.name == "jax_mfa_attention"] or ["stock"]


def call(q, k, v, **keywords):
    return jax.nn.dot_product_attention(q, k, v, **keywords)


def test_calls_of_jax_nn_run_here_within_the_context_only():
    stock = jax.nn.dot_product_attention
    assert taken(call, Q, K, V) == ["stock"]
    with jax_mfa.override_jax_nn():
        assert taken(call, Q, K, V) == [None]
        np.testing.assert_array_equal(
            call(Q, K, V, is_causal=True), jax_mfa.dot_product_attention(Q, K, V, is_causal=True)
        )
    assert jax.nn.dot_product_attention is stock


def test_an_exception_ends_the_context_too():
    stock = jax.nn.dot_product_attention
    with pytest.raises(ZeroDivisionError), jax_mfa.override_jax_nn():
        raise ZeroDivisionError
    assert jax.nn.dot_product_attention is stock


def test_contexts_nest():
    with jax_mfa.override_jax_nn("blockwise"):
        outer = jax.nn.dot_product_attention
        with jax_mfa.override_jax_nn():
            assert taken(call, Q, K, V) == [None]
        assert jax.nn.dot_product_attention is outer
        assert taken(call, Q, K, V) == ["blockwise"]


def test_a_function_may_be_decorated():
    decorated = jax_mfa.override_jax_nn("blockwise")(lambda: taken(call, Q, K, V))
    for _ in range(2):
        assert decorated() == ["blockwise"]
        assert taken(call, Q, K, V) == ["stock"]


def test_an_implementation_that_is_none_is_refused_at_once():
    stock = jax.nn.dot_product_attention
    with pytest.raises(ValueError, match="implementation must be"), jax_mfa.override_jax_nn("cudnn"):
        pass
    assert jax.nn.dot_product_attention is stock


def test_it_looks_like_what_it_stands_in_for():
    stock = jax.nn.dot_product_attention
    with jax_mfa.override_jax_nn():
        assert inspect.signature(jax.nn.dot_product_attention) == inspect.signature(stock)
        assert jax.nn.dot_product_attention.__name__ == stock.__name__
        with pytest.raises(TypeError, match="caussal"):
            call(Q, K, V, caussal=True)


@pytest.mark.skipif(
    "return_residual" not in inspect.signature(jax.nn.dot_product_attention).parameters, reason="older jax.nn"
)
def test_no_gradient_passes_the_residual_as_in_jax_nn():
    gradient = jax.grad(lambda q: sum(x.sum() for x in call(q, K, V, return_residual=True)))
    wanted = gradient(Q)
    with jax_mfa.override_jax_nn():
        assert_allclose(gradient(Q), wanted, atol=1e-5)
    both = jax.grad(lambda q: sum(x.sum() for x in jax_mfa.flash_attention(q, K, V)))
    assert abs(both(Q) - wanted).max() > 0.01


@pytest.fixture
def newer_stock(monkeypatch):
    """In place of JAX's function one of a JAX to come, which says what it was called with."""

    def dot_product_attention(
        query, key, value, bias=None, mask=None, *, implementation=None, is_causal=False, novel=None
    ):
        return "stock", implementation, novel

    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    monkeypatch.setattr(override, "dot_product_attention", lambda **keywords: ("ours", keywords))


@pytest.mark.parametrize("depth", [1, 2])
def test_what_only_the_stock_function_knows_goes_to_it(newer_stock, depth):
    outer = jax_mfa.override_jax_nn() if depth == 2 else jax_mfa.override_jax_nn("reference")
    with outer, jax_mfa.override_jax_nn("blockwise"):
        assert call(Q, K, V, implementation="cudnn") == ("stock", "cudnn", None)
        assert call(Q, K, V, novel=np.ones(2))[0] == "stock"
        for asked in ({}, {"implementation": None}, {"implementation": "xla"}, {"novel": None}):
            who, keywords = call(Q, K, V, is_causal=True, **asked)
            assert who == "ours" and keywords.keys() == {"query", "key", "value", "is_causal", "implementation"}
            assert keywords["implementation"] == "blockwise" and keywords["is_causal"] and keywords["key"] is K


class Patch:
    """Replaces `jax.nn.dot_product_attention`, as a library does when it is imported, and may put back what it found.

    "as jax-mps" wraps the function from where JAX defines it; "of what stands there" the attribute of `jax.nn`;
    "without a signature" that by a function of any arguments; "alone" gives up unless it finds JAX's own there.
    """

    def __init__(self, kind):
        self.kind, self.called = kind, 0

    def __enter__(self):
        self.found = jax.nn.dot_product_attention
        if self.kind == "alone" and self.found is not STOCK:
            raise RuntimeError("PatchConflictError")
        inner = STOCK if self.kind == "as jax-mps" else self.found

        def anything(*args, **keywords):
            self.called += 1
            return inner(*args, **keywords)

        def attention(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, implementation=None):
            keywords = {"scale": scale, "is_causal": is_causal, "implementation": implementation}
            return anything(query, key, value, bias, mask, **keywords)

        self.patched = anything if self.kind == "without a signature" else attention
        jax.nn.dot_product_attention = self.patched
        return self

    def __exit__(self, *_):
        jax.nn.dot_product_attention = self.found


STOCK = jax.nn.dot_product_attention
WRAPS = ["as jax-mps", "of what stands there", "without a signature"]


@pytest.fixture(autouse=True)
def stock_again():
    yield
    left = jax.nn.dot_product_attention
    jax.nn.dot_product_attention = STOCK
    assert taken(left, Q, K, V) == ["stock"]  # whatever a test left there


@pytest.mark.parametrize("kind", [*WRAPS, "alone"])
def test_a_patch_that_comes_first_is_overridden_and_put_back(kind):
    with Patch(kind) as patch:
        with jax_mfa.override_jax_nn("blockwise"):
            assert taken(lambda *x: call(*x, is_causal=True), Q, K, V) == ["blockwise"] and not patch.called
            with jax_mfa.override_jax_nn():
                assert taken(call, Q, K, V) == [None]
            with pytest.raises(RuntimeError):  # JAX's own function, which the patch calls, finds no cuDNN
                call(Q, K, V, implementation="cudnn")
            assert patch.called == 1
        assert jax.nn.dot_product_attention is patch.patched
        assert taken(call, Q, K, V) == ["stock"] and patch.called == 2
    assert jax.nn.dot_product_attention is STOCK


@pytest.mark.parametrize("kind", WRAPS)
def test_a_patch_within_a_context_outlives_it_with_a_warning(kind):
    patch = Patch(kind)
    with pytest.warns(UserWarning, match=rf"{__name__} replaced .* call jax.devices\(\) before the context"):
        with jax_mfa.override_jax_nn("blockwise"):
            patch.__enter__()
            assert taken(call, Q, K, V) == (["stock"] if kind == "as jax-mps" else ["blockwise"])
    assert jax.nn.dot_product_attention is patch.patched
    assert taken(call, Q, K, V) == ["stock"] and patch.called == 2
    with jax_mfa.override_jax_nn():  # on top of both
        assert taken(call, Q, K, V) == [None]
    patch.__exit__()
    assert taken(call, Q, K, V) == ["stock"] and patch.called == 2
    with jax_mfa.override_jax_nn("blockwise"):
        assert taken(call, Q, K, V) == ["blockwise"]
    assert jax.nn.dot_product_attention is STOCK  # no ended context is left


def test_a_patch_that_refuses_leaves_the_context_as_it_was():
    with jax_mfa.override_jax_nn("blockwise"):
        with pytest.raises(RuntimeError, match="PatchConflictError"):
            Patch("alone").__enter__()
        assert taken(call, Q, K, V) == ["blockwise"]
    assert jax.nn.dot_product_attention is STOCK


def test_a_patch_undone_within_a_context_stays_undone():
    patch = Patch("of what stands there").__enter__()
    with pytest.warns(UserWarning, match="replaced"), jax_mfa.override_jax_nn():
        patch.__exit__()
    assert jax.nn.dot_product_attention is STOCK


def test_a_patch_begun_and_ended_within_a_context_is_no_matter():
    with jax_mfa.override_jax_nn("blockwise"):
        with Patch("as jax-mps"):
            assert taken(call, Q, K, V) == ["stock"]
        assert taken(call, Q, K, V) == ["blockwise"]
    assert jax.nn.dot_product_attention is STOCK


@pytest.mark.parametrize("first", [0, 1])
def test_contexts_end_in_any_order(first):
    contexts = [jax_mfa.override_jax_nn(name) for name in ("blockwise", None)]
    for context in contexts:
        context.__enter__()
    contexts.pop(first).__exit__(None, None, None)
    assert taken(call, Q, K, V) == ["blockwise" if first else None]
    contexts[0].__exit__(None, None, None)
    assert jax.nn.dot_product_attention is STOCK


def test_arguments_by_position_and_by_name_are_those_of_jax_nn():
    mask = np.ones((1, 1, 1, 9), bool)
    with jax_mfa.override_jax_nn("blockwise"):
        assert taken(lambda q, k, v, m: jax.nn.dot_product_attention(q, k, v, None, m), Q, K, V, mask) == ["blockwise"]
        for args, keywords in (((Q, K, V), {"query": Q}), ((Q, K, V, None, mask, 1.0), {}), ((Q, K), {})):
            with pytest.raises(TypeError):
                jax.nn.dot_product_attention(*args, **keywords)


def test_a_program_keeps_what_it_was_traced_with():
    nothing = np.zeros((1, 1, 1, 9), bool)  # a row that sees nothing tells who computed it
    traced_before, traced_inside = (jax.jit(lambda q, k, v, mask: call(q, k, v, mask=mask)) for _ in range(2))
    assert np.asarray(traced_before(Q, K, V, nothing)).any()
    with jax_mfa.override_jax_nn():
        assert np.asarray(traced_before(Q, K, V, nothing)).any()
        assert not np.asarray(traced_inside(Q, K, V, nothing)).any()
    assert not np.asarray(traced_inside(Q, K, V, nothing)).any()


def test_flax_models_gain_without_an_edit():
    nnx = pytest.importorskip("flax.nnx")
    if "jax.nn.dot_product_attention" not in inspect.getsource(nnx.dot_product_attention):
        pytest.skip("this flax has attention of its own")
    model = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    wanted = model(x)
    assert taken(lambda x: model(x), x) == ["stock"]
    with jax_mfa.override_jax_nn():
        assert taken(lambda x: model(x), x) == [None]
        assert_allclose(model(x), wanted, atol=1e-5)
