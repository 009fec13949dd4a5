"""Settings: a few frozen groups. Flags, TRIREME_* variables and a TOML file are built from their fields; `resolve` joins them.

Knows what a setting is called and means, never what is done with it.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trireme.errors import BadConfig

DEFAULT_MODEL = "smollm2"


def cache_folder() -> pathlib.Path:
    """The folder for downloads and cached files: TRIREME_CACHE, or `trireme` in the user's cache folder."""
    own = os.environ.get("TRIREME_CACHE")
    if own:
        return pathlib.Path(own).expanduser()
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trireme"


def setting(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class ModelOptions:
    model: str = setting(DEFAULT_MODEL, "a folder, a .gguf file, a name from `trireme models`, or a hub id (owner/name)")
    dtype: str = setting("auto", "type of weights and activations", ("auto", "float32", "bfloat16", "float16"))
    quantize: str = setting(
        "auto", "weight method: auto keeps what the checkpoint has; none, int8, int4, fp8, mxfp4, or a plug-in's name"
    )
    max_model_len: int | None = setting(None, "longest prompt plus answer, in tokens (default: what the model was made for)")
    random_weights: bool = setting(False, "draw weights at random: for shapes and speed only")
    chat_template: str | None = setting(None, "a file with the chat template (Jinja) to use instead of the model's own")
    default_sampling: tuple[str, ...] = setting(
        (), "NAME=VALUE, a sampling parameter for requests that do not set it; calm is temperature=0.2,top_p=0.9"
    )


@dataclass(frozen=True)
class DeviceOptions:
    backend: str = setting("auto", "which backend computes (see `trireme backends`)")
    threads: int = setting(0, "CPU threads of one worker (0: all cores)")
    tp: int = setting(1, "tensor-parallel ranks, one worker process each")
    pack_cache: str = setting(
        "auto", "keep packed CPU weights on disk: auto keeps what was quantised at load", ("auto", "on", "off")
    )
    graphs: bool = setting(True, "capture decode steps as graphs where the device can")
    collective_timeout: float = setting(60.0, "seconds before a rank that does not answer ends its group; long steps get more")


@dataclass(frozen=True)
class CacheOptions:
    page_size: int = setting(16, "KV slots per page: 1 is token attention, N is paged, 0 is static (one page per request)")
    kv_dtype: str = setting(
        "auto",
        "type of keys and values: auto is what the checkpoint asks for, else plain, the activations' own; int8 has a scale per "
        "token and head, int4 one per 32 numbers; fp8 (e4m3) takes the scales of the checkpoint where it has them",
        ("auto", "plain", "int8", "fp8", "int4"),
    )
    kv_tokens: int | None = setting(None, "KV slots in all (default: what fits in the memory fraction)")
    kv_windows: str = setting(
        "auto",
        "layers that see only the last tokens keep only those: auto is where the memory is too small for all",
        ("auto", "on", "off"),
    )
    checkpoint_tokens: int = setting(1024, "recurrent layers: tokens between two kept states, from which a prompt can be resumed")
    memory_fraction: float = setting(0.9, "share of the device's memory for weights, workspace and KV")
    prefix_cache: bool = setting(True, "reuse the KV of prompts that begin alike")


@dataclass(frozen=True)
class ScheduleOptions:
    policy: str = setting("past_future", "admission: past_future, aggressive, conservative, batch_decode, or a plug-in")
    max_running: int = setting(256, "requests computed together at most")
    max_step_tokens: int = setting(2048, "tokens computed in one step at most")
    max_waiting: int = setting(4096, "requests queued at most; one more is refused")


@dataclass(frozen=True)
class ServeOptions:
    host: str = setting("127.0.0.1", "address to listen at; anything but loopback should come with --api-key")
    port: int = setting(8000, "port to listen at (0: any free one)")
    uds: str | None = setting(None, "listen at this unix socket instead of a port")
    http_workers: int = setting(1, "HTTP processes; all share one router")
    tls_cert: str | None = setting(None, "serve HTTPS with this certificate chain (PEM); --tls-key is its key")
    tls_key: str | None = setting(None, "the private key of --tls-cert (PEM), where the certificate's file does not hold it")
    trusted_proxy: tuple[str, ...] = setting((), "a proxy's address or network, or unix: its X-Forwarded-For is believed")
    root_path: str = setting("", "the path under which a proxy shows this server, such as /llm")
    served_model_name: tuple[str, ...] = setting((), "the model's name in the API (default: what it was called by)")
    any_model_name: bool = setting(False, "answer whatever model a request names, for clients whose names are fixed")
    api_key: tuple[str, ...] = setting((), "a key clients must send, KEY or KEY:NAME; logs show the name (also TRIREME_API_KEY)")
    api_key_file: str | None = setting(None, "a file with a key on each line: KEY [NAME] [models=A,B] [rpm=N]")
    admin_key: str | None = setting(None, "the key of /admin/ routes, such as the reload of weights; without one they are denied")
    drain_timeout: float = setting(30.0, "seconds that running requests get to finish when the server is asked to end")
    idle_unload: float = setting(0.0, "free the weights after so many quiet seconds, load them again on demand (0: never)")
    heartbeat_timeout: float = setting(6.0, "seconds of silence after which a process counts as hung and is replaced")
    step_seconds: float = setting(0.1, "how long a step may take while answers are written: prompts are cut to fit (0: never)")
    stream_backlog: int = setting(1 << 20, "bytes of text a slow reader may fall behind before its stream is cut")
    max_body: int = setting(32 << 20, "bytes of a request's body at most")
    allowed_host: tuple[str, ...] = setting((), "a Host name to answer for besides loopback and addresses")
    fill_room: bool = setting(False, "where max_tokens is more than the context has room for, answer as far as it goes")
    allow_priority: bool = setting(False, "let requests say by `priority` who goes first; without it the field is ignored")
    data_dir: str | None = setting(None, "where files, batches and stored responses are kept (default: in the user's cache)")
    cors_origin: tuple[str, ...] = setting((), "an origin whose pages may call the API from a browser")
    metrics_prefix: str = setting("trireme", "prefix of the metrics' names; vllm makes existing dashboards work")
    log_format: str = setting("text", "how log lines look", ("text", "json"))
    log_level: str = setting("info", "the least important lines that are logged", ("debug", "info", "warning", "error"))
    otlp_endpoint: str | None = setting(None, "send traces to this OpenTelemetry collector")


GROUPS: dict[str, type] = {
    "model": ModelOptions,
    "device": DeviceOptions,
    "cache": CacheOptions,
    "schedule": ScheduleOptions,
    "serve": ServeOptions,
}


@dataclass(frozen=True)
class Config:
    model: ModelOptions = ModelOptions()
    device: DeviceOptions = DeviceOptions()
    cache: CacheOptions = CacheOptions()
    schedule: ScheduleOptions = ScheduleOptions()
    serve: ServeOptions = ServeOptions()


def from_groups(groups: Mapping[str, Mapping[str, Any]]) -> Config:
    """Makes a config from a message, which carries `dataclasses.asdict` of a config or of some of its groups."""
    plain = {group: {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()} for group, values in groups.items()}
    return Config(**{group: GROUPS[group](**values) for group, values in plain.items()})


def settings(groups: Iterable[str] = GROUPS) -> dict[str, tuple[str, dataclasses.Field]]:
    """Every setting by its flat name: (group, field)."""
    return {f.name: (group, f) for group in groups for f in dataclasses.fields(GROUPS[group])}


def kind_of(group: str, name: str) -> type:
    """The plain type of a setting: int for `int | None`."""
    hint = typing.get_type_hints(GROUPS[group])[name]
    if isinstance(hint, types.UnionType):
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    return typing.get_origin(hint) or hint


def resolve(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: str | pathlib.Path | None = None,
) -> Config:
    """Joins defaults < TOML file < TRIREME_* variables < flags. An unknown or ill-typed setting is an error."""
    environ = os.environ if environ is None else environ
    known = settings()
    chosen: dict[str, Any] = {}
    file = file or environ.get("TRIREME_CONFIG")
    if file:
        chosen |= _from_file(pathlib.Path(file))
    chosen |= _from_environ(environ)
    if environ.get("TRIREME_API_KEY"):
        chosen["api_key"] = environ["TRIREME_API_KEY"]
    chosen |= {name: value for name, value in (flags or {}).items() if value is not None}
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for name, value in chosen.items():
        if name not in known:
            raise BadConfig(f"Unknown setting {name!r}.", f"use one of: {_near(name, known)}")
        group, f = known[name]
        groups[group][name] = _convert(group, f, value)
    config = Config(**{group: GROUPS[group](**values) for group, values in groups.items()})
    _check(config)
    return config


# Variables that are read elsewhere, before there is a config. Every other TRIREME_* variable must be a setting.
OTHER_VARIABLES = frozenset(
    {"TRIREME_CONFIG", "TRIREME_CACHE", "TRIREME_DEBUG", "TRIREME_TUNE", "TRIREME_INDEX_URL", "TRIREME_API_KEY", "TRIREME_CPU_ISA"}
)


# Kubernetes sets these variables in every pod of a namespace that has a Service called trireme. They are addresses, not settings.
_SERVICE_LINK = re.compile(r"TRIREME(_[A-Z0-9_]*)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


def _is_service_link(name: str, value: str) -> bool:
    return _SERVICE_LINK.fullmatch(name) is not None and (name != "TRIREME_PORT" or "://" in value)


def _from_environ(environ: Mapping[str, str]) -> dict[str, str]:
    ours = {name: value for name, value in environ.items() if name.startswith("TRIREME_") and name not in OTHER_VARIABLES}
    links = [name for name, value in ours.items() if _is_service_link(name, value)]
    if links:
        some = ", ".join(sorted(links)[:2])
        print(f"trireme: {len(links)} variables of a Kubernetes Service are passed over ({some} ...).", file=sys.stderr)
    return {name[len("TRIREME_") :].lower(): value for name, value in ours.items() if name not in links}


def _from_file(path: pathlib.Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise BadConfig(f"Cannot read the config file {path}: {error.strerror}.", "check the path given by --config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"The config file {path} is not TOML: {error}.", "mend that line") from None
    chosen: dict[str, Any] = {}
    for group, table in tables.items():
        if group not in GROUPS or not isinstance(table, dict):
            raise BadConfig(f"Unknown table [{group}] in {path}.", f"use one of: {', '.join(GROUPS)}")
        for name, value in table.items():
            if name not in settings([group]):
                raise BadConfig(
                    f"Unknown setting {name!r} in [{group}] of {path}.", f"use one of: {_near(name, settings([group]))}"
                )
            chosen[name] = value
    return chosen


_KINDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false"}


def _convert(group: str, f: dataclasses.Field, value: Any) -> Any:
    kind = kind_of(group, f.name)
    try:
        if kind is bool:
            converted: Any = value if isinstance(value, bool) else _bool(value)
        elif kind is int:
            if isinstance(value, bool | float):
                raise ValueError
            converted = number(value) if isinstance(value, str) else int(value)
        elif kind is tuple:
            converted = tuple(part for part in value.split(",") if part) if isinstance(value, str) else tuple(map(str, value))
        else:
            converted = kind(value)
    except (ValueError, TypeError):
        wanted = _KINDS.get(kind, kind.__name__)
        raise BadConfig(f"{f.name} is {value!r}, which is not {wanted}.", f"give {wanted}: {f.metadata['help']}") from None
    if f.metadata["choices"] and converted not in f.metadata["choices"]:
        raise BadConfig(f"{f.name} is {value!r}.", f"use one of: {', '.join(f.metadata['choices'])}")
    return converted


def number(text: str) -> int:
    """A whole number as people write it: 4096, 4k (thousand), 4K (1024), 1.5m."""
    scale = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}.get(text[-1:], 1)
    value = float(text[:-1]) * scale if scale > 1 else int(text)
    if value != int(value):
        raise ValueError(text)
    return int(value)


def _bool(text: str) -> bool:
    truth = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if str(text).lower() not in truth:
        raise ValueError(text)
    return truth[str(text).lower()]


def _near(name: str, known: Iterable[str]) -> str:
    import difflib

    return ", ".join(difflib.get_close_matches(name, list(known), n=3, cutoff=0.3) or sorted(known))


_AT_LEAST = {
    "threads": 0,
    "tp": 1,
    "collective_timeout": 0.1,
    "page_size": 0,
    "kv_tokens": 1,
    "max_model_len": 1,
    "max_running": 1,
    "max_step_tokens": 1,
    "max_waiting": 1,
    "port": 0,
    "http_workers": 1,
    "drain_timeout": 0.0,
    "idle_unload": 0.0,
    "step_seconds": 0.0,
    "heartbeat_timeout": 1.0,
    "stream_backlog": 1 << 10,
    "max_body": 1,
}


def _check(config: Config) -> None:
    for name, low in _AT_LEAST.items():
        group, _ = settings()[name]
        value = getattr(getattr(config, group), name)
        if value is not None and value < low:
            raise BadConfig(f"{name} is {value}; the least is {low}.", f"raise {name}")
    if config.serve.root_path and not re.fullmatch(r"(/[\w.~-]+)+", config.serve.root_path):
        raise BadConfig(f"root_path is {config.serve.root_path!r}.", "begin it with / and end it without, such as /llm")
    if config.serve.tls_key and not config.serve.tls_cert:
        raise BadConfig("tls_key is given without tls_cert.", "give the certificate too: --tls-cert FILE")
    if config.serve.port > 65535:
        raise BadConfig(f"port is {config.serve.port}; the largest is 65535.", "give a smaller one, or 0 for any that is free")
    if not 0.0 < config.cache.memory_fraction <= 1.0:
        raise BadConfig(f"memory_fraction is {config.cache.memory_fraction}.", "give a share between 0 and 1")
