"""Every option that may meet another, the values it is tried with, and the pairs that make no sense. Knows no engine.

A feature adds a value to an option, or an option: nothing else is to be written. The first value of an option is the plainest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .cover import Meeting, Row, covering


@dataclass(frozen=True)
class Value:
    """A value of an option: what it adds to the engine's settings, or to the sampling parameters of a request.

    `tolerance`: how far log-probabilities may be, on average, from those of the plain body with the same type, weights and kind of
    KV (and a single one ten times as far). With 0 the tokens are the plain body's own. A `wide` value runs a path of its own only
    on a GPU; elsewhere another value stands for it, and it is in the larger table alone.
    """

    name: str
    given: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0
    form: str = ""  # of the model's file: a key of models.FORMS; safetensors without one
    family: str = ""  # the family of models that has what the value is about; llama without one
    wide: bool = False


# Tolerances are twice to four times what was measured with the family that shows most of it.
ENGINE: dict[str, tuple[Value, ...]] = {
    "backend": (
        Value("reference", {"backend": "reference", "graphs": False}),
        Value("cpu", {"backend": "cpu", "graphs": False}),
        Value("cpu recorded", {"backend": "cpu", "graphs": True}),
        Value("cuda", {"backend": "cuda", "graphs": False}),
        Value("cuda captured", {"backend": "cuda", "graphs": True}),
    ),
    "weights": (
        Value("floats", {"quantize": "none"}),
        Value("int8", {"quantize": "int8"}, tolerance=0.1),  # CPUs round activations to 8 bits, too
        Value("int4", {"quantize": "int4"}, tolerance=0.1),
        Value("Q4_0", {"quantize": "auto"}, tolerance=0.1, form="Q4_0"),
        Value("float16", {"quantize": "auto"}, tolerance=0.05, form="float16"),
        Value("bfloat16", {"quantize": "auto"}, tolerance=0.05, form="bfloat16", wide=True),
        # Of published formats: those that the CPU packs in different ways, then those that it packs as one of these.
        Value("AWQ", {"quantize": "auto"}, tolerance=0.05, form="awq"),
        Value("GPTQ in an order", {"quantize": "auto"}, tolerance=0.07, form="gptq in an order"),
        Value("fp8 blocks", {"quantize": "auto"}, tolerance=0.2, form="fp8 blocks"),  # GPUs round activations to fp8, too
        Value("MXFP4", {"quantize": "auto"}, tolerance=0.05, form="mxfp4"),
        Value("fp8", {"quantize": "fp8"}, tolerance=0.2, wide=True),
        Value("mxfp4", {"quantize": "mxfp4"}, tolerance=0.06, wide=True),
        Value("GPTQ", {"quantize": "auto"}, tolerance=0.05, form="gptq 4 bit with zeros, version 1", wide=True),
        Value("words of 4 bits", {"quantize": "auto"}, tolerance=0.05, form="words 4", wide=True),
        Value("int8 by row", {"quantize": "auto"}, tolerance=0.1, form="int8 by row", wide=True),
        Value("fp8 by row", {"quantize": "auto"}, tolerance=0.2, form="fp8 by row", wide=True),
        Value("NVFP4", {"quantize": "auto"}, tolerance=0.08, form="nvfp4", wide=True),
        Value("NF4", {"quantize": "auto"}, tolerance=0.06, form="nf4 plain", wide=True),
        Value("bitsandbytes int8", {"quantize": "auto"}, tolerance=0.1, form="bitsandbytes int8", wide=True),
        Value("Q8_0", {"quantize": "auto"}, tolerance=0.1, form="Q8_0", wide=True),
    ),
    "dtype": (
        Value("float32", {"dtype": "float32"}),
        Value("bfloat16", {"dtype": "bfloat16"}, tolerance=0.1),
        Value("float16", {"dtype": "float16"}, tolerance=0.02),
    ),
    "kv": (
        Value("plain", {"kv_dtype": "auto"}),
        Value("int8", {"kv_dtype": "int8"}, tolerance=0.005),
        Value("fp8", {"kv_dtype": "fp8"}, tolerance=0.01),
        Value("fp8, scaled", {"kv_dtype": "fp8"}, tolerance=0.01, form="kv scales", wide=True),
        Value("int4", {"kv_dtype": "int4"}, tolerance=0.1),  # exact alone; what else rounds moves some numbers by a whole step
    ),
    "pages": (Value("16", {"page_size": 16}), Value("1", {"page_size": 1}), Value("static", {"page_size": 0})),
    "budget": (Value("large", {"max_step_tokens": 2048}), Value("small", {"max_step_tokens": 5})),  # small: prompts are cut
    "prefixes": (
        Value("forgotten", {"prefix_cache": False}),
        Value("kept", {"prefix_cache": True}),
        Value("hit", {"prefix_cache": True}),  # an earlier prompt began as this one does
    ),
    "memory": (
        Value("enough", {"kv_tokens": 1024}),
        Value("short", {"kv_tokens": 80, "policy": "aggressive"}),  # requests are paused and come back
    ),
    "windows": (Value("no"), Value("kept alone", {"kv_windows": "on"}, family="gemma3")),
    "ranks": (Value("1"), Value("2", {"tp": 2})),
}

_STOPS = list(range(0, 257, 5))
_STRINGS = ["8F", *"bdfhjlnprtvxz13579"]  # 8F: two tokens
REQUEST: dict[str, tuple[Value, ...]] = {
    "rule": (
        Value("none"),
        Value("penalties", {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.6}),
        Value("ngrams", {"no_repeat_ngram": 1}),
        Value("bias", {"logit_bias": {40: 3.5, 60: 3.0, 61: -4.0}}),
        Value("allowed", {"allowed_token_ids": [0, *range(1, 257, 2)]}),
        Value("banned", {"banned_token_ids": list(range(2, 257, 2))}),
        Value("late end", {"min_tokens": 6, "stop_token_ids": _STOPS}),
    ),
    "choice": (
        Value("greedy", {"temperature": 0.0}),
        Value("seeded", {"temperature": 0.7, "top_k": 60, "top_p": 0.98, "min_p": 0.05}),
    ),
    "grammar": (Value("none"), Value("letters", {"grammar": "start: /[a-zA-Z0-9 .,]{8,40}/"})),
    "logprobs": (Value("none"), Value("3", {"logprobs": 3})),
    "prompt logprobs": (Value("none"), Value("2", {"prompt_logprobs": 2})),
    "sequences": (Value("1"), Value("3", {"n": 3}), Value("best of 4", {"n": 2, "best_of": 4})),
    "stop": (Value("none"), Value("strings", {"stop": _STRINGS}), Value("kept", {"stop": _STRINGS, "include_stop": True})),
}

WAYS: tuple[Value, ...] = (Value("offline"), Value("server"), Value("stream"))  # a server meets the options of requests alone

PLAINEST: Row = {option: known[0].name for option, known in (ENGINE | REQUEST | {"way": WAYS}).items()}

EXCLUDED: tuple[tuple[str, str, str, str, str], ...] = (
    # option, value (or several), option, value (or several), why they never meet
    ("backend", "reference", "weights", "int4", "two ranks round half a tiny matrix, whose groups are then others"),
    ("backend", "cuda captured", "ranks", "2", "ranks that share a process and a GPU meet on the host, which no graph can hold"),
    ("weights", "Q4_0 or Q8_0", "windows", "kept alone", "the GGUF files are llama's"),
    ("kv", "fp8, scaled", "weights", " or ".join(value.name for value in ENGINE["weights"][1:]), "that file's weights are floats"),
    ("pages", "static", "prefixes", "hit", "a page that is one request's is never shared"),
    ("pages", "static", "memory", "short", "a page that holds the whole context never grows, so nobody is paused"),
    ("windows", "kept alone", "memory", "short", "a row reserves its window: sequences so short are never paused"),
    ("prefixes", "hit", "prompt logprobs", "2", "a prompt whose log-probabilities are wanted is computed whole"),
    ("way", "server or stream", "rule", "banned", "no API has a name for it"),
    ("way", "stream", "prompt logprobs", "2", "only whole answers carry them"),
    ("way", "stream", "sequences", "best of 4", "which are the best is known at the end; refused"),
)


Options = dict[str, tuple[Value, ...]]


def excluded(options: Options) -> dict[Meeting, str]:
    """The excluded pairs of these options, with the reasons."""
    there = {(option, value.name) for option, values in options.items() for value in values}
    pairs = {frozenset({(a, x), (b, y)}): why for a, xs, b, ys, why in EXCLUDED for x in xs.split(" or ") for y in ys.split(" or ")}
    return {pair: why for pair, why in pairs.items() if pair <= there}


def on(*backends: str, wide: bool = False) -> Options:
    """Every option on these backends, offline; with the values of the larger table alone if asked."""
    known = {option: tuple(value for value in values if wide or not value.wide) for option, values in (ENGINE | REQUEST).items()}
    return _fitting("backend", [value for value in ENGINE["backend"] if value.given["backend"] in backends], known)


def served() -> Options:
    """The options of requests, through a server."""
    return _fitting("way", [value for value in WAYS if value.name != "offline"], REQUEST)


def _fitting(option: str, values: list[Value], others: Options) -> Options:
    """The options with these values of one, without what none of them may meet."""
    found = others | {option: tuple(values)}
    lacking = excluded(found)

    def met(other: str, value: Value) -> bool:
        return other == option or any(frozenset({(option, own.name), (other, value.name)}) not in lacking for own in values)

    return {other: tuple(value for value in known if met(other, value)) for other, known in found.items()}


def exact(options: Options) -> Options:
    """The values with which tokens are the plain body's own."""
    return {option: tuple(value for value in values if not value.tolerance) for option, values in options.items()}


