"""Attention in tiles: O(T + S) memory in every pass, in plain jnp. The implementation wherever Metal is not.

`tiles` is the rule that cuts a problem, `loop` visits the tiles that something is seen in, `tile` computes scores and
products of one, `key_values` reads quantised and paged keys; `forward`, `backward` and `tangent` are the passes.
"""

from jax_mfa.blockwise.backward import backward
from jax_mfa.blockwise.forward import forward
from jax_mfa.blockwise.tangent import tangent
from jax_mfa.blockwise.tiles import Tiles, candidates, is_dense, tiles_of
from jax_mfa.problem import Operands, Specification

__all__ = ["Tiles", "backward", "candidates", "forward", "in_one_tile", "tangent", "tiling_of"]


def tiling_of(spec: Specification, operands: Operands, backward: bool, differentiated: bool = False) -> Tiles:
    """The tiles of a pass. Operands may be abstract."""
    of_pass = "backward" if backward else "forward"
    return tiles_of(f"blockwise {of_pass}", spec, spec.viewed(operands), backward or differentiated)


def in_one_tile(spec: Specification, operands: Operands) -> bool:
    """Whether the passes of a problem are the dense program, whose products XLA shares among them."""
    return is_dense(spec.viewed(operands))
