"""Grammars of answers: each format's own calls are let through and read back, everything else is not; bad ones are refused."""

from __future__ import annotations

import asyncio
import json
import pathlib
from typing import Any

import pytest

from trireme.api.chat.parsing import parser_for
from trireme.api.chat.reasoning import TAGS
from trireme.api.chat.tools import BY_NAME, Format
from trireme.api.parameters.grammars import (
    MAX_ENUM,
    GrammarCheck,
    SpecialTokens,
    choice_grammar,
    object_grammar,
    regex_grammar,
    rules_grammar,
    schema_grammar,
    tools_grammar,
    with_channels,
    with_thought,
)
from trireme.errors import BadRequest
from trireme.hub.grammar import GrammarTokens
from trireme.hub.tokenizer import Tokenizer

F = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [
    {"function": {"name": "f", "parameters": F}},
    {"function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
]


class Judge:
    """Says whether a grammar takes a text, by the real model's tokens."""

    def __init__(self, path: pathlib.Path):
        self.tokenizer = Tokenizer.open(path)
        self.special = SpecialTokens(self.tokenizer)
        self.tokens = GrammarTokens(self.tokenizer, [2])

    def takes(self, grammar: str, text: str) -> bool:
        matcher = self.tokens.matcher(grammar)
        ids = self.tokenizer.encode(text, add_special=False, allow_special=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def judge(smollm2_path: pathlib.Path) -> Judge:
    return Judge(smollm2_path)


def written(format: Format, *calls: tuple[str, str]) -> str:
    shape = format.shape
    each = [f"{shape.before}{name}{shape.between}{arguments}{shape.after}" for name, arguments in calls]
    return shape.opening + shape.separator.join(each) + shape.closing


def read(format: Format, text: str) -> list[tuple[str, Any]]:
    parser = parser_for(None, "", tools=TOOLS, override=format.name)()
    calls = [*parser.push(text).calls, *parser.finish().calls]
    return [(call.name or "", json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_required_calls_are_written_and_read_alike(judge: Judge, name: str) -> None:
    format = BY_NAME[name]
    grammar = tools_grammar(TOOLS, format, parallel=True, special=judge.special)
    one = written(format, ("f", '{"a": 1}'))
    assert judge.takes(grammar, one) and read(format, one) == [("f", {"a": 1})]
    if not format.own_reasoning:  # gpt-oss ends its turn with a call
        two = written(format, ("f", '{"a": 1}'), ("g", "{}"))
        assert judge.takes(grammar, two) and read(format, two) == [("f", {"a": 1}), ("g", {})]
        assert not judge.takes(tools_grammar(TOOLS, format, parallel=False, special=judge.special), two)
    for wrong in (written(format, ("h", "{}")), written(format, ("f", '{"a": "x"}')), written(format, ("f", "{}")), "Hello."):
        assert not judge.takes(grammar, wrong), wrong


def test_special_tokens_go_by_number(judge: Judge) -> None:
    assert judge.special.split("a<|im_start|>b") == [("a", None), ("<|im_start|>", 1), ("b", None)]
    assert judge.special.split("") == []


def test_thoughts_come_before(judge: Judge) -> None:
    free = with_thought(object_grammar(), TAGS[0], False, judge.special)
    assert judge.takes(free, '{"a": 1}') and judge.takes(free, '<think>\nHm {"\n</think>\n\n{"a": 1}')
    assert not judge.takes(free, "<think>Hm</think>")
    opened = with_thought(object_grammar(), TAGS[0], True, judge.special)
    assert judge.takes(opened, 'Hm.\n</think>\n\n{"a": 1}') and not judge.takes(opened, '{"a": 1}')
    channels = with_channels(object_grammar(), False, judge.special)
    assert judge.takes(channels, '<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>{"a": 1}')
    assert judge.takes(channels, '<|channel|>final<|message|>{"a": 1}') and not judge.takes(channels, '{"a": 1}')


def test_each_kind_of_form(judge: Judge) -> None:
    cases = [
        (
            schema_grammar(F, ""),
            ['{"a": 1}', '{\n  "a": 12\n}'],
            ['{"a": "1"}', '{"a": 1, "b": 2}', "[]", '{"a": ' + " " * 60 + "1}"],
        ),
        (regex_grammar(r"^[0-9]{3}/[a-z]+$", ""), ["123/abc"], ["12/abc", "123/abc!"]),
        (choice_grammar(["a\nb", 'c"d', "é"], ""), ["a\nb", 'c"d', "é"], ["a", "c"]),
        (rules_grammar('root ::= "yes" | "no" ws\nws ::= [ ]*', ""), ["yes", "no  "], ["maybe"]),
        (rules_grammar('start: "a" B+\nB: /[bc]/', ""), ["abcb"], ["a"]),
    ]
    for grammar, good, bad in cases:
        assert [judge.takes(grammar, text) for text in good] == [True] * len(good), grammar
        assert [judge.takes(grammar, text) for text in bad] == [False] * len(bad), grammar


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "make",
    [
        lambda: schema_grammar(_deep(5000), "p"),
        lambda: schema_grammar({"enum": list(range(MAX_ENUM + 1))}, "p"),
        lambda: schema_grammar([], "p"),
        lambda: regex_grammar("(" * 100 + ")" * 100, "p"),
        lambda: regex_grammar("a" * 20_000, "p"),
        lambda: rules_grammar("start: " + "(" * 60_000, "p"),
        lambda: rules_grammar('root ::= "a', "p"),
        lambda: choice_grammar([], "p"),
        lambda: choice_grammar(["x"] * 5000, "p"),
    ],
)
def test_what_is_out_of_bounds_is_refused_before_compiling(make: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        make()
    assert refused.value.param == "p"


@pytest.mark.parametrize(
    "grammar",
    [
        regex_grammar("(((", ""),
        schema_grammar({"type": "nonsense"}, ""),
        rules_grammar("start: nowhere", ""),
        schema_grammar({"$ref": "https://evil.invalid/schema.json"}, ""),
        "nonsense",
    ],
)
def test_what_is_no_grammar_is_refused_by_compiling(judge: Judge, grammar: str) -> None:
    async def check() -> None:
        checker = GrammarCheck(lambda: judge.tokens)
        try:
            await checker.check(object_grammar(), "p")
            with pytest.raises(BadRequest) as refused:
                await checker.check(grammar, "response_format")
            assert refused.value.param == "response_format"
        finally:
            checker.close()

    asyncio.run(check())


def test_bombs_are_defused(judge: Judge) -> None:
    """They compile within their bounds, or are refused; what matters is that neither takes the checker with it."""
    bombs = [
        regex_grammar(r"^([a-z]{0,50}){0,50}$", ""),
        regex_grammar("(a|a)*(a|a)*(a|a)*b", ""),
        regex_grammar("(.*a){30}.{300}b", ""),
        rules_grammar('start: a\na: a a | "x" |', ""),
        schema_grammar({"type": "array", "minItems": 5000, "maxItems": 100_000, "items": {"type": "integer"}}, ""),
        schema_grammar({"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}, ""),
        schema_grammar({"enum": [f"value {i}" for i in range(MAX_ENUM)]}, ""),
    ]
    for bomb in bombs:
        try:
            judge.tokens.matcher(bomb).compute_bitmask()
        except BadRequest as error:
            assert "cannot be used" in str(error)


def test_objects_are_closed_where_their_schema_says_nothing(judge: Judge) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    invented, plain = '{"city": "Paris", "mood": 1}', '{"city": "Paris"}'
    closed_one = schema_grammar(city, "")
    assert judge.takes(closed_one, plain) and not judge.takes(closed_one, invented)
    assert judge.takes(schema_grammar({**city, "additionalProperties": True}, ""), invented)
    tools = tools_grammar(
        [{"function": {"name": "f", "parameters": city}}], BY_NAME["tagged"], parallel=False, special=judge.special
    )
    assert judge.takes(tools, written(BY_NAME["tagged"], ("f", plain))) and not judge.takes(
        tools, written(BY_NAME["tagged"], ("f", invented))
    )
    within = schema_grammar(
        {"type": "object", "properties": {"all": {"type": "array", "items": {"$ref": "#/$defs/c"}}}, "$defs": {"c": city}}, ""
    )
    assert judge.takes(within, f'{{"all": [{plain}]}}') and not judge.takes(within, f'{{"all": [{invented}]}}')


@pytest.mark.parametrize(
    "schema",
    [
        {
            "allOf": [{"$ref": "#/$defs/c"}, {"properties": {"mood": {"type": "integer"}}}],
            "$defs": {"c": {"properties": {"city": {"type": "string"}}}},
        },
        {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city", "mood"]},
        {"type": "object"},
        {"type": "object", "properties": {"city": {}}, "anyOf": [{"properties": {"mood": {}}}]},
    ],
)
def test_objects_stay_open_where_closing_could_leave_nothing(judge: Judge, schema: dict[str, Any]) -> None:
    assert judge.takes(schema_grammar(schema, ""), '{"city": "Paris", "mood": 1}')
