"""Grammars: masks against a plain search, texts that obey, ends that are forced, failures that stay with their row."""

from __future__ import annotations

import json
import pathlib
import random
import re
from array import array
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from trireme.errors import BadRequest
from trireme.hub.grammar import GrammarTokens
from trireme.hub.tokenizer import Tokenizer
from trireme.ipc.messages import Admit, Fork
from trireme.llm import LLM
from trireme.types import MAX_GRAMMAR, SamplingParams
from trireme.worker.grammar import Grammars
from trireme.worker.logits import Choice

WORDS = [b"yes", b"ye", b"no", b"nothing", b'{"', b'": ', b"true", b" ", b'"}', b"maybe \xc3", b"\xa9"]
EOS = 256 + len(WORDS)
VOCAB = EOS + 1
ONE = array("i", [1]).tobytes()  # a prompt
WIDTH = VOCAB + 5  # models pad their vocabularies
NEGATIVE = float("-inf")
WITHOUT_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


class ByteTokenizer:
    """Every byte, a few words, and an end."""

    vocab_size, special_ids, bos_token_id, eos_token_id = VOCAB, {EOS}, None, EOS

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else WORDS[token - 256] if token < EOS else b"</s>"

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = True) -> list[int]:
        return list(text.encode())


def choices(*texts: str) -> str:
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in texts))


class Rows:
    """The rule with a token table, as a worker has it."""

    def __init__(self, open_tokenizer: Callable[[], ByteTokenizer] = ByteTokenizer, device: str = "cpu"):
        self.grammars = Grammars(lambda: GrammarTokens(open_tokenizer(), [EOS], WIDTH), WIDTH)  # type: ignore[arg-type]
        self.device = device
        self.tokens = torch.zeros((8, 400), dtype=torch.int32, device=device)
        self.lengths = np.zeros(8, dtype=np.int64)
        self.prompts = np.zeros(8, dtype=np.int64)

    def admit(self, row: int, grammar: str | None, tokens: list[int] | None = None, num_prompt: int = 3) -> None:
        tokens = tokens or [1, 2, 3]
        self.tokens[row, : len(tokens)] = torch.tensor(tokens)
        self.lengths[row], self.prompts[row] = len(tokens), num_prompt
        self.grammars.admit(Admit(row, array("i", tokens).tobytes(), num_prompt, SamplingParams(grammar=grammar), 0, [EOS]))

    def logits(self, rows: list[int], start: torch.Tensor | None = None) -> torch.Tensor:
        """What the rule makes of flat logits."""
        at = np.asarray(rows)
        self.grammars.prepare(at, self.lengths[at], self.tokens)
        flat = torch.zeros((len(rows), WIDTH), device=self.device) if start is None else start
        choice = Choice(flat, at, self.lengths[at], self.prompts[at], self.tokens)
        touched = self.grammars.touches(at)
        if touched:
            self.grammars.apply(choice, touched)
        return choice.logits

    def allowed(self, row: int) -> set[int]:
        return set(torch.nonzero(self.logits([row])[0].isfinite()).flatten().tolist())

    def append(self, row: int, token: int) -> None:
        self.tokens[row, self.lengths[row]] = token
        self.lengths[row] += 1

    def text(self, row: int) -> bytes:
        ids = self.tokens[row, self.prompts[row] : self.lengths[row]].tolist()
        return b"".join(ByteTokenizer().token_bytes(token) for token in ids if token != EOS)


def searched(prefix: bytes, texts: list[bytes]) -> set[int]:
    """The tokens that may follow, by trying each one."""
    tokenizer = ByteTokenizer()
    found = {t for t in range(EOS) if any(text.startswith(prefix + tokenizer.token_bytes(t)) for text in texts)}
    return found | ({EOS} if prefix in texts else set())


def assert_allows(allowed: set[int], expected: set[int]) -> None:
    """Nothing but what fits, and a way to every text: where the text is certain, only its usual tokens are allowed."""
    tokenizer = ByteTokenizer()
    assert allowed <= expected
    assert {tokenizer.token_bytes(token)[0] for token in allowed} == {tokenizer.token_bytes(token)[0] for token in expected}
    assert (EOS in allowed) == (EOS in expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, WITHOUT_GPU])])
def test_masks_are_what_a_plain_search_finds(device: str) -> None:
    texts = ["yes", "yesterday", "no", "nothing", "maybe é", "yeti"]
    rows = Rows(device=device)
    for seed in range(12):
        chance = random.Random(seed)
        rows.admit(0, choices(*texts))
        while True:
            allowed = rows.allowed(0)
            assert_allows(allowed, searched(rows.text(0), [text.encode() for text in texts]))
            token = chance.choice(sorted(allowed))
            rows.append(0, token)
            if token == EOS:
                break
        assert rows.text(0).decode() in texts


