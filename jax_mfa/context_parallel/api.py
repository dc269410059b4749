"""The public functions: attention whose sequences are split over the devices of a mesh.

Each runs within `shard_map`, on what a device holds, or with `mesh=` on whole arrays, which it splits itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, Literal, Required, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jax_mfa import api, checks, compat
from jax_mfa.arguments import specify, specify_abstract
from jax_mfa.block_mask import BlockMask
from jax_mfa.choice import Implementation, names_of
from jax_mfa.context_parallel import attend
from jax_mfa.context_parallel import layout as layouts
from jax_mfa.context_parallel import order as orders
from jax_mfa.context_parallel.choice import Form, chosen, machine_or_usual
from jax_mfa.context_parallel.costs import Machine
from jax_mfa.context_parallel.layout import Layout
from jax_mfa.context_parallel.order import Order
from jax_mfa.context_parallel.ring import Ring
from jax_mfa.problem import MAX_POSITION

if TYPE_CHECKING:
    from jax_mfa.typing import Bool, Float, Integer


class _OverDevices(api.Keywords[ArrayLike], total=False):
    """The keyword arguments that the type of a result does not depend on."""

    axis_name: Required[Any]
    mesh: Any
    batch_axis: Any
    head_axis: Any
    positions: Integer[ArrayLike, "T"] | None
    implementation: Implementation | None


class _Ring(_OverDevices, total=False):
    order: Order


class _ContextParallel(_Ring, total=False):
    form: Form | None
    machine: Machine | None


@overload
def ring_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K V"],
    bias: Float[ArrayLike, "*#B #N #T #all_S"] | None = None,
    mask: Bool[ArrayLike, "*#B #N #T #all_S"] | None = None,
    *,
    return_residual: Literal[False] = False,
    **keywords: Unpack[_Ring],
) -> Float[Array, "*B T N V"]: ...
@overload
def ring_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K V"],
    bias: Float[ArrayLike, "*#B #N #T #all_S"] | None = None,
    mask: Bool[ArrayLike, "*#B #N #T #all_S"] | None = None,
    *,
    return_residual: Literal[True],
    **keywords: Unpack[_Ring],
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]: ...
def ring_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K V"],
    bias: Float[ArrayLike, "*#B #N #T #all_S"] | None = None,
    mask: Bool[ArrayLike, "*#B #N #T #all_S"] | None = None,
    *,
    axis_name: Any,
    order: Order = "contiguous",
    mesh: Any = None,
    batch_axis: Any = None,
    head_axis: Any = None,
    positions: Integer[ArrayLike, "T"] | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    **keywords: Unpack[api.Keywords[ArrayLike]],
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Attention over a sequence that is split over devices, whose keys and values travel around them.

    Each device keeps its queries and, in turn, computes with the keys and values of every other one, while the next
    ones are under way (Ring Attention, arXiv:2310.01889). Memory is O(T / devices) in both passes: the backward pass
    sends keys and values around again, and with them the float32 sums of their gradients. Under a local window keys go
    no further than they are seen. Equal to `flash_attention` of the whole arrays, up to rounding: partial outputs are
    rounded to the query's dtype before they are merged in float32.

    Within `shard_map` arrays are what a device holds, and lengths, offsets and ranges count the whole sequence. With
    `mesh` they are whole arrays.

    Args:
      query: `[B, T, N, H]`, with T = all queries / devices within `shard_map`.
      key: `[B, S, K, H]` and
      value: `[B, S, K, V]`, likewise; S may differ from T.
      bias: floating, broadcastable to `[B, N, T, all S]`: a device's rows, with the columns of all devices as they are
        stored.
      mask: bool, of such a shape.
      axis_name: the mesh axis, or a tuple of axes, along which sequences are split.
      order: "contiguous", or "zigzag" for tokens brought into order by `zigzag`, which balances causal work.
      mesh: a `jax.sharding.Mesh`, for a call with whole arrays.
      batch_axis, head_axis: mesh axes that split batch rows and heads. Within `shard_map` they matter to dropout only,
        which then has the same bits as on one device.
      positions: integers `[T]`: which tokens the caller thinks these are, to be compared with the order. A difference
        is an error where the values are known; where they are traced, the output is NaN.
      implementation: None, "metal" or "blockwise", as in `dot_product_attention`.
      return_residual: also return the log-sum-exp.
      **keywords: other keyword arguments of `dot_product_attention`; `block_mask` must have blocks that no device's
        part cuts through.

    Returns:
      `[B, T, N, V]` of the query's dtype; with `return_residual` also the log-sum-exp, `[B, T, N]` float32 (float64
      for float64). Both are differentiable in every mode, as on one device; derivatives of derivatives take its memory.

    Raises:
      ValueError, TypeError: as `dot_product_attention`; also for an axis that is not there, a length that does not
        divide, keys that are not split as queries are, and positions that are not those of the order.
      NotImplementedError: where a named implementation cannot run the call.
    """
    layout = Layout("ring_attention", axis_name, None, order, batch_axis, head_axis)
    arguments = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **keywords}
    return _call(layout, arguments, mesh, positions, implementation, return_residual)


