"""Finds the client's address behind proxies. Knows addresses and X-Forwarded-For; nothing of requests."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from starlette.types import Scope

from trireme.errors import BadConfig

UNIX = "unix"  # the peer of a Unix socket has no address


class Proxies:
    """The proxies that are trusted."""

    def __init__(self, trusted: Sequence[str]):
        self._unix = UNIX in trusted
        self._networks = [_network(given) for given in trusted if given != UNIX]

    def client(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str | None:
        """The client's address: the last one in the header that does not belong to a trusted proxy."""
        peer = (scope.get("client") or (None,))[0]
        if not self._trusts(peer):
            return peer
        named = [word.strip() for word in headers.get(b"x-forwarded-for", b"").decode("latin-1").split(",")]
        for address in reversed(named):
            if not _is_address(address):
                break
            peer = address
            if not self._trusts(address):
                break
        return peer

    def _trusts(self, address: str | None) -> bool:
        if not address:
            return self._unix
        if not _is_address(address):
            return False
        return any(ipaddress.ip_address(address) in network for network in self._networks)


def _network(given: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(given, strict=False)
    except ValueError:
        raise BadConfig(f"trusted_proxy is {given!r}.", "give an address, a network such as 10.0.0.0/8, or unix") from None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
