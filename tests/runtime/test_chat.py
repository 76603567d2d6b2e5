import datetime
from pathlib import Path
from typing import Any

import pytest
import transformers

from llmbuild.errors import EngineError, RequestError
from llmbuild.runtime.chat import ChatTemplate, load_chat_template

CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|begin|>system\nBe kind.<|end|>\n' }}
    {% endif %}
{{'<|begin|>' + message['role'] + '\n' + message['content'] + '<|end|>' + '\n'}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}
"""
BOS_AND_TOOLS = """{{- bos_token }}
{%- if tools is not none %}tools: {{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns = namespace(text=message.content | trim) %}
    [{{ message.role }}] {{ ns.text }}{{ eos_token }}
    {{- {'b': '<é>', 'a': [1, 2]} | tojson(indent=2) }}
{%- endfor %}
"""
MESSAGES = [
    {"role": "user", "content": " Hi <b> & 'you' é\n"},
    {"role": "skip", "content": "never"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]


# Written for these tests, with what the templates of well-known models do: Llama 3.1's,
LLAMA3_STYLE = """{{- bos_token }}
{%- set today = date_string | default("26 Jul 2024") %}
{%- set first = messages[0] %}
{%- set rest = messages[1:] if first.role == "system" else messages %}
{{- "<|head|>system<|/head|>\\n\\n" ~ ("Tools: on\\n" if tools is not none else "") }}
{{- "Date: " ~ today ~ "\\n" ~ (first.content | trim if first.role == "system" else "") }}
{{- "<|end|>" }}
{%- for tool in tools or [] %}{{- tool | tojson(indent=4) ~ "\\n\\n" }}{%- endfor %}
{%- for message in rest %}
    {%- set head = "ipython" if message.role == "tool" else message.role %}
    {{- "<|head|>" ~ head ~ "<|/head|>\\n\\n" }}
    {%- if "tool_calls" in message %}
        {%- if message.tool_calls | length > 1 %}
            {{- raise_exception("only one call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}" }}
    {%- elif head == "ipython" and message.content is not string %}
        {{- message.content | tojson }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- "<|end|>" }}
{%- endfor %}
{{- "<|head|>assistant<|/head|>\\n\\n" if add_generation_prompt }}
"""
# Qwen 2.5's,
QWEN_STYLE = """{%- set system = messages | selectattr("role", "equalto", "system") | first %}
{%- if tools or system %}
    {{- "<|begin|>system\\n" ~ (system.content if system else "") }}
    {%- if tools %}
        {{- "\\n<tools>" }}
        {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
        {{- "\\n</tools>" }}
    {%- endif %}
    {{- "<|end|>\\n" }}
{%- endif %}
{%- for message in messages if message.role != "system" %}
    {%- set is_result = message.role == "tool" %}
    {%- if not is_result or loop.previtem is not defined or loop.previtem.role != "tool" %}
        {{- "<|begin|>" ~ ("user" if is_result else message.role) }}
    {%- endif %}
    {%- if message.content %}
        {{- "\\n<result>\\n%s\\n</result>" | format(message.content) if is_result
            else "\\n" + message.content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function if call.function is defined else call %}
        {{- '\\n<call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
        {{- call.arguments | tojson }}{{- "}\\n</call>" }}
    {%- endfor %}
    {%- if not is_result or loop.last or loop.nextitem.role != "tool" %}
        {{- "<|end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|begin|>assistant\\n" }}{%- endif %}
"""
# and Mistral's, with documents and the tags for training besides.
MISTRAL_STYLE = """{{- bos_token }}
{%- set ns = namespace(last_user=-1, system="") %}
{%- for message in messages %}
    {%- if message["role"] == "user" %}{%- set ns.last_user = loop.index0 %}{%- endif %}
    {%- if message["role"] == "system" %}
        {%- set ns.system = message.content + "\\n\\n" %}
    {%- endif %}
{%- endfor %}
{%- for document in documents or [] %}
    {{- "[DOC " ~ loop.index ~ "] " ~ document.title ~ ": " ~ document["text"] }}
{%- endfor %}
{%- for message in messages if message.role != "system" %}
    {%- if message.role == "user" %}
        {%- set is_last = message == messages[ns.last_user] %}
        {%- if is_last and tools is not none %}
            {{- "[TOOLS][" }}
            {%- for tool in tools %}
                {%- for key, value in tool.function.items() %}
                    {{- '"' + key + '": ' + (value | tojson) + ("" if loop.last else ", ") }}
                {%- endfor %}
                {{- "" if loop.last else "; " }}
            {%- endfor %}
            {{- "][/TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + (ns.system if is_last else "") + message.content + "[/INST]" }}
    {%- elif message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- "[CALL]" + (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == "tool" %}
        {{- "[RESULT]" + message.content | string + " of " + message.tool_call_id + "[/RESULT]" }}
    {%- else %}
        {%- generation %}
        {{- " " + message.content | trim + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now> & here, in °C",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Köln", "東京"]}, "days": {}},
            "required": ["city"],
        },
    },
}
CALL = {"name": "weather", "arguments": {"city": "Köln", "days": 2}}
TOOL_MESSAGES = [
    {"role": "system", "content": "Be exact."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "id": "call12345", "function": CALL}],
    },
    {"role": "tool", "name": "weather", "content": "21.5", "tool_call_id": "call12345"},
    {"role": "assistant", "content": "Mild. "},
    {"role": "user", "content": "And 'tomorrow'?"},
]
DOCUMENTS = [{"title": "A", "text": "é"}, {"title": "B", "text": "<b>"}]


def reference_of(tokenizer, template):
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._backend,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        chat_template=template,
    )


@pytest.mark.parametrize("template", [LLAMA3_STYLE, QWEN_STYLE, MISTRAL_STYLE])
@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        (TOOL_MESSAGES, [WEATHER, WEATHER]),
        (TOOL_MESSAGES, None),
        (TOOL_MESSAGES[:2], [WEATHER]),
        (TOOL_MESSAGES[1:2], []),
    ],
    ids=["calls", "calls without tools", "tools", "no tools"],
)
def test_tools_and_documents_reach_the_template_as_in_transformers(
    byte_level, template, messages, tools
):
    given = {"tools": tools, "documents": DOCUMENTS, "add_generation_prompt": True}
    expected = reference_of(byte_level, template).apply_chat_template(
        messages, tokenize=False, **given
    )
    assert ("days" in expected) is bool(tools or messages is TOOL_MESSAGES)
    assert ChatTemplate(template, byte_level).render(messages, **given) == expected