@overload
def ulysses_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K V"],
    bias: Float[ArrayLike, "*#B #N #T #all_S"] | None = None,
    mask: Bool[ArrayLike, "*#B #N #T #all_S"] | None = None,
    *,
    return_residual: Literal[False] = False,
    **keywords: Unpack[_OverDevices],
) -> Float[Array, "*B T N V"]: ...
@overload
def ulysses_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K V"],
    bias: Float[ArrayLike, "*#B #N #T #all_S"] | None = None,
    mask: Bool[ArrayLike, "*#B #N #T #all_S"] | None = None,
    *,
    return_residual: Literal[True],
    **keywords: Unpack[_OverDevices],
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]: ...
def ulysses_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K V"],
    bias: Float[ArrayLike, "*#B #N #T #all_S"] | None = None,
    mask: Bool[ArrayLike, "*#B #N #T #all_S"] | None = None,
    *,
    axis_name: Any,
    mesh: Any = None,
    batch_axis: Any = None,
    head_axis: Any = None,
    positions: Integer[ArrayLike, "T"] | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    **keywords: Unpack[api.Keywords[ArrayLike]],
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Attention over a sequence that is split over devices, which exchange rows for heads before and after.

    Each device then has the whole sequence of N / devices heads (DeepSpeed Ulysses, arXiv:2309.14509). The devices must
    divide N, and divide K or be a multiple of it, in which case keys and values are sent more than once.

    Args:
      query, key, value, bias, mask, axis_name, mesh, batch_axis, head_axis, positions, implementation,
        return_residual, **keywords: as in `ring_attention`. Tokens are in their own order.

    Returns, Raises:
      as there; also ValueError where the heads do not divide.
    """
    layout = Layout("ulysses_attention", None, axis_name, "contiguous", batch_axis, head_axis)
    arguments = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **keywords}
    return _call(layout, arguments, mesh, positions, implementation, return_residual)


@overload
def context_parallel_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K V"],
    bias: Float[ArrayLike, "*#B #N #T #all_S"] | None = None,
    mask: Bool[ArrayLike, "*#B #N #T #all_S"] | None = None,
    *,
    return_residual: Literal[False] = False,
    **keywords: Unpack[_ContextParallel],
) -> Float[Array, "*B T N V"]: ...
@overload
def context_parallel_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K V"],
    bias: Float[ArrayLike, "*#B #N #T #all_S"] | None = None,
    mask: Bool[ArrayLike, "*#B #N #T #all_S"] | None = None,
    *,
    return_residual: Literal[True],
    **keywords: Unpack[_ContextParallel],
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]: ...
def context_parallel_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K V"],
    bias: Float[ArrayLike, "*#B #N #T #all_S"] | None = None,
    mask: Bool[ArrayLike, "*#B #N #T #all_S"] | None = None,
    *,
    axis_name: Any,
    form: Form | None = None,
    order: Order = "contiguous",
    mesh: Any = None,
    batch_axis: Any = None,
    head_axis: Any = None,
    positions: Integer[ArrayLike, "T"] | None = None,
    machine: Machine | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    **keywords: Unpack[api.Keywords[ArrayLike]],
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Attention over a sequence that is split over devices, by the form that is done first on paper.

    Args:
      axis_name: a mesh axis; or a pair of axes, for a ring over the first of devices that exchange heads over the
        second (as in USP, arXiv:2405.07719). The sequence is then split along both, the first outermost.
      form: "ring", "ulysses" or "hybrid"; None for the one that `explain_context_parallel` names.
      order: as in `ring_attention`; of the ring's devices, in a hybrid.
      machine: speeds to choose by; default those of `Machine()`.
      query, key, value, bias, mask, mesh, batch_axis, head_axis, positions, implementation, return_residual,
        **keywords: as in `ring_attention`.

    Returns, Raises:
      as there; also ValueError for a form that does not fit the axes.
    """
    pair = _is_pair(axis_name)
    forms: tuple[Form, ...] = ("hybrid",) if pair else ("ring", "ulysses")
    if form is not None and (not isinstance(form, str) or form not in forms):
        raise ValueError(f"form must be None or one of {forms} for axis_name = {axis_name!r}, got {checks.seen(form)}")
    if machine is not None:
        machine_or_usual(machine)
    arguments = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **keywords}
    if form is None:
        form = forms[0] if pair else chosen(axis_name, mesh, order, machine, head_axis, batch_axis, arguments).form
    ring, heads = axis_name if pair else (axis_name, None) if form == "ring" else (None, axis_name)
    layout = Layout("context_parallel_attention", ring, heads, order, batch_axis, head_axis)
    return _call(layout, arguments, mesh, positions, implementation, return_residual)


