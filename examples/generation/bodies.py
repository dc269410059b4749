"""What the bodies of requests hold: checked, and refused by name. What is known of OpenAI's interface and not here is
refused too, never ignored.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from typing import Any

from generation.sampling import Sampling
from generation.tokenizer import Text

DEPTH = 64  # of arrays and objects in one another
HALF = re.compile(f"[{chr(0xD800)}-{chr(0xDFFF)}]")


class Refusal(Exception):
    """A request that is answered by an error, in the interface's form."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str):
        message = message.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.status, self.headers = status, headers
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        param = param and param.encode(errors="backslashreplace").decode()
        self.error = {"message": message, "type": kind, "param": param, "code": code}


def parsed(body: bytes) -> dict[str, Any]:
    """The object in a body of JSON, whose texts all are Unicode."""
    try:
        found = json.loads(body.decode(), parse_constant=float, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refusal(400, f"the body must be a JSON object, got {type(found).__name__}")
    for name, value in found.items():
        left = [(name, 1), (value, 2)]
        while left:
            x, depth = left.pop()
            if depth > DEPTH:
                raise Refusal(400, f"{name} must be nested at most {DEPTH} deep", name)
            if isinstance(x, (dict, list)):
                inside = [*x.keys(), *x.values()] if isinstance(x, dict) else x
                left += [(y, depth + 1) for y in inside]
            elif isinstance(x, str) and HALF.search(x):
                raise Refusal(400, f"{name} must be text in Unicode, without halves of surrogate pairs", name)
            elif isinstance(x, float) and not math.isfinite(x):
                raise Refusal(400, f"{name} must have finite numbers alone, got {x}", name)
    return found


def _integer(digits: str) -> float:
    """An integer; infinity where it has more digits than Python may be told to read."""
    return int(digits) if len(digits) <= 640 else float(digits)


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
        if x is not None and not any(x == y and isinstance(x, bool) == isinstance(y, bool) for y in allowed):
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
    options = Fields(fields.take("stream_options", dict, {}, "an object"))
    usage = options.take("include_usage", bool, False, "true or false")
    options.only("include_obfuscation", False)
    options.end()
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
    return Asked(limits[0] or limits[1], sampling, choices, tuple(stops), stream, usage)


def prompts(fields: Fields, text: Text, vocabulary: int) -> list[list[int]]:
    """Of a completion: a text, tokens, or a list of either."""
    x = fields.take("prompt", (str, list), None, "a string, a list of tokens, or a list of these")
    tokens = lambda y: isinstance(y, list) and y and all(isinstance(i, int) and not isinstance(i, bool) for i in y)
    several = x if isinstance(x, list) and not tokens(x) else [x]
    if not several or not all(isinstance(y, str) or tokens(y) for y in several):
        raise Refusal(400, "prompt must be a string, a list of tokens, or a list of these, and is required", "prompt")
    try:
        found = [text.encode(y) if isinstance(y, str) else y for y in several]
    except Exception as error:  # the package raises nothing more special
        raise Refusal(400, f"prompt does not fit the tokenizer: {error}", "prompt") from None
    if not all(found):
        raise Refusal(400, "prompt must not be empty", "prompt")
    outside = [i for y in found for i in y if not 0 <= i < vocabulary]
    if outside:
        raise Refusal(400, f"tokens of prompt must lie in 0..{vocabulary - 1}, got {outside[0]}", "prompt")
    return found


def conversation(fields: Fields, text: Text) -> list[int]:
    messages = fields.take("messages", list, [], "a list of messages")
    plain = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            texts = [x.get("text") if isinstance(x, dict) and x.get("type") == "text" else None for x in content]
            content = "".join(texts) if all(isinstance(x, str) for x in texts) else None
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise Refusal(400, f"messages[{i}] must have a role and a content of text", "messages")
        plain.append({**message, "content": content})
    if not plain:
        raise Refusal(400, "messages must be a list of at least one message, and is required", "messages")
    try:
        return text.chat(plain)
    except ValueError as error:
        raise Refusal(400, str(error), "messages") from None
    except Exception as error:  # whatever a template makes of fields that it did not expect
        said = f"{type(error).__name__}: {error}"
        raise Refusal(400, f"messages do not fit the chat template: {said}", "messages") from None
