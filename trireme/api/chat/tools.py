"""The formats in which models call tools: how each is recognised in a chat template, read from a text, and forced by a grammar.

Knows the markers of models; nothing of protocols. The reading of JSON and of tags is in the files beside this one.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trireme.api.chat.parsing_stream import WHITE, Steps, Stream
from trireme.api.chat.tools_harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, read_harmony
from trireme.api.chat.tools_json import read_arguments, read_calls
from trireme.api.chat.tools_tags import Schemas, read_function_tags, read_invocations, read_key_values

# Markers that end a turn. They are visible only if special tokens are shown, and they are never part of the text.
TURN_ENDS = (
    *("</s>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<｜end▁of▁sentence｜>"),
    *("<|END_OF_TURN_TOKEN|>", "<|end_of_turn|>", "<|observation|>", "<|user|>"),
)


@dataclass(frozen=True)
class Offer:
    """The tools that a request offers: their names (None: unknown), and the schema of each tool's parameters."""

    names: Collection[str] | None = None
    schemas: Schemas = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Sequence[dict[str, Any]] | bool) -> Offer:
        if isinstance(tools, bool):
            return cls()
        functions = [tool.get("function", tool) for tool in tools]
        return cls({f["name"] for f in functions}, {f["name"]: f.get("parameters") or {} for f in functions})


class Shape(NamedTuple):
    """How a call is written: opening (before NAME between ARGUMENTS after), repeated with separators, closing."""

    opening: str
    before: str
    between: str
    after: str
    separator: str
    closing: str


Read = Callable[[Stream, Offer], Steps[None]]


@dataclass(frozen=True)
class Format:
    name: str
    marks: tuple[str, ...]  # a chat template that contains any of these has this format
    read: Read
    shape: Shape
    special: bool = False  # whether its markers are special tokens, which must then stay in the text
    silent: tuple[str, ...] = ()  # markers that are dropped from the text
    own_reasoning: bool = False  # whether it parses the reasoning itself
    model_types: tuple[str, ...] = ()


# --- reading ----------------------------------------------------------------------------------------------------------------------


def _marked(stream: Stream, opening: str, closing: str, read: Callable[[], Steps[bool]]) -> Steps[None]:
    """Reads content, with calls behind an opening marker. Text that is not a valid call stays content, including its markers."""
    marker = yield from stream.until((opening,), stream.say)
    while marker:
        stream.keep()
        yield from stream.skip_space()
        if not (yield from read()):
            stream.give_up(before=opening)
            marker = yield from stream.until((opening,), stream.say)
            continue
        stream.settle()
        while (character := (yield from stream.peek())) and character in WHITE + "}]":  # additional closing brackets are skipped
            yield from stream.take()
        marker = yield from stream.until((opening, closing) if closing else (opening,), stream.say)
        if marker == closing:
            marker = yield from stream.until((opening,), stream.say)


def _bare(stream: Stream, offer: Offer) -> Steps[None]:
    """Reads calls that are plain JSON without a marker. A code fence around them is accepted."""
    while True:
        stream.keep()
        yield from stream.skip_space()
        fence = yield from stream.follows("```json", "```")
        yield from stream.skip_space()
        if not (yield from read_calls(stream, names=offer.names)):
            stream.give_up()
            return
        stream.settle()
        if fence:
            yield from stream.skip_space()
            yield from stream.follows("```")
        stream.keep()
        yield from stream.skip_space()
        if not (yield from stream.follows(";", ",")) and not (yield from stream.sees("{")):
            stream.give_up()
            return


def _read_tagged(stream: Stream, offer: Offer) -> Steps[None]:
    """Hermes and Qwen write JSON between the tags, Qwen3-Coder and GLM tags of their own: the first characters tell.

    Small models forget the tags, so an answer that begins with the bare JSON of an offered tool is a call as well.
    """
    closing = "</tool_call>"

    def read() -> Steps[bool]:
        first = yield from stream.peek()
        if first in ("{", "["):
            return (yield from read_calls(stream, closing))
        if (yield from stream.follows("<function=")):
            return (yield from read_function_tags(stream, offer.schemas))
        return (yield from read_key_values(stream, offer.schemas, closing))

    yield from _bare(stream, offer)
    yield from _marked(stream, "<tool_call>", closing, read)


