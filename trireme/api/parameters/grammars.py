"""Grammars for what an answer may look like: from schemas, patterns, rules, choices and tools to the text that workers compile.

Knows the grammar language and its bounds; nothing of requests. Whether a grammar is one is found out away from the event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from trireme.api.chat.reasoning import Tags
from trireme.api.chat.tools import Format
from trireme.api.chat.tools_harmony import CHANNEL, END, MESSAGE, START
from trireme.api.parameters.closing import closed
from trireme.errors import BadRequest
from trireme.hub.grammar import GrammarTokens
from trireme.hub.tokenizer import Tokenizer
from trireme.types import MAX_GRAMMAR

DEADLINE = 2.0  # seconds to compile a grammar; the bounds on its size make this rare
MAX_DEPTH = 64
MAX_CHOICES = 1024
MAX_ENUM = 5000
MAX_PATTERN = 16 << 10  # characters in a pattern
MAX_RULES = 64 << 10
MAX_KNOWN = 256  # grammars that are remembered as valid
# JSON allows any amount of white space. A model that has little to say might write white space without end.
_WHITE_SPACE = {"whitespace_pattern": r"[ \t\n\r]{1,32}"}


def schema_grammar(schema: Any, param: str) -> str:
    """A grammar for the JSON that a schema describes."""
    return _one({"json_schema": _checked(schema, param)})


def object_grammar() -> str:
    """A grammar for any JSON object."""
    return _one({"json_schema": _checked({"type": "object"}, "")})


def regex_grammar(pattern: str, param: str) -> str:
    if len(pattern) > MAX_PATTERN:
        raise BadRequest(f"The pattern has {len(pattern)} characters; at most {MAX_PATTERN} are taken.", param=param)
    _check_nesting(pattern, param)
    bare = pattern.removeprefix("^")
    bare = bare[:-1] if bare.endswith("$") and not bare.endswith("\\$") else bare  # the whole text is matched in any case
    return _one({"lark_grammar": f"start: TEXT\nTEXT: /{_slashed(bare)}/"}) if bare else choice_grammar([""], param)


def choice_grammar(choices: Sequence[str], param: str) -> str:
    """A grammar for exactly one of these texts."""
    if not choices or len(choices) > MAX_CHOICES or any(len(choice) > 4096 for choice in choices):
        raise BadRequest(f"choice takes 1 to {MAX_CHOICES} texts of at most 4096 characters.", param=param)
    return _one({"lark_grammar": "start: " + " | ".join(_literal(choice) for choice in choices)})


def rules_grammar(rules: str, param: str) -> str:
    """A grammar in Lark's notation, or in the EBNF of llama.cpp (`root ::= ...`)."""
    if len(rules) > MAX_RULES:
        raise BadRequest(f"The grammar has {len(rules)} characters; at most {MAX_RULES} are taken.", param=param)
    _check_nesting(rules, param)
    try:
        return _one({"lark_grammar": any_to_lark(rules)})
    except Exception as error:  # the library raises a plain Exception for rules that it cannot parse
        raise BadRequest(f"The grammar cannot be read: {str(error)[:200]}.", "check its rules", param) from None


def tools_grammar(tools: Sequence[dict[str, Any]], format: Format, *, parallel: bool, special: SpecialTokens) -> str:
    """One or more calls of these tools, as the model's format writes them."""
    shape = format.shape
    calls = []
    for tool in tools:
        function = tool["function"]
        schema = _checked(function["parameters"], "tools", lenient=True)
        parameters = msgspec.json.encode(schema).decode()
        head = _text(f"{shape.before}{function['name']}{shape.between}", special)
        calls.append(f"{head} %json {parameters} {_text(shape.after, special)}")
    more = f"({_text(shape.separator, special)} call)*" if parallel and (shape.separator or shape.after) else ""
    rules = [
        f"start: {_text(shape.opening, special)} call {more} {_text(shape.closing, special)}",
        "call: " + "\n | ".join(calls),
    ]
    return _one({"lark_grammar": "\n".join(rules)})


def with_thought(grammar: str, tags: Tags, opened: bool, special: SpecialTokens) -> str:
    """The grammar after reasoning between tags. The reasoning is required if the prompt has opened it; otherwise it is optional."""
    first = "thought SPACE" if opened else f"({_text(tags.opening, special)} thought SPACE)?"
    return _after(f"start: {first} @answer\nthought{_until(tags.closing, special)}\nSPACE: /[ \\n]*/", grammar)


def with_channels(grammar: str, is_call: bool, special: SpecialTokens) -> str:
    """The grammar in the channels of gpt-oss, after reasoning if the model wishes; a call brings its own channel."""
    thought = f"{_text(f'{CHANNEL}analysis{MESSAGE}', special)} thought {_text(f'{START}assistant', special)}"
    final = "" if is_call else _text(f"{CHANNEL}final{MESSAGE}", special)
    return _after(f"start: ({thought})? {final} @answer\nthought{_until(END, special)}", grammar)


