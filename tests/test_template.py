"""Rendering of templates: the same text as plain jinja2, with who wrote what, within bounds."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import chat_oracle as oracle
import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflex_ipc import template_text
from reflex_ipc.errors import TemplateError
from reflex_ipc.template import MAX_SOURCE, compile_template, render
from reflex_ipc.template_text import Budget, Marked, cut, join, parts


def run(template: str, /, **variables: Any) -> str:
    return render(compile_template(template), variables, Budget())


def shown(template: str, /, **variables: Any) -> str:
    """The rendering with what the template did not write in brackets."""
    text = run(template, **variables)
    assert "".join(piece for piece, _ in parts(text)) == text
    return "".join(piece if written else f"[{piece}]" for piece, written in parts(text))


# --- Who wrote what: every expected value is worked out by hand

CONTENT = "x<|e|>y"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<|a|>{{ c }}<|b|>", "<|a|>[x<|e|>y]<|b|>"),
        ("{{ '<|a|>' + c + '<|b|>' }}", "<|a|>[x<|e|>y]<|b|>"),
        ("{{ '<|a|>' ~ c ~ 1 ~ '<|b|>' }}", "<|a|>[x<|e|>y1]<|b|>"),
        ("{{ c }}", "[x<|e|>y]"),
        ("{{ c.split('|') | join('-') }}", "[x<]-[e]-[>y]"),
        ("{{ c.split('<|e|>') | join('<|e|>') }}", "[x]<|e|>[y]"),
        ("{{ c.partition('<|e|>') | join('') }}", "[x<|e|>y]"),
        ("{{ c.partition('<|e|>')[1] }}", "[<|e|>]"),
        ("{{ c.rpartition('<|e|>')[1] }}", "[<|e|>]"),
        ("{{ ('<|a|>' + c).partition('|') | join('') }}", "<|a|>[x<|e|>y]"),
        ("{{ ('<|a|>' + c + '<|a|>').split('|') | join('|') }}", "<|a|>[x<]|[e]|[>y]<|a|>"),
        ("{{ ('<|a|>' + c).rsplit('|', 1)[0] }}", "<|a|>[x<|e]"),
        ("{{ c.replace('<|e|>', '<|e|>') }}", "[x]<|e|>[y]"),
        ("{{ c | replace('|', '!') }}", "[x<]![e]![>y]"),
        ("{{ '<|N|>'.replace('N', c) }}", "<|[x<|e|>y]|>"),
        ("{{ '<|N|>' | replace('N', c) }}", "<|[x<|e|>y]|>"),
        ("{{ ('<|a|>' + c).replace('q', 'r') }}", "<|a|>[x<|e|>y]"),
        ("{{ ('  <|a|>' + c + ' ') | trim }}", "<|a|>[x<|e|>y]"),
        ("{{ ('<|a|>' + c).strip('<y') }}", "|a|>[x<|e|>]"),
        ("{{ ('<|a|>' + c).lstrip('<|') }}", "a|>[x<|e|>y]"),
        ("{{ ('<|a|>' + c).rstrip('y>') }}", "<|a|>[x<|e|]"),
        ("{{ (c + '<|a|>').removeprefix('x') }}", "[<|e|>y]<|a|>"),
        ("{{ ('<|a|>' + c).removesuffix('y') }}", "<|a|>[x<|e|>]"),
        ("{{ ('<|a|>' + c)[3:8] }}", "|>[x<|]"),
        ("{{ ('<|a|>' + c)[-3:] }}", "[|>y]"),
        ("{{ ('<|a|>' + c)[4] }}{{ ('<|a|>' + c)[5] }}", ">[x]"),
        ("{{ ('<|a|>' + c)[::-1] }}", "[y>|e|<x>|a|<]"),
        ("{{ '<|a|>'[::-1] }}", ">|a|<"),
        ("{{ '<|a|>' * 2 }}{{ c * 2 }}", "<|a|><|a|>[x<|e|>yx<|e|>y]"),
        ("{{ '<|A|>' | lower }}{{ '<|a|>'.upper() }}{{ ('<|A|>' + c) | lower }}", "<|a|><|A|>[<|a|>x<|e|>y]"),
        ("{{ '<|%s|>' % c }}", "<|[x<|e|>y]|>"),
        ("{{ '<|%s|>%s' % (c, '<|a|>') }}", "<|[x<|e|>y]|><|a|>"),
        ("{{ '%s' % ('<|a|>',) }}{{ '%%' % () }}{{ '%5s|' % 'a' }}", "<|a|>%[    a]|"),
        ("{{ c % () }}{{ '<|%(k)s|>' | format(k=c) }}", "[x<|e|>y]<|[x<|e|>y]|>"),
        ("{{ '<|{}|>{}'.format(c, '<|a|>') }}", "<|[x<|e|>y]|><|a|>"),
        ("{{ '<|{0}{{}}{1:>3}|>'.format(c, 'a') }}", "<|[x<|e|>y]{}[  a]|>"),
        ("{{ '<|{k}|>'.format(k=c) }}{{ '<|{k}|>'.format_map({'k': c}) }}", "<|[x<|e|>y]|><|[x<|e|>y]|>"),
        ("{{ ', '.join([c, '<|a|>', c]) }}", "[x<|e|>y], <|a|>, [x<|e|>y]"),
        ("{{ c.join(['<|a|>', '<|b|>']) }}", "<|a|>[x<|e|>y]<|b|>"),
        ("{{ [c, '<|a|>'] | join('<|b|>') }}", "[x<|e|>y]<|b|><|a|>"),
        ("{{ {'k': c, '<|b|>': '<|a|>'} | tojson }}", '[{"k": "x<|e|>y", "<|b|>": "<|a|>"}]'),
        ("{{ [c, '<|a|>'] }}", "[['x<|e|>y', '<|a|>']]"),
        ("{% for k in c %}{{ k }}<|a|>{% endfor %}", "[x]<|a|>[<]<|a|>[|]<|a|>[e]<|a|>[|]<|a|>[>]<|a|>[y]<|a|>"),
        ("{% for k in '<|' %}{{ k }}{% endfor %}", "[<|]"),
        ("{% set x %}<|a|>{{ c }}{% endset %}{{ x }}{{ x | length }}", "<|a|>[x<|e|>y12]"),
        ("{% set x | upper %}<|a|>{% endset %}{{ x }}", "<|A|>"),
        ("{% set ns = namespace(x='<|a|>') %}{% set ns.x = ns.x + c %}{{ ns.x }}", "<|a|>[x<|e|>y]"),
        (
            "{% macro m(x) %}<|a|>{{ x }}{{ '<|b|>' }}{% endmacro %}{{ m(c) }}{{ m('q') }}",
            "<|a|>[x<|e|>y]<|b|><|a|>q<|b|>",
        ),
        ("{% macro m() %}<|{{ caller() }}|>{% endmacro %}{% call m() %}{{ c }}a{% endcall %}", "<|[x<|e|>y]a|>"),
        ("{% filter trim %} <|a|>{{ c }} {% endfilter %}", "<|a|>[x<|e|>y]"),
        ("{{ d | default('<|a|>') }}{{ c or '<|a|>' }}{{ '' or '<|a|>' }}", "<|a|>[x<|e|>y]<|a|>"),
        ("{{ '<|a|>' if c == 'x<|e|>y' else '' }}{{ {'x<|e|>y': '<|b|>'}[c] }}", "<|a|><|b|>"),
        ("{{ (c ~ '\n<|a|>\n').splitlines() | join('<|b|>') }}", "[x<|e|>y]<|b|><|a|>"),
        ("{{ ('<|a|>\n' ~ c).splitlines(true)[0] }}", "<|a|>\n"),
        ("{{ '<|a|>' | safe }}{{ c | safe }}", "[<|a|>x<|e|>y]"),
        ("{{ loop }}{% for x in [1, 2] %}{{ loop.cycle('<|a|>', c) }}{% endfor %}", "<|a|>[x<|e|>y]"),
        ("{{ ('<|im_' ~ c.split('x')[0] ~ 'end|>') }}", "<|im_end|>"),
        ("{{ '<|a|>' | center(9) }}{{ '<|a|>'.ljust(7, '.') }}{{ c.zfill(8) }}", "  <|a|>  <|a|>..[0x<|e|>y]"),
        ("{% generation %}<|a|>{{ c }}{% endgeneration %}", "<|a|>[x<|e|>y]"),
        ("{{ [c, '<|e|>'] | unique | list | last }}{{ ['<|b|>', c] | max }}", "<|e|>[x<|e|>y]"),
        ("{{ '<|a|>' | first }}{{ '<|a|>' | reverse }}", "[<>|a|<]"),
        ("{% block b %}<|a|>{{ c }}{% endblock %}{{ self.b() }}", "<|a|>[x<|e|>y]<|a|>[x<|e|>y]"),
    ],
)
def test_marks(template: str, expected: str) -> None:
    assert shown(template, c=CONTENT) == expected


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("center", "ljust", "rjust"), (20, Marked("-"))),
    **dict.fromkeys(("zfill", "expandtabs"), (20,)),
    **dict.fromkeys(("splitlines", "capitalize", "casefold", "lower", "swapcase", "title", "upper"), ()),
    "replace": (Marked("<|e|>"), "q"),
    "join": (["<|e|>", "<|e|>"],),
}


@pytest.mark.parametrize("name", template_text.METHODS)
@pytest.mark.parametrize("content", ["<|e|>", "a<|e|>b<|e|>", "", "q", "\t<|e|>\n"])
def test_methods_of_content_give_content(name: str, content: str) -> None:
    """Although the arguments are the template's, and the same text: what comes out is no object that went in."""
    arguments = () if name.startswith("is") else ARGUMENTS.get(name, (Marked("<|e|>"),))

    def outcome(method: Callable[..., Any], *values: Any) -> Any:
        try:
            return method(*values)
        except ValueError as error:
            return type(error)

    result = outcome(template_text.METHODS[name], Budget(), content, *arguments)
    assert result == outcome(getattr(str, name), content, *arguments)
    for each in result if isinstance(result, (list, tuple)) else [result]:
        assert type(each) is not Marked or not content


