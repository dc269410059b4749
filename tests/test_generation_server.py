"""The generation example's server, held up by the official client: many at once, rude ones, too much, and its end."""

import asyncio
import concurrent.futures
import importlib.util
import json
import pathlib
import random
import socket
import sys
import threading
import time

import pytest
from flax import nnx
from harness import quick_jit

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2" if importlib.util.find_spec("httpx2") else "httpx")  # as `openai` has it
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
TestClient = pytest.importorskip("starlette.testclient").TestClient

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

from generation import tokenizer as tokenizers  # noqa: E402
from generation import training, weights  # noqa: E402
from generation.config import to_json  # noqa: E402
from generation.engine import Engine  # noqa: E402
from generation.model import Decoder  # noqa: E402
from generation.runner import Runner  # noqa: E402
from generation.sampling import GREEDY, Sampling  # noqa: E402
from generation.scheduler import Request  # noqa: E402
from generation.server import Interface, Limits, Server  # noqa: E402
from generation.service import Service  # noqa: E402
from generation.text import Writer  # noqa: E402

PAGES, LENGTH, BATCH = 64, 96, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that was never trained."""
    path = tmp_path_factory.mktemp("model") / "small"
    path.mkdir()
    tokenizer = tokenizers.train(training.local_text()[:20_000], 300)
    size = training.Size(context=LENGTH, layers=1, width=32, head_size=16)
    config = size.config(tokenizer.get_vocab_size(), tokenizer.token_to_id(tokenizers.END))
    tokenizers.save(path, tokenizer)
    weights.save(path, Decoder(config, rngs=nnx.Rngs(0)))
    (path / "config.json").write_text(json.dumps(to_json(config)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def runner(folder):
    """Compiled once; each server begins with empty caches."""
    runner = Runner(
        weights.load(folder), pages=PAGES, page_size=8, most_sequences=BATCH, most_tokens=64, most_length=LENGTH,
        jit=quick_jit,
    )  # fmt: skip
    runner.sequence_buckets, runner.row_buckets = [BATCH], {BATCH: [BATCH, 64]}  # two programs are enough
    for bucket in runner.buckets():
        runner.warm_up(*bucket)
    return runner


class Running:
    """A server on a port of its own, in a thread."""

    def __init__(self, folder, runner, most_waiting=200, key="", limits=Limits(), slow=0.0):  # noqa: B008
        runner.reset()
        self.text = tokenizers.Text(folder)
        self.engine = Engine(runner, BATCH, 64)
        self.broken, self.slow = False, slow
        step = self.engine.runner.run

        def run(pieces):
            time.sleep(self.slow)
            if self.broken:
                self.broken = False
                raise RuntimeError("the device is gone")
            return step(pieces)

        self.engine.runner = _Replaced(runner, run)
        self.service = Service(self.engine, most_waiting)
        self.service.start()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(Interface(self.service, self.text, "small", limits, key), "127.0.0.1", self.port)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self):
        self.thread.start()
        deadline = time.monotonic() + 60
        while not self.server.started:
            assert time.monotonic() < deadline and self.thread.is_alive()
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive() and self.service.join(30)
        if self.service.failed:
            return
        book = self.engine.scheduler.book
        assert book.free_pages == PAGES and not book.sequences and not self.service._jobs

    def client(self, kind=openai.OpenAI, key="none"):
        return kind(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def alone(self, prompt, count, choice=GREEDY) -> str:
        """The text that a request gets with nobody else there."""
        request = Request(self.text.encode(prompt), count, choice, frozenset(self.engine.runner.config.end_tokens))
        writer = Writer(self.text, request)
        engine = Engine(self.engine.runner, BATCH, 64)
        engine.run([request], lambda request, tokens: writer.take(tokens))
        writer.end()
        return writer.written


class _Replaced:
    """A runner with another `run`."""

    def __init__(self, runner, run):
        self._runner, self.run = runner, run

    def __getattr__(self, name):
        return getattr(self._runner, name)


async def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_completions_and_chat_in_the_official_client(folder, runner):
    with Running(folder, runner) as running:
        client, prompt = running.client(), "The class statement"
        wanted = running.alone(prompt, 12)
        done = client.completions.create(model="small", prompt=prompt, max_tokens=12, temperature=0)
        assert done.choices[0].text == wanted and done.choices[0].finish_reason == "length"
        assert done.usage.completion_tokens == 12 and done.usage.prompt_tokens == len(running.text.encode(prompt))

        facts = {"max_tokens": 12, "temperature": 0.8, "seed": 7, "stream": True}
        stream = list(client.completions.create(
            model="small", prompt=[prompt, "Other"], n=2, stream_options={"include_usage": True}, **facts
        ))  # fmt: skip
        assert stream[-1].usage.completion_tokens == 48 and not stream[-1].choices
        texts = ["", "", "", ""]
        for chunk in stream[:-1]:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        for i, text in enumerate(texts):
            choice = Sampling(0.8, seed=7 + i % 2)
            assert text == running.alone((prompt, "Other")[i // 2], 12, choice)

        stop = wanted[len(wanted) // 2 :][:3]
        ended = client.completions.create(model="small", prompt=prompt, max_tokens=12, temperature=0, stop=[stop])
        assert ended.choices[0].text == wanted[: wanted.index(stop)] and ended.choices[0].finish_reason == "stop"

        messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
        said = client.chat.completions.create(model="small", messages=messages, max_tokens=6, temperature=0)
        assert said.choices[0].message.role == "assistant" and said.object == "chat.completion"
        pieces = client.chat.completions.create(
            model="small", messages=messages, max_completion_tokens=6, temperature=0, stream=True
        )
        pieces = list(pieces)
        assert [x.choices[0].delta.role for x in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
        assert "".join(x.choices[0].delta.content or "" for x in pieces) == said.choices[0].message.content
        assert said.choices[0].message.content == running.alone("user: Hello\nassistant:", 6)
        assert [x.id for x in client.models.list()] == ["small"] and client.models.retrieve("small").id == "small"

        shown = httpx.get(f"{running.url}/metrics").text
        for name in ("time_to_first_token_seconds_count", "generated_tokens_total", "pages_free", "requests_waiting"):
            assert f"generate_{name}" in shown
        assert f"generate_pages {PAGES}.0" in shown
        assert httpx.get(f"{running.url}/health").status_code == 200


def test_what_is_malformed_is_refused_by_name(folder, runner):
    with Running(folder, runner, limits=Limits(body=3000, choices=4), key="secret") as running:
        good = {"Authorization": "Bearer secret"}
        url = f"{running.url}/v1/completions"

        def refused(status, said, **keywords):
            answer = httpx.post(keywords.pop("url", url), **{"headers": good, **keywords})
            error = answer.json()["error"]
            assert answer.status_code == status and said in error["message"], answer.text
            return error

        refused(401, "bearer token", headers={}, json={"prompt": "a"})
        refused(401, "bearer token", headers={"Authorization": "Bearer secreT"}, json={"prompt": "a"})
        assert (
            httpx.get(f"{running.url}/metrics").status_code == httpx.get(f"{running.url}/v1/models").status_code == 401
        )
        with pytest.raises(openai.AuthenticationError):
            running.client(key="wrong").models.list()
        assert len(running.client(key="secret").models.list().data) == 1

        for body in (b"{", b"\xff\xfe", b"", b"[" * 2900):
            refused(400, "no JSON", content=body)
        refused(400, "JSON object, got list", content=b"[1]")
        refused(413, "at most 3000 bytes", content=b" " * 3001)
        refused(413, "at most 3000 bytes", content=iter([b" " * 1000] * 4))  # without saying how long
        refused(404, "Not Found", url=f"{running.url}/v1/edits", json={})
        for facts, name in (
            ({}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": {"a": 1}}, "prompt"), ({"prompt": [1.5]}, "prompt"),
            ({"prompt": "\ud800"}, "prompt"), ({"prompt": "a", "\ud800": 1}, "\\ud800"),
            ({"prompt": "a", "user": "\udc00"}, "user"),
            ({"prompt": "a", "stop": ["\ud83d"]}, "stop"), ({"prompt": "a", "logprobs": 0}, "logprobs"),
            ({"prompt": "a", "max_tokens": 0}, "max_tokens"), ({"prompt": "a", "max_tokens": True}, "max_tokens"),
            ({"prompt": "a", "temperature": 3}, "temperature"), ({"prompt": "a", "temperature": "hot"}, "temperature"),
            ({"prompt": "a", "top_p": -1}, "top_p"), ({"prompt": "a", "n": 5}, "n"), ({"prompt": "a", "n": 0}, "n"),
            ({"prompt": "a", "stop": ["a", ""]}, "stop"), ({"prompt": "a", "stop": list("abcde")}, "stop"),
            ({"prompt": "a", "stream": "yes"}, "stream"), ({"prompt": "a", "seed": 1.5}, "seed"),
            ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias"), ({"prompt": "a", "colour": "red"}, "colour"),
            ({"prompt": [-1]}, "prompt"), ({"prompt": ["a", [10**30]]}, "prompt"), ({"prompt": "a" * 500}, "prompt"),
            ({"prompt": "a", "temperature": float("nan")}, "temperature"),
            ({"prompt": "a", "stop": ["a", {"b": -float("inf")}]}, "stop"),
        ):  # fmt: skip
            assert refused(400, name, content=json.dumps(facts))["param"] == name
        for number in ("1e400", "9" * 2900):
            assert refused(400, "seed", content=f'{{"prompt": "a", "seed": {number}}}')["param"] == "seed"
        chat = f"{running.url}/v1/chat/completions"
        for messages in (
            [],
            [{"role": "user", "content": "a" * 500}],
            [{"role": "user"}],
            ["hello"],
            [{"role": "user", "content": [{"type": "image_url"}]}],
        ):
            assert refused(400, "messages", url=chat, json={"messages": messages})["param"] == "messages"
        assert (
            refused(404, "model 'gpt' is not here", json={"model": "gpt", "prompt": "a"})["code"] == "model_not_found"
        )
        too_long = refused(400, "too many: a sequence has at most 96", json={"prompt": "a", "max_tokens": 96})
        assert too_long["code"] == "context_length_exceeded" and too_long["param"] == "max_tokens"


@pytest.mark.sweep
def test_a_hundred_streams_at_once_and_some_that_hang_up(folder, runner):
    with Running(folder, runner) as running:
        wanted = {i: running.alone(f"Number {i}", 16) for i in range(0, 100, 10)}

        async def one(client, i):
            stream = await client.completions.create(
                model="small", prompt=f"Number {i}", max_tokens=16, temperature=0, stream=True
            )
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].text
                if i % 7 == 3:  # rude
                    await stream.close()
                    return None
            return text

        async def everyone():
            async with running.client(openai.AsyncOpenAI) as client:
                leaving = asyncio.create_task(client.completions.create(model="small", prompt="Gone", max_tokens=80))
                texts = await asyncio.gather(*(one(client, i) for i in range(100)))
                leaving.cancel()
                return texts

        texts = asyncio.run(everyone())
        assert all((text is None) == (i % 7 == 3) for i, text in enumerate(texts))
        for i, text in wanted.items():
            assert texts[i] in (None, text)
        deadline = time.monotonic() + 20
        while not running.engine.idle and time.monotonic() < deadline:
            time.sleep(0.01)
        assert running.engine.idle and running.engine.scheduler.book.free_pages == PAGES
        shown = httpx.get(f"{running.url}/metrics").text
        assert 'generate_request_seconds_count{finish="cancelled"}' in shown


def test_a_full_cache_says_when_to_come_again_and_loses_nothing(folder, runner):
    with Running(folder, runner, most_waiting=2, slow=0.02) as running:
        wanted = running.alone("Once upon", 60)

        async def one(client):
            try:
                done = await client.completions.create(model="small", prompt="Once upon", max_tokens=60, temperature=0)
                return done.choices[0].text
            except openai.RateLimitError as busy:
                assert 1 <= int(busy.response.headers["retry-after"]) <= 60 and busy.code == "cache_full"

        async def everyone():
            async with running.client(openai.AsyncOpenAI) as client:
                return await asyncio.gather(*(one(client) for _ in range(30)))

        texts = asyncio.run(everyone())
        assert texts.count(None) > 0 and texts.count(wanted) >= 10 and set(texts) == {None, wanted}
        assert running.client().completions.create(model="small", prompt="Once upon", max_tokens=60, temperature=0)


def test_a_fault_of_the_worker_is_an_error_of_its_requests_alone(folder, runner):
    with Running(folder, runner) as running:
        wanted = running.alone("After", 10)
        running.slow = 0.2  # all of them come before one is done

        async def one(client, prompt, count, stream):
            try:
                done = await client.completions.create(
                    model="small", prompt=prompt, max_tokens=count, temperature=0, stream=stream
                )
                if not stream:
                    return done.choices[0].text
                return "".join([x.choices[0].text async for x in done])
            except openai.APIError as error:
                return error

        async def everyone():
            async with running.client(openai.AsyncOpenAI) as client:
                first = [asyncio.create_task(one(client, "Long", 80, i % 2 == 0)) for i in range(BATCH)]
                scheduler = running.engine.scheduler
                await until(lambda: sum(x.first_token is not None for x in scheduler.running) == BATCH)
                others = [asyncio.create_task(one(client, "After", 10, i % 2 == 0)) for i in range(4)]
                await until(lambda: len(scheduler.waiting) == 4)
                running.broken, running.slow = True, 0
                return await asyncio.gather(*first), await asyncio.gather(*others)

        failed, others = asyncio.run(everyone())
        assert all(isinstance(x, openai.APIError) and "the device is gone" in str(x) for x in failed)
        assert [x.status_code for x in failed[1::2]] == [500] * (BATCH // 2)  # the streams had begun
        assert others == [wanted] * 4


@pytest.mark.share(2)
@pytest.mark.parametrize("place", ["engine", "text"])
def test_nothing_waits_for_an_engine_that_has_ended(folder, runner, place):
    """Whatever ends it: its requests end with an error, `/health` tells, and the server ends. A fault of one request's
    text is its own."""
    with Running(folder, runner, slow=0.05) as running:
        app = TestClient(running.server.interface.app)
        assert app.get("/health").status_code == 200
        wanted, body = running.alone("After", 10), {"prompt": "Once", "max_tokens": 80, "temperature": 0}
        pool = concurrent.futures.ThreadPoolExecutor(3)
        post = lambda **more: httpx.post(f"{running.url}/v1/completions", json={**body, **more}, timeout=60)
        whole, stream = pool.submit(post), pool.submit(post, stream=True)
        asyncio.run(until(lambda: len(running.engine.scheduler.running) == 2))

        def fail(*_):
            raise KeyboardInterrupt("a panic")  # no Exception

        if place == "engine":
            running.engine.step = fail
        else:
            for job in list(running.service._jobs.values()):
                job.writer.take = fail
        assert whole.result(60).status_code == 500 and "a panic" in whole.result().json()["error"]["message"]
        assert "a panic" in stream.result(60).text
        if place == "text":
            assert post(prompt="After", max_tokens=10).json()["choices"][0]["text"] == wanted
            return
        assert "a panic" in running.service.failed and "a panic" in app.get("/health").text
        assert app.get("/health").status_code == app.post("/v1/completions", json=body).status_code == 503
        running.thread.join(10)
        assert not running.thread.is_alive()


LEAVES = (
    *("null", "true", "0", "-1", "1.5", "1e999", "-1e999", "NaN", "Infinity", "9" * 30, "9" * 5000, "2147483648"),
    *('"\\ud800"', '"a\\udc00b"', '"\\u0000"', '""', '"a"', "[]", "{}", "[[1]]", '[1, "a"]', "[true]", "[99999]"),
    *(f"{a * n}{b * n}" for a, b in (("[", "]"), ('{"a":', "0}")) for n in (50, 60, 1000, 50_000)),
    '[{"role": "user", "content": "hi", "name": ["a"]}]', '[{"role": "\\ud800", "content": ""}]',
    '[{"role": "user", "content": null}]', '[{"role": "user", "content": [{"type": "text", "text": 5}]}]',
)  # fmt: skip


def test_no_body_whatever_it_is_is_a_fault_of_the_server(folder, runner):
    served = Running(folder, runner, limits=Limits(body=200_000))
    with served as running, TestClient(running.server.interface.app, raise_server_exceptions=False) as app:
        fields = "model prompt messages max_tokens temperature top_p top_k n stop stream stream_options seed user tools"
        names = [f'"{x}"' for x in fields.split()] + ['"\\ud800"', '"\\u0000"', '""', '"logit_bias"', '"max_tokens"']
        rng = random.Random(0)
        taken = 0
        for i in range(500):
            chat = i % 2
            own = '"messages": [{"role": "user", "content": "hi"}]' if chat else '"prompt": "a class"'
            items = [own] * (rng.random() < 0.8) + ['"max_tokens": 2']
            items += [f"{rng.choice(names)}: {rng.choice(LEAVES)}" for _ in range(rng.randrange(3))]
            body = bytearray(f"{{{', '.join(items)}}}".encode())
            if i % 10 == 0:
                body[rng.randrange(len(body))] = rng.randrange(256)
            answer = app.post("/v1/chat/completions" if chat else "/v1/completions", content=bytes(body))
            assert answer.status_code < 500, (answer.text, bytes(body[:500]))
            assert (answer.status_code == 200) or answer.json()["error"]["message"]
            taken += answer.status_code == 200
        assert 50 < taken < 400 and not running.service.failed


@pytest.mark.share(2)
@pytest.mark.parametrize("grace", [0.5, 4.0], ids=["cut", "finished"])
def test_the_end_of_the_server_ends_streams_properly_within_five_seconds(folder, runner, grace):
    count = 80 if grace < 1 else 20
    with Running(folder, runner, limits=Limits(grace=grace), slow=0.03) as running:
        client = running.client()
        wanted = running.alone("Once", count)
        lines = []
        with httpx.stream(
            "POST", f"{running.url}/v1/completions", timeout=60,
            json={"prompt": "Once", "max_tokens": count, "temperature": 0, "stream": True},
        ) as stream:  # fmt: skip
            for line in filter(None, stream.iter_lines()):
                lines.append(line.removeprefix("data: "))
                if len(lines) == 1:
                    begun = time.monotonic()
                    running.server.should_exit = True
        running.thread.join(10)
        assert time.monotonic() - begun < 5 and not running.thread.is_alive()
        assert lines[-1] == "[DONE]"
        *pieces, last = map(json.loads, lines[:-1])
        text = "".join(x["choices"][0]["text"] for x in pieces)
        if grace < 1:
            assert last["error"]["code"] == "shutting_down" and wanted.startswith(text)
        else:
            assert text + last["choices"][0]["text"] == wanted and last["choices"][0]["finish_reason"] == "length"
        with pytest.raises(openai.APIConnectionError):
            client.models.list()
