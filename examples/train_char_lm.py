"""Train a small causal transformer on the characters of a text, in flax and optax over `jax_mfa` attention.

    python examples/train_char_lm.py                          # Python's own documentation, a few minutes on two cores
    python examples/train_char_lm.py --steps 20               # less than half a minute
    python examples/train_char_lm.py --text book.txt --kv-heads 1 --out results/book
    python examples/train_char_lm.py --resume                 # go on after an interruption, as if there had been none

One sees a progress bar with the loss, then a sample of what the model writes. The folder `--out` receives
`checkpoint.npz` (model, optimizer, step and losses, replaced atomically) and `loss.png` (training and validation loss).
Batches depend on the seed and the step number only, so that a resumed run repeats the losses of an unbroken one.
Ctrl-C and a request to terminate end the training with a checkpoint, and exit status 128 + the signal's number.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import os
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

try:
    import optax
    from flax import linen as nn
    from tqdm import tqdm

    import jax_mfa
    from jax_mfa.cli.command_line import fit_output_to_the_terminal
except ModuleNotFoundError as error:
    sys.exit(f"error: this example needs the package {error.name}: pip install -e '.[examples]'")

HELD_OUT = 10  # one piece of the text in so many is for validation
VALIDATION_WINDOWS = 64
TRY_LOWER = "start anew with a lower --learning-rate"


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that determines a run's losses; kept in the checkpoint."""

    text: str | None = None
    steps: int = 400
    batch: int = 16
    context: int = 256
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 4
    learning_rate: float = 3e-3
    warmup: int = 40
    eval_every: int = 50
    seed: int = 0
    attention: str = "jax_mfa"
    implementation: str | None = None

    def check(self) -> None:
        """Raise `ValueError` that names the option at fault."""
        for name in ("steps", "batch", "context", "layers", "width", "heads", "kv_heads", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{option(name)} must be at least 1, got {getattr(self, name)}")
        if self.warmup < 0 or self.seed < 0:
            raise ValueError(f"--warmup and --seed must not be negative, got {self.warmup} and {self.seed}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"--learning-rate must be positive and finite, got {self.learning_rate}")
        if self.width % (2 * self.heads):
            raise ValueError(f"--width must be an even multiple of --heads, got {self.width} and {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"--heads must be a multiple of --kv-heads, got {self.heads} and {self.kv_heads}")
        if self.implementation and self.attention == "stock":
            raise ValueError("--implementation chooses within jax_mfa and has no meaning with --attention stock")


def option(name: str) -> str:
    """A setting's name on the command line."""
    return "--" + name.replace("_", "-")


# ---------------------------------------------------------------------------------------------------------------- text


def default_text() -> str:
    """The installed Python's licence and language reference, about half a million characters of English."""
    from pydoc_data.topics import topics

    licence = Path(os.__file__).with_name("LICENSE.txt")  # not every distribution has it there
    parts = [licence.read_text(encoding="utf-8")] if licence.is_file() else []
    return "\n\n".join(parts + [topics[name] for name in sorted(topics)])


def read_text(path: str | None) -> str:
    """The text of a UTF-8 file, or the default text."""
    try:
        return default_text() if path is None else Path(path).read_text(encoding="utf-8")
    except ImportError:
        raise ValueError("this Python comes without its documentation (pydoc_data): name a text with --text") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


class Corpus:
    """A text as integers, a tenth of it held out, and the windows that training and validation look at."""

    def __init__(self, text: str, settings: Settings):
        self.settings = settings
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.characters = sorted(set(text))
        self.numbers = {character: number for number, character in enumerate(self.characters)}
        data = self.encode(text)
        # from all over the text, since its end may be of another kind
        pieces = np.array_split(data, 5 * HELD_OUT)
        held_out = range(HELD_OUT // 2, len(pieces), HELD_OUT)
        self.validation = np.concatenate([pieces[i] for i in held_out])
        self.train = np.concatenate([piece for i, piece in enumerate(pieces) if i not in held_out])
        if len(self.validation) <= settings.context:
            needed = (settings.context + 6) * HELD_OUT
            raise ValueError(f"the text has {len(text):,} characters; --context {settings.context} needs {needed:,}")

    def encode(self, text: str) -> np.ndarray:
        return np.array([self.numbers[character] for character in text], np.int32)

    def decode(self, numbers: Sequence[int]) -> str:
        return "".join(self.characters[number] for number in numbers)

    def training_windows(self, step: int) -> np.ndarray:
        """The batch `[B, context + 1]` of a step, whatever came before it."""
        context = self.settings.context
        random = np.random.default_rng((self.settings.seed, step))
        starts = random.integers(0, len(self.train) - context, self.settings.batch)
        return np.stack([self.train[start : start + context + 1] for start in starts])

    def validation_batches(self) -> list[np.ndarray]:
        """Windows spread evenly over the held-out text, in batches."""
        context, batch = self.settings.context, self.settings.batch
        count = max(VALIDATION_WINDOWS // batch, 1) * batch
        starts = np.linspace(0, len(self.validation) - context - 1, count).astype(int)
        windows = np.stack([self.validation[start : start + context + 1] for start in starts])
        return list(windows.reshape(-1, batch, context + 1))

    def letter_entropy(self) -> float:
        """The loss in nats of one who knows how frequent each character is, and nothing else."""
        frequency = np.bincount(self.train, minlength=len(self.characters)) / len(self.train)
        present = frequency[frequency > 0]
        return float(-(present * np.log(present)).sum())


# --------------------------------------------------------------------------------------------------------------- model


def rotate(x):
    """Rotary position embedding (arXiv:2104.09864, section 3.4.2) of `[B, T, N, H]`, halves paired."""
    length, size = x.shape[1], x.shape[-1]
    frequencies = 10000.0 ** (-jnp.arange(0, size, 2) / size)
    angles = (jnp.arange(length)[:, None] * frequencies)[:, None, :]
    left, right = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


class CharacterModel(nn.Module):
    """A pre-norm transformer: rotary positions, grouped-query attention.

    Attributes:
      settings: its layers, width, heads and kv_heads count here.
      characters: size of the alphabet.
      attention: called as `jax.nn.dot_product_attention` is.
    """

    settings: Settings
    characters: int
    attention: Callable

    @nn.compact
    def __call__(self, tokens):
        """Logits `[B, T, characters]` of what follows each of the `tokens` `[B, T]`."""
        width, heads, kv_heads = self.settings.width, self.settings.heads, self.settings.kv_heads
        size = width // heads
        # what a layer adds shrinks with depth, so that their sum begins at the scale of its parts
        small = nn.initializers.normal(0.5 / np.sqrt(2 * self.settings.layers * width))
        x = nn.Embed(self.characters, width)(tokens)
        for _ in range(self.settings.layers):
            h = nn.RMSNorm()(x)
            q = nn.DenseGeneral((heads, size), use_bias=False)(h)
            k = nn.DenseGeneral((kv_heads, size), use_bias=False)(h)
            v = nn.DenseGeneral((kv_heads, size), use_bias=False)(h)
            h = self.attention(rotate(q), rotate(k), v, is_causal=True)
            x += nn.DenseGeneral(width, axis=(-2, -1), use_bias=False, kernel_init=small)(h)
            h = nn.gelu(nn.Dense(4 * width, use_bias=False)(nn.RMSNorm()(x)))
            x += nn.Dense(width, use_bias=False, kernel_init=small)(h)
        return nn.Dense(self.characters, use_bias=False, kernel_init=small)(nn.RMSNorm()(x))


def attention_function(settings: Settings) -> Callable:
    """Stock attention, or that of `jax_mfa`."""
    if settings.attention == "stock":
        return jax.nn.dot_product_attention
    return functools.partial(jax_mfa.dot_product_attention, implementation=settings.implementation)


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW, warmup and cosine decay to a tenth, clipped gradients; matrices decay, scales do not."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.learning_rate,
        warmup_steps=min(settings.warmup, settings.steps // 2),
        decay_steps=settings.steps,
        end_value=0.1 * settings.learning_rate,
    )
    matrices = lambda parameters: jax.tree.map(lambda leaf: leaf.ndim > 1, parameters)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.98, weight_decay=0.05, mask=matrices),
    )


# ------------------------------------------------------------------------------------------------------------ training


@dataclasses.dataclass
class Run:
    """Where a run stands: `step` updates are done, and `losses` has one entry for each."""

    parameters: dict
    optimizer: tuple
    step: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)


class Interruption:
    """While entered, notes Ctrl-C and a request to terminate instead of obeying: a step is done whole or not at all."""

    def __enter__(self) -> Interruption:
        self.seen = 0  # the signal's number, later
        self.previous = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def note(self, number, frame) -> None:
        self.seen = number
        self.restore()  # the second one is obeyed at once

    def restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def __exit__(self, *_) -> None:
        self.restore()


class Trainer:
    """The compiled functions of a run, and the loop over them."""

    def __init__(self, settings: Settings, corpus: Corpus):
        self.settings, self.corpus = settings, corpus
        self.model = CharacterModel(settings, len(corpus.characters), attention_function(settings))
        optimizer = make_optimizer(settings)
        self.optimizer = optimizer

        def loss(parameters, windows):
            logits = self.model.apply(parameters, windows[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

        def update(parameters, state, windows):
            value, gradients = jax.value_and_grad(loss)(parameters, windows)
            changes, state = optimizer.update(gradients, state, parameters)
            return optax.apply_updates(parameters, changes), state, value

        def choose(parameters, window, length, key, temperature):
            logits = self.model.apply(parameters, window[None])[0, length - 1]
            return jax.random.categorical(key, logits / temperature)

        self.loss, self.choose = jax.jit(loss), jax.jit(choose)
        self.update = jax.jit(update, donate_argnums=(0, 1))

    def start(self) -> Run:
        """A fresh run."""
        tokens = jnp.zeros((1, self.settings.context), jnp.int32)
        parameters = jax.jit(self.model.init)(jax.random.key(self.settings.seed), tokens)
        return Run(parameters, self.optimizer.init(parameters))

    def validate(self, run: Run) -> None:
        """Note the mean loss over the validation windows."""
        batches = self.corpus.validation_batches()
        mean = sum(float(self.loss(run.parameters, windows)) for windows in batches) / len(batches)
        run.validation.append((run.step, mean))

    def train(self, run: Run, until: int, save: Callable[[Run], None]) -> int:
        """Do the steps up to `until`, saving after each validation, at the end, and when interrupted.

        Returns the number of the signal that interrupted it, or 0; raises `FloatingPointError`, saving nothing more,
        when a loss is not finite.
        """
        if not run.validation:
            self.validate(run)
        bar = tqdm(total=self.settings.steps, initial=run.step, desc="training", unit="step", dynamic_ncols=True)
        with bar, Interruption() as interruption:
            while run.step < until and not interruption.seen:
                windows = self.corpus.training_windows(run.step)
                run.parameters, run.optimizer, loss = self.update(run.parameters, run.optimizer, windows)
                run.losses.append(float(loss))
                run.step += 1
                due = run.step % self.settings.eval_every == 0 or run.step == self.settings.steps
                if due:
                    self.validate(run)
                latest = run.validation[-1][1]
                if not (math.isfinite(run.losses[-1]) and math.isfinite(latest)):
                    raise FloatingPointError(f"the loss is no longer finite at step {run.step}: {TRY_LOWER}")
                if due:
                    save(run)
                bar.set_postfix(train=f"{run.losses[-1]:.3f}", validation=f"{latest:.3f}", refresh=False)
                bar.update()
            save(run)
        return interruption.seen

    def sample(self, run: Run, prompt: str, length: int, temperature: float) -> str:
        """`length` characters that follow the prompt, each drawn after the last `context` ones."""
        context = self.settings.context
        written = list(self.corpus.encode(prompt))
        for position in tqdm(range(length), desc="writing", unit="character", leave=False, dynamic_ncols=True):
            recent = written[-context:]
            # one shape for all: what stands after the text is behind the causal mask
            window = np.zeros(context, np.int32)
            window[: len(recent)] = recent
            key = jax.random.fold_in(jax.random.key(self.settings.seed), position)
            written.append(int(self.choose(run.parameters, window, len(recent), key, temperature)))
        return self.corpus.decode(written)


# ---------------------------------------------------------------------------------------------------------- checkpoint


def named_leaves(run: Run) -> dict[str, np.ndarray]:
    """Every array of the model and the optimizer under the name of its place."""
    leaves = jax.tree_util.tree_leaves_with_path({"model": run.parameters, "optimizer": run.optimizer})
    return {"state" + jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def save_checkpoint(path: Path, run: Run, settings: Settings, digest: str) -> None:
    """Write the run to one file, which is whole at any moment: the old one or the new one.

    Raises `FloatingPointError` rather than replace the old one by a model that is lost.
    """
    leaves = named_leaves(run)
    if not all(np.isfinite(leaf).all() for leaf in leaves.values()):
        raise FloatingPointError(f"the model is no longer finite at step {run.step}: {TRY_LOWER}")
    about = json.dumps({"settings": dataclasses.asdict(settings), "text": digest, "step": run.step})
    history = {"losses": np.array(run.losses), "validation": np.array(run.validation, np.float64).reshape(-1, 2)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb") as file:
        np.savez(file, about=np.array(about), **history, **leaves)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load_checkpoint(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """What `save_checkpoint` knew about the run, and its arrays."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(str(arrays.pop("about")))
        Settings(**about["settings"]).check()
        if not (about.keys() >= {"text", "step"} and arrays.keys() >= {"losses", "validation"}):
            raise KeyError("a part is missing")
    except FileNotFoundError:
        raise ValueError(f"there is no {path} to resume from") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # a damaged file fails in many ways, in words that do not help
        raise ValueError(f"{path} is not a checkpoint of this version of the program, or is damaged") from error
    return about, arrays


def restore(run: Run, about: dict, arrays: dict[str, np.ndarray]) -> Run:
    """The saved run, in the structure of a fresh one."""
    fresh = named_leaves(run)
    saved = {name: array for name, array in arrays.items() if name.startswith("state")}
    if {name: leaf.shape for name, leaf in fresh.items()} != {name: array.shape for name, array in saved.items()}:
        raise ValueError("the checkpoint's arrays are not those of this model: other versions of flax or optax?")
    structure = jax.tree.structure({"model": run.parameters, "optimizer": run.optimizer})
    state = jax.tree.unflatten(structure, [jnp.asarray(saved[name]) for name in fresh])
    validation = [(int(step), float(loss)) for step, loss in arrays["validation"]]
    return Run(state["model"], state["optimizer"], about["step"], arrays["losses"].tolist(), validation)


# ---------------------------------------------------------------------------------------------------------------- plot


def plot_losses(path: Path, run: Run, title: str, letter_entropy: float) -> None:
    """Training loss of each step, its mean over the last steps, and validation loss, in nats per character."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    losses = np.array(run.losses)
    steps = np.arange(1, len(losses) + 1)
    span = max(len(losses) // 20, 1)
    sums = np.cumsum(np.concatenate([[0.0], losses]))
    first = np.maximum(steps - span, 0)
    smooth = (sums[steps] - sums[first]) / (steps - first)

    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8)
    axes.plot(steps, smooth, color="tab:blue", label=f"training, mean of {span} steps" if span > 1 else "training")
    axes.plot(*zip(*run.validation), color="tab:orange", marker="o", markersize=4, label="validation")
    axes.axhline(letter_entropy, color="0.5", linestyle="--", linewidth=1, label="letter frequencies alone")
    step, last = run.validation[-1]
    axes.annotate(f"{last:.2f}", (step, last), (7, 0), textcoords="offset points", va="center", color="tab:orange")
    axes.set(xlabel="step", ylabel="loss (nats per character)", title=title, ylim=(0, None))
    axes.set_xlim(0, len(losses) * 1.08)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------------------- program


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    helps = {
        "text": "a UTF-8 text file; default: the installed Python's licence and documentation",
        "steps": "updates; the learning rate falls until the last",
        "batch": "windows of text per update",
        "context": "characters per window",
        "layers": "transformer layers",
        "width": "size of a character's vector",
        "heads": "query heads",
        "kv_heads": "key/value heads, a divisor of --heads: fewer is grouped-query attention",
        "learning_rate": "its peak",
        "warmup": "steps until the peak",
        "eval_every": "steps between validations, each with a checkpoint",
        "seed": "of weights, batches and sample",
        "attention": "whose attention",
        "implementation": "of jax_mfa; default: its own choice",
    }
    choices = {"attention": ("jax_mfa", "stock"), "implementation": ("metal", "blockwise", "reference")}
    settings = parser.add_argument_group("settings", "kept in the checkpoint; --resume goes on with them")
    for field in dataclasses.fields(Settings):
        default = "" if field.default is None else f", default: {field.default}"
        settings.add_argument(
            option(field.name),
            type=str if field.default is None else type(field.default),
            choices=choices.get(field.name),
            default=argparse.SUPPRESS,  # to tell what was given from what was not
            help=helps[field.name] + default,
        )
    parser.add_argument("--out", type=Path, default=Path("results/char_lm"), help="folder, default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--overwrite", action="store_true", help="start anew although --out holds a checkpoint")
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="stop there, as an interruption would")
    parser.add_argument("--prompt", default="\n", help="what the sample begins with, default: a line break")
    parser.add_argument("--sample", type=int, default=400, help="characters to write at the end, default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the sample, default: %(default)s")
    return parser


def choose_settings(given: dict, saved: dict | None) -> Settings:
    """The settings given, or those of a checkpoint, which the given ones must not contradict."""
    if given.get("text"):
        given["text"] = str(Path(given["text"]).resolve())  # to be found again from another folder
    for name, value in given.items():
        if saved is not None and saved.get(name) != value:
            raise ValueError(f"the checkpoint has {option(name)} {saved.get(name)}, not {value}: resume without it")
    settings = Settings(**(given if saved is None else saved))
    settings.check()
    return settings


def describe_attention(settings: Settings) -> str:
    """Which attention runs; `NotImplementedError` if the one asked for cannot."""
    if settings.attention == "stock":
        return "stock jax.nn"
    size = settings.width // settings.heads
    query = jax.ShapeDtypeStruct((settings.batch, settings.context, settings.heads, size), jnp.float32)
    key = jax.ShapeDtypeStruct((settings.batch, settings.context, settings.kv_heads, size), jnp.float32)
    explanation = jax_mfa.explain(query, key, key, is_causal=True, implementation=settings.implementation)
    return f"jax_mfa {explanation.implementation}"


def train(options: argparse.Namespace) -> None:
    """The whole program; `ValueError`, `FloatingPointError` and `NotImplementedError` carry a message for the user."""
    checkpoint = options.out / "checkpoint.npz"
    given = {name: value for name, value in vars(options).items() if name in Settings.__dataclass_fields__}
    if options.resume:
        about, arrays = load_checkpoint(checkpoint)
        settings = choose_settings(given, about["settings"])
    else:
        settings = choose_settings(given, None)
        if checkpoint.exists() and not options.overwrite:
            raise ValueError(f"{checkpoint} exists: --resume goes on from it, --overwrite starts anew")
    if options.sample < 0 or not options.temperature > 0:
        raise ValueError(
            f"--sample {options.sample} must not be negative, --temperature {options.temperature} positive"
        )

    if options.stop_after is not None and options.stop_after < 0:
        raise ValueError(f"--stop-after must not be negative, got {options.stop_after}")
    if not options.prompt:
        raise ValueError("--prompt must not be empty")

    attention = describe_attention(settings)
    corpus = Corpus(read_text(settings.text), settings)
    unknown = sorted(set(options.prompt) - set(corpus.characters))
    if unknown:
        raise ValueError(f"--prompt must be made of characters of the text; not so: {unknown}")
    options.out.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=options.out).close()  # fails where a checkpoint could not be written
    trainer = Trainer(settings, corpus)
    run = trainer.start()
    if options.resume:
        if about["text"] != corpus.digest:
            raise ValueError(f"the text is not the one that {checkpoint} was trained on")
        run = restore(run, about, arrays)

    source = Path(settings.text).name if settings.text else "the documentation of Python"
    size = sum(leaf.size for leaf in jax.tree.leaves(run.parameters))
    print(f"text        {source}: {len(corpus.train) + len(corpus.validation):,} characters")
    print(f"model       {size:,} parameters, an alphabet of {len(corpus.characters)}")
    print(f"attention   {attention}, on {jax.devices()[0]}", flush=True)
    begun, start = run.step, time.perf_counter()
    save = lambda run: save_checkpoint(checkpoint, run, settings, corpus.digest)
    until = settings.steps if options.stop_after is None else min(options.stop_after, settings.steps)
    interrupted = trainer.train(run, until, save)
    seconds = time.perf_counter() - start

    if run.step > begun:
        speed = (run.step - begun) * settings.batch * settings.context / seconds
        print(f"trained     steps {begun + 1} to {run.step} in {seconds:.0f} s, {speed:,.0f} characters/s")
    if run.losses:
        plot_losses(options.out / "loss.png", run, f"Character model of {source}", corpus.letter_entropy())
        print(f"loss        {run.losses[0]:.3f} at first, {run.losses[-1]:.3f} at last, in {options.out / 'loss.png'}")
    step, validation = run.validation[-1]
    print(f"validation  {validation:.3f} at step {step}; letter frequencies alone give {corpus.letter_entropy():.3f}")
    print(f"checkpoint  {checkpoint}")
    if run.step < settings.steps or interrupted:
        print(f"stopped     after step {run.step} of {settings.steps}; --resume goes on")
    elif options.sample:
        text = trainer.sample(run, options.prompt, options.sample, options.temperature)
        print("sample")
        print(textwrap.indent(text.strip("\n"), "  | ", lambda line: True))
    if interrupted:
        sys.exit(128 + interrupted)  # as a shell reports it, so that what depends on the run does not begin


def main(argv: Sequence[str] | None = None) -> None:
    fit_output_to_the_terminal()
    options = argument_parser().parse_args(argv)
    try:
        train(options)
    except (ValueError, FloatingPointError, NotImplementedError) as error:
        sys.exit(f"error: {error}")
    except OSError as error:  # what is read has messages of its own
        sys.exit(f"error: cannot write {error.filename or 'the output'}: {error.strerror or error}")
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