# A second implementation of text with marks, for random expressions: a list of (character, written) pairs.
Pairs = list[tuple[str, bool]]


def find_all(text: Pairs, wanted: str) -> list[int]:
    plain = "".join(char for char, _ in text)
    found, at = [], plain.find(wanted)
    while at >= 0:
        found.append(at)
        at = plain.find(wanted, at + len(wanted))
    return found


def split_pairs(text: Pairs, wanted: str) -> list[Pairs]:
    pieces, start = [], 0
    for at in find_all(text, wanted):
        pieces.append(text[start:at])
        start = at + len(wanted)
    return [*pieces, text[start:]]


def join_pairs(sep: Pairs, pieces: list[Pairs]) -> Pairs:
    joined = list(pieces[0])
    for piece in pieces[1:]:
        joined += [*sep, *piece]
    return joined


def strip_pairs(text: Pairs, chars: str) -> Pairs:
    while text and text[0][0] in chars:
        text = text[1:]
    while text and text[-1][0] in chars:
        text = text[:-1]
    return text


def expression(rng: random.Random, depth: int, variables: dict[str, str]) -> tuple[str, Pairs]:
    """A random expression in jinja2 and what it should give."""
    if depth == 0 or rng.random() < 0.1:
        text = "".join(rng.choices("ab<|> ", k=rng.randrange(6)))
        if rng.random() < 0.5:
            return repr(text), [(char, True) for char in text]
        name = f"v{len(variables)}"
        variables[name] = text
        return name, [(char, False) for char in text]

    def inner() -> tuple[str, Pairs]:
        return expression(rng, depth - 1, variables)

    code, pairs = inner()
    wanted = "".join(rng.choices("ab<|>", k=rng.randrange(1, 3)))
    kind = rng.randrange(12)
    if kind == 0:
        other, more = inner()
        return f"({code} + {other})", pairs + more
    if kind == 1:
        other, more = inner()
        return f"({code} ~ {other})", pairs + more
    if kind == 2:
        start, stop = rng.randrange(-8, 8), rng.randrange(-8, 8)
        return f"({code})[{start}:{stop}]", pairs[start:stop]
    if kind == 3:
        other, more = inner()
        name, count = ("replace", "") if rng.random() < 0.5 else ("replace", ", 1")
        pieces = split_pairs(pairs, wanted)
        if count and len(pieces) > 1:
            first = pieces[0]
            pieces = [first, pairs[len(first) + len(wanted) :]]
        form = f"({code}).{name}({wanted!r}, {other}{count})"
        if rng.random() < 0.5:
            form = f"(({code})|{name}({wanted!r}, {other}{count}))"
        return form, join_pairs(more, pieces)
    if kind == 4:
        other, more = inner()
        return f"({other}).join(({code}).split({wanted!r}))", join_pairs(more, split_pairs(pairs, wanted))
    if kind == 5:
        return f"({code}).strip({wanted!r})", strip_pairs(pairs, wanted)
    if kind == 6:
        return f"(({code})|trim)", strip_pairs(pairs, " ")
    if kind == 7:
        found = find_all(pairs, wanted)
        first = found[0] if found else len(pairs)
        return f"({code}).partition({wanted!r})[0]", pairs[:first]
    if kind == 8:
        pieces = split_pairs(pairs, wanted)
        return f"({code}).split({wanted!r})[-1]", pieces[-1]
    if kind == 9:
        other, more = inner()
        return f"('<%s|%s>' % ({code}, {other}))", [("<", True), *pairs, ("|", True), *more, (">", True)]
    if kind == 10:
        return f"'<|{{}}|>'.format({code})", [("<", True), ("|", True), *pairs, ("|", True), (">", True)]
    other, more = inner()
    plain = "".join(char for char, _ in pairs)
    return f"({code} if {wanted!r} in ({code}) else {other})", pairs if wanted in plain else more


