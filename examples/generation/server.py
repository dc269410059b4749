"""The completions and chat interface of OpenAI over a service: JSON or server-sent events, on Starlette and uvicorn.

What a body may hold is checked here and refused by name; what is known of the interface and not here is refused too,
never ignored.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import uvicorn
from prometheus_client import CollectorRegistry, Histogram, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from generation.sampling import Sampling
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


class Refusal(Exception):
    """A request that is answered by an error, in the interface's form."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self.headers = status, headers
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        self.error = {"message": message, "type": kind, "param": param, "code": code}

    def response(self) -> Response:
        return JSONResponse({"error": self.error}, self.status, self.headers)


# --- what a body holds


class Fields:
    """The fields of a body, each taken once; what is left over is refused."""

    def __init__(self, body: dict[str, Any]):
        self.left = {name: x for name, x in body.items() if x is not None}

    def take(self, name: str, kinds: type | tuple[type, ...], otherwise: Any, what: str) -> Any:
        x = self.left.pop(name, otherwise)
        if x is not otherwise and (not isinstance(x, kinds) or (isinstance(x, bool) and kinds is not bool)):
            raise Refusal(400, f"{name} must be {what}, got {json.dumps(x)[:80]}", name)
        return x

    def number(self, name: str, otherwise: Any, least: float, most: float, kinds: Any = (int, float)) -> Any:
        x = self.take(name, kinds, otherwise, "an integer" if kinds is int else "a number")
        if x is not None and not least <= x <= most:
            raise Refusal(400, f"{name} must lie in {least}..{most}, got {x}", name)
        return x

    def only(self, name: str, *allowed: Any) -> None:
        """What the interface has and this server does not, but for values that ask for nothing."""
        x = self.left.pop(name, None)
        alike = lambda y: x == y and isinstance(x, bool) == isinstance(y, bool)  # 0 is not False
        if x is not None and not any(map(alike, allowed)):
            raise Refusal(400, f"{name} is not supported, got {json.dumps(x)[:80]}", name, "unsupported_parameter")

    def end(self) -> None:
        for name in self.left:
            raise Refusal(400, f"unrecognised argument: {name}", name, "unknown_parameter")


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is the same in both interfaces."""

    max_tokens: int | None
    sampling: Sampling
    choices: int
    stops: tuple[str, ...]
    stream: bool
    usage: bool  # at the end of a stream


def asked(fields: Fields, model: str) -> Asked:
    name = fields.take("model", str, model, "a string")
    if name != model:
        raise Refusal(404, f"model {name!r} is not here; {model!r} is", "model", "model_not_found")
    for other, allowed in {
        "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "logprobs": (False,),
        "top_logprobs": (0,), "best_of": (1,), "echo": (False,), "suffix": ("",), "tools": ([],),
        "tool_choice": ("none",), "response_format": ({"type": "text"},), "store": (False,),
    }.items():  # fmt: skip
        fields.only(other, *allowed)
    fields.take("user", str, "", "a string")
    stops = fields.take("stop", (str, list), [], "a string or up to 4 of them")
    stops = [stops] if isinstance(stops, str) else stops
    if len(stops) > 4 or not all(isinstance(x, str) and x for x in stops):
        raise Refusal(400, f"stop must be a string or up to 4, none empty, got {json.dumps(stops)[:80]}", "stop")
    options = fields.take("stream_options", dict, {}, "an object")
    stream = fields.take("stream", bool, False, "true or false")
    seed = fields.number("seed", None, -(2**63), 2**63 - 1, int)
    sampling = Sampling(
        temperature=float(fields.number("temperature", 1.0, 0, 2)),
        top_k=fields.number("top_k", 0, 0, 2**31 - 1, int),
        top_p=max(float(fields.number("top_p", 1.0, 0, 1)), 1e-9),
        seed=random.getrandbits(32) if seed is None else seed % 2**32,
    )
    limits = [fields.number(x, None, 1, 2**31, int) for x in ("max_completion_tokens", "max_tokens")]
    choices = fields.number("n", 1, 1, 2**31, int)
    return Asked(limits[0] or limits[1], sampling, choices, tuple(stops), stream, bool(options.get("include_usage")))


def prompts(fields: Fields, text: Text) -> list[list[int]]:
    """Of a completion: a text, tokens, or a list of either."""
    x = fields.take("prompt", (str, list), None, "a string, a list of tokens, or a list of these")
    tokens = lambda y: isinstance(y, list) and y and all(isinstance(i, int) and not isinstance(i, bool) for i in y)
    several = x if isinstance(x, list) and not tokens(x) else [x]
    if not several or not all(isinstance(y, str) or tokens(y) for y in several):
        raise Refusal(400, "prompt must be a string, a list of tokens, or a list of these, and is required", "prompt")
    found = [text.encode(y) if isinstance(y, str) else y for y in several]
    if not all(found):
        raise Refusal(400, "prompt must not be empty", "prompt")
    return found


def conversation(fields: Fields, text: Text) -> list[int]:
    messages = fields.take("messages", list, [], "a list of messages")
    plain = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and all(isinstance(x, dict) and x.get("type") == "text" for x in content):
            content = "".join(str(x.get("text", "")) for x in content)
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise Refusal(400, f"messages[{i}] must have a role and a content of text", "messages")
        plain.append({**message, "content": content})
    if not plain:
        raise Refusal(400, "messages must be a list of at least one message, and is required", "messages")
    try:
        return text.chat(plain)
    except ValueError as error:
        raise Refusal(400, str(error), "messages") from None


# --- what an answer looks like


class Form(NamedTuple):
    """Of the choices in an answer, and of the pieces of these in a stream."""

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


COMPLETION = Form("cmpl", "text_completion", "text_completion", _plain, _plain)
CHAT = Form("chatcmpl", "chat.completion", "chat.completion.chunk", _message, _delta)


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
                Refusal: lambda request, refusal: refusal.response(),
                HTTPException: lambda request, error: Refusal(error.status_code, error.detail).response(),
                Exception: lambda request, error: Refusal(500, "the server failed").response(),
            },
        )

    async def health(self, request: HTTPRequest) -> Response:
        return PlainTextResponse("ok\n")

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
        given = prompts(fields, self.text)
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
        if not length.isdigit() or int(length) > self.limits.body:
            raise too_long
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.limits.body:
                raise too_long
        try:
            found = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise Refusal(400, f"the body must be a JSON object, got {type(found).__name__}")
        for name, x in found.items():
            try:
                json.dumps([name, x], ensure_ascii=False).encode()
            except UnicodeEncodeError:
                shown = name.encode(errors="replace").decode()
                what = f"{shown} must be text in Unicode, without halves of surrogate pairs"
                raise Refusal(400, what, shown) from None
            except RecursionError:
                raise Refusal(400, f"{name} is nested too deeply", name) from None
        return Fields(found)

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
                raise Refusal(400, str(error)) from None
            jobs.append(Job(own, Writer(self.text, own, facts.stops), deliver))
        try:
            self.service.submit(jobs)
        except ValueError as error:
            raise Refusal(400, str(error), code="context_length_exceeded") from None
        except Busy as busy:
            raise Refusal(429, str(busy), code="cache_full", **{"retry-after": str(busy.retry_after)}) from None
        except Closing as closing:
            raise Refusal(503, str(closing), code="shutting_down") from None

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
    """uvicorn, which when asked to end gives what is under way a few seconds, and then ends it properly."""

    def __init__(self, interface: Interface, host: str, port: int):
        self.interface = interface
        grace = interface.limits.grace
        super().__init__(
            uvicorn.Config(
                interface.app, host=host, port=port, log_level="warning", lifespan="off",
                timeout_graceful_shutdown=int(grace) + 1,
            )
        )  # fmt: skip

    async def shutdown(self, sockets=None) -> None:
        grace = self.interface.limits.grace
        self.interface.service.close(grace)
        timer = asyncio.get_running_loop().call_later(grace, self.interface.closing.set)
        await super().shutdown(sockets)
        timer.cancel()
