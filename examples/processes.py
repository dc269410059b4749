"""Several processes of one run: started together, ended together, and never left to wait for one that is gone.

Nothing here knows what they compute. Each runs below a parent of its own host, which says what became of it: JAX ends a
process from C++, without an error of Python's, where the coordinator is gone.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

DIED = 3  # exit status of a process that another one left alone
GRACE = 5  # seconds between asking a process to end and ending it
_PARENT = "JAX_MFA_EXAMPLE_PARENT"  # in the environment of a process: the number of the one that started it


def is_started() -> bool:
    """Whether this process is one that `launch` has started."""
    return _PARENT in os.environ


class Watch:
    """Ends this process with an error when something has taken too long: another process then is gone, or hangs."""

    def __init__(self, number: int, seconds: float):
        self.number, self.seconds, self.doing, self.since = number, seconds, "", math.inf
        self.parent = int(os.environ.get(_PARENT, os.getppid()))
        threading.Thread(target=self.look, daemon=True).start()

    def begins(self, doing: str) -> None:
        self.doing, self.since = doing, time.monotonic()

    def ends(self) -> None:
        self.since = math.inf

    def look(self) -> None:
        while True:
            time.sleep(min(self.seconds / 4, 1))
            if time.monotonic() - self.since > self.seconds:
                self.leave(f"no answer from the other processes for {self.seconds:g} s while {self.doing}")
            if os.getppid() != self.parent:
                self.leave("what started it is gone")

    def leave(self, what: str) -> None:
        """Ends the process at once: within JAX a thread may wait for ever for one that is gone."""
        message = f"error: process {self.number}: {what}. Start the same command again to go on"
        print(message, file=sys.stderr, flush=True)
        os._exit(DIED)


def launch(commands: dict[int, Sequence[str]]) -> int:
    """Runs commands, by the number of each among all processes. When one ends with an error the others are ended, and
    the exit status is its, or `DIED` where a signal ended it."""
    environment = {**os.environ, _PARENT: str(os.getpid())}
    run = {number: subprocess.Popen(command, env=environment) for number, command in commands.items()}

    def end(how: int) -> None:
        for process in run.values():
            if process.poll() is None:
                process.send_signal(how)

    failed = None
    try:
        while any(process.poll() is None for process in run.values()):
            time.sleep(0.1)
            ended = [(number, process.returncode) for number, process in run.items() if process.returncode]
            if ended and failed is None:
                # who was left alone says so itself; the one that died first may not have been able to
                failed = min(ended, key=lambda x: x[1] == DIED)
                deadline = time.monotonic() + GRACE
            if failed is not None and time.monotonic() > deadline:
                end(signal.SIGKILL)
    except KeyboardInterrupt:
        end(signal.SIGTERM)
        time.sleep(0.5)
        end(signal.SIGKILL)
        return 128 + signal.SIGINT
    ended = [(number, process.returncode) for number, process in run.items() if process.returncode]
    number, status = failed or min(ended, key=lambda x: x[1] == DIED, default=(0, 0))
    if status >= 0:
        return status
    why = ", as JAX does where process 0 is gone" if status == -signal.SIGABRT and number != 0 else ""
    print(
        f"error: process {number} was ended by signal {-status}{why}. Start the same command again to go on",
        file=sys.stderr,
        flush=True,
    )
    return DIED
