"""Chat templates, as Hugging Face's transformers renders them: a conversation as the text that a model was taught.

A folder's templates are `chat_template.jinja` and those of `additional_chat_templates/`, else what
`tokenizer_config.json` has. They are programs of strangers, and run in Jinja's sandbox.
"""

from __future__ import annotations

import datetime
import functools
import json
from pathlib import Path
from typing import Any

from generation import config as configs

SPECIAL = tuple(f"{x}_token" for x in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
REASONING = "reasoning_content", "thinking", "reasoning"


class Chat:
    """The templates of a folder.

    Args:
      facts: what `tokenizer_config.json` holds.

    Raises:
      ValueError: where there are templates of a form that transformers does not know.
    """

    def __init__(self, folder: Path, facts: dict[str, Any]):
        older = folder / "special_tokens_map.json"
        others = configs.read_json(older) if "added_tokens_decoder" not in facts and older.is_file() else {}
        known = facts | others
        self.tokens = {name: text for name in SPECIAL if (text := _text(known.get(name))) is not None}
        files = {x.stem: x for x in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        if (folder / "chat_template.jinja").is_file():
            files["default"] = folder / "chat_template.jinja"
        found = {name: _read(path) for name, path in files.items()}
        given = facts.get("chat_template")
        if not found and given is not None:
            try:
                found = {"default": given} if isinstance(given, str) else {x["name"]: x["template"] for x in given}
            except (TypeError, KeyError):
                found = {"default": None}
            if not all(isinstance(x, str) for pair in found.items() for x in pair):
                raise ValueError(
                    f"{folder / 'tokenizer_config.json'}: chat_template must be a text or a list of objects with name "
                    f"and template, got {json.dumps(given)[:80]}"
                )
        self.templates = found

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation, up to where the model's answer begins.

        Raises:
          ValueError: where there is no template, or it refuses the messages, or fails.
        """
        import jinja2

        if not self.templates:
            raise ValueError("this model has no chat template: ask for completions instead")
        name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise ValueError(f"this model has chat templates {', '.join(self.templates)}, and none named default")
        facts = {"messages": list(map(_message, messages)), "tools": tools, "documents": documents}
        facts = {**self.tokens, **variables, **facts, "add_generation_prompt": add_generation_prompt}
        try:
            return _compiled(self.templates[name]).render(facts)
        except Exception as error:  # whatever a stranger's program may raise
            said = str(error) if type(error) is jinja2.TemplateError else f"{type(error).__name__}: {error}"
            raise ValueError(f"messages do not fit the chat template: {said}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None


def _text(token: Any) -> str | None:
    """A special token as `tokenizer_config.json` has it: a text, or an object with it."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message without fields that are null, and its reasoning under the names that templates know."""
    message = {name: x for name, x in message.items() if x is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


@functools.lru_cache(16)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@functools.cache
def _environment() -> Any:
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}…{% endgeneration %}`, which tells trainers what is the model's own: its body."""

        tags = frozenset({"generation"})

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_itself"), [], [], body).set_lineno(line)

        def _itself(self, caller):
            return caller()

    def refuse(message: str):
        raise jinja2.TemplateError(message)

    def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made
