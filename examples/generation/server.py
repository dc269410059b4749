"""The completions and chat interface of OpenAI over a service: JSON or server-sent events, on Starlette and uvicorn."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import uvicorn
from prometheus_client import CollectorRegistry, Histogram, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from generation.bodies import Asked, Fields, Refusal, asked, conversation, parsed, prompts
from generation.scheduler import Request
from generation.service import Busy, Closing, Event, Job, Service
from generation.text import Writer
from generation.tokenizer import Text

KEY_VARIABLE = "GENERATE_API_KEY"


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a client may ask for.

    Attributes:
      body: bytes.
      choices: of a request, over all of its prompts.
      grace: seconds that a shutdown leaves to what is under way.
    """

    body: int = 1 << 20
    choices: int = 16
    grace: float = 4.0


# --- what an answer looks like


class Form(NamedTuple):
    """Of the choices in an answer, and of the pieces of these in a stream; `asks` is the field that they answer."""

    asks: str
    prefix: str
    kind: str
    piece_kind: str
    whole: Callable[[str, str | None], dict[str, Any]]
    piece: Callable[[str, str | None, bool], dict[str, Any]]  # and whether it is the first of its choice


def _plain(text, finish, first=False):
    return {"text": text, "logprobs": None, "finish_reason": finish}


def _message(text, finish):
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"message": message, "logprobs": None, "finish_reason": finish}


def _delta(text, finish, first):
    delta = ({"role": "assistant"} if first else {}) | ({"content": text} if text or not finish else {})
    return {"delta": delta, "logprobs": None, "finish_reason": finish}


COMPLETION = Form("prompt", "cmpl", "text_completion", "text_completion", _plain, _plain)
CHAT = Form("messages", "chatcmpl", "chat.completion", "chat.completion.chunk", _message, _delta)


# --- the application


