"""Train a small protein model on distances: triangle attention, whose bias every row of the matrix of pairs shares.

    python examples/pair_attention.py               # about two minutes on two CPU cores
    python examples/pair_attention.py --dtype bfloat16
    python examples/pair_attention.py --compare     # time and memory of its attention, beside stock attention
    python examples/pair_attention.py --memory      # the compiler's memory for lengths that need not fit this machine

The blocks are Pairformer's (AlphaFold 3, Abramson et al., Nature 630:493, 2024, supplementary algorithms 12 to 17, as
Boltz-1 has them too), small: triangle multiplication, triangle attention at starting and ending node, transitions, and
single attention with pair bias. The chains are generated, not real: traces of alpha carbons with ideal helices, strands
and turns, each letter of the sequence a bond angle and a torsion. So the sequence says all, but where two residues lie
to each other only all letters between them say together.

One sees a progress bar with the loss; the folder `--out` receives `distances.png`: predicted and true distances of
chains that were not trained on, and the loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

try:
    import jax
    import jax.numpy as jnp
    import matplotlib
    import numpy as np
    import optax
    from flax import nnx
    from tqdm import tqdm

    import jax_mfa
    from jax_mfa.cli.command_line import fit_output_to_the_terminal
    from jax_mfa.tuning import timing
except ModuleNotFoundError as error:
    sys.exit(f"error: this example needs the package {error.name}: pip install -e '.[examples]'")

# Bond angle and torsion between alpha carbons, in degrees, that a letter gives its place in the chain: helix and strand
# as ideal ones have them (Levitt, J. Mol. Biol. 104:59, 1976), and turns
LETTERS = ((91, 50), (124, -170), (90, -60), (100, 120), (110, -20), (95, 180))
HELIX, STRAND, TURNS = 0, 1, (2, 3, 4, 5)
BOND = 3.8  # ångströms between neighbours
EDGES = np.linspace(3, 39, 37)  # of the bins of distances; the last bin is open


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that determines a run's losses."""

    steps: int = 150
    batch: int = 4
    length: int = 48
    blocks: int = 2
    dtype: str = "float32"
    learning_rate: float = 3e-3
    seed: int = 0


# --------------------------------------------------------------------------------------------------------------- chains


def sequence(random: np.random.Generator, length: int) -> np.ndarray:
    """Letters: helices of 6 to 12 and strands of 4 to 8 residues, with turns of 2 or 3 between them."""
    letters: list[int] = []
    while len(letters) < length:
        helix = random.random() < 0.5
        letters += [HELIX if helix else STRAND] * random.integers(*((6, 13) if helix else (4, 9)))
        letters += list(random.choice(TURNS, random.integers(2, 4)))
    return np.array(letters[:length], np.int32)


def trace(letters: np.ndarray) -> np.ndarray:
    """Positions of the alpha carbons `[T, 3]`, each placed by the bond angle and torsion of its letter."""
    angles = np.deg2rad(np.array(LETTERS, np.float64))[letters]
    at = [np.zeros(3), np.array([BOND, 0, 0]), np.array([BOND, BOND, 0])]
    for angle, torsion in angles[3:]:
        along = at[-1] - at[-2]
        along /= np.linalg.norm(along)
        normal = np.cross(at[-2] - at[-3], along)
        normal /= np.linalg.norm(normal)
        across = np.cross(normal, along)
        step = -np.cos(angle) * along + np.sin(angle) * (np.cos(torsion) * across + np.sin(torsion) * normal)
        at.append(at[-1] + BOND * step)
    return np.stack(at[: len(letters)])


