"""A model's folder without a tokenizer: one line says what that means, token ids are answered, and text is refused."""

from __future__ import annotations

import pathlib

from tests.serve.tiny_server_model import write_tiny

from .served import Served


def test_token_ids_need_no_tokenizer(tmp_path: pathlib.Path) -> None:
    model = write_tiny(tmp_path / "tiny", context=256)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    server = Served(tmp_path, model=str(model))
    try:
        server.wait()
        assert server.log.count(f"{model} has no tokenizer") == 1
        with server.client() as http:
            body = {"prompt": [5, 9, 2], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            whole = http.post("/v1/completions", json=body).json()["choices"][0]
            assert len(whole["token_ids"]) == 4 and whole["text"] == ""
            assert (
                http.post("/completion", json={**body, "n_predict": 4, "return_tokens": True}).json()["tokens"]
                == whole["token_ids"]
            )
            chat = {"messages": [{"role": "user", "content": "Hi"}]}
            asked = [
                ("/v1/completions", {**body, "prompt": "Hi"}),
                ("/v1/completions", {**body, "stop": ["x"]}),
                ("/api/chat", chat),
            ]
            asked += [("/v1/chat/completions", chat), ("/v1/completions", {**body, "logprobs": 1}), ("/tokenize", {"prompt": "Hi"})]
            for path, refused in asked:
                answer = http.post(path, json={"model": "smollm2", **refused})
                assert answer.status_code == 400 and "has no tokenizer" in answer.text, (path, answer.text)
            assert http.get("/v1/models").status_code == http.get("/health").status_code == http.get("/").status_code == 200
    finally:
        server.end()
