"""A process that asks one thing after another of a server that is overloaded: SOCKET SECONDS. Knows no test.

Its last line is JSON: how long each refusal took, from connecting to the last byte. One request at a time, in a process of its
own: what it sees is the server, not the wait among hundreds of clients of one event loop.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import time

BODY = b'{"tokens": [1, 2, 3], "sampling": {"max_tokens": 1}}'
REQUEST = b"POST /open HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


def ask(path: str) -> tuple[float, bytes]:
    begun = time.monotonic()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(path)
        connection.sendall(REQUEST)
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    return time.monotonic() - begun, answer


def main(path: str, seconds: float) -> None:
    until, refusals = time.monotonic() + seconds, []
    while time.monotonic() < until:
        took, answer = ask(path)
        if b"Overloaded" in answer:
            refusals.append(took)
        time.sleep(random.uniform(0.01, 0.05))  # not in step with anybody
    print(json.dumps(refusals))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
