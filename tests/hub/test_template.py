"""Chat templates: what they can do, and what they cannot do to the process."""

import contextlib
import itertools
import json
import re
import time
import types

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
    "sorted": "{{ (range(99999) | list * 160) | sort | length }}",
    "mapped": "{{ (range(99999) | list + range(99999) | list) | map('string') | map('trim') | unique | list | length }}",
    "listed": "{{ (range(99999) | list) * 160 }}",
    "wrapped": "{{ ('a b ' * 4000000) | wordwrap }}",
    "titled": "{{ ('ab ' * 5000000).title() }}",
    "folded": "{{ ('\u0130' * 16000000).casefold() }}",
    "translated": "{{ ('a' * 16000000).translate({97: 'b' * 1000}) }}",
    "tabbed": "{{ ('\t' * 1000000).expandtabs(100000) }}",
    "formatted": "{{ '%9999999999d' | format(1) }}",
    "formatted with braces": "{{ '{:9999999999}'.format(1) }}",
    "long texts joined": "{{ (['a' * 16000000] * 1000) | map('trim') | join }}",
    "long texts joined by a method": "{{ ','.join((['a' * 16000000] * 1000) | map('trim')) }}",
    "text in one line": "{% set a = '\u00e9' * 9000000 %}{{ (a | upper | lower | tojson(ensure_ascii=true)) * 9 }}",
    "spaces in front": "{{ ('a\\n' * 8000000) | indent(999) }}",
}
# Lists that hold one another: small in memory, endless to whoever looks through them.
_NESTED = """{% set ns = namespace(x=['a'], y=['a'], t=('a',)) %}{% for i in range(60) %}
{%- set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"""
HOSTILE |= {
    f"nested: {use}": f"{_NESTED}{use}"
    for use in (
        "{{ ns.x }}",
        "{{ ns.x ~ 'a' }}",
        "{{ ns.x | tojson }}",
        "{{ ns.x | trim }}",
        "{{ ns.x == ns.y }}",
        "{{ ns.x in ns.y }}",
        "{{ ns.x is eq(ns.y) }}",
        "{{ [ns.x] | select('eq', ns.y) | list }}",
        "{{ ns.x.index(ns.y) }}",
        "{{ ','.join(ns.x) }}",
        "{% for i in range(60) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}{{ {ns.t: 1} }}",
        "{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ {ns.t: 1} }}",
    )
}
ONE = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_one_line(name: str) -> None:
    """Within 0.3 s of processor time, and what one operation that has begun may take: half a second on a quiet machine."""
    began = time.thread_time()
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(HOSTILE[name]).render({"messages": ONE})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert module.MIN_SECONDS == 0.3 and time.thread_time() - began < 1


