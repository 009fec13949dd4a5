"""Chat templates: what they can do, and what they cannot do to the process."""

import json

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from trireme.errors import BadRequest
from trireme.hub import template as module
from trireme.hub.template import ChatTemplate


def test_what_templates_of_the_wild_use() -> None:
    source = """{%- set ns = namespace(found=false) -%}
{% for m in messages %}
    {%- if m.role == 'user' and not ns.found %}{% set ns.found = true %}[{{ m.content | trim }}]{% endif %}
    {% if loop.last %}{% break %}{% endif %}
{% endfor %}
{% generation %}{{ tools | tojson(indent=2) }}{% endgeneration %}
{{- strftime_now('%Y') | length }}"""
    variables = {"messages": [{"role": "user", "content": " <hi> "}] * 2, "tools": [{"é": "<&>"}]}
    text = ChatTemplate(source).render(variables)
    assert text == _compile_jinja_template(source).render(variables)
    assert text == "[<hi>]" + json.dumps([{"é": "<&>"}], ensure_ascii=False, indent=2) + "4"


HOSTILE = {
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "format": "{{ '{0.__class__.__base__}'.format(messages) }}",
    "import": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include 'x' %}",
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "endless macro": "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "multiplied": "{{ 'a' * 1000000000 }}",
    "multiplied list": "{{ [1] * 1000000000 }}",
    "power": "{{ 9 ** 999999999 }}",
    "widened": "{{ '%1000000000d' % 1 }}",
    "centred": "{{ 'a' | center(1000000000) }}",
    "justified": "{{ 'a'.ljust(1000000000) }}",
    "doubled": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "added": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "replaced": "{% set x = 'a' * 9000000 %}{{ x.replace('a', x) }}",
    "joined": "{% set x = 'a' * 9000000 %}{{ x | join(x) }}",
    "written": "{% for i in range(99999) %}{{ 'a' * 10000 }}{% endfor %}",
    "undefined": "{{ nobody.knows.this }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SECONDS", 0.3)
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(HOSTILE[name]).render({"messages": [{"role": "user", "content": "x"}]})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_refusals_are_told() -> None:
    with pytest.raises(BadRequest, match="refuses these messages: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must\nalternate.') }}").render({})
    with pytest.raises(BadRequest, match="cannot be read"):
        ChatTemplate("{% if %}")
    with pytest.raises(BadRequest, match="longer than"):
        ChatTemplate("x" * (module.MAX_TEMPLATE + 1))
