"""Published formats of quantized matrices: finds the tensors of a checkpoint that together make one matrix, by what is stored.

Knows names and shapes. What the bits mean is decoded in `quant`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from trireme.errors import UnsupportedModel
from trireme.hub.composite import Along, Composite, Format, Part, Tensors
from trireme.hub.kv_scales import is_of_kv
from trireme.hub.weights import Weight

Settings = Mapping[str, Any]  # a checkpoint's `quantization_config`, or nothing
WORD = 32  # bits of a word that holds packed numbers


Finder = Callable[[Tensors, Settings], Composite | None]


def join(weights: Mapping[str, Weight], settings: Settings) -> dict[str, Weight | Composite]:
    """All tensors of a checkpoint. Tensors that together make a quantized matrix become one entry with the matrix's name."""
    joined: dict[str, Weight | Composite] = dict(weights)
    finders = (*FINDERS, *(entry.load().find for entry in entry_points(group="trireme.schemes")))
    for base in dict.fromkeys(base for name in weights for base in _bases(name)):
        for finder in finders:
            tensors = Tensors(base, weights)
            found = finder(tensors, settings)
            if found is not None:
                for name in tensors.asked:
                    joined.pop(name, None)
                joined[found.name] = found
                break
    if len(joined) < len(weights):
        check_settings(settings)
    return {name: entry for name, entry in joined.items() if not is_of_kv(name)}  # which `Checkpoint.kv_scales` gives


def _bases(name: str) -> tuple[str, ...]:
    """The names of the matrices that this tensor may be a part of, judged by its own name."""
    return (name.removesuffix("_blocks"),) if name.endswith("_blocks") else (name.rpartition(".")[0],)


def check_settings(settings: Settings) -> None:
    """Refuses settings that change the values in ways that the tensors do not show."""
    format_name, sparsity = str(settings.get("format") or ""), settings.get("sparsity_config") or {}
    for name in _TURNED:
        if settings.get(name):
            raise UnsupportedModel(f"The weights are stored transformed ({name} in the quantization's settings).", _OTHER)
    structure = sparsity.get("format") if isinstance(sparsity, dict) else None
    if format_name == "marlin-24" or structure not in (None, "dense"):
        raise UnsupportedModel(f"The weights are stored sparse ({structure or format_name}).", _OTHER)
    if settings.get("auto_map"):
        raise UnsupportedModel("The weights can be read only by code that comes with the model, which is never run.", _OTHER)


# Weights were multiplied by an orthogonal matrix, and activations have to be too while the model runs. By compressed-tensors,
# GPTQModel, and AutoRound.
_TURNED = ("transform_config", "rotation", "rotation_config", "spinquant_config")
_OTHER = "use another quantization of the model, or the model as it was before"

# --- whole numbers in words of 32 bits --------------------------------------------------------------------------------------


