"""Answers with tool calls as models write them, by the thousand: every spelling, arguments of every shape, some broken off.

Written from the formats' descriptions, not with our grammars' shapes: what is read here was written by somebody else.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]

PROPERTIES = {
    "text": "string",
    "note": "string",
    "count": "integer",
    "ratio": "number",
    "flag": "boolean",
    "list": "array",
    "map": "object",
}
NAMES = ("look_up", "send-mail", "a.b", "x")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {k: {"type": v} for k, v in PROPERTIES.items()}}}}
    for name in NAMES
]
WORDS = (
    *("Paris", "", "two words", 'a "quote"', "back\\slash", "line\nbreak", "tab\t", "é ü ñ", "東京 ☂", "🧙‍♂️", "עברית", "\u200b"),
    *("\u2028", "{brace", "]", "null", "12", "true", "</tool_call>", "<|call|>", "```", "[/THINK]", "a=b&c", "\\u0041", "0x1f"),
    *("'single'", "%s {0}", "\x7f", "\U0010ffff"),
)  # fmt: skip
PLAIN = tuple(
    word for word in WORDS if word and not set(word) & set("<`\\\n\t") and word == word.strip()
)  # for what stands between tags


@dataclass(frozen=True)
class Output:
    format: str
    text: str
    content: str
    reasoning: str
    calls: list[Call]
    broken: bool  # the text ends in the middle


class Writer:
    """Draws calls and writes them."""

    def __init__(self, seed: int):
        self.dice = random.Random(seed)

    def value(self, depth: int) -> Any:
        dice = self.dice
        kind = dice.randrange(8 if depth else 6)
        if kind < 2:
            return dice.choice(WORDS) + dice.choice(["", "", dice.choice(WORDS)])
        if kind == 2:
            return dice.choice([0, -1, 7, 10**12, -(2**53), 2**70])
        if kind == 3:
            return dice.choice([0.5, -2.5e-7, 1e300, 3.0])
        if kind < 6:
            return dice.choice([None, True, False])
        if kind == 6:
            return [self.value(depth - 1) for _ in range(dice.randrange(4))]
        return {dice.choice(WORDS): self.value(depth - 1) for _ in range(dice.randrange(4))}

    def arguments(self) -> dict[str, Any]:
        return {self.dice.choice([*PROPERTIES, *WORDS]): self.value(3) for _ in range(self.dice.randrange(5))}

    def plain_arguments(self) -> dict[str, Any]:
        """What can be written between tags without escapes: the schema says which of them are strings."""
        dice = self.dice
        drawn = {
            "text": dice.choice(PLAIN),
            "note": dice.choice(PLAIN),
            "count": dice.choice([0, -5, 10**15]),
            "ratio": dice.choice([0.25, -1e-9]),
            "flag": dice.choice([True, False]),
            "list": [dice.choice(PLAIN), 1, None],
            "map": {"a": {"b": [dice.choice(PLAIN)]}},
        }
        return {name: drawn[name] for name in dice.sample(sorted(drawn), dice.randrange(len(drawn)))}

    def json(self, value: Any) -> str:
        """In one of the ways in which models space and escape."""
        way = self.dice.randrange(4)
        separators = (",", ":") if way == 1 else None
        return json.dumps(value, ensure_ascii=way == 2, indent=2 if way == 3 else None, separators=separators)


Spelling = Callable[[Writer, Sequence[Call]], str]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def hermes(w: Writer, calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{w.json({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def qwen_coder(w: Writer, calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        members = "".join(f"<parameter={key}>\n{_as_text(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{members}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def glm(w: Writer, calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        members = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_as_text(v)}</arg_value>\n" for k, v in arguments.items())
        return f"<tool_call>{name}\n{members}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def llama3(w: Writer, calls: Sequence[Call]) -> str:
    tag = w.dice.choice(["", "<|python_tag|>"])
    return tag + "; ".join(w.json({"name": n, "parameters": a}) for n, a in calls) + w.dice.choice(["<|eot_id|>", "<|eom_id|>"])


def mistral_list(w: Writer, calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS] [" + ", ".join(w.json({"name": n, "arguments": a}) for n, a in calls) + "]</s>"


def mistral_named(w: Writer, calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[CALL_ID]abc{i:06}[ARGS]{w.json(a)}" for i, (n, a) in enumerate(calls)) + "</s>"


def deepseek_v3(w: Writer, calls: Sequence[Call]) -> str:
    one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    return "<｜tool▁calls▁begin｜>" + "\n".join(one.format(n, w.json(a)) for n, a in calls) + "<｜tool▁calls▁end｜>"


def deepseek_v31(w: Writer, calls: Sequence[Call]) -> str:
    one = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    return "<｜tool▁calls▁begin｜>" + "".join(one.format(n, w.json(a)) for n, a in calls) + "<｜tool▁calls▁end｜>"


def deepseek_dsml(w: Writer, calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        tag = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>\n'
        members = "".join(tag.format(k, str(isinstance(v, str)).lower(), _as_text(v)) for k, v in arguments.items())
        return f'<｜DSML｜invoke name="{name}">\n{members}</｜DSML｜invoke>\n'

    return f"<｜DSML｜function_calls>\n{''.join(one(*call) for call in calls)}</｜DSML｜function_calls>"


def minimax(w: Writer, calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        members = "".join(f'<parameter name="{key}">{_as_text(value)}</parameter>\n' for key, value in arguments.items())
        return f'<invoke name="{name}">\n{members}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(one(*call) for call in calls)}</minimax:tool_call>"


def kimi(w: Writer, calls: Sequence[Call]) -> str:
    one = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    inner = "".join(one.format(n, i, w.json(a)) for i, (n, a) in enumerate(calls))
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def cohere(w: Writer, calls: Sequence[Call]) -> str:
    listed = [{"tool_call_id": str(i), "tool_name": n, "parameters": a} for i, (n, a) in enumerate(calls)]
    return f"<|START_ACTION|>{w.json(listed)}<|END_ACTION|>"


def granite(w: Writer, calls: Sequence[Call]) -> str:
    return "<|tool_call|>" + w.json([{"name": n, "arguments": a} for n, a in calls])


def gpt_oss(w: Writer, calls: Sequence[Call]) -> str:
    one = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
    return "<|start|>assistant".join(one.format(n, w.json(a)) for n, a in calls)


def bare_json(w: Writer, calls: Sequence[Call]) -> str:
    return w.json([{"name": n, "arguments": a} for n, a in calls])


# spelling, our name of its format, whether its arguments stand between tags, whether words may come before
SPELLINGS: tuple[tuple[Spelling, str, bool, bool], ...] = (
    (hermes, "tagged", False, True),
    (hermes, "generic", False, True),
    (qwen_coder, "tagged", True, True),
    (glm, "tagged", True, True),
    (llama3, "llama3", False, False),
    (mistral_list, "mistral", False, True),
    (mistral_named, "mistral", False, True),
    (deepseek_v3, "deepseek", False, True),
    (deepseek_v31, "deepseek", False, True),
    (deepseek_dsml, "deepseek-dsml", True, True),
    (minimax, "minimax", True, True),
    (kimi, "kimi", False, True),
    (cohere, "cohere", False, True),
    (granite, "listed", False, True),
    (gpt_oss, "gpt-oss", False, False),
    (bare_json, "json", False, False),
)


def outputs(count: int, seed: int = 0) -> list[Output]:
    return [_output(number, seed) for number in range(count)]


def _output(number: int, seed: int) -> Output:
    spelling, format, tagged, worded = SPELLINGS[number % len(SPELLINGS)]
    writer = Writer(seed + number)
    dice = writer.dice
    calls = [
        (dice.choice(NAMES), writer.plain_arguments() if tagged else writer.arguments())
        for _ in range(dice.choice([1, 1, 1, 2, 3]))
    ]
    content = dice.choice(["", "", "Let me look.", "Zuerst: 東京 ☂ < 3."]) if worded else ""
    reasoning = dice.choice(["", "", "Hm.\n\nI should call it.", "a < b </thin"])
    text = (f"{content}\n" if content else "") + spelling(writer, calls)
    if format == "gpt-oss":
        text = (f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else "") + text
    elif reasoning:
        text = f"<think>\n{reasoning}\n</think>\n\n{text}"
    broken = dice.random() < 0.25
    if broken:
        text = text[: dice.randrange(len(text))]
    return Output(format, text, content, reasoning, calls, broken)
