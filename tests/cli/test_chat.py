"""The chat's /set: what it takes, and what it tells of the rest. No model is needed for it."""

from __future__ import annotations

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