@pytest.mark.parametrize("name", ["tools", "documents"])
@pytest.mark.parametrize("values", [{}, "weather", ["weather"], [None]], ids=str)
def test_malformed_tools_and_documents_are_refused(byte_level, name, values):
    with pytest.raises(RequestError, match=f"{name} must be a list of dicts"):
        ChatTemplate(CHATML, byte_level).render(MESSAGES, **{name: values})


@pytest.mark.parametrize("with_bos", [True, False])
def test_template_that_begins_with_bos_gets_no_second_one(sentencepiece, with_bos):
    text = ChatTemplate(MISTRAL_STYLE, sentencepiece).render(TOOL_MESSAGES[1:2])
    ids = sentencepiece.encode(text, with_bos=with_bos)
    assert text.startswith("<s>")
    assert (ids[0], ids.count(1)) == (1, 1)
    reference = reference_of(sentencepiece, MISTRAL_STYLE)
    assert ids == reference.apply_chat_template(TOOL_MESSAGES[1:2], return_dict=False)


@pytest.mark.parametrize("template", [CHATML, BOS_AND_TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendering_equals_that_of_transformers(byte_level, template, add_generation_prompt):
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level._backend,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        chat_template=template,
    )
    expected = reference.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    chat = ChatTemplate(template, byte_level)
    assert chat.render(MESSAGES, add_generation_prompt=add_generation_prompt) == expected


def test_date_is_given(byte_level):
    chat = ChatTemplate("{{ strftime_now('%Y') }}", byte_level)
    assert int(chat.render(MESSAGES)) - datetime.datetime.now().year in (-1, 0)


def test_exception_of_the_template_is_a_refusal(byte_level):
    chat = ChatTemplate("{{ raise_exception('roles must alternate') }}", byte_level)
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        chat.render(MESSAGES)


@pytest.mark.parametrize(
    "template", ["{{ messages[9].content.x }}", "{{ messages[0].content + 1 }}", "{{ 1 // 0 }}"]
)
def test_template_that_fails_is_a_refusal(byte_level, template):
    with pytest.raises(RequestError, match="chat template refuses"):
        ChatTemplate(template, byte_level).render(MESSAGES)


@pytest.mark.parametrize(
    "template",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"],
)
def test_template_cannot_leave_its_sandbox(byte_level, template):
    with pytest.raises(RequestError, match="chat template refuses"):
        ChatTemplate(template, byte_level).render(MESSAGES)
    assert len(MESSAGES) == 4


def test_template_that_does_not_compile_is_a_refusal(byte_level):
    with pytest.raises(RequestError, match="can't be compiled"):
        ChatTemplate("{% if %}", byte_level).render(MESSAGES)


def test_model_without_a_template_refuses_messages(tmp_path, byte_level):
    with pytest.raises(RequestError, match="no chat template"):
        load_chat_template(tmp_path, byte_level).render(MESSAGES)


def test_template_of_an_engine_is_loaded(tmp_path, byte_level):
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}é", encoding="utf-8")
    chat = load_chat_template(tmp_path, byte_level)
    assert chat.render([{"role": "user", "content": "x"}]) == "xé"


@pytest.mark.parametrize(
    "messages", [[], "hello", {"role": "user"}, ["hello"], [{"content": "x"}], [{"role": 1}]]
)
def test_malformed_messages_are_refused(byte_level, messages):
    with pytest.raises(RequestError, match="message"):
        ChatTemplate(CHATML, byte_level).render(messages)


@pytest.mark.parametrize("content", [b"\xff", None])
def test_a_template_that_cannot_be_read_refuses_the_engine(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "chat_template.jinja"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(EngineError, match=r"chat_template\.jinja can't be read"):
        load_chat_template(tmp_path, Any)  # type: ignore[arg-type]  # which isn't reached
