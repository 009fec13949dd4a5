"""Flags built from the settings' fields, and sampling flags. Knows argparse and the config; nothing of engines."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from trireme.config import GROUPS, Config, kind_of, resolve, settings
from trireme.errors import BadConfig, BadRequest
from trireme.types import SamplingParams

_ENGINE = ("model", "device", "cache", "schedule")


def add_settings(parser: argparse.ArgumentParser, groups: Iterable[str] = _ENGINE, skip: Iterable[str] = ()) -> None:
    """Adds one flag per setting to its group. --config names a TOML file."""
    parser.add_argument("--config", help="a TOML file with tables " + ", ".join(f"[{group}]" for group in GROUPS))
    for group in groups:
        section = parser.add_argument_group(group)
        for name, (_, field) in settings([group]).items():
            if name not in skip:
                _add(section, group, name, field)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the model as a positional argument. --model has the same meaning."""
    help = "a folder, a .gguf file, a name from `trireme models` or a hub id; also as --model"
    parser.add_argument("place", metavar="MODEL", nargs="?", help=help)


def model_given(args: argparse.Namespace) -> str | None:
    """The model named on the command line, in either form."""
    if args.place and args.model and args.place != args.model:
        raise BadConfig(f"Two models are named: {args.place} and --model {args.model}.", "leave one of them out")
    return args.place or args.model


def _add(section: Any, group: str, name: str, field: Any) -> None:
    flag, kind = "--" + name.replace("_", "-"), kind_of(group, name)
    text = field.metadata["help"].replace("%", "%%") + (f" [{field.default}]" if field.default not in (None, (), "") else "")
    if kind is bool:
        section.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif kind is tuple:
        text += "; may be repeated, or separated by commas"
        section.add_argument(flag, dest=name, action="append", default=None, metavar=name.upper(), help=text)
    else:
        choices = field.metadata["choices"] or None
        section.add_argument(flag, dest=name, default=None, metavar=None if choices else name.upper(), choices=choices, help=text)


def config_from(args: argparse.Namespace, **changes: Any) -> Config:
    """The settings of a command. Flags override TRIREME_* variables, which override the TOML file."""
    known = settings()
    given = {name: value for name, value in vars(args).items() if name in known}
    flags = {name: ",".join(value) if isinstance(value, list) else value for name, value in given.items()}
    if hasattr(args, "place"):
        flags["model"] = model_given(args)
    return resolve({**flags, **{name: value for name, value in changes.items() if value is not None}}, file=args.config)


# flag -> (type, help); the names are those of SamplingParams
_SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "longest answer"),
    "temperature": (float, "0 is greedy"),
    "top_k": (int, "only the k likeliest tokens; 0: all"),
    "top_p": (float, "only the likeliest tokens that together have this probability"),
    "min_p": (float, "only tokens at least this likely, beside the likeliest"),
    "repetition_penalty": (float, "above 1: less of what was there before"),
    "seed": (int, "the same seed gives the same answer"),
}


def add_sampling(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument_group("sampling")
    for name, (kind, text) in _SAMPLING.items():
        section.add_argument("--" + name.replace("_", "-"), dest=name, type=kind, default=None, help=text)
    section.add_argument("--stop", action="append", default=None, help="end at this text; may be given several times")


def sampling_from(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    chosen = {name: getattr(args, name) for name in (*_SAMPLING, "stop") if getattr(args, name) is not None}
    sampling = SamplingParams(**{**{f: getattr(defaults, f) for f in SamplingParams.__struct_fields__}, **chosen})
    try:
        sampling.check_fields()
    except BadRequest as error:
        flag = f"--{(error.param or '').replace('_', '-')}"
        raise BadRequest(error.cause, error.fix or f"give another {flag}", error.param) from None
    return sampling
