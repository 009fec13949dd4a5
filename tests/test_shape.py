"""How large a class may be: at most 8 arguments to its constructor, at most 15 attributes. More is two classes in one.
A function has at most 80 lines, a file of kernels at most 450."""

import ast
import pathlib
from collections.abc import Iterator

import trireme

ROOT = pathlib.Path(trireme.__file__).parent
MOST_ARGUMENTS = 8
MOST_ATTRIBUTES = 15
MOST_LINES = 80  # of a function
MOST_LINES_OF_KERNELS = 450  # of a file


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def constructor_arguments(node: ast.ClassDef) -> int:
    """Arguments that a caller gives, self aside."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            given = method.args
            return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
    return 0


def attributes(node: ast.ClassDef) -> set[str]:
    """Names that the class's own methods assign on self."""
    names = set()
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.args.args:
            this = method.args.args[0].arg
            for part in ast.walk(method):
                if (
                    isinstance(part, ast.Attribute)
                    and isinstance(part.ctx, ast.Store)
                    and isinstance(part.value, ast.Name)
                    and part.value.id == this
                ):
                    names.add(part.attr)
    return names


def test_constructors_take_few_arguments() -> None:
    many = [f"{name}: {count}" for name, node in classes() if (count := constructor_arguments(node)) > MOST_ARGUMENTS]
    assert not many, "\n".join(many)


def test_classes_hold_few_attributes() -> None:
    many = [f"{name}: {len(held)}" for name, node in classes() if len(held := attributes(node)) > MOST_ATTRIBUTES]
    assert not many, "\n".join(many)


def test_functions_are_short() -> None:
    counts = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    long = [f"{name}: {count}" for name, count in counts.items() if count > MOST_LINES]
    assert not long, "\n".join(long)


def test_files_of_kernels_are_short() -> None:
    files = [path for path in sorted((ROOT / "kernels").rglob("*")) if path.suffix in (".py", ".c")]
    counts = {path.relative_to(ROOT): path.read_text().count("\n") for path in files}
    long = [f"{path}: {count}" for path, count in counts.items() if count > MOST_LINES_OF_KERNELS]
    assert files and not long, "\n".join(long)
