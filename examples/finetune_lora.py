"""Fine-tune a Llama-style decoder on a text with LoRA (arXiv:2106.09685), in flax and optax over `jax_mfa` attention.

    python examples/finetune_lora.py --model folder --text notes.txt --export results/mine
    python examples/generate.py --model results/mine "Once upon a time"
    python examples/finetune_lora.py --steps 20              # a small model, trained first for about a minute
    python examples/finetune_lora.py --resume                # go on after an interruption, as if there had been none
    python examples/finetune_lora.py --compare --steps 0     # a batch with jax_mfa and with stock attention, and memory
    python examples/finetune_lora.py --memory                # by length, of a Llama of 1B's shape: nothing runs

`--model` names a folder in Hugging Face's format (config.json, safetensors, tokenizer.json) of a Llama or Qwen2 (Qwen3
and Gemma-2 too). Only the thin matrices beside the chosen projections learn; the gradients of `--accumulate` batches
make a step. `--out` receives `lora.npz` (matrices, optimizer and losses, replaced atomically). Batches depend on the
seed and their number only, so that a resumed run repeats the losses of an unbroken one. Ctrl-C ends with the last
checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

try:
    import optax
    from flax import nnx
    from tqdm import tqdm

    from jax_mfa.cli.command_line import fit_output_to_the_terminal
except ModuleNotFoundError as error:
    sys.exit(f"error: this example needs the package {error.name}: pip install -e '.[examples]'")

import jax
import jax.numpy as jnp
import numpy as np
from generation import training, weights
from generation.config import Config
from generation.model import Attend, Decoder, whole
from generation.tokenizer import Text

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
INTERRUPTED = 130
# what an export takes from the folder of the model
COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates",
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that determines a run's losses, but for the model and the text; kept in the checkpoint."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    learning_rate: float = 1e-3
    batch: int = 4
    accumulate: int = 2
    context: int = 128
    seed: int = 0


class LoRA(nnx.Param):
    """A weight that learns."""


class Adapted(nnx.Module):
    """A linear layer with a product of two thin matrices beside it, at first zero."""

    def __init__(self, base: nnx.Linear, settings: Settings, rngs: nnx.Rngs):
        inputs, outputs = base.kernel[...].shape
        thin = jax.random.normal(rngs.params(), (inputs, settings.rank), jnp.float32) * inputs**-0.5
        self.base, self.scale = base, settings.alpha / settings.rank
        self.a, self.b = LoRA(thin), LoRA(jnp.zeros((settings.rank, outputs), jnp.float32))

    def __call__(self, x):
        return self.base(x) + (x @ self.a[...].astype(x.dtype) @ self.b[...].astype(x.dtype)) * self.scale

    def merged(self) -> nnx.Linear:
        """One matrix for all of it; the layer itself is changed."""
        kernel = self.base.kernel[...]
        sum_ = kernel.astype(jnp.float32) + self.scale * (self.a[...] @ self.b[...])
        self.base.kernel[...] = sum_.astype(kernel.dtype)
        return self.base


def _layers(decoder: Decoder, targets: Sequence[str]) -> Iterator[tuple[Any, str]]:
    for layer in decoder.layers:
        for part in (layer.self_attn, layer.mlp):
            yield from ((part, name) for name in targets if hasattr(part, name))


def adapt(decoder: Decoder, settings: Settings) -> None:
    """Puts matrices that learn beside the layers named in `targets`."""
    rngs = nnx.Rngs(settings.seed)
    for part, name in _layers(decoder, settings.targets):
        setattr(part, name, Adapted(getattr(part, name), settings, rngs))


def merge(decoder: Decoder, settings: Settings) -> None:
    """Takes them into the layers, which are then as before."""
    for part, name in _layers(decoder, settings.targets):
        setattr(part, name, getattr(part, name).merged())


def stock(layer, q, k, v, *, scale, local_window_size, logits_soft_cap):
    """`jax.nn.dot_product_attention` in place of ours."""
    if logits_soft_cap is not None:
        raise ValueError("stock attention has no soft cap")
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True, local_window_size=local_window_size)


def loss_of(graph, attend: Attend, policy: Any, learnt, frozen, windows):
    """Of the next tokens, by a decoder whose layers may be computed again in the backward pass."""
    positions = jnp.broadcast_to(jnp.arange(windows.shape[1] - 1), (windows.shape[0], windows.shape[1] - 1))
    decoder = nnx.merge(graph, learnt, frozen)
    logits = decoder.logits(decoder(windows[:, :-1], positions, attend, policy))
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


class Trainer:
    """The model, what of it learns, the optimizer, and how far it is."""

    def __init__(
        self, decoder: Decoder, tokens: np.ndarray, settings: Settings, attend: Attend, jit: Callable = jax.jit
    ):
        if len(tokens) < settings.context + 1:
            raise ValueError(f"the text must have more tokens than --context {settings.context}, got {len(tokens)}")
        adapt(decoder, settings)
        self.decoder, self.tokens, self.settings = decoder, tokens, settings
        self.graph, self.learnt, self.frozen = nnx.split(decoder, LoRA, ...)
        self.optimizer = optax.MultiSteps(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(settings.learning_rate)), settings.accumulate
        )
        self.memory = self.optimizer.init(self.learnt)
        self.losses: list[float] = []
        self.update = jit(functools.partial(self._update, attend))

    def _update(self, attend: Attend, learnt, memory, frozen, windows):
        loss = functools.partial(loss_of, self.graph, attend, None)
        value, gradients = jax.value_and_grad(loss)(learnt, frozen, windows)
        changes, memory = self.optimizer.update(gradients, memory, learnt)
        return optax.apply_updates(learnt, changes), memory, value

    def windows(self, number: int) -> np.ndarray:
        """The batch of this number."""
        s = self.settings
        starts = np.random.default_rng((s.seed, number)).integers(0, len(self.tokens) - s.context, s.batch)
        return np.stack([self.tokens[x : x + s.context + 1] for x in starts])

    def step(self) -> float:
        """One step of the optimizer; its loss."""
        values = []
        for i in range(self.settings.accumulate):
            batch = self.windows(len(self.losses) * self.settings.accumulate + i)
            self.learnt, self.memory, value = self.update(self.learnt, self.memory, self.frozen, batch)
            values.append(value)
        self.losses.append(float(jnp.stack(values).mean()))
        return self.losses[-1]

    def _leaves(self) -> list[Any]:
        return jax.tree.leaves((self.learnt, self.memory))

    def save(self, file: Path, of: str) -> None:
        """`of`: what the losses depend on besides, see `fingerprint`."""
        facts = json.dumps({"of": of, "settings": dataclasses.asdict(self.settings), "losses": self.losses})
        leaves = {f"leaf_{i}": np.asarray(x) for i, x in enumerate(self._leaves())}
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".npz", delete=False) as whole_file:
            try:
                np.savez(whole_file, facts=facts, **leaves)
                whole_file.close()
                os.replace(whole_file.name, file)
            except BaseException:
                Path(whole_file.name).unlink(missing_ok=True)
                raise

    def load(self, file: Path, of: str) -> None:
        """Raises ValueError where the checkpoint cannot be read, or is one of another run."""
        try:
            with np.load(file) as found:
                facts = json.loads(str(found["facts"]))
                leaves = [found[f"leaf_{i}"] for i in range(len(self._leaves()))]
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"cannot go on from {file}: {error}") from None
        mine = json.loads(json.dumps(dataclasses.asdict(self.settings)))
        other = [name for name, x in mine.items() if facts["settings"].get(name) != x]
        if facts["of"] != of or other:
            what = ", ".join(other) or "model or text"
            raise ValueError(f"{file} is of a run with another {what}: name another --out, or leave --resume away")
        tree = jax.tree.structure((self.learnt, self.memory))
        self.learnt, self.memory = jax.tree.unflatten(tree, [jnp.asarray(x) for x in leaves])
        self.losses = facts["losses"]

    def export(self, folder: Path, source: Path) -> None:
        """Writes the whole model, merged, as the folder that it came from has it; what the folder held before goes."""
        decoder = nnx.clone(nnx.merge(self.graph, self.learnt, self.frozen))
        merge(decoder, self.settings)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name) as place:
            new, old = Path(place) / "new", Path(place) / "old"
            new.mkdir()
            for file in (source / name for name in COPIED):
                if file.is_file():
                    shutil.copyfile(file, new / file.name)
                elif file.is_dir():
                    shutil.copytree(file, new / file.name)
            weights.save(new, decoder)
            if folder.exists():
                folder.rename(old)
            new.rename(folder)


def check_export(folder: Path, source: Path) -> None:
    """Raises ValueError for a folder that an export must not replace: the model's own, or one with other files."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"--export must be a folder, and {folder} is none")
    if folder.samefile(source):
        raise ValueError(f"--export must be another folder than the model's, got {folder}")
    for name in sorted({x.name for x in folder.iterdir()} - {*COPIED, "model.safetensors"}):
        raise ValueError(f"--export replaces a folder whole, and {folder} holds {name}, which no export has")


