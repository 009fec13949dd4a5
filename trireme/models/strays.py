"""Tensors of a checkpoint that no layer asked for: which are harmless, which the class leaves out, and which make loading fail.

Knows names and shapes; nothing of files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Protocol

from trireme.errors import UnsupportedModel

LeavesOut = dict[str, tuple[str, ...]]  # what it is: the names of its tensors, `*` for anything

OTHER_HEADS: LeavesOut = {"heads of other tasks": ("score.*", "classifier.*", "v_head.*", "value_head.*", "reward_head.*")}
TOWERS: LeavesOut = {
    "what sees and hears": (
        "*vision_tower.*",
        "*vision_model.*",
        "*audio_tower.*",
        "*multi_modal_projector.*",
        "*embed_vision.*",
        "*embed_audio.*",
        "visual.*",
        "model.visual.*",
    )
}
# Tables that the engine computes itself, and that older files contain
_TABLES = re.compile(
    r"(rotary_emb|rotary_embedding|rope)\.(inv_freq|original_inv_freq|cos_cached|sin_cached|freqs)$"
    r"|(^|[._])position_ids$|(^|\.)rope_freqs\.weight$|\.attn_rot_embd\.weight$"
)
_MASKS = re.compile(r"(attn|attention)\.(masked_)?bias$")


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def further_layers(raw: Mapping[str, Any], path: str = "model.layers") -> LeavesOut:
    """The layers behind the last one, which predict further tokens."""
    first, more = raw.get("num_hidden_layers"), raw.get("num_nextn_predict_layers")
    if not isinstance(first, int) or not isinstance(more, int) or not 0 < more <= 64:
        return {}
    return {"layers that predict further tokens": tuple(f"{path}.{first + i}.*" for i in range(more))}


def compare(entries: Mapping[str, Shaped], asked: Collection[str], leaves_out: LeavesOut) -> tuple[Counter[str], list[str]]:
    """How many tensors the class leaves out, by kind; and the names of the tensors that nothing explains."""
    left_out: Counter[str] = Counter()
    strays = []
    for name, entry in entries.items():
        if name in asked or _is_harmless(name, entry):
            continue
        reason = next((what for what, patterns in leaves_out.items() if _matches(name, patterns)), None)
        if reason:
            left_out[reason] += 1
        else:
            strays.append(name)
    return left_out, strays


def leaves_out_of(model: type, raw: dict[str, Any]) -> LeavesOut:
    """What a class says that it leaves out of a checkpoint with this config."""
    said = getattr(model, "leaves_out", None)
    return said(raw) if said else {}


def is_left_out(name: str, leaves_out: LeavesOut) -> bool:
    return any(_matches(name, patterns) for patterns in leaves_out.values())


def refuse_strays(path: Any, model: type, strays: list[str]) -> None:
    """Refuses the checkpoint if there are stray tensors."""
    if not strays:
        return
    shown = _one_of_each_kind(strays)[:3]
    more, like = len(strays) - len(shown), "it" if len(shown) == 1 else "them"
    raise UnsupportedModel(
        f"{path} has tensors that the class {model.__name__} does not use: {', '.join(shown)}"
        f"{f' and {more} like {like}' if more else ''}.",
        "check that config.json belongs to the file; a class of your own may use them or name them in `leaves_out` "
        "(docs/add-a-model.md)",
    )


def _one_of_each_kind(names: list[str]) -> list[str]:
    """The first of the names that differ in their numbers alone."""
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "#", name), name)
    return list(kinds.values())


def _is_harmless(name: str, entry: Shaped) -> bool:
    if _TABLES.search(name):
        return True
    # GPT-2 and its kin keep their causal mask as the `bias` of attention; a real bias has one axis.
    shape = tuple(entry.shape)
    is_mask = len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    return bool(_MASKS.search(name)) and (is_mask or shape in ((), (1,)))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches a pattern. In a checkpoint without a head, names may lack the first word."""
    for pattern in patterns:
        bare = pattern.partition(".")[2] if pattern.count(".") > 1 and not pattern.startswith("*") else pattern
        if fnmatchcase(name, pattern) or fnmatchcase(name, bare):
            return True
    return False
