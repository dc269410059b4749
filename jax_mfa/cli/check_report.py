"""The end of `python -m jax_mfa check --report`: one short text to paste into an issue, and what to do next.

Of the tables it has only the rows that failed. Knows what a run prints and found, and computes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata

from jax_mfa.choice import HOW_TO_STAY
from jax_mfa.cli.command_line import one_line

MOST_FAILURES = 40  # an issue has room for them
BEGIN, END = "----- paste from here -----", "----- to here -----"


@dataclasses.dataclass
class Report:
    """What a run of `check` found, as it comes.

    Attributes:
      found: lines about the machine, and which implementations it takes.
      failures: the row of each problem, and the line of each other check, that failed.
      running: the row of a problem, or the name of another check, that began and has not ended.
      verdict: the last line.
      platform: JAX's platform of the default device.
      without_metal: why Metal cannot be used; empty where it can.
    """

    found: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    running: str = ""
    verdict: str = ""
    platform: str = "cpu"
    without_metal: str = ""

    def step(self, text: str, passed: bool) -> None:
        """Prints what a problem or another check begins with, or its end: the rest of the line."""
        print(text, end="", flush=True)
        if not passed:
            self.failures.append(self.running + text)
        self.running = "" if text.endswith("\n") else text

    def lines(self, passed: bool) -> list[str]:
        """The text between its two lines, and the steps that follow."""
        failures = [one_line(row, 600) for row in self.failures[:MOST_FAILURES]]
        if left_out := len(self.failures) - len(failures):
            failures.append(f"and {left_out} more")
        unended = [f"{self.running} did not end"] if self.running else []
        steps = [f"{i}. {step}" for i, step in enumerate(self._next_steps(passed), 1)]
        text = [*self.found, "", *failures, *unended, self.verdict]
        return ["", BEGIN, *text, END, "", "What to do next:", *steps]

    def _next_steps(self, passed: bool) -> list[str]:
        steps = []
        if not passed or not self.without_metal:
            steps.append(f"Open an issue{_address()}, also where all passed, and paste the text between the two lines.")
        if not passed:
            steps.append("Until it is answered, implementation='blockwise' or JAX_MFA_DEVICE=none keeps Metal out.")
        if self.without_metal:
            steps.append(f"Metal is not used ({self.without_metal}): docs/troubleshooting.md says what to do.")
        elif self.platform != "cpu":
            steps.append(f"The default backend is {self.platform}, where blockwise runs: {HOW_TO_STAY}.")
        elif passed:
            steps.append("`python -m jax_mfa bench --models llama` says whether it is faster here.")
        return steps


def _address() -> str:
    """Where a published package says that its issues are."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for entry in importlib.metadata.metadata("jax-mfa").get_all("Project-URL") or ():
            name, _, url = entry.partition(", ")
            if name == "Issues":
                return f" at {url}"
    return ""