def test_a_busy_machine_refuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in which others run does not count: here an hour passes at every look at the clock."""
    clock = itertools.count(0, 3600.0)
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: next(clock), thread_time=time.thread_time))
    source = "{% for m in messages %}{% for i in range(50) %}{{ m.content | trim }}{% endfor %}{% endfor %}"
    assert ChatTemplate(source).render({"messages": ONE * 20}) == "x" * 1000
    assert next(clock) > 3600.0 * 100
    with pytest.raises(BadRequest, match=r"ran longer than 0\.3 seconds"):
        ChatTemplate(HOSTILE["endless"]).render({"messages": ONE})


def test_long_conversations_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_SECONDS", 0.0)
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
    talk = [{"role": "user", "content": f"{i}"} for i in range(5000)]
    assert ChatTemplate(source).render({"messages": talk}) == "".join(f"<user>{i}" for i in range(5000))


def test_large_things_that_honest_conversations_hold() -> None:
    tools = [
        {"name": f"f{i}", "parameters": {"type": "object", "properties": {"a": {"enum": list(range(50))}}}} for i in range(1000)
    ]
    source = """{{ tools | tojson }}{% for m in messages %}{% if loop.index0 == messages | length - 1 %}{{ m.content | trim }}
{%- for line in m.content.split('\n') %}{% if loop.first %}{{ line.upper() }}{% endif %}{% endfor %}{% endif %}{% endfor %}"""
    talk = [*ONE * 1000, {"role": "user", "content": "a long line {:1234567} \n" * 40_000}]
    text = ChatTemplate(source).render({"messages": talk, "tools": tools})
    assert text == json.dumps(tools) + talk[-1]["content"].strip() + "A LONG LINE {:1234567} "


_WAYS_TO_OS = [  # expressions that would be os, its environ, open or a list of all classes
    "cycler.__init__.__globals__.os",
    "joiner.__init__.__globals__['os']",
    "namespace.__init__.__globals__['os']",
    "lipsum.__globals__['os']",
    "lipsum.__globals__.get('os')",
    "lipsum | attr('__globals__')",
    "lipsum['__globals__']['os']",
    "dict.__base__.__subclasses__()",
    "dict.mro()[1].__subclasses__()",
    "range.__class__.__base__.__subclasses__()",
    "''.__class__.__base__.__subclasses__()",
    "''['__class__']['__mro__'][1]",
    "'' | attr('__class__') | attr('__mro__')",
    "'' | attr('\\x5f\\x5fclass\\x5f\\x5f')",
    "''['\\x5f\\x5fclass\\x5f\\x5f']",
    "'' | attr('__cla' ~ 'ss__')",
    "() | attr(['__', 'class', '__'] | join)",
    "[].__class__.__bases__[0].__subclasses__()",
    "{}.__class__.__mro__",
    "(1).__class__.__base__",
    "messages.__class__.__init__.__globals__",
    "messages[0].__class__.fromkeys.__self__",
    "messages.__reduce_ex__(2)",
    "messages.__getattribute__('__class__')",
    "self.__init__.__globals__",
    "self._TemplateReference__context",
    "self.__dict__",
    "self._TemplateReference__context.eval_ctx.environment",
    "raise_exception.__globals__",
    "raise_exception.__code__.co_filename",
    "strftime_now.__globals__['datetime'].sys.modules['os']",
    "strftime_now.__closure__",
    "strftime_now.__defaults__",
    "tojson.__globals__",
    "'{0.__class__.__init__.__globals__}'.format(messages)",
    "'{0.__class__}'.format_map({'0': messages})",
    "'%s' | format(messages.__class__)",
    "(messages | map(attribute='__class__') | list)[0]",
    "messages | groupby('__class__')",
    "messages | selectattr('__class__') | list",
    "messages | sum(attribute='__class__')",
    "messages | sort(attribute='__class__')",
    "[messages] | map('attr', '__class__') | list",
    "loop.__init__.__globals__",
    "caller.__globals__",
    "varargs.__class__",
    "get_flashed_messages.__globals__",
    "url_for.__globals__['os']",
    "config.__class__.__init__.__globals__['os']",
    "request.application.__globals__.__builtins__",
    "g.pop.__globals__.__builtins__",
    "__builtins__.open('/etc/passwd').read()",
    "__import__('os').environ",
    "open('/etc/passwd').read()",
    "exec('1')",
    "_raise_exception.__globals__",
]


@pytest.mark.parametrize("way", _WAYS_TO_OS)
def test_no_way_leads_out_of_the_sandbox(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, or nothing: never an object that would lead on."""
    monkeypatch.setenv("A_SECRET_OF_THE_PROCESS", "3141592653")
    made = ""
    for source in (f"{{{{ {way} }}}}", f"{{% set x = {way} %}}{{{{ x.popen('id').read() }}}}{{{{ x.environ }}}}"):
        with contextlib.suppress(BadRequest):
            made += ChatTemplate(source).render({"messages": [{"role": "user", "content": "x"}]})
    assert not re.search(r"3141592653|uid=|root:|<module|<class|<function|\.py\b|Popen", made), made


def test_refusals_are_told() -> None:
    with pytest.raises(BadRequest, match="refuses these messages: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must\nalternate.') }}").render({})
    with pytest.raises(BadRequest, match="cannot be read"):
        ChatTemplate("{% if %}")
    with pytest.raises(BadRequest, match="longer than"):
        ChatTemplate("x" * (module.MAX_TEMPLATE + 1))