def chains(seed: int, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Letters `[count, T]` and distances `[count, T, T]` in ångströms."""
    random = np.random.default_rng(seed)
    letters = np.stack([sequence(random, length) for _ in range(count)])
    at = np.stack([trace(x) for x in letters])
    return letters, np.linalg.norm(at[:, :, None] - at[:, None], axis=-1)


# ---------------------------------------------------------------------------------------------------------------- model

Attention = Callable[..., jax.Array]  # (query, key, value, bias), as jax.nn.dot_product_attention has them


class GatedAttention(nnx.Module):
    """Attention whose output is gated, with a bias of the pairs (algorithms 14, 15 and 24)."""

    def __init__(self, width: int, pair: int, heads: int, size: int, attend: Attention, dtype: str, rngs: nnx.Rngs):
        linear = functools.partial(nnx.LinearGeneral, dtype=dtype, use_bias=False, rngs=rngs)
        self.query, self.key, self.value, self.gate = (linear(width, (heads, size)) for _ in range(4))
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.pair_norm = nnx.LayerNorm(pair, dtype=dtype, rngs=rngs)
        self.bias = linear(pair, heads)
        self.out = linear((heads, size), width, axis=(-2, -1), kernel_init=nnx.initializers.zeros)
        self.attend = attend

    def __call__(self, x: jax.Array, pair: jax.Array) -> jax.Array:
        """x: `[T, width]`, or `[rows, T, width]` whose rows share the bias; pair: `[T, T, width]`."""
        x = self.norm(x)
        bias = jnp.moveaxis(self.bias(self.pair_norm(pair)), -1, 0)  # [N, T, T]
        bias = bias[None] if x.ndim == 3 else bias
        found = self.attend(self.query(x), self.key(x), self.value(x), bias)
        return self.out(found * jax.nn.sigmoid(self.gate(x)))


class TriangleMultiplication(nnx.Module):
    """Each edge from the edges that make a triangle with it (algorithms 12 and 13)."""

    def __init__(self, pair: int, equation: str, dtype: str, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, pair, dtype=dtype, use_bias=False, rngs=rngs)
        norm = functools.partial(nnx.LayerNorm, pair, dtype=dtype, rngs=rngs)
        self.norm, self.out_norm, self.equation = norm(), norm(), equation
        self.sides = linear(4 * pair)
        self.gate, self.out = linear(pair), linear(pair, kernel_init=nnx.initializers.zeros)

    def __call__(self, pair: jax.Array) -> jax.Array:
        x = self.norm(pair)
        a, b, gate_a, gate_b = jnp.split(self.sides(x), 4, axis=-1)
        product = jnp.einsum(self.equation, a * jax.nn.sigmoid(gate_a), b * jax.nn.sigmoid(gate_b))
        return self.out(self.out_norm(product / pair.shape[0])) * jax.nn.sigmoid(self.gate(x))


class Transition(nnx.Module):
    """Two layers with a SwiGLU between them (algorithm 11)."""

    def __init__(self, width: int, dtype: str, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, dtype=dtype, use_bias=False, rngs=rngs)
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.up, self.down = linear(width, 4 * width), linear(2 * width, width, kernel_init=nnx.initializers.zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.up(self.norm(x)), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Block(nnx.Module):
    """Pairformer's (algorithm 17), without dropout."""

    def __init__(self, single: int, pair: int, attend: Attention, dtype: str, rngs: nnx.Rngs):
        triangle = functools.partial(GatedAttention, pair, pair, 4, pair // 4, attend, dtype, rngs)
        self.outgoing = TriangleMultiplication(pair, "ikc,jkc->ijc", dtype, rngs)
        self.incoming = TriangleMultiplication(pair, "kic,kjc->ijc", dtype, rngs)
        self.starting, self.ending = triangle(), triangle()
        self.pair_transition = Transition(pair, dtype, rngs)
        self.single = GatedAttention(single, pair, 4, single // 4, attend, dtype, rngs)
        self.transition = Transition(single, dtype, rngs)

    def __call__(self, single: jax.Array, pair: jax.Array) -> tuple[jax.Array, jax.Array]:
        pair += self.outgoing(pair)
        pair += self.incoming(pair)
        pair += self.starting(pair, pair)
        turned = pair.swapaxes(0, 1)
        pair += self.ending(turned, turned).swapaxes(0, 1)
        pair += self.pair_transition(pair)
        single += self.single(single, pair)
        return single + self.transition(single), pair


class Model(nnx.Module):
    """Letters of one chain to logits over bins of distances, `[T]` to `[T, T, bins]`."""

    SINGLE, PAIR, FARTHEST = 64, 32, 32

    def __init__(self, blocks: int, attend: Attention, dtype: str, rngs: nnx.Rngs):
        embed = functools.partial(nnx.Embed, dtype=dtype, rngs=rngs)
        self.letter = embed(len(LETTERS), self.SINGLE)
        self.left, self.right = embed(len(LETTERS), self.PAIR), embed(len(LETTERS), self.PAIR)
        self.place = embed(2 * self.FARTHEST + 1, self.PAIR)
        block = functools.partial(Block, self.SINGLE, self.PAIR, attend, dtype, rngs)
        self.blocks = nnx.List([block() for _ in range(blocks)])
        self.from_single = nnx.Linear(self.SINGLE, 2 * self.PAIR, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(self.PAIR, rngs=rngs)
        self.bins = nnx.Linear(self.PAIR, len(EDGES) + 1, rngs=rngs)

    def __call__(self, letters: jax.Array) -> jax.Array:
        t = jnp.arange(letters.shape[0])
        apart = jnp.clip(t[None] - t[:, None], -self.FARTHEST, self.FARTHEST) + self.FARTHEST
        single = self.letter(letters)
        pair = self.place(apart) + self.left(letters)[:, None] + self.right(letters)[None]
        for block in self.blocks:
            single, pair = block(single, pair)
        left, right = jnp.split(self.from_single(single), 2, axis=-1)
        pair += left[:, None] + right[None]
        return self.bins(self.norm((pair + pair.swapaxes(0, 1)).astype(jnp.float32)))


def expected_distance(logits: jax.Array) -> jax.Array:
    """Å, of logits over bins: the mean of their middles; the last bin counts as its edge."""
    middles = np.concatenate([[0], (EDGES[1:] + EDGES[:-1]) / 2, EDGES[-1:]])
    return jax.nn.softmax(logits) @ middles


class Trainer:
    def __init__(self, settings: Settings, attend: Attention) -> None:
        self.settings = settings
        self.graph, self.weights = nnx.split(
            Model(settings.blocks, attend, settings.dtype, nnx.Rngs(settings.seed)), nnx.Param
        )
        rate = optax.cosine_decay_schedule(settings.learning_rate, max(settings.steps, 1), 0.05)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
        self.state = self.optimizer.init(self.weights)
        self.losses: list[float] = []

        def loss(weights, letters, bins):
            logits = self.logits(weights, letters)
            return optax.softmax_cross_entropy_with_integer_labels(logits, bins).mean()

        @jax.jit
        def step(weights, state, letters, bins):
            value, gradient = jax.value_and_grad(loss)(weights, letters, bins)
            updates, state = self.optimizer.update(gradient, state, weights)
            return optax.apply_updates(weights, updates), state, value

        self._step = step

    def logits(self, weights, letters: jax.Array) -> jax.Array:
        """Of several chains: a bias is mapped with its chain, and never repeated for the rows that share it."""
        return jax.vmap(lambda x: nnx.merge(self.graph, weights)(x))(letters)

    def step(self) -> float:
        s = self.settings
        letters, distances = chains(1_000_000 * (s.seed + 1) + len(self.losses), s.batch, s.length)
        self.weights, self.state, value = self._step(self.weights, self.state, letters, np.digitize(distances, EDGES))
        self.losses.append(float(value))
        return self.losses[-1]

    def predict(self, letters: np.ndarray) -> np.ndarray:
        return np.asarray(expected_distance(jax.jit(self.logits)(self.weights, letters)))


# -------------------------------------------------------------------------------------------------------------- compare


def stock(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, bias=bias)


def triangle(attend: Attention) -> Callable[..., Any]:
    """The gradient of attention whose T rows share a bias, with that of the bias."""
    return jax.jit(jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), argnums=(0, 1, 2, 3)))


def shapes(length: int, heads: int, size: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    shaped = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    return (*(shaped(length, length, heads, size) for _ in range(3)), shaped(1, heads, length, length))


def compiled(attend: Attention, arguments: Sequence[jax.ShapeDtypeStruct]) -> tuple[Any, int]:
    """The program of that, and the bytes that it takes beside arguments and results, as the compiler reports them."""
    program = triangle(attend).lower(*arguments).compile()
    return program, program.memory_analysis().temp_size_in_bytes


def compare(ours: Attention, lengths: Sequence[int], dtype: str, rounds: int = 3) -> Iterator[str]:
    """Time and memory of a training step of triangle attention, 4 heads of 32, by length."""
    yield f"triangle attention and its gradients, B = T, 4 heads of 32, {dtype}"
    yield f"{'T':>6} {'stock ms':>10} {'jax_mfa ms':>10} {'stock MiB':>10} {'jax_mfa MiB':>11}"
    for length in lengths:
        abstract = shapes(length, 4, 32, dtype)
        keys = jax.random.split(jax.random.key(length), 4)
        arrays = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, abstract)]
        programs, bytes_taken = zip(*(compiled(attend, abstract) for attend in (stock, ours)))
        calls = {i: functools.partial(timing.call, program, arrays) for i, program in enumerate(programs)}
        times = [1e3 * min(x) for x in timing.timed(calls, rounds, 0.0).values()]
        room = [x / 2**20 for x in bytes_taken]
        yield f"{length:6} {times[0]:10.1f} {times[1]:10.1f} {room[0]:10.0f} {room[1]:11.0f}"


def memory(ours: Attention, lengths: Sequence[int], dtype: str) -> Iterator[str]:
    """Temporary memory of the same, as a table for a document."""
    yield f"| T | stock `jax.nn`, {dtype} | jax_mfa | query, key, value and bias themselves |"
    yield "|---|---|---|---|"
    for length in lengths:
        abstract = shapes(length, 4, 32, dtype)
        held = sum(x.size * x.dtype.itemsize for x in abstract)
        room = [compiled(attend, abstract)[1] for attend in (stock, ours)]
        yield f"| {length} | " + " | ".join(f"{x / 2**20:,.0f} MiB" for x in (*room, held)) + " |"


# ----------------------------------------------------------------------------------------------------------------- main


def draw(trainer: Trainer, path: Path) -> float:
    """Pictures of three new chains, and the mean error of all distances in ångströms."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    letters, true = chains(7, 12, trainer.settings.length)
    true = np.minimum(true, EDGES[-1])
    found = trainer.predict(letters)
    figure, axes = pyplot.subplots(2, 4, figsize=(13, 6.4), layout="constrained")
    for i in range(3):
        for row, (name, x) in enumerate((("true", true[i]), ("predicted", found[i]))):
            image = axes[row, i].imshow(x, cmap="viridis_r", vmin=0, vmax=EDGES[-1])
            axes[row, i].set_title(f"chain {i + 1}, {name}")
    figure.colorbar(image, ax=axes[:, 2], label="distance, angstrom")
    axes[0, 3].plot(trainer.losses)
    axes[0, 3].set(title="loss", xlabel="step", ylabel="nats for each pair")
    axes[1, 3].plot(true.ravel()[::7], found.ravel()[::7], ".", markersize=1, alpha=0.4)
    axes[1, 3].set(title="all pairs", xlabel="true distance, angstrom", ylabel="predicted, angstrom")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return float(np.abs(found - true).mean())


def argument_parser() -> argparse.ArgumentParser:
    usual = Settings()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    for field in dataclasses.fields(Settings):
        choices = ("float32", "bfloat16") if field.name == "dtype" else None
        name, default = f"--{field.name.replace('_', '-')}", getattr(usual, field.name)
        parser.add_argument(name, type=type(default), default=default, choices=choices, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("results/pair_attention"), help="default: %(default)s")
    parser.add_argument(
        "--compare", action="store_true", help="time and memory beside stock attention, and no training"
    )
    parser.add_argument("--memory", action="store_true", help="memory alone, of longer chains: compiles, runs nothing")
    parser.add_argument("--lengths", type=int, nargs="+", help="of --compare and --memory")
    parser.add_argument(
        "--implementation", choices=("metal", "blockwise", "reference"), help="default: jax_mfa's choice"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    fit_output_to_the_terminal()
    parser = argument_parser()
    options = parser.parse_args(arguments)
    settings = Settings(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)})
    if min(settings.steps, settings.batch, settings.blocks, *(options.lengths or ())) < 1 or settings.length < 4:
        parser.error("--steps, --batch, --blocks and --lengths must be positive, and --length at least 4")
    ours = functools.partial(jax_mfa.dot_product_attention, implementation=options.implementation)
    if options.compare or options.memory:
        table, lengths = (memory, (256, 512, 1024, 2048)) if options.memory else (compare, (64, 128, 256))
        for line in table(ours, options.lengths or lengths, settings.dtype):
            print(line, flush=True)
        return 0
    try:  # before the training
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    trainer = Trainer(settings, ours)
    print(f"{sum(x.size for x in jax.tree.leaves(trainer.weights))} weights, chains of {settings.length} residues")
    try:
        with tqdm(total=settings.steps, desc="training", unit="step", dynamic_ncols=True) as bar:
            for _ in range(settings.steps):
                bar.set_postfix(loss=f"{trainer.step():.3f}", refresh=False)
                bar.update()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    error = draw(trainer, options.out / "distances.png")
    print(f"loss {trainer.losses[0]:.3f} -> {trainer.losses[-1]:.3f}; new chains: mean error {error:.2f} angstrom")
    print(f"wrote {options.out / 'distances.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
