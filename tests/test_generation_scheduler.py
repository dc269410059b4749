"""The scheduler of the generation example: whatever comes, every request gets what it would get alone, and every page
comes back. No model: what follows some tokens is a number computed from them, and the pool holds tokens."""

import pathlib
import sys
import zlib

import numpy as np
import pytest

import jax_mfa

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

from generation.scheduler import Request, Scheduler

WORDS = 5
END = 3


def following(tokens) -> int:
    return zlib.crc32(bytes(tokens)) % WORDS


def alone(request) -> list[int]:
    tokens = list(request.prompt)
    while len(tokens) < request.most:
        tokens.append(following(tokens))
        if tokens[-1] in request.end_tokens:
            break
    return tokens[len(request.prompt) :]


class Pool:
    """What the device would hold, and what a step would compute from it."""

    def __init__(self, pages, page_size):
        self.tokens = np.full((pages, page_size), -1)

    def step(self, scheduler):
        """A planned step; the requests that ended."""
        parts = scheduler.plan()
        book = scheduler.book
        assert sum(len(x.tokens) for x in parts) <= scheduler.most_tokens
        assert len({id(x.request) for x in parts}) == len(parts) <= scheduler.most_requests
        assert [x.request.arrival for x in parts] == sorted(x.request.arrival for x in parts)
        copies = [(source, target) for x in parts for source, target in zip(x.where.sources, x.where.targets)]
        if copies:
            sources, targets = np.transpose(copies)
            self.tokens[targets] = self.tokens[sources]
        for part in parts:
            self.tokens.reshape(-1)[part.where.slots] = part.tokens
        for part in parts:
            context = self.tokens[[*book.pages_of(part.number)]].reshape(-1)[: book.length(part.number)].tolist()
            known = part.request.tokens + part.request.guesses
            assert context == known[: len(context)] and len(context) == part.start + len(part.tokens)
            ends = range(len(context) - part.wanted + 1, len(context) + 1)
            scheduler.accept(part, [following(context[:end]) for end in ends])
        ended = [x.request for x in parts if x.request.finish]
        for request in ended:
            scheduler.remove(request)
        return parts, ended


def made(rng, prefixes) -> Request:
    prefix = prefixes[rng.integers(len(prefixes))] if rng.random() < 0.5 else []
    prompt = [*prefix, *rng.integers(0, WORDS, rng.integers(1, 30)).tolist()]
    return Request(prompt, int(rng.integers(1, 40)), end_tokens=frozenset([END] if rng.random() < 0.3 else []))


def test_wrong_guesses_that_another_request_has_for_a_prompt_stay_its_own():
    """The page that they fill is shared until the first request writes to it again: it takes a copy."""
    scheduler, pool = Scheduler(jax_mfa.PageBook(24, 8), 4, 24), Pool(24, 8)
    first = Request([1, 2, 3, 4, 5], 20)
    scheduler.add(first)
    pool.step(scheduler)
    first.guesses = [(x + 1) % WORDS for x in (following(first.tokens), 7)]
    second = Request([*first.tokens, *first.guesses, 9], 4)
    scheduler.add(second)
    pool.step(scheduler)
    assert second.shared == 8
    (part, _), _ = pool.step(scheduler)
    assert part.request is first and len(part.where.sources) == 1


def simulate(count: int, seed: int, guess: bool):
    rng = np.random.default_rng(seed)
    scheduler, pool = Scheduler(jax_mfa.PageBook(24, 8), 6, 24), Pool(24, 8)
    prefixes = [rng.integers(0, WORDS, n).tolist() for n in (8, 16, 40, 100)]
    living, served, cancelled, idle, shared = set(), 0, 0, 0, 0
    while served + cancelled < count:
        while len(living) + served + cancelled < count and len(scheduler.waiting) < 8 and rng.random() < 0.5:
            request = made(rng, prefixes)
            scheduler.add(request)
            living.add(request)
        if living and rng.random() < 0.02:
            request = sorted(living, key=lambda x: x.arrival)[rng.integers(len(living))]
            scheduler.remove(request)
            living.remove(request)
            cancelled += 1
            expected = alone(request)
            assert request.generated == expected[: len(request.generated)]
        if guess:
            for request in scheduler.decoding():  # the right ones for a while
                right = rng.integers(0, 4)
                tokens = list(request.tokens)
                while len(tokens) < len(request.tokens) + 4:
                    tokens.append((following(tokens) + (len(tokens) - len(request.tokens) >= right)) % WORDS)
                request.guesses = tokens[len(request.tokens) :]
        parts, ended = pool.step(scheduler)
        idle = 0 if parts or not living else idle + 1
        assert idle < 2, "somebody waits, and nothing is done"
        for request in ended:
            assert request.generated == alone(request)
            living.remove(request)
            shared += request.shared
            served += 1
    assert not scheduler.running and not scheduler.waiting
    assert scheduler.book.free_pages == 24 and not scheduler.book.sequences
    assert scheduler.preemptions > count // 50 and shared > count and cancelled > count // 100  # all of it came up


@pytest.mark.parametrize("guess", [False, True], ids=["plain", "guesses"])
def test_requests_of_all_kinds_get_their_tokens_and_leave_every_page_free(guess):
    simulate(300, seed=1, guess=guess)


@pytest.mark.sweep
@pytest.mark.parametrize("guess", [False, True], ids=["plain", "guesses"])
def test_ten_thousand_requests_leave_every_page_free(guess):
    simulate(10_000, seed=0, guess=guess)


def test_the_oldest_is_served_first_and_the_youngest_gives_way():
    scheduler, pool = Scheduler(jax_mfa.PageBook(6, 8), 3, 16), Pool(6, 8)
    requests = [Request([i] * 15, 30) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    order = []
    while scheduler.running or scheduler.waiting:
        order += pool.step(scheduler)[1]
    assert order == requests and all(x.generated == alone(x) for x in requests)
    assert requests[0].preempted == 0 and scheduler.preemptions > 0


def test_prompts_go_beside_decoding_in_one_step():
    scheduler, pool = Scheduler(jax_mfa.PageBook(20, 8), 2, 8), Pool(20, 8)
    scheduler.add(Request([1, 2, 3], 9))
    pool.step(scheduler)
    scheduler.add(Request(list(range(3)) * 8, 4))
    parts, _ = pool.step(scheduler)
    assert [len(x.tokens) for x in parts] == [1, 7] and [x.wanted for x in parts] == [1, 0]


def test_a_request_that_never_fits_is_refused_at_once():
    scheduler = Scheduler(jax_mfa.PageBook(4, 8), 2, 8)
    with pytest.raises(ValueError, match=r"40 tokens need 5 pages, and the cache has 4"):
        scheduler.add(Request([1] * 30, 10))
    for prompt, most, said in (([], 1, "prompt"), ([1], 0, "max_tokens")):
        with pytest.raises(ValueError, match=said):
            Request(prompt, most)


def test_after_a_fault_those_who_were_not_in_the_step_begin_anew():
    scheduler, pool = Scheduler(jax_mfa.PageBook(20, 8), 2, 8), Pool(20, 8)
    requests = [Request([i, 1, 2], 5) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    pool.step(scheduler)
    scheduler.remove(requests[0])
    scheduler.forget(jax_mfa.PageBook(20, 8))
    while scheduler.running or scheduler.waiting:
        pool.step(scheduler)
    assert [x.generated == alone(x) for x in requests] == [False, True, True]
    assert scheduler.book.free_pages == 20
