"""The chat's commands, and what it says where an answer or a message is too long. No model is needed for it."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Iterator

import pytest

from trireme.cli.chat import Conversation
from trireme.serve.answers import Piece
from trireme.types import FinishReason, SamplingParams


@pytest.fixture
def conversation() -> Conversation:
    ready = types.SimpleNamespace(vocab_size=100)
    return Conversation(types.SimpleNamespace(worker=types.SimpleNamespace(ready=ready)), SamplingParams(), None)


def test_set_takes_values_of_every_kind(conversation: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    for argument in (
        "temperature 0.5",
        "max_tokens null",
        "ignore_eos true",
        'stop ["a", "b"]',
        'logit_bias {"7": -1}',
        "grammar {}",
    ):
        conversation.command("set", argument)
    wanted = SamplingParams(temperature=0.5, max_tokens=None, ignore_eos=True, stop=["a", "b"], logit_bias={7: -1.0}, grammar="{}")
    assert conversation.sampling == wanted and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("temperature hot", "/set: temperature is 'hot'; it must be a number.\n"),
        ("seed 1.5", "/set: seed is '1.5'; it must be a whole number.\n"),
        ("ignore_eos maybe", "/set: ignore_eos is 'maybe'; it must be true or false.\n"),
        ("stop x", "/set: stop is 'x'; it must be a list of strings. Fix: write it as JSON\n"),
        ('stop ["x"', "/set: stop is '[\"x\"'; it must be a list of strings. Fix: write it as JSON\n"),
        ("temperature 9999", "/set: temperature is 9999.0; it must lie between 0.0 and 100.0.\n"),
        ("temperature", "temperature          1.0\n"),
    ],
)
def test_set_says_what_is_wrong(conversation: Conversation, capsys: pytest.CaptureFixture[str], argument: str, told: str) -> None:
    conversation.command("set", argument)
    assert capsys.readouterr().out == told and conversation.sampling == SamplingParams()


def test_set_lists_the_names(conversation: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    conversation.command("set", "heat 1")
    told = capsys.readouterr().out
    assert told.startswith(
        "/set: There is no sampling parameter 'heat'. Fix: use one of max_tokens, min_tokens, temperature, top_k"
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'[{"role": "user"}]', b"[" * 100_000, b'["\xff"]'])
def test_load_takes_only_conversations(
    content: bytes, conversation: Conversation, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.json"
    conversation.messages = [{"role": "user", "content": "Hello."}]
    conversation.command("save", str(file))
    said, conversation.messages = conversation.messages, []
    conversation.command("load", str(file))
    assert conversation.messages == said
    file.write_bytes(content)
    conversation.command("load", str(file))
    assert conversation.messages == said, "a file that cannot be read changes nothing"
    written, read, told = capsys.readouterr().out.splitlines(keepends=True)
    assert written == f"1 messages are written to {file}.\n" and read.startswith(f"1 messages are read from {file};")
    assert told == f"/load: {file} holds no conversation. Fix: give a file that /save wrote\n"


class Parrot:
    """Says three words at a time; a token is a word."""

    def __init__(self, context: int):
        self.worker = types.SimpleNamespace(ready=types.SimpleNamespace(vocab_size=100))
        self.scheduler = types.SimpleNamespace(capacity=types.SimpleNamespace(longest=context))
        self.asked: list[str] = []

    def chat_tokens(self, messages: list[dict[str, str]], continued: bool = False, **_: object) -> list[str]:
        self.asked.append(messages[-1]["content"])
        return " ".join(message["content"] for message in messages).split()

    def stream(self, tokens: list[str], sampling: SamplingParams) -> Iterator[Piece]:
        yield Piece(index=0, text="a b ", token_ids=[1, 2])
        yield Piece(index=0, text="c ", token_ids=[3], finish_reason=FinishReason.LENGTH)


def test_an_answer_that_is_cut_says_so_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation(Parrot(100), SamplingParams(), None)
    talk.command("more")
    assert capsys.readouterr().out.startswith("/more: There is no answer")
    talk.ask("hello")
    assert "[cut after 3 tokens: /more goes on" in capsys.readouterr().out
    talk.command("more")
    assert talk.messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a b c a b c "}]
    assert talk.llm.asked[-1] == "a b c "


def test_a_message_that_is_too_long_comes_back(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Conversation(Parrot(10), SamplingParams(), "be brief")
    talk.ask("one two three")
    before, long = list(talk.messages), "four five six"
    talk.ask(long)
    assert (talk.messages, talk.kept) == (before, long) and "was not sent" in capsys.readouterr().out
    questions: list[str] = []
    monkeypatch.setattr(talk.terminal, "confirms", lambda question: bool(questions.append(question)) or True)
    talk.ask(long)
    assert questions == ["The conversation does not fit into the context. Leave out the 2 oldest messages?"]
    assert [message["content"] for message in talk.messages] == ["be brief", long, "a b c "], "the instruction stays"
    talk.ask("word " * 20)
    assert talk.kept == "word " * 20 and len(questions) == 1, "leaving out others would not help"


def test_commands_say_what_they_did(conversation: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    conversation.command("system", "Be brief.")
    conversation.command("save")
    conversation.command("set")
    conversation.command("etc/hosts")
    system, save, *values, unknown = capsys.readouterr().out.splitlines()
    assert system == "The conversation begins anew, with this instruction."
    assert save == "/save: It takes the name of a file. Fix: say, for example, /save talk.json"
    assert any(line.split() == ["temperature", "1.0"] for line in values) and len(values) > 15
    assert unknown.startswith("/etc/hosts is no command") and '"""' in unknown