class SpecialTokens:
    """Finds a model's special tokens in a text."""

    def __init__(self, tokenizer: Tokenizer):
        spelled = {tokenizer.token_text(token): token for token in tokenizer.special_ids}
        self._tokens = {text: token for text, token in spelled.items() if text}

    def split(self, text: str) -> list[tuple[str, int | None]]:
        """Splits the text into pieces: (a special token's spelling, its id) or (plain text, None)."""
        found = [(at, -len(special), special) for special in self._tokens if (at := text.find(special)) >= 0]
        if not found:
            return [(text, None)] if text else []
        at, _, special = min(found)
        before: list[tuple[str, int | None]] = [(text[:at], None)] if at else []
        return [*before, (special, self._tokens[special]), *self.split(text[at + len(special) :])]


# --- pieces -----------------------------------------------------------------------------------------------------------------------


def _one(grammar: dict[str, Any]) -> str:
    return msgspec.json.encode({"grammars": [grammar]}).decode()


def _literal(text: str) -> str:
    # JSON leaves this character as it is, but the grammar's language needs it escaped.
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")


def _slashed(pattern: str) -> str:
    """A pattern between slashes. Slashes inside it are escaped, and line breaks are written as escapes."""
    written, escaped = [], False
    for character in pattern:
        written.append("\\/" if character == "/" and not escaped else "\\n" if character == "\n" else character)
        escaped = character == "\\" and not escaped
    return "".join(written)


def _text(text: str, special: SpecialTokens) -> str:
    """A text of the model in the grammar's language, with special tokens written by their ids."""
    return " ".join(_literal(piece) if token is None else f"<[{token}]>" for piece, token in special.split(text))


def _until(closing: str, special: SpecialTokens) -> str:
    """The rest of a rule: any text up to and including a marker."""
    if any(token is not None for _, token in special.split(closing)):
        return f": ANYTHING {_text(closing, special)}\nANYTHING: /(?s:.*)/"
    return f"[suffix={_literal(closing)}]: /(?s:.*)/"


def _after(rules: str, grammar: str) -> str:
    """The rules, with a grammar in them by the name of answer."""
    answer = msgspec.json.decode(grammar, type=dict[str, list[dict[str, Any]]])["grammars"][0]
    return msgspec.json.encode({"grammars": [{"lark_grammar": rules}, {**answer, "name": "answer"}]}).decode()


def _checked(schema: Any, param: str, lenient: bool = False) -> Any:
    """The schema after a check of its bounds. Objects are closed where the schema does not say, and white space is bounded."""
    if not isinstance(schema, dict | bool):
        raise BadRequest(f"The schema in {param} must be an object.", param=param)
    schema = {} if schema is True else {"not": {}} if schema is False else schema
    _check_schema(schema, param)
    schema = closed(schema)
    options = {**_WHITE_SPACE, "lenient": True} if lenient else _WHITE_SPACE
    return schema if "x-guidance" in schema else {**schema, "x-guidance": options}


def _check_schema(schema: Any, param: str) -> None:
    values, layer = 0, [schema]
    for _ in range(MAX_DEPTH):
        values += sum(len(node["enum"]) for node in layer if isinstance(node, dict) and isinstance(node.get("enum"), list))
        if values > MAX_ENUM:
            raise BadRequest(f"The schema lists {values} enum values; at most {MAX_ENUM} are taken.", param=param)
        layer = [child for node in layer for child in _children(node)]
        if not layer:
            return
    raise BadRequest(f"The schema is nested deeper than {MAX_DEPTH} levels.", "make it flatter", param)


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [child for child in node.values() if isinstance(child, dict | list)]
    return [child for child in node if isinstance(child, dict | list)]


def _check_nesting(text: str, param: str) -> None:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_DEPTH:
            raise BadRequest(f"The grammar is nested deeper than {MAX_DEPTH} levels.", "make it flatter", param)


# --- checking ---------------------------------------------------------------------------------------------------------------------


class GrammarCheck:
    """Compiles grammars in threads, as workers will, so that an invalid one is refused before anything is computed."""

    def __init__(self, load: Callable[[], GrammarTokens]):
        self._load = load
        self._tokens: asyncio.Future[GrammarTokens] | None = None
        self._known: OrderedDict[str, None] = OrderedDict()
        self._threads = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="trireme-grammar")

    async def check(self, grammar: str, param: str) -> None:
        """Refuses a grammar that is invalid, too large, or too slow to compile."""
        if len(grammar) > MAX_GRAMMAR:
            raise BadRequest(f"The grammar has {len(grammar)} characters; at most {MAX_GRAMMAR} are taken.", param=param)
        if grammar in self._known:
            self._known.move_to_end(grammar)
            return
        loop, tokens = asyncio.get_running_loop(), await self.warm_up()
        try:
            await asyncio.wait_for(loop.run_in_executor(self._threads, tokens.check, grammar), DEADLINE)
        except TimeoutError:
            cause = f"The grammar took longer than {DEADLINE:g} seconds to compile."
            raise BadRequest(cause, "make it simpler", param) from None
        except BadRequest as error:
            error.param = param
            raise
        self._known[grammar] = None
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def warm_up(self) -> GrammarTokens:
        """Reads the vocabulary once, in a thread."""
        if self._tokens is None or (self._tokens.done() and self._tokens.exception() is not None):
            loop = asyncio.get_running_loop()
            self._tokens = asyncio.ensure_future(loop.run_in_executor(self._threads, self._load))
        return await asyncio.shield(self._tokens)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