class Interface:
    """The routes, over a service.

    Args:
      key: a bearer token that clients must show; none if empty.
    """

    def __init__(self, service: Service, text: Text, model: str, limits: Limits = Limits(), key: str = ""):
        self.service, self.text, self.model, self.limits, self.key = service, text, model, limits, key
        self.began = int(time.time())
        self.closing = asyncio.Event()  # the time for what is under way is over
        self.metrics = Metrics(service)
        service.ended = self.metrics.ended
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self.show_metrics),
                Route("/v1/models", self.models),
                Route("/v1/models/{name}", self.models),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ],
            exception_handlers={
                Refusal: lambda request, refusal: _response(refusal),
                HTTPException: lambda request, error: _response(Refusal(error.status_code, error.detail)),
                Exception: lambda request, error: _response(Refusal(500, "the server failed")),
            },
        )

    async def health(self, request: HTTPRequest) -> Response:
        failed = self.service.failed
        return PlainTextResponse(f"{failed or 'ok'}\n", 503 if failed else 200)

    async def show_metrics(self, request: HTTPRequest) -> Response:
        self._admit(request)
        found = exposition.generate_latest(self.metrics.registry)
        return Response(found, media_type=exposition.CONTENT_TYPE_LATEST)

    async def models(self, request: HTTPRequest) -> Response:
        self._admit(request)
        here = {"id": self.model, "object": "model", "created": self.began, "owned_by": "local"}
        name = request.path_params.get("name")
        if name not in (None, self.model):
            raise Refusal(404, f"model {name!r} is not here; {self.model!r} is", "model", "model_not_found")
        return JSONResponse(here if name else {"object": "list", "data": [here]})

    async def completions(self, request: HTTPRequest) -> Response:
        fields = await self._fields(request)
        given = prompts(fields, self.text, self.service.engine.runner.config.vocabulary)
        facts = asked(fields, self.model)
        fields.end()
        return await self._answer(request, given, facts, 16, COMPLETION)

    async def chat(self, request: HTTPRequest) -> Response:
        fields = await self._fields(request)
        given = [conversation(fields, self.text)]
        facts = asked(fields, self.model)
        fields.end()
        return await self._answer(request, given, facts, self.service.engine.runner.most_length - len(given[0]), CHAT)

    def _admit(self, request: HTTPRequest) -> None:
        shown = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.key and not hmac.compare_digest(shown.encode(), self.key.encode()):
            raise Refusal(401, "a bearer token is needed, and this is not it", code="invalid_api_key")

    async def _fields(self, request: HTTPRequest) -> Fields:
        """The body, once the client may ask and it is not too long."""
        self._admit(request)
        too_long = Refusal(413, f"a body has at most {self.limits.body} bytes", code="body_too_large")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self.limits.body:
            raise too_long
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > self.limits.body:
                    raise too_long
        except ClientDisconnect:
            raise Refusal(499, "the client is gone") from None
        return Fields(parsed(bytes(body)))

    async def _answer(self, request, given: list[list[int]], facts: Asked, most: int, form: Form) -> Response:
        """Submits a job for each choice of each prompt, of `most` tokens where the client does not say."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        count = len(given) * facts.choices
        if count > self.limits.choices:
            raise Refusal(400, f"n times the number of prompts may be {self.limits.choices}, got {count}", "n")
        deliver = lambda event: loop.call_soon_threadsafe(queue.put_nowait, event)
        jobs = []
        for i in range(count):
            seed = (facts.sampling.seed + i % facts.choices) % 2**32
            tokens = given[i // facts.choices]
            try:
                own = Request(
                    list(tokens), max(facts.max_tokens or most, 1), dataclasses.replace(facts.sampling, seed=seed),
                    frozenset(self.service.engine.runner.config.end_tokens),
                )  # fmt: skip
            except ValueError as error:
                raise Refusal(400, f"{form.asks}: {error}", form.asks) from None
            jobs.append(Job(own, Writer(self.text, own, facts.stops), deliver))
        try:
            self.service.submit(jobs)
        except ValueError as error:
            fits = max(map(len, given)) < self.service.engine.runner.most_length
            name = "max_tokens" if fits else form.asks
            raise Refusal(400, f"{name}: {error}", name, "context_length_exceeded") from None
        except Busy as busy:
            raise Refusal(429, str(busy), code="cache_full", **{"retry-after": str(busy.retry_after)}) from None
        except Closing as closing:
            code = "worker_failed" if self.service.failed else "shutting_down"
            raise Refusal(503, str(closing), code=code) from None

        events = self._events(request, jobs, queue)
        about = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model}
        try:
            if facts.stream:
                first = await anext(events)  # what fails before its first text is an error of HTTP
                line = lambda x: f"data: {json.dumps(x)}\n\n"

                async def lines() -> AsyncIterator[str]:
                    begun = set()
                    try:
                        event = first
                        while True:
                            index = jobs.index(event.job)
                            choice = {"index": index, **form.piece(event.text, event.finish, index not in begun)}
                            begun.add(index)
                            usage = {"usage": None} if facts.usage else {}
                            yield line({**about, "object": form.piece_kind, "choices": [choice], **usage})
                            event = await anext(events)
                    except StopAsyncIteration:
                        if facts.usage:
                            yield line(
                                {**about, "object": form.piece_kind, "choices": [], "usage": usage_of(given, jobs)}
                            )
                    except Refusal as refusal:
                        yield line({"error": refusal.error})
                    yield "data: [DONE]\n\n"

                return EventStream(lines(), events)
            texts, ends = [""] * count, [None] * count
            async for event in events:
                i = jobs.index(event.job)
                texts[i] += event.text
                ends[i] = event.finish
            choices = [{"index": i, **form.whole(*x)} for i, x in enumerate(zip(texts, ends))]
            return JSONResponse({**about, "object": form.kind, "choices": choices, "usage": usage_of(given, jobs)})
        except BaseException:
            await events.aclose()
            raise

    async def _events(self, request: HTTPRequest, jobs: list[Job], queue: asyncio.Queue) -> AsyncIterator[Event]:
        """What becomes of jobs, till all have ended. Whoever is gone, or goes, takes what is left of them along.

        Raises:
          Refusal: where a job fails, or the server ends.
        """
        left = set(map(id, jobs))
        gone = asyncio.ensure_future(_until_gone(request))
        closing = asyncio.ensure_future(self.closing.wait())
        try:
            while left:
                coming = asyncio.ensure_future(queue.get())
                await asyncio.wait({coming, gone, closing}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    if gone.done():
                        raise Refusal(499, "the client is gone")
                    raise Refusal(503, "the server is shutting down", code="shutting_down")
                event = coming.result()
                if event.finish:
                    left.discard(id(event.job))
                if event.finish == "error":
                    raise Refusal(500, f"the worker failed: {event.error}", code="worker_failed")
                if event.finish == "closing":
                    raise Refusal(503, "the server is shutting down", code="shutting_down")
                yield event
        finally:
            gone.cancel()
            closing.cancel()
            for job in jobs:
                if id(job) in left:
                    self.service.cancel(job)


def _response(refusal: Refusal) -> Response:
    return JSONResponse({"error": refusal.error}, refusal.status, refusal.headers)


async def _until_gone(request: HTTPRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def usage_of(given: list[list[int]], jobs: list[Job]) -> dict[str, Any]:
    prompt, generated = sum(map(len, given)), sum(len(x.request.generated) for x in jobs)
    shared = {"cached_tokens": sum(x.request.shared for x in jobs)}
    return {
        "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
        "prompt_tokens_details": shared,
    }  # fmt: skip


class EventStream(Response):
    """Server-sent events; ends their source whatever happens."""

    media_type = "text/event-stream"

    def __init__(self, lines: AsyncIterator[str], events):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.lines, self.events = lines, events

    async def __call__(self, scope, receive, send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for line in self.lines:
                await send({"type": "http.response.body", "body": line.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.events.aclose()


class Metrics:
    """What Prometheus reads: figures of the engine as they are when asked for, and times of what has ended."""

    def __init__(self, service: Service):
        self.service, self.registry = service, CollectorRegistry()
        self.registry.register(self)
        buckets = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
        self.first = Histogram(
            "generate_time_to_first_token_seconds", "from a request to its first token", buckets=buckets,
            registry=self.registry,
        )  # fmt: skip
        self.whole = Histogram(
            "generate_request_seconds", "from a request to its end", ["finish"], buckets=buckets, registry=self.registry
        )

    def ended(self, job: Job, how: str) -> None:
        now, request = time.perf_counter(), job.request
        self.whole.labels(how).observe(now - request.arrived)
        if request.first_token is not None:
            self.first.observe(request.first_token - request.arrived)

    def collect(self):
        engine = self.service.engine
        for name, value, text in (
            ("steps", engine.counts.steps, "steps computed"),
            ("prompt_tokens", engine.counts.prompt_tokens, "tokens of prompts computed"),
            ("shared_tokens", engine.counts.shared_tokens, "tokens of prompts found in the cache"),
            ("generated_tokens", engine.counts.generated_tokens, "tokens generated"),
            ("guessed_tokens", engine.counts.guessed_tokens, "tokens that a draft guessed"),
            ("right_guesses", engine.counts.right_guesses, "of these, those that were right"),
            ("preemptions", engine.scheduler.preemptions, "requests that gave their pages back for a while"),
            ("faults", engine.counts.faults, "steps or requests that failed"),
            ("programs", sum(engine.runner.programs.values()), "programs traced"),
        ):
            yield CounterMetricFamily(f"generate_{name}", text, value=value)
        book = engine.scheduler.book
        for name, value, text in (
            ("requests_running", len(engine.scheduler.running), "requests in the batch"),
            ("requests_waiting", len(engine.scheduler.waiting), "requests that wait"),
            ("pages", book.pages, "pages of the cache"),
            ("pages_free", book.free_pages, "pages that no request holds"),
            ("cache_bytes", engine.runner.cache_bytes, "memory of the cache"),
        ):
            yield GaugeMetricFamily(f"generate_{name}", text, value=value)


class Server(uvicorn.Server):
    """uvicorn, which when asked to end gives what is under way a few seconds, and then ends it properly.

    It ends by itself where the engine has: whoever started it starts it again.
    """

    def __init__(self, interface: Interface, host: str, port: int):
        self.interface = interface
        grace = interface.limits.grace
        super().__init__(
            uvicorn.Config(
                interface.app, host=host, port=port, log_level="warning", lifespan="off",
                timeout_graceful_shutdown=int(grace) + 1,
            )
        )  # fmt: skip

    async def on_tick(self, counter: int) -> bool:
        """Whether to end, which is asked ten times a second."""
        return await super().on_tick(counter) or bool(self.interface.service.failed)

    async def shutdown(self, sockets=None) -> None:
        grace = self.interface.limits.grace
        self.interface.service.close(grace)
        timer = asyncio.get_running_loop().call_later(grace, self.interface.closing.set)
        await super().shutdown(sockets)
        timer.cancel()
