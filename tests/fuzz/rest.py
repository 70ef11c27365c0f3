"""REST under mutated HTTP requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import ssl
from pathlib import Path
from random import Random
from urllib.parse import quote, urlsplit

from distributed_grid.api import requests
from distributed_grid.errors import GridError
from distributed_grid.server.daemon import SERVICES
from distributed_grid.server.endpoints import endpoints_of
from distributed_grid.server.rest.routes import HAND_ROUTES
from tests.fuzz.mutation import TEXTS, Mutator
from tests.fuzz.rpc_socket import EFFECTIVE, KNOWN
from tests.fuzz.samples import make_corpus
from tests.fuzz.target import HANG_SECONDS, Tally, exchange, finish, fragments

REQUESTS_PER_CONNECTION = 15
BODIES: dict[str, type] = {
    "/v1/join": requests.JoinRequest,
    "/v1/leases": requests.RequestLease,
    "/v1/leases/{name}/extend": requests.ExtendLease,
    "/v1/boosts": requests.RequestBoost,
    "/v1/boosts/{name}/extend": requests.ExtendBoost,
    "/v1/jobs": requests.SubmitJob,
}
QUERIES = ("after", "subject", "type", "limit", "state", "user", "since_seconds", "by", "node", "window", "seen", "x")
HEADERS = ("Idempotency-Key", "Last-Event-ID", "Accept", "Content-Type", "Origin", "Cookie", "X", "Range", "Upgrade")
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Rest:
    """Requests with the owner's token, many on one connection; the last one of each breaks the framing."""

    name = "REST"

    def __init__(self, host_dir: Path, seed: str) -> None:
        at = urlsplit(json.loads((host_dir / "rest.json").read_bytes())["url"])
        self._address = (str(at.hostname), int(at.port or 0))
        self._trust = ssl.create_default_context(cafile=host_dir / "certificate.pem")
        self._token = (host_dir / "token").read_text().strip()
        mounted = [route for declared in endpoints_of(*SERVICES) for route in declared.routes]
        self._routes = [(route.method, route.path) for route in (*mounted, *HAND_ROUTES)]
        rng = Random(seed)
        self._bodies = {path: make_corpus([kind], 20, rng, KNOWN) for path, kind in BODIES.items()}

    def check(self) -> None:
        connection = http.client.HTTPSConnection(*self._address, timeout=HANG_SECONDS, context=self._trust)
        try:
            connection.request("GET", "/v1/nodes", headers={"Authorization": f"Bearer {self._token}"})
            answer = connection.getresponse()
            nodes = json.loads(answer.read())["nodes"]
            assert answer.status == 200, answer.status
            assert nodes, "no nodes"
        finally:
            connection.close()

    def run(self, frames: int, rng: Random, tally: Tally) -> None:
        mutator = Mutator(rng, as_json=True)
        for count in tally.batches(frames, REQUESTS_PER_CONNECTION):
            self._talk(mutator, count, tally)

    def _talk(self, mutator: Mutator, count: int, tally: Tally) -> None:
        rng = mutator.rng
        tally.connections += 1
        with (
            socket.create_connection(self._address, HANG_SECONDS) as plain,
            self._trust.wrap_socket(plain, server_hostname=self._address[0]) as sock,
        ):
            asked = [self._request(mutator) for _ in range(count - 1)]
            answers = _Answers(tally, len(asked))
            if asked and exchange(sock, b"".join(asked), answers.take, pieces=fragments(rng)):
                tally.results["cut"] += 1
                return
            self._end(sock, mutator, tally)

    def _end(self, sock: socket.socket, mutator: Mutator, tally: Tally) -> None:
        """One last request whose framing is broken."""
        rng = mutator.rng
        sock.settimeout(HANG_SECONDS)
        whole = self._request(mutator)
        pick = rng.randrange(4)
        if pick == 0:
            length = rng.choice((b"-1", b"1e3", b"99999999999999999999", b"1048577", b"5, 6", b"\xb2", b""))
            whole = re.sub(rb"Content-Length: \d+", b"Content-Length: " + length, whole)
        elif pick == 1:
            size = rng.choice((b"0", b"-1", b"ffffffffffffffff", b"zz", b"5;x=y", b"100000", b"5"))
            whole = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", whole)
            whole += size + b"\r\nabcde\r\n0\r\n\r\n"
        else:
            whole = mutator.damaged(whole)
        if b'"argv"' in whole:
            whole = whole.replace(b"/v1/jobs", b"/v1/jabs")  # commands are run only where all of it is known
        found: list[bytes] = []

        def take(chunk: bytes) -> bool:
            found.extend(_STATUS.findall(chunk))
            return False

        finish(sock, whole, take)
        tally.frames += 1
        tally.results.update(status.decode() for status in found)
        tally.results["cut"] += 1

    def _request(self, mutator: Mutator) -> bytes:
        """A mutated request that is a whole request still, of something that does not take long."""
        rng = mutator.rng
        method, path = rng.choice(self._routes)
        body = self._body(mutator, path) if method == "POST" else b""
        name = rng.choice((*TEXTS, "finished", "liar0", "here"))
        target = path.replace("{name}", _quoted(name, rng)).replace("{resource_type}", rng.choice(("cpu", "gpu", "x")))
        for _ in range(rng.choice((0, 0, 1, 2))):
            target += ("&" if "?" in target else "?") + f"{rng.choice(QUERIES)}={_quoted(self._value(rng), rng)}"
        lines = [f"{rng.choice((method,) * 30 + ('OPTIONS', 'TRACE', 'PATCH', 'x'))} {target} HTTP/1.1".encode()]
        lines.append(b"Host: " + rng.choice((b"127.0.0.1",) * 30 + (b"evil.example", b"[", b"127.0.0.1:99999")))
        if rng.random() > 0.03:
            lines.append(b"Authorization: Bearer " + self._token.encode())
        for _ in range(rng.choice((0, 0, 1, 3))):
            value = self._value(rng).encode()
            lines.append(rng.choice(HEADERS).encode() + b": " + re.sub(rb"[\x00-\x1f\x7f]", b" ", value).strip())
        if body:
            lines.append(b"Content-Length: %d" % len(body))
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    def _value(self, rng: Random) -> str:
        return str(rng.choice((*TEXTS, 0, -1, 1, 2**62, 2**63, 2**64, 10**30, 1.5)))

    def _body(self, mutator: Mutator, path: str) -> bytes:
        if path not in BODIES:
            return mutator.encoded({"a": [1, None, "x"]})
        while True:
            body = mutator.encoded(mutator.rng.choice(self._bodies[path]))
            with contextlib.suppress(GridError, ValueError, RecursionError):
                fields = json.loads(body)
                if isinstance(fields, dict):
                    requests.convert({"request_id": "id-1", **fields}, BODIES[path])
                    if mutator.rng.random() > EFFECTIVE:
                        continue
            return body


