"""The paged cache and its book: against a plain model, page by page and token by token."""

import copy
import dataclasses
import functools
import pickle
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import arrays, assert_close
from oracle import attention

from jax_mfa import OutOfPages, PageBook, PagedKVCache, Scheme, metal, paged_attention, quantize
from jax_mfa.kv_cache.page_book import Write
from jax_mfa.kv_cache.pool import write_in_place
from jax_mfa.metal import append

K, H, V, PAGE = 2, 6, 4, 8


def accounted(book: PageBook, model: dict) -> None:
    """No page is lost, none belongs to two who do not know, and every sequence is as long as it should be."""
    assert set(book.sequences) == set(model)
    held = [page for x in model for page in book.pages_of(x)]
    assert book.free_pages + len(set(held)) == book.pages
    counts = np.bincount(held, minlength=book.pages)
    np.testing.assert_array_equal(counts, book._owners)
    free = list(book._free)
    assert len(set(free)) == len(free) and not set(free) & set(held)
    assert {book._page_of[d]: d for d in book._page_of} == book._digest_of
    known = [page in book._digest_of for page in free]
    assert known == sorted(known)  # pages of known tokens are taken last
    for x, tokens in model.items():
        assert book.length(x) == len(tokens) and len(book.pages_of(x)) == -(-len(tokens) // book.page_size)


class Pool:
    """What a device would hold: a token for each slot."""

    def __init__(self, book):
        self.tokens = np.full((book.pages, book.page_size), -1)

    def write(self, where, tokens):
        self.tokens[where.targets] = self.tokens[where.sources]
        page, place = np.divmod(where.slots, self.tokens.shape[1])
        self.tokens[page, place] = tokens

    def read(self, book, sequence):
        pages = self.tokens[list(book.pages_of(sequence))].reshape(-1)
        return pages[: book.length(sequence)].tolist()


@pytest.mark.share(2)
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_random_steps_lose_and_mix_up_nothing(seed):
    rng = np.random.default_rng(seed)
    book = PageBook(24, 4)
    pool, model, hits, full = Pool(book), {}, 0, 0
    for _ in range(2500):
        action = rng.choice(["allocate", "append", "append", "append", "fork", "truncate", "free"])
        names = list(model)
        if action == "allocate" and len(names) < 8:
            prompt = rng.integers(0, 2, rng.integers(0, 20)).tolist()  # of two words, so that beginnings recur
            sequence = book.allocate(prompt)
            model[sequence] = prompt[: book.length(sequence)]
            hits += book.length(sequence) > 0
            assert book.length(sequence) < max(len(prompt), 1)
        elif action == "append" and names:
            chosen = rng.choice(names, rng.integers(1, min(len(names), 4) + 1), replace=False).tolist()
            counts = rng.integers(0, 9, len(chosen)).tolist()
            new = [rng.integers(0, 2, n).tolist() for n in counts]
            known = new if rng.random() < 0.8 else None
            before = [x.copy() for x in (book._owners, list(book._free), book._page_of)]
            try:
                pool.write(book.reserve(chosen, counts, known), np.concatenate([*map(np.array, new)]).astype(int))
            except OutOfPages:
                full += 1
                assert before == [book._owners, list(book._free), book._page_of]
                continue
            for sequence, tokens in zip(chosen, new):
                model[sequence] = model[sequence] + tokens
        elif action == "fork" and names and len(names) < 8:
            sequence = int(rng.choice(names))
            model[book.fork(sequence)] = list(model[sequence])
        elif action == "truncate" and names:
            sequence = int(rng.choice(names))
            length = int(rng.integers(0, len(model[sequence]) + 1))
            book.truncate(sequence, length)
            model[sequence] = model[sequence][:length]
        elif action == "free" and names and rng.random() < 0.5:
            sequence = int(rng.choice(names))
            book.free(sequence)
            del model[sequence]
        accounted(book, model)
        for sequence, tokens in model.items():
            assert pool.read(book, sequence) == tokens
    assert hits > 5 and full > 5  # both were reached
    for sequence in list(model):
        book.free(sequence)
    assert book.free_pages == book.pages


def test_exhaustion_is_an_error_before_anything_changes():
    book = PageBook(3, 8)
    a = book.allocate()
    book.reserve([a], [20])
    b = book.fork(a)
    with pytest.raises(OutOfPages, match=r"^1 pages are needed for 2 tokens, and 0 are free$"):
        book.reserve([a, b], [1, 1])  # one of them needs a page of its own
    assert book.length(a) == book.length(b) == 20
    book.free(b)
    book.reserve([a], [4])
    assert book.length(a) == 24


def test_a_common_prefix_is_found_shared_and_copied_when_written():
    book = PageBook(10, 8)
    prompt = np.arange(20)
    a = book.allocate(prompt)
    assert book.length(a) == 0
    book.reserve([a], [20], [prompt])
    b, c, other = book.allocate(prompt), book.allocate(prompt[:16]), book.allocate(prompt + 1)
    assert (book.length(b), book.length(c), book.length(other)) == (16, 8, 0)  # a page is left for the query
    assert book.pages_of(b) == book.pages_of(a)[:2]
    book.truncate(b, 12)
    where = book.reserve([b], [1], [[99]])
    assert len(where.sources) == 1 and book.pages_of(b)[1] != book.pages_of(a)[1]
    book.free(a)
    assert book.length(book.allocate(prompt)) == 16  # kept, though nobody's


# --- on the device


@pytest.fixture(autouse=True, params=["blockwise"])
def writer(request, monkeypatch):
    """What writes tokens: kernels, where a test asks for them."""
    if request.param == "blockwise":
        monkeypatch.setattr(append, "takes", lambda pages: False)
    elif metal.runtime.get().reason:
        pytest.skip(metal.runtime.get().reason)
    jax.clear_caches()
    return request.param


both = pytest.mark.parametrize("writer", ["blockwise", "metal"], indirect=True)


@pytest.mark.share(4)
@both
@pytest.mark.parametrize(
    ("dtype", "schemes"),
    [("bfloat16", (None, None)), ("float32", (Scheme("int8"), Scheme("int4", True, channels=2)))],
    ids=["plain", "quantised"],
)
def test_what_was_appended_is_attended_to(writer, schemes, dtype):
    rng = np.random.default_rng(0)
    cache = PagedKVCache.create(16, PAGE, K, H, V, dtype=dtype, key_scheme=schemes[0], value_scheme=schemes[1])
    book, tokens = cache.book, {}
    new = lambda n: tuple(rng.standard_normal((n, K, size)).astype(jnp.dtype(dtype)) for size in (H, V))

    def add(sequences, counts):
        nonlocal cache
        key, value = new(sum(counts))
        cache = cache.append(sequences, key, value, counts)
        for x, *parts in zip(sequences, *(np.split(y, np.cumsum(counts)[:-1]) for y in (key, value))):
            tokens[x] = [np.concatenate([old, part]) for old, part in zip(tokens.get(x, new(0)), parts)]

    a, b = book.allocate(), book.allocate()
    add([a, b], [13, 5])
    c = book.fork(a)
    tokens[c] = tokens[a]
    add([c, b, a], [2, 9, 4])
    book.truncate(c, 6)
    tokens[c] = [x[:6] for x in tokens[c]]
    add([c], [3])
    query = rng.standard_normal((3, 1, 4, H)).astype(jnp.dtype(dtype))
    read = functools.partial(paged_attention, implementation=writer)
    out = read(query, cache.key_pages, cache.value_pages, *book.tables([a, b, c]))
    for row, x in enumerate((a, b, c)):
        key, value = (y[None] for y in tokens[x])
        wanted = attention(query[row : row + 1], key, value).out[0]
        if schemes[0] is None:
            assert_close(out[row], wanted, query.dtype, terms=30, largest_score=5)
        else:
            assert np.abs(np.asarray(out[row]).astype(np.float64) - wanted).max() < 0.4
            assert np.abs(np.asarray(out[row]).astype(np.float64) - wanted).mean() < 0.1


def test_layers_share_a_book_and_write_under_jit():
    first = PagedKVCache.create(4, PAGE, K, H, V)
    layers = [first, PagedKVCache.create(4, PAGE, K, H, V, book=first.book)]
    a = first.book.allocate()
    key, value = arrays((3, K, H), (3, K, V))
    step = jax.jit(
        lambda layers, where: [x.write(where, i * key, value) for i, x in enumerate(layers, 1)], donate_argnums=0
    )
    where = first.book.reserve([a], [3])
    layers = step(layers, where._replace(slots=np.where([True, False, True], where.slots, -1)))
    pages = [np.asarray(x.key_pages)[first.book.pages_of(a)[0]] for x in layers]
    for i, page in enumerate(pages, 1):
        np.testing.assert_array_equal(page[[0, 2]], i * key[[0, 2]])
        assert not page[1].any()  # padding is not written


@pytest.mark.share(4)
@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_a_pool_is_written_in_place(writer, scheme, dtype):
    create = lambda pages: PagedKVCache.create(pages, 16, K, 64, dtype=dtype, key_scheme=scheme, value_scheme=scheme)
    parts = jax.eval_shape(lambda: jax.tree.leaves(create(2048)))
    pool = jax.tree.unflatten(jax.tree.structure(create(1)), parts)
    new = jax.ShapeDtypeStruct((5, K, 64), dtype)
    where = Write(*(jax.ShapeDtypeStruct((n,), jnp.int32) for n in (5, 2, 2)))
    lowered = write_in_place.lower((pool.key_pages, pool.value_pages), new, new, where)
    assert ("jax_mfa_append" in lowered.as_text()) == (writer == "metal")
    memory = lowered.compile().memory_analysis()
    total = sum(x.size * x.dtype.itemsize for x in parts)
    assert memory.alias_size_in_bytes == total
    assert memory.temp_size_in_bytes < 2**16 < total / 20


CREATE = {"pages": 4, "page_size": 8, "heads": K, "head_size": H}
BOOK = PageBook(4, 8)
OWN = BOOK.allocate()
cache = functools.cache(lambda: PagedKVCache.create(**CREATE))
ones = lambda *shape: np.ones(shape, np.float32)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copied", "pickled"])
def test_a_copied_cache_goes_on_alone(way):
    cache = PagedKVCache.create(4, PAGE, K, H, V, dtype="bfloat16", key_scheme="int8")
    first = cache.book.allocate()
    cache = cache.append([first], *arrays((3, K, H), (3, K, V), dtype="bfloat16"), [3], [[1, 2, 3]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what Python is about to leave out
        other = way(cache)
    assert other.book is not cache.book and other.book.allocate() == first + 1 and cache.book.sequences == (first,)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


NEW = ones(2, K, H), ones(2, K, H)
written = lambda slots, sources=(), targets=(): cache().write(Write(slots, list(sources), list(targets)), *NEW)
BAD = [
    (lambda: PagedKVCache.create(**{**CREATE, "page_size": 12}), ValueError, "page_size must be one of (8, 16,"),
    (lambda: PagedKVCache.create(**{**CREATE, "pages": 0}), ValueError, "pages must be at least 1, got 0"),
    (lambda: PagedKVCache.create(**CREATE, dtype="int8"), TypeError, "dtype must be one of float16"),
    (lambda: PagedKVCache.create(**CREATE, key_scheme="int2"), ValueError, "key_scheme must be a jax_mfa.Scheme"),
    (
        lambda: PagedKVCache.create(**CREATE, value_scheme=Scheme("int8", tokens=2)),
        ValueError,
        "value_scheme must have blocks within a token",
    ),
    (lambda: PagedKVCache.create(**CREATE, book=PageBook(5, 8)), ValueError, "book must be a PageBook of 4 pages of 8"),
    (lambda: cache().append([0], ones(2, K, H), ones(3, K, H), [2]), ValueError, "value must have shape [2, 2, 6]"),
    (lambda: cache().append([0], ones(2, K, H) * 1j, ones(2, K, H), [2]), TypeError, "key must be floating"),
    (lambda: BOOK.free(7), ValueError, "sequence must be allocated and not freed, got 7"),
    (lambda: BOOK.truncate(OWN, 1), ValueError, "length must be at most the 0 tokens of sequence 0, got 1"),
    (lambda: BOOK.reserve([OWN, OWN], [1, 1]), ValueError, "sequences must be named once each, got [0, 0]"),
    (lambda: BOOK.reserve([OWN], []), ValueError, "counts must have one number for each of 1 sequences, got 0"),
    (lambda: BOOK.reserve([OWN], [-1]), ValueError, "counts must be at least 0, got -1"),
    (lambda: BOOK.reserve([OWN], [2], [[1]]), ValueError, "tokens must hold as many integers as counts, [2], got [1]"),
    (lambda: BOOK.allocate([0.5]), TypeError, "tokens must be an integer, got 0.5"),
    (lambda: PageBook(0, 8), ValueError, "pages must be at least 1, got 0"),
    (lambda: PageBook(2**28, 16), ValueError, "pages must be at most 134217727, got 268435456"),
    (lambda: PagedKVCache.create(**{**CREATE, "page_size": 8.0}, book=BOOK), TypeError, "page_size must be an integer"),
    (
        lambda: PagedKVCache.create(**CREATE, dtype="foo"),
        TypeError,
        "dtype must be one of float16, bfloat16, float32, ",
    ),
    (
        lambda: PagedKVCache.create(**CREATE, book=4),
        ValueError,
        "book must be a PageBook of 4 pages of 8 tokens, got 4",
    ),
    (lambda: cache().append(0, *NEW, [2]), TypeError, "sequences must be a sequence of integers, got 0"),
    (lambda: cache().append([0], *NEW, 4), TypeError, "counts must be a sequence of integers, got 4"),
    (
        lambda: cache().append([0], *NEW, [3]),
        ValueError,
        "key must have shape [3, 2, 6], for 3 tokens of counts, got [2",
    ),
    (
        lambda: cache().append([0], quantize(NEW[0]), NEW[1], [2]),
        TypeError,
        "key must be an array (floating [T, K, H]), ",
    ),
    (lambda: BOOK.fork([OWN]), TypeError, f"sequence must be an integer, got [{OWN}]"),
    (lambda: BOOK.length(False), TypeError, "sequence must be an integer, got False"),
    (lambda: BOOK.pages_of(0.0), TypeError, "sequence must be an integer, got 0.0"),
    (lambda: BOOK.tables([9]), ValueError, "sequences must be allocated and not freed, got 9"),
    (lambda: BOOK.tables("0"), TypeError, "sequences must be a sequence of integers, got '0'"),
    (lambda: BOOK.tables([OWN], 2.0), TypeError, "width must be an integer, got 2.0"),
    (lambda: BOOK.truncate(OWN, True), TypeError, "length must be an integer, got True"),
    (lambda: BOOK.allocate([[1, 2], [3]]), TypeError, "tokens must be an integer, got [1, 2]"),
    (lambda: BOOK.allocate([2**63]), ValueError, "tokens must be integers of 64 bits"),
    (lambda: BOOK.reserve([OWN], [2], [[1, 2**70]]), ValueError, "tokens must be integers of 64 bits"),
    (lambda: BOOK.reserve({OWN}, [2]), TypeError, "sequences must be a sequence of integers, got {0}"),
    (lambda: BOOK.reserve([OWN], [2], 7), TypeError, "tokens must be a sequence of integers of each sequence, got 7"),
    (lambda: cache().write(3, *NEW), TypeError, "where must be a Write, as PageBook.reserve gives it, got 3"),
    (lambda: written([1.5, 2.0]), TypeError, "where.slots must be integers [T], got float64[2]"),
    (lambda: written([1, 32]), ValueError, "where.slots must lie in -2147483648..31, got 32"),
    (lambda: written([1, 2**40]), ValueError, "where.slots must lie in"),
    (lambda: written([[1], [2]]), ValueError, "where.slots must have shape [T], got [2, 1]"),
    (lambda: written([1]), ValueError, "key must have shape [1, 2, 6], for 1 tokens of where.slots, got [2, 2, 6]"),
    (lambda: written([1, 2], [4], [1]), ValueError, "where.sources must lie in -2147483648..3, got 4"),
    (lambda: written([1, 2], [1], [4]), ValueError, "where.targets must lie in -2147483648..3, got 4"),
    (
        lambda: written([1, 2], [1], [1, 2]),
        ValueError,
        "where.targets must have the shape of where.sources, [1], got [2]",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_is_named(call, error, message):
    before = [repr(vars(book)) for book in (BOOK, cache().book)]
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call()
    assert before == [repr(vars(book)) for book in (BOOK, cache().book)]  # nothing has changed


@both
def test_slots_and_pages_beyond_the_pool_are_padding_where_they_are_traced(writer):
    empty = PagedKVCache.create(**CREATE)
    rng = np.random.default_rng(0)
    empty = dataclasses.replace(empty, key_pages=jnp.asarray(rng.standard_normal(empty.key_pages.shape, np.float32)))
    key, value = arrays((5, K, H), (5, K, H))
    where = Write(*(np.array(x, np.int32) for x in ([32, 9, -1, 2**31 - 1, 31], [0, -3, 4, 1], [3, 1, 2, 4])))
    got = jax.jit(PagedKVCache.write)(empty, where, key, value)
    wanted = np.array(empty.key_pages)
    wanted[3] = wanted[0]
    wanted.reshape(32, K, H)[[9, 31]] = key[[1, 4]]
    np.testing.assert_array_equal(got.key_pages, wanted)


def test_a_cache_that_was_donated_says_so_before_its_book_changes():
    old = PagedKVCache.create(**CREATE)
    own = old.book.allocate()
    new = old.append([own], *NEW, [2])
    with pytest.raises(ValueError, match=r"^this cache was donated"):
        old.append([own], *NEW, [2])
    assert old.book.length(own) == 2
    new.append([own], *NEW, [2])
    assert old.book.length(own) == 4
