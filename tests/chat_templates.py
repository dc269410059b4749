"""Chat templates in the manner of published model families, written for these tests, and random conversations."""
# ruff: noqa: E501

LLAMA2 = """
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = '<<SYS>>\n' ~ messages[0]['content'] ~ '\n<</SYS>>\n\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set turns = messages -%}{%- endif -%}
{%- for turn in turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('roles must take turns: user, assistant, user') -}}
    {%- endif -%}
    {%- if turn['role'] == 'user' -%}
        {{- bos_token + '[INST] ' + (system if loop.first else '') + turn['content'].strip() + ' [/INST]' -}}
    {%- else -%}{{- ' ' ~ turn['content'] | trim ~ ' ' ~ eos_token -}}{%- endif -%}
{%- endfor -%}"""

LLAMA3 = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday: " + date_string + "\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""

MISTRAL = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {%- if message.role == 'user' %}
        {%- if tools is defined and tools and loop.index0 == ns.last %}
[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]
        {%- endif %}
[INST]{{ message.content }}[/INST]
    {%- elif message.role == 'assistant' %}
 {{ message.content }}{{ eos_token }}
    {%- else %}
        {%- break %}
    {%- endif %}
{%- endfor %}
"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}{%- set content = message.content %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' + ('<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' if loop.index0 > ns.last_query_index else '') + content + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

GEMMA = """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{'<start_of_turn>model\n'}}
{% endif %}"""

PHI = """{% for message in messages %}{% if message['content'] %}{{'<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_first=true, system='') %}
{%- for message in messages if message['role'] == 'system' %}{% set ns.system = ns.system + message['content'] %}{%- endfor -%}
{{bos_token}}{{ns.system}}
{%- for message in messages %}
    {%- if message['role'] == 'user' -%}<|User|>{{message['content']}}
    {%- elif message['role'] == 'assistant' -%}
        {% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}<|Assistant|>{{content}}{{eos_token}}
    {%- endif -%}
{%- endfor -%}
{% if add_generation_prompt %}<|Assistant|><think>
{% endif %}"""

COMMAND = """{{ bos_token }}{% if documents %}{{ '<results>' }}{% for document in documents %}{{ '\nDocument: ' }}{{ loop.index0 }}
{% for key, value in document.items() %}{{ key }}: {{value}}
{% endfor %}{% endfor %}{{ '</results>' }}{% endif %}{% for message in messages %}{{ '<|START_OF_TURN_TOKEN|>' ~ message.role | upper ~ message.content ~ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"""

SMOL = """{% set tools = tools or [] %}{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}
{{ '<|im_start|>assistant\n' + message.content + '<|im_end|>' }}{% endgeneration %}
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"""

GRANITE = """{%- set known = {'title': 'T', 'text': 'X'} %}
{%- for key, value in known | dictsort %}{{ key }}={{ value }};{%- endfor %}
{%- if documents is none %}none{%- else %}{{ documents | tojson(sort_keys=true, separators=(',', ':')) }}{%- endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message | tojson(indent=2) }}{%- endfor %}
{%- if unk_token is defined %}{{ unk_token }}{%- endif %}{{ pad_token }}"""

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

HARMONY = """{%- macro turn(message) -%}<|start|>{{ message.role }}{% if message.thinking is defined %}<|channel|>analysis<|message|>{{ message.thinking }}{% endif %}<|message|>{{ message.content }}<|end|>{%- endmacro -%}
{%- for message in messages -%}{{ turn(message) }}{%- endfor -%}{{ (tools or []) | map(attribute='function.name') | join(', ') }}"""

FAMILIES = {name.lower(): x for name, x in list(globals().items()) if name.isupper() and isinstance(x, str)}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TEXTS = (
    *(
        "hi",
        " <b>&'\"</b> ",
        "東京 🐸\n\n",
        "",
        "a </think> b",
        "{{ 7 }} {% x %}",
        "\\n\t",
        "<think>\nwhy\n</think>\n\nso",
        "0",
    ),
)
TOOLS = (
    None,
    [],
    [{"type": "function", "function": {"name": "f<&>", "parameters": {"z": 1, "a": {"é": [1.5, None, True]}}}}],
)
DOCUMENTS = None, [{"title": "<T>", "text": "é & x"}, {"text": "2", "title": ""}]


def conversation(rng):
    """Messages, tools and documents at random."""
    messages = [{"role": "system", "content": rng.choice(TEXTS)}] * (rng.random() < 0.3)
    for i in range(rng.randrange(1, 6)):
        role = ("user", "assistant")[i % 2] if rng.random() < 0.9 else rng.choice(["tool", "user", "system"])
        messages = [*messages, {"role": role, "content": rng.choice(TEXTS)}]
        more = {
            "name": None,
            "reasoning": "r < s",
            "thinking": "t",
            "tool_calls": [{"function": TOOLS[2][0]["function"]}],
        }
        messages[-1] |= {name: more[name] for name in rng.sample(sorted(more), 1) if rng.random() < 0.2}
    return messages, rng.choice(TOOLS), rng.choice(DOCUMENTS)
