"""A decoder's weights from and to safetensors files in Hugging Face's format.

Names are those of the modules, `model.layers.0.self_attn.q_proj.weight`; matrices are stored [out, in], where flax has
kernels [in, out].
"""

from __future__ import annotations

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


def load(folder: Path, dtype: Any = None) -> Decoder:
    """The decoder of a folder: `config.json`, and `model.safetensors` or the parts that
    `model.safetensors.index.json` names.

    Args:
      dtype: of the weights and the computation; the file's if None.

    Raises:
      ValueError: naming the file and what is missing, superfluous or of another shape.
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
        tensor = tensor.T if path[-1] == "kernel" else tensor
        if tensor.shape != flat[path].shape:
            raise ValueError(f"{name} in {folder} must have shape {list(flat[path].shape)}, got {list(tensor.shape)}")
        flat[path] = flat[path].replace(jnp.asarray(tensor, dtype))
    if wanted:
        raise ValueError(f"{folder} lacks {len(wanted)} weights, the first of them {min(wanted)}")
    return nnx.merge(graph, nnx.from_flat_state(flat))


def save(folder: Path, decoder: Decoder) -> None:
    """Writes `model.safetensors`."""
    flat = nnx.to_flat_state(nnx.state(decoder, nnx.Param))
    tensors = {name_of(path): x[...].T if path[-1] == "kernel" else x[...] for path, x in flat}
    save_file(jax.tree.map(jnp.asarray, tensors), folder / "model.safetensors", metadata={"format": "pt"})


def name_of(path: tuple) -> str:
    """Under which name a parameter is stored."""
    last = {"kernel": "weight", "embedding": "weight"}.get(path[-1], path[-1])
    return ".".join([*([] if path[0] == "lm_head" else ["model"]), *map(str, path[:-1]), last])


def _tensors(folder: Path) -> Iterator[tuple[str, jax.Array]]:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(configs.read_json(index).get("weight_map", {}).values()))
    for name in names:
        path = folder / name
        if path.parent != folder or not path.is_file():
            raise ValueError(f"cannot read {path}: there is no such file")
        try:
            with safe_open(path, framework="flax") as file:
                for key in file.keys():
                    yield key, file.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file, or is damaged: {error}") from None
