"""What the annotations of public signatures are made of: shapes in the letters of the contract, by jaxtyping.

`Float[ArrayLike, "*B T N H"]` is an `ArrayLike` to a type checker; jaxtyping can also check that it is floating and of
that shape, as the tests do. `*B` stands for all leading axes, or none; `#T` for T, or 1 where it is broadcast.

For type checkers alone: nothing imports this when a program runs, so that `import jax_mfa` does not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, Union

from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int32, Integer, Key, Shaped, UInt16

__all__ = ["Bias", "Bool", "Float", "Int32", "Integer", "Key", "Lists", "Mask", "Scores", "Shaped", "UInt16"]

Lists: TypeAlias = Sequence[Union[ArrayLike, "Lists"]]  # numbers, and lists of them

# what broadcasts to [*B, N, T, S]
Bias: TypeAlias = (
    Float[ArrayLike, "*#B #N #T #S"] | Float[ArrayLike, "#T #S"] | Float[ArrayLike, "#S"] | Float[ArrayLike, ""]
)
Mask: TypeAlias = (
    Bool[ArrayLike, "*#B #N #T #S"] | Bool[ArrayLike, "#T #S"] | Bool[ArrayLike, "#S"] | Bool[ArrayLike, ""]
)
Scores: TypeAlias = (
    Shaped[ArrayLike, "*#B #N #T #S"] | Shaped[ArrayLike, "#T #S"] | Shaped[ArrayLike, "#S"] | Shaped[ArrayLike, ""]
)
