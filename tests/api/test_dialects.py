"""The other APIs over plain HTTP: LightLLM's native one, TGI's, Ollama's; probes, tokens, metrics, the OpenAPI document."""

from __future__ import annotations

import json
import re

import httpx
import msgspec
import pytest

from .served import MODEL

PROMPT = "The capital of France is"


def events(response: httpx.Response) -> list[dict]:
    assert response.status_code == 200, response.text
    return [json.loads(line[5:]) for line in response.text.splitlines() if line.startswith("data:")]


def lines(response: httpx.Response) -> list[dict]:
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def test_native_and_tgi_share_a_path(http: httpx.Client) -> None:
    native = http.post("/generate", json={"inputs": PROMPT, "parameters": {"max_new_tokens": 4, "do_sample": False}}).json()
    tgi = http.post("/generate", json={"inputs": PROMPT, "parameters": {"max_new_tokens": 4, "details": True}}).json()
    assert native["generated_text"] == [tgi["generated_text"]] and native["generated_text"][0].startswith(" Paris")
    assert native["count_output_tokens"] == tgi["details"]["generated_tokens"] == 4
    assert len(tgi["details"]["tokens"]) == 4 and tgi["details"]["finish_reason"] == "length"
    root = http.post("/", json={"inputs": PROMPT, "parameters": {"max_new_tokens": 4, "details": True}}).json()
    assert [answer["generated_text"] for answer in root] == [tgi["generated_text"]]
    full = http.post("/generate?api=tgi", json={"inputs": PROMPT, "parameters": {"max_new_tokens": 1, "return_full_text": True}})
    assert full.json()["generated_text"] == f"{PROMPT} Paris"


def test_streams_of_both(http: httpx.Client) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}}
    whole = http.post("/generate", json=body).json()["generated_text"][0]
    native = events(http.post("/generate_stream", json=body))
    assert "".join(event["token"]["text"] for event in native) == whole and native[-1]["finished"]
    tgi = events(http.post("/generate_stream?api=tgi", json=body))
    assert "".join(event["token"]["text"] for event in tgi) == whole == tgi[-1]["generated_text"]


def test_native_counts(http: httpx.Client) -> None:
    count = http.post("/tokens", json={"text": PROMPT}).json()["ntokens"]
    assert count == http.post("/tokenize", json={"prompt": PROMPT}).json()["count"] == 5
    assert set(http.get("/token_load").json()) == {"current_load", "logical_max_load", "dynamic_max_load"}
    assert http.get("/info").json()["max_total_tokens"] == 8192


def test_tokens_go_both_ways(http: httpx.Client) -> None:
    text = "Grüße, 世界! <|im_start|>"
    tokens = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == text
    assert http.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
    assert http.get("/tokenizer_info").json()["eos_token"] == "<|im_end|>"