def _read_json(stream: Stream, offer: Offer) -> Steps[None]:
    yield from _bare(stream, offer)
    yield from stream.until((), stream.say)


def _read_llama(stream: Stream, offer: Offer) -> Steps[None]:
    yield from _bare(stream, offer)
    while (yield from stream.until(("<|python_tag|>",), stream.say)):
        yield from _bare(stream, offer)


def _read_mistral(stream: Stream, offer: Offer) -> Steps[None]:
    """Reads a list of JSON calls, or the form of newer models: NAME[ARGS]{...}."""

    def read() -> Steps[bool]:
        if (yield from stream.peek()) in ("{", "["):
            return (yield from read_calls(stream, make_id=_nine))
        name = ""
        while (character := (yield from stream.peek())) and character not in "[{" and len(name) < 256:
            name += yield from stream.take()
        id = _nine()
        if (yield from stream.follows("[CALL_ID]")):
            id, _ = yield from stream.text_until("[ARGS]")
        else:
            yield from stream.follows("[ARGS]")
        return bool(name.strip(WHITE)) and (yield from read_arguments(stream, name.strip(WHITE), "", id))

    yield from _marked(stream, "[TOOL_CALLS]", "", read)


def _nine() -> str:
    """A call id as Mistral's templates require it: nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


_DEEPSEEK = {name: f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")}


def _read_deepseek(stream: Stream, offer: Offer) -> Steps[None]:
    """Reads NAME sep {...}. The first DeepSeek models write: function sep NAME, and the arguments in a code fence."""
    end = _DEEPSEEK["call▁end"]

    def read() -> Steps[bool]:
        name, marker = yield from stream.text_until(_DEEPSEEK["sep"], end)
        if marker == end or not marker:
            return False
        if name.strip(WHITE) != "function":
            return bool(name.strip(WHITE)) and (yield from read_arguments(stream, name.strip(WHITE), end))
        name, _ = yield from stream.text_until("\n")
        yield from stream.skip_space()
        yield from stream.follows("```json", "```")
        found = bool(name.strip(WHITE)) and (yield from read_arguments(stream, name.strip(WHITE), "```"))
        yield from stream.skip_space()
        yield from stream.follows("```")
        return found

    yield from _marked(stream, _DEEPSEEK["call▁begin"], end, read)


def _read_kimi(stream: Stream, offer: Offer) -> Steps[None]:
    """Reads functions.NAME:INDEX, which is also the call's id, and then the arguments."""
    end = "<|tool_call_end|>"

    def read() -> Steps[bool]:
        head, marker = yield from stream.text_until("<|tool_call_argument_begin|>", end)
        name = head.strip(WHITE).removeprefix("functions.").rpartition(":")[0] or head.strip(WHITE)
        if marker == end or not marker or not name:
            return False
        return (yield from read_arguments(stream, name, end, head.strip(WHITE)))

    yield from _marked(stream, "<|tool_call_begin|>", end, read)


def _read_invoke(opening: str, prefix: str) -> Read:
    """Reads calls written as <invoke> tags. A grammar makes the model write JSON between the same markers, which is read too."""
    closing = "</" + opening.removeprefix("<")

    def read(stream: Stream, offer: Offer) -> Steps[None]:
        def read_one() -> Steps[bool]:
            if (yield from stream.peek()) in ("{", "["):
                return (yield from read_calls(stream, closing))
            return (yield from read_invocations(stream, offer.schemas, prefix))

        yield from _marked(stream, opening, closing, read_one)

    return read


def _read_listed(opening: str, closing: str) -> Read:
    """Reads a list of JSON calls behind a marker."""

    def read(stream: Stream, offer: Offer) -> Steps[None]:
        yield from _marked(stream, opening, closing, lambda: read_calls(stream))

    return read


# --- the table --------------------------------------------------------------------------------------------------------------------

