"""Chat templates that would fill the memory or run without end, and some that only look so."""

import time

import pytest

from windlass.errors import UserError
from windlass.hub import template_sandbox
from windlass.hub.chat_template import Template, Unrendered

MESSAGES = [{"role": "user", "content": "Hello\nthere"}]
DOUBLED = "{% set ns = namespace(x='x') %}{% for i in range(99) %}"
END = "{% endfor %}{{ ns.x|length }}"
MILLION = "{% set x = 'x' * 1000000 %}"
LOOP = "{% for a in range(99999) %}"
BOMBS = {
    "concat": f"{DOUBLED}{{% set ns.x = ns.x ~ ns.x %}}{END}",
    "plus": f"{DOUBLED}{{% set ns.x = ns.x + ns.x %}}{END}",
    "times": "{{ 'x' * 10 ** 12 }}",
    "times list": "{{ [1] * 10 ** 10 }}",
    "times tuple": "{{ 10 ** 10 * (1, 2) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power in a condition": "{% if 9 ** (9 ** 9) %}x{% endif %}",
    "squares": "{% set ns = namespace(x=7) %}" + LOOP + "{% set ns.x = ns.x * ns.x %}" + END,
    "join": f"{MILLION}{{{{ range(99999)|join(x) }}}}",
    "join of a text": f"{MILLION}{{{{ x|join(x) }}}}",
    "method join": f"{MILLION}{{{{ x.join(range(9999)|map('string')) }}}}",
    "replace": f"{MILLION}{{{{ x|replace('x', x) }}}}",
    "method replace": f"{MILLION}{{{{ x.replace('x', x) }}}}",
    "replace of nothing": f"{MILLION}{{{{ x.replace('', x) }}}}",
    "center": "{{ 'x'|center(10000000000) }}",
    "method center": "{{ 'x'.center(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "zfill": "{{ 'x'.zfill(10000000000) }}",
    "expandtabs": "{{ '\t\t'.expandtabs(2000000000) }}",
    "indent": "{% set x = 'x\n' * 100000 %}{{ x|indent(100000) }}",
    "indent by text": f"{MILLION}{{{{ ('x\n' * 1000)|indent(x) }}}}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10000000000, 1) }}",
    "format": "{{ '%10000000000d'|format(1) }}",
    "method format": "{{ '{:>10000000000}'.format(1) }}",
    "method format, nested": "{{ '{:>{w}}'.format(1, w=10000000000) }}",
    "format_map": "{{ '{a:>10000000000}'.format_map({'a': 1}) }}",
    "many fields": f"{MILLION}{{{{ ('%(a)s' * 1000) % dict(a=x) }}}}",
    "batch": "{{ [1]|batch(10000000000, 0)|list }}",
    "slice": "{{ [1]|slice(10000000000)|list }}",
    "round": "{{ 1.5|round(1000000000, 'ceil') }}",
    "tojson": "{{ [[1]]|tojson(indent=1000000000) }}",
    "wordwrap": f"{MILLION}{{{{ x|wordwrap(1, true, x) }}}}",
    "sum of lists": "{{ ([[1]] * 100000)|sum(start=[]) }}",
    "a list of itself": DOUBLED + "{% set ns.x = [ns.x, ns.x] %}" + END,
    "a dict of itself": DOUBLED + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}" + END,
    "views": DOUBLED + "{% set ns.x = dict(a=ns.x, b=ns.x).values() %}" + END,
    "a namespace of namespaces": "{% set ns = namespace(x=1) %}{% for i in range(99) %}"
    "{% set ns.x = namespace(a=[ns.x, ns.x]) %}{% endfor %}{{ ns.x }}",
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.x = [ns, ns] %}{{ ns }}",
    "set block": DOUBLED + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}" + END,
    "constant in a set block": "{% set y %}" + LOOP + "x" * 9999 + "{% endfor %}{% endset %}",
    "macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "exponential macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(99) }}",
    "nested loops": LOOP * 3 + "{% endfor %}" * 3,
    "nested loops that write": LOOP * 3 + "x" + "{% endfor %}" * 3,
    "recursive loop": "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "recursive loop, bounded in depth": "{% for a in range(99999) recursive %}"
    "{% if loop.depth < 9 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "loop with a condition": LOOP + "{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "comparisons": "{% set x = 'x' * 60000000 %}{% set y = x[1:] %}"
    + LOOP
    + "{% if y in x and x == y ~ 'x' %}{% endif %}{% endfor %}",
    "many copies": "{% set x = 'x' * 60000000 %}{% set ns = namespace(y=[]) %}"
    + LOOP
    + "{% set ns.y = ns.y + [x[a:]] %}{% endfor %}",
    "many values": "{% set x = 'x' * 60000000 %}" + LOOP + "{% set y = x[a:] %}{% endfor %}",
    "many mapped": "{{ range(99999)|map('center', 60000000)|list|length }}",
    "large range": "{{ range(10 ** 10)|list }}",
    "self": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "translate": f"{MILLION}{{{{ x.translate({{120: x}}) }}}}",
    "to_bytes": "{{ (1).to_bytes(10000000000) }}",
    "large hexadecimal": "{% set x = ('f' * 9000000)|int(base=16) %}{{ x // 7 }}",
    "truncate": "{{ ('x' * 1000)|truncate(1, end='...') }}",
    "titles": "{{ ('x y ' * 9000000)|title|length }}",
    "include": "{% include '/etc/passwd' %}",
    "escape": "{{ ''.__class__.__mro__ }}",
    "a width that is text": "{{ '{:>{}}'.format('x', '999999999') }}",
    "a width in a list": "{{ '{0:>{1[0]}}'.format('x', [999999999]) }}",
    "replace by name": f"{MILLION}{{{{ x|replace(new=x, old='x')|length }}}}",
    "replace of a number": f"{MILLION}{{{{ ('5' * 1000000)|replace(5, x)|length }}}}",
    "replace in a list": f"{MILLION}{{{{ ([''] * 100000)|replace(',', x)|length }}}}",
    "join by a list": f"{MILLION}{{{{ range(99999)|join([x])|length }}}}",
    "bytes": f"{MILLION}{{{{ x.encode().replace('x'.encode(), x.encode())|length }}}}",
    "separators": f"{MILLION}{{{{ range(9999)|list|tojson(separators=(x, x))|length }}}}",
    "pieces": "{{ ('ab,' * 20000000).split(',')|length }}",
    "words": "{{ ('ab ' * 20000000).split()|length }}",
    "lines": "{{ ('ab\n' * 20000000).splitlines()|length }}",
    "dates": "{{ strftime_now('%c' * 30000000)|length }}",
    "namespaces as text": "{% set ns = namespace(x=namespace()) %}{% for i in range(99) %}"
    "{% set y = namespace() %}{% set y.a = ns.x %}{% set y.b = ns.x %}{% set ns.x = y %}"
    "{% endfor %}{{ ns.x|string|length }}",
    "arguments of themselves": "{% macro f(n) %}{{ f(n - 1, varargs, varargs) if n else varargs|"
    "string|length }}{% endmacro %}{{ f(99) }}",
    "items of themselves": "{% set ns = namespace(x=(1,)) %}{% for i in range(99) %}"
    "{% set ns.x = cycler(ns.x, ns.x).items %}" + END,
    "tests": "{% set x = range(99999)|list %}{{ x|map('string')|reject('in', x)|list|length }}",
    "a message without end": "{{ raise_exception('x' * 9999999) }}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_a_template_without_end_is_refused_with_a_reason(monkeypatch, source):
    monkeypatch.setattr(template_sandbox, "SECONDS", 0.1)
    with pytest.raises(Unrendered) as refused:
        Template(source, (), {}).render(MESSAGES)
    assert 0 < len(str(refused.value)) <= 300


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (BOMBS["concat"], "it makes a value of more than 67,108,864 characters"),
        (BOMBS["many values"], "it makes values of more than 536,870,912 characters"),
        (BOMBS["power"], "it computes a number that is too large"),
        (BOMBS["nested loops"], "it takes more than 0.1 seconds"),
        (BOMBS["round"], "round has 1,000,000,000 as an option"),
        (BOMBS["titles"], "title is applied to more than 1,048,576 characters"),
        (BOMBS["macro"], "it calls itself without end"),
    ],
)
def test_the_reason_says_what_has_no_end(monkeypatch, source, why):
    if "seconds" in why:
        monkeypatch.setattr(template_sandbox, "SECONDS", 0.1)
    with pytest.raises(Unrendered) as refused:
        Template(source, (), {}).render(MESSAGES)
    assert str(refused.value) == why


