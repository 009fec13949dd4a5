"""Fields that clients send for OpenAI or other servers and that the shapes here lack, with the answer to each."""

from __future__ import annotations

from trireme.api.transport.fields import OtherFields
from trireme.types import DRAWN

_TOOLS = "run the tool yourself, and offer it in tools as a function"
_SAMPLERS = f"sample by {', '.join(DRAWN)} and the penalties"
_ONE_MODEL = "start a server with the model that you want"

# Fields of llama.cpp's server, vLLM and others: samplers and settings that this server does not have.
_ELSEWHERE = {
    **dict.fromkeys(("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier", "top_n_sigma", "samplers"), _SAMPLERS),
    **dict.fromkeys(("typical_p", "tfs_z", "epsilon_cutoff", "top_a"), _SAMPLERS),
    **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping"), "sample, with n or best_of for several answers"),
    **dict.fromkeys(("lora", "lora_request", "models"), _ONE_MODEL),
    "bad_words": "forbid tokens by logit_bias",
    "chat_template": "give the server a model folder with that template",
    "documents": "write the documents into a message",
    "logits_processors": "use structured_outputs, logit_bias or allowed_token_ids",
    "thinking_token_budget": "use max_tokens",
    "truncate_prompt_tokens": "shorten the prompt",
    "t_max_predict_ms": "use max_tokens, or close the connection",
    "mm_processor_kwargs": "send text alone",
    "image_data": "send text alone",
}
_NEUTRAL = {
    "typical_p": (1.0, 1),
    "tfs_z": (1.0, 1),
    "top_n_sigma": (-1, -1.0),
    "length_penalty": (1.0, 1),
    "truncate_prompt_tokens": (-1,),
    "t_max_predict_ms": (-1,),
}
# These fields describe the client, control how another server stores things, or only make an answer faster.
_HARMLESS = frozenset(
    {
        *("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction"),
        *("cache_prompt", "id_slot", "slot_id", "request_id", "spaces_between_special_tokens", "verbosity"),
        *("detokenize", "guided_decoding_backend", "guided_whitespace_pattern"),
    }
)

CHAT = OtherFields(
    refused={
        **_ELSEWHERE,
        "functions": "send tools",
        "function_call": "send tools and tool_choice",
        "modalities": "ask for text alone",
        "audio": "ask for text alone",
        "web_search_options": _TOOLS,
        "echo": "use /v1/completions",
        "prompt_logprobs": "use /v1/completions",
        "suffix": "use /v1/completions",
        "best_of": "use n",
    },
    neutral={**_NEUTRAL, "modalities": (["text"],), "function_call": ("auto", "none"), "best_of": (1,)},
    harmless=_HARMLESS,
)
COMPLETIONS = OtherFields(refused=_ELSEWHERE, neutral=_NEUTRAL, harmless=_HARMLESS)
RESPONSES = OtherFields(
    refused={
        "conversation": "send previous_response_id, or the whole conversation in input",
        "prompt": "write the prompt into instructions and input",
        "max_tool_calls": "count the calls yourself",
        "context_management": "shorten the input yourself",
        "stop": "use /v1/chat/completions",
        "modalities": "ask for text alone",
        "audio": "ask for text alone",
    },
    neutral={"modalities": (["text"],)},
    harmless=_HARMLESS | {"include", "stream_options", "verbosity"},
)