def _quoted(text: str, rng: Random) -> str:
    return quote(text, safe="" if rng.random() < 0.8 else "/%") or "x"


class _Answers:
    """Counts whole answers by their status."""

    def __init__(self, tally: Tally, expected: int) -> None:
        self._tally = tally
        self._left = expected
        self._data = b""

    def take(self, chunk: bytes) -> bool:
        """Whether all have come."""
        self._data += chunk
        while (end := self._end_of_answer()) >= 0:
            found = _STATUS.match(self._data)
            assert found is not None, self._data[:200]
            status = found[1].decode()
            assert status != "500", self._data[:500]
            self._data = self._data[end:]
            self._tally.results[status] += 1
            self._tally.frames += 1
            self._left -= 1
        return self._left <= 0

    def _end_of_answer(self) -> int:
        """Where the first answer ends; -1 where it is not complete."""
        head_end = self._data.find(b"\r\n\r\n")
        if head_end < 0:
            return -1
        head, start = self._data[:head_end].lower(), head_end + 4
        if length := re.search(rb"content-length: (\d+)", head):
            return start + int(length[1]) if len(self._data) >= start + int(length[1]) else -1
        if b"transfer-encoding: chunked" in head:
            end = self._data.find(b"0\r\n\r\n", start)
            return end + 5 if end >= 0 else -1
        return start
