"""A scoped stand-in for `jax.nn.dot_product_attention`, for models that call it by that name."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_mfa.api import Implementation, dot_product_attention, names_of

_NAME = "dot_product_attention"
_OURS = inspect.signature(dot_product_attention).parameters.keys()


@contextlib.contextmanager
def override_jax_nn(implementation: Implementation | None = None) -> Iterator[None]:
    """Within this context, or function decorated with it, `jax.nn.dot_product_attention` runs here.

    Models that call it, flax's `nnx.MultiHeadAttention` among them, then gain without an edit. A call that asks for
    `implementation="cudnn"`, or for what a newer JAX has and this package does not, still gets JAX's own function. Two
    rules change: a row that sees nothing gives zeros, and nothing that is masked, NaN included, reaches a result.

    What counts is when a function is *traced*: a program that `jax.jit` traced in the context stays as it is
    afterwards, and one that was traced before is not traced again. The attribute of `jax.nn` is set for the whole
    process, so other threads see it too; who did `from jax.nn import dot_product_attention` before does not. Contexts
    nest, and the end of each, also by an exception, puts back what it found.

    Args:
      implementation: as in `dot_product_attention`, for calls that leave theirs open or say "xla".

    Raises:
      ValueError: for an implementation that is none.
    """
    names_of(implementation)
    found = getattr(jax.nn, _NAME)
    setattr(jax.nn, _NAME, _stand_in(found, implementation))
    try:
        yield
    finally:
        setattr(jax.nn, _NAME, found)


def _stand_in(stock: Callable[..., Any], implementation: Implementation | None) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def attention(*args: Any, **keywords: Any) -> Any:
        given = signature.bind(*args, **keywords).arguments
        asked = given.pop("implementation", None)
        foreign = given.keys() - _OURS
        # by identity, for a default may be compared with an array
        if asked not in (None, "xla") or any(given[x] is not signature.parameters[x].default for x in foreign):
            return stock(*args, **keywords)
        ours = {name: x for name, x in given.items() if name in _OURS}
        return dot_product_attention(**ours, implementation=implementation)

    return attention