def fingerprint(folder: Path, tokens: np.ndarray) -> str:
    """Of the model's configuration and the text."""
    config = (folder / "config.json").read_bytes()
    return hashlib.sha256(config + tokens.tobytes()).hexdigest()[:16]


def compare(trainer: Trainer, implementation: str | None, rounds: int) -> list[str]:
    """Lines: a batch forward and backward with ours and with stock attention, in turns."""
    batch = trainer.windows(0)
    inputs = (trainer.learnt, trainer.memory, trainer.frozen, batch)
    programs, memory = {}, {}
    for name, attend in (("jax_mfa", whole(implementation)), ("jax.nn", stock)):
        compiled = jax.jit(functools.partial(trainer._update, attend)).lower(*inputs).compile()
        jax.block_until_ready(compiled(*inputs))
        programs[name] = compiled
        memory[name] = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*inputs))
            times[name].append(time.perf_counter() - start)
    tokens = batch.shape[0] * (batch.shape[1] - 1)
    lines = ["| attention | batch, median | tokens/s | temporary memory |", "|---|---|---|---|"]
    for name, taken in times.items():
        middle = statistics.median(taken)
        cells = (name, f"{middle * 1e3:.1f} ms", f"{tokens / middle:.0f}", f"{memory[name] / 2**20:.1f} MiB")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# --- memory, of compiled programs that do not run