_TAGGED_SHAPE = Shape("", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", "")
_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")


def _harmony(stream: Stream, offer: Offer) -> Steps[None]:
    return read_harmony(stream)


def _list_shape(opening: str, closing: str, name: str = "name", arguments: str = "arguments") -> Shape:
    return Shape(opening + "[", f'{{"{name}": "', f'", "{arguments}": ', "}", ", ", "]" + closing)


# The first format with a mark in the template is used.
FORMATS = (
    Format(
        *("gpt-oss", ("<|channel|>",), _harmony),
        Shape("", f"{CHANNEL}commentary to=functions.", f" {CONSTRAIN}json{MESSAGE}", "", "", ""),
        special=True, own_reasoning=True, model_types=("gpt_oss",),
    ),
    Format(
        *("deepseek-dsml", ("<｜DSML｜",), _read_invoke("<｜DSML｜function_calls>", "｜DSML｜")),
        Shape("", '<｜DSML｜function_calls>\n{"name": "', '", "arguments": ', "}\n</｜DSML｜function_calls>", "\n", ""),
        special=True, silent=TURN_ENDS,
    ),
    Format(
        *("deepseek", ("<｜tool▁call▁begin｜>",), _read_deepseek),
        Shape(
            _DEEPSEEK["calls▁begin"], _DEEPSEEK["call▁begin"] + "function" + _DEEPSEEK["sep"], "\n```json\n",
            "\n```" + _DEEPSEEK["call▁end"], "\n", _DEEPSEEK["calls▁end"],
        ),
        special=True, silent=(*TURN_ENDS, _DEEPSEEK["calls▁begin"], _DEEPSEEK["calls▁end"]),
    ),
    Format(
        *("kimi", ("<|tool_call_begin|>",), _read_kimi),
        Shape(
            _KIMI_SECTION[0], "<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>",
            "<|tool_call_end|>", "", _KIMI_SECTION[1],
        ),
        special=True, silent=(*TURN_ENDS, *_KIMI_SECTION),
    ),
    Format(
        *("mistral", ("[TOOL_CALLS]",), _read_mistral, _list_shape("[TOOL_CALLS]", "")), special=True, silent=TURN_ENDS
    ),
    Format(
        *("minimax", ("<minimax:tool_call>",), _read_invoke("<minimax:tool_call>", "")),
        Shape("", '<minimax:tool_call>\n{"name": "', '", "arguments": ', "}\n</minimax:tool_call>", "\n", ""),
    ),
    Format(
        *("cohere", ("<|START_ACTION|>",), _read_listed("<|START_ACTION|>", "<|END_ACTION|>")),
        _list_shape("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"), special=True, silent=TURN_ENDS,
    ),
    Format(
        *("listed", ("<|tool_call|>",), _read_listed("<|tool_call|>", "<|/tool_call|>")),
        _list_shape("<|tool_call|>", ""), special=True, silent=TURN_ENDS,
    ),
    Format("tagged", ("<tool_call>",), _read_tagged, _TAGGED_SHAPE),
    Format(
        *("llama3", ("<|python_tag|>", "<|start_header_id|>"), _read_llama),
        Shape("", '{"name": "', '", "parameters": ', "}", "; ", ""),
        special=True, silent=TURN_ENDS, model_types=("mllama",),
    ),
    Format("json", (), _read_json, Shape("", '{"name": "', '", "arguments": ', "}", "\n", "")),
    Format("generic", (), _read_tagged, _TAGGED_SHAPE),
)  # fmt: skip
BY_NAME = {format.name: format for format in FORMATS}
HARMONY_ENDS = (END, RETURN, CALL)


def format_for(template: str | None, model_type: str) -> Format:
    """The format of a model, from its chat template or, where that says nothing, its type.

    A template that knows no tools is told of them, and of the generic format, in words.
    """
    for format in FORMATS:
        if template and "tools" not in template and not format.own_reasoning:
            continue
        if any(mark in (template or "") for mark in format.marks) or model_type in format.model_types:
            return format
    return BY_NAME["generic"]
