"""New tokens into the pages of a pool: the launch plan, and the call that updates the pool in place.

What a page holds says `storage`, whose pages are copied and where tokens go `page_book`, how numbers are quantised
`quantization`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Mapping
from typing import Any

import jax

from jax_mfa.kv_cache.storage import PARTS, QuantizedArray, dtype_of
from jax_mfa.metal import runtime, source
from jax_mfa.metal.plan import ITEM_SIZES, SCALARS, Buffer, Dispatch, Kernel, Plan
from jax_mfa.metal.problem import encoding, shape_of
from jax_mfa.problem import Storage, storage_of

SIMDGROUPS = 4
COPY_THREADS = 256
COPY_WORDS = 8  # of four bytes for each thread
WHERE = ("slots", "sources", "targets")


def _copies(part: Buffer, count: int) -> Dispatch:
    words = math.prod(part.shape[1:]) * ITEM_SIZES[part.dtype] // 4
    grid = (-(-words // (COPY_THREADS * COPY_WORDS)), count, 1)
    kernel = Kernel(f"copy_pages_{COPY_THREADS}", ("copy_pages", COPY_THREADS), (), COPY_THREADS)
    sizes = struct.pack("<2I", words, part.shape[0])
    return Dispatch(kernel, grid, ((0, part.name), (1, "sources"), (2, "targets"), (3, sizes)))


def _tokens(new: Buffer, parts: Mapping[str, Buffer], storage: Storage | None) -> Dispatch:
    tokens, heads, size = new.shape
    pages, page = parts["data"].shape[:2]
    template = ("append_tokens", encoding(storage, SCALARS[new.dtype]), size, SIMDGROUPS)
    constants = tuple((i, f"has_{name}", "bool", name in parts) for i, name in ((100, "scales"), (101, "zeros")))
    # scale and zero of each block of a token
    memory = SIMDGROUPS * 8 * parts["scales"].shape[-1] if "scales" in parts else 0
    name = f"append_tokens_{new.name}_{new.dtype}_{size}"
    bound: list[tuple[int, str | bytes]] = [(0, new.name), (1, "slots")]
    bound += [(i, parts[name].name) for i, name in enumerate(PARTS[:3], 2) if name in parts]
    bound += [(5, struct.pack("<3i", tokens, heads, pages * page))]
    kernel = Kernel(name, template, constants, SIMDGROUPS * 32, memory)
    return Dispatch(kernel, (-(-tokens // SIMDGROUPS), heads, 1), tuple(bound))


@functools.lru_cache(maxsize=256)
def plan(arrays: tuple[tuple[str, jax.ShapeDtypeStruct], ...], storages: tuple[Storage | None, Storage | None]) -> Plan:
    """From the shapes of "key", "value", "slots", "sources", "targets", and of the parts of the pool by names such as
    "key_data"."""
    updated = lambda name: name.partition("_")[2] in PARTS
    buffers = {name: Buffer(name, "updated" if updated(name) else "input", x.dtype.name, x.shape) for name, x in arrays}
    copied = buffers["sources"].shape[0]
    dispatches = [_copies(b, copied) for name, b in buffers.items() if copied and updated(name)]
    for name, storage in zip(("key", "value"), storages):
        parts = {part: buffers[f"{name}_{part}"] for part in PARTS if f"{name}_{part}" in buffers}
        dispatches.append(_tokens(buffers[name], parts, storage))
    text = source.digest_for(dispatch.kernel for dispatch in dispatches)
    return Plan("append", text, tuple(buffers.values()), tuple(dispatches))


def parts_of(pages: Any) -> dict[str, Any]:
    return pages.parts() if isinstance(pages, QuantizedArray) else {"data": pages}


def takes(pages: Any) -> bool:
    """Whether Metal writes pages here: not where a GPU is of a virtual machine."""
    found = runtime.get()
    return not found.reason and not found.virtual and all(dtype_of(x).name in SCALARS for x in pages)


def write(pages: Any, key: Any, value: Any, where: Any) -> tuple[Any, Any] | None:
    """The pages of keys and of values with new tokens in them, in the place of the old ones where XLA need not keep
    those. None, with a warning, where the kernels cannot be had."""
    pools = {f"{name}_{part}": x for name, whole in zip(("key", "value"), pages) for part, x in parts_of(whole).items()}
    arrays = {"key": key, "value": value, **dict(zip(WHERE, where)), **pools}
    shapes = tuple((name, shape_of(x)) for name, x in arrays.items())
    made = plan(shapes, (storage_of(pages[0]), storage_of(pages[1])))
    failure = runtime.failure(made)
    if failure:
        runtime.warn_once(failure)
        return None
    found = runtime.call(made, runtime.TARGETS[2], *arrays.values())

    def changed(name: str, whole: Any) -> Any:
        if not isinstance(whole, QuantizedArray):
            return found[f"{name}_data"]
        return dataclasses.replace(whole, **{part: found[f"{name}_{part}"] for part in whole.parts()})

    return changed("key", pages[0]), changed("value", pages[1])
