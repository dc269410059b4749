"""Generate text with a Llama-style decoder: continuous batching over a paged cache, on one machine.

    python examples/generate.py "A class is" "To open a file"    # trains a small model first, for about a minute
    python examples/generate.py --model folder "Once upon a time" --temperature 0.8 --top-p 0.95 --cache int8
    python examples/generate.py --speculative --compare          # with a draft; and beside stock attention
    python examples/generate.py --perplexity                     # what each kind of cache costs
    python examples/generate.py --serve                          # the OpenAI interface, at http://127.0.0.1:8000/v1

`--model` names a folder in Hugging Face's format (config.json, safetensors, tokenizer.json) of a Llama, Qwen2, Qwen3 or
Gemma-2. Without it a small Llama is trained on Python's own documentation and written in that format to
`results/generate/model`, to be found there the next time. A single prompt is written as it comes; several, when they
are done. What is measured stands at the end. The server takes a bearer token from the variable GENERATE_API_KEY.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

try:
    import flax  # noqa: F401 (the parts need them)
    import optax  # noqa: F401
    import safetensors  # noqa: F401
    import tokenizers  # noqa: F401
    from tqdm import tqdm

    from jax_mfa.cli.command_line import fit_output_to_the_terminal
except ModuleNotFoundError as error:
    sys.exit(f"error: this example needs the package {error.name}: pip install -e '.[examples]'")

import jax
import numpy as np
from generation import training, weights
from generation.dense import Dense
from generation.engine import Engine
from generation.model import Decoder
from generation.runner import PLAIN, QUANTIZED, CacheKind, Piece, Runner
from generation.sampling import Sampling
from generation.scheduler import Request
from generation.speculative import Draft
from generation.text import Writer
from generation.tokenizer import Text

PROMPTS = ("The import statement", "A class is", "If the object")
GROUPS = {"int8": (32, 64), "fp8": (64,), "int4": (8, 16, 32, 64)}  # channels a scale, of which --perplexity tells
WINDOW = 256  # tokens that it sees at a time
JIT = jax.jit


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("prompts", nargs="*", default=list(PROMPTS), help="texts to go on with")
    what = parser.add_argument_group("the model")
    what.add_argument("--model", type=Path, help="a folder in Hugging Face's format; default: a small one, trained")
    what.add_argument("--out", type=Path, default=Path("results/generate/model"), help="of the small one: %(default)s")
    what.add_argument("--train-steps", type=int, default=training.Size.steps, help="default: %(default)s")
    what.add_argument("--dtype", choices=PLAIN, help="of weights and computation, default: the folder's")
    what.add_argument("--implementation", choices=("metal", "blockwise", "reference"), help="default: jax_mfa's choice")
    tokens = parser.add_argument_group("which tokens follow")
    tokens.add_argument("--tokens", type=int, default=64, help="at most, for each prompt, default: %(default)s")
    tokens.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest, default: %(default)s")
    tokens.add_argument("--top-k", type=int, default=0, help="only so many of the likeliest, default: all")
    tokens.add_argument("--top-p", type=float, default=1.0, help="only the likeliest of this probability, default: all")
    tokens.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    tokens.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a text; may be repeated")
    batch = parser.add_argument_group("the batch and its cache")
    batch.add_argument("--cache", choices=PLAIN + QUANTIZED, default="float16", help="default: %(default)s")
    batch.add_argument("--cache-group", type=int, default=64, help="channels a scale, default: %(default)s")
    batch.add_argument("--pages", type=int, help="of the cache, default: for a quarter of the batch at full length")
    batch.add_argument("--page-size", type=int, default=16, help="tokens, default: %(default)s")
    batch.add_argument("--batch", type=int, default=16, help="requests in it at a time, default: %(default)s")
    batch.add_argument("--step-tokens", type=int, default=256, help="of a step at most, default: %(default)s")
    batch.add_argument("--length", type=int, default=2048, help="of a sequence at most, default: %(default)s")
    batch.add_argument("--speculative", action="store_true", help="let a draft guess ahead")
    batch.add_argument("--draft", type=Path, help="its folder; default: the folder draft beside the model's files")
    batch.add_argument("--guesses", type=int, default=4, help="tokens that it guesses ahead, default: %(default)s")
    other = parser.add_argument_group("what else to do")
    other.add_argument("--compare", action="store_true", help="with stock attention, a request at a time")
    other.add_argument("--perplexity", action="store_true", help="of held-out text, by kind of cache; then end")
    other.add_argument("--serve", action="store_true", help="the OpenAI interface")
    other.add_argument("--host", default="127.0.0.1", help="where --serve listens, default: %(default)s")
    other.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    other.add_argument("--most-waiting", type=int, default=256, help="requests beyond the batch, default: %(default)s")
    other.add_argument("--most-body", type=int, default=1 << 20, help="bytes of a request, default: %(default)s")
    other.add_argument("--no-warm-up", action="store_true", help="serve before all programs are compiled")
    return parser


def check(options: argparse.Namespace) -> None:
    """Raise `ValueError` that names the option at fault."""
    least_one = ("tokens", "pages", "batch", "step_tokens", "length", "guesses", "cache_group", "most_body")
    for name in (*least_one, "train_steps"):
        x = getattr(options, name)
        if x is not None and x < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {x}")
    if options.most_waiting < 0:
        raise ValueError(f"--most-waiting must not be negative, got {options.most_waiting}")
    if options.step_tokens < options.batch:
        raise ValueError(f"--step-tokens must be at least --batch, got {options.step_tokens} and {options.batch}")
    if options.page_size not in (8, 16, 32, 64, 128, 256):
        raise ValueError(f"--page-size must be a power of two from 8 to 256, got {options.page_size}")
    if not 0 <= options.port < 2**16:
        raise ValueError(f"--port must lie in 0..65535, got {options.port}")
    if options.draft and not options.speculative:
        raise ValueError("--draft is for --speculative")
    if options.perplexity and options.model:
        raise ValueError("--perplexity is of the text that the small model did not see: leave --model out")
    if not all(options.prompts) or not all(options.stop):
        raise ValueError("prompts and --stop must not be empty")


def model_folder(options: argparse.Namespace) -> Path:
    """The one that was named, or the small one, trained if need be."""
    if options.model is not None:
        return options.model
    if not (options.out / "config.json").is_file():
        print("no --model: training a small one on Python's documentation, for about a minute", flush=True)
        start = time.perf_counter()
        training.make(options.out, training.Size(steps=options.train_steps))
        print(f"trained     in {time.perf_counter() - start:.0f} s, written to {options.out} in Hugging Face's format")
    else:
        print(f"no --model: {options.out}, which was trained before")
    return options.out


def make_runner(decoder: Decoder, options: argparse.Namespace, kind: CacheKind, guesses: int = 0) -> Runner:
    length = min(options.length, decoder.config.context)
    pages = options.pages or max(-(-length * options.batch // (4 * options.page_size)), -(-length // options.page_size))
    return Runner(
        decoder, pages=pages, page_size=options.page_size, most_sequences=options.batch,
        most_tokens=max(options.step_tokens, options.batch * (guesses + 1)), most_length=length, guesses=guesses,
        kind=kind, implementation=options.implementation, jit=JIT,
    )  # fmt: skip


def make_engine(decoder: Decoder, folder: Path, options: argparse.Namespace) -> Engine:
    kind = CacheKind(options.cache, options.cache_group)
    guesses = options.guesses if options.speculative else 0
    runner, draft = make_runner(decoder, options, kind, guesses), None
    if options.speculative:
        small = weights.load(options.draft or folder / "draft", options.dtype)
        if small.config.vocabulary != decoder.config.vocabulary:
            sizes = f"{small.config.vocabulary} and {decoder.config.vocabulary}"
            raise ValueError(f"the draft must have the model's vocabulary, got {sizes} tokens")
        draft = Draft(make_runner(small, options, kind), options.guesses, options.step_tokens)
    return Engine(runner, options.batch, options.step_tokens, draft)


def describe(decoder: Decoder, engine: Engine, options: argparse.Namespace) -> None:
    config, runner = decoder.config, engine.runner
    size = sum(x.size for x in jax.tree.leaves(runner._state))
    print(f"model       {config.family}, {config.layers} layers, {size:,} parameters in {decoder.dtype}")
    book = runner.book
    group = f", {options.cache_group} channels a scale" if options.cache in QUANTIZED else ""
    print(
        f"cache       {options.cache}{group}: {book.pages} pages of {book.page_size} tokens, "
        f"{runner.cache_bytes / 2**20:.1f} MiB"
    )
    print(f"attention   jax_mfa {options.implementation or 'as it chooses'}, on {jax.devices()[0]}", flush=True)


# ------------------------------------------------------------------------------------------------------------ programs


def generate(options: argparse.Namespace, folder: Path) -> None:
    text, decoder = Text(folder), weights.load(folder, options.dtype)
    engine = make_engine(decoder, folder, options)
    describe(decoder, engine, options)
    ends = frozenset(decoder.config.end_tokens)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    requests = [
        Request(text.encode(x), options.tokens, dataclasses.replace(sampling, seed=options.seed + i), ends)
        for i, x in enumerate(options.prompts)
    ]
    writers = {x: Writer(text, x, options.stop) for x in requests}
    alone = len(requests) == 1
    start = time.perf_counter()
    for request in requests:
        engine.submit(request)
    if alone:
        print(f"\n{options.prompts[0]}", end="", flush=True)
    total = sum(x.max_tokens for x in requests)
    with tqdm(total=total, desc="writing", unit="token", dynamic_ncols=True, disable=alone, leave=False) as bar:
        while not engine.idle:
            for request, tokens in engine.step():
                written = writers[request].take(tokens)
                if alone:
                    print(written, end="", flush=True)
                bar.update(len(tokens))
                if writers[request].stopped and request.finish is None:
                    engine.finish(request, "stop")
            bar.set_postfix(running=len(engine.scheduler.running), free=engine.scheduler.book.free_pages, refresh=False)
    seconds = time.perf_counter() - start
    if alone:
        print(writers[requests[0]].end(), end="\n\n")
    else:
        for prompt, request in zip(options.prompts, requests):
            writers[request].end()
            print(f"\n{prompt}{writers[request].written}")
        print()
    for request in requests:
        if request.error:
            raise ValueError(f"a request failed: {request.error}")
    count = sum(len(x.generated) for x in requests)
    firsts = [x.first_token - x.arrived for x in requests if x.first_token is not None]
    print(f"first token {1000 * min(firsts):,.0f} to {1000 * max(firsts):,.0f} ms, compiling included")
    print(f"generated   {count} tokens in {engine.counts.steps} steps, {count / seconds:,.1f} tokens/s")
    shared = engine.counts.shared_tokens
    print(f"prompts     {engine.counts.prompt_tokens} tokens computed, {shared} found in the cache")
    compiled = sum(engine.runner.programs.values())
    buckets, preemptions = len(engine.runner.programs), engine.scheduler.preemptions
    print(f"programs    {compiled} for {buckets} buckets; {preemptions} preemptions")
    if options.speculative:
        print(f"draft       {engine.counts.right_guesses} of {engine.counts.guessed_tokens} guesses right")
    if options.compare:
        compare(options, decoder, engine, requests)


def compare(options: argparse.Namespace, decoder: Decoder, engine: Engine, requests: Sequence[Request]) -> None:
    """The same requests one at a time, through stock attention and a padded cache; and all again in a batch. Both
    twice, since at first there is something to compile."""
    dtype = options.cache if options.cache in PLAIN else "float16"
    if dtype != options.cache:
        print(f"stock has no cache of {options.cache}: {dtype} instead")
    stock, speed = Dense(decoder, engine.runner.most_length, dtype, stock=True, jit=JIT), {}
    for _ in range(2):
        again = [Request(x.prompt, x.max_tokens, x.sampling, x.end_tokens) for x in requests]
        start = time.perf_counter()
        batch = engine.run(again)
        speed["jax_mfa, batched"] = sum(map(len, batch)) / (time.perf_counter() - start)
        start = time.perf_counter()
        alone = [stock.generate(x.prompt, x.max_tokens, x.sampling, x.end_tokens) for x in requests]
        speed["stock, one by one"] = sum(map(len, alone)) / (time.perf_counter() - start)
    print("compared    " + "; ".join(f"{name}: {x:,.1f} tokens/s" for name, x in speed.items()))
    same = [next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), len(x)) for x, y in zip(batch, alone)]
    counts = [str(len(x)) for x in alone]
    print(f"            the same tokens up to number {', '.join(map(str, same))} of {', '.join(counts)}")


def perplexity(decoder: Decoder, tokens: Sequence[int], kind: CacheKind, page_size=16, implementation=None) -> float:
    """Of each token after those before it in its window, all read from the cache."""
    starts = range(0, len(tokens) - 1, WINDOW)
    pages = -(-WINDOW // page_size)
    runner = Runner(
        decoder, pages=pages, page_size=page_size, most_sequences=1, most_tokens=WINDOW, most_length=WINDOW,
        kind=kind, implementation=implementation, jit=JIT,
    )  # fmt: skip
    found = []
    for start in starts:
        chunk = list(tokens[start : start + WINDOW])
        number = runner.book.allocate()
        where = runner.book.reserve([number], [len(chunk)])
        found.append(runner.log_probabilities([Piece(number, chunk, 0, where)]))
        runner.book.free(number)
    return float(np.exp(-np.concatenate(found).mean()))


def tell_perplexities(options: argparse.Namespace, folder: Path) -> None:
    text, decoder = Text(folder), weights.load(folder, options.dtype)
    _, held_out = training.split(training.local_text())
    tokens = text.encode(held_out)[:8192]
    size, facts = decoder.config.head_size, (options.page_size, options.implementation)
    kinds = [CacheKind(x) for x in PLAIN]
    kinds += [CacheKind(x, group) for x, groups in GROUPS.items() for group in groups if group <= size]
    base = None
    print(f"perplexity of {len(tokens):,} tokens of text that was held out; heads of {size} channels")
    print(f"{'cache':10} {'channels a scale':>16} {'bytes a token':>13} {'perplexity':>10} {'change':>8}", flush=True)
    for kind in kinds:
        found = perplexity(decoder, tokens, kind, *facts)
        base = base or found
        caches = kind.create(decoder, 1, options.page_size)
        stored = sum(x.nbytes for cache in caches for x in jax.tree.leaves(cache)) / options.page_size
        group = kind.group if kind.name in QUANTIZED else "-"
        print(f"{kind.name:10} {group:>16} {stored:13,.0f} {found:10.4f} {found / base - 1:+8.3%}", flush=True)


def serve(options: argparse.Namespace, folder: Path) -> None:
    try:
        from generation.server import KEY_VARIABLE, Interface, Limits, Server
        from generation.service import Service
    except ModuleNotFoundError as error:
        raise ValueError(f"--serve needs the package {error.name}: pip install -e '.[serve]'") from None
    text, decoder = Text(folder), weights.load(folder, options.dtype)
    engine = make_engine(decoder, folder, options)
    describe(decoder, engine, options)
    if not options.no_warm_up:
        sizes = [(x, b, t) for x in (engine.runner, engine.draft and engine.draft.runner) if x for b, t in x.buckets()]
        for runner, b, t in tqdm(sizes, desc="compiling", unit="program", dynamic_ncols=True):
            runner.warm_up(b, t)
    service = Service(engine, options.most_waiting)
    limits, key = Limits(options.most_body), os.environ.get(KEY_VARIABLE, "")
    interface = Interface(service, text, folder.resolve().name, limits, key)
    if not key and options.host not in ("127.0.0.1", "localhost", "::1"):
        print(f"warning: {options.host} is open to others, and {KEY_VARIABLE} is not set", file=sys.stderr)
    service.start()
    print(f"serving     http://{options.host}:{options.port}/v1, model {interface.model}", flush=True)
    Server(interface, options.host, options.port).run()
    if service.failed:
        sys.exit(f"error: {service.failed}")


def main(argv: Sequence[str] | None = None) -> None:
    fit_output_to_the_terminal()
    options = argument_parser().parse_args(argv)
    try:
        check(options)
        folder = model_folder(options)
        (tell_perplexities if options.perplexity else serve if options.serve else generate)(options, folder)
    except (ValueError, NotImplementedError) as error:
        sys.exit(f"error: {error}")
    except OSError as error:  # what is read has messages of its own
        sys.exit(f"error: cannot write {error.filename or 'the output'}: {error.strerror or error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")


if __name__ == "__main__":
    main()
