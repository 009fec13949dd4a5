"""What the hub must not load: a front end that only tokenizes pays for no tensors."""

import pathlib
import subprocess
import sys


def test_hub_loads_no_torch_and_no_transformers() -> None:
    root = pathlib.Path(__file__).parents[2]
    names = sorted(f"trireme.hub.{file.stem}" for file in (root / "trireme" / "hub").glob("[a-z]*.py"))
    assert len(names) > 10
    script = f"import sys, importlib\nfor n in {names!r}: importlib.import_module(n)\n"
    script += "print(sorted({'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
