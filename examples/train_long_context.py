"""Train a small causal transformer on sequences too long for one device, over several processes and their devices.

    python examples/train_long_context.py --processes 4            # four processes of this machine
    python examples/train_long_context.py --processes 4 --data 2   # two sequences at a time, each over two devices
    python examples/train_long_context.py --processes 4            # again: goes on from the last checkpoint

The same program on several hosts: start it once on each, with the address of the first and a number of its own, and a
folder that all of them see.

    python examples/train_long_context.py --hosts 4 --host-id 2 --coordinator first-host:29500 --out /shared/long

Attention is `jax_mfa.ring_attention` over a mesh data x sequence, in zigzag order; processes meet in JAX's own runtime
(`jax.distributed`, with gloo between CPUs). One sees a progress bar with the loss; the folder `--out` receives orbax
checkpoints and `loss.png`. If a process dies, the others end with an error within `--timeout` seconds (at once, where
the connection closes), and the same command goes on from the last checkpoint, with the losses of a run that nothing
disturbed. Each process runs below a parent (`processes.py`), which says what became of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from processes import Watch, is_started, launch
    from tqdm import tqdm
    from train_char_lm import read_text

    import jax_mfa
    from jax_mfa.cli.command_line import fit_output_to_the_terminal
    from jax_mfa.context_parallel.costs import human
    from jax_mfa.flax import rotary_embedding
except ModuleNotFoundError as error:
    sys.exit(f"error: this example needs the package {error.name}: pip install -e '.[examples]'")

# float32 numbers for each token: what a layer keeps for the backward pass and what is needed beside, in widths, and the
# logits; fitted to what the compiler says (XLA's CPU backend, JAX 0.10)
KEPT, WORKING, LETTERS = 25, 5, 3 * 128
TILES = 2**23  # bytes of the tiles of scores, whatever the length


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that determines a run's losses, beside the number of devices; kept with the checkpoints."""

    text: str | None = None
    steps: int = 40
    batch: int = 1
    context: int = 4096
    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    learning_rate: float = 3e-3
    seed: int = 0
    data: int = 1

    def check(self, devices: int) -> None:
        """Raise `ValueError` that names the option at fault."""
        for name in ("steps", "batch", "context", "layers", "width", "heads", "kv_heads", "data"):
            if getattr(self, name) < 1:
                raise ValueError(f"{option(name)} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"--learning-rate must be positive and finite, got {self.learning_rate}")
        if self.width % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"--width must be an even multiple of --heads, and that of --kv-heads: got {self.width}, {self.heads} "
                f"and {self.kv_heads}"
            )
        if devices % self.data:
            raise ValueError(f"--data must divide the {devices} devices, got {self.data}")
        if self.batch % self.data:
            raise ValueError(f"--batch must be a multiple of --data, got {self.batch} and {self.data}")
        runs = 2 * (devices // self.data)
        if self.context % runs:
            raise ValueError(f"--context must be a multiple of {runs}, two runs of tokens a device, got {self.context}")

    def bytes_needed(self, devices: int) -> int:
        """What a training step takes of each device, on paper."""
        tokens = self.batch // self.data * self.context / (devices // self.data)
        numbers = tokens * (self.width * (KEPT * self.layers + WORKING) + LETTERS)
        return int(4 * numbers) + TILES


def option(name: str) -> str:
    """A setting's name on the command line."""
    return "--" + name.replace("_", "-")


def refuse_what_does_not_fit(settings: Settings, devices: int, budget: float) -> str:
    """The arithmetic of memory; `ValueError` with it where the sequence is too long for so many devices."""
    own = settings.context * settings.data // devices
    needed = settings.bytes_needed(devices)
    arithmetic = (
        f"{own:,} of {settings.context:,} tokens on each of {devices} device(s), x {settings.batch // settings.data} "
        f"sequence(s) x ({settings.width} wide x ({KEPT} * {settings.layers} layers + {WORKING}) + {LETTERS}) "
        f"x 4 bytes, and {human(TILES)} of tiles: {human(needed)}"
    )
    if needed > budget * 2**20:
        enough = next((n for n in range(devices, 4097) if settings.bytes_needed(n) <= budget * 2**20), None)
        advice = "no number of devices is enough" if enough is None else f"{enough} devices would do"
        raise ValueError(f"{arithmetic}; --budget is {human(budget * 2**20)} a device. {advice}")
    return arithmetic


# --------------------------------------------------------------------------------------------------------------- model


def initial(settings: Settings, letters: int) -> dict:
    """Random parameters, the same in every process."""
    size, width = settings.width // settings.heads, settings.width
    random = np.random.default_rng(settings.seed)

    def matrix(*shape: int, scale: float = 1.0):
        fan_in = math.prod(shape[:-1]) if len(shape) < 3 else shape[0]
        return (random.standard_normal(shape) * scale / math.sqrt(fan_in)).astype(np.float32)

    small = 0.5 / math.sqrt(2 * settings.layers)
    layer = lambda: {
        "query": matrix(width, settings.heads, size),
        "key": matrix(width, settings.kv_heads, size),
        "value": matrix(width, settings.kv_heads, size),
        "out": matrix(width, width, scale=small),
        "up": matrix(width, 4 * width),
        "down": matrix(4 * width, width, scale=small),
    }
    layers = [layer() for _ in range(settings.layers)]
    return {
        "embedding": matrix(letters, width, scale=math.sqrt(letters)),
        "layers": layers,
        "head": matrix(width, letters),
    }


def normalised(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def loss_of(parameters: dict, tokens, targets, positions, attention: Callable):
    """Mean cross entropy in nats of `[B, T]` targets after tokens that stand at positions `[T]`."""
    x = parameters["embedding"][tokens]
    for layer in parameters["layers"]:
        h = normalised(x)
        q, k, v = (jnp.einsum("btw,wnh->btnh", h, layer[name]) for name in ("query", "key", "value"))
        h = attention(rotary_embedding(q, positions), rotary_embedding(k, positions), v)
        x = x + h.reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(normalised(x) @ layer["up"]) @ layer["down"]
    return optax.softmax_cross_entropy_with_integer_labels(normalised(x) @ parameters["head"], targets).mean()


class Trainer:
    """The model over a mesh data x sequence of all devices of all processes."""

    def __init__(self, settings: Settings, text: str):
        self.settings = settings
        characters = sorted(set(text))
        numbers = {character: i for i, character in enumerate(characters)}
        self.text = np.array([numbers[character] for character in text], np.int32)
        self.letters = len(characters)
        if len(self.text) <= settings.context:
            raise ValueError(f"the text has {len(text):,} characters, --context {settings.context} needs more")
        devices = np.array(jax.devices())
        self.mesh = Mesh(devices.reshape(settings.data, -1), ("data", "sequence"))
        self.ring = self.mesh.shape["sequence"]
        self.split = NamedSharding(self.mesh, PartitionSpec("data", "sequence"))
        self.whole = NamedSharding(self.mesh, PartitionSpec())
        self.optimizer = optax.adam(settings.learning_rate)
        self.positions = jax_mfa.zigzag(np.arange(settings.context, dtype=np.int32), self.ring, axis=0)
        attention = functools.partial(
            jax_mfa.ring_attention,
            mesh=self.mesh,
            axis_name="sequence",
            batch_axis="data",
            order="zigzag",
            is_causal=True,
        )

        def update(state, tokens, targets):
            loss, gradient = jax.value_and_grad(loss_of)(
                state["parameters"], tokens, targets, self.positions, attention
            )
            changes, optimizer = self.optimizer.update(gradient, state["optimizer"])
            return {"parameters": optax.apply_updates(state["parameters"], changes), "optimizer": optimizer}, loss

        self.update = jax.jit(update, donate_argnums=0, out_shardings=(self.whole, self.whole))

    def start(self) -> dict:
        parameters = initial(self.settings, self.letters)
        return self.everywhere({"parameters": parameters, "optimizer": self.optimizer.init(parameters)})

    def everywhere(self, tree):
        """Arrays that every device holds whole."""
        place = lambda x: jax.make_array_from_callback(np.shape(x), self.whole, lambda index: np.asarray(x)[index])
        return jax.tree.map(place, tree)

    def batch(self, step: int) -> tuple[jax.Array, jax.Array]:
        """The tokens of a step and what follows each, `[B, T]`: of seed and step only, alike in all processes."""
        s = self.settings
        starts = np.random.default_rng((s.seed, step)).integers(0, len(self.text) - s.context, s.batch)
        windows = np.stack([self.text[start : start + s.context + 1] for start in starts])
        return tuple(
            jax.make_array_from_callback(x.shape, self.split, x.__getitem__)
            for x in (windows[:, :-1][:, self.positions], windows[:, 1:][:, self.positions])
        )


# --------------------------------------------------------------------------------------------------------- checkpoints


class Checkpoints:
    """State and losses in a folder that all processes see, whole at any moment."""

    def __init__(self, folder: Path, settings: Settings):
        self.settings = dataclasses.asdict(settings)
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, enable_async_checkpointing=False)
        self.manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, step: int, state: dict, losses: list[float]) -> None:
        about = {"settings": self.settings, "devices": jax.device_count(), "losses": losses}
        self.manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about))
        )
        self.manager.wait_until_finished()

    def latest(self, fresh: dict) -> tuple[int, dict, list[float]]:
        """The last step with its state and losses; step 0 and what was given where there is none."""
        step = self.manager.latest_step()
        if step is None:
            return 0, fresh, []
        about = self.manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        for name, value in self.settings.items():
            if about["settings"].get(name) != value and name != "steps":
                raise ValueError(
                    f"the checkpoint has {option(name)} {about['settings'].get(name)}, not {value}: "
                    "--overwrite starts anew"
                )
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh)
        restored = self.manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes)))
        return step, restored["state"], about["losses"]


