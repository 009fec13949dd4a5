"""Reasoning in a model's text: which tags enclose it, and reading it out. Knows tags; nothing of tools or protocols."""

from __future__ import annotations

from typing import NamedTuple

from trireme.api.chat.parsing_stream import WHITE, Steps, Stream


class Tags(NamedTuple):
    opening: str
    closing: str


TAGS = (
    Tags("<think>", "</think>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("◁think▷", "◁/think▷"),
)


def tags_for(template: str | None) -> Tags:
    """The reasoning tags in a chat template. If it has none, the commonest tags, because the model may have learnt them anyway."""
    return next((tags for tags in TAGS if template and tags.closing in template), TAGS[0])


def opened_by(prompt_end: str, tags: Tags) -> bool:
    """Whether the prompt has opened the reasoning, so that the answer begins within it."""
    return prompt_end.rstrip(WHITE).endswith(tags.opening)


def read_reasoning(stream: Stream, tags: Tags, opened: bool) -> Steps[None]:
    """Reads the reasoning if the text begins with some. White space around it is dropped."""
    space = yield from stream.skip_space()
    if not opened and not (yield from stream.follows(tags.opening)):
        stream.say(space)
        return
    if opened:  # some models repeat the opening tag
        yield from stream.follows(tags.opening)
    yield from stream.skip_space()
    yield from stream.until((tags.closing,), _Trimmed(stream))
    yield from stream.skip_space()


class _Trimmed:
    """Emits reasoning without the white space at its end."""

    def __init__(self, stream: Stream):
        self._stream, self._space = stream, ""

    def __call__(self, text: str) -> None:
        bare = text.rstrip(WHITE)
        if bare:
            self._stream.think(self._space + bare)
            self._space = text[len(bare) :]
        else:
            self._space += text
