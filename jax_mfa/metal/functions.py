"""A caller's functions of scores and masks in MSL: traced programs in, structs as text out, with derivatives."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mfa.flex.program import VIEWS, Program
from jax_mfa.metal.expressions import Bounds, Refused, Text, Value, cast
from jax_mfa.metal.shapes import SHAPED, plus
from jax_mfa.problem import MAX_POSITION


@dataclasses.dataclass(frozen=True)
class Rules:
    """The types of score and visibility, and what MSL text defines them where that is not the base text. It rides in
    the plan: structs derived from `Score` and `Visibility` that say anew what differs."""

    score: str = "Score"
    visibility: str = "Visibility"
    definitions: str = ""
    floats: int = 0  # that the functions read
    reads: int | None = 0  # of single floats by a score, each with a derivative; None where MSL has not all of those


@functools.lru_cache(maxsize=1024)
def rules_of(score: Program | None, mask: Program | None) -> Rules:
    """The score and the visibility of a `score_mod` and a `mask_mod`; raises `Refused`."""
    floats = _size("floats", score, mask)  # integers follow them
    found = Rules(floats=floats)
    if score is not None:
        reads, bodies = _score(score, floats)
        name, text = _struct("ScoreMod", bodies)
        found = dataclasses.replace(found, score=f"ModifiedScore<{name}>", definitions=text, reads=reads)
    if mask is not None:
        name, text = _struct("MaskMod", [_function("bool value", "", _body(mask, floats)[0])])
        visibility, definitions = f"ModifiedVisibility<{name}>", found.definitions + text
        found = dataclasses.replace(found, visibility=visibility, definitions=definitions)
    return found


@functools.lru_cache(maxsize=1024)
def refusal(score: Program | None, mask: Program | None) -> str:
    """Which of the two MSL cannot say, and why; empty where it can."""
    for name, pair in (("score_mod", (score, None)), ("mask_mod", (None, mask))):
        try:
            rules_of(*pair)
        except Refused as error:
            return f"{name}: {error}"
    return ""


def _struct(kind: str, parts: Sequence[str]) -> tuple[str, str]:
    text = "\n".join(parts)
    name = f"{kind}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return name, f"\nstruct {name} {{\n{text}}};\n"


def _function(name: str, score: str, body: str, more: str = "") -> str:
    return f"  INLINED static {name}(const thread Given& given, {score}int t, int s{more}) {{\n{body}  }}\n"


def _score(program: Program, floats: int) -> tuple[int | None, list[str]]:
    """How many floats a `score_mod` reads, and the parts of its struct: its value, its derivative, that by each float,
    and whether it may hide, which is to make minus infinity of what is not."""

    def of_score(x: Any, *others: Any) -> Any:
        *indices, vectors = others
        return program.evaluate((x, *indices), vectors["floats"], vectors["integers"]).astype(jnp.float32)

    def forward(x: Any, *others: Any) -> Any:
        return jax.jvp(lambda x: of_score(x, *others), (x,), (jnp.ones_like(x),))[1]

    value, (lowest, _) = _body(program, floats)
    try:
        derivative, _ = _body(program, floats, jax.grad(of_score))
    except Refused:  # the transposes of slices and reads of what depends on the score; forward mode has none
        derivative, _ = _body(program, floats, forward)
    facts = {"bool may_hide": str(lowest == -np.inf).lower()}
    functions = [_function(f"float {x}", "float score, ", y) for x, y in (("value", value), ("derivative", derivative))]
    try:
        count, by_reads = _body_by_reads(program, floats)
    except Refused:
        count, by_reads = None, ""
    if count:
        facts |= {"int reads": str(count), "int floats": str(floats)}
        results = ", thread int* places, thread float* terms"
        functions.append(_function("void by_reads", "float score, ", by_reads, results))
    return count, ["".join(f"  static constant constexpr {x} = {y};\n" for x, y in facts.items()), *functions]


def _scalars(program: Program, floats: int) -> tuple[Text, list[Value], dict[str, Value]]:
    """A text, and in it the arguments of a program and the vectors of what it reads."""
    text = Text(SHAPED)
    # what a score is that is not minus infinity
    of_score = program.arguments == 5
    arguments = [text.argument("score", "float32", float(np.finfo(np.float32).min), np.inf)] if of_score else []
    arguments += [text.argument(x, "int32", 0, MAX_POSITION) for x in ("given.b", "given.n")]
    arguments += [text.argument("t", "int32", -MAX_POSITION, 2 * MAX_POSITION)]
    arguments += [text.argument("s", "int32", 0, MAX_POSITION)]
    words = lambda i: f"given.captured[{i}]"
    vectors = {
        "floats": text.vector(_size("floats", program), "float32", lambda i: f"as_type<float>({words(i)})"),
        "integers": text.vector(_size("integers", program), "int32", lambda i: words(plus(i, floats))),
    }
    return text, arguments, vectors


def _body(program: Program, floats: int, derivative: Callable[..., Any] | None = None) -> tuple[str, Bounds]:
    """Statements that return what a program gives, or its derivative, and its bounds."""
    text, arguments, vectors = _scalars(program, floats)
    if derivative is None:
        result = text.program(program, arguments, vectors)[program.result]
    else:
        (result,) = text.traced(derivative, [*arguments, vectors])
    wanted = "float32" if program.arguments == 5 else "bool"
    returned = text.elementwise("convert_element_type", {"new_dtype": wanted}, [result.at(())], [result.dtype])
    return text.statements([f"return {returned};"]), text.bounds_of(returned, wanted)


def _body_by_reads(program: Program, floats: int) -> tuple[int, str]:
    """How many floats a program reads, and statements: where each lies, and the derivative of the result by it."""
    first = program.arguments
    views: set[Any] = {first + i for i, x in enumerate(program.captured) if x.kind == "floats"}
    read: set[Any] = set()
    for x in program.equations:
        of = {i for i in x.inputs if isinstance(i, int)} & views
        if x.primitive.name in VIEWS and of == {x.inputs[0]}:
            views.update(x.outputs)
        else:
            read |= of
    if isinstance(program.result, int):
        read |= {program.result} & views
    text, arguments, vectors = _scalars(program, floats)
    values = text.program(program, arguments, vectors)
    known = [values[i] for i in sorted(read)]
    count = text.limited(sum(math.prod(x.shape) for x in known))
    elements = [(k, i) for k, x in enumerate(known) for i in np.ndindex(*x.shape)]
    text.of_places = True
    where = text.program(program, arguments, vectors | {"floats": text.vector(floats, "int32", str)})
    places = [where[sorted(read)[k]].at(i) for k, i in elements]
    text.of_places = False

    def by_reads(*others: Any) -> Any:
        *scalars, vectors, known = others

        def result(known: Any) -> Any:
            given = dict(zip(sorted(read), known))
            found = program.evaluate(scalars, vectors["floats"], vectors["integers"], known=given)
            return found.astype(jnp.float32)

        return jax.grad(result)(known)

    found = text.traced(by_reads, [*arguments, vectors, known])
    terms = [cast(found[k].at(i), found[k].dtype, "float32") for k, i in elements]
    lines = [f"places[{j}] = {place}; terms[{j}] = {term};" for j, (place, term) in enumerate(zip(places, terms))]
    return count, text.statements(lines)


def _size(kind: str, *programs: Program | None) -> int:
    """Of the vector of a kind, as far as programs read it."""
    captured = [x for program in programs if program is not None for x in program.captured if x.kind == kind]
    return max((x.offset + math.prod(x.shape) for x in captured), default=0)
