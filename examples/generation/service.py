"""An engine in a thread of its own: jobs go in from anywhere, and text comes out through their callbacks.

A fault of a step or of a job's text is an error of its requests alone. Whatever else is raised, by Python or by a
package below it, ends the thread: all jobs end with an error, no more are taken, and `failed` says so.
"""

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
        self.failed = ""  # of what fault the thread has ended
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
            if self.failed or self._deadline is not None:
                raise Closing(self.failed or "the server is shutting down")
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
        try:
            while self._step():
                pass
        except BaseException as error:  # a panic in Rust is no Exception
            LOG.critical("the engine failed", exc_info=True)
            with self._wake:
                self.failed = f"the engine failed: {type(error).__name__}: {error}"
                jobs = [*self._jobs.values(), *(job for what, job in self._coming if what == "submit")]
                self._jobs, self._coming = {}, []
            for job in jobs:
                self._tell(Event(job, "", "error", self.failed))

    def _step(self) -> bool:
        """One step of the engine, and what has come since the last; False when there is nothing more to do."""
        with self._wake:
            while self.engine.idle and not self._coming and self._deadline is None:
                self._wake.wait()
            coming, self._coming = self._coming, []
            self._jobs |= {job.request: job for what, job in coming if what == "submit"}
        for what, job in coming:
            if what == "submit":
                self.engine.submit(job.request)
            elif job.request in self._jobs:
                self._end(job, "cancelled")
        if self._deadline is not None:
            if time.monotonic() > self._deadline:
                for job in list(self._jobs.values()):
                    self._end(job, "closing")
            if self.engine.idle:
                return False
        for request, tokens in self.engine.step():
            job = self._jobs[request]
            try:
                event = self._written(job, tokens)
            except BaseException as error:
                LOG.exception("the text of a request failed")
                self._end(job, "error", f"{type(error).__name__}: {error}")
                continue
            if event.finish:
                self._done(job, event)
            elif event.text:
                self._tell(event)
        return True

    def _written(self, job: Job, tokens: list[int]) -> Event:
        """The text of new tokens. A stop string in it ends the request, in what was held back too."""
        request, writer = job.request, job.writer
        text = writer.take(tokens)
        if request.finish is not None:
            text += writer.end()
        if request.error:
            LOG.error("a request failed: %s", request.error)
            return Event(job, text, request.finish, request.error)
        if writer.stopped and request.finish is None:
            self.engine.finish(request, "stop")
        return Event(job, text, "stop" if writer.stopped else request.finish)

    def _end(self, job: Job, reason: str, error: str | None = None) -> None:
        if job.request.finish is None:
            self.engine.finish(job.request, reason, error)
        self._done(job, Event(job, "", reason, error))

    def _done(self, job: Job, event: Event) -> None:
        self._seconds += 0.2 * (time.perf_counter() - job.request.arrived - self._seconds)
        self.ended(job, event.finish or "")
        del self._jobs[job.request]
        self._tell(event)

    def _tell(self, event: Event) -> None:
        try:
            event.job.deliver(event)
        except RuntimeError:  # whoever waited for it is gone, and his loop with him
            LOG.debug("nobody waits for a job any more")
        except Exception:  # the fault of one job's receiver is none of the others
            LOG.exception("an event was not delivered")
