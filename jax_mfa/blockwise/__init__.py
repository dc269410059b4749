"""Attention in tiles: O(T + S) memory in every pass, in plain jnp. The implementation wherever Metal is not.

Tiles that no row can see by causality, window or lengths are never visited; tiles of disjoint segments and of empty
mask blocks are stepped over. The loops are shaped for XLA's CPU backend: it compiles each loop of each layer of a model
anew, so a tile's arithmetic is written into a program once; a matrix product is fast only when it is large and sums
over the last axis of its first operand; and memory touched for the first time is slow, so that most of what is no
result is of the size of a tile.

What is not finite and hidden must not spoil a sum (0 · NaN is NaN). Where something is not finite, the products that it
enters are attempted again, twice (`Attempt` in step.py): in loops over many rows by the same program, elsewhere by one
that takes the weights there are.
"""

from jax_mfa.blockwise.backward import backward
from jax_mfa.blockwise.columns import with_columns
from jax_mfa.blockwise.forward import forward
from jax_mfa.blockwise.tangent import tangent
from jax_mfa.blockwise.tiling import Tiling, backward_tiling, candidates, forward_tiling
from jax_mfa.specification import Operands, Specification

__all__ = ["backward", "candidates", "forward", "tangent", "tiling_of"]


def tiling_of(spec: Specification, operands: Operands, backward: bool, differentiated: bool = False) -> Tiling:
    """The tiles of a pass. Operands may be abstract."""
    operands = with_columns(spec, operands)
    return backward_tiling(spec, operands) if backward else forward_tiling(spec, operands, differentiated)
