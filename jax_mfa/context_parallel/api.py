"""The public functions: attention whose sequences are split over the devices of a mesh.

Each runs within `shard_map` on a device's own arrays, or with `mesh=` on whole arrays, which it splits itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Never, Protocol, Required, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jax_mfa import api, checks, choice, compat
from jax_mfa.arguments import seed_words, specify, specify_abstract, unwrapped
from jax_mfa.choice import Implementation
from jax_mfa.context_parallel import attend
from jax_mfa.context_parallel import layout as layouts
from jax_mfa.context_parallel.costs import Form, Machine, chosen
from jax_mfa.context_parallel.layout import Layout, Order
from jax_mfa.context_parallel.ring import TRAVELLING, Ring
from jax_mfa.flex.block_mask import BlockMask
from jax_mfa.problem import AXES, MAX_POSITION, Operands, Specification

if TYPE_CHECKING:
    from jax_mfa.typing import Bool, Float, Integer


_Order = TypeVar("_Order", contravariant=True)
_Form = TypeVar("_Form", contravariant=True)
_Machine = TypeVar("_Machine", contravariant=True)


class _OverDevices(api.Keywords[ArrayLike], total=False):
    """The keyword arguments that the type of a result does not depend on."""

    axis_name: Required[Any]
    mesh: Any
    batch_axis: Any
    head_axis: Any
    positions: Integer[ArrayLike, "T"] | None
    implementation: Implementation | None


class _Attention(Protocol[_Order, _Form, _Machine]):
    """The type of the functions below, by the types of three keywords: `Never` where a function does not take one."""

    @overload
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        *,
        order: _Order = ...,
        form: _Form = ...,
        machine: _Machine = ...,
        return_residual: Literal[False] = False,
        **keywords: Unpack[_OverDevices],
    ) -> Array: ...
    @overload
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        *,
        order: _Order = ...,
        form: _Form = ...,
        machine: _Machine = ...,
        return_residual: Literal[True],
        **keywords: Unpack[_OverDevices],
    ) -> tuple[Array, Array]: ...


def _of_ring(function: Callable[..., Any]) -> _Attention[Order, Never, Never]:
    return function


def _of_ulysses(function: Callable[..., Any]) -> _Attention[Never, Never, Never]:
    return function


def _of_all(function: Callable[..., Any]) -> _Attention[Order, Form | None, Machine | None]:
    return function


@_of_ring
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

    Within `shard_map` arrays are a device's own, and lengths, offsets and ranges count the whole sequence. With `mesh`
    they are whole arrays.

    Args:
      query: `[B, T, N, H]`, with T = all queries / devices within `shard_map`.
      key, value: `[B, S, K, H]` and `[B, S, K, V]`, likewise; S may differ from T.
      bias, mask: floating and bool, broadcastable to `[B, N, T, all S]`: a device's rows, with the columns of all
        devices as they are stored.
      axis_name: the mesh axis, or a tuple of axes, along which sequences are split.
      order: "contiguous", or "zigzag" for tokens brought into order by `zigzag`, which balances causal work.
      mesh: a `jax.sharding.Mesh`, for a call with whole arrays.
      batch_axis, head_axis: mesh axes that split batch entries and heads. Within `shard_map` they matter to dropout
        only, which then has the same bits as on one device.
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
    layout = Layout("ring_attention", axis_name, None, order, batch_axis, head_axis, mesh)
    arguments = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **keywords}
    return _call(layout, implementation, positions, arguments, return_residual)


@_of_ulysses
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
    layout = Layout("ulysses_attention", None, axis_name, "contiguous", batch_axis, head_axis, mesh)
    arguments = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **keywords}
    return _call(layout, implementation, positions, arguments, return_residual)


@_of_all
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
    ring, heads = _ring_and_heads(axis_name)
    forms: tuple[Form, ...] = ("hybrid",) if isinstance(axis_name, (tuple, list)) else ("ring", "ulysses")
    if form is not None and (not isinstance(form, str) or form not in forms):
        raise ValueError(f"form must be None or one of {forms} for axis_name = {axis_name!r}, got {checks.seen(form)}")
    machine = Machine.of(machine)
    arguments = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **keywords}
    layout = Layout("context_parallel_attention", ring, heads, order, batch_axis, head_axis, mesh)
    if form is None and len(forms) > 1:
        form = chosen(arguments, layout, machine).form
    if form == "ulysses":
        layout = dataclasses.replace(layout, ring=None, heads=ring)
    return _call(layout, implementation, positions, arguments, return_residual)


def _ring_and_heads(axis_name: Any) -> tuple[Any, Any]:
    """The mesh axes of the ring and of the exchange of heads, which is None for a single axis."""
    if not isinstance(axis_name, (tuple, list)):
        return axis_name, None
    if len(axis_name) != 2:
        raise ValueError(f"axis_name must be a mesh axis or a pair (ring, heads) of them, got {axis_name!r}")
    return axis_name[0], axis_name[1]


@dataclasses.dataclass(frozen=True)
class SequenceSharding:
    """The keywords of `context_parallel_attention` that say how a sequence is split, for modules to hold as one."""

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
        return context_parallel_attention(*args, **{**vars(self), **keywords})

    def positions(self, length: int) -> Any:
        """The positions of the tokens that a device holds, int32 `[length]`; with a mesh those of all tokens."""
        axes = _ring_and_heads(self.axis_name)
        layout = Layout("SequenceSharding", *axes, self.order, self.batch_axis, self.head_axis, self.mesh)
        return jnp.asarray(layout.positions(checks.integer("length", length, 0, MAX_POSITION)), jnp.int32)


# --- calls with a device's own arrays, and with whole arrays


def _call(layout: Layout, implementation: Any, positions: Any, arguments: dict[str, Any], return_residual: bool) -> Any:
    api.refuse_unknown(layout.function, arguments, {})
    choice.names_of(implementation)  # reject unknown names before checking arrays
    layouts.refuse_quantised(layout.function, arguments)
    checks.boolean("return_residual", return_residual)
    arguments = {name: unwrapped(x) for name, x in arguments.items()}
    run = _of_own_share if layout.mesh is None else _of_whole_arrays
    out, lse = run(layout, implementation, positions, **arguments)
    return (out, lse) if return_residual else out


def _of_own_share(layout: Layout, implementation: Any, positions: Any, **arguments: Any) -> tuple[Array, Array]:
    """Output and log-sum-exp of a device's own arrays."""
    *_, ring, heads = layout.sizes()
    layout.check_that_keys_are_split(arguments)
    spec, operands = specify(**arguments, parts=ring * heads)
    t, s = operands.query.shape[1], operands.key.shape[1]
    layout.check_lengths(ring * heads * t, ring * heads * s, spec.mask_block)
    if refusal := layouts.undivided(operands.query.shape[2], operands.key.shape[2], heads):
        raise ValueError(f"{layout.function} exchanges heads, and {refusal}; ring_attention takes any")
    taken = decided(layout.function, implementation, spec, operands)
    operands = attend.numbered(operands, layout.batch_axis, layout.head_axis)
    out, lse = attend.attention(Ring(spec, layout.ring, ring, layout.order, taken), layout.heads, operands)
    if positions is not None:
        right = layout.has_positions(positions, t)
        out, lse = (jnp.where(right, x, jnp.asarray(jnp.nan, x.dtype)) for x in (out, lse))
    rows, v = np.shape(arguments["query"])[:-1], np.shape(arguments["value"])[-1]
    return out[..., :v].reshape(*rows, v), lse.reshape(rows)