def _is_pair(axis_name: Any) -> bool:
    """Whether these are two mesh axes, of a ring and of heads."""
    pair = isinstance(axis_name, (tuple, list))
    if pair and len(axis_name) != 2:
        raise ValueError(f"axis_name must be a mesh axis or a pair (ring, heads) of them, got {axis_name!r}")
    return pair


@dataclasses.dataclass(frozen=True)
class SequenceSharding:
    """How `context_parallel_attention` finds a sequence split, for what calls it by one argument, such as a module.

    Attributes:
      axis_name, form, order, mesh, batch_axis, head_axis: as there.
    """

    axis_name: Any
    form: Form | None = None
    order: Order = "contiguous"
    mesh: Any = None
    batch_axis: Any = None
    head_axis: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.axis_name, list):
            object.__setattr__(self, "axis_name", tuple(self.axis_name))  # hashable, for static arguments

    @classmethod
    def of(cls, x: Any) -> SequenceSharding:
        """`x`, or for the name of a mesh axis that."""
        return x if isinstance(x, cls) else cls(x)

    def attend(self, *args: Any, **keywords: Any) -> Any:
        """`context_parallel_attention` of these arguments."""
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return context_parallel_attention(*args, **{**facts, **keywords})

    def positions(self, length: int) -> Any:
        """The positions of the tokens that a device holds, int32 `[length]`; with a mesh those of all tokens."""
        ring, heads = self.axis_name if _is_pair(self.axis_name) else (self.axis_name, None)
        layout = Layout("SequenceSharding", ring, heads, self.order, self.batch_axis, self.head_axis)
        checks.integer("length", length, 0, MAX_POSITION)
        if self.mesh is None:
            return layout.own_positions(length)
        return jnp.asarray(orders.permutation(self.order, length, layout.sizes(self.mesh)[0]), jnp.int32)


# ---------------------------------------------------------------------------------------------------------------------


def _call(
    layout: Layout,
    arguments: dict[str, Any],
    mesh: Any,
    positions: Any,
    implementation: Implementation | None,
    return_residual: bool,
) -> Any:
    api.refuse_unknown(layout.function, {k: x for k, x in arguments.items() if k not in _ARRAYS}, {})
    names_of(implementation)  # reject unknown names before checking arrays
    layouts.refuse_quantised(layout.function, **arguments)
    checks.boolean("return_residual", return_residual)
    if mesh is None:
        out, lse = _of_own_share(layout, arguments, positions, implementation)
    else:
        out, lse = _of_whole_arrays(layout, mesh, arguments, positions, implementation)
    return (out, lse) if return_residual else out


_ARRAYS = ("query", "key", "value", "bias", "mask")
_STATIC = ("is_causal", "local_window_size", "logits_soft_cap", "dropout_rate")


def _of_own_share(
    layout: Layout, arguments: dict[str, Any], positions: Any, implementation: Implementation | None
) -> tuple[Array, Array]:
    """Output and log-sum-exp of what one device holds."""
    sizes = layout.sizes()
    layouts.check_that_keys_are_split(layout, arguments)
    parts = math.prod(sizes)
    spec, operands = specify(**arguments, parts=parts)
    t, s = operands.query.shape[1], operands.key.shape[1]
    layouts.check_lengths(layout, sizes, parts * t, parts * s)
    layouts.check_heads(layout, sizes[1], operands)
    layouts.check_blocks(layout, sizes, spec.mask_block, t, s)
    chosen = layouts.decided(layout.function, implementation, spec, operands)
    operands = attend.numbered(operands, layout.batch_axis, layout.head_axis)
    ring = Ring(spec, layout.ring, sizes[0], layout.order, chosen)
    out, lse = attend.attention(ring, layout.heads, operands)
    shape = np.shape(arguments["query"])[:-1]
    out = out[..., : np.shape(arguments["value"])[-1]]
    if positions is not None:
        right = layouts.in_order(layout, positions, t)
        out, lse = (jnp.where(right, x, jnp.asarray(jnp.nan, x.dtype)) for x in (out, lse))
    return out.reshape(*shape, out.shape[-1]), lse.reshape(shape)


