"""The command line: `trireme COMMAND`. Each command is a module of its own, imported only when it is called.

Knows names and exit codes; imports nothing heavy, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import trireme
from trireme.command.parser import Parser
from trireme.errors import TriremeError

COMMANDS = {
    "run": "fetch a model if it is not here, and talk with it in the terminal",
    "chat": "talk with a model in the terminal",
    "generate": "continue a prompt",
    "serve": "serve a model over HTTP: OpenAI, Anthropic and other APIs, and a chat page",
    "ps": "list the servers that run here",
    "stop": "end a server that runs here",
    "pull": "fetch a model",
    "show": "say what a model's files hold, and how it would run here",
    "list": "list the models that were fetched",
    "rm": "delete a fetched model",
    "models": "list the models known by name, and where they lie",
    "backends": "list the backends, or check one against the specification",
    "kernels": "list the operators of the Triton library",
    "bench": "measure: latency, throughput, startup, ...",
    "simulate": "run the scheduler against a cost model and a trace",
    "doctor": "say what this machine has, and what would be chosen on it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code of the process."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] not in COMMANDS:
        return _overview(argv)
    name, rest = argv[0], argv[1:]
    try:
        module = importlib.import_module(f"trireme.cli.{name}")
        parser = Parser(prog=f"trireme {name}", description=f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}.")
        module.add_arguments(parser)
        return int(module.run(parser.parse_args(rest)) or 0)
    except TriremeError as error:
        if os.environ.get("TRIREME_DEBUG"):
            raise
        print(f"trireme: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name != "triton" or os.environ.get("TRIREME_DEBUG"):
            raise
        fix = "install it: `pip install triton` (Linux; torch's CUDA build brings it along)"
        print(f"trireme: `trireme {' '.join(argv[:2])}` needs Triton, which is not installed. Fix: {fix}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has closed it, so the rest is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _overview(argv: list[str]) -> int:
    parser = Parser(
        prog="trireme",
        description="LLM inference and serving.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n"
        + "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
        + "\n\n`trireme COMMAND --help` says more.",
    )
    parser.add_argument("--version", action="version", version=f"trireme {trireme.__version__}")
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND", help="what to do")
    parser.parse_args(argv)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
