"""What a 404 says of a path that no route has: which server has such a path, or which path was probably meant.

Knows paths alone, not what they do.
"""

from __future__ import annotations

from collections.abc import Collection

# Paths that other servers have and this one does not.
_ELSEWHERE = {
    "OpenAI": (
        "/v1/assistants",
        "/v1/audio",
        "/v1/containers",
        "/v1/conversations",
        "/v1/embeddings",
        "/v1/evals",
        "/v1/fine_tuning",
        "/v1/images",
        "/v1/moderations",
        "/v1/organization",
        "/v1/realtime",
        "/v1/threads",
        "/v1/uploads",
        "/v1/vector_stores",
        "/v1/videos",
    ),
    "Anthropic": ("/v1/complete", "/v1/messages/batches"),
    "Ollama": (
        "/api/blobs",
        "/api/copy",
        "/api/create",
        "/api/delete",
        "/api/embed",
        "/api/embeddings",
        "/api/pull",
        "/api/push",
    ),
}


# The purpose of such paths, on any server.
_CAPABILITIES = {
    "embeddings": ("/embedding", "/embeddings"),
    "reranking": ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking", "/v2/rerank"),
    "scoring pairs of texts": ("/score", "/v1/score"),
    "LoRA adapters": ("/lora-adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    "slots to save and restore": ("/slots",),
}


def nothing_at(path: str, known: Collection[str]) -> str:
    """The text of a 404. `known` lists the paths that exist."""
    for owner, prefixes in _ELSEWHERE.items():
        if any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes):
            return f"{path[:200]} is an {owner} endpoint that is not supported here. Fix: GET /openapi.json lists those that are"
    for capability, prefixes in _CAPABILITIES.items():
        if any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes):
            return f"{path[:200]} is for {capability}, which this server does not have. Fix: GET /openapi.json lists what there is"
    plain = "/" + path.strip("/")
    for meant in (plain, f"/v1{plain}", plain.removeprefix("/v1"), f"{plain}/chat/completions"):
        if meant in known and meant not in (path, "/"):
            return f"There is nothing at {path[:200]}. Fix: use {meant}"
    return f"There is nothing at {path[:200]}. Fix: GET /openapi.json lists what there is"
