import datetime

import pytest
import transformers

from llmbuild.errors import RequestError
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
