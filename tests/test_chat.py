"""Chat templates of the generation example: what transformers makes of them, where it is installed, and by hand."""

import datetime
import json
import pathlib
import random
import sys

import pytest

pytest.importorskip("jinja2")
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

from chat_templates import FAMILIES, TOKENS, conversation
from generation.chat import Chat

NOWHERE = pathlib.Path("nowhere")
HELLO = [{"role": "user", "content": "<hi> & 'é'"}]


def render(template, messages=HELLO, facts=TOKENS, **more):
    return Chat(NOWHERE, {"chat_template": template, **facts}).render(messages, **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_are_what_transformers_makes_of_them(family):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=FAMILIES[family], **TOKENS)
    rng = random.Random(family)
    for _ in range(40):
        messages, tools, documents = conversation(rng)
        facts = {"tools": tools, "documents": documents, "add_generation_prompt": rng.random() < 0.7}
        try:
            wanted = theirs.apply_chat_template(messages, tokenize=False, **facts)
        except Exception:  # whatever a template raises
            wanted = None
        try:
            got = render(FAMILIES[family], messages, **facts)
        except ValueError:
            got = None
        assert got == wanted, (messages, facts)


@pytest.mark.parametrize(
    "template, text",
    [
        ("{% for i in 'abcd' %}{% if i == 'b' %}{% continue %}{% endif %}{% if i == 'd' %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "ac"),
        ("a{% generation %} b {% endgeneration %}c", "a b c"),
        ("{{ messages[0] | tojson }}", json.dumps(HELLO[0], ensure_ascii=False)),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ tools is none and documents is none }}{{ bos_token }}{{ unk_token is defined }}", "True<s>False"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ messages[0].name is defined }}", "False"),
    ],
)  # fmt: skip
def test_what_templates_may_use(template, text):
    assert render(template, [{**HELLO[0], "name": None}]) == text


def test_the_day_is_today():
    assert render("{{ strftime_now('%Y') }}") == str(datetime.date.today().year)


@pytest.mark.parametrize(
    "template, said",
    [
        ("{{ raise_exception('no system') }}", "chat template: no system$"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ nobody.at.all }}", "UndefinedError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.mro() }}", "SecurityError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_refuses_the_messages(template, said):
    with pytest.raises(ValueError, match=said):
        render(template)


def test_named_templates_and_files(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t{{ tools | length }}"}]
    assert render(named) == "d" and render(named, tools=[]) == "t0"
    with pytest.raises(ValueError, match="templates rag, and none named default"):
        render([{"name": "rag", "template": "r"}])
    with pytest.raises(ValueError, match="no chat template"):
        render(None)
    for wrong in (7, [{"name": "default"}], [7], {"default": "d"}, [{"name": "default", "template": 7}]):
        with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template must be"):
            Chat(tmp_path, {"chat_template": wrong})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("é{{ bos_token }}", encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    chat = Chat(tmp_path, {"chat_template": "config", "bos_token": {"content": "<b>", "lstrip": False}})
    assert chat.render(HELLO) == "file" and chat.render(HELLO, tools=[]) == "é<b>"
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<older>"}}')
    assert Chat(tmp_path, {"bos_token": "<b>"}).tokens == {"bos_token": "<older>"}
    assert Chat(tmp_path, {"bos_token": "<b>", "added_tokens_decoder": {}}).tokens == {"bos_token": "<b>"}
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"cannot read .*chat_template\.jinja"):
        Chat(tmp_path, {})
