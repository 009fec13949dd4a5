"""The chat's /set and /load: what they take, and what they tell of the rest. No model is needed for it."""

from __future__ import annotations

import pathlib
import types

import pytest

from trireme.cli.chat import Conversation
from trireme.types import SamplingParams


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
        ("temperature", "/set: It takes a name and a value. Fix: say, for example, /set temperature 0.7\n"),
        ("", "/set: It takes a name and a value. Fix: say, for example, /set temperature 0.7\n"),
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
    assert capsys.readouterr().out == f"/load: {file} holds no conversation. Fix: give a file that /save wrote\n"
