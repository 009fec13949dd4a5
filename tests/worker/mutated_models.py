"""A process that loads mutated models one after another: KIND COUNT SEED FOLDER. Knows no test; its last line says how it went.

Each file goes the whole way: read, loaded by a worker, and two tokens generated where that succeeds. A refusal of one line is
well; any other exception ends the process with its traceback, a crash or a hang ends it too. FOLDER keeps the last file.
"""

from __future__ import annotations

import copy
import faulthandler
import itertools
import json
import pathlib
import random
import resource
import sys
from collections.abc import Callable
from typing import Any

sys.path += [str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(__file__).parents[2])]

import tiny_models
from drive import Drive

from tests.hub.gguf_writer import gguf_bytes, llama_metadata, llama_tensors
from tests.hub.test_tokenizer import hf_folder
from trireme.errors import TriremeError
from trireme.hub.tokenizer import Tokenizer

HANG_SECONDS = 60
MAX_GROWTH = 100 << 20
_BACKENDS = itertools.cycle(["reference", "cpu"])
_ANYTHING: list[Any] = [None, -1, 0, 1, 2**31, 2**63, 1e308, 0.5, True, "", "x" * 300, [], [[]], {}, [1, 2, 3], {"type": "x"}]


def mutated_bytes(whole: bytes, header: int, chance: random.Random) -> bytes:
    """A few bytes of the header (of a few files: anywhere) changed, sometimes a stretch doubled or left out or the end cut off."""
    data = bytearray(whole)
    if chance.random() < 0.1:
        header = len(whole)
    for _ in range(chance.randint(1, 4)):
        data[chance.randrange(header)] = chance.choice([chance.randrange(256), 0, 1, 0x30 + chance.randrange(10), 0x7F, 0xFF])
    if chance.random() < 0.1:
        place, length = chance.randrange(header), chance.randint(1, 64)
        data[place : place + length * chance.randint(0, 1)] = data[place : place + length]
    if chance.random() < 0.1:
        del data[chance.randrange(len(data)) :]
    return bytes(data)


def mutated_json(text: str, chance: random.Random) -> str:
    """Anything in the place of anything, a thing left out, or a byte changed."""
    if chance.random() < 0.3:
        return mutated_bytes(text.encode(), len(text.encode()), chance).decode("utf-8", "surrogateescape")
    document = json.loads(text)
    for _ in range(chance.randint(1, 2)):
        holder, key = chance.choice(list(_places(document)))
        if chance.random() < 0.2:
            holder[key] = None
        else:
            holder[key] = copy.deepcopy(chance.choice([*_ANYTHING, document[chance.choice(list(document))]]))
    return json.dumps(document)


def _places(value: Any) -> Any:
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(item, dict | list) and len(item) < 100:
            yield from _places(item)


def generate(path: pathlib.Path) -> None:
    """On the backend in plain torch, or on that in C, which packs what it is given."""
    backend = next(_BACKENDS)
    Drive(path, full=False, backend=backend, kv_tokens=32, max_model_len=32).run("a", [1, 2, 3, 4, 5], max_tokens=2)


def speak(folder: pathlib.Path) -> None:
    tokenizer = Tokenizer.open(folder)
    ids = tokenizer.encode("Hello <s> world\n é")
    for token in ids:
        tokenizer.token_bytes(token)
    tokenizer.encode_chat([{"role": "user", "content": "Hi </s>"}])


def _generate_and_speak(file: pathlib.Path) -> None:
    generate(file)
    tokenizer = Tokenizer.open(file)
    for token in tokenizer.encode("ab <|end|>"):
        tokenizer.token_bytes(token)


def prepared(kind: str, folder: pathlib.Path) -> tuple[Callable[[random.Random], None], Callable[[], None]]:
    """How to write a mutated file of this kind, and how to use it."""
    if kind == "gguf":
        whole, file = gguf_bytes(llama_metadata(), llama_tensors()), folder / "m.gguf"
        header = len(whole) - sum(len(data) for _, _, data in llama_tensors().values())
        _write(file, whole)
        return lambda chance: _write(file, mutated_bytes(whole, header, chance)), lambda: _generate_and_speak(file)
    if kind == "tokenizer":
        names = ["tokenizer.json", "tokenizer.json", "tokenizer_config.json"]
        texts = {name: (hf_folder(folder) / name).read_text() for name in names}
        return lambda chance: _write_one_of(folder, texts, names, chance), lambda: speak(folder)
    tiny_models.save("llama2", folder)
    if kind == "config":
        texts = {"config.json": (folder / "config.json").read_text()}
        return lambda chance: _write_one_of(folder, texts, ["config.json"], chance), lambda: generate(folder)
    whole, file = (folder / "model.safetensors").read_bytes(), folder / "model.safetensors"
    header = 8 + int.from_bytes(whole[:8], "little")
    return lambda chance: _write(file, mutated_bytes(whole, header, chance)), lambda: generate(folder)


def _write(file: pathlib.Path, data: bytes) -> None:
    file.unlink(missing_ok=True)  # a mapping of the last one keeps its own
    file.write_bytes(data)


def _write_one_of(folder: pathlib.Path, texts: dict[str, str], names: list[str], chance: random.Random) -> None:
    chosen = chance.choice(names)
    for name, text in texts.items():
        _write(folder / name, (mutated_json(text, chance) if name == chosen else text).encode("utf-8", "surrogateescape"))


def main(kind: str, count: int, seed: int, folder: pathlib.Path) -> None:
    mutate, use = prepared(kind, folder)
    use()
    refused, peak = 0, _peak()
    for number in range(count):
        mutate(random.Random(f"{kind} {seed} {number}"))
        print(f"{kind} {seed} {number}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        try:
            use()
        except TriremeError as error:
            refused += 1
            assert "\n" not in str(error), error
        faulthandler.cancel_dump_traceback_later()
        assert _peak() - peak < MAX_GROWTH, f"{(_peak() - peak) >> 20} MiB more"
    print(json.dumps({"files": count, "refused": refused, "growth": _peak() - peak}))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # bytes


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4]))
