"""The example that trains over several processes: what one device computes, whatever dies on the way."""

import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import assert_allclose

import jax_mfa

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import processes as example_processes  # noqa: E402
import train_long_context  # noqa: E402

PROGRAM = ROOT / "examples" / "train_long_context.py"
SMALL = ["--context", "64", "--layers", "1", "--width", "16", "--heads", "2", "--kv-heads", "1", "--batch", "2"]
LEFT_ALONE_WITHIN = 30  # seconds, on a busy machine


def environment():
    """Each process with one device."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    quick = f"{flags} --xla_backend_optimization_level=0".strip()
    return {**os.environ, "XLA_FLAGS": quick, "PYTHONPATH": str(ROOT), "JAX_MFA_DEVICE": "none"}


def run(folder, *arguments, processes=2):
    command = [sys.executable, PROGRAM, *SMALL, "--out", folder, "--processes", processes, *arguments]
    return subprocess.run(list(map(str, command)), env=environment(), capture_output=True, text=True, timeout=300)


def started(folder, *arguments, processes=2):
    """The processes of a run, begun by hand as on several hosts."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ours = ["--hosts", processes, "--coordinator", f"localhost:{port}", "--out", folder, *arguments]
    return [
        subprocess.Popen(
            list(map(str, [sys.executable, PROGRAM, *SMALL, *ours, "--host-id", i])),
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
        for i in range(processes)
    ]  # fmt: skip


def last_checkpoint(folder) -> int:
    """The last step whose checkpoint is whole."""
    found = [int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdigit()]
    return max(found, default=0)


def losses(folder) -> list[float]:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager((folder / "checkpoints").resolve()) as manager:
        about = manager.restore(manager.latest_step(), args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
    return about["losses"]


def losses_of_one_device(steps: int, **facts) -> list[float]:
    """Whole sequences, in their own order, through attention of one device."""
    settings = train_long_context.Settings(context=64, layers=1, width=16, heads=2, kv_heads=1, batch=2, **facts)
    text = train_long_context.read_text(None)
    trainer = train_long_context.Trainer.__new__(train_long_context.Trainer)
    trainer.settings = settings
    letters = {character: i for i, character in enumerate(sorted(set(text)))}
    data = np.array([letters[character] for character in text], np.int32)
    parameters = train_long_context.initial(settings, len(letters))
    optimizer = optax.adam(settings.learning_rate)
    state = optimizer.init(parameters)
    attention = lambda q, k, v: jax_mfa.dot_product_attention(q, k, v, is_causal=True)
    loss = lambda p, x, y: train_long_context.loss_of(p, x, y, jnp.arange(64), attention)
    step_of = jax.jit(jax.value_and_grad(loss))
    found = []
    for step in range(steps):
        starts = np.random.default_rng((settings.seed, step)).integers(0, len(data) - 64, settings.batch)
        windows = np.stack([data[start : start + 65] for start in starts])
        value, gradient = step_of(parameters, windows[:, :-1], windows[:, 1:])
        changes, state = optimizer.update(gradient, state)
        parameters = optax.apply_updates(parameters, changes)
        found.append(float(value))
    return found


def kill(process, how=signal.SIGKILL):
    """One of the `started`, and what it has started: as when its host goes down."""
    if process.poll() is None:
        os.killpg(process.pid, how)


@pytest.mark.sweep
def test_a_killed_coordinator_is_an_error_in_the_others_and_a_restart_goes_on(tmp_path):
    """The hardest to lose: without it JAX ends the others from C++."""
    processes = started(tmp_path, "--steps", 10000, "--save-every", 2, "--timeout", LEFT_ALONE_WITHIN / 2)
    try:
        deadline = time.monotonic() + 240
        while last_checkpoint(tmp_path) < 2 and time.monotonic() < deadline:
            assert all(p.poll() is None for p in processes), [p.communicate() for p in processes]
            time.sleep(0.05)
        kill(processes[0])
        begun = time.monotonic()
        _, said = processes[1].communicate(timeout=2 * LEFT_ALONE_WITHIN)
        assert time.monotonic() - begun < LEFT_ALONE_WITHIN
        assert processes[1].returncode == example_processes.DIED
        # in the middle of a step the connection closes; at the barrier of a checkpoint only time tells
        told = ": another process is gone", ": no answer from the other processes", " was ended by signal 6, as"
        assert any(f"error: process 1{x}" in said for x in told), said
    finally:
        for p in processes:
            kill(p)
            p.communicate()
    saved = last_checkpoint(tmp_path)
    done = run(tmp_path, "--steps", saved + 3, "--data", 1)
    assert done.returncode == 0, done.stderr
    assert f"resumed     after step {saved}" in done.stdout and (tmp_path / "loss.png").exists()
    found = losses(tmp_path)
    assert len(found) == saved + 3
    count = min(len(found), 12)  # rounding grows from step to step
    assert_allclose(found[:count], losses_of_one_device(count), rtol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("processes, data", [(2, 1), (4, 1), (4, 2)])
def test_twenty_kills_lose_nothing_past_the_last_checkpoint(tmp_path, processes, data):
    """At random moments: half of them from the start on, half while it trains and writes."""
    steps = ["--steps", 400, "--save-every", 5, "--data", data]
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    assert run(undisturbed, *steps, processes=processes).returncode == 0
    chance, while_training = random.Random(0), 0
    for turn in range(20):
        before = last_checkpoint(disturbed)
        group = started(disturbed, *steps, "--timeout", 20, "--start-timeout", 60, processes=processes)
        try:
            deadline = time.monotonic() + (60 if turn % 2 else 0)
            while last_checkpoint(disturbed) == before and time.monotonic() < deadline:
                time.sleep(0.01)
            reached = last_checkpoint(disturbed)
            time.sleep(chance.uniform(0, 0.5 if turn % 2 else 20))
            victim = chance.choice(group)
            if victim.poll() is None:
                while_training += reached > before
                kill(victim, chance.choice([signal.SIGKILL, signal.SIGTERM]))
            said = {p: p.communicate(timeout=120)[1] for p in group}  # never a hang
        finally:
            for p in group:
                kill(p)
        assert last_checkpoint(disturbed) >= reached
        for p in group:
            if p is not victim:
                assert p.returncode == 0 or "error: process" in said[p], said[p]
    assert while_training >= 5
    assert run(disturbed, *steps, processes=processes).returncode == 0
    assert losses(disturbed) == losses(undisturbed)


def refusal(*arguments):
    with pytest.raises(SystemExit) as refused:
        train_long_context.main([str(x) for x in arguments])
    return str(refused.value.code)


def test_one_device_refuses_with_the_arithmetic(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    said = refusal("--out", tmp_path)
    assert re.search(
        r"4,096 of 4,096 tokens on each of 1 device\(s\).*64 wide x .*2 layers.*: 72\.4 MB; --budget is 67\.1 MB a "
        r"device\. 2 devices would do",
        said,
    )
    assert "no number of devices is enough" in refusal("--out", tmp_path, "--budget", 1)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (
            ["--context", 100, "--processes", 4],
            "--context must be a multiple of 8, two runs of tokens a device, got 100",
        ),
        (["--data", 3, "--processes", 4], "--data must divide the 4 devices, got 3"),
        (["--data", 2, "--processes", 4], "--batch must be a multiple of --data, got 1 and 2"),
        (["--hosts", 2], "--hosts needs --coordinator"),
        (["--processes", 2, "--coordinator", "a:1"], "--processes starts them all"),
        (["--processes", 0], r"--processes must lie in 1\.\.64, got 0"),
        (["--width", 30, "--processes", 2], "--width must be an even multiple of --heads"),
        (["--timeout", 0], "must be positive"),
    ],
)
def test_options_at_fault_are_named(tmp_path, arguments, said):
    assert re.search(said, refusal("--out", tmp_path, *arguments))