@pytest.mark.parametrize("seed", range(4))
def test_marks_of_random_expressions(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        variables: dict[str, str] = {}
        code, pairs = expression(rng, rng.randrange(1, 5), variables)
        template = "{{ " + code + " }}"
        text = run(template, **variables)
        assert text == "".join(char for char, _ in pairs) == oracle.render(template, **variables), template
        flags = [written for piece, written in parts(text) for _ in piece]
        assert flags == [written for _, written in pairs], (template, variables)


@given(
    st.lists(st.tuples(st.text("ab<|", max_size=5), st.booleans()), max_size=8),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_cut_and_join(pieces: list[tuple[str, bool]], start: int, stop: int) -> None:
    text = join([Marked(piece) if written else piece for piece, written in pieces])
    flags = [written for piece, written in pieces for _ in piece]
    assert text == "".join(piece for piece, _ in pieces)
    assert [written for piece, written in parts(text) for _ in piece] == flags
    start, stop = min(start, len(text)), min(max(start, stop), len(text))
    piece = cut(text, start, stop)
    assert piece == text[start:stop]
    assert [written for part, written in parts(piece) for _ in part] == flags[start:stop]
    kinds = [written for _, written in parts(text)]
    assert all(left != right for left, right in pairwise(kinds))
    assert all(part for part, _ in parts(text))


# --- The same text as plain jinja2

MESSAGES = [
    {"role": "system", "content": "  Sei knapp.\n"},
    {"role": "user", "content": "a<b & 'c' \"d\" \\ é 漢字 😀\t1,2"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": [1, 2.5, None, True]}}]},
    {"role": "tool", "content": "line one\n\nline two\r\nthree"},
]

SAME = (oracle.TEMPLATES / "language.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("template", SAME, ids=range(len(SAME)))
def test_same_text(template: str) -> None:
    assert run(template, messages=MESSAGES) == oracle.render(template, messages=MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "  {% if true %}\n    a\n  {% endif %}\nb\n\n",
        "{%- for m in messages -%}\n  {{ m.role }}\n{%- endfor +%}\n x",
        "a\r\nb{# c #}\n{{ 1 }}\n\n",
    ],
)
def test_same_white_space(template: str) -> None:
    assert run(template, messages=MESSAGES) == oracle.render(template, messages=MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ nothing.more }}",
        "{{ 'a' + 1 }}",
        "{{ 'a' + none }}",
        "{{ 'a' + nothing }}",
        "{{ nothing() }}",
        "{{ messages | nofilter }}",
        "{{ 1 is notest }}",
        "{{ '%d' % 'a' }}",
        "{{ '%s' % () }}",
        "{{ 'a' % (1,) }}",
        "{{ '%q' % 1 }}",
        "{{ '{} {}'.format(1) }}",
        "{{ ','.join([1]) }}",
        "{{ 1 // 0 }}",
        "{{ 'a'.index('b') }}",
        "{{ {'a': nothing} | tojson }}",
        "{{ ['a'] | sum(start='') }}",
        "{% for x in 3 %}{% endfor %}",
        "{% for a, b in [1] %}{% endfor %}",
        "{{ messages | map('x') | list }}",
        "{{ 'a'.upper(1) }}",
        "{{ {[]: 1} }}",
        "{{ [1, 'a'] | sort }}",
        "{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}",
        "{% set messages.x = 1 %}",
        "{{ ''.split('') }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% extends 'x' %}",
        "{% do 1 %}",
        "{% if %}",
        "{{ 'a }}",
        "{% for x in y %}",
        "{{ raise_exception('No. ' + messages[0].role) }}",
    ],
)
def test_fails_where_plain_jinja2_fails(template: str) -> None:
    with pytest.raises(Exception):  # noqa: B017 - any, of jinja2 or Python
        oracle.render(template, messages=MESSAGES)
    with pytest.raises(TemplateError):
        run(template, messages=MESSAGES)


