"""The generation example but for its server: the decoder is `transformers`', and paged, batched, preempted, guessed and
streamed text is what one request alone gets from a padded cache and stock attention."""

import dataclasses
import functools
import json
import os
import pathlib
import random
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as huggingface
from flax import nnx
from harness import assert_allclose, quick_jit
from safetensors.flax import load_file, save_file

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import generate
from generation import config as configs
from generation import model, sampling, training, weights
from generation import tokenizer as tokenizers
from generation.dense import Dense
from generation.detokenizer import Detokenizer
from generation.engine import Engine
from generation.runner import CacheKind, Runner
from generation.sampling import GREEDY, Sampling
from generation.scheduler import Request
from generation.speculative import Draft
from generation.text import Writer

FACTS = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 96,
}
DRAWN = Sampling(0.9, 20, 0.9, seed=5)


@functools.cache
def decoder(seed=0, **facts):
    return model.Decoder(configs.from_json({**FACTS, **facts}), rngs=nnx.Rngs(seed))


@functools.cache
def alone(prompt, count, choice=GREEDY, dtype="float32"):
    """What a prompt gets from stock attention over a padded cache."""
    return dense(dtype).generate(list(prompt), count, choice)


@functools.cache
def dense(dtype):
    return Dense(decoder(), 96, dtype, stock=True, jit=quick_jit)


def prompts(*lengths):
    rng = np.random.default_rng(3)
    return [tuple(rng.integers(0, 97, n).tolist()) for n in lengths]


@functools.cache
def runner(kind="float32", guesses=0, rows=(4, 32), draws=0, jit=quick_jit):
    """Compiled once for all tests, with two programs: single tokens, and prompts beside them."""
    made = Runner(
        decoder(draws), pages=16, page_size=8, most_sequences=4, most_tokens=32, most_length=96, guesses=guesses,
        kind=CacheKind(kind, 16), jit=jit,
    )  # fmt: skip
    made.sequence_buckets, made.row_buckets = [4], {4: list(rows)}
    return made


def engine(kind="float32", sequences=4, tokens=32, guesses=0, draft=None):
    made = runner(kind, guesses, (4 * (guesses + 1), 32))
    made.reset()
    small = None
    if draft is not None:
        small = Draft(runner(kind, draws=draft, rows=(4, 32)), guesses, tokens)
        small.reset()
    return Engine(made, sequences, tokens, small)


# --- the decoder

FAMILIES = {
    "llama": ("Llama", {}),
    "llama 3.1": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"attention_bias": True}),
    "gemma2": ("Gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    family, facts = FAMILIES[name]
    own = {k: v for k, v in FACTS.items() if k != "model_type"}
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, f"{family}Config")(**own, **facts), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for x in theirs.parameters():  # norms and biases too
            x += 0.2 * torch.randn_like(x)
    theirs.save_pretrained(tmp_path)
    tokens = np.array(prompts(23, 23))
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits.numpy()
    ours = weights.load(tmp_path)
    positions = jnp.broadcast_to(jnp.arange(23), tokens.shape)
    got = quick_jit(lambda tokens: ours.logits(ours(tokens, positions, model.whole())))(tokens)
    assert np.abs(wanted).max() > 0.5
    assert_allclose(got, wanted, rtol=0, atol=1e-4)


def test_a_folder_is_read_as_it_was_written(tmp_path):
    config = dataclasses.replace(decoder().config, end_tokens=(3, 5))
    (tmp_path / "config.json").write_text(json.dumps(configs.to_json(config)))
    weights.save(tmp_path, decoder())
    again = weights.load(tmp_path)
    assert again.config == config
    for a, b in zip(jax.tree.leaves(nnx.state(again)), jax.tree.leaves(nnx.state(decoder()))):
        np.testing.assert_array_equal(a, b)
    assert weights.load(tmp_path, "bfloat16").dtype == jnp.bfloat16

    whole = (tmp_path / "model.safetensors").read_bytes()
    for facts, said in (
        ({"num_hidden_layers": 1}, r"holds model\.layers\.1.*does not have"),
        ({"num_hidden_layers": 3}, r"lacks 9 weights, the first of them model\.layers\.2"),
        ({"intermediate_size": 65}, r"must have shape \[.*65.*\], got \[.*64.*\]"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**FACTS, **facts}))
        with pytest.raises(ValueError, match=said):
            weights.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="is no safetensors file, or is damaged"):
        weights.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="there is no such file"):
        weights.load(tmp_path)