# Llama 3.2 1B (huggingface.co/meta-llama/Llama-3.2-1B, config.json)
LLAMA_1B = Config("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, (None,) * 16, rope_theta=5e5, tied=True)
# what of a layer is not computed again in the backward pass: the output of attention, and its rows' maxima and sums
KEPT = jax.checkpoint_policies.save_only_these_names("jax_mfa_out", "jax_mfa_lse")


def abstract(config: Config, settings: Settings) -> Decoder:
    """A decoder with matrices that learn, of shapes alone."""

    def make() -> Decoder:
        decoder = Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(config.dtype))
        adapt(decoder, settings)
        return decoder

    return nnx.eval_shape(make)


def memory(decoder: Decoder, batch: int, lengths: Sequence[int], implementation: str | None) -> Iterator[str]:
    """Lines of a table: temporary memory of the gradient, by length, as the compiler reports it."""
    graph, learnt, frozen = nnx.split(decoder, LoRA, ...)
    ours = whole(implementation)
    ways = {
        "stock": (stock, None),
        "jax_mfa": (ours, None),
        "stock, layers computed again": (stock, jax.checkpoint_policies.nothing_saveable),
        "jax_mfa, layers but attention computed again": (ours, KEPT),
    }
    yield f"| tokens | {' | '.join(ways)} |"
    yield "|---" * (1 + len(ways)) + "|"
    for length in lengths:
        windows = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
        cells = [str(length)]
        for attend, policy in ways.values():
            program = jax.jit(jax.grad(functools.partial(loss_of, graph, attend, policy)))
            report = program.lower(learnt, frozen, windows).compile().memory_analysis()
            cells.append(f"{report.temp_size_in_bytes / 2**20:,.0f} MiB")
        yield f"| {' | '.join(cells)} |"


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, usual = parser.add_argument, Settings()
    add("--model", type=Path, help="a folder in Hugging Face's format; default: a small one, trained first")
    add(
        "--text", type=Path, help="a text file, UTF-8; default: Python's own documentation, what the small one held out"
    )
    add("--steps", type=int, default=50, help="steps of the optimizer in all, default: %(default)s")
    add("--out", type=Path, default=Path("results/lora"), help="folder of the checkpoint, default: %(default)s")
    add("--resume", action="store_true", help="go on from the checkpoint")
    add("--save-every", type=int, default=20, help="steps between checkpoints, default: %(default)s")
    add("--export", type=Path, help="a folder for the whole model, merged")
    add("--compare", action="store_true", help="time a batch with jax_mfa and with stock attention, and their memory")
    add("--memory", action="store_true", help="print the memory of a Llama of 1B's shape by length, and end")
    add(
        "--lengths",
        type=int,
        nargs="+",
        help="of the tables of memory; default: 1024 to 8192, from --context with --compare",
    )
    add("--implementation", choices=("metal", "blockwise", "reference"), help="default: jax_mfa's choice")
    add("--targets", nargs="+", choices=TARGETS, default=list(usual.targets), help="default: those of attention")
    for name, what in (("rank", "of the matrices"), ("batch", "windows"), ("accumulate", "batches for a step")):
        add(f"--{name}", type=int, default=getattr(usual, name), help=f"{what}, default: %(default)s")
    add("--context", type=int, default=usual.context, help="tokens of a window, default: %(default)s")
    add("--alpha", type=float, default=usual.alpha, help="alpha / rank scales their product, default: %(default)s")
    add("--learning-rate", type=float, default=usual.learning_rate, help="default: %(default)s")
    add("--seed", type=int, default=usual.seed, help="default: %(default)s")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    fit_output_to_the_terminal()
    parser = argument_parser()
    options = parser.parse_args(arguments)
    for name in ("rank", "batch", "accumulate", "context", "save_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(options, name)}")
    if options.steps < 0 or options.seed < 0:
        parser.error("--steps and --seed must not be negative")
    try:
        return run(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    """Trains, compares and exports as asked. Raises ValueError, OSError."""
    if options.memory:
        settings = Settings(rank=options.rank, targets=tuple(options.targets))
        print("temporary memory of a gradient, Llama 3.2 1B's shape with LoRA, float32, one sequence")
        for line in memory(
            abstract(LLAMA_1B, settings), 1, options.lengths or (1024, 2048, 4096, 8192), options.implementation
        ):
            print(line, flush=True)
        return 0
    folder = options.model
    if folder is None:
        folder = Path("results/generate/model")  # the small one of generate.py
        if not folder.is_dir():
            training.make(folder, training.Size())
    if options.export is not None:
        check_export(options.export, folder)
    if options.text is None:
        text = training.split(training.local_text())[1]
    else:
        text = options.text.read_text(encoding="utf-8")
    fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    settings = Settings(**{**fields, "targets": tuple(options.targets)})
    tokens = np.array(Text(folder).encode(text), np.int32)
    trainer = Trainer(weights.load(folder), tokens, settings, whole(options.implementation))
    of, checkpoint = fingerprint(folder, tokens), options.out / "lora.npz"
    if options.resume:
        trainer.load(checkpoint, of)
    options.out.mkdir(parents=True, exist_ok=True)  # found out before the training whether it can be written to
    learnt = sum(x.size for x in jax.tree.leaves(trainer.learnt))
    print(f"{learnt} numbers learn, {sum(x.size for x in jax.tree.leaves(trainer.frozen))} stay")
    if options.compare:
        print("\n".join(compare(trainer, options.implementation, 5)))
        lengths = options.lengths or [options.context * n for n in (1, 4, 16)]
        print("temporary memory by length")
        shapes = nnx.merge(trainer.graph, trainer.learnt, trainer.frozen)
        print("\n".join(memory(shapes, options.batch, lengths, options.implementation)))
    status = _train(trainer, options, checkpoint, of)
    if options.export is not None:
        trainer.export(options.export, folder)
        print(f"wrote {options.export}")
    return status


def _train(trainer: Trainer, options: argparse.Namespace, checkpoint: Path, of: str) -> int:
    begun, start = len(trainer.losses), time.perf_counter()
    status = 0
    try:
        with tqdm(total=options.steps, initial=begun, desc="fine-tuning", unit="step", dynamic_ncols=True) as bar:
            while len(trainer.losses) < options.steps:
                bar.set_postfix(loss=f"{trainer.step():.4f}", refresh=False)
                bar.update()
                if len(trainer.losses) % options.save_every == 0:
                    trainer.save(checkpoint, of)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED
    done = len(trainer.losses) - begun
    if done:
        if not status:  # an interrupt may fall between two batches of a step: the last checkpoint is whole
            trainer.save(checkpoint, of)
        taken = (time.perf_counter() - start) / done
        s = trainer.settings
        rate = s.batch * s.accumulate * s.context / taken
        print(f"loss {trainer.losses[-1]:.4f}; {taken * 1e3:.0f} ms a step, {rate:.0f} tokens/s, compiling included")
        print(f"wrote {checkpoint}")
    return status


if __name__ == "__main__":
    sys.exit(main())