def test_what_a_failure_says() -> None:
    def said(template: str) -> str:
        with pytest.raises(TemplateError) as error:
            run(template, messages=MESSAGES)
        return str(error.value)

    assert said("a\n\n{{ 'a' + 1 }}") == 'line 3: TypeError: can only concatenate str (not "int") to str'
    assert said("\n{% if %}") == "line 2: Expected an expression, got 'end of statement block'"
    assert said("\n\n{{ x.y }}") == "line 3: UndefinedError: 'x' is undefined"
    assert said("{{ raise_exception('Roles must alternate.') }}") == "it refuses these messages: Roles must alternate."
    assert said("{{ 1 | nofilter }}") == "line 1: No filter named 'nofilter'."
    assert said("\n{% autoescape true %}{% endautoescape %}").startswith("line 2: a chat template cannot use ")
    assert len(said("{{ raise_exception('x' * 100000) }}")) < 600
    assert len(said("{{ x['" + "y" * 10000 + "'].z }}")) < 600


def test_strftime_now() -> None:
    assert run("{{ strftime_now('%Y') }}") in {oracle.render("{{ strftime_now('%Y') }}"), str(time.localtime().tm_year)}


# --- What a template may not do


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__class__ }}",
        "{{ messages | attr('__class__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ range.__self__ }}",
        "{{ ''._spans }}",
        "{{ self.__init__ }}",
        "{{ ('x' | attr('format')).__self__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ messages | map(attribute='__class__') | join }}",
        "{{ messages[0].items.__name__ }}",
        "{{ lipsum }}",
    ],
)
def test_hidden(template: str) -> None:
    assert run(template, messages=MESSAGES) == ""


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self._TemplateReference__context.x }}",
        "{% set f = '{0.__class__.__mro__}'.format %}{{ f('x') }}",
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ messages[0].setdefault('x', 1) }}",
        "{{ messages | map('attr', '__class__') | map(attribute='x.y') | list }}",
        "{{ (1).to_bytes(4, 'big') }}",
        "{{ 'a'.encode() }}",
        "{{ 'a'.translate({97: 'b'}) }}",
        "{{ {}.fromkeys('ab') }}",
        "{{ ('a' | safe).join(['b']) }}",
        "{{ lipsum() }}",
        "{{ dict.mro() }}",
        "{{ messages | map('#text') | list }}",
        "{{ messages | map('#box') | list }}",
    ],
)
def test_refused(template: str) -> None:
    before = json.dumps(MESSAGES)
    with pytest.raises(TemplateError):
        run(template, messages=MESSAGES)
    assert json.dumps(MESSAGES) == before


