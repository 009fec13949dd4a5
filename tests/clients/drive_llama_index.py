"""LlamaIndex against the server: completion, chat, streams."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, key = sys.argv[1:]
common = {"api_base": f"{url}/v1", "api_key": key, "model": "smollm2", "temperature": 0, "max_tokens": 12, "max_retries": 0}
plain = OpenAILike(is_chat_model=False, **common)
assert plain.complete("The capital of France is").text.strip().startswith("Paris")
chat = OpenAILike(is_chat_model=True, **common)
question = [ChatMessage(role="user", content="What is the capital of France? Answer in one word.")]
whole = chat.chat(question).message.content
assert "Paris" in whole, whole
assert "".join(piece.delta or "" for piece in chat.stream_chat(question)) == whole