# ------------------------------------------------------------------------------------------------------------- program


def plot_losses(path: Path, losses: Sequence[float], title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue")
    axes.set(xlabel="step", ylabel="loss (nats per character)", title=title, ylim=(0, None))
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def train(options: argparse.Namespace, settings: Settings, watch: Watch) -> None:
    """One process of the run; `ValueError` carries a message for the user."""
    devices = jax.device_count()
    settings.check(devices)
    arithmetic = refuse_what_does_not_fit(settings, devices, options.budget)
    first = jax.process_index() == 0
    say = functools.partial(print, flush=True) if first else lambda *_: None
    trainer = Trainer(settings, read_text(settings.text))
    watch.begins("reading checkpoints and compiling")
    folder = options.out / "checkpoints"
    checkpoints = Checkpoints(folder, settings)
    step, state, losses = checkpoints.latest(trainer.start())
    say(f"mesh        data {settings.data} x sequence {trainer.ring}, {jax.process_count()} process(es)")
    say(f"memory      {arithmetic}")
    program = trainer.update.lower(state, *trainer.batch(step)).compile()
    found = program.memory_analysis()
    taken = found.argument_size_in_bytes + found.temp_size_in_bytes
    say(f"compiled    {human(taken)} of memory on each device")
    if step:
        say(f"resumed     after step {step}, loss {losses[-1]:.6f}")
    try:
        with tqdm(total=settings.steps, initial=step, disable=not first, desc="training", unit="step") as bar:
            while step < settings.steps:
                watch.begins(f"at step {step + 1}")
                state, loss = program(state, *trainer.batch(step))
                losses.append(float(loss))
                step += 1
                watch.seconds = options.timeout
                bar.update()
                bar.set_postfix(loss=f"{losses[-1]:.3f}")
                if step % options.save_every == 0 or step == settings.steps:
                    watch.begins(f"writing the checkpoint of step {step}")
                    checkpoints.save(step, state, losses)
                watch.ends()
    except (RuntimeError, ValueError, OSError) as error:  # what gloo and orbax say of a process that is gone
        watch.leave(f"another process is gone, or the run failed, after step {step}: {str(error).splitlines()[0]}")
    if first:
        plot_losses(options.out / "loss.png", losses, f"{settings.context:,} tokens over {devices} devices")
    say(f"loss        {losses[0]:.6f} at first, {losses[-1]:.6f} at last, in {options.out / 'loss.png'}")


def commands(argv: Sequence[str], count: int) -> dict[int, list[str]]:
    """This program as so many processes of this machine."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = ["--hosts", str(count), "--coordinator", f"localhost:{free.getsockname()[1]}", "--host-id"]
    own = without([x for x in argv if x != "--overwrite"], "--processes")
    return {i: [sys.executable, __file__, *own, *place, str(i)] for i in range(count)}


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    helps = {
        "text": "a UTF-8 text file; default: the installed Python's licence and documentation",
        "steps": "updates",
        "batch": "sequences per update",
        "context": "characters per sequence",
        "layers": "transformer layers",
        "width": "size of a character's vector",
        "heads": "query heads",
        "kv_heads": "key/value heads, a divisor of --heads",
        "learning_rate": "of Adam",
        "seed": "of weights and batches",
        "data": "sequences that are computed at a time, each over its share of the devices",
    }
    settings = parser.add_argument_group("settings", "kept with the checkpoints; the same command goes on with them")
    for field in dataclasses.fields(Settings):
        kind = str if field.default is None else type(field.default)
        settings.add_argument(
            option(field.name), type=kind, default=field.default, help=helps[field.name] + ", default: %(default)s"
        )
    parser.add_argument("--processes", type=int, help="run as so many processes of this machine")
    parser.add_argument("--hosts", type=int, default=1, help="how many processes there are, started by hand")
    parser.add_argument("--host-id", type=int, default=0, help="which of them this is, from 0 on")
    parser.add_argument("--coordinator", help="host:port of process 0")
    parser.add_argument("--budget", type=float, default=64, help="MiB that one device may use, default: %(default)s")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints, default: %(default)s")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that a step may take, default: %(default)s")
    parser.add_argument(
        "--start-timeout", type=float, default=300, help="seconds to connect and to compile, default: %(default)s"
    )
    parser.add_argument("--out", type=Path, default=Path("results/long_context"), help="folder, default: %(default)s")
    parser.add_argument("--overwrite", action="store_true", help="start anew although --out holds checkpoints")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    fit_output_to_the_terminal()
    argv = list(sys.argv[1:] if argv is None else argv)
    options = argument_parser().parse_args(argv)
    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(options, name) for name in names})
    try:
        if options.save_every < 1 or not options.timeout > 0 or not options.start_timeout > 0:
            raise ValueError("--save-every, --timeout and --start-timeout must be positive")
        if options.processes is not None and not 1 <= options.processes <= 64:
            raise ValueError(f"--processes must lie in 1..64, got {options.processes}")
        if options.processes is not None and options.coordinator:
            raise ValueError("--processes starts them all; --coordinator is for one of several started by hand")
        if options.hosts > 1 and not options.coordinator:
            raise ValueError("--hosts needs --coordinator, the address of process 0")
        if options.overwrite and options.host_id == 0 and not is_started() and (options.out / "checkpoints").exists():
            shutil.rmtree(options.out / "checkpoints")
        options.out.mkdir(parents=True, exist_ok=True)
        if options.processes is not None and options.processes > 1:
            settings.check(options.processes)
            refuse_what_does_not_fit(settings, options.processes, options.budget)
            sys.exit(launch(commands(argv, options.processes)))
        if options.hosts > 1 and not is_started():
            sys.exit(launch({options.host_id: [sys.executable, __file__, *argv]}))
        watch = Watch(options.host_id, options.start_timeout)
        if options.hosts > 1:
            watch.begins("connecting")
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            # JAX ends a process without a word to the user when it gives up: the watch comes first
            patience = int(options.start_timeout) + 60
            jax.distributed.initialize(
                options.coordinator, options.hosts, options.host_id, initialization_timeout=patience
            )
        train(options, settings, watch)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except RuntimeError as error:  # of jax.distributed
        sys.exit(f"error: process {options.host_id} found no others: {str(error).splitlines()[0]}")
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)


def without(argv: Sequence[str], name: str) -> list[str]:
    """Arguments but for an option with a value."""
    found = []
    skip = False
    for x in argv:
        if skip or x.startswith(name + "="):
            skip = False
        elif x == name:
            skip = True
        else:
            found.append(x)
    return found


if __name__ == "__main__":
    main()
