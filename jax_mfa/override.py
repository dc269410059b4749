"""The stand-in for `jax.nn.dot_product_attention` within a context, beside whatever else replaces that function.

Knows the arguments of both, and whose turn it is; what attention is, it leaves to `api`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_mfa.api import dot_product_attention
from jax_mfa.choice import Implementation, names_of

_ARGUMENTS = inspect.signature(dot_product_attention).parameters.keys()
_POSITIONAL = ("query", "key", "value", "bias", "mask")  # of `jax.nn`


@contextlib.contextmanager
def override_jax_nn(implementation: Implementation | None = None) -> Iterator[None]:
    """Within this context, or function decorated with it, `jax.nn.dot_product_attention` runs here.

    Models that call it, flax's `nnx.MultiHeadAttention` among them, then gain without an edit. A call that asks for
    `implementation="cudnn"`, or for what a newer JAX has and this package does not, still gets JAX's own function. Two
    rules change: a row that sees nothing gives zeros, and nothing that is masked, NaN included, reaches a result.

    What counts is when a function is *traced*: a program that `jax.jit` traced in the context stays as it is
    afterwards, and one that was traced before is not traced again. The attribute of `jax.nn` is set for the whole
    process, so other threads see it too; who did `from jax.nn import dot_product_attention` before does not. Contexts
    nest and may end in any order, also by an exception.

    The end of a context puts back what it found. Where others replaced the function within it, theirs stays, passes
    what it passed to this context on to what the context found, and a warning says so. jax-mps replaces the function
    when JAX starts its plugins: `jax.devices()` before the context lets it go first, and both then work.

    Args:
      implementation: as in `dot_product_attention`, for calls that leave theirs open or say "xla".

    Raises:
      ValueError: for an implementation that is none.
    """
    names_of(implementation)
    ours = _StandIn(_unended(jax.nn.dot_product_attention), implementation)
    jax.nn.dot_product_attention = ours
    try:
        yield
    finally:
        ours.ended = True
        current = jax.nn.dot_product_attention
        jax.nn.dot_product_attention = _unended(current)
        if not isinstance(current, _StandIn):
            warnings.warn(
                f"jax_mfa: within override_jax_nn, {getattr(current, '__module__', type(current))} replaced "
                "jax.nn.dot_product_attention by its own, which stays; calls from then on may not have run here. Where "
                "a JAX plugin does so, call jax.devices() before the context",
                stacklevel=3,
            )


class _StandIn:
    """Attention in the place of a function that was found, until it has ended: from then on, calls go to that one."""

    def __init__(self, found: Callable[..., Any], implementation: Implementation | None):
        functools.update_wrapper(self, found)
        self.found, self.implementation, self.ended = found, implementation, False

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        given = dict(zip(_POSITIONAL, args)) | keywords
        asked = given.pop("implementation", None)
        declared = inspect.signature(self.found).parameters
        # by identity, for a default may be compared with an array
        foreign = any(x not in declared or given[x] is not declared[x].default for x in given.keys() - _ARGUMENTS)
        clear = len(args) <= len(_POSITIONAL) and not keywords.keys() & _POSITIONAL[: len(args)]
        if self.ended or foreign or asked not in (None, "xla") or not clear:
            return self.found(*args, **keywords)
        ours = {name: x for name, x in given.items() if name in _ARGUMENTS}
        return dot_product_attention(**ours, implementation=self.implementation)


def _unended(function: Any) -> Any:
    """The function, or what the first stand-in that has not ended stands in for."""
    while isinstance(function, _StandIn) and function.ended:
        function = function.found
    return function