# ---------------------------------------------------------------------------------------------------------------------
# Whole arrays


def _of_whole_arrays(
    layout: Layout, mesh: Any, arguments: dict[str, Any], positions: Any, implementation: Implementation | None
) -> Any:
    sizes = layout.sizes(mesh)
    query, key = arguments["query"], arguments["key"]
    spec, _ = specify_abstract(**arguments)  # says what is wrong with them, as long as values are known
    t, s = np.shape(query)[-3], np.shape(key)[-3]
    layouts.check_lengths(layout, sizes, t, s)
    layouts.check_blocks(layout, sizes, spec.mask_block, *(x // math.prod(sizes) for x in (t, s)))
    if positions is not None:
        layouts.in_order(layout, positions, t, sizes[0])
    arguments = {name: x for name, x in {**arguments, "positions": positions}.items() if x is not None}
    lead = np.shape(query)[:-3]
    placed, specs, static = {}, {}, []
    for name, x in arguments.items():
        if name in _STATIC:
            x = tuple(x) if isinstance(x, list) else x
        elif isinstance(x, (list, tuple)):
            x = jnp.asarray(x)
        if name not in _STATIC and (hasattr(x, "dtype") or isinstance(x, BlockMask)):
            placed[name] = x
            specs[name] = jax.tree.map(functools.partial(_split, layout, name, lead), x)
        else:
            static.append((name, x))
    rows = _split(layout, "query", lead, query)
    leaves, tree = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return _program(layout, mesh, tuple(static), tree, tuple(leaves), rows, implementation)(placed)


@functools.lru_cache(maxsize=256)
def _program(
    layout: Layout,
    mesh: Any,
    static: tuple[Any, ...],
    tree: Any,
    specs: tuple[Any, ...],
    rows: PartitionSpec,
    implementation: Implementation | None,
) -> Any:
    """A jitted function of arrays by name, kept so that calls outside of `jit` need not compile each time."""

    def run(placed: Any) -> tuple[Array, Array]:
        arguments = {**dict(static), **placed}
        return _of_own_share(layout, arguments, arguments.pop("positions", None), implementation)

    specs = jax.tree.unflatten(tree, specs)
    return jax.jit(compat.shard_map(run, mesh, (specs,), (rows, PartitionSpec(*rows[:-1]))))


# what the last axes of an argument are: r rows and c columns of the sequence, n heads, x anything that is not split;
# an argument of size 1 along them serves all
_AXES_OF = {
    "query": "rnx",
    "key": "cnx",
    "value": "cnx",
    "bias": "nrx",
    "mask": "nrx",
    "block_mask": "nrx",
    "query_seq_lengths": "",
    "key_value_seq_lengths": "",
    "query_offset": "",
    "alibi_slopes": "n",
    "sinks": "n",
    "query_segment_ids": "r",
    "key_value_segment_ids": "c",
    "key_value_ranges": "rx",
    "positions": "r",
}


def _split(layout: Layout, name: str, lead: tuple[int, ...], x: Any) -> PartitionSpec:
    """How an argument is split over the mesh."""
    shape = np.shape(x)
    if name not in _AXES_OF:
        return PartitionSpec()
    letters = _AXES_OF[name][-len(shape) :] if shape and _AXES_OF[name] else ""
    entries: list[Any] = [None] * (len(shape) - len(letters))
    if entries and len(entries) == len(lead) and shape[0] == lead[0] > 1:
        entries[0] = layout.batch_axis
    whole = name in ("query", "key", "value")  # what is too short there is an error, and never shared
    for letter, size in zip(letters, shape[len(entries) :]):
        axis = {"r": layout.sequence, "c": layout.sequence, "n": layout.head_axis, "x": None}[letter]
        entries.append(axis if size > 1 or whole else None)
    return PartitionSpec(*entries)
