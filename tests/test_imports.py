"""The import rule: a folder may import only the folders named beside it. No exemptions but the lazy ones named here."""

import ast
import pathlib
import subprocess
import sys

import trireme

ROOT = pathlib.Path(trireme.__file__).parent

_BASE = {"types", "errors", "host", "blocks"}
_ENGINE = {
    "hub",
    "ipc",
    "sched",
    "ops",
    "quant",
    "parallel",
    "layers",
    "models",
    "backends",
    "kernels",
    "worker",
    "serve",
    "config",
}
MAY_IMPORT: dict[str, set[str]] = {
    "types": {"errors"},
    "errors": set(),
    "config": {"errors"},
    "host": set(),
    "blocks": set(),
    "kernels": set(),
    "ipc": _BASE | {"config"},
    "hub": _BASE | {"config"},
    "sched": _BASE | {"config", "ipc"},
    "ops": _BASE,
    "quant": _BASE | {"ops"},
    "parallel": _BASE,
    "layers": _BASE | {"ops", "quant", "parallel"},
    "models": _BASE | {"ops", "layers"},
    "backends": _BASE | {"config", "ops", "layers", "kernels", "quant", "parallel"},
    "worker": _BASE | {"config", "ipc", "hub", "ops", "quant", "parallel", "layers", "models", "backends"},
    "serve": _BASE | {"config", "ipc", "sched", "hub"},
    "api": _BASE | {"config", "ipc", "hub", "serve"},
    "llm": _BASE | {"config", "hub", "sched", "serve", "worker"},
    "command": _BASE | {"config", "hub", "llm"},
    "bench": _BASE | _ENGINE | {"llm", "api", "command"},
    "cli": _BASE | _ENGINE | {"llm", "bench", "api", "command"},
    "__main__": {"cli"},
}
# The floors of the kernels, from the ground up: each may import those before it, and itself. `steps` is the engine's.
KERNEL_FLOORS = [
    "chips",
    "launch",
    "steps",
    "scalar",
    "aten.calls",
    "aten.counters",
    "aten.elementwise",
    "aten.folds",
    "aten.products",
    "aten.rowwise",
    "aten.registry",
    "fused",
    "__init__",
]
# The processes that start workers know them: the offline API, and the one file of the server that owns the ranks.
EXTRA = {"serve/launch.py": {"worker"}}
NO_TORCH = ("sched", "hub", "ipc", "serve", "api", "types", "errors", "host", "blocks", "config", "worker/group.py")


def imports(path: pathlib.Path) -> list[tuple[int, str]]:
    """Every module a file imports, wherever in the file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.lineno, node.module or ""))
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names if node.module == "trireme"]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
    return found


def files() -> list[pathlib.Path]:
    return [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]


def home_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_folders_import_downwards() -> None:
    wrong = []
    for path in files():
        home, name = home_of(path), path.relative_to(ROOT).as_posix()
        allowed = MAY_IMPORT[home] | EXTRA.get(name, set()) | {home}
        for line, module in imports(path):
            parts = module.split(".")
            if (
                parts[0] == "trireme"
                and len(parts) > 1
                and parts[1] not in allowed
                and (ROOT / parts[1]).exists() | (ROOT / f"{parts[1]}.py").exists()
            ):
                wrong.append(f"{name}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    names = {name_of(path): path for path in files()}
    below = {name: named_files(path, names) - {name} for name, path in names.items()}
    while leaves := {name for name, targets in below.items() if not targets & below.keys()}:
        for name in leaves:
            del below[name]
    assert not below, f"in a circle, or above one: {sorted(below)}"


def name_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def named_files(path: pathlib.Path, names: dict[str, pathlib.Path]) -> set[str]:
    """The files that a file imports: what a name of `from` means is a file if there is one, else its module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {whole if (whole := f"{module}.{alias.name}") in names else module for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & names.keys()


def kernel_floor(module: str) -> str:
    """The floor of a module of the kernels, named from their folder on."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "aten" and len(parts) > 1 else parts[0]


def test_the_kernels_import_downwards() -> None:
    wrong, seen = [], set()
    for path in (ROOT / "kernels").rglob("*.py"):
        name = path.relative_to(ROOT / "kernels").as_posix()
        if name == "aten/__init__.py":
            continue
        floor = KERNEL_FLOORS.index(kernel_floor(name.removesuffix(".py").replace("/", ".")))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trireme.kernels"):
                folder = (node.module or "").removeprefix("trireme.kernels").removeprefix(".")
                whole = folder in ("", "aten")
                below = [f"{folder}.{alias.name}".removeprefix(".") for alias in node.names] if whole else [folder]
                floors = [kernel_floor(x) for x in below]
                seen.update(floors)
                wrong += [f"{name}:{node.lineno} imports {x}" for x in floors if KERNEL_FLOORS.index(x) > floor]
    assert not wrong, "\n".join(wrong)
    assert seen >= set(KERNEL_FLOORS) - {"__init__"}


def test_a_gpu_worker_imports_none_of_the_operators() -> None:
    script = "import sys, trireme.backends.cuda.backend, trireme.backends.cuda.ops; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "trireme.kernels.steps.attention" in done.stdout and "trireme.kernels.aten" not in done.stdout


def test_only_compute_imports_torch() -> None:
    wrong = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(tuple(f"{place}/" for place in NO_TORCH)) or name in NO_TORCH or home_of(path) in NO_TORCH:
            wrong += [
                f"{name}:{line}" for line, module in imports(path) if module.split(".")[0] in ("torch", "triton", "transformers")
            ]
    assert not wrong, "\n".join(wrong)


def test_engine_never_imports_transformers() -> None:
    wrong = [
        f"{path}:{line}"
        for path in files()
        if home_of(path) != "bench"
        for line, module in imports(path)
        if module.split(".")[0] == "transformers"
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_trireme_loads_no_torch() -> None:
    code = "import sys, trireme, trireme.cli.main, trireme.hub.resolve, trireme.sched.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
