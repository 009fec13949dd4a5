"""Text to tokens and back, and conversations to tokens, for a model folder or a GGUF file.

Knows text, ids and templates; nothing of requests or tensors. The merging itself is the `tokenizers` library's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import re
import secrets
import tempfile
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import tokenizers

from trireme.config import cache_folder
from trireme.errors import BadCheckpoint, BadConfig, BadRequest, ModelNotFound, TriremeError
from trireme.hub.checkpoint import gguf_file, read_json
from trireme.hub.gguf import read_gguf
from trireme.hub.llama2c import llama2c_files, llama2c_vocabulary
from trireme.hub.sentencepiece import read_sentencepiece
from trireme.hub.specials import Specials
from trireme.hub.vocabulary import Vocabulary, vocabulary_of

_MERGES = 1  # raised when the rule for merges changes, so that older cached ones are left alone
_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class NoTokenizer(BadCheckpoint):
    """The model has no tokenizer files. Callers that pass token ids do not need one."""


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        add_bos: bool | None = None,
        add_eos: bool = False,
        templates: dict[str, str] | None = None,
        vocab_size: int = 0,
    ) -> None:
        """`add_bos` None: the library's own post-processor says what is added."""
        self._inner = inner
        self._inner.no_padding()
        self._inner.no_truncation()
        self._lock = threading.Lock()  # guards a setting of the library's object that calls switch
        self.bos_token_id, self.eos_token_id, self._add_bos, self._add_eos = bos_token_id, eos_token_id, add_bos, add_eos
        self._added = {i: token.content for i, token in self._inner.get_added_tokens_decoder().items()}
        self.special_ids = {i for i, token in self._inner.get_added_tokens_decoder().items() if token.special}
        self.vocab_size = vocab_size or 1 + max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)
        self.templates = templates or {}
        self._compiled: dict[str, Any] = {}  # ChatTemplate by name
        self._bytes: dict[int, bytes] = {}
        self._bytes_of = _bytes_of_decoder(str(self._inner.decoder))
        self._specials = Specials({self._added[i]: i for i in self.special_ids})

    @classmethod
    def open(cls, path: str | pathlib.Path, template_file: str | None = None) -> Tokenizer:
        """The tokenizer of a folder or a .gguf file; `template_file` holds a chat template to use instead of its own."""
        tokenizer = cls._open(pathlib.Path(path))
        if template_file:
            tokenizer.templates = {"default": _read_template(pathlib.Path(template_file))}
        return tokenizer

    @classmethod
    def _open(cls, path: pathlib.Path) -> Tokenizer:
        gguf = gguf_file(path)
        if gguf:
            return cls._from_vocabulary(vocabulary_of(read_gguf(gguf)), gguf)
        llama2c = llama2c_files(path)
        if llama2c:
            return cls._from_vocabulary(llama2c_vocabulary(*llama2c), llama2c[1])
        if not path.is_dir():
            raise ModelNotFound(f"{path} is no model folder and no .gguf file.", "check the path, or see `trireme models`")
        return cls._from_folder(path)

    @classmethod
    def _from_vocabulary(cls, vocabulary: Vocabulary, file: pathlib.Path) -> Tokenizer:
        return cls(
            _built(vocabulary, file),
            bos_token_id=vocabulary.bos_token_id,
            eos_token_id=vocabulary.eos_token_id,
            add_bos=vocabulary.add_bos,
            add_eos=vocabulary.add_eos,
            templates=vocabulary.templates,
            vocab_size=len(vocabulary.tokens),
        )

    @classmethod
    def _from_folder(cls, folder: pathlib.Path) -> Tokenizer:
        settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
        if (folder / "tokenizer.json").exists():
            tokenizer = cls(_read(folder / "tokenizer.json"))
        elif (folder / "tokenizer.model").exists():
            vocabulary = read_sentencepiece(folder / "tokenizer.model")
            vocabulary.add_bos = bool(settings.get("add_bos_token", True))
            tokenizer = cls._from_vocabulary(vocabulary, folder / "tokenizer.model")
        else:
            raise NoTokenizer(f"{folder} has no tokenizer.json.", "fetch the model's tokenizer files")
        for name in ("bos", "eos"):
            token = _content(settings.get(f"{name}_token"))
            if token is not None:
                setattr(tokenizer, f"{name}_token_id", tokenizer._inner.token_to_id(token))
        tokenizer.templates = _templates(folder, settings)
        return tokenizer

    @property
    def add_bos(self) -> bool:
        """Whether `encode` begins with the beginning-of-sequence token."""
        if self._add_bos is not None:
            return self._add_bos and self.bos_token_id is not None
        return self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    @property
    def chat_template(self) -> str | None:
        return self.templates.get("default")

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = True) -> list[int]:
        """Ids of `text`. Without `allow_special`, text that spells a special token stays text."""
        try:
            with self._lock:
                self._inner.encode_special_tokens = not allow_special
                # The batch call releases the GIL and computes no offsets.
                ids = self._inner.encode_batch_fast([text], add_special_tokens=add_special and self._add_bos is None)[0].ids
        except (UnicodeEncodeError, TypeError):
            raise BadRequest("The text is not valid Unicode: it holds half of a surrogate pair.", "send whole characters") from None
        if add_special and self._add_bos and self.bos_token_id is not None:
            ids = [self.bos_token_id, *ids]
        if add_special and self._add_eos and self.eos_token_id is not None:
            ids = [*ids, self.eos_token_id]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence."""
        known = [i for i in ids if 0 <= i < 2**32]
        with self._lock:
            return self._inner.decode(known, skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """The token as its vocabulary spells it; empty where the id has none."""
        if token in self._added:
            return self._added[token]
        return (self._inner.id_to_token(token) or "") if 0 <= token < self.vocab_size else ""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that the token adds to a text."""
        found = self._bytes.get(token)
        if found is None:
            text = self.token_text(token)
            found = self._bytes[token] = text.replace(_SPACE, " ").encode() if token in self._added else self._bytes_of(text)
        return found

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as the model's template writes it."""
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        source = self.templates.get(name)
        if source is None:
            raise BadRequest("This model has no chat template.", "use plain completions, or a model made for chat", "messages")
        if name not in self._compiled:
            from trireme.hub.template import ChatTemplate  # most starts render no conversation and need no Jinja

            self._compiled[name] = ChatTemplate(source)
        return self._compiled[name].render(
            {
                "bos_token": self._spelling(self.bos_token_id),
                "eos_token": self._spelling(self.eos_token_id),
                **variables,
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def encode_chat(self, messages: list[dict[str, Any]], *, continued: bool = False, **options: Any) -> list[int]:
        """Ids of the conversation. Only the template can write special tokens: in messages and tools they stay text.

        `continued`: the ids end with the content of the last message, so that the model continues it.
        """
        # Every special token in what the user sent is broken up by a mark. The mark is taken out again after the template's own
        # special tokens have been found.
        mark = self._specials.mark()
        options = {name: self._specials.marked(value, mark) for name, value in options.items()}
        end = f"[end {secrets.token_hex(8)}]" if continued else ""
        if continued:
            messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{end}"}]
        text = self.render_chat(self._specials.marked(messages, mark), **options)
        if continued:
            text, found, _ = text.rpartition(end)
            if not found:
                raise BadRequest("This model's template does not show the last message's text.", "end with the user", "messages")
        if mark not in text:
            return self.encode(text, add_special=False)
        ids: list[int] = []
        for part in self._specials.parts(text):
            if isinstance(part, int):
                ids.append(part)
            elif between := part.replace(mark, ""):
                ids += self.encode(between, add_special=False, allow_special=False)
        return ids

    def _spelling(self, token: int | None) -> str:
        return "" if token is None else self.token_text(token)


def _bytes_of_decoder(decoder: str) -> Any:
    """How a token's spelling becomes bytes, by the kind of decoder the tokenizer has."""
    if "ByteLevel" in decoder:
        return _byte_level
    if "WordPiece" in decoder:
        return lambda text: (text.removeprefix("##") if text.startswith("##") else f" {text}").encode()
    return _sentencepiece


def _byte_level(text: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in text])
    except KeyError:  # a token that is not spelled in the byte alphabet stands for its own text
        return text.encode()


def _sentencepiece(text: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.replace(_SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE spells each byte as a visible character: itself where it has one, else the next from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def _read(path: pathlib.Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for anything it cannot read
        raise BadCheckpoint(f"{path} cannot be read: {str(error)[:200]}.", "fetch the file again") from None


def _built(vocabulary: Vocabulary, file: pathlib.Path) -> tokenizers.Tokenizer:
    """The vocabulary's tokenizer. Merges that follow from scores are kept in the cache: large ones take seconds to find."""
    try:
        if vocabulary.merges is not None:
            return vocabulary.build()
        return vocabulary.build(_merge_ids(vocabulary, file))
    except TriremeError:
        raise
    except Exception as error:  # as above
        raise BadCheckpoint(f"{file} has a broken tokenizer: {str(error)[:200]}.", "fetch it again") from None


def _merge_ids(vocabulary: Vocabulary, file: pathlib.Path) -> np.ndarray:
    status = file.stat()
    key = f"{_MERGES}:{file.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    folder = cache_folder() / "tokenizers"
    kept = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"
    try:
        found = np.load(kept, allow_pickle=False)
        if found.ndim == 2 and found.shape[1] == 2 and found.min() >= 0 and found.max() < len(vocabulary.tokens):
            return found
    except (OSError, ValueError, EOFError):
        pass
    found = vocabulary.merges_from_scores()
    # If the cache cannot be written, the next start only takes longer.
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as out:
            np.save(out, found)
        os.replace(out.name, kept)
    return found


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_template(file: pathlib.Path) -> str:
    """Reads the operator's chat template. Refuses it at once if it is not valid."""
    from trireme.hub.template import ChatTemplate

    try:
        source = file.read_text()
        ChatTemplate(source)
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"Cannot read the chat template {file}: {error}.", "check --chat-template") from None
    except BadRequest as error:
        raise BadConfig(f"{file}: {error.cause}", "mend the template of --chat-template") from None
    return source


def _templates(folder: pathlib.Path, settings: dict[str, Any]) -> dict[str, str]:
    """Templates by name, from their own files or from tokenizer_config.json."""
    found: dict[str, str] = {}
    listed = settings.get("chat_template")
    if isinstance(listed, str):
        found["default"] = listed
    elif isinstance(listed, list):
        found = {e["name"]: e["template"] for e in listed if isinstance(e, dict) and {"name", "template"} <= e.keys()}
    if (folder / "chat_template.json").exists():
        template = read_json(folder / "chat_template.json").get("chat_template")
        if isinstance(template, str):
            found["default"] = template
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.exists():
            try:
                found[name] = file.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise BadCheckpoint(f"Cannot read {file}: {error}.", "fetch the file again") from None
    return {name: text for name, text in found.items() if isinstance(name, str) and isinstance(text, str)}