def test_a_long_conversation_may_be_sliced_at_every_message():
    later = "{% for later in messages[loop.index:] %}{% break %}{% endfor %}"  # as gpt-oss has it
    template = Template(
        f"{{% for m in messages %}}{later}{{{{ m.content }}}}{{% endfor %}}", (), {}
    )
    assert template.render([{"role": "user", "content": "x" * 2400}] * 1000) == "x" * 2_400_000


def test_the_time_that_a_process_is_stopped_is_not_the_templates(monkeypatch):
    monkeypatch.setattr(template_sandbox, "SECONDS", 0.1)
    template = Template("{% for a in [1, 2] %}{{ wait() or a }}{% endfor %}", (), {})
    assert template.render(MESSAGES, wait=lambda: time.sleep(0.11)) == "12"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("x" * 2_000_000, "has 2,000,000 characters, of which at most 1,048,576 are read"),
        ("{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "is nested too deeply to be read"),
        ("{{ " + "[" * 900 + "]" * 900 + " }}", "is nested too deeply to be read"),
        ("{% if x %}" * 400 + "{% endif %}" * 400, "is nested too deeply to be read"),
        ("{{ 1" + " + 1" * 5_000 + " }}", "is nested too deeply to be read"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_refused(source, why):
    with pytest.raises(UserError) as refused:
        Template(source, (), {}).render(MESSAGES)
    assert str(refused.value) == f"the chat template {why}"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ ([2] + [3]) }}", "a1[2, 3]"),
        ("{{ 'ab'|center(6) }}|{{ 'ab'.rjust(4) }}", "  ab  |  ab"),
        ("{{ ['a', 'b']|join(', ') }} {{ '-'.join(['a', 'b']) }}", "a, b a-b"),
        ("{{ [1, 2]|map('string')|join('+') }}", "1+2"),
        ("{{ 'aXb'|replace('X', '--') }} {{ 'aXb'.replace('X', '--') }}", "a--b a--b"),
        ("{{ '%s of %05.1f' % ('a', 2) }} {{ '%d'|format(1700000000) }}", "a of 002.0 1700000000"),
        ("{{ '{} {a:>4}'.format(1700000000, a='x') }}", "1700000000    x"),
        (
            """{{ '{"a": {"b": "%s"}}' % 'x' }}{{ '{"a": {%s}}'|format(1) }}""",
            '{"a": {"b": "x"}}{"a": {1}}',
        ),
        ("""{{ '{{"a": {{"b": {}}}}}'.format(1) }}""", '{"a": {"b": 1}}'),
        ("{{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 10 }} {{ 7 / 2 }} {{ 3 * 4 - 5 }}", "3 3 1024 3.5 7"),
        ("{% for m in messages %}{{ loop.length }}{{ m.content[1:3] }}{% endfor %}", "1el"),
        ("{% for a in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for a in missing %}x{% endfor %}", ""),
        ("{% for a, b in {'k': 'v'}.items() if a %}{{ a }}{{ loop.last }}{% endfor %}", "kTrue"),
        ("{% for a in [1, [2]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}", "12"),
        ("{% macro f(x, y=2) %}<{{ x + y }}>{% endmacro %}{{ f(1) }}", "<3>"),
        ("{% set a, b = 1, 2 %}{% set c %}{{ a }}{{ b }}{% endset %}{{ c }}", "12"),
        ("{{ messages|tojson(indent=2)|length }} {{ {'a': '<é>'}|tojson }}", '61 {"a": "<é>"}'),
        ("{{ [1, {'a': 2}]|tojson(separators=(',', ':')) }}", '[1,{"a":2}]'),
        ("{{ messages[0].content|indent(4) }}", "Hello\n    there"),
        ("{{ messages|map(attribute='role')|list }}", "['user']"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}", "1"),
        ("{{ ('x' * 3000000).split('y')|length }}", "1"),
    ],
)
def test_what_templates_do_is_as_jinja_does_it(source, text):
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    assert Template(source, (), {}).render(MESSAGES) == text
    plain = ImmutableSandboxedEnvironment()
    if "tojson" not in source:  # whose HTML is escaped there
        assert plain.from_string(source).render(messages=MESSAGES) == text
