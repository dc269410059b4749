"""What attention did: a recorder that is asked for, and a line for each choice where `JAX_MFA_LOG=debug`.

As a program is compiled, each attention in it is a *choice* of an implementation and a plan. As it runs, the native
module counts calls, kernels, bytes and times. JAX's profiler shows the calls of `blockwise`, by the names `jax_mfa_…`.
Knows texts and numbers, not what attention is.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax.monitoring

LOG = "JAX_MFA_LOG"
_XLA = "/jax/core/compile/backend_compile_duration"  # JAX's own name for the time that XLA takes
_ROUTES = {"no_copy": "without copy", "staged": "staged"}
_Samples: TypeAlias = list[tuple[str, dict[str, str], float]]  # the end of each one's name, its labels and its value
_logger = logging.getLogger("jax_mfa")
_lock = threading.Lock()
_recorders: list[Recorder] = []


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was taken for an attention of a program, as that was compiled.

    Attributes:
      call: "forward", "backward", "forward mode" or "forward mode of backward".
      problem: its shapes, dtype and features, as text.
      implementation: "metal", "blockwise" or "reference".
      plan: kernels with their grids, or tiles.
      reason: why it was not Metal; empty where it was.
    """

    call: str
    problem: str
    implementation: str
    plan: str
    reason: str

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.call} {self.problem} -> {self.implementation}, {self.plan}{why}"


class Recorder:
    """What was seen since `record` began; ask at any time, during or after.

    Attributes:
      choices: how many times each `Choice` was made: once for each program and problem, not for each call.
      problems: the problems themselves by their text, for `jax_mfa.tune`.
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        self._before = _counted(native)
        self._after: dict[str, Any] | None = None
        self._compilations: dict[str, dict[str, Any]] = {}
        self.choices: collections.Counter[Choice] = collections.Counter()
        self.problems: dict[str, Any] = {}

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON.

        Returns:
          "choices": a list of the fields of each `Choice`, with "programs".
          "compilations": by compiler, "xla" (of every program) or "metal", their "count" and "seconds".
          "metal": what ran there: "calls", "failures", "bytes_no_copy", "bytes_staged" of operands and results;
            "kernels", launches by name; "plans", by name "calls", "seconds" and "histogram", the calls that took no
            longer than so many seconds. Empty without Metal. Wait for results first, or their calls are missing.
        """
        with _lock:
            choices = [dataclasses.asdict(choice) | {"programs": n} for choice, n in self.choices.items()]
            compilations = {compiler: {**known} for compiler, known in self._compilations.items()}
            now = self._after if self._after is not None else _counted(self._native)
        return {"choices": choices, "compilations": compilations, "metal": _difference(now, self._before)}

    def __str__(self) -> str:
        found = self.as_dict()
        lines = [f"{n} x {choice}" for choice, n in self.choices.items()] or ["no attention was compiled"]
        for name, x in sorted(found["compilations"].items()):
            lines.append(f"{x['count']} compilations by {name}, {x['seconds']:.3f} s")
        metal = found["metal"]
        if not metal:
            return "\n".join([*lines, "Metal: not here"])
        lines.append(f"Metal: {metal['calls']} calls, {metal['failures']} failed")
        lines += [f"  {metal[f'bytes_{route}']} bytes {how}" for route, how in _ROUTES.items()]
        for name, plan in sorted(metal["plans"].items()):
            lines.append(f"  {plan['calls']} x {name}, {plan['seconds'] / plan['calls'] * 1e3:.3f} ms each")
            histogram = plan["histogram"]  # cumulated
            alone = (n - before for before, n in itertools.pairwise((0, *histogram.values())))
            lines.append("    " + ", ".join(f"{n} <= {bound} s" for bound, n in zip(histogram, alone) if n))
        lines += [f"  {n} x {name}" for name, n in sorted(metal["kernels"].items())]
        return "\n".join(lines)

    def prometheus(self) -> str:
        """The same as Prometheus' text format 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats)."""
        found = self.as_dict()
        metal, compilations = found["metal"], found["compilations"]
        programs: collections.Counter[tuple[str, ...]] = collections.Counter()
        for x in found["choices"]:
            programs[x["call"], x["implementation"], x["reason"]] += x["programs"]
        by = lambda label, values: [("", {label: key}, x) for key, x in values.items()]
        of_compilers = lambda fact: by("compiler", {name: x[fact] for name, x in compilations.items()})
        labels = ("call", "implementation", "reason")
        attentions: _Samples = [("", dict(zip(labels, key)), n) for key, n in programs.items()]
        families: list[tuple[str, str, _Samples]] = [
            ("programs_total", "Attentions in compiled programs.", attentions),
            ("compilations_total", "Compilations.", of_compilers("count")),
            ("compile_seconds_total", "Time of compilations.", of_compilers("seconds")),
        ]
        if metal:
            routes = by("route", {route: metal[f"bytes_{route}"] for route in _ROUTES})
            calls: _Samples = []
            for name, plan in metal["plans"].items():
                calls += [("_bucket", {"plan": name, "le": bound}, n) for bound, n in plan["histogram"].items()]
                calls += [("_sum", {"plan": name}, plan["seconds"]), ("_count", {"plan": name}, plan["calls"])]
            families += [
                ("metal_calls_total", "Calls of Metal.", [("", {}, metal["calls"])]),
                ("metal_failures_total", "Calls of Metal that failed.", [("", {}, metal["failures"])]),
                ("metal_bytes_total", "Operands and results, wrapped without a copy or staged.", routes),
                ("metal_kernel_launches_total", "Launches of each kernel.", by("kernel", metal["kernels"])),
                ("metal_call_seconds", "From a call's start to its results.", calls),
            ]
        return "".join(f"{line}\n" for family in families for line in _lines(*family))


