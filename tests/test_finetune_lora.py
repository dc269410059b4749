"""The fine-tuning example: only thin matrices learn, accumulation and resuming are exact, and the model that it trained
is the one that it exports."""

import dataclasses
import functools
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import assert_allclose, quick_jit

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import finetune_lora
from generation import config as configs
from generation import tokenizer as tokenizers
from generation import training, weights
from generation.model import Decoder, whole

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
SETTINGS = finetune_lora.Settings(rank=2, batch=2, accumulate=2, context=16, learning_rate=1e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in Hugging Face's format, of random weights."""
    place = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.train(TEXT, 270)
    size = training.Size(layers=1, width=16, heads=2, kv_heads=1, head_size=8, context=32)
    decoder = Decoder(size.config(tokenizer.get_vocab_size(), 0), rngs=nnx.Rngs(0))
    weights.save(place, decoder)
    tokenizers.save(place, tokenizer)
    (place / "config.json").write_text(json.dumps(configs.to_json(decoder.config)))
    return place


def trainer(folder, **changes):
    tokens = np.array(tokenizers.Text(folder).encode(TEXT), np.int32)
    settings = dataclasses.replace(SETTINGS, **changes)
    return finetune_lora.Trainer(weights.load(folder), tokens, settings, whole("blockwise"), jit=quick_jit)


def logits(decoder, tokens):
    return decoder.logits(decoder(tokens, jnp.arange(len(tokens)), whole("blockwise")))


def flat(state):
    return [np.asarray(x) for x in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def trained(folder):
    made = trainer(folder)
    for _ in range(3):
        made.step()
    return made


def test_it_learns_and_only_the_thin_matrices_change(folder, trained):
    assert trained.losses[-1] < trained.losses[0]
    fresh = trainer(folder)
    for x, y in zip(flat(trained.frozen), flat(fresh.frozen), strict=True):
        np.testing.assert_array_equal(x, y)
    shapes = {x.shape for x in flat(trained.learnt)}
    assert shapes == {(16, 2), (2, 16), (2, 8)}


def test_before_the_first_step_it_is_the_model_as_it_was(folder):
    made, tokens = trainer(folder), jnp.arange(9)
    decoder = nnx.merge(made.graph, made.learnt, made.frozen)
    np.testing.assert_array_equal(logits(decoder, tokens), logits(weights.load(folder), tokens))


def test_a_resumed_run_repeats_the_losses_of_an_unbroken_one(folder, trained, tmp_path):
    first = trainer(folder)
    first.step()
    first.save(tmp_path / "lora.npz", "a text")
    second = trainer(folder)
    second.load(tmp_path / "lora.npz", "a text")
    for _ in range(2):
        second.step()
    assert second.losses == trained.losses
    for x, y in zip(flat(second.learnt), flat(trained.learnt), strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(ValueError, match="another model or text"):
        second.load(tmp_path / "lora.npz", "another text")
    with pytest.raises(ValueError, match="another rank"):
        trainer(folder, rank=3).load(tmp_path / "lora.npz", "a text")
    (tmp_path / "lora.npz").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="cannot go on from"):
        second.load(tmp_path / "lora.npz", "a text")


def test_accumulated_batches_make_the_step_of_one_large_batch(folder, monkeypatch):
    parts, large = trainer(folder), trainer(folder, batch=4, accumulate=1)
    whole_batch = large.windows(0)
    monkeypatch.setattr(parts, "windows", lambda number: whole_batch[2 * number : 2 * number + 2])
    assert parts.step() == pytest.approx(large.step(), rel=1e-5)
    for x, y in zip(flat(parts.learnt), flat(large.learnt), strict=True):
        # adam divides a gradient by its own size: what is rounding of a gradient near 0 may be a part of a step
        assert_allclose(x, y, rtol=0, atol=0.02 * SETTINGS.learning_rate)


def test_what_is_exported_is_a_folder_with_the_model_that_was_trained(folder, trained, tmp_path):
    trained.export(tmp_path / "merged", folder)
    tokens = jnp.arange(9)
    expected = logits(nnx.merge(trained.graph, trained.learnt, trained.frozen), tokens)
    got = logits(weights.load(tmp_path / "merged"), tokens)
    assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert np.abs(got - logits(weights.load(folder), tokens)).max() > 1e-3
    assert tokenizers.Text(tmp_path / "merged").encode("the fox") == tokenizers.Text(folder).encode("the fox")


def test_an_export_replaces_a_folder_whole_or_is_refused_before_the_training(folder, trained, tmp_path, capsys):
    merged = tmp_path / "merged"
    for _ in range(2):
        trained.export(merged, folder)
        finetune_lora.check_export(merged, folder)
    assert [x.name for x in tmp_path.iterdir()] == ["merged"]
    (merged / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "file").touch()
    (tmp_path / "text.txt").write_text(TEXT)
    for place, said in (
        (merged, "holds model.safetensors.index.json"),
        (folder, "another folder"),
        (tmp_path / "file", "none"),
    ):
        arguments = ["--model", str(folder), "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
        assert finetune_lora.main([*arguments, "--export", str(place)]) == 1
        assert said in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert (merged / "model.safetensors").is_file()


@pytest.mark.sweep
def test_ours_and_stock_are_timed_side_by_side(folder, trained):
    lines = finetune_lora.compare(trained, "blockwise", 1)
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| jax_mfa", "| jax.nn"]
    assert all("tokens/s" in lines[0] and "MiB" in line for line in lines[2:])


def test_memory_by_length_needs_no_weights_and_attention_is_not_computed_again():
    config = dataclasses.replace(
        finetune_lora.LLAMA_1B, vocabulary=64, width=64, inner=128, layers=2, windows=(None,) * 2
    )
    decoder = finetune_lora.abstract(config, finetune_lora.Settings(rank=2))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(nnx.state(decoder)))
    *_, line = finetune_lora.memory(decoder, 1, [1024], "blockwise")
    stock, ours, stock_again, ours_again = (int(x) for x in re.findall(r"(\d+) MiB", line.replace(",", "")))
    assert stock > 4 * ours and stock_again > 2 * ours_again
    graph, learnt, frozen = nnx.split(decoder, finetune_lora.LoRA, ...)
    windows = jax.ShapeDtypeStruct((1, 65), np.int32)
    loss = functools.partial(finetune_lora.loss_of, graph, finetune_lora.whole("blockwise"), finetune_lora.KEPT)
    text = str(jax.make_jaxpr(jax.grad(loss))(learnt, frozen, windows))
    assert len(re.findall(r"= jax_mfa_attention\[", text)) == config.layers  # each forward pass once


@pytest.mark.sweep
def test_the_program_trains_resumes_and_exports(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    arguments = ["--model", str(folder), "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path), "--rank", "2"]
    arguments += ["--batch", "2", "--context", "16", "--implementation", "blockwise"]
    assert finetune_lora.main([*arguments, "--steps", "1"]) == 0
    assert finetune_lora.main([*arguments, "--steps", "2", "--resume", "--export", str(tmp_path / "merged")]) == 0
    assert (tmp_path / "merged" / "model.safetensors").is_file() and "tokens/s" in capsys.readouterr().out
    assert finetune_lora.main([*arguments, "--resume", "--alpha", "3"]) == 1
    assert "another alpha" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        finetune_lora.main(["--rank", "0"])
    assert "--rank must be positive, got 0" in capsys.readouterr().err