def _gptq_or_awq(tensors: Tensors, settings: Settings) -> Composite | None:
    """GPTQ or AWQ: 32-bit words (`qweight`) with zeros and scales. GPTQ packs along the input, AWQ along the output."""
    if ".qweight" not in tensors:
        return None
    words, scales = tensors.kind(".qweight", "I32", "U32"), tensors.kind(".scales", "F16", "BF16", "F32")
    if len(words.shape) != 2 or len(scales.shape) != 2 or not scales.num_bytes:
        raise tensors.wrong(".qweight", f"of shape {list(words.shape)} goes with no scales of shape {list(scales.shape)}")
    groups, rows = scales.shape
    packed = tensors[".qzeros"].shape if ".qzeros" in tensors else (groups, rows * _bits_said(tensors, settings) // WORD)
    bits = packed[1] * WORD // rows if len(packed) == 2 else 0
    if bits not in (2, 3, 4, 8) or packed != (groups, rows * bits // WORD):
        raise tensors.wrong(".qzeros", f"of shape {list(packed)} fits no width of bits for {rows} rows in {groups} groups")
    if words.shape[1] == rows:
        return _gptq(tensors, settings, bits)
    if words.shape[1] * WORD == rows * bits:
        return _awq(tensors, settings, bits)
    raise tensors.wrong(".qweight", f"of shape {list(words.shape)} fits no {bits} bits of {rows} rows")


def _bits_said(tensors: Tensors, settings: Settings) -> int:
    bits = settings.get("bits")
    if type(bits) is not int or bits not in (2, 3, 4, 8):
        raise tensors.wrong(".qweight", f"has no zeros beside it, and the config says {str(bits)[:20]!r} bits")
    return bits


def _whole_groups(tensors: Tensors, suffix: str, settings: Settings, columns: int, groups: int) -> int:
    """The number of columns in each group."""
    said = settings.get("group_size")
    if type(said) is int and said > 0 and columns % said and -(-columns // said) == groups:
        raise tensors.wrong(suffix, f"has groups of {said}, which do not divide the {columns} columns")
    if not groups or columns % groups:
        raise tensors.wrong(suffix, f"has {groups} groups, which do not divide the {columns} columns")
    return columns // groups


def _gptq(tensors: Tensors, settings: Settings, bits: int) -> Composite:
    words, scales = tensors[".qweight"], tensors[".scales"]
    if words.shape[0] * WORD % bits:
        raise tensors.wrong(".qweight", f"has {words.shape[0]} words a row, which are no whole numbers of {bits} bits")
    groups, rows = scales.shape
    columns = words.shape[0] * WORD // bits
    group = _whole_groups(tensors, ".scales", settings, columns, groups)
    values, entries = (32, 3) if bits == 3 else (WORD // bits, 1)
    parts = {"codes": Part(words, Along(1), Along(0, values, entries))}
    if bits == 3 and "gptq_p" in (settings.get("checkpoint_format"), settings.get("format")):
        raise UnsupportedModel(f"The matrix {tensors.base} holds its 3 bits in planes (GPTQModel's gptq_p).", _OTHER)
    order = tensors.get(".g_idx")
    in_order = order is None or _in_order(tensors, ".g_idx", columns, groups, group)
    across = Along(0, group) if in_order else None
    parts["scales"] = Part(scales, Along(1), across)
    if ".qzeros" in tensors:
        parts["zeros"] = Part(tensors.kind(".qzeros", "I32", "U32"), Along(1, values, entries), across)
    if not in_order and order is not None:
        parts["order"] = Part(order, None, Along(0))
    of = np.arange(columns) // group if in_order or order is None else order.mapped()
    zero = "none" if ".qzeros" not in tensors else _zeros_as(words, tensors[".qzeros"], bits, of, settings)
    facts = {"zeros": zero, "ordered": not in_order, "symmetric": zero == "none" or _symmetric(tensors[".qzeros"], bits)}
    return Composite(tensors.matrix, (rows, columns), Format(f"INT{bits}", "gptq", f"GPTQ {bits} bit", bits, group, facts), parts)


def _in_order(tensors: Tensors, suffix: str, columns: int, groups: int, group: int) -> bool:
    """Whether the groups of columns follow each other without act order. Refuses an order that is not valid."""
    order = tensors.kind(suffix, "I32", "I64").mapped()
    if order.shape != (columns,):
        raise tensors.wrong(suffix, f"has shape {list(order.shape)}; the matrix has {columns} columns")
    if (order == -1).all() or np.array_equal(order, np.arange(columns) // group):
        return True
    if order.min() < 0 or order.max() >= groups:
        raise tensors.wrong(suffix, f"names the group {order.max() if order.max() >= groups else order.min()} of {groups}")
    counts = np.bincount(order, minlength=groups)
    if counts.max() > group:
        raise tensors.wrong(suffix, f"is no order of the columns: {counts.max()} of them are in group {counts.argmax()} of {group}")
    return False


def _symmetric(stored: Weight, bits: int) -> bool:
    """Whether every zero is the middle of the range (half of 2^bits), or one less."""
    words = stored.mapped()
    if bits == 3:
        zeros = _fields(words, bits)
        return bool((zeros == zeros[0]).all()) and zeros[0] in (3, 4)
    middle = 1 << (bits - 1)
    words = words.view(np.uint32)
    return any(bool((words == sum(zero << shift for shift in range(0, WORD, bits))).all()) for zero in (middle, middle - 1))


_SAMPLE = 1 << 13  # how many words are read to find out how zeros are stored


def _zeros_as(words: Weight, stored: Weight, bits: int, of: np.ndarray, settings: Settings) -> str:
    """How the zeros are stored: "plain", or "less" if the stored number is one less than the zero. The setting in the file is often
    wrong, so this looks at the values: weights have a median near 0, so the median of code - zero is near 0. The mean need not be:
    where the weights of a group lie all above 0, the zero is 0, and one less is stored as the largest number. Of 8 bits too few
    numbers are read for that, and the setting is believed.

    of: the group of each column
    """
    height = max(_SAMPLE // words.shape[1] // 3 * 3, 3)  # 32 numbers of 3 bits fill three words, so the height is a multiple of 3
    codes = _fields(words.mapped()[:height].T, bits).reshape(words.shape[1], -1)
    groups, place = np.unique(of[: codes.shape[1]], return_inverse=True)
    zeros, middle = _fields(stored.mapped()[groups], bits).reshape(len(groups), -1), 1 << (bits - 1)
    if zeros[0, 0] in (middle, middle - 1) and (zeros == zeros[0, 0]).all():
        return "plain" if zeros[0, 0] == middle else "less"
    beyond = codes - zeros.T[:, place]
    median = np.median(beyond)
    below, same = (beyond < median).mean(), (beyond == median).mean()
    if 0.1 * same * math.sqrt(beyond.size) > 0.5:  # the median of so many numbers is known to a tenth
        exact = median - 0.5 + (0.5 - below) / same
        if min(abs(exact), abs(exact - 1.0)) < 0.25:
            return "plain" if abs(exact) < 0.25 else "less"
    return "plain" if any(settings.get(name) in values for name, values in _PLAIN.items()) else "less"


_PLAIN = {  # what is said where zeros are stored as they are, by GPTQModel and AutoRound
    "checkpoint_format": ("gptq_v2", "gptq_p"),
    "format": ("gptq_v2", "gptq_p"),
    "packing_format": ("auto_round", "auto_round:gptqmodel"),
}


def _fields(words: np.ndarray, bits: int) -> np.ndarray:
    """All numbers that are packed in contiguous words, as one flat array."""
    spread = np.unpackbits(np.ascontiguousarray(words).reshape(-1).view(np.uint8), bitorder="little").reshape(-1, bits)
    return spread @ (1 << np.arange(bits))


def _awq(tensors: Tensors, settings: Settings, bits: int) -> Composite:
    if bits != 4:
        raise UnsupportedModel(f"The matrix {tensors.base} is AWQ of {bits} bits; 4 are read.", _OTHER)
    words, scales = tensors[".qweight"], tensors[".scales"]
    columns, (groups, rows) = words.shape[0], scales.shape
    group = _whole_groups(tensors, ".scales", settings, columns, groups)
    parts = {
        "codes": Part(words, Along(1, 8), Along(0)),
        "scales": Part(scales, Along(1), Along(0, group)),
        "zeros": Part(tensors.kind(".qzeros", "I32", "U32"), Along(1, 8), Along(0, group)),
    }
    return Composite(tensors.matrix, (rows, columns), Format("INT4", "awq", "AWQ 4 bit", 4, group), parts)


# --- compressed-tensors, ModelOpt, fp8 ----------------------------------------------------------------------------------------


def _packed(tensors: Tensors, settings: Settings) -> Composite | None:
    """compressed-tensors' `weight_packed`: whole numbers in words, or floats of four bits in bytes."""
    if ".weight_packed" not in tensors:
        return None
    said = _pass_over(tensors)
    packed = tensors[".weight_packed"]
    if len(packed.shape) != 2:
        raise tensors.wrong(".weight_packed", f"has shape {list(packed.shape)}, which is no matrix")
    if packed.kind == "U8":
        _refuse_bits(tensors, _named_bits(settings), {4})
        return _fp4(tensors, ".weight_packed", said)
    tensors.kind(".weight_packed", "I32")
    rows, columns = _shape_said(tensors)
    bits, values, entries = _width(tensors, settings, rows, columns)
    scales = tensors.kind(".weight_scale", "F16", "BF16", "F32")
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    tensors.shaped(".weight_scale", (rows, groups), (rows,), (1,), ())
    group = _whole_groups(tensors, ".weight_scale", settings, columns, groups)
    in_order = ".weight_g_idx" not in tensors or _in_order(tensors, ".weight_g_idx", columns, groups, group)
    across = Along(1, group) if in_order and len(scales.shape) == 2 else None
    each = None if scales.shape in ((), (1,)) else Along(0)
    parts = {
        "codes": Part(packed, Along(0), Along(1, values, entries)),
        "scales": Part(scales, each, across),
    }
    if ".weight_zero_point" in tensors:
        tensors.shaped(".weight_zero_point", (-(-rows * entries // values), groups))
        parts["zeros"] = Part(tensors.kind(".weight_zero_point", "I32"), Along(0, values, entries), across)
    if not in_order:
        parts["order"] = Part(tensors[".weight_g_idx"], None, Along(0))
    facts = {"ordered": not in_order, "symmetric": "zeros" not in parts, "dense": entries > 1} | said
    form = Format(f"INT{bits}", "words", f"compressed-tensors W{bits}A16", bits, group, facts)
    return Composite(tensors.matrix, (rows, columns), form, parts)


# How many numbers of some bits lie in how many words. Three bits: ten in a word, and from compressed-tensors 0.18 on without gaps.
_WIDTHS = ((2, 16, 1), (3, 10, 1), (3, 32, 3), (4, 8, 1), (8, 4, 1))


def _width(tensors: Tensors, settings: Settings, rows: int, columns: int) -> tuple[int, int, int]:
    """The one of `_WIDTHS` that fits the shape of the words, and that the config names if it names any. A width that is not read,
    such as 7 bits, may have the shape of one that is."""
    named, shape = _named_bits(settings), tensors[".weight_packed"].shape
    fitting = [
        width for width in _WIDTHS if shape == (rows, -(-columns * width[2] // width[1])) and (not named or width[0] in named)
    ]
    if len(fitting) == 1:
        return fitting[0]
    _refuse_bits(tensors, named, {bits for bits, _, _ in _WIDTHS})
    what = "several widths" if fitting else "no width"
    among = f" among the config's {sorted(named)}" if named else ""
    raise tensors.wrong(".weight_packed", f"of shape {list(shape)} fits {what} of bits{among} for {rows} by {columns}")


def _named_bits(settings: Settings) -> set[int]:
    """The widths that compressed-tensors' groups of layers name."""
    groups = settings.get("config_groups")
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    named = [found.get("num_bits") for found in weights if isinstance(found, dict)]
    return {bits for bits in named if isinstance(bits, int)}


def _refuse_bits(tensors: Tensors, named: set[int], read: set[int]) -> None:
    """Refuses a matrix of a checkpoint that names none of the widths that are read."""
    if named and not named & read:
        raise UnsupportedModel(f"The matrix {tensors.base} is stored in {' or '.join(map(str, sorted(named)))} bits.", _OTHER)


def _shape_said(tensors: Tensors) -> tuple[int, int]:
    said = tensors.kind(".weight_shape", "I64", "I32").mapped().reshape(-1)
    if len(said) != 2 or said.min() < 1 or said.max() >= 1 << 31:
        raise tensors.wrong(".weight_shape", f"says {said.tolist()[:4]}, which is the shape of no matrix")
    return int(said[0]), int(said[1])


def _fp4(tensors: Tensors, codes: str, said: dict[str, Any]) -> Composite:
    """Floats of four bits, two in a byte. The scales are powers of two (MXFP4), or fp8 numbers times one scale of the whole matrix
    (NVFP4)."""
    packed, scales = tensors[codes], tensors[".weight_scale"]
    rows, columns = packed.shape[0], packed.shape[1] * 2
    group = 32 if scales.kind in ("U8", "F8_E8M0") else 16
    if columns % group:
        raise tensors.wrong(codes, f"has {columns} columns, which groups of {group} do not divide")
    tensors.shaped(".weight_scale", (rows, columns // group))
    parts = {"codes": Part(packed, Along(0), Along(1, 2)), "scales": Part(scales, Along(0), Along(1, group))}
    if group == 32:
        return Composite(tensors.matrix, (rows, columns), Format("MXFP4", "fp4", "MXFP4", 4, 32, said), parts)
    tensors.kind(".weight_scale", "F8_E4M3")
    divides = ".weight_global_scale" in tensors  # compressed-tensors stores a divisor, ModelOpt a factor
    whole = tensors.shaped(".weight_global_scale" if divides else ".weight_scale_2", (), (1,))
    parts["global"] = Part(whole)
    return Composite(tensors.matrix, (rows, columns), Format("NVFP4", "fp4", "NVFP4", 4, 16, {"divides": divides} | said), parts)


_FLOATS = ("F32", "BF16", "F16")
_POWERS = ("F8_E8M0", "U8")  # kinds of scales that are powers of two, in fp8 beside floats of eight bits alone
# Tensors beside a matrix that say how to quantize activations. They are not used: activations of eight bits get a scale for each
# token, which is as fine or finer and cuts nothing off, and none are quantized to four bits.
_OF_ACTIVATIONS = (".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale")


def _pass_over(tensors: Tensors) -> dict[str, Any]:
    """Takes the tensors that are not used out of the checkpoint; the facts to say of them."""
    tensors.get(".weight_format")
    found = [suffix for suffix in _OF_ACTIVATIONS if suffix in tensors]
    return {"inputs": True} if found else {}


def _bytes(tensors: Tensors, settings: Settings) -> Composite | None:
    """A `weight` of bytes with scales: the fp8 and int8 formats of several tools, and ModelOpt's floats of four bits."""
    weight = tensors.get(".weight")
    if weight is None or len(weight.shape) != 2 or weight.kind not in ("F8_E4M3", "F8_E5M2", "I8", "U8"):
        return None
    said = _pass_over(tensors)
    if weight.kind == "U8":
        return _fp4(tensors, ".weight", said) if ".weight_scale_2" in tensors else None
    if ".SCB" in tensors:
        scale = tensors.kind(".SCB", "F32")
        tensors.shaped(".SCB", (weight.shape[0],))
        if ".weight_format" in tensors and np.any(tensors[".weight_format"].mapped()):
            raise UnsupportedModel(f"The matrix {tensors.base} is stored in tiles (bitsandbytes' weight_format).", _OTHER)
        parts = {"codes": Part(weight, Along(0), Along(1)), "scales": Part(scale, Along(0))}
        return Composite(tensors.matrix, weight.shape, Format("I8C", "bytes", "bitsandbytes int8", 8, 0, {"over": 127.0}), parts)
    suffix = next((s for s in (".weight_scale", ".weight_scale_inv") if s in tensors), None)
    if suffix is None:
        return None
    form, scale_part = _scaled(tensors, weight, suffix, settings)
    parts = {"codes": Part(weight, Along(0), Along(1)), "scales": scale_part}
    if ".weight_zero_point" in tensors and np.any(tensors[".weight_zero_point"].mapped()):
        raise UnsupportedModel(f"The matrix {tensors.base} is stored in bytes with zero points.", _OTHER)
    return Composite(tensors.matrix, weight.shape, replace(form, facts={**form.facts, **said}), parts)


def _scaled(tensors: Tensors, weight: Weight, suffix: str, settings: Settings) -> tuple[Format, Part]:
    """What one scale of the bytes covers: the whole matrix, a row, a group of columns of a row, or a block."""
    whole_numbers = weight.kind == "I8"
    (rows, columns), scale = weight.shape, tensors.kind(suffix, *_FLOATS, *(() if whole_numbers else _POWERS))
    title = "int8" if whole_numbers else "fp8"
    if len(scale.shape) == 4 and scale.shape[1::2] == (1, 1):  # blocks by ModelOpt: [n, 1, m, 1]
        scale = scale.reshaped(*scale.shape[::2])
    if scale.shape in ((), (1,), (1, 1)):
        kind, group, part, title = "T", 0, Part(scale), f"{title}, one scale"
    elif scale.shape in ((rows,), (rows, 1)):
        kind, group, part, title = "C", 0, Part(scale, Along(0)), f"{title}, a scale for each row"
    elif len(scale.shape) == 2 and scale.shape[0] == rows and columns % scale.shape[1] == 0:
        group = columns // scale.shape[1]
        kind, part = "G", Part(scale, Along(0), Along(1, group))
        title = f"{title}, groups of {group}"
    else:
        high, wide = _block(tensors, suffix, (rows, columns), scale.shape, settings)
        title = f"{title}, blocks of {high} by {wide}"
        form = Format("I8B" if whole_numbers else "F8B", "bytes", title, 8, wide, {"block": high})
        return form, Part(scale, Along(0, high), Along(1, wide))
    if whole_numbers:
        kind = "INT8" if kind == "G" else "I8C"
    else:
        kind = "F8" + kind
    return Format(kind, "bytes", title, 8, group), part


def _block(tensors: Tensors, suffix: str, shape: tuple[int, int], scales: tuple[int, ...], settings: Settings) -> tuple[int, int]:
    """(rows, columns) of a block: the config's, if it fits the stored scales; else the common size that fits."""
    said = settings.get("weight_block_size")
    sizes = [tuple(said)] if isinstance(said, list) and len(said) == 2 and all(type(n) is int and n > 0 for n in said) else []
    for high, wide in (*sizes, (128, 128), (64, 64), (32, 32)):
        if scales == (-(-shape[0] // high), -(-shape[1] // wide)):
            return high, wide
    raise tensors.wrong(suffix, f"of shape {list(scales)} fits no blocks of a matrix of {shape[0]} by {shape[1]}")


# --- gpt-oss, bitsandbytes ------------------------------------------------------------------------------------------------------


def _blocks(tensors: Tensors, settings: Settings) -> Composite | None:
    """gpt-oss' `_blocks` and `_scales`: stacks of matrices, 16 bytes for each 32 columns."""
    if "_blocks" not in tensors:
        return None
    blocks, scales = tensors.kind("_blocks", "U8"), tensors.kind("_scales", "U8", "F8_E8M0")
    if len(blocks.shape) not in (3, 4) or blocks.shape[-1] != 16:
        raise tensors.wrong("_blocks", f"has shape {list(blocks.shape)}, where blocks of 16 bytes are expected")
    tensors.shaped("_scales", blocks.shape[:-1])
    parts = {"codes": Part(blocks, Along(0), Along(1, 32)), "scales": Part(scales, Along(0), Along(1, 32))}
    shape = (*blocks.shape[:-2], blocks.shape[-2] * 32)
    return Composite(tensors.base, shape, Format("MXFP4", "fp4", "MXFP4", 4, 32), parts)


_STATE = ".weight.quant_state.bitsandbytes__"


def _bitsandbytes(tensors: Tensors, settings: Settings) -> Composite | None:
    """bitsandbytes: two 4-bit codes in a byte, row after row, with a scale for each run of values. The scales may be quantized
    to bytes, which then have scales of their own.
    """
    found = next((kind for kind in ("nf4", "fp4") if _STATE + kind in tensors), None)
    if found is None:
        return None
    state = _state(tensors, _STATE + found)
    rows, columns = int(state["shape"][0]), int(state["shape"][1])
    run = int(state["blocksize"])
    codes = tensors.kind(".weight", "U8", *_FLOATS)  # bytes that may be called another type, for tools that split no bytes
    if codes.num_bytes * 2 != rows * columns:
        raise tensors.wrong(".weight", f"has {codes.num_bytes} bytes, which are not the {rows} by {columns} codes promised")
    if columns % run:
        raise UnsupportedModel(f"The matrix {tensors.base} has {columns} columns; runs of {run} do not divide them.", _OTHER)
    scales = tensors[".weight.absmax"]
    tensors.shaped(".weight.absmax", (rows * columns // run,))
    tensors.shaped(".weight.quant_map", (16,))
    parts = {
        "codes": Part(Weight(codes.name, "U8", codes.mapped().view(np.uint8).reshape(rows, columns // 2)), Along(0), Along(1, 2)),
        "scales": Part(scales.reshaped(rows, columns // run), Along(0), Along(1, run)),
        "table": Part(tensors[".weight.quant_map"]),
    }
    facts: dict[str, Any] = {}
    if scales.kind == "U8":
        nested = state.get("nested_blocksize")
        if type(nested) is not int or nested < 1 or not isinstance(state.get("nested_offset"), float | int):
            raise tensors.wrong(_STATE + found, "does not say how its scales are scaled")
        parts |= {
            "nested": Part(tensors.shaped(".weight.nested_absmax", (math.ceil(rows * columns / run / nested),))),
            "nested_table": Part(tensors.shaped(".weight.nested_quant_map", (256,))),
        }
        facts = {"nested": nested, "nested_offset": float(state["nested_offset"]), "per_row": columns // run}
    kind = "NF4" if found == "nf4" else "FP4"
    return Composite(tensors.matrix, (rows, columns), Format(kind, "table", f"bitsandbytes {kind}", 4, run, facts), parts)


def _state(tensors: Tensors, suffix: str) -> dict[str, Any]:
    try:
        state = json.loads(tensors.kind(suffix, "U8").raw().tobytes())
        shape, run = state["shape"], state["blocksize"]
        if len(shape) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in shape) and type(run) is int and run in _RUNS:
            return state
    except (ValueError, KeyError, TypeError):
        pass
    raise tensors.wrong(suffix, "does not say the shape and the runs of its matrix")


_RUNS = (32, 64, 128, 256, 512, 1024, 2048, 4096)

FINDERS: tuple[Finder, ...] = (_gptq_or_awq, _packed, _bitsandbytes, _bytes, _blocks)
