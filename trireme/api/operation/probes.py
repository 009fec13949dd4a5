"""Routes about the server itself: health, readiness, version, load, metrics, models, tokens. Generates nothing."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Awaitable, Callable
from typing import Any

import trireme
from trireme.api.chat.turn import ChatJob, chat_tokens, messages_of, template_variables, tools_of
from trireme.api.openai.protocol import (
    ChatRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
)
from trireme.api.operation.metrics import kv_usage
from trireme.api.service import Service
from trireme.api.transport.http import Call, Reply, json_reply
from trireme.errors import BadRequest, TriremeError
from trireme.hub.advice import chat_advice
from trireme.types import SamplingParams


class Probes:
    """The handlers of the routes about the server."""

    def __init__(self, service: Service, chat_job: Callable[[ChatRequest], Awaitable[ChatJob]]):
        """`chat_job`: makes the turn of a chat request, which /apply-template shows."""
        self.service, self._chat_job = service, chat_job

    async def live(self, call: Call) -> Reply:
        """Answers 200 while every process responds, and 503 when one hangs."""
        state = self.service.client.state()
        document = {"status": "hung" if state.hung else "alive", "state": state.name, "heartbeat_ages": state.ages}
        return json_reply(document, 503 if state.hung else 200)

    async def ready(self, call: Call) -> Reply:
        """Answers 200 if the server takes requests; otherwise 503 with the current phase of the start.

        A sleeping server takes requests. While it loads the model again for one, it also has a phase.
        """
        state = self.service.client.state()
        serving = state.serving and not state.hung
        document: dict[str, Any] = {"status": state.name, "phase": state.phase, "percent": state.percent}
        if state.reason:
            document["reason"] = state.reason
        reply = json_reply(document, 200 if serving else 503)
        if not serving:
            reply.headers["retry-after"] = "2"
        return reply

    async def version(self, call: Call) -> Reply:
        return json_reply({"version": trireme.__version__, "name": "trireme", "python": platform.python_version()})

    async def load(self, call: Call) -> Reply:
        """The load as JSON, for load balancers and dashboards."""
        service, stats = self.service, await self._stats()
        state = service.client.state()
        return json_reply(
            {
                "state": state.name,
                "model": service.info.name,
                "running": stats.get("running", 0),
                "waiting": stats.get("waiting", 0),
                "kv_usage": kv_usage(stats),
                "stats": stats,
                # The process that counted the totals and percentiles.
                "counted_by": {"process": service.client.name, "of": service.options.http_workers},
                "totals": service.metrics.totals(),
                "percentiles": service.metrics.percentiles(),
                "heartbeat_ages": state.ages,
            }
        )

    async def metrics(self, call: Call) -> Reply:
        service, info = self.service, self.service.info
        body = service.metrics.exposition(await self._stats(), service.client.state(), backend=info.backend, dtype=info.dtype)
        return Reply(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _stats(self) -> dict[str, Any]:
        """The router's numbers. Empty while the router restarts."""
        try:
            return await self.service.client.stats()
        except TriremeError:
            return {}

    async def models(self, call: Call) -> Reply:
        names = self.service.names(call)
        if "anthropic-version" in call.headers:
            cards = [self._anthropic_card(name) for name in names]
            return json_reply({"data": cards, "has_more": False, "first_id": names[0], "last_id": names[-1]})
        return json_reply(ModelList([self._card(name) for name in names]))

    async def model(self, call: Call) -> Reply:
        name = self.service.check_model(call.path_params["model"], call)
        return json_reply(self._anthropic_card(name) if "anthropic-version" in call.headers else self._card(name))

    def _anthropic_card(self, name: str) -> dict[str, str]:
        """The model in the form that Anthropic's SDKs read."""
        info = self.service.info
        created = datetime.datetime.fromtimestamp(info.created, datetime.UTC).isoformat().replace("+00:00", "Z")
        return {"type": "model", "id": name, "display_name": name, "created_at": created}

    def _card(self, name: str) -> ModelCard:
        info = self.service.info
        sampling, source = chat_advice(info.generation, self.service.config.model.default_sampling)
        return ModelCard(name, info.created, info.max_model_len, sampling, source)

    async def tokenize(self, call: Call) -> Reply:
        request = await call.read(TokenizeRequest)
        service = self.service
        service.check_model(request.model, call)
        if request.content is not None and request.prompt is None and request.messages is None:
            return json_reply({"tokens": await self._content_tokens(request, request.content)})
        if (request.prompt is None) == (request.messages is None):
            fix = 'send "prompt": "..."' if request.prompt is None else "leave one of them out"
            raise BadRequest("/tokenize takes either prompt or messages.", fix, "prompt")
        if request.messages is not None:
            job = ChatJob(
                messages=messages_of(request.messages),
                sampling=SamplingParams(),
                tools=tools_of(request.tools),
                template=template_variables(request.chat_template_kwargs),
                add_generation_prompt=request.add_generation_prompt,
            )
            tokens = await chat_tokens(service, job)
        else:
            tokens = await service.encode(request.prompt or "", request.add_special_tokens)
        spelled = None
        if request.return_token_strs:
            spelled = [service.client.tokenizer.token_text(token) for token in tokens]
        return json_reply(TokenizeAnswer(len(tokens), service.info.max_model_len, tokens, spelled))

    async def _content_tokens(self, request: TokenizeRequest, content: str) -> list[Any]:
        """The tokens in the form of llama.cpp's server: ids, or ids with pieces. A piece beyond UTF-8 is a list of bytes."""
        special = {"add_special": request.add_special, "allow_special": request.parse_special}
        await self.service.check_text(len(content))
        tokens = await self.service.with_tokenizer(len(content), lambda tokenizer: tokenizer.encode(content, **special))
        if not request.with_pieces:
            return tokens
        return [{"id": token, "piece": _piece(self.service.client.tokenizer.token_bytes(token))} for token in tokens]

    async def props(self, call: Call) -> Reply:
        """What clients of llama.cpp's server ask for first."""
        service, tokenizer = self.service, self.service.client.tokenizer
        sampling, _ = chat_advice(service.info.generation, service.config.model.default_sampling)
        return json_reply(
            {
                "default_generation_settings": {"n_ctx": service.info.max_model_len, "params": sampling},
                "total_slots": service.config.schedule.max_running,
                "model_alias": service.names(call)[0],
                "model_path": service.info.name,
                "chat_template": tokenizer.chat_template or "",
                "bos_token": _spelled(tokenizer, tokenizer.bos_token_id) or "",
                "eos_token": _spelled(tokenizer, tokenizer.eos_token_id) or "",
                "modalities": {"vision": False, "audio": False},
                "build_info": f"trireme {trireme.__version__}",
                "is_sleeping": service.client.state().name == "sleeping",
            }
        )

    async def apply_template(self, call: Call) -> Reply:
        """The text of the prompt that a chat with these messages would send to the model."""
        request = await call.read(ChatRequest)
        self.service.check_model(request.model, call)
        tokens = await chat_tokens(self.service, await self._chat_job(request))
        text = await self.service.with_tokenizer(len(tokens), lambda t: t.decode(tokens, skip_special_tokens=False))
        return json_reply({"prompt": text})

    async def detokenize(self, call: Call) -> Reply:
        request = await call.read(DetokenizeRequest)
        self.service.check_model(request.model, call)
        self.service.check_tokens(request.tokens, "tokens")
        text = await self.service.with_tokenizer(len(request.tokens), lambda t: t.decode(request.tokens, skip_special_tokens=False))
        return json_reply(DetokenizeAnswer(text, text))

    async def tokenizer_info(self, call: Call) -> Reply:
        """What evaluation harnesses ask for before they send token ids."""
        tokenizer = self.service.client.tokenizer
        return json_reply(
            {
                "eos_token": _spelled(tokenizer, tokenizer.eos_token_id),
                "bos_token": _spelled(tokenizer, tokenizer.bos_token_id),
                "eos_token_id": tokenizer.eos_token_id,
                "bos_token_id": tokenizer.bos_token_id,
                "vocab_size": tokenizer.vocab_size,
                "chat_template": tokenizer.chat_template,
                "add_bos_token": tokenizer.add_bos,
            }
        )


def _piece(spelled: bytes) -> str | list[int]:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return list(spelled)


def _spelled(tokenizer: Any, token: int | None) -> str | None:
    return None if token is None else tokenizer.token_text(token)
