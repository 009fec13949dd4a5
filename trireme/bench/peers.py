"""This engine beside its peers on one machine: each in a process and an environment of its own, asked in turns.

Prints tokens per second and ratios. Knows how to start and ask an engine; what the engines do is in peer_scripts.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import msgspec
from rich.console import Console

from trireme.bench.choices import INSTALL, MEASURES, UNWANTED
from trireme.bench.peer_files import float_folder, requantized
from trireme.config import cache_folder
from trireme.errors import BadConfig, TriremeError, WorkerDied
from trireme.hub.resolve import resolve_model

SCRIPTS = pathlib.Path(__file__).parent / "peer_scripts"
PATIENCE = 1800.0  # seconds allowed for making an environment


@dataclass
class Peer:
    """One engine with one form of the weights. Peers with the same `bits` are compared."""

    name: str
    bits: str
    environment: str
    model: pathlib.Path
    arguments: list[str] = field(default_factory=list)
    fallback: list[str] = field(default_factory=list)  # more arguments, used if the engine dies without them


class Figures(msgspec.Struct, kw_only=True):
    """The measurements of one peer. Tokens per second are medians over the rounds."""

    name: str
    bits: str
    note: str = ""
    start_seconds: float = 0.0  # from the command line to the first token
    peak_bytes: int = 0
    tokens_per_second: dict[str, float] = {}
    tokens_per_cpu_second: dict[str, float] = {}  # other programs on the machine disturb this figure least


def run(args: argparse.Namespace) -> int:
    console, model = Console(stderr=True), resolve_model(args.model)
    named = dict(_pair(text) for text in args.env)
    peers = []
    for engine in args.engines:
        try:
            environment = named.get(engine) or _environment(engine, console)
            peers += _forms(engine, environment, model, console)
        except TriremeError as error:
            console.print(f"{engine} is left out: {error}")
    # If no other engine computes with floats, there is nothing to compare them with, and they only take memory.
    if not any(peer.bits == "32" for peer in peers if peer.environment):
        peers = [peer for peer in peers if peer.bits != "32"]
    figures = measure(peers, args.measures, args.threads, args.rounds, console)
    _print(figures, args.measures)
    if args.json:
        pathlib.Path(args.json).write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1))
    if args.plot:
        _plot(figures, args.measures, args.plot)
    return 0


def _pair(text: str) -> tuple[str, str]:
    engine, found, folder = text.partition("=")
    if not found or engine not in INSTALL:
        raise BadConfig(f"--env {text!r} names no engine and folder.", f"use one of {', '.join(INSTALL)} = a folder")
    return engine, folder


# --- environments and forms of the model -----------------------------------------------------------------------------------------


def _environment(engine: str, console: Console) -> str:
    """Returns the folder of an engine's virtual environment. Creates and fills it if it does not exist."""
    if engine == "trireme":
        return ""
    folder = cache_folder() / "peers" / engine
    done = folder / "installed"
    if not done.exists():
        packages = " ".join(INSTALL[engine])
        if sys.stdin.isatty() and input(f"Fetch {packages} into {folder}, which may take gigabytes and minutes? [y/N] ") != "y":
            raise BadConfig(f"{packages} was not wanted.", "name an environment of your own with --env")
        console.print(f"installing {packages} in {folder} (some are compiled: minutes)")
        _call([sys.executable, "-m", "venv", "--clear", str(folder)], engine)
        pip = [str(folder / "bin" / "python"), "-m", "pip"]
        _call([*pip, "install", "--quiet", *INSTALL[engine]], engine)
        if engine in UNWANTED:
            _call([*pip, "uninstall", "--quiet", "--yes", *UNWANTED[engine]], engine)
        done.touch()
    return str(folder)


def _call(command: list[str], engine: str) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise WorkerDied(f"{engine} could not be installed in {PATIENCE:.0f} s.", "install it and name it with --env") from None
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()
        last = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no reason given")
        raise WorkerDied(f"{engine} could not be installed ({last[:200]}).", "install it and name it with --env")


