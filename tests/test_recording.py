"""`jax_mfa.record` and `JAX_MFA_LOG`: what was chosen and why, what Metal ran; as a dict, text and for Prometheus."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jax_mfa
from jax_mfa import recording

ROOT = pathlib.Path(__file__).resolve().parents[1]


def attend(x, **keywords):
    return jax_mfa.dot_product_attention(x, x, x, **keywords)


def fresh(**keywords):
    """A program that nobody has compiled."""
    return jax.jit(lambda x: attend(x, **keywords))


def test_each_choice_is_recorded_once_for_a_program_with_its_problem_tiles_and_reason():
    x = jnp.ones((1, 8, 2, 4))
    training = jax.jit(jax.grad(lambda x: attend(x, is_causal=True, implementation="blockwise").sum()))
    with jax_mfa.record() as seen:
        for _ in range(3):
            training(x)
    problem = "B1 T8 S8 N2 K2 H4 V4 float32 causal"
    expected = [
        jax_mfa.Choice(call, problem, "blockwise", "tiles of 8 x 8, 1 x 2 heads at a time", "by name")
        for call in ("forward", "backward")
    ]
    assert dict(seen.choices) == dict.fromkeys(expected, 1)
    assert [*seen.problems] == [problem]
    assert seen.as_dict()["compilations"]["xla"]["count"] >= 1


def test_what_is_done_outside_is_not_recorded_and_recorders_nest():
    x = jnp.ones((1, 8, 2, 4))
    fresh()(x)
    with jax_mfa.record() as outer:
        with jax_mfa.record() as inner:
            pass
        fresh(implementation="reference")(x)
    fresh()(x)
    assert not inner.choices and [c.implementation for c in outer.choices] == ["reference"]
    before = outer.as_dict()
    fresh()(x)
    assert outer.as_dict() == before


def test_a_fallback_says_why():
    x = jnp.ones((1, 4, 1, 577))
    with jax_mfa.record() as seen:
        fresh()(x)
    (choice,) = seen.choices
    assert choice.implementation == "blockwise"
    assert choice.reason.startswith("query, key, value: head sizes go to 576, got H = 577")
    assert f"({choice.reason})" in str(seen)


class Native:
    """What the native module counts, without a device."""

    def __init__(self):
        self.on = []
        self.calls = 7

    def record(self, on):
        self.on.append(on)

    def statistics(self):
        return {"calls": self.calls, "failures": 1, "bytes_no_copy": 10 * self.calls, "bytes_staged": 5}

    def recorded(self):
        plan = {"calls": self.calls, "seconds": self.calls / 2, "buckets": [self.calls - 1, 0, 1]}
        return {"bounds": [0.1, 2.5], "plans": {"forward": plan}, "kernels": {'a"b\\c\nd': self.calls, "idle": 3}}


def test_what_metal_counted_is_told_from_the_beginning_to_the_end():
    native = Native()
    with recording.recorded(native) as seen:
        native.calls = 9
    native.calls = 20
    assert native.on == [True, False]
    assert seen.as_dict()["metal"] == {
        "calls": 2,
        "failures": 0,
        "bytes_no_copy": 20,
        "bytes_staged": 0,
        "kernels": {'a"b\\c\nd': 2},
        "plans": {"forward": {"calls": 2, "seconds": 1.0, "histogram": {"0.1": 2, "2.5": 2, "+Inf": 2}}},
    }
    assert "2 x forward, 500.000 ms each" in str(seen) and "2 <= 0.1 s" in str(seen)
    json.dumps(seen.as_dict())


def test_prometheus_text_has_a_type_for_each_family_escaped_labels_and_whole_histograms():
    native = Native()
    with recording.recorded(native) as seen:
        native.calls = 9
        fresh(implementation="blockwise")(jnp.ones((1, 8, 2, 4)))
    lines = seen.prometheus().splitlines()
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    samples = [line for line in lines if not line.startswith("#")]
    for sample in samples:
        found = re.fullmatch(r'(\w+)(\{(\w+="([^"\\\n]|\\["\\n])*",?)*\})? [-+.\de]+', sample)
        assert found, sample
        assert re.sub(r"_(bucket|sum|count)$", "", found[1]) in typed, sample
    assert r'jax_mfa_metal_kernel_launches_total{kernel="a\"b\\c\nd"} 2' in samples
    assert 'jax_mfa_metal_call_seconds_bucket{plan="forward",le="+Inf"} 2' in samples
    assert 'jax_mfa_metal_call_seconds_count{plan="forward"} 2' in samples
    assert 'jax_mfa_programs_total{call="forward",implementation="blockwise",reason="by name"} 1' in samples


def logged(level):
    code = """
import jax, jax.numpy as jnp, jax_mfa
run = jax.jit(lambda x: jax_mfa.dot_product_attention(x, x, x))
run(jnp.ones((1, 4, 2, 4))), run(jnp.ones((1, 4, 2, 4)))
"""
    environment = os.environ | {"JAX_MFA_LOG": level, "JAX_MFA_DEVICE": "none", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/")


def test_the_log_has_one_line_for_a_trace():
    done = logged("debug")
    assert done.returncode == 0
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("jax_mfa: ")]
    assert line == (
        "jax_mfa: forward B1 T4 S4 N2 K2 H4 V4 float32 -> blockwise, tiles of 4 x 4, 1 x 2 heads at a time "
        "(JAX_MFA_DEVICE=none forbids Metal)"
    )


def test_a_level_that_there_is_not_is_refused(monkeypatch):
    monkeypatch.setenv("JAX_MFA_LOG", "loud")
    with pytest.raises(ValueError, match="JAX_MFA_LOG must be unset or 'debug', got 'loud'"):
        fresh(implementation="blockwise")(jnp.ones((1, 8, 2, 4)))


def test_profilers_see_which_implementation_runs():
    text = jax.jit(lambda x: attend(x, implementation="blockwise")).lower(jnp.ones((1, 8, 2, 4))).compile().as_text()
    assert "jit(jax_mfa_attention_blockwise)" in text
