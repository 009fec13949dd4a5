"""What clients of llama.cpp's server ask for: /completion, /infill, /props, /apply-template, tokens with pieces, timings."""

from __future__ import annotations

import json
import pathlib

import httpx
import pytest

from trireme.api.openai.infill import infill_tokens
from trireme.errors import BadRequest
from trireme.hub.tokenizer import Tokenizer

PROMPT = "The capital of France is"
GREEDY = {"prompt": PROMPT, "n_predict": 6, "temperature": 0}


def test_completion_says_how_it_ended(http: httpx.Client) -> None:
    whole = http.post("/completion", json=GREEDY).json()
    assert whole["content"].startswith(" Paris") and whole["stop"] is True and whole["stop_type"] == "limit"
    assert whole["tokens_predicted"] == 6 and whole["tokens_evaluated"] == 5 and whole["tokens"] == []
    assert whole["timings"]["predicted_n"] == 6 and whole["timings"]["predicted_ms"] > 0
    assert whole["timings"]["prompt_n"] + whole["timings"]["cache_n"] == 5
    ended = http.post("/completion", json={**GREEDY, "stop": ["nowhere", "."], "n_probs": 2}).json()
    assert ended["content"] == " Paris" and (ended["stop_type"], ended["stopping_word"]) == ("word", ".")
    assert [len(entry["top_logprobs"]) for entry in ended["completion_probabilities"]] == [2, 2]
    assert ended["completion_probabilities"][0]["token"] == " Paris"
    ids = http.post("/completion", json={**GREEDY, "prompt": http.post("/tokenize", json={"content": PROMPT}).json()["tokens"]})
    assert ids.json()["content"] == whole["content"]


def test_completion_streams_what_it_says_at_once(http: httpx.Client) -> None:
    lines = http.post("/completion", json={**GREEDY, "stream": True, "timings_per_token": True}).text.splitlines()
    events = [json.loads(line[5:]) for line in lines if line.startswith("data:")]
    assert "".join(event["content"] for event in events) == http.post("/completion", json=GREEDY).json()["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert all("timings" in event for event in events) and events[-1]["tokens_predicted"] == 6


def test_biases_go_by_text(http: httpx.Client) -> None:
    def said(bias: object) -> str:
        return http.post("/completion", json={**GREEDY, "n_predict": 1, "logit_bias": bias}).json()["content"]

    (paris,) = http.post("/tokenize", json={"content": " Paris"}).json()["tokens"]
    assert said([[" Paris", False]]) == said([[paris, -100]]) == said({" Paris": -100}) != " Paris"
    assert said([[" banana", 100]]).startswith(" ban")
    assert http.post("/completion", json={**GREEDY, "logit_bias": [[10**9, 1]]}).status_code == 400
    assert http.post("/completion", json={**GREEDY, "logit_bias": [["x" * 300, 1]]}).status_code == 400


def test_what_completion_refuses(http: httpx.Client) -> None:
    for more in ({"n": 2}, {"prompt": ["a", "b"]}, {"mirostat": 2}, {"n_probs": 99}):
        assert http.post("/completion", json={**GREEDY, **more}).status_code == 400, more
    assert "fill-in-the-middle" in http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"}).json()["error"]["message"]


def test_the_server_tells_its_properties_and_prompts(http: httpx.Client) -> None:
    props = http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 8192 and "messages" in props["chat_template"]
    shown = http.post("/apply-template", json={"messages": [{"role": "user", "content": "Hello"}]}).json()["prompt"]
    assert shown.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


def test_tokens_come_with_pieces(http: httpx.Client) -> None:
    pieces = http.post("/tokenize", json={"content": "Hé 🦖", "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == http.post("/tokenize", json={"content": "Hé 🦖"}).json()["tokens"]
    spelled = [piece["piece"] for piece in pieces]
    assert b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in spelled).decode() == "Hé 🦖"
    assert any(isinstance(p, list) for p in spelled)
    assert http.post("/detokenize", json={"tokens": [piece["id"] for piece in pieces]}).json()["content"] == "Hé 🦖"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_timings_come_where_they_are_asked_for(http: httpx.Client, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": PROMPT}
    body |= {"max_tokens": 3, "temperature": 0}
    plain = http.post(path, json=body).json()
    timed = http.post(path, json={**body, "timings_per_token": True}).json()
    assert "timings" not in plain and timed["timings"]["predicted_n"] == 3
    assert plain["system_fingerprint"] == timed["system_fingerprint"] and plain["system_fingerprint"].startswith("fp_")
    text = http.post(path, json={**body, "timings_per_token": True, "stream": True}).text
    chunks = [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data: {")]
    made = [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
    assert made == sorted(made) and made[-1] == 3


def test_infill_puts_other_files_first(smollm2_path: pathlib.Path) -> None:
    tokenizer = Tokenizer.open(smollm2_path)  # knows <repo_name> and <file_sep>, but no fill-in-the-middle tokens
    ids = {"<|fim_prefix|>": 100005, "<|fim_suffix|>": 100006, "<|fim_middle|>": 100007}

    class WithMiddle:
        add_bos, bos_token_id = False, None

        def encode(self, text: str, add_special: bool = True, allow_special: bool = True) -> list[int]:
            return (
                [ids[text]]
                if allow_special and text in ids
                else tokenizer.encode(text, add_special=False, allow_special=allow_special)
            )

        def token_text(self, token: int) -> str:
            return next((text for text, number in ids.items() if number == token), tokenizer.token_text(token))

    found = infill_tokens(WithMiddle(), "x = ", "\n", [("a.py", "y = 1"), ("b.py", "z")])  # type: ignore[arg-type]
    told = tokenizer.decode(found[: found.index(100005)], skip_special_tokens=False)
    assert told == "<repo_name>project\n<file_sep>a.py\ny = 1\n<file_sep>b.py\nz\n<file_sep>"
    assert found[-1] == 100007 and found[found.index(100005) :] == infill_tokens(WithMiddle(), "x = ", "\n")  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="fill-in-the-middle"):
        infill_tokens(tokenizer, "x", "y", [("a.py", "y")])
