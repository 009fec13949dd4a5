"""Sampling parameters: every field bounded, every refusal names its field."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.errors import BadRequest
from trireme.types import MAX_N, SamplingParams

VOCAB = 100


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -1.0}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": MAX_N + 1}, "n"),
        ({"n": 4, "best_of": 3}, "best_of"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logprobs": 1000}, "logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"banned_token_ids": [-1]}, "banned_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {0: math.inf}}, "logit_bias"),
        ({"logit_bias": {0: 101.0}}, "logit_bias"),
        ({"n": True}, "n"),
    ],
)
def test_refuses_and_names_the_field(changes: dict, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**changes).check(VOCAB)
    assert caught.value.param == param


def test_defaults_are_fine() -> None:
    SamplingParams().check(VOCAB)


@given(st.floats(allow_nan=True, allow_infinity=True), st.integers(-(2**70), 2**70))
def test_numbers_are_taken_or_refused_never_worse(number: float, whole: int) -> None:
    for changes in ({"temperature": number}, {"top_p": number}, {"seed": whole}, {"max_tokens": whole}, {"top_k": whole}):
        try:
            SamplingParams(**changes).check(VOCAB)
        except BadRequest as error:
            assert error.param in changes


def test_the_detokenizer_is_told_what_concerns_text_alone() -> None:
    sampling = SamplingParams(stop=["."], include_stop=True, stop_token_ids=[7], skip_special_tokens=False, grammar="x" * 1000)
    rules = sampling.text
    assert (rules.stop, rules.include_stop, rules.skip_special_tokens, rules.stop_token_ids) == (["."], True, False, [7])
    assert len(msgspec.msgpack.encode(rules)) < 20
    assert len(rules.__struct_fields__) == 4


def test_fields_are_checked_without_a_vocabulary_and_ids_with_one() -> None:
    wrong_id = SamplingParams(stop_token_ids=[100])
    wrong_id.check_fields()
    wrong_id.check_ids(101)
    for refused in (wrong_id.check_ids, wrong_id.check):
        with pytest.raises(BadRequest, match="stop_token_ids"):
            refused(100)
    wrong_field = SamplingParams(min_p=2.0)
    wrong_field.check_ids(100)
    with pytest.raises(BadRequest, match="min_p"):
        wrong_field.check_fields()