def finished(rows: Rows, row: int, chance: random.Random) -> str:
    """Random tokens until the end."""
    for _ in range(300):
        token = chance.choice(sorted(rows.allowed(row)))
        rows.append(row, token)
        if token == EOS:
            return rows.text(row).decode()
    raise AssertionError(f"no end: {rows.text(row)!r}")


def test_texts_obey() -> None:
    rows = Rows()
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
        "required": ["a", "n", "b"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    pattern = r"[a-c]{2,4}-[0-9]{3}"
    for seed in range(8):
        chance = random.Random(seed)
        rows.admit(0, LLMatcher.grammar_from_json_schema(schema))
        document = json.loads(finished(rows, 0, chance))
        assert document.keys() == {"a", "n", "b"} and document["a"] in ("x", "y")
        assert isinstance(document["n"], int) and 0 <= document["n"] <= 99 and isinstance(document["b"], bool)
        rows.admit(0, LLMatcher.grammar_from_regex(pattern))
        assert re.fullmatch(pattern, finished(rows, 0, chance))


def test_a_grammar_that_ends_forces_the_end() -> None:
    rows = Rows()
    rows.admit(0, choices("no"))
    for token in b"no":
        rows.append(0, token)
    forbidden = torch.zeros((1, WIDTH))
    forbidden[0, EOS] = NEGATIVE  # as another rule may have done
    logits = rows.logits([0], forbidden)
    assert torch.nonzero(logits[0].isfinite()).flatten().tolist() == [EOS]
    rows.append(0, EOS)  # a step may be planned before the end is known
    assert rows.allowed(0) == {EOS}


def test_rows_go_their_own_ways() -> None:
    rows = Rows()
    rows.admit(0, choices("yes"))
    rows.admit(1, None)
    rows.admit(2, choices("no"))
    logits = rows.logits([2, 1, 0])
    assert torch.equal(logits[1], torch.zeros(WIDTH)), "a row without a grammar is left alone"
    assert not logits[0, ord("y")].isfinite() and logits[2, ord("y")].isfinite()
    rows.admit(2, None)
    assert rows.allowed(2) == set(range(WIDTH)), "a row's grammar goes with its request"


def test_after_a_pause_the_text_goes_on() -> None:
    rows, again = Rows(), Rows()
    rows.admit(0, choices("yesterday", "nothing"))
    for token in b"yest":
        rows.allowed(0)
        rows.append(0, token)
    again.admit(5, choices("yesterday", "nothing"), [1, 2, 3, *b"yest"])
    assert again.allowed(5) == rows.allowed(0) == {ord("e")}


@pytest.mark.parametrize("broken", ['{"grammars": [{"lark_grammar": "start: nowhere"}]}', "{", '{"grammars": []}'])
def test_a_broken_grammar_fails_its_row_alone(broken: str) -> None:
    rows = Rows()
    rows.admit(0, broken)
    rows.admit(1, choices("yes"))
    logits = rows.logits([0, 1])
    assert not logits[0].isfinite().any() and "grammar" in rows.grammars.errors[0]
    assert 1 not in rows.grammars.errors
    assert_allows(set(torch.nonzero(logits[1].isfinite()).flatten().tolist()), searched(b"", [b"yes"]))


def test_a_token_that_does_not_fit_fails_its_row_alone() -> None:
    rows = Rows()
    rows.admit(0, choices("yes"), [1, 2, 3, ord("x")])
    assert rows.allowed(0) == set() and "does not fit" in rows.grammars.errors[0]


def test_a_tokenizer_that_cannot_be_read_fails_rows_with_grammars_alone() -> None:
    def refuse() -> ByteTokenizer:
        raise BadRequest("This model has no tokenizer.")

    rows = Rows(refuse)
    rows.admit(0, choices("yes"))
    rows.admit(1, None)
    logits = rows.logits([0, 1])
    assert not logits[0].isfinite().any() and logits[1].isfinite().all()
    assert "no tokenizer" in rows.grammars.errors[0]


def test_bad_and_hostile_grammars_are_refused() -> None:
    tokens = GrammarTokens(ByteTokenizer(), [EOS])  # type: ignore[arg-type]
    for grammar in (LLMatcher.grammar_from_regex("((("), LLMatcher.grammar_from_json_schema({"type": "nonsense"}), "nonsense"):
        with pytest.raises(BadRequest, match="cannot be used"):
            tokens.matcher(grammar)
    tokens.matcher(LLMatcher.grammar_from_regex(r"^([a-z]{0,50}){0,50}$"))  # a bomb for others
    with pytest.raises(BadRequest, match="grammar"):
        SamplingParams(grammar="x" * (MAX_GRAMMAR + 1)).check(100)


def test_a_costly_grammar_fails_nobody_else(smollm2_path: pathlib.Path) -> None:
    """The engine's copies of one grammar share what it has cost; a row that has spent it all fails alone, whoever comes with it."""
    tokenizer = Tokenizer.open(smollm2_path)
    grammars = Grammars(lambda: GrammarTokens(tokenizer, [2]), tokenizer.vocab_size)
    costly = LLMatcher.grammar_from_regex(r"(?s:.*)(a|b)(?s:.{0,200})(c|d)(?s:.{0,200})[a-f]x")
    tokens = torch.zeros((2, 200), dtype=torch.int32)
    for row in (0, 1):
        grammars.admit(Admit(row, ONE, 1, SamplingParams(grammar=costly), 0, [2]))
    at, chance, length = np.array([0]), random.Random(0), 1
    while 0 not in grammars.errors and length < 150:
        tokens[0, length] = chance.randrange(300, 49_000)  # any text fits until its end
        length += 1
        grammars.prepare(at, np.array([length]), tokens)
        grammars.apply(Choice(torch.zeros((1, tokenizer.vocab_size)), at, np.array([length]), at, tokens), [0])
    assert "too costly" in grammars.errors[0], length
    tokens[1, 1] = 300
    for row, length in ((1, 2), (0, 1)):
        if row == 0:  # a request that comes later
            grammars.admit(Admit(0, ONE, 1, SamplingParams(grammar=costly), 0, [2]))
        grammars.prepare(np.array([row]), np.array([length]), tokens)
        choice = Choice(torch.zeros((1, tokenizer.vocab_size)), np.array([row]), np.array([length]), np.array([1]), tokens)
        grammars.apply(choice, [0])
        assert row not in grammars.errors and choice.logits.isfinite().any()


def test_one_poisoned_row_of_six(smollm2_path: pathlib.Path) -> None:
    """The other rows give what they give without it, whatever their own rules."""
    schema = LLMatcher.grammar_from_json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3})
    prompts = ["Numbers:", "Once upon a time", "The capital of France", "A, B, C,", "Ten things:"]
    plain = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    sampling = [
        msgspec.structs.replace(plain, grammar=schema, ignore_eos=False, max_tokens=40),
        plain,
        msgspec.structs.replace(plain, logprobs=2),
        msgspec.structs.replace(plain, logit_bias={5: 2.0}),
        msgspec.structs.replace(plain, temperature=1.0, seed=7),
    ]
    with LLM(str(smollm2_path), backend="cpu", quantize="none", kv_tokens=2048, max_model_len=512) as llm:
        alone = [llm.generate(prompt, s)[0] for prompt, s in zip(prompts, sampling, strict=True)]
        together = llm.generate([*prompts, "Poison"], [*sampling, msgspec.structs.replace(plain, grammar="{")])
    assert [output.token_ids for output in together[:-1]] == [output.token_ids for output in alone]
    assert together[-1].completions[0].finish_reason == "error" and "grammar" in (together[-1].completions[0].error or "")
    assert len(json.loads(together[0].text)) == 3


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_fork_goes_on_where_its_parent_is(after: int) -> None:
    """A row that becomes a copy in the middle of a text; `after`: how far its parent has gone on since."""
    texts = ["yesterday", "yes", "nothing at all", "nothing"]
    rows = Rows()
    rows.admit(0, choices(*texts))
    for token in b"no":
        rows.allowed(0)
        rows.append(0, token)
    rows.allowed(0)
    rows.tokens[1], rows.lengths[1], rows.prompts[1] = rows.tokens[0], rows.lengths[0], 3
    for token in b"thi"[:after]:
        rows.append(0, token)
        rows.allowed(0)
    rows.grammars.fork([Fork(1, 0, int(rows.lengths[1]) - 1, 0)])
    assert_allows(rows.allowed(1), searched(b"no", [text.encode() for text in texts]))
    assert finished(rows, 1, random.Random(after)) in texts
    assert finished(rows, 0, random.Random(7)) in texts
    rows.admit(0, None)
    rows.grammars.fork([Fork(1, 0, 2, 0)])  # the parent has none
    assert rows.grammars.touches(np.array([0, 1])) == []