def test_ollama_chat(http: httpx.Client) -> None:
    body = {
        "model": f"{MODEL}:latest",
        "messages": [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
        "options": {"temperature": 0, "num_predict": 8},
    }
    streamed = lines(http.post("/api/chat", json=body))
    whole = http.post("/api/chat", json={**body, "stream": False}).json()
    assert "".join(line["message"]["content"] for line in streamed) == whole["message"]["content"]
    assert "Paris" in whole["message"]["content"]
    assert streamed[-1]["done"] and streamed[-1]["eval_count"] == whole["eval_count"] > 0
    assert all(not line["done"] for line in streamed[:-1])


def test_ollama_num_ctx_and_tool_choice(http: httpx.Client) -> None:
    """A smaller context of the client's own is kept to: the answer ends there, and a longer prompt is refused, never cut."""
    question = {"model": MODEL, "messages": [{"role": "user", "content": "Count to one hundred."}], "stream": False}
    used = http.post("/api/chat", json={**question, "options": {"num_predict": 1}}).json()["prompt_eval_count"]
    bound = http.post("/api/chat", json={**question, "options": {"num_ctx": used + 3, "temperature": 0}}).json()
    assert (bound["eval_count"], bound["done_reason"]) == (3, "length")
    refused = http.post("/api/chat", json={**question, "options": {"num_ctx": used}})
    assert refused.status_code == 400 and f"num_ctx is {used}" in refused.json()["error"]
    raw = {"model": MODEL, "prompt": PROMPT, "raw": True, "stream": False, "options": {"num_ctx": 7, "temperature": 0}}
    assert http.post("/api/generate", json=raw).json()["eval_count"] == 2
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
    asked = {**question, "tools": [tool], "options": {"temperature": 0, "num_predict": 64}}
    called = http.post("/api/chat", json={**asked, "tool_choice": {"type": "function", "function": {"name": "add"}}}).json()
    assert called["message"]["tool_calls"][0]["function"]["name"] == "add"
    assert "tool_calls" not in http.post("/api/chat", json={**asked, "tool_choice": "none"}).json()["message"]


def test_routes_without_v1(http: httpx.Client) -> None:
    assert http.get("/models").json() == http.get("/v1/models").json()
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    assert http.post("/completions", json=body).json()["choices"] == http.post("/v1/completions", json=body).json()["choices"]
    assert "/completions" not in http.get("/openapi.json").json()["paths"]


def test_ollama_generate_raw(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "raw": True, "options": {"temperature": 0, "num_predict": 2, "stop": ["."]}}
    assert "".join(line["response"] for line in lines(http.post("/api/generate", json=body))) == " Paris"


def test_ollama_tells_of_its_model(http: httpx.Client) -> None:
    (model,) = http.get("/api/tags").json()["models"]
    assert model["name"] == f"{MODEL}:latest" == http.get("/api/ps").json()["models"][0]["name"]
    assert http.post("/api/show", json={"model": model["name"]}).json()["model_info"]["llama.context_length"] == 8192
    refused = http.post("/api/chat", json={"model": "other", "messages": [{"role": "user", "content": "x"}]})
    assert refused.status_code == 404 and isinstance(refused.json()["error"], str)


def test_ollama_tells_how_long_it_took_and_what_it_serves(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "stream": False, "options": {"num_predict": 8, "temperature": 0}}
    for raw in (True, False):
        answer = http.post("/api/generate", json={**body, "raw": raw}).json()
        assert answer["eval_duration"] > 0 and answer["prompt_eval_duration"] > 0
        assert answer["eval_duration"] + answer["prompt_eval_duration"] <= answer["total_duration"]
    for keep, reason in ((0, "unload"), ("0s", "unload"), ("5m", "load"), (-1, "load"), (None, "load")):
        for path in ("/api/generate", "/api/chat"):
            assert http.post(path, json={"model": MODEL, "keep_alive": keep}).json()["done_reason"] == reason, keep
    (model,) = http.get("/api/tags").json()["models"]
    assert model["size"] > 1e6 and re.fullmatch(r"[0-9a-f]{64}", model["digest"])
    assert model["details"]["parameter_size"] == "134.5M" and model["details"]["quantization_level"] not in ("", "float32")


def test_ollamas_log_probabilities_are_those_of_openais_api(http: httpx.Client) -> None:
    options = {"temperature": 0, "num_predict": 4}
    asked = {"model": MODEL, "options": options, "logprobs": True, "top_logprobs": 2}
    openai = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    text = http.post("/v1/completions", json={**openai, "prompt": PROMPT, "logprobs": 2}).json()["choices"][0]["logprobs"]
    messages = [{"role": "user", "content": PROMPT}]
    chat = {**openai, "messages": messages, "logprobs": True, "top_logprobs": 2}
    turn = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]["content"]
    ways = (
        ("/api/generate", {"prompt": PROMPT, "raw": True}, text["tokens"], text["token_logprobs"]),
        ("/api/generate", {"prompt": PROMPT}, [entry["token"] for entry in turn], [entry["logprob"] for entry in turn]),
        ("/api/chat", {"messages": messages}, [entry["token"] for entry in turn], [entry["logprob"] for entry in turn]),
    )
    for path, more, tokens, values in ways:
        streamed = lines(http.post(path, json={**asked, **more}))
        assert len([line for line in streamed if "logprobs" in line]) > 1, "each line has its own tokens'"
        whole = http.post(path, json={**asked, **more, "stream": False}).json()
        for found in (whole["logprobs"], [entry for line in streamed for entry in line.get("logprobs", [])]):
            assert [entry["token"] for entry in found] == tokens
            assert [entry["logprob"] for entry in found] == pytest.approx(values, abs=1e-3)
            assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in found)
            for entry in found:
                assert len(entry["top_logprobs"]) == 2 and entry["top_logprobs"][0]["token"] == entry["token"], "greedy"
        assert "logprobs" not in http.post(path, json={"model": MODEL, "options": options, **more, "stream": False}).json()
    refused = http.post("/api/chat", json={**asked, "messages": messages, "top_logprobs": 21})
    assert refused.status_code == 400 and "top_logprobs is 21" in refused.json()["error"]
    only = {**asked, "messages": messages, "top_logprobs": None, "stream": False}
    assert all(entry["top_logprobs"] == [] for entry in http.post("/api/chat", json=only).json()["logprobs"])


def test_probes(http: httpx.Client) -> None:
    assert http.get("/live").json()["status"] == "alive"
    assert http.get("/ready").json()["status"] == http.get("/health").json()["status"] == "ready"
    assert http.get("/version").json()["name"] == "trireme"
    load = http.get("/load").json()
    assert load["state"] == "ready" and load["stats"]["pages_total"] > 0


def test_metrics_have_the_names_that_dashboards_know(http: httpx.Client) -> None:
    before = http.get("/load").json()["totals"]
    http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True})
    after = http.get("/load").json()
    assert after["totals"]["generation_tokens"] - before["generation_tokens"] == 3
    assert after["percentiles"]["time_to_first_token"]["p50"] > 0
    text = http.get("/metrics").text
    names = "num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens_total generation_tokens_total "
    names += "prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total request_success_total "
    names += "time_to_first_token_seconds_bucket inter_token_latency_seconds_count e2e_request_latency_seconds_sum "
    names += "request_prompt_tokens_sum request_generation_tokens_sum request_params_n_count heartbeat_age_seconds"
    for name in names.split():
        assert re.search(rf"^trireme:{name}{{.*}} ", text, re.M), name


def test_openapi_names_every_route(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert {"/v1/chat/completions", "/v1/messages", "/generate", "/api/chat", "/v1/batches/{id}"} <= set(document["paths"])
    known = document["components"]["schemas"]
    for reference in re.findall(r'"#/components/schemas/([^"]+)"', msgspec.json.encode(document).decode()):
        assert reference in known
