"""`serve(config)`: a listening socket, a private folder, a supervisor. Knows addresses; nothing of what is served there."""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import os
import pathlib
import socket
import ssl
import stat
import time

from trireme.config import Config, ServeOptions
from trireme.errors import BadConfig
from trireme.serve.display import Display
from trireme.serve.keys import KeyRing
from trireme.serve.runtime import Record, birth_of, own_folder, write_record
from trireme.serve.supervisor import HTTP_MODULE, Orders, Supervisor
from trireme.serve.systemd import inherited_listener

BACKLOG = 2048  # connections the kernel keeps while the HTTP processes are busy, or are being restarted


def serve(config: Config, path: pathlib.Path, *, display: Display | None = None, http_module: str = HTTP_MODULE) -> int:
    """Serves the model at `path` until a signal; returns the exit code."""
    display = display or Display()
    try:
        keys = KeyRing(config.serve)
        _check_tls(config.serve)
        listener, url = open_listener(config.serve)
        if not keys and not _is_loopback(listener):
            display.line("Warning: everybody who reaches this address may use the server. Fix: give an --api-key.")
        with listener:
            folder = own_folder()
            names = config.serve.served_model_name or (model_name(config.model.model),)
            config, name = dataclasses.replace(config, serve=dataclasses.replace(config.serve, served_model_name=names)), names[0]
            pid = os.getpid()
            record = Record(pid=pid, born=birth_of(pid) or 0, url=url, model=name, path=str(path), started=time.time())
            write_record(folder, record)
            return Supervisor(Orders(config, path, name, folder, listener, http_module), record, display).run()
    finally:
        display.close()
        if config.serve.uds:
            pathlib.Path(config.serve.uds).unlink(missing_ok=True)


def model_name(model: str) -> str:
    """What a model is called in the API: a path's last part, or the name it was asked for by."""
    path = pathlib.Path(model)
    if path.exists():
        path = path.resolve()
        return path.stem if path.is_file() else path.name
    return model


def open_listener(options: ServeOptions) -> tuple[socket.socket, str]:
    """The API's listening socket, and the address to show."""
    given = inherited_listener()
    if given is not None:
        return given, _address(given, options)
    if options.uds:
        return _listen_unix(options.uds), f"unix:{options.uds}"
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise BadConfig(f"Cannot listen at {options.host!r}: {error.strerror}.", "give another --host") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise BadConfig(*_refusal(error, options)) from None
    listener.listen(BACKLOG)
    return listener, _address(listener, options)


def _address(listener: socket.socket, options: ServeOptions) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if options.tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _check_tls(options: ServeOptions) -> None:
    """The files of --tls-cert and --tls-key, before any process needs them."""
    if not options.tls_cert:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(options.tls_cert, options.tls_key)
    except OSError as error:  # of ssl too
        files = " and ".join(name for name in (options.tls_cert, options.tls_key) if name)
        cause = f"{files} cannot be used for HTTPS: {error.strerror or error}."
        raise BadConfig(cause, "give PEM files that belong together") from None


def _is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach the address."""
    if listener.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _refusal(error: OSError, options: ServeOptions) -> tuple[str, str]:
    where = f"{options.host}:{options.port}"
    if error.errno == errno.EADDRINUSE:
        return f"Something else listens at {where}.", "give another --port, or see `trireme ps`"
    if error.errno == errno.EACCES:
        return f"This user may not listen at {where}.", "give a --port above 1023"
    return f"Cannot listen at {where}: {error.strerror}.", "give another --host or --port"


def _listen_unix(path: str) -> socket.socket:
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(path) == 0:
                raise BadConfig(f"Something else listens at {path}.", "give another --uds, or see `trireme ps`")
        os.unlink(path)  # no server listens there any more
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise BadConfig(f"Cannot listen at {path}: {error.strerror}.", "give another --uds") from None
    finally:
        os.umask(before)
    listener.listen(BACKLOG)
    return listener