def _forms(engine: str, environment: str, model: pathlib.Path, console: Console) -> list[Peer]:
    """Makes the weights in every form that an engine is measured with."""
    files = cache_folder() / "peers" / "files" / model.stem
    if not files.exists():
        console.print(f"writing the forms of {model.stem} that peers read (once; minutes for a large model)")
    if engine in ("vllm", "transformers"):
        folder = float_folder(model, files / "float32")
        rounded = [Peer("vllm bf16", "16", environment, folder, ["bfloat16"])] if engine == "vllm" else []
        return [Peer(f"{engine} fp32", "32", environment, folder, ["float32"]), *rounded]
    if model.suffix != ".gguf":
        raise BadConfig(f"{model} is no GGUF file.", "use --model with one")
    four, eight = (requantized(model, kind, files / f"{kind}.gguf") for kind in ("Q4_0", "Q8_0"))
    if engine == "llamacpp":
        forms = {"as shipped": ("4", model), "Q4_0": ("4", four), "Q8_0": ("8", eight)}
        return [Peer(f"llama.cpp {name}", bits, environment, path, [], ["plain"]) for name, (bits, path) in forms.items()]
    return [
        Peer("trireme as shipped", "4", "", model, ["auto"]),
        Peer("trireme Q4_0", "4", "", four, ["auto"]),
        Peer("trireme int8", "8", "", model, ["int8"]),
        Peer("trireme fp32", "32", "", model, ["none"]),
    ]


# --- asking ----------------------------------------------------------------------------------------------------------------------


class Running:
    """A peer's process."""

    def __init__(self, peer: Peer, threads: int, log: pathlib.Path, more: list[str]):
        python = str(pathlib.Path(peer.environment) / "bin" / "python") if peer.environment else sys.executable
        engine = peer.name.partition(" ")[0].replace(".", "")
        command = [python, str(SCRIPTS / f"with_{engine}.py"), str(peer.model), str(threads), *peer.arguments, *more]
        self.name, self.log, begun = peer.name, log, time.perf_counter()
        with log.open("wb") as errors:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            self._answer()
        except TriremeError:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - begun

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            last = self.log.read_text(errors="replace").strip().rpartition("\n")[2][:200]
            raise WorkerDied(
                f"{self.name} ended with {self.process.wait()}: {last or 'it said nothing'}.", "run its script by hand"
            )
        return json.loads(line)

    def ask(self, measure: str) -> dict[str, float]:
        streams, prompt, steps = MEASURES[measure]
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"streams": streams, "prompt": prompt, "steps": steps}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def measure(peers: list[Peer], measures: list[str], threads: int, rounds: int, console: Console) -> list[Figures]:
    """Starts all peers and then asks them in turns. The first round of questions only warms them up."""
    with tempfile.TemporaryDirectory(prefix="trireme-") as folder, ExitStack() as stack:
        found: list[tuple[Figures, Running]] = []
        for number, peer in enumerate(peers):
            figures = Figures(name=peer.name, bits=peer.bits)
            try:
                running = stack.enter_context(_started(peer, threads, pathlib.Path(folder) / f"{number}.log", figures))
            except TriremeError as error:
                console.print(f"{peer.name} is left out: {error}")
                continue
            console.print(f"{peer.name}: first token after {running.start_seconds:.1f} s")
            found.append((figures, running))
        for name in measures:
            _take_turns(found, name, rounds, console)
        return [figures for figures, _ in found]


@contextmanager
def _started(peer: Peer, threads: int, log: pathlib.Path, figures: Figures) -> Iterator[Running]:
    try:
        running = Running(peer, threads, log, [])
    except WorkerDied:
        if not peer.fallback:
            raise
        running = Running(peer, threads, log, peer.fallback)
        figures.note = f"with {' '.join(peer.fallback)}: it died without"
    figures.start_seconds = running.start_seconds
    try:
        yield running
    finally:
        running.close()