def _lines(name: str, text: str, samples: _Samples) -> Iterator[str]:
    """Prometheus' text for a counter or a histogram."""
    yield f"# HELP jax_mfa_{name} {text}"
    yield f"# TYPE jax_mfa_{name} {'counter' if name.endswith('_total') else 'histogram'}"
    for end, labels, value in samples:
        escaped = {k: v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in labels.items()}
        listed = ",".join(f'{k}="{v}"' for k, v in escaped.items())
        yield f"jax_mfa_{name}{end}{f'{{{listed}}}' if listed else ''} {value}"


# --- the native module's counters


def _counted(native: Any) -> dict[str, Any]:
    return {} if native is None else {"statistics": native.statistics(), **native.recorded()}


def _difference(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What the counters say of the time between."""
    if not now:
        return {}
    names = ("calls", "failures", *(f"bytes_{route}" for route in _ROUTES))
    found: dict[str, Any] = {name: now["statistics"][name] - before["statistics"][name] for name in names}
    kernels = collections.Counter(now["kernels"]) - collections.Counter(before["kernels"])  # those that ran
    bounds = [*(f"{bound:g}" for bound in now["bounds"]), "+Inf"]
    none = {"calls": 0, "seconds": 0.0, "buckets": [0] * len(bounds)}
    plans = {}
    for name, plan in now["plans"].items():
        old = before["plans"].get(name, none)
        calls, seconds = (plan[fact] - old[fact] for fact in ("calls", "seconds"))
        if calls:
            cumulated = itertools.accumulate(n - m for n, m in zip(plan["buckets"], old["buckets"]))
            plans[name] = {"calls": calls, "seconds": seconds, "histogram": dict(zip(bounds, cumulated))}
    return found | {"kernels": dict(kernels), "plans": plans}


# --- who listens


@contextlib.contextmanager
def recorded(native: Any) -> Iterator[Recorder]:
    """Records within the context. `native` is the module that runs Metal calls, None where there is none."""
    _listen_to_xla()
    with _lock:
        if native is not None:
            native.record(True)
        recorder = Recorder(native)
        _recorders.append(recorder)
    try:
        yield recorder
    finally:
        with _lock:
            _recorders.remove(recorder)
            recorder._after = _counted(native)
            if native is not None and not any(x._native is native for x in _recorders):
                native.record(False)


@functools.cache
def _listen_to_xla() -> None:
    """Once: listeners cannot be taken back."""

    def heard(event: str, duration_secs: float, **_: Any) -> None:
        if event == _XLA:
            compiled("xla", duration_secs)

    jax.monitoring.register_event_duration_secs_listener(heard)


@functools.cache
def _logs(level: str) -> bool:
    if level not in ("", "debug"):
        raise ValueError(f"{LOG} must be unset or 'debug', got {level!r}")
    if level and not _logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("jax_mfa: %(message)s"))
        _logger.addHandler(handler)
        _logger.setLevel(logging.DEBUG)
        _logger.propagate = False
    return bool(level)


def choose(make: Callable[[], tuple[Choice, Any]]) -> None:
    """Tells whoever listens of a choice and its problem, which are made only then. Raises ValueError on a bad level."""
    logs = _logs(os.environ.get(LOG, ""))
    if not logs and not _recorders:
        return
    choice, problem = make()
    if logs:
        _logger.debug("%s", choice)
    with _lock:
        for recorder in _recorders:
            recorder.choices[choice] += 1
            if choice.call == "forward":
                recorder.problems[choice.problem] = problem


def compiled(compiler: str, seconds: float) -> None:
    """Tells recorders of a compilation."""
    with _lock:
        for recorder in _recorders:
            known = recorder._compilations.setdefault(compiler, {"count": 0, "seconds": 0.0})
            known["count"] += 1
            known["seconds"] += seconds


@contextlib.contextmanager
def compiling(compiler: str) -> Iterator[None]:
    """A compilation, from beginning to end."""
    start = time.perf_counter()
    try:
        yield
    finally:
        compiled(compiler, time.perf_counter() - start)
