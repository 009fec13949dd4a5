"""Records small quantized matrices as the libraries that publish them write them, with the values that the libraries say they mean.

    python tools/made_formats.py tests/quant/made [word ...]

writes a file for each case (or for those whose name holds a word). It is run by hand in an environment of its own, with

    torch 2.13.0, transformers 5.22.2, compressed-tensors 0.20.0, bitsandbytes 0.50.2, auto-round 0.16.1, nvidia-modelopt 0.47.0,
    auto-gptq 0.7.1, autoawq 0.2.9 and gptqmodel 7.7.0

all but the first two installed with `--no-deps`; autoawq and gptqmodel may also be unpacked sources on PYTHONPATH.
compressed-tensors changed how it writes: with 0.14.0.1 on PYTHONPATH the cases named `before` are written, and no others. A library
that is missing is said, and its cases are left. `tests/quant/test_made.py` reads the files.

A file holds the tensors as published (`layer.weight_packed` ...) and `values`, of a high matrix the last rows of them; its
metadata `made` the library, its version, and the settings that belong to a checkpoint's config.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

Made = tuple[dict[str, Tensor], Tensor, dict[str, Any]]  # tensors by the end of their names, values, settings
CASES: dict[str, tuple[str, Callable[[], Made]]] = {}


def weight(rows: int, columns: int) -> Tensor:
    """Weights around nothing, but for some groups that lie wholly above or below it, where zeros reach the ends of their range."""
    random = torch.Generator().manual_seed(rows * columns)
    drawn = torch.randn(rows, columns, generator=random) * 0.05
    drawn[::5, : columns // 4] += 0.3
    drawn[2::7, columns // 2 :] -= 0.3
    return drawn


def linear(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False)
    layer.weight = nn.Parameter(weight(rows, columns).to(dtype), requires_grad=False)
    return layer.to(dtype)


def grid(values: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """(scales, zeros) [rows, groups] of whole numbers from 0 on, by the largest and smallest value of each group."""
    by_group, top = values.float().view(len(values), -1, group), (1 << bits) - 1
    if symmetric:
        scales = by_group.abs().amax(-1) * 2 / top
        return scales.half().float(), torch.full_like(scales, float(1 << (bits - 1)))
    low, high = by_group.amin(-1).clamp(max=0), by_group.amax(-1).clamp(min=0)
    scales = ((high - low) / top).half().float()
    return scales, (-low / scales).round().clamp(0, top)


def case(name: str, library: str, make: Callable[[], Made]) -> None:
    CASES[name] = (library, make)


# --- compressed-tensors -------------------------------------------------------------------------------------------------------


def compressed(rows: int, columns: int, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> Made:
    """Its own compressor on a layer whose scales follow the library's formula, then its own decompressor."""
    from compressed_tensors.compressors import compress_module, decompress_module
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, initialize_module_for_quantization
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    layer = linear(rows, columns, torch.bfloat16)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=QuantizationArgs(**activations) if activations else None,
    )
    initialize_module_for_quantization(layer, scheme)
    values, args = layer.weight.data, scheme.weights
    if args.strategy == "tensor":
        low, high = values.amin(), values.amax()
    elif args.strategy == "channel":
        low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    elif args.strategy == "block":
        high_, wide = args.block_structure
        padded = nn.functional.pad(values, (0, -columns % wide, 0, -rows % high_))
        blocks = padded.view(padded.shape[0] // high_, high_, -1, wide)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        by_group = values.view(rows, -1, args.group_size)
        low, high = by_group.amin(-1), by_group.amax(-1)
    whole = generate_gparam(values.amin().float(), values.amax().float()) if args.strategy == "tensor_group" else None
    scale, zero = calculate_qparams(low, high, args, global_scale=whole)
    found = {"weight_scale": scale, "weight_zero_point": zero, "weight_global_scale": whole, "input_scale": torch.tensor(0.02)}
    for name, value in found.items():
        if hasattr(layer, name) and value is not None:
            slot = getattr(layer, name)
            slot.data = value.reshape(slot.shape).to(slot.dtype)
    compress_module(layer)
    tensors = {f".{name}": value.detach().clone() for name, value in layer.state_dict().items()}
    decompress_module(layer)
    described = {"weights": scheme.weights.model_dump(mode="json")}
    settings = {"quant_method": "compressed-tensors", "format": scheme.format.value, "config_groups": {"group_0": described}}
    return tensors, layer.weight.data, settings


INT = {"type": "int"}
FLOAT = {"type": "float"}
for bits, group in ((4, 32), (4, 64), (8, 32), (3, 32), (2, 32)):
    for symmetric in (True, False)[group // 64 :]:
        said = {**INT, "num_bits": bits, "strategy": "group", "group_size": group, "symmetric": symmetric}
        name = f"compressed-tensors w{bits} group {group} {'sym' if symmetric else 'asym'}"
        case(name, "compressed-tensors", lambda said=said: compressed(32, 64, said))
for bits in (4, 8):
    said = {**INT, "num_bits": bits, "strategy": "channel", "symmetric": bits == 8}
    case(f"compressed-tensors w{bits} channel", "compressed-tensors", lambda said=said: compressed(32, 52, said))
TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
GIVEN = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
BY_ROW = {"num_bits": 8, "strategy": "channel"}
BY_16 = {**FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
BY_32 = {**FLOAT, "num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
COMPRESSED: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "w8a8 int channel": ({**INT, **BY_ROW}, {**INT, **TOKEN}),
    "w8a8 int tensor given": ({**INT, "num_bits": 8, "strategy": "tensor"}, {**INT, **GIVEN}),
    "fp8 tensor given": ({**FLOAT, "num_bits": 8, "strategy": "tensor"}, {**FLOAT, **GIVEN}),
    "fp8 channel": ({**FLOAT, **BY_ROW}, {**FLOAT, **TOKEN}),
    "nvfp4": (BY_16, None),
    "mxfp4": (BY_32, None),
    "mxfp8": ({**BY_32, "num_bits": 8}, None),
    "mxfp6": ({**BY_32, "num_bits": 6}, None),
}
for name, (weights, activations) in COMPRESSED.items():
    made = lambda weights=weights, activations=activations: compressed(16, 64, weights, activations)  # noqa: E731
    case(f"compressed-tensors {name}", "compressed-tensors", made)
BLOCKS = {**FLOAT, "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}
case("compressed-tensors fp8 block", "compressed-tensors", lambda: compressed(130, 132, BLOCKS, {**FLOAT, **TOKEN}))


def compressed_before(bits: int, symmetric: bool, order: str | None) -> Made:
    """compressed-tensors 0.14.0.1: three bits lie ten in a word, and an order of columns is a tensor."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    values, group = weight(32, 64).bfloat16(), 32
    said = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric, "actorder": order}
    args = QuantizationArgs(**said)
    of = torch.arange(64) // group
    if order == "group":
        of = of[torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    by_group = values[:, of.argsort(stable=True)].view(32, -1, group)
    scale, zero = calculate_qparams(by_group.amin(-1), by_group.amax(-1), args)
    state = {"layer.weight": values, "layer.weight_scale": scale.bfloat16(), "layer.weight_zero_point": zero}
    if order == "group":
        state["layer.weight_g_idx"] = of.int()
    compressor = PackedQuantizationCompressor()
    packed = compressor.compress(state, names_to_scheme={"layer": SimpleNamespace(weights=args)}, show_progress=False)
    tensors = {name.removeprefix("layer"): value for name, value in packed.items()}
    local = {name.removeprefix("layer."): value for name, value in packed.items()}
    meant = compressor.decompress_weight(dict(local), quantization_args=args)
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {"weights": said}}}
    return tensors, meant, settings


for bits, symmetric, order in ((4, True, "group"), (4, False, "group"), (3, True, None), (3, False, None)):
    ordered = f" order by {order}" if order else ""
    name = f"compressed-tensors before w{bits} {'sym' if symmetric else 'asym'}{ordered}"
    made = lambda bits=bits, symmetric=symmetric, order=order: compressed_before(bits, symmetric, order)  # noqa: E731
    case(name, "compressed-tensors", made)
case("compressed-tensors before w7 sym", "compressed-tensors", lambda: compressed_before(7, True, None))

# --- bitsandbytes -------------------------------------------------------------------------------------------------------------


BF16 = torch.bfloat16


def four_bits(
    kind: str, nested: bool, run: int, dtype: torch.dtype, shape: tuple[int, int] = (32, 64), storage: torch.dtype = torch.uint8
) -> Made:
    import bitsandbytes.functional as bnb

    values = weight(*shape).to(dtype)
    packed, state = bnb.quantize_4bit(values, blocksize=run, compress_statistics=nested, quant_type=kind, quant_storage=storage)
    tensors = {".weight": packed} | {f".weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    return tensors, bnb.dequantize_4bit(packed, state), {"quant_method": "bitsandbytes", "load_in_4bit": True}


for kind in ("nf4", "fp4"):
    for nested in (True, False):
        name = f"bitsandbytes {kind} {'nested' if nested else 'plain'}"
        made = lambda kind=kind, nested=nested: four_bits(kind, nested, 64, torch.bfloat16)  # noqa: E731
        case(name, "bitsandbytes", made)
TWO_RUNS = (68, 256)  # more runs of 64 than the 256 that share a scale
case("bitsandbytes nf4 nested twice", "bitsandbytes", lambda: four_bits("nf4", True, 64, torch.bfloat16, TWO_RUNS))
case("bitsandbytes nf4 called bfloat16", "bitsandbytes", lambda: four_bits("nf4", False, 64, BF16, storage=BF16))
case("bitsandbytes nf4 runs of 128", "bitsandbytes", lambda: four_bits("nf4", False, 128, torch.float16, (16, 128)))


def eight_bits() -> Made:
    import bitsandbytes.functional as bnb

    codes, most, _ = bnb.int8_vectorwise_quant(weight(16, 64).half())
    tensors = {".weight": codes, ".SCB": most, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, bnb.int8_vectorwise_dequant(codes, most), {"quant_method": "bitsandbytes", "load_in_8bit": True}


case("bitsandbytes int8", "bitsandbytes", eight_bits)

# --- GPTQ: gptqmodel and auto-gptq ----------------------------------------------------------------------------------------------


def gptqmodel(bits: int, group: int, symmetric: bool, ordered: bool, form: str) -> Made:
    """form: gptq (version 1), gptq_v2, or gptq_p, where three bits lie in planes."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import FORMAT
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    layer = linear(32, 64)
    size = 64 if group == -1 else group
    of = torch.arange(64) // size
    if ordered:
        of = of[torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    scales, zeros = grid(layer.weight.data[:, of.argsort(stable=True)], bits, size, symmetric)
    packed = TorchLinear(bits, group, symmetric, ordered, 64, 32, bias=False, format=FORMAT(form))
    packed.pack_original(layer, scales, zeros, of.int())
    packed.post_init()
    packed.eval()
    meant = packed.dequantize_weight().t().contiguous()
    if form == "gptq":
        convert_gptq_v2_to_v1_format_module(packed, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
    names = ("qweight", "qzeros", "scales", "g_idx")
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": ordered}
    return {f".{name}": getattr(packed, name) for name in names}, meant, settings | {"checkpoint_format": form}


for bits in (2, 3, 4, 8):
    if bits in (3, 4):
        case(f"gptqmodel {bits} bit sym", "gptqmodel", lambda bits=bits: gptqmodel(bits, 32, True, False, "gptq"))
    for form in ("gptq",) if bits == 2 else ("gptq", "gptq_v2"):
        made = lambda bits=bits, form=form: gptqmodel(bits, 32, False, False, form)  # noqa: E731
        case(f"gptqmodel {bits} bit asym {form}", "gptqmodel", made)
case("gptqmodel 4 bit in an order", "gptqmodel", lambda: gptqmodel(4, 16, False, True, "gptq"))
case("gptqmodel 4 bit whole columns", "gptqmodel", lambda: gptqmodel(4, -1, True, False, "gptq"))
case("gptqmodel 3 bit in planes", "gptqmodel", lambda: gptqmodel(3, 32, True, False, "gptq_p"))
case("gptqmodel 4 bit in planes", "gptqmodel", lambda: gptqmodel(4, 32, False, False, "gptq_p"))


def auto_gptq(bits: int, group: int, symmetric: bool) -> Made:
    """Its layer alone, by its file: the package as a whole needs an older transformers."""
    root = pathlib.Path(str(importlib.metadata.distribution("auto-gptq").locate_file("auto_gptq")))
    spec = importlib.util.spec_from_file_location("qlinear", root / "nn_modules/qlinear/qlinear_cuda_old.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    layer = linear(32, 64)
    scales, zeros = grid(layer.weight.data, bits, 64 if group == -1 else group, symmetric)
    packed = module.QuantLinear(bits, group, 64, 32, bias=False, weight_dtype=torch.float32)
    packed.pack(layer, scales, zeros.clamp(min=1), None)  # it writes a zero of 0 over the zeros beside it
    packed.scales = packed.scales.half()
    meant = packed(torch.eye(64).half()).t().contiguous()
    tensors = {f".{name}": getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False}
    return tensors, meant, settings


for bits in (3, 4, 8):
    case(f"auto-gptq {bits} bit asym", "auto-gptq", lambda bits=bits: auto_gptq(bits, 32, False))

# --- AWQ, AutoRound -----------------------------------------------------------------------------------------------------------


def autoawq(group: int) -> Made:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    layer, size = linear(32, 64), 64 if group == -1 else group
    scales, zeros = grid(layer.weight.data, 4, size, False)
    rounded = (layer.weight.data.view(32, -1, size) / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    layer.weight.data = ((rounded.clamp(0, 15) - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).view(32, 64)  # as its quantizer does
    packed = WQLinear_GEMM.from_linear(layer, 4, size, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
    tensors = {f".{name}": getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    meant = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, size).t().contiguous()
    return tensors, meant, {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}


for group in (32, -1):
    case(f"autoawq groups of {group}", "autoawq", lambda group=group: autoawq(group))


def auto_round(bits: int, symmetric: bool, packing: str) -> Made:
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    layer = linear(32, 64)
    scales, zeros = grid(layer.weight.data, bits, 32, symmetric)
    if bits == 3:
        zeros = zeros.clamp(min=1)  # it lets a zero of 0 borrow from the zero beside it, which its own reader does not give back
    settings = {"quant_method": "auto-round", "packing_format": packing, "bits": bits, "group_size": 32, "sym": symmetric}
    zero = 1 << (bits - 1) if symmetric else zeros
    if packing == "auto_round:auto_awq":
        from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm

        turned = zero if isinstance(zero, int) else zero.t().contiguous()
        awq = WQLinear_GEMM.from_linear(layer, bits, 32, scales=scales.t().contiguous(), zeros=turned, device="cpu")
        tensors = {f".{name}": getattr(awq, name) for name in ("qweight", "qzeros", "scales")}
        return tensors, dequantize_gemm(awq.qweight, awq.qzeros, awq.scales, bits, 32).t().contiguous(), settings
    module = qlinear_torch_zp if packing == "auto_round:auto_gptq" else qlinear_torch
    packed = module.QuantLinear(bits, 32, 64, 32, bias=False)
    packed.device = "cpu"
    packed.pack(layer, scales, zero, None, device="cpu")
    packed.post_init()
    tensors = {f".{name}": getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    return tensors, packed(torch.eye(64).half()).t().contiguous(), settings


for packing in ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:gptqmodel"):
    for bits, symmetric in ((4, True), (4, False), (3, False), (8, False)):
        if "auto_gptq" in packing or (bits, symmetric) == (4, False) or (bits == 8 and "gptqmodel" in packing):
            name = f"{packing.replace(':', ' ')} {bits} bit {'sym' if symmetric else 'asym'}"
            made = lambda bits=bits, symmetric=symmetric, packing=packing: auto_round(bits, symmetric, packing)  # noqa: E731
            case(name, "auto-round", made)

# --- transformers -------------------------------------------------------------------------------------------------------------


def transformers_fp8(block: list[int] | None, scale_format: str = "float") -> Made:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    said = {"weight_block_size": block, "scale_fmt": scale_format}
    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(**said))
    made = Fp8Quantize(quantizer)._quantize_one("layer.weight", weight(32, 64))
    tensors = {name.removeprefix("layer"): value for name, value in made.items()}
    meant = Fp8Dequantize(quantizer)._dequantize_one(tensors[".weight"], tensors[".weight_scale_inv"], torch.bfloat16)
    return tensors, meant, {"quant_method": "fp8", "weight_block_size": block}


case("transformers fp8 blocks", "transformers", lambda: transformers_fp8([16, 32]))
case("transformers fp8 whole", "transformers", lambda: transformers_fp8(None))
case("transformers fp8 powers of two", "transformers", lambda: transformers_fp8([16, 32], "ue8m0"))


def transformers_mxfp4() -> Made:
    """gpt-oss' blocks, of which transformers has the reader. It turns each matrix."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (2, 16, 2, 16), dtype=torch.uint8, generator=random)
    scales = torch.randint(110, 126, (2, 16, 2), dtype=torch.uint8, generator=random)
    meant = convert_moe_packed_tensors(blocks, scales).transpose(1, 2).contiguous()
    return {"_blocks": blocks, "_scales": scales}, meant, {"quant_method": "mxfp4"}


case("transformers mxfp4", "transformers", transformers_mxfp4)

# --- ModelOpt -----------------------------------------------------------------------------------------------------------------


def modelopt(kind: str) -> Made:
    """A layer quantized and exported by its own code, and dequantized by its own tensors."""
    import modelopt.torch.quantization as quantization
    from modelopt.torch.export.unified_export_hf import _export_quantized_weight
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    config = {
        "fp8": quantization.FP8_DEFAULT_CFG,
        "fp8 rows": quantization.FP8_PER_CHANNEL_PER_TOKEN_CFG,
        "fp8 blocks": quantization.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
        "nvfp4": quantization.NVFP4_DEFAULT_CFG,
    }[kind]
    rows, columns = 16, 256 if kind == "fp8 blocks" else 64
    model = nn.Sequential(linear(rows, columns, torch.bfloat16))
    inputs = torch.randn(8, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    quantization.quantize(model, config, lambda model: model(inputs))
    layer = model[0]
    _export_quantized_weight(layer, torch.bfloat16)
    tensors = {f".{name}": value.detach().clone() for name, value in layer.state_dict().items() if "quantizer" not in name}
    settings = {"quant_method": "modelopt", "quant_algo": kind.upper()}
    shape, scale = torch.Size((rows, columns)), tensors[".weight_scale"]
    if kind == "nvfp4":
        stored = NVFP4QTensor(shape, torch.float32, tensors[".weight"])
        by_scales = {"scale": scale, "double_scale": tensors[".weight_scale_2"]}
        return tensors, stored.dequantize(dtype=torch.float32, block_sizes={-1: 16}, **by_scales), settings
    plain = FP8QTensor(shape, torch.float32, tensors[".weight"])
    if kind == "fp8 blocks":
        return tensors, plain.dequantize(scale=scale.reshape(1, 2), block_sizes={0: 128, 1: 128})[:16], settings
    return tensors, plain.dequantize(scale=scale.unsqueeze(1) if kind == "fp8 rows" else scale), settings


for kind in ("fp8", "fp8 rows", "fp8 blocks", "nvfp4"):
    case(f"modelopt {kind}", "nvidia-modelopt", lambda kind=kind: modelopt(kind))

# ------------------------------------------------------------------------------------------------------------------------------


def write(folder: pathlib.Path, name: str) -> str:
    library, make = CASES[name]
    version = importlib.metadata.version(library)
    old = library == "compressed-tensors" and version == "0.14.0.1"
    if ("before" in name) != old:
        return "left: written with another version of its library"
    tensors, values, settings = make()
    held = {"layer" + end: value.detach().clone(memory_format=torch.contiguous_format) for end, value in tensors.items()}
    made = json.dumps({"library": library, "version": version, "settings": settings}, default=str)
    values = values if values.dim() > 2 or len(values) <= 64 else values[-16:]
    held["values"] = values.detach().clone(memory_format=torch.contiguous_format)
    file = folder / f"{name.replace(' ', '-')}.safetensors"
    save_file(held, file, metadata={"made": made})  # one entry, as several are written in no order
    return f"{library} {version}, {file.stat().st_size} bytes"


def main(folder: str, *words: str) -> None:
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    for name in CASES:
        if words and not any(word in name for word in words):
            continue
        try:
            print(f"{name}: {write(pathlib.Path(folder), name)}")
        except ImportError as error:
            print(f"{name}: left, {error}")


if __name__ == "__main__":
    with torch.no_grad():
        main(*sys.argv[1:])
