"""Attention within another program's command buffers, by `csrc/host.h`."""

from __future__ import annotations

import concurrent.futures
import ctypes as c
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulator import device, host_module
from harness import arrays, assert_allclose

import jax_mfa
from jax_mfa import metal
from jax_mfa.arguments import specify_abstract
from jax_mfa.metal import source

HERE = pathlib.Path(__file__).parent
SHAPES = {  # of query and key: one kernel, and decoding, whose two share partial results
    "prefill": ((1, 40, 2, 16), (1, 40, 2, 16)),
    "decoding": ((2, 1, 4, 64), (2, 600, 2, 64)),
}


@pytest.fixture(scope="module")
def host():
    """`run_host` of host.cc."""
    built = device.host(
        [HERE / "host.cc"],
        include_dirs=[host_module.CSRC],
        flags=host_module.FLAGS,
        depends=[host_module.CSRC / "host.h"],
        std=host_module.STANDARD,
    )
    return c.CDLL(str(built)).run_host


def plan_of(name):
    q, k = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES[name])
    return metal.plan_of(*specify_abstract(query=q, key=k, value=k), "forward", "staged").json


def ran(host, native, text, name, concurrent=True, barriers=True):
    """What the host says, and its result or its error."""
    for digest, base in source.texts().items():
        native.add_source(digest, base)
    q, k, v = arrays(SHAPES[name][0], SHAPES[name][1], SHAPES[name][1])
    result, error = np.zeros_like(q), c.create_string_buffer(512)
    q_at, k_at, v_at, result_at = (x.ctypes.data_as(c.c_void_p) for x in (q, k, v, result))
    given = q_at, k_at, v_at, c.c_uint64(q.size), c.c_uint64(k.size), concurrent, barriers
    answer = host(native.__file__.encode(), text.encode(), *given, result_at, error)
    return answer, result, error.value.decode()


def expected(name):
    q, k, v = arrays(SHAPES[name][0], SHAPES[name][1], SHAPES[name][1])
    attend = lambda q: jax_mfa.dot_product_attention(q, k, v, implementation="reference")
    first = attend(2 * q)
    return attend(first + q) - first


@pytest.mark.share(4)
@pytest.mark.parametrize("concurrent", [False, True], ids=["serial", "concurrent"])
@pytest.mark.parametrize("name", SHAPES)
def test_two_attentions_between_a_hosts_own_dispatches(metal, native, host, name, concurrent):
    parts, result, error = ran(host, native, plan_of(name), name, concurrent)
    assert (parts, error) == (1, "")
    assert_allclose(result, expected(name), rtol=1e-5, atol=2e-6)
    assert metal.totals()["command_buffers"] == 1


def test_long_work_has_parts(metal, native, host, monkeypatch):
    monkeypatch.setenv("JAX_MFA_COMMAND_BUFFER_MS", "0.0001")
    native.reset()
    parts, result, _ = ran(host, native, plan_of("prefill"), "prefill")
    assert parts > 1
    assert_allclose(result, expected("prefill"), rtol=1e-5, atol=2e-6)


def test_hosts_on_several_threads_share_what_is_compiled(metal, native, host):
    text = plan_of("prefill")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: ran(host, native, text, "prefill"), range(8)))
    assert all((result == found[0][1]).all() for _, result, _ in found)
    assert native.statistics()["plans"] == 1


def test_a_host_without_barriers_is_found_out(metal, native, host):
    ran(host, native, plan_of("prefill"), "prefill", barriers=False)
    assert any("barrier" in str(report) for report in metal.reports())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:50], "JSON"),
        (lambda text: text.replace('"shape":[1,40,2,16]', '"shape":[1,41,2,16]', 1), "bytes, and its buffer"),
        (lambda text: text.replace("attention_forward", "no_such_kernel"), "no_such_kernel"),
    ],
    ids=["no JSON", "a short buffer", "no kernel"],
)
def test_errors_are_texts(metal, native, host, change, words):
    answer, _, error = ran(host, native, change(plan_of("prefill")), "prefill")
    assert answer == -1
    assert words in error, error
