"""Chat templates: what transformers renders, within limits of time and size whatever a template does."""

from __future__ import annotations

import threading
import time
import tracemalloc
from typing import Any

import pytest
from unirl.core.errors import RecipeError
from unirl.model_host import chat_templates
from unirl.model_host.chat_templates import bounded_templates, render_chat
from unirl.model_host.tokens.image_miniature import CHAT_TEMPLATE as IMAGES
from unirl.model_host.tokens.miniature import byte_tokenizer

CHAT = [
    {"role": "system", "content": "Be <b>brief</b> & true."},
    {"role": "user", "content": 'What is 2 + 2?\n  "Now"\t四 🐕 {{ 7 * 7 }}'},
    {"role": "assistant", "content": "<think>\nsums\n</think>\n\nIt is 4."},
    {"role": "user", "content": "And 3 + 3?"},
]
PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
FEATURES = """{#- of published templates -#}
{%- macro shown(text, depth=0) -%}{{ '[' ~ text|trim ~ '|' ~ depth ~ ']' }}{%- endmacro -%}
{%- set ns = namespace(last=-1, seen=[], index=0) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
  {%- set ns.seen = ns.seen + [message['role']] -%}
{%- endfor -%}
{{- bos_token }}{{ ns.seen|join(', ') }} {{ ns.seen|unique|list|tojson }} {{ ns.last }}
{% for message in messages[::-1] -%}
  {%- if loop.first %}first{% elif loop.last %}last{% endif %} {{ loop.length - loop.index }}:
  {%- set content = message.content -%}
  {%- if '</think>' in content -%}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
  {%- endif -%}
  {{ shown(content, depth=loop.index0 % 3) }}{{ content.replace('\\n', ' ').upper() if loop.index is odd else content|indent(2) }}
  {%- if message.role == 'tool' -%}{%- break -%}{%- endif -%}
  {% generation %}{{ message|tojson(indent=2) }}{% endgeneration %}
{%- endfor -%}
{%- for key, value in {'a': (1, 2), 'b': [3]}.items() %}{{ key }}={{ value }};{% endfor -%}
{%- set block -%}{% for x in range(3) if x != 1 %}{{ '%02d' % x }}{{ "{:>3}".format(x) }}{% else %}none{% endfor %}{%- endset -%}
{{ block|length }} {{ block }} {{ dict(a=1, **{'b': 2}) }} {{ 3 * '-' }} {{ 2 ** 10 }} {{ [1, 2] + [3] }} {{ 7 // 2 }}
{%- filter upper %}x{{ messages|map(attribute='role')|list|first }}{% endfilter -%}
{%- for row in [[1, [2]], [3]] recursive %}({{ loop(row) if row is iterable else row }}){% endfor -%}
{{ [1, 2]|sum }}{{ missing is defined }} {{ missing }} {{ messages|length }} {{ enable_thinking|default(true) }} {{ tools }}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def renderer(template: str) -> Any:
    result = byte_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], chat_template=template)
    result.bos_token = "<|endoftext|>"
    return result


@pytest.mark.parametrize("template", [PLAIN, FEATURES], ids=["plain", "features"])
@pytest.mark.parametrize("switch", [{}, {"enable_thinking": False}])
def test_the_text_is_what_transformers_renders(template: str, switch: dict[str, bool]) -> None:
    tokenizer = renderer(template)
    for chat in (CHAT, CHAT[:2], CHAT[1:2]):
        expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **switch)
        assert render_chat(tokenizer, chat, key="k", add_generation_prompt=True, **switch) == expected
        assert len(expected) > 20


def test_contents_in_parts_and_long_conversations_are_rendered() -> None:
    tokenizer = renderer(IMAGES)
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    assert render_chat(tokenizer, parts, key="k") == tokenizer.apply_chat_template(parts, tokenize=False)
    tokenizer = renderer(FEATURES)
    long = [{"role": "user", "content": "a word " * 100_000}, *CHAT * 50]
    assert render_chat(tokenizer, long, key="k") == tokenizer.apply_chat_template(long, tokenize=False)


DOUBLED = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = MORE %}{% endfor %}{{ ns.x }}"
ATTACKS = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "text": "{% for i in range(100000) %}{% for j in range(100000) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
    "data": "{% for i in range(100000) %}{% for j in range(100000) %}" + "x" * 1000 + "{% endfor %}{% endfor %}",
    "buffer": "{% set x %}{% for i in range(100000) %}{{ 'x' * 1000000 }}{% endfor %}{% endset %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}"
    + "x" * 10_000
    + "{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "repeat": "{{ 'x' * 10**9 }}",
    "repeat a list": "{% set x = 10**9 * [1] %}",
    "power": "{{ 9**(9**9) }}",
    "square": DOUBLED.replace("START", "9").replace("MORE", "ns.x * ns.x"),
    "join two": DOUBLED.replace("START", "'a'").replace("MORE", "ns.x ~ ns.x"),
    "add": DOUBLED.replace("START", "'a'").replace("MORE", "ns.x + ns.x"),
    "nest lists": DOUBLED.replace("START", "[1]").replace("MORE", "[ns.x, ns.x, ns.x, ns.x]"),
    "nest objects": DOUBLED.replace("START", "{}").replace("MORE", "dict(a=ns.x, b=ns.x, c=ns.x, d=ns.x)"),
    "join many": "{% set s = 'a' * 1000000 %}{{ " + "~".join(["s"] * 2000) + " }}",
    "center": "{{ 'x'|center(1000000000) }}",
    "method": "{{ 'x'.ljust(1000000000) }}",
    "tabs": "{{ ('\t' * 1000000).expandtabs(1000000) }}",
    "bytes": "{{ (5).to_bytes(1000000000, 'big') }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "star": "{{ '%*d' % (1000000000, 1) }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "format often": "{{ ('{0}' * 100000).format('a' * 1000000) }}",
    "date": "{{ strftime_now('%1000000000d') }}",
    "replace": "{{ ('a' * 1000000)|replace('a', 'b' * 1000000) }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "join": "{{ range(100000)|join('b' * 1000000) }}",
    "join a generator": "{{ range(100000)|map('string')|join('b' * 1000000) }}",
    "indent": "{{ ('\n' * 1000000)|indent(1000000) }}",
    "json": "{{ (range(100000)|list)|tojson(indent=1000000) }}",
    "map": "{{ range(100000)|map('string')|map('center', 1000000)|list|length }}",
    "split": "{% set s = 'a,' * 1000000 %}{% for i in range(100000) %}{% set l = s.split(',') %}{% endfor %}",
    "constant": "{% autoescape 'x'|center(1000000000) %}{% endautoescape %}",
    "lipsum": "{{ lipsum(100000) }}",
    "wordwrap": "{{ ('a' * 4000000)|wordwrap(1) }}",
    "sum": "{{ ([[1] * 2000] * 2000)|sum(start=[]) }}",
    "large": "a" * (2**20 + 1),
    "parentheses": "{{ " + "(1+" * 250 + "1" + ")" * 250 + " }}",
    "blocks": "{% for i in [1] %}" * 40 + "{% endfor %}" * 40,
    "text and list": "{{ 'a' + [1] }}",
    "zero": "{{ 1 // 0 }}",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_template_that_makes_too_much_is_refused_before_it_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "VALUE", 2**14 if name.startswith("nest") else 2**20)
    monkeypatch.setattr(chat_templates, "TOTAL", 2**23)
    tokenizer = renderer(ATTACKS[name])
    started, threads = time.thread_time(), threading.active_count()
    tracemalloc.start()
    try:
        with pytest.raises(RecipeError, match=r"^sampling\.chat: the checkpoint's chat template fails: ."):
            render_chat(tokenizer, CHAT, key="sampling.chat")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A character has 1 byte, an item of a list 8, and a short text of its own 50. Tracing takes several times as long.
    assert peak < 8 * 2**23 and time.thread_time() - started < 4 * chat_templates.SECONDS
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% set l = range(100000)|list %}{% for a in l %}{% for b in l %}{% set z = a %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{{ cycler(1, 2).next() }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_takes_too_long_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "SECONDS", 0.2)
    started = time.thread_time()
    with pytest.raises(RecipeError, match=r"k: the checkpoint's chat template fails: it takes more than 0\.2 s"):
        render_chat(renderer(template), CHAT, key="k")
    # The clock is read at every round: what comes on top is one of them.
    assert time.thread_time() - started < 1


def test_what_a_template_itself_refuses_is_said() -> None:
    with pytest.raises(RecipeError, match=r"^k: the checkpoint's chat template fails: no system$"):
        render_chat(renderer("{{ raise_exception('no system') }}"), CHAT, key="k")
    for text in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% include 'x' %}",
        "{{ x.y }}",
        "{% if %}",
    ):
        with pytest.raises(RecipeError, match="chat template fails"):
            render_chat(renderer(text), CHAT, key="k")


def test_the_limits_hold_within_the_block_and_for_each_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "TOTAL", 10_000)
    tokenizer = renderer("{{ 'x' * 4000 }}")
    with bounded_templates():
        for _ in range(5):
            assert len(tokenizer.apply_chat_template(CHAT, tokenize=False)) == 4000
    tokenizer = renderer("{% for i in range(90) %}{{ 'x' * 4000 }}{% endfor %}")
    with (
        pytest.raises(RecipeError, match=r"^model\.path: .* fails: it makes more than 10000 characters"),
        bounded_templates(),
    ):
        tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert len(tokenizer.apply_chat_template(CHAT, tokenize=False)) == 360_000
