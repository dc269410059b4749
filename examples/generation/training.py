"""A small Llama where no folder is given: trained for about a minute on text that every Python brings along, and
written as such a folder."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from generation import tokenizer as tokenizers
from generation import weights
from generation.config import Config, to_json
from generation.model import Decoder, whole

HELD_OUT = 10  # one piece of the text in so many is not trained on


@dataclasses.dataclass(frozen=True)
class Size:
    """Of the small model, and how long it is trained."""

    steps: int = 300
    batch: int = 8
    context: int = 512
    window: int = 128  # tokens of a training window
    vocabulary: int = 1024
    layers: int = 3
    width: int = 192
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    learning_rate: float = 3e-3

    def draft(self) -> Size:
        """A smaller one, to guess for it."""
        return dataclasses.replace(self, layers=1, width=96, heads=2, kv_heads=1, steps=max(2 * self.steps // 3, 1))

    def config(self, vocabulary: int, end: int) -> Config:
        return Config(
            family="llama", vocabulary=vocabulary, width=self.width, inner=3 * self.width, layers=self.layers,
            heads=self.heads, kv_heads=self.kv_heads, head_size=self.head_size, context=self.context,
            windows=(None,) * self.layers, tied=True, end_tokens=(end,),
        )  # fmt: skip


def local_text() -> str:
    """The installed Python's licence and language reference, about half a million characters of English.

    Raises:
      ValueError: where this Python comes without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("this Python has no documentation (pydoc_data): name a folder with --model") from None
    licence = Path(os.__file__).with_name("LICENSE.txt")  # not every distribution has it there
    parts = [licence.read_text(encoding="utf-8")] if licence.is_file() else []
    return "\n\n".join(parts + [topics[name] for name in sorted(topics)])


def split(text: str) -> tuple[str, str]:
    """What is trained on, and what is held out: pieces from all over the text."""
    cuts = np.linspace(0, len(text), 5 * HELD_OUT + 1).astype(int)
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
    held = set(range(HELD_OUT // 2, len(pieces), HELD_OUT))
    return "".join(x for i, x in enumerate(pieces) if i not in held), "".join(pieces[i] for i in sorted(held))


def make(folder: Path, size: Size, seed: int = 0, text: str | None = None, jit=jax.jit) -> None:
    """Trains a model and its draft, and writes both: `folder` and `folder/draft`. The folder is there whole or not at
    all.

    Raises:
      ValueError: before the training, where the folder is there and not empty.
    """
    there = sorted(x.name for x in folder.iterdir()) if folder.exists() else []
    if there:
        raise ValueError(f"{folder} must be new or empty, it holds {there[0]}")
    train_text, _ = split(local_text() if text is None else text)
    tokenizer = tokenizers.train(train_text, size.vocabulary)
    data = np.array(tokenizer.encode(train_text).ids, np.int32)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=folder.name + "."))
    try:
        end = tokenizer.token_to_id(tokenizers.END)
        for part, facts in ((temporary, size), (temporary / "draft", size.draft())):
            part.mkdir(exist_ok=True)
            decoder = trained(facts, data, tokenizer.get_vocab_size(), end, seed, jit)
            weights.save(part, decoder)
            tokenizers.save(part, tokenizer)
            (part / "config.json").write_text(json.dumps(to_json(decoder.config), indent=2), encoding="utf-8")
        temporary.chmod(0o755)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def trained(size: Size, data: np.ndarray, vocabulary: int, end: int, seed: int, jit=jax.jit) -> Decoder:
    decoder = Decoder(size.config(vocabulary, end), rngs=nnx.Rngs(seed))
    graph, state = nnx.split(decoder)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, size.learning_rate, max(size.steps // 10, 1), max(size.steps, 2), 0.1 * size.learning_rate
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.05))
    positions = jnp.broadcast_to(jnp.arange(size.window), (size.batch, size.window))

    def loss(state, windows):
        decoder = nnx.merge(graph, state)
        logits = decoder.logits(decoder(windows[:, :-1], positions, whole()))
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    @jit
    def update(state, memory, windows):
        value, gradients = jax.value_and_grad(loss)(state, windows)
        changes, memory = optimizer.update(gradients, memory, state)
        return optax.apply_updates(state, changes), memory, value

    memory = optimizer.init(state)
    bar = tqdm(range(size.steps), desc=f"training {size.layers} layers", unit="step", dynamic_ncols=True)
    for step in bar:
        starts = np.random.default_rng((seed, step)).integers(0, len(data) - size.window, size.batch)
        windows = np.stack([data[x : x + size.window + 1] for x in starts])
        state, memory, value = update(state, memory, windows)
        if step % 10 == 0 or step == size.steps - 1:
            bar.set_postfix(loss=f"{float(value):.3f}", refresh=False)
    return nnx.merge(graph, state)