def decided(function: str, implementation: Any, spec: Specification, operands: Operands) -> str | None:
    """The implementation to take, None where lowering decides. Refuses the reference, which keeps nothing to merge."""
    taken = choice.decided(implementation, spec, operands)
    if taken == "reference":
        raise NotImplementedError(
            f"implementation={implementation!r} cannot run {function}: the reference keeps nothing to merge"
        )
    return taken


STATIC = ("is_causal", "local_window_size", "logits_soft_cap", "dropout_rate")


def _of_whole_arrays(layout: Layout, implementation: Any, positions: Any, **arguments: Any) -> tuple[Array, Array]:
    """Output and log-sum-exp of whole arrays, each of which is split as its axes say."""
    layout.sizes()  # reject unknown axes before checking arrays
    spec, _ = specify_abstract(**arguments)  # check values, which are known only here
    *lead, t, _, _ = np.shape(arguments["query"])
    layout.check_lengths(t, np.shape(arguments["key"])[-3], spec.mask_block)
    if positions is not None:
        layout.has_positions(positions, t)
    static: dict[str, Any] = {}
    placed: dict[str, Any] = {}
    for name, x in {**arguments, "positions": positions}.items():
        if name == "dropout_seed" and x is not None:
            x = seed_words(x)  # 64 bits, of which `jit` would drop the high ones
        elif isinstance(x, (list, tuple)):
            x = tuple(x) if name in STATIC else jnp.asarray(x)
        is_array = name not in STATIC and (hasattr(x, "dtype") or isinstance(x, BlockMask))
        (placed if is_array else static)[name] = x
    specs = tuple((name, _split(layout, name, lead, np.shape(getattr(x, "blocks", x)))) for name, x in placed.items())
    return _program(layout, implementation, tuple(static.items()), specs)(placed)


@functools.lru_cache(maxsize=256)
def _program(layout: Layout, implementation: Any, static: tuple[Any, ...], specs: tuple[Any, ...]) -> Any:
    """A jitted function of arrays by name, kept so that calls outside of `jit` need not compile each time."""
    own, split = dataclasses.replace(layout, mesh=None), dict(specs)
    run = lambda placed: _of_own_share(own, implementation, **dict(static), **placed)
    rows = split["query"]
    return jax.jit(compat.shard_map(run, layout.mesh, (split,), (rows, PartitionSpec(*rows[:-1]))))


# names of operands, for arguments that are called otherwise
_OPERANDS = {
    "query_seq_lengths": "query_lengths",
    "key_value_seq_lengths": "key_lengths",
    "key_value_segment_ids": "key_segment_ids",
    "key_value_ranges": "key_ranges",
    "positions": "query_segment_ids",  # also an integer of each row
}


def _split(layout: Layout, name: str, lead: list[int], shape: tuple[int, ...]) -> PartitionSpec:
    """How an argument is split over the mesh, by the letters of its last axes; an axis of size 1 serves all devices."""
    operand = _OPERANDS.get(name, name)
    if operand not in AXES or not shape:
        return PartitionSpec()
    letters = AXES[operand][1:][-len(shape) :]
    entries: list[Any] = [None] * (len(shape) - len(letters))
    if entries and len(entries) == len(lead) and shape[0] == lead[0] > 1:
        entries[0] = layout.batch_axis
    along = {**dict.fromkeys("Tt", layout.sequence), **dict.fromkeys("NK", layout.head_axis)}
    if operand in TRAVELLING:
        along["S"] = layout.sequence
    whole = name in ("query", "key", "value")  # an axis of size 1 there is an error, and never shared
    sizes = shape[len(entries) :]
    entries += [along.get(letter) if size > 1 or whole else None for letter, size in zip(letters, sizes)]
    return PartitionSpec(*entries)
