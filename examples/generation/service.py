"""An engine in a thread of its own: jobs go in from anywhere, and text comes out through their callbacks."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from generation.engine import Engine
from generation.scheduler import Request
from generation.text import Writer

LOG = logging.getLogger("generate")


class Busy(Exception):
    """There is no room for another request; `retry_after` seconds may help."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


class Closing(Exception):
    """No request is taken any more."""


@dataclasses.dataclass(frozen=True)
class Event:
    """Text of a job, perhaps none, and how it ended, if it did: "stop", "length", "cancelled", "closing", "error"."""

    job: Job
    text: str
    finish: str | None = None
    error: str | None = None


@dataclasses.dataclass(eq=False)
class Job:
    """A request, its text, and who wants to know of it; called by the engine's thread."""

    request: Request
    writer: Writer
    deliver: Callable[[Event], None]


class Service:
    """Steps while there is something to do.

    Args:
      most_waiting: requests beyond those in the batch; more are refused.
      ended: told of each job that ends, and how.
    """

    def __init__(self, engine: Engine, most_waiting: int, ended: Callable[[Job, str], None] = lambda job, how: None):
        self.engine, self.most_waiting, self.ended = engine, most_waiting, ended
        self._jobs: dict[Request, Job] = {}  # the thread's own
        self._wake = threading.Condition()
        self._coming: list[tuple[str, Job]] = []
        self._deadline: float | None = None
        self._seconds = 1.0  # that a request takes, of late
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: list[Job]) -> None:
        """All of the jobs, or none.

        Raises:
          ValueError: for a request that can never be served.
          Busy, Closing: for what could be served at another time.
        """
        for job in jobs:
            self.engine.check(job.request)
        with self._wake:
            if self._deadline is not None:
                raise Closing("the server is shutting down")
            scheduler = self.engine.scheduler
            waiting = len(scheduler.waiting) + sum(what == "submit" for what, _ in self._coming)
            room = self.most_waiting + max(scheduler.most_requests - len(scheduler.running), 0)
            if waiting + len(jobs) > room:
                seconds = self._seconds * (1 + waiting / scheduler.most_requests)
                raise Busy(f"the cache is full, and {waiting} requests wait for it", int(min(max(seconds, 1), 60)))
            self._coming += [("submit", job) for job in jobs]
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        with self._wake:
            self._coming.append(("cancel", job))
            self._wake.notify()

    def close(self, grace: float) -> None:
        """Takes nothing more, and ends what is not done in `grace` seconds."""
        with self._wake:
            self._deadline = time.monotonic() + grace
            self._wake.notify()

    def join(self, timeout: float) -> bool:
        """Whether the thread has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # --- the thread

    def _work(self) -> None:
        while True:
            with self._wake:
                while self.engine.idle and not self._coming and self._deadline is None:
                    self._wake.wait()
                coming, self._coming = self._coming, []
            for what, job in coming:
                if what == "submit":
                    self._jobs[job.request] = job
                    self.engine.submit(job.request)
                elif job.request in self._jobs:
                    self._end(job, "cancelled")
            if self._deadline is not None:
                if time.monotonic() > self._deadline:
                    for job in list(self._jobs.values()):
                        self._end(job, "closing")
                if self.engine.idle:
                    return
            try:
                given = self.engine.step()
            except Exception:  # the engine answers for faults of a step; this is one of the engine
                LOG.exception("the engine failed")
                for job in list(self._jobs.values()):
                    self._end(job, "error", "the engine failed")
                continue
            for request, tokens in given:
                self._hand_out(self._jobs[request], tokens)

    def _hand_out(self, job: Job, tokens: list[int]) -> None:
        request = job.request
        text = job.writer.take(tokens)
        if job.writer.stopped and request.finish != "error":
            if request.finish is None:
                self.engine.finish(request, "stop")
            self._done(job, Event(job, text, "stop"))
        elif request.finish is None:
            if text:
                self._deliver(Event(job, text))
        else:
            if request.error:
                LOG.error("a request failed: %s", request.error)
            self._done(job, Event(job, text + job.writer.end(), request.finish, request.error))

    def _end(self, job: Job, reason: str, error: str | None = None) -> None:
        if job.request.finish is None:
            self.engine.finish(job.request, reason, error)
        self._done(job, Event(job, "", reason, error))

    def _done(self, job: Job, event: Event) -> None:
        del self._jobs[job.request]
        self._seconds += 0.2 * (time.perf_counter() - job.request.arrived - self._seconds)
        self.ended(job, event.finish or "")
        self._deliver(event)

    def _deliver(self, event: Event) -> None:
        try:
            event.job.deliver(event)
        except RuntimeError:  # whoever waited for it is gone, and his loop with him
            LOG.debug("nobody waits for a job any more")
