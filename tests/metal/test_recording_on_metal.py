"""What the launcher counts for `jax_mfa.record`, and how it names its work for Xcode's capture."""

import jax
import jax.numpy as jnp

import jax_mfa

SHAPE = (1, 24, 2, 16)


def test_calls_kernels_bytes_and_times_are_those_of_what_ran(on_device):
    x = jnp.ones(SHAPE)
    training = jax.jit(
        jax.grad(lambda x: jax_mfa.dot_product_attention(x, x, x, implementation="metal", is_causal=True).sum())
    )
    jax.block_until_ready(training(x))  # not recorded
    with jax_mfa.record() as seen:
        for _ in range(2):
            jax.block_until_ready(training(x))
    found = seen.as_dict()["metal"]
    assert (found["calls"], found["failures"]) == (4, 0)
    assert {name: plan["calls"] for name, plan in found["plans"].items()} == {
        "attention_forward": 2,
        "attention_backward": 2,
    }
    assert all(plan["histogram"]["+Inf"] == 2 and plan["seconds"] > 0 for plan in found["plans"].values())
    assert set(found["kernels"].values()) == {2} and len(found["kernels"]) == 4
    assert not seen.choices  # compiled before
    array, rows = 4 * x.size, 4 * x.size // SHAPE[-1]
    forward = 3 * array + array + 2 * rows
    backward = 3 * array + array + 2 * rows + array + rows + 3 * array
    assert found["bytes_no_copy"] + found["bytes_staged"] == 2 * (forward + backward)


def test_a_choice_of_metal_names_its_kernels_and_their_compilation_is_timed(on_device):
    x = jnp.ones((1, 24, 2, 8))
    with jax_mfa.record() as seen:
        jax.block_until_ready(jax.jit(lambda x: jax_mfa.dot_product_attention(x, x, x, implementation="metal"))(x))
    (choice,) = seen.choices
    (kernel,) = seen.as_dict()["metal"]["kernels"]
    assert choice.implementation == "metal" and choice.plan.startswith(f"{kernel} x (2, ") and not choice.reason
    assert seen.as_dict()["compilations"]["metal"]["count"] == 1


def test_a_capture_shows_plans_and_kernels_by_name(on_device):
    if on_device is None:
        return  # a Mac's own device does not tell
    x = jnp.ones((1, 24, 2, 8))
    jax.block_until_ready(jax.jit(lambda x: jax_mfa.dot_product_attention(x, x, x, implementation="metal"))(x))
    (record,) = on_device.dispatches()
    assert record["label"] == f"jax_mfa attention_forward / {record['kernel']}"