# --- Bounds


def grown(start: str, step: str, use: str) -> str:
    """ns.x grown 99 times by a step that doubles it, then used."""
    setting = (
        "{% set ns = namespace(x=" + start + ") %}{% for i in range(99) %}{% set ns.x = " + step + " %}{% endfor %}"
    )
    return setting + "{{ " + use + " }}"


LOOPS = {
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "captured": "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endset %}",
    "two calls each": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
    "search": "{% set x = 'a' * 8000000 %}{% for i in range(100000) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "loop filter": "{% set x = 'a' * 8000000 %}{% for i in range(100000) if 'b' in x %}{% endfor %}",
    "comparing": "{% set x = range(99999) | list %}{% for i in x %}{% if i in x and -1 in x %}{% endif %}{% endfor %}",
}

BOMBS = {
    "times": "{{ 'a' * 400000000 }}",
    "times, turned": "{{ 400000000 * 'a' }}",
    "list": "{% set x = [0] * 10 ** 9 %}",
    "range": "{% for i in range(1000000000) %}{% endfor %}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "large product": grown("10", "ns.x * ns.x", "1"),
    "doubling": grown("'a'", "ns.x + ns.x", "1"),
    "doubling ~": grown("'a'", "ns.x ~ ns.x", "1"),
    "doubling list": grown("[1]", "ns.x + ns.x", "1"),
    "center": "{{ 'a' | center(10 ** 9) }}",
    "center method": "{{ 'a'.center(10 ** 9) }}",
    "ljust": "{{ 'a'.ljust(10 ** 9) }}",
    "zfill": "{{ 'a'.zfill(10 ** 9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10 ** 9) }}",
    "width": "{{ '%1000000000d' % 1 }}",
    "width filter": "{{ '%1000000000d' | format(1) }}",
    "precision": "{{ '%.1000000000f' % 1.0 }}",
    "width argument": "{{ '%*d' % (1000000000, 1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format often": "{{ ('{0}' * 10000).format('a' * 1000000) }}",
    "percent often": "{{ ('%(a)s' * 10000) | format(a='x' * 1000000) }}",
    "percents": "{{ ('%%' * 4000000) % () }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'x' * 1000) }}",
    "replace filter": "{{ ('a' * 1000000) | replace('a', 'x' * 1000) }}",
    "replace nothing": "{{ ('a' * 1000000).replace('', 'x' * 1000) }}",
    "join": "{{ range(100000) | join('x' * 1000000) }}",
    "join method": "{{ ('x' * 1000000).join(range(1000) | map('string')) }}",
    "split": "{{ ('a,' * 8000000).split(',') | length }}",
    "split words": "{{ ('a ' * 8000000).split() | length }}",
    "split marked": "{{ ('ab' * 1000000).split('a') | join('<x>') }}",
    "lines": "{{ ('\\n' * 16000000).splitlines() | length }}",
    "characters": "{{ ('ab' * 8000000) | list | length }}",
    "sorted characters": "{{ ('ab' * 8000000) | sort | length }}",
    "mapped characters": "{{ ('ab' * 8000000) | map('upper') | join }}",
    "loop length": "{% for c in ('ab' * 8000000) | select %}{{ loop.length }}{% endfor %}",
    "captured characters": "{% set x %}{% for c in 'ab' * 1000000 %}{{ c }}<x>{% endfor %}{% endset %}",
    "many strings": "{% set x = 'a' * 16000000 %}" * 40,
    "many slices": "{% set x = 'a' * 8000000 %}{% for i in range(100000) %}{{ x[::-1] | length }}{% endfor %}",
    "many lists": "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = ns.l + [i] %}{% endfor %}",
    "rfind": "{{ ('a' * 8000000).rfind('b' + 'a' * 4000000) }}",
    "rsplit": "{{ ('a' * 8000000).rsplit('b' + 'a' * 4000000) }}",
    "strip": "{{ ('a' * 16000000).strip('b' * 10000000 + 'a') }}",
    "batch": "{{ [1] | batch(10 ** 9, 0) | list }}",
    "slice": "{{ [1] | slice(10 ** 9) | list }}",
    "map center": "{{ range(100000) | map('center', 100000) | list }}",
    "json indent": "{{ [['x']] | tojson(indent=10 ** 9) }}",
    "json indent text": "{{ [['x']] | tojson(indent='x' * 10000000) }}",
    "json separators": "{{ range(1000) | list | tojson(separators=('x' * 1000000, 'y')) }}",
    "indent": "{{ ('\\n' * 100000) | indent(100000, blank=true) }}",
    "escape": "{{ ('<' * 16000000) | e }}",
    "round": "{{ 1 | round(10 ** 9, 'ceil') }}",
    "long number": "{{ ('1' * 10000000) | int(base=2) }}",
    "title": "{{ ('a ' * 8000000) | title }}",
    "time": "{{ strftime_now('%c' * 1000000) }}",
    "laughs": grown("[1]", "[ns.x, ns.x]", "ns.x"),
    "laughs json": grown("[1]", "[ns.x, ns.x]", "ns.x | tojson"),
    "laughs ~": grown("{}", "{1: ns.x, 2: ns.x}", "1 ~ ns.x"),
    "laughs compared": grown("[[1], [1]]", "[[ns.x[0], ns.x[0]], [ns.x[1], ns.x[1]]]", "ns.x[0] == ns.x[1]"),
    "laughs tested": grown("[[1], [1]]", "[[ns.x[0], ns.x[0]], [ns.x[1], ns.x[1]]]", "ns.x[0] is eq ns.x[1]"),
    "laughs hashed": grown("(1,)", "(ns.x, ns.x)", "{ns.x: 1}"),
    "laughs looked up": grown("(1,)", "(ns.x, ns.x)", "{}[ns.x]"),
    "laughs got": grown("(1,)", "(ns.x, ns.x)", "{}.get(ns.x)"),
    "laughs unique": grown("(1,)", "(ns.x, ns.x)", "[ns.x] | unique | list"),
    "laughs by varargs": "{% macro f() %}{{ f(varargs, varargs) }}{% endmacro %}{{ f(1) }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "recursive block": "{% block b %}{{ self.b() }}{% endblock %}",
    "cyclic namespace": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "deep list": "{% set ns = namespace(x=1) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "minus": "{{ " + "-" * 5000 + "1 }}",
    "plus": "{{ 1" + "+1" * 20000 + " }}",
    "dots": "{{ a" + ".a" * 20000 + " }}",
    "filters": "{{ a" + "|upper" * 9000 + " }}",
    "elif": "{% if 0 %}" + "{% elif 0 %}" * 4000 + "{% endif %}",
    "nested for": "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    "open": "{{" * 30000,
    "open comment": "{#" * 30000,
    "long number in source": "{{ " + "1_" * 30000 + "1 }}",
    "too long": "x" * (MAX_SOURCE + 1),
}

BOMBED = """
import json, resource, sys, time
from reflex_ipc import template_text
from reflex_ipc.errors import TemplateError
from reflex_ipc.template import compile_template, render
from reflex_ipc.template_text import Budget
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
template_text.MAX_SECONDS = float(sys.argv[1])
for name, template in json.load(sys.stdin).items():
    began = time.thread_time()
    try:
        said = f"rendered {len(render(compile_template(template), {}, Budget()))} characters"
    except TemplateError as error:
        said = str(error)
    except BaseException as error:
        said = f"{type(error)}: {error}"
    print(json.dumps([name, time.thread_time() - began, said]), flush=True)
"""


def bombed(templates: dict[str, str], seconds: float) -> list[tuple[str, float, str]]:
    """(name, processor seconds, message) of each, in a process that has half a GiB of address space."""
    done = subprocess.run(
        [sys.executable, "-c", BOMBED, str(seconds)],
        input=json.dumps(templates),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_loops_end_by_the_clock() -> None:
    results = bombed(LOOPS, 0.5)
    assert [name for name, _, _ in results] == list(LOOPS)
    for name, seconds, said in results:
        assert "ran longer than" in said, (name, said)
        assert seconds < 1.5, (name, seconds)


def test_the_clock_is_set_to_two_seconds() -> None:
    [(_, seconds, said)] = bombed({"loops": LOOPS["nested loops"]}, template_text.MAX_SECONDS)
    assert "ran longer than 2 s" in said
    assert 2 <= seconds < 3


def test_bombs_are_refused() -> None:
    results = bombed(BOMBS, template_text.MAX_SECONDS)
    assert [name for name, _, _ in results] == list(BOMBS)
    for name, seconds, said in results:
        assert not said.startswith(("rendered", "<class")), (name, said)
        assert "memory ran out" not in said, (name, said)
        assert "ran longer" not in said, (name, said)
        assert seconds < 2, (name, seconds)


def test_costly_templates_that_may_run() -> None:
    """Nothing is refused for being written out at length."""
    fine = {
        "many outputs": "{{ a }}" * 9000,
        "many texts": "{{a}}b" * 10000,
        "many concatenations": "{{ 'a'" + "~'a'" * 10000 + " }}",
        "many assignments": "{% set a = 1 %}" * 4000,
        "long text": "{{ 'a' * 16000000 }}",
        "long list": "{{ range(50000) | map('string') | join(',') }}",
        "wide search": "{{ ('a' * 8000000).find('b' + 'a' * 4000000) }}",
    }
    for name, seconds, said in bombed(fine, template_text.MAX_SECONDS):
        assert said.startswith("rendered"), (name, said)
        assert seconds < 4, (name, seconds)


def test_budget_grows_with_what_is_given() -> None:
    """A template that copies a long conversation over and over: quadratic, as real ones are."""
    code = compile_template(
        "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m %}{% endfor %}{{ ns.x }}"
    )
    messages = ["x" * 100_000] * 40
    assert len(render(code, {"messages": messages}, Budget(4_000_000))) == 4_000_000
    with pytest.raises(TemplateError, match="too much memory"):
        render(code, {"messages": messages}, Budget(0))


def test_off_the_main_thread_and_leaving_nothing_behind() -> None:
    said: list[str] = []
    before = threading.active_count()

    def work(template: str) -> None:
        try:
            said.append(run(template))
        except TemplateError as error:
            said.append(str(error))

    threads = [
        threading.Thread(target=work, args=(template,)) for template in ("{{ 1 }}", BOMBS["times"], "<a>{{ 2 }}")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == ["1", "<a>2", "line 1: the template builds a text longer than 16777216 characters"]
    assert threading.active_count() == before


PIECES = (
    *("{{", "}}", "{%", "%}", "{#", "#}", "-", "+", "*", "**", "//", "%", "~", "|", ".", ",", ":", "(", ")", "[", "]"),
    *("{", "}", " ", "\n", "'", '"', "\\", "=", "==", "!=", "<", ">", "in", "is", "not", "and", "or", "if", "else"),
    *(
        "for",
        "endfor",
        "endif",
        "set",
        "endset",
        "macro",
        "endmacro",
        "call",
        "filter",
        "x",
        "messages",
        "loop",
        "range",
    ),
    *(
        "namespace",
        "raise_exception",
        "tojson",
        "join",
        "split",
        "replace",
        "format",
        "100000",
        "9",
        "0",
        "'%s'",
        "'a'",
    ),
    *("recursive", "break", "continue", "block", "with", "self", "caller", "role", "content", "none", "true", "upper"),
)


def fuzz(rng: random.Random) -> str:
    def expression(depth: int) -> str:
        forms: list[Callable[[], str]] = [
            lambda: rng.choice(
                ["x", "messages", "9", "0", "'a'", "'%s|%d'", "none", "range(999)", "''", "[]", "{}", "1.5"]
            ),
            lambda: rng.choice(
                ["messages[0].content", "loop", "loop.length", "ns", "ns.x", "'{} {}'", "namespace(x=1)"]
            ),
        ]
        if depth:
            forms += [
                lambda: f"({expression(depth - 1)} {rng.choice(OPERATORS)} {expression(depth - 1)})",
                lambda: f"({expression(depth - 1)}|{rng.choice(FILTERS)})",
                lambda: f"({expression(depth - 1)}|{rng.choice(FILTERS)}({expression(depth - 1)}))",
                lambda: f"({expression(depth - 1)}).{rng.choice(METHODS)}({expression(depth - 1)})",
                lambda: (
                    f"({expression(depth - 1)}).{rng.choice(METHODS)}({expression(depth - 1)}, {expression(depth - 1)})"
                ),
                lambda: f"({expression(depth - 1)})[{expression(depth - 1)}]",
                lambda: f"({expression(depth - 1)})[{expression(depth - 1)}:{expression(depth - 1)}]",
                lambda: f"({expression(depth - 1)} if {expression(depth - 1)} else {expression(depth - 1)})",
                lambda: f"[{expression(depth - 1)}, {expression(depth - 1)}]",
                lambda: "{" + expression(depth - 1) + ": " + expression(depth - 1) + "}",
                lambda: f"({expression(depth - 1)} is {rng.choice(TESTS)})",
                lambda: f"{rng.choice(['f', 'range', 'dict', 'namespace', 'loop', 'joiner'])}({expression(depth - 1)})",
            ]
        return rng.choice(forms)()

    if rng.random() < 0.3:
        return "".join(rng.choices(PIECES, k=rng.randrange(1, 20)))
    body = "".join("{{ " + expression(3) + " }}" for _ in range(rng.randrange(1, 3)))
    return rng.choice(
        [
            "{}",
            "{{% set x = {1} %}}{{{{ x }}}}{0}",
            "{{% for x in {1} %}}{0}{{% endfor %}}",
            "{{% macro f(x) %}}{0}{{% endmacro %}}{{{{ f({1}) }}}}",
            "{{% set ns = namespace(x=1) %}}{{% set ns.x = {1} %}}{0}",
            "{{% set x %}}{0}{{% endset %}}{{{{ x }}}}",
        ]
    ).format(body, expression(2))


OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">", "in", "not in", "and", "or")
FILTERS = (
    *("abs", "attr", "batch", "capitalize", "center", "count", "default", "dictsort", "e", "first", "float", "format"),
    *("groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject"),
    *(
        "replace",
        "reverse",
        "round",
        "safe",
        "select",
        "selectattr",
        "slice",
        "sort",
        "string",
        "sum",
        "title",
        "tojson",
    ),
    *("trim", "truncate", "unique", "upper"),
)
METHODS = (*template_text.METHODS, "format", "get", "items", "keys", "values", "copy", "append", "x", "content")
TESTS = ("defined", "string", "mapping", "iterable", "none", "odd", "eq 9", "in 'abc'", "divisibleby 3", "sameas none")


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # plain jinja2 compiles `1[2]` into just that
@pytest.mark.parametrize("seed", range(6))
def test_random_templates_agree_with_plain_jinja2(seed: int) -> None:
    """Either both fail or both give the same text; what fails here only, fails for a reason that is a rule of ours."""
    rng = random.Random(f"templates {seed}")
    agreed = refused = 0
    for _ in range(600):
        template = fuzz(rng)
        try:
            expected: str | None = oracle.render(template, messages=MESSAGES)
        except Exception:
            expected = None
        try:
            text: str | None = run(template, messages=MESSAGES)
        except TemplateError as error:
            said, text = str(error), None
        if expected is not None and " at 0x" in expected:
            continue
        if text is None and expected is not None:
            assert any(rule in said for rule in RULES), (template, said, expected)
            refused += 1
        elif text is not None and expected is not None:
            assert text == expected, template
            agreed += 1
        else:
            assert (text is None) == (expected is None), (template, text)
    assert agreed > 100
    assert refused < 30


RULES = (
    *("cannot call", "a namespace cannot", "longer than", "too large", "too much memory", "formats to a width"),
    *("unsupported format", "marked as safe", "rows of more than", "rounds to more"),
    "unhashable type: 'slice'",  # plain jinja2 makes it undefined, but only where it evaluates constants
)


def test_plain_jinja2_is_the_oracle() -> None:
    """The oracle fails as it should, or the comparisons above compare nothing."""
    assert oracle.render("{{ {'a': '<'} | tojson }}") == '{"a": "<"}'
    with pytest.raises(jinja2.TemplateError):
        oracle.render("{{ raise_exception('x') }}")


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_source_ends_in_text_or_in_the_typed_error(source: str) -> None:
    for template in (source, "{{ " + source + " }}", "{% " + source + " %}"):
        with suppress(TemplateError):
            run(template, messages=MESSAGES)
