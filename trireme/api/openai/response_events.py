"""The typed events of a streamed response, and the items they add up to. Knows OpenAI's shapes; nothing of engines."""

from __future__ import annotations

from typing import Any

from trireme.api.chat.parsing import CallDelta, Delta
from trireme.api.transport.failures import Failure
from trireme.api.transport.http import event


class ResponseEvents:
    """Builds the events of one response. One item is open at a time; `output` holds the finished ones."""

    def __init__(self, id: str):
        self._id = id.removeprefix("resp_")
        self._number = 0
        self._open: dict[str, Any] | None = None
        self._call_index = -1
        self.output: list[dict[str, Any]] = []

    def status(self, status: str, document: dict[str, Any]) -> bytes:
        return self._event(f"response.{status}", response=document)

    def error(self, failure: Failure) -> bytes:
        return self._event("error", code=failure.code or failure.kind, message=failure.message, param=failure.param)

    def delta(self, delta: Delta) -> bytes:
        """The events for one piece of the answer. Reasoning comes before content, and content before calls."""
        sent = b""
        if delta.reasoning:
            sent += self._text("reasoning", delta.reasoning)
        if delta.content:
            sent += self._text("message", delta.content)
        for call in delta.calls:
            sent += self._call(call)
        return sent

    def close(self) -> bytes:
        """Ends the open item. An empty answer becomes one empty message."""
        if self._open is None and not self.output:
            return self._begin(self._message()) + self._end()
        return self._end()

    # --- items ----------------------------------------------------------------------------------------------------------------

    def _text(self, kind: str, text: str) -> bytes:
        sent = b""
        if self._open is None or self._open["type"] != kind:
            sent = self._end() + self._begin(self._message() if kind == "message" else self._thought())
        assert self._open is not None
        self._open["content"][0]["text"] += text
        return sent + self._event(f"response.{_TEXT_EVENT[kind]}.delta", **self._place(), content_index=0, delta=text)

    def _call(self, call: CallDelta) -> bytes:
        sent = b""
        if call.name and call.index != self._call_index:
            self._call_index = call.index
            item = {"id": self._item_id("fc"), "type": "function_call", "status": "in_progress", "arguments": ""}
            sent = self._end() + self._begin({**item, "call_id": call.id, "name": call.name})
        if not call.arguments or self._open is None:
            return sent
        self._open["arguments"] += call.arguments
        return sent + self._event("response.function_call_arguments.delta", **self._place(), delta=call.arguments)

    def _message(self) -> dict[str, Any]:
        content = [{"type": "output_text", "text": "", "annotations": []}]
        return {"id": self._item_id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": content}

    def _thought(self) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": ""}]
        return {"id": self._item_id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": content}

    def _begin(self, item: dict[str, Any]) -> bytes:
        self._open = item
        shown = {**item, "content": []} if "content" in item else item
        sent = self._event("response.output_item.added", output_index=len(self.output), item=shown)
        if "content" in item:
            sent += self._event("response.content_part.added", **self._place(), content_index=0, part=item["content"][0])
        return sent

    def _end(self) -> bytes:
        item = self._open
        if item is None:
            return b""
        if item["type"] == "function_call":
            sent = self._event("response.function_call_arguments.done", **self._place(), arguments=item["arguments"])
        else:
            part = item["content"][0]
            name = f"response.{_TEXT_EVENT[item['type']]}.done"
            sent = self._event(name, **self._place(), content_index=0, text=part["text"])
            sent += self._event("response.content_part.done", **self._place(), content_index=0, part=part)
        item["status"] = "completed"
        sent += self._event("response.output_item.done", output_index=len(self.output), item=item)
        self.output.append(item)
        self._open = None
        return sent

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.output)}

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._id}{len(self.output):02d}"

    def _event(self, name: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number - 1, **fields}, name)


_TEXT_EVENT = {"message": "output_text", "reasoning": "reasoning_text"}