def rows(options: Options, strength: int = 2) -> list[Row]:
    """A small set of rows in which every pair meets that is not excluded (with a strength of 3, every three values)."""
    names = {option: [value.name for value in values] for option, values in options.items()}
    return covering(names, excluded(options), strength)


def alone(options: Options) -> list[Row]:
    """Each value of a request by itself in captured steps: beside one that takes a slower way, a fault of it would hide."""
    captured = [value.name for value in options["backend"] if value.given["graphs"]]
    asked = [(option, value.name) for option, known in options.items() if option in REQUEST for value in known[1:]]
    return [PLAINEST | {"backend": backend, option: name} for backend in captured for option, name in asked]


def values(row: Row, options: Options) -> list[Value]:
    """The row's values of these options."""
    return [value for option, known in options.items() for value in known if value.name == row[option]]


def given(row: Row, options: Options) -> dict[str, Any]:
    """What they add up to."""
    return {name: x for value in values(row, options) for name, x in value.given.items()}


def form_of(row: Row) -> str:
    """The form of the row's model file."""
    return "".join(value.form for value in values(row, ENGINE))


def family_of(row: Row) -> str:
    """The family of the row's model."""
    return "".join(value.family for value in values(row, ENGINE)) or "llama"


def tolerance_of(row: Row) -> float:
    """How far its log-probabilities may be off: what its values allow, added up."""
    return sum(value.tolerance for value in values(row, ENGINE))


def short(row: Row) -> str:
    """A row's name: where it is not the plainest."""
    return ",".join(f"{option}={value}" for option, value in sorted(row.items()) if value != PLAINEST[option]) or "plainest"
