"""A decoder's weights from and to safetensors files in Hugging Face's format.

Names are those of the modules, `model.layers.0.self_attn.q_proj.weight`; matrices are stored [out, in], where flax has
kernels [in, out].
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from generation import config as configs
from generation.model import Decoder

INDEX = "model.safetensors.index.json"
PART = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


def load(folder: Path, dtype: Any = None) -> Decoder:
    """The decoder of a folder: `config.json`, and `model.safetensors` or the parts that
    `model.safetensors.index.json` names.

    Args:
      dtype: of the weights and the computation; the file's if None.

    Raises:
      ValueError: naming the file and what is missing, superfluous, there twice or of another shape, and where index and
        files disagree.
    """
    config = configs.load(folder)
    dtype = jnp.dtype(config.dtype if dtype is None else dtype)
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    graph, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    wanted = {name_of(path): path for path in flat}
    for name, tensor in _tensors(folder):
        if (name == "lm_head.weight" and config.tied) or name.endswith("rotary_emb.inv_freq"):
            continue  # some files repeat what follows from the rest
        path = wanted.pop(name, None)
        if path is None:
            raise ValueError(f"{folder} holds {name}, which a {config.family} of this configuration does not have")
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise ValueError(f"{name} in {folder} must be of floating point, got {tensor.dtype}")
        tensor = tensor.T if path[-1] == "kernel" else tensor
        if tensor.shape != flat[path].shape:
            raise ValueError(f"{name} in {folder} must have shape {list(flat[path].shape)}, got {list(tensor.shape)}")
        flat[path] = flat[path].replace(jnp.asarray(tensor, dtype))
    if wanted:
        raise ValueError(f"{folder} lacks {len(wanted)} weights, the first of them {min(wanted)}")
    return nnx.merge(graph, nnx.from_flat_state(flat))


def save(folder: Path, decoder: Decoder) -> None:
    """Writes `model.safetensors`.

    Raises:
      ValueError: where an index there would have other files loaded.
    """
    if (folder / INDEX).exists():
        raise ValueError(f"{folder / INDEX} names the files of another model")
    flat = nnx.to_flat_state(nnx.state(decoder, nnx.Param))
    tensors = {name_of(path): x[...].T if path[-1] == "kernel" else x[...] for path, x in flat}
    save_file(jax.tree.map(jnp.asarray, tensors), folder / "model.safetensors", metadata={"format": "pt"})


def name_of(path: tuple) -> str:
    """Under which name a parameter is stored."""
    last = {"kernel": "weight", "embedding": "weight"}.get(path[-1], path[-1])
    return ".".join([*([] if path[0] == "lm_head" else ["model"]), *map(str, path[:-1]), last])


def _tensors(folder: Path) -> Iterator[tuple[str, jax.Array]]:
    listed = _index(folder)
    names = {"model.safetensors"} if listed is None else set(listed.values())
    parts = {x.name for x in folder.iterdir() if PART.fullmatch(x.name)}
    for name in sorted(parts - names):
        why = f"but no {INDEX} that names it" if listed is None else f"which {INDEX} there does not name"
        raise ValueError(f"{folder} holds {name}, {why}")
    found: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(_opened(folder, name)) for name in sorted(names)}
        for name, file in files.items():
            for key in file.keys():
                if key in found:
                    raise ValueError(f"{folder} holds {key} twice, in {found[key]} and in {name}")
                found[key] = name
        for key in sorted(found if listed is None else found.keys() | listed.keys()):
            if listed is not None and listed.get(key) != found.get(key):
                has = [f"in {x[key]}" if key in x else "nowhere" for x in (listed, found)]
                raise ValueError(f"{folder / INDEX} has {key} {has[0]}, and the files have it {has[1]}")
        for key, name in found.items():
            with _readable(folder / name):
                tensor = files[name].get_tensor(key)
            yield key, tensor


def _index(folder: Path) -> dict[str, str] | None:
    """In which file each weight stands, where a folder says it."""
    path = folder / INDEX
    if not path.is_file():
        return None
    listed = configs.read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(x, str) for x in listed.values()):
        raise ValueError(f"{path} must have a weight_map from weights to files, got {str(listed)[:80]}")
    return listed


def _opened(folder: Path, name: str) -> Any:
    path = folder / name
    if path.parent != folder or not path.is_file():
        raise ValueError(f"cannot read {path}: there is no such file beside config.json or {INDEX}")
    with _readable(path):
        return safe_open(path, framework="flax")


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, TypeError) as error:
        raise ValueError(f"{path} is no safetensors file, or is damaged: {error}") from None