def _take_turns(found: list[tuple[Figures, Running]], name: str, rounds: int, console: Console) -> None:
    streams, prompt, steps = MEASURES[name]
    tokens = streams * (steps or prompt)
    answers: dict[str, list[dict[str, float]]] = {figures.name: [] for figures, _ in found}
    for number in range(rounds + 1):
        for figures, running in found:
            answer = running.ask(name)
            if number:
                answers[figures.name].append(answer)
            figures.peak_bytes = int(answer["rss"])
    for figures, _ in found:
        seconds = statistics.median(answer["seconds"] for answer in answers[figures.name])
        cpu = statistics.median(answer["cpu"] for answer in answers[figures.name])
        figures.tokens_per_second[name] = tokens / seconds
        figures.tokens_per_cpu_second[name] = tokens / max(cpu, 1e-9)
        console.print(f"{name}: {figures.name} {tokens / seconds:.1f} tokens/s")


# --- showing ---------------------------------------------------------------------------------------------------------------------


def ratios(figures: list[Figures], measures: list[str]) -> dict[str, dict[str, float]]:
    """Our best form's tokens per second over the best peer's at the same bits; for starts and memory, theirs over ours. Peers that
    know nothing but floats are held against our best form of any bits besides."""
    ours = [f for f in figures if f.name.startswith("trireme")]
    theirs = [f for f in figures if f not in ours]
    found: dict[str, dict[str, float]] = {}
    for bits in sorted({f.bits for f in theirs}, key=int):
        alike = [f for f in ours if f.bits == bits]
        if alike:
            found[f"{bits} bits: ours/theirs"] = _ratio(alike, [f for f in theirs if f.bits == bits], measures)
    for peer in theirs:
        if peer.bits in ("16", "32") and ours:
            found[f"any bits: ours/{peer.name}"] = _ratio(ours, [peer], measures)
    return found


def _ratio(ours: list[Figures], theirs: list[Figures], measures: list[str]) -> dict[str, float]:
    found = {
        name: max(f.tokens_per_second[name] for f in ours) / max(f.tokens_per_second[name] for f in theirs) for name in measures
    }
    found["start"] = min(f.start_seconds for f in theirs) / min(f.start_seconds for f in ours)
    found["memory"] = min(f.peak_bytes for f in theirs) / min(f.peak_bytes for f in ours)
    return found


def _print(figures: list[Figures], measures: list[str]) -> None:
    width = max((len(f.name) for f in figures), default=0) + 16
    heads = "".join(f"{name:>14}" for name in (*measures, "start s", "peak MB"))
    print(f"{'tokens/s':<{width}}{heads}")
    for f in figures:
        cells = "".join(f"{f.tokens_per_second[name]:>14.1f}" for name in measures)
        print(f"{f.name:<{width}}{cells}{f.start_seconds:>14.2f}{f.peak_bytes / 1e6:>14.0f}  {f.note}".rstrip())
    print(f"\n{'tokens per CPU second':<{width}}")
    for f in figures:
        print(f"{f.name:<{width}}" + "".join(f"{f.tokens_per_cpu_second[name]:>14.1f}" for name in measures))
    for label, found in ratios(figures, measures).items():
        print(f"{label:<{width}}" + "".join(f"{ratio:>14.2f}" for ratio in found.values()))


def _plot(figures: list[Figures], measures: list[str], path: str) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise BadConfig("--plot needs matplotlib.", "pip install matplotlib") from None
    figure, axes = pyplot.subplots(1, len(measures), figsize=(3.2 * len(measures), 3.6), squeeze=False)
    for axis, name in zip(axes[0], measures, strict=True):
        axis.barh(
            [f.name for f in figures],
            [f.tokens_per_second[name] for f in figures],
            color=["tab:blue" if f.name.startswith("trireme") else "tab:gray" for f in figures],
        )
        axis.set_title(f"{name}, tokens/s", fontsize=9)
        axis.tick_params(labelsize=7)
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)
