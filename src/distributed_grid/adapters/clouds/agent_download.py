"""Download of the agent onto a machine that has only Python: sent there as source, so it imports nothing of ours.

`python agent_download.py FOLDER SECONDS` with the join token on standard input makes FOLDER an environment with the
agent in it, whole or not at all. Nothing is sent before the certificate of the other side is the one that the token
names.
"""

import base64
import hashlib
import http.client
import json
import os
import platform
import random
import shutil
import ssl
import sys
import time
import zipfile
from typing import Any

MAX_BYTES = 128 << 20
TIMEOUT_SECONDS = 120.0
OTHER_CERTIFICATE = "its certificate is another"


class DownloadFailed(Exception):
    """Why there is no agent; `is_final`: asking again does not help."""

    def __init__(self, why: str, is_final: bool = True) -> None:
        super().__init__(why)
        self.is_final = is_final


def read_token(text: str) -> list[Any]:
    """Addresses, fingerprint, id and secret of a join token."""
    packed = text.strip().partition("_")[2]
    fields: list[Any] = json.loads(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)))
    return fields


def machine(token: str) -> bytes:
    """Request: the token, and the facts that decide which agent runs here."""
    libc, version = platform.libc_ver()
    facts = {"python": platform.python_version(), "machine": platform.machine()}
    return json.dumps({"token": token, **facts, "libc": libc or "musl", "libc_version": version}).encode()


def connect(address: str, fingerprint: str) -> http.client.HTTPConnection:
    """A connection to the control plane that the token names, and to no other."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not fingerprint:
        raise DownloadFailed("the join token names no certificate: create a new one")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # checked below, by its fingerprint
    connection = http.client.HTTPSConnection(host, int(port), timeout=TIMEOUT_SECONDS, context=context)
    connection.timeout = 15.0
    connection.connect()
    connection.sock.settimeout(TIMEOUT_SECONDS)
    der = connection.sock.getpeercert(binary_form=True) or b""
    if hashlib.sha256(der).hexdigest() != fingerprint:
        connection.close()
        raise DownloadFailed(f"{address} is not the control plane: {OTHER_CERTIFICATE}")
    return connection


def download(address: str, fingerprint: str, asked: bytes, path: str) -> None:
    """Have the archive in a file, whole."""
    try:
        connection = connect(address, fingerprint)
        try:
            connection.request("POST", "/v1/agent-package", asked, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                message = json.loads(answer.read(65536))["error"]["message"]
                is_final = answer.status < 500 and answer.status != 429
                raise DownloadFailed(f"the control plane says: {str(message)[:500]}", is_final)
            save(answer, path)
        finally:
            connection.close()
    except (http.client.HTTPException, ValueError, KeyError, TypeError, ConnectionError, TimeoutError) as lost:
        raise DownloadFailed(f"{address}: {str(lost) or type(lost).__name__}", False) from None
    except OSError as failure:
        raise DownloadFailed(f"{address}: {failure.strerror or failure}", bool(failure.filename)) from None


def save(answer: http.client.HTTPResponse, path: str) -> None:
    """Write the body to a file; it has to be what the headers say."""
    size, digest = 0, hashlib.sha256()
    with open(path, "wb") as file:
        while chunk := answer.read(1 << 18):
            size += len(chunk)
            if size > MAX_BYTES:
                raise DownloadFailed(f"the agent is larger than {MAX_BYTES >> 20} MB")
            digest.update(chunk)
            try:
                file.write(chunk)
                file.flush()
            except OSError as failure:
                raise DownloadFailed(f"the agent cannot be stored: {failure.strerror}") from None
    if answer.headers["Content-Digest"] != f"sha-256=:{base64.b64encode(digest.digest()).decode()}:":
        raise DownloadFailed("the agent arrived damaged", False)


def install(archive: str, folder: str) -> None:
    """Unpack the archive into an environment of its own, which needs neither pip nor venv."""
    version = "python{}.{}".format(*sys.version_info)
    program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    site = os.path.join(folder, "lib", version, "site-packages")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(site)
    os.mkdir(os.path.join(folder, "bin"))
    os.symlink(program, os.path.join(folder, "bin", "python"))
    with open(os.path.join(folder, "pyvenv.cfg"), "w") as file:
        file.write(f"home = {os.path.dirname(program)}\ninclude-system-site-packages = false\n")
    os.unlink(archive)


def fetch(token: str, path: str, deadline: float) -> None:
    """Ask every address of the token, repeatedly; a final refusal ends it."""
    addresses, fingerprint, _, _ = read_token(token)
    asked = machine(token.strip())
    while True:
        problems = []
        for address in addresses:
            try:
                return download(address, fingerprint, asked, path)
            except DownloadFailed as failed:
                if failed.is_final and OTHER_CERTIFICATE not in str(failed):
                    raise
                problems.append(failed)
        if all(problem.is_final for problem in problems) or time.monotonic() > deadline:
            raise DownloadFailed("; ".join(map(str, problems)) or "the join token names no address")
        time.sleep(random.uniform(1.0, 3.0))


def main(folder: str, seconds: str) -> int:
    """Have the environment; the exit code."""
    fresh = folder + ".new"
    try:
        os.umask(0o022)
        shutil.rmtree(fresh, ignore_errors=True)
        os.makedirs(fresh)
        archive = os.path.join(fresh, "agent.zip")
        fetch(sys.stdin.read(65536), archive, time.monotonic() + float(seconds))
        install(archive, fresh)
        os.rename(fresh, folder)
    except (DownloadFailed, OSError, ValueError, zipfile.BadZipFile) as failed:
        shutil.rmtree(fresh, ignore_errors=True)
        print(f"no agent: {failed}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