@pytest.mark.parametrize(
    "facts, said",
    [
        ({"model_type": "mamba"}, "model_type must be one of llama, .* got 'mamba'"),
        ({"hidden_size": None}, "hidden_size must be a positive int, got None"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads, got 4 and 3"),
        ({"hidden_act": "relu"}, "hidden_act must be one of"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling must be of the type"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling must have a number factor"),
        ({"rope_theta": "a"}, "rope_theta must be a positive float, got 'a'"),
        ({"rope_scaling": [1]}, r"rope_scaling must be an object, got \[1\]"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive float, got nan"),
        ({"mlp_bias": "yes"}, "mlp_bias must be true or false"),
        ({"eos_token_id": [True]}, "eos_token_id must be a token"),
        ({"torch_dtype": 5}, "dtype must be one of"),
        ({"model_type": "gemma2", "layer_types": "full_attention"}, "layer_types must be a list of 2 entries"),
    ],
)
def test_what_a_decoder_does_not_have_is_refused_by_name(facts, said):
    with pytest.raises(ValueError, match=said):
        configs.from_json({**FACTS, **facts})


def test_fields_that_are_null_or_missing_are_those_of_transformers():
    of = lambda family, **facts: configs.from_json({**FACTS, "model_type": family, **facts})
    assert (
        of("llama", rope_theta=None).rope_theta == of("llama", rope_parameters={"rope_theta": None}).rope_theta == 1e4
    )
    assert of("llama", num_key_value_heads=None, hidden_act=None).kv_heads == FACTS["num_attention_heads"]
    plain = {name: x for name, x in FACTS.items() if name not in ("hidden_act", "head_dim")}
    gemma = configs.from_json({**plain, "model_type": "gemma2"})
    assert (gemma.activation, gemma.head_size, gemma.tied) == (
        "gelu_pytorch_tanh",
        256,
        FACTS.get("tie_word_embeddings", True),
    )
    assert configs.from_json({**plain, "model_type": "qwen3"}).head_size == 128


def test_any_configuration_is_read_or_refused_by_name():
    rng = random.Random(0)
    names = [*FACTS, "rope_theta", "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "dtype"]
    wrong = (None, "x", 0, -1, 1.5, True, [], ["a"], {}, {"a": 1}, float("nan"), 10**30, {"rope_type": "linear"})
    read = 0
    for _ in range(1500):
        facts = {**FACTS, "model_type": rng.choice(configs.FAMILIES), "use_sliding_window": True}
        facts |= {name: rng.choice(wrong) for name in rng.sample(names, rng.randrange(1, 3))}
        try:
            configs.frequencies(configs.from_json(facts))
            read += 1
        except ValueError as error:
            assert any(name in str(error) for name in [*names, "max_window_layers"]), facts
    assert 50 < read < 1400


def test_an_index_and_its_files_must_agree(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configs.to_json(decoder().config)))
    weights.save(tmp_path, decoder())
    whole = load_file(tmp_path / "model.safetensors")
    names = sorted(whole)
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    halves = {first: names[:5], second: names[5:]}

    def write(halves, listed=None):
        for file, held in halves.items():
            save_file({name: whole[name] for name in held}, tmp_path / file)
        listed = listed or {name: file for file, held in halves.items() for name in held}
        (tmp_path / weights.INDEX).write_text(json.dumps({"weight_map": listed}))
        return listed

    listed = write(halves)
    with pytest.raises(ValueError, match=r"holds model\.safetensors, which .*index\.json there does not name"):
        weights.load(tmp_path)  # an export into a folder of parts
    (tmp_path / "model.safetensors").unlink()
    for a, b in zip(jax.tree.leaves(nnx.state(weights.load(tmp_path))), jax.tree.leaves(nnx.state(decoder()))):
        np.testing.assert_array_equal(a, b)
    write(halves, {**listed, names[0]: second})
    with pytest.raises(ValueError, match=f"has {names[0]} in {second}, and the files have it in {first}"):
        weights.load(tmp_path)
    write(halves, {name: file for name, file in listed.items() if name != names[7]})
    with pytest.raises(ValueError, match=f"has {names[7]} nowhere, and the files have it in {second}"):
        weights.load(tmp_path)
    write({**halves, second: names[4:]}, listed)
    with pytest.raises(ValueError, match=f"holds {names[4]} twice, in {first} and in {second}"):
        weights.load(tmp_path)
    (tmp_path / weights.INDEX).write_text('{"weight_map": [1]}')
    with pytest.raises(ValueError, match=r"index\.json must have a weight_map"):
        weights.load(tmp_path)
    (tmp_path / weights.INDEX).unlink()
    with pytest.raises(ValueError, match=f"holds {first}, but no .*index.json that names it"):
        weights.load(tmp_path)


# --- text


def _byte_fallback(*steps):
    """A tokenizer with a token for each byte, and these decoders behind those of Llama 2 and Gemma 2."""
    words = ["v", "a", "\u2581a", "\u2581", "x", "time", ",", "\u00e9"]
    names = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    made = huggingface.Tokenizer(
        huggingface.models.BPE({x: i for i, x in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    kinds = huggingface.decoders
    made.decoder = kinds.Sequence([kinds.Replace("\u2581", " "), kinds.ByteFallback(), kinds.Fuse(), *steps])
    made.add_special_tokens(["<s>"])
    return made


@pytest.mark.parametrize("strips", [True, False], ids=["llama2", "gemma2"])
def test_the_pieces_of_a_stream_are_the_whole_text_of_any_tokens(strips):
    tokenizer = _byte_fallback(*[huggingface.decoders.Strip(" ", 1, 0)] * strips)
    detokenizer, rng = Detokenizer(tokenizer), np.random.default_rng(0)
    likely = [*range(258, 266), *(2 + x for x in "\u65e5\u00e9".encode()), 1, 300]  # bytes, a special token, none
    for _ in range(300):
        tokens = rng.choice(likely, rng.integers(0, 12)).tolist()
        stream = detokenizer.stream()
        text = "".join(map(stream.push, tokens)) + stream.end()
        whole = tokenizer.decode([x for x in tokens if x < 266])
        assert text == whole or (strips and text == " " + whole), tokens


def test_a_stop_string_ends_any_text_where_it_first_stands():
    """Across pieces, and before a character that is not complete."""
    text = types.SimpleNamespace(detokenizer=Detokenizer(_byte_fallback()))
    rng, found = np.random.default_rng(0), 0
    likely = [*range(258, 266), *(2 + x for x in "\u65e5\u00e9".encode())]
    for _ in range(400):
        tokens = rng.choice(likely, rng.integers(2, 14)).tolist()
        plain = text.detokenizer.stream()
        whole = "".join(map(plain.push, tokens)) + plain.end()
        starts = rng.integers(0, len(whole), 3)
        stops = [whole[x : x + rng.integers(1, 5)] for x in starts]  # one may begin first and another be complete first
        writer = Writer(text, Request([1], 99), [*stops, f"{stops[0]}\0"])
        pieces = [writer.take([x]) for x in tokens]
        assert "".join(pieces) + writer.end() == writer.written == whole[: min(map(whole.index, stops))], (
            tokens,
            stops,
        )
        found += writer.stopped
    assert found == 400


# --- which token


def test_top_k_and_top_p_draw_from_the_tokens_they_leave_and_in_proportion():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(12).astype(np.float32) * 2
    count = 4000
    facts = sampling.rows([Sampling(0.7, 6, 0.8)] * count, list(range(count)), count)
    drawn = np.bincount(quick_jit(sampling.choose)(np.tile(logits, (count, 1)), **facts), minlength=12) / count
    likely = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    order = np.argsort(-likely)
    keep = [x for i, x in enumerate(order) if i < 6 and likely[order[:i]].sum() < 0.8]
    wanted = np.zeros(12)
    wanted[keep] = likely[keep] / likely[keep].sum()
    assert set(np.flatnonzero(drawn)) == set(keep) and 1 < len(keep) < 12
    assert_allclose(drawn, wanted, atol=5 * np.sqrt(0.25 / count))  # five standard deviations


def test_company_changes_no_draw():
    logits = np.random.default_rng(0).standard_normal((3, 30)).astype(np.float32)
    choose = quick_jit(sampling.choose)
    kinds = [Sampling(1.0, seed=4), Sampling(1.0, top_k=5, seed=4), GREEDY]
    together = np.asarray(choose(logits, **sampling.rows(kinds, [7, 7, 7], 3)))
    for i, kind in enumerate(kinds):
        one = choose(np.tile(logits[i], (3, 1)), **sampling.rows([kind], [7], 3))
        assert one[0] == together[i]
    assert together[2] == logits[2].argmax()
    for name, x in (("temperature", -1), ("top_k", -1), ("top_p", 0), ("seed", -1)):
        with pytest.raises(ValueError, match=name):
            Sampling(**{name: x})


@pytest.mark.parametrize("temperature", [1e-45, 3e-38, 1e-37, 1e-20])
@pytest.mark.parametrize("kind", [{}, {"top_k": 3}, {"top_p": 0.9}, {"top_p": 1e-30}], ids=str)
def test_the_nearer_the_temperature_is_to_zero_the_surer_the_largest_logit_is_taken(temperature, kind):
    logits = np.random.default_rng(5).standard_normal((6, 97)).astype(np.float32)
    logits[1] *= 1e38  # whose quotients and differences leave float32
    logits[2, 40:] = -np.inf
    logits[3] -= 1e4
    logits[4] = np.where(np.arange(97) == 60, -3e38, -np.inf)  # one token is left
    logits[5, 7] = np.inf
    kinds = [Sampling(temperature, seed=i, **kind) for i in range(6)]
    found = jax.jit(sampling.choose)(logits, **sampling.rows(kinds, [3] * 6, 6))
    np.testing.assert_array_equal(found, logits.argmax(-1))


# --- batches


def test_every_request_gets_what_it_gets_alone_whatever_else_is_in_the_batch():
    # pages for two of them at full length: the others wait, and the youngest gives way
    served = engine()
    given = prompts(5, 33, 40, 8, 3, 50)
    given += [given[2][:32] + given[0]]  # begins with pages of another one
    kinds = [GREEDY, DRAWN, GREEDY, DRAWN, GREEDY, DRAWN, GREEDY]
    requests = [Request(list(p), 20, s) for p, s in zip(given, kinds)]
    gone = Request(list(given[1]), 40)

    def seen(request, added):
        if request is requests[1] and len(request.generated) > 5 and gone.finish is None:
            served.finish(gone, "cancelled")

    served.submit(gone)
    got = served.run(requests, seen)
    assert got == [alone(p, 20, s) for p, s in zip(given, kinds)]
    assert gone.finish == "cancelled" and gone.generated == alone(given[1], 20)[: len(gone.generated)]
    assert served.scheduler.preemptions > 0 and sum(x.shared for x in requests) >= 32
    assert served.runner.book.free_pages == 16
    assert served.runner.programs == {(4, 4): 1, (4, 32): 1}  # one for a bucket, whatever came


def test_a_float16_cache_in_pages_is_a_padded_one_token_by_token():
    served = engine("float16")
    for prompt, kind in zip(prompts(21, 40), (GREEDY, DRAWN)):
        assert served.run([Request(list(prompt), 24, kind)]) == [alone(prompt, 24, kind, "float16")]


@pytest.mark.sweep
def test_guesses_change_the_number_of_steps_and_no_token():
    # parameters are arguments: a decoder that guesses right and one that does not run the same programs
    right = engine(guesses=3, draft=0)
    small, given = right.draft.runner, prompts(13, 40)
    kinds = [GREEDY, DRAWN]
    wanted = [alone(p, 20, s) for p, s in zip(given, kinds)]
    assert right.run([Request(list(p), 20, s) for p, s in zip(given, kinds)]) == wanted
    assert right.counts.right_guesses == right.counts.guessed_tokens > 0 and right.counts.steps <= 10
    small._state, kept = nnx.state(decoder(seed=1)), small._state
    wrong = engine(guesses=3, draft=0)
    assert wrong.run([Request(list(p), 20, s) for p, s in zip(given, kinds)]) == wanted
    assert wrong.counts.right_guesses < wrong.counts.guessed_tokens
    small._state = kept
    assert {*right.runner.programs.values(), *small.programs.values()} == {1}
    for book in (right.runner.book, wrong.runner.book, small.book):
        assert book.free_pages == 16


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("draft", [None, 0, 1])
def test_company_and_guesses_change_nothing_in_any_cache(kind, draft):
    given = prompts(5, 33, 40, 8, 3, 50)
    wanted = [engine(kind, 1).run([Request(list(p), 20, DRAWN)])[0] for p in given]
    served = engine(kind, guesses=0 if draft is None else 3, draft=draft)
    assert served.run([Request(list(p), 20, DRAWN) for p in given]) == wanted
    assert served.runner.book.free_pages == 16


def test_a_fault_ends_its_requests_and_the_others_go_on(monkeypatch):
    served = engine(sequences=1, tokens=8)
    first, second = (Request(list(p), 12) for p in prompts(21, 6))
    broken = iter([False, False, True])
    step = served.runner._step

    def fail(*args):
        found = step(*args)
        if next(broken, False):
            raise RuntimeError("the device is gone")
        return found

    monkeypatch.setattr(served.runner, "_step", fail)
    served.run([first, second])
    assert first.finish == "error" and "RuntimeError: the device is gone" in first.error
    assert second.finish == "length" and second.generated == alone(prompts(21, 6)[1], 12)
    assert served.runner.book.free_pages == 16

    monkeypatch.setattr(served.runner, "_state", jax.tree.map(lambda x: x * np.nan, served.runner._state))
    lost = Request([1, 2], 5)
    served.run([lost])
    assert lost.finish == "error" and "not finite" in lost.error
    with pytest.raises(ValueError, match="90 tokens of prompt and 7 more are too many: a sequence has at most 96"):
        served.submit(Request([1] * 90, 7))
    with pytest.raises(ValueError, match=r"tokens must lie in 0\.\.96, got 97"):
        served.submit(Request([97], 7))


@pytest.mark.skipif(os.environ.get("JAX_MFA_DEVICE") != "emulator", reason="without the emulated device")
@pytest.mark.parametrize("kind", ["float32", pytest.param("int8", marks=pytest.mark.sweep)])
def test_a_few_tokens_on_the_emulated_device(kind):
    texts = []

    def recorded(fun, **keywords):
        jitted = jax.jit(fun, **keywords)

        def call(*args):
            texts.append(jitted.lower(*args).as_text())
            return jitted(*args)

        return call

    small = Runner(
        decoder(), pages=4, page_size=8, most_sequences=1, most_tokens=8, most_length=32, kind=CacheKind(kind, 16),
        jit=recorded,
    )  # fmt: skip
    served = Engine(small, 1, 8)
    prompt = prompts(16)[0]  # two chunks, then single tokens
    got = served.run([Request(list(prompt), 3)])
    assert got == [alone(prompt, 3)] if kind == "float32" else len(got[0]) == 3
    assert {*small.programs} == {(1, 8), (1, 1)}
    for target in ("jax_mfa_append", "jax_mfa_attention_forward"):
        assert texts and all(target in text for text in texts)


# --- text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of a few steps of training, with its draft."""
    path = tmp_path_factory.mktemp("model") / "small"
    text = training.local_text()[:40_000]
    size = training.Size(steps=4, batch=2, context=96, window=32, vocabulary=300, layers=1, width=32, head_size=16)
    training.make(path, size, text=text, jit=quick_jit)
    return path


def test_text_comes_in_pieces_that_together_are_the_text(folder):
    text = tokenizers.Text(folder)
    written = "Naïve façade, 東京 🐸! A class is\n  a class."
    tokens = text.encode(written)
    writer = Writer(text, Request([1], 99))
    pieces = [writer.take([x]) for x in tokens]
    assert "".join(pieces) + writer.end() == written == writer.written
    assert not any("\N{REPLACEMENT CHARACTER}" in x for x in pieces) and "" in pieces


@pytest.mark.parametrize("step", [1, 3, 100])
def test_a_stop_string_ends_the_text_wherever_tokens_cut_it(folder, step):
    text = tokenizers.Text(folder)
    tokens = text.encode("one two three fo four five")
    for stops, wanted in ((["four"], "one two three fo "), (["e f", "three"], "one two "), (["five!"], None)):
        writer = Writer(text, Request([1], 99), stops)
        pieces = [writer.take(tokens[i : i + step]) for i in range(0, len(tokens), step)]
        pieces.append(writer.end())
        assert "".join(pieces) == writer.written == (wanted or "one two three fo four five")
        assert writer.stopped == (wanted is not None)
    writer = Writer(text, Request([1], 99), ["zzz"])
    assert writer.take(text.encode("ab zz")) + "|" + writer.end() == "ab |zz"


def test_the_program_writes_and_compares(folder, capsys, monkeypatch):
    monkeypatch.setattr(generate, "JIT", quick_jit)
    arguments = ["--model", str(folder), "--tokens", "8", "--batch", "1", "--step-tokens", "4", "--cache", "float32"]
    generate.main(["A class", *arguments, "--speculative", "--guesses", "3", "--compare"])
    printed = capsys.readouterr().out
    for said in ("llama, 1 layers", "pages of 16 tokens", "tokens/s", "first token", "programs", "guesses right"):
        assert said in printed
    assert printed.split("\n\n")[1].startswith("A class")
    counts = printed.split("up to number ")[1].strip().split(" of ")
    assert counts[0] == counts[1]


def refusal(*arguments):
    with pytest.raises(SystemExit) as refused:
        generate.main([str(x) for x in arguments])
    return str(refused.value.code)


def test_options_at_fault_are_named(tmp_path, folder):
    assert "cannot read" in refusal("--model", tmp_path)
    assert "--tokens must be at least 1, got 0" in refusal("--tokens", 0)
    assert "--step-tokens must be at least --batch" in refusal("--step-tokens", 4)
    assert "--page-size must be a power of two" in refusal("--page-size", 10)
    assert "--port must lie in 0..65535" in refusal("--port", 99999)
    assert "--draft is for --speculative" in refusal("--draft", tmp_path)
    assert "leave --model out" in refusal("--perplexity", "--model", tmp_path)
    assert "prompts and --stop must not be empty" in refusal("")
    assert "too many: a sequence has at most 96" in refusal("A", "--model", folder, "--tokens", 96)


@pytest.mark.sweep
def test_eight_bits_cost_less_than_half_a_per_cent_of_perplexity(tmp_path, capsys):
    """The small model as the program trains it; and the table of what fewer bits cost."""
    generate.main(["--out", str(tmp_path / "model"), "--perplexity"])
    printed = capsys.readouterr().out
    assert "written to" in printed and "Hugging Face's format" in printed
    rows = [x.split() for x in printed.splitlines() if x.endswith("%")]
    change = {(x[0], x[1]): float(x[-1].rstrip("%")) for x in rows}
    assert float(rows[0][3]) < 100  # of 1,024 tokens: it has learnt something
    assert abs(change["int8", "32"]) < 0.5 and abs(change["int8", "64"]) < 0.5
    assert all(abs(change["int4", group]) < 20 for group in ("8", "16", "32", "64"))
