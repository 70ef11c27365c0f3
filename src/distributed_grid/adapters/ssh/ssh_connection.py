"""SSH connections to nodes: through hops, with the user's keys, to servers whose host keys are known.

A host key that has changed is never accepted, whatever the config says. One never seen before is accepted only with
`accept_new: true`, and is added to the known hosts at once.

`SharedSshConnection`: sessions with the node script, and the agent's socket forwarded through the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncssh
from asyncssh.public_key import get_default_certificate_algs, get_default_public_key_algs

from distributed_grid.adapters.node.node_messages import NodeOperationFailed
from distributed_grid.adapters.node.node_worker import Listener, NodeConnection, NodeTransport, ServeConnection
from distributed_grid.adapters.node.script_session import BOOT, SCRIPT, ScriptSession
from distributed_grid.adapters.ssh.process import Hop, SshTarget, parse_jump
from distributed_grid.supervision import start_logged

KEEPALIVE_SECONDS, MAX_KEEPALIVES = 5, 3
MAX_HOPS = 5
CONNECT_SECONDS = 10.0
SSH_PORT = 22
SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"


class SshConnection:
    """An SSH connection to a node, with the ones it runs through."""

    def __init__(self, chain: Sequence[asyncssh.SSHClientConnection]) -> None:
        self._chain = list(chain)
        self.ssh = self._chain[-1]

    @property
    def is_closed(self) -> bool:
        return any(connection.is_closed() for connection in self._chain)

    async def wait_closed(self) -> None:
        """Return when it has ended, by itself or not."""
        waits = [asyncio.ensure_future(connection.wait_closed()) for connection in self._chain]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def close(self) -> None:
        """Hang up, the far end first; safe to call twice."""
        for connection in reversed(self._chain):
            connection.close()
            with contextlib.suppress(TimeoutError, OSError, asyncssh.Error):
                async with asyncio.timeout(2):
                    await connection.wait_closed()


async def connect(target: SshTarget, auth_sock: str) -> SshConnection:
    """Connection to a node; raises NodeOperationFailed with the cause in one sentence."""
    hops = [*target.via, target.hop]
    chain: list[asyncssh.SSHClientConnection] = []
    try:
        for hop in hops:
            await _extend(chain, hop, auth_sock)
    except BaseException:
        if chain:
            await SshConnection(chain).close()
        raise
    return SshConnection(chain)


async def _extend(chain: list[asyncssh.SSHClientConnection], hop: Hop, auth_sock: str) -> None:
    """One more connection, through the last one where there is one."""
    user, port = hop.user, hop.port or SSH_PORT
    keys = _KeyRing(hop, auth_sock)
    given: dict[str, Any] = {name: value for name, value in (("port", hop.port), ("username", hop.user)) if value}
    try:
        options = asyncssh.SSHClientConnectionOptions(config=(), host=hop.host, **given, client_keys=None)
        user, port = options.username, options.port
        tunnel = options.tunnel  # SSH's own configuration may have hops before the server
        if not chain and isinstance(tunnel, str) and tunnel.lower() != "none":
            jumps = [parse_jump(part, hop) for part in tunnel.split(",") if part.strip()]
            if len(jumps) > MAX_HOPS:
                raise NodeOperationFailed(f"there are more than {MAX_HOPS} hops before {hop.host}")
            for jump in jumps:
                await _extend(chain, jump, auth_sock)
        configured = options.known_hosts if isinstance(options.known_hosts, list) else []
        files = [hop.known_hosts] if hop.known_hosts else list(map(str, configured)) or ["~/.ssh/known_hosts"]
        known = KnownHosts(hop, options.host_key_alias or options.host, options.port, files)
        checks: list[HostKeyCheck] = []

        def check_host_key() -> HostKeyCheck:
            checks.append(HostKeyCheck(known))
            return checks[-1]

        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                connection = await asyncssh.connect(
                    hop.host,
                    **given,  # the rest is from SSH's own configuration
                    **keys.options(),
                    **({"tunnel": chain[-1]} if chain else {}),
                    client_factory=check_host_key,
                    known_hosts=known.trusted,
                    **({"server_host_key_algs": kinds} if (kinds := known.algorithms()) else {}),
                    keepalive_interval=KEEPALIVE_SECONDS,
                    keepalive_count_max=MAX_KEEPALIVES,
                    password_auth=False,
                    kbdint_auth=False,
                    agent_forwarding=False,
                    x11_forwarding=False,
                )
        except asyncssh.HostKeyNotVerifiable:
            refusals = [each.refusal for each in checks if each.refusal]
            if refusals:
                raise NodeOperationFailed(refusals[-1]) from None
            raise
        chain.append(connection)
    except (NodeOperationFailed, asyncssh.Error, OSError, ValueError, TimeoutError) as failure:
        raise _explain(failure, hop, user=user, port=port, keys=keys.advice()) from failure


class _KeyRing:
    """The keys to try: the one the config names, else SSH's own and the agent's."""

    def __init__(self, hop: Hop, auth_sock: str) -> None:
        self._path = str(Path(hop.key).expanduser()) if hop.key else ""
        self._agent = auth_sock if auth_sock and os.path.exists(auth_sock) else ""

    def options(self) -> dict[str, Any]:
        """Options of asyncssh; raises NodeOperationFailed for an unusable key."""
        if not self._path:
            return {"agent_path": self._agent} if self._agent else {}
        try:
            return {"client_keys": [asyncssh.read_private_key(self._path)], "agent_path": None}
        except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as failure:
            if self._is_locked():
                # A key with a passphrase must already be in the agent: nobody is there to type it.
                if not self._agent:
                    raise NodeOperationFailed(
                        f"the key {self._path} has a passphrase: load it with ssh-add, then type the command again"
                    ) from None
                public = [self._path + ".pub"] if os.path.exists(self._path + ".pub") else None
                keys = {"client_keys": [self._path], "ignore_encrypted": True}
                return {**keys, "agent_path": self._agent, "agent_identities": public}
            raise NodeOperationFailed(f"the key {self._path} cannot be used: {failure}") from failure
        except OSError as failure:
            raise NodeOperationFailed(f"the key {self._path} cannot be read: {failure.strerror}") from failure

    def _is_locked(self) -> bool:
        """True if the key has a passphrase: only then is a wrong one refused."""
        try:
            asyncssh.read_private_key(self._path, passphrase="-")  # noqa: S106 (nobody's)
        except asyncssh.KeyEncryptionError:
            return True
        except asyncssh.KeyImportError:
            return False
        return False

    def advice(self) -> str:
        """Advice for a server that accepted no key."""
        if self._path:
            return f"the key {self._path} was not accepted; is its public part in authorized_keys there?"
        tried = "keys in ~/.ssh and those of the SSH agent" if self._agent else "keys in ~/.ssh (there is no SSH agent)"
        return f"none of the {tried} was accepted; set ssh_key_path, or load the key with ssh-add and try again"


def _explain(failure: BaseException, hop: Hop, *, user: str, port: int, keys: str) -> NodeOperationFailed:
    """The failure to reach a server as one clear sentence."""
    where = f"{hop.host} port {port}"
    match failure:
        case NodeOperationFailed():
            return failure
        case asyncssh.PermissionDenied():
            return NodeOperationFailed(f"permission denied for {user}@{hop.host}: {keys}")
        case asyncssh.HostKeyNotVerifiable():
            return NodeOperationFailed(f"the host key of {hop.host} cannot be trusted: {failure.reason}")
        case asyncssh.KeyExchangeFailed():
            return NodeOperationFailed(f"{where} and this machine have no algorithm in common: {failure.reason}")
        case asyncssh.KeyEncryptionError() | asyncssh.KeyImportError():
            return NodeOperationFailed(f"the key {hop.key or 'for ' + hop.host} cannot be used: {failure}")
        case asyncssh.ChannelOpenError():
            return NodeOperationFailed(
                f"{where} cannot be reached from the host before it: {failure.reason}", final=False
            )
        case asyncssh.ConfigParseError():
            return NodeOperationFailed(f"~/.ssh/config cannot be used: {failure}")
        case TimeoutError():
            return NodeOperationFailed(f"no answer from {where} within {CONNECT_SECONDS:g} s", final=False)
        case ConnectionRefusedError():
            return NodeOperationFailed(f"{where} refused the connection: is sshd running there?", final=False)
        case socket.gaierror():
            return NodeOperationFailed(f"the name {hop.host} cannot be resolved: {failure.strerror}", final=False)
        case asyncssh.Error():
            return NodeOperationFailed(f"the connection to {where} broke: {failure.reason}", final=False)
        case OSError():
            return NodeOperationFailed(f"{where} cannot be reached: {failure.strerror or failure}", final=False)
    return NodeOperationFailed(f"{where}: {type(failure).__name__}: {failure}", final=False)


# ---------------------------------------------------------------- host keys


class KnownHosts:
    """Known host keys of one server; a new one is written to the first of the files."""

    def __init__(self, hop: Hop, name: str, port: int, files: Iterable[str]) -> None:
        self.hop = hop
        self.entry = name if port == SSH_PORT else f"[{name}]:{port}"
        self.files = [str(Path(file).expanduser()) for file in files]
        known = asyncssh.import_known_hosts("")
        for file in (*self.files, SYSTEM_KNOWN_HOSTS):
            try:
                known.load(Path(file).read_text())
            except (OSError, UnicodeDecodeError):
                continue  # a file that is not there knows nobody
        self.trusted = known.match(self.entry, "", None)
        self.seen = list(self.trusted[0])
        if not (self.trusted[0] or self.trusted[1]) and port != SSH_PORT:  # as ssh does: known without its port
            plain = known.match(name, "", None)
            self.trusted = (*plain[:2], [*plain[2], *self.trusted[2]], *plain[3:])

    def algorithms(self) -> list[str]:
        """Kinds of keys to ask the server for: known ones first, then any other, so that a changed key is seen."""
        names = [name for key in self.trusted[0] for name in key.sig_algorithms]
        if not names:
            return []
        if self.trusted[1]:
            names = [*get_default_certificate_algs(), *names]
        return [name.decode() for name in dict.fromkeys([*names, *get_default_public_key_algs()])]


class HostKeyCheck(asyncssh.SSHClient):
    def __init__(self, known: KnownHosts) -> None:
        self._known = known
        self.refusal = ""

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        known, hop = self._known, self._known.hop
        fingerprint = f"{_kind(key)} {key.get_fingerprint()}"
        if known.seen:
            before = ", ".join(f"{_kind(key)} {key.get_fingerprint()}" for key in known.seen)
            self.refusal = (
                f"the host key of {hop.host} has changed: {known.files[0]} knows {before}, now it shows {fingerprint}. "
                "Somebody may be in between, or the host was set up anew; when you are sure it was, remove the old key "
                f"with: ssh-keygen -R '{known.entry}'" + (f" -f {known.files[0]}" if hop.known_hosts else "")
            )
            return False
        if not hop.accept_new:
            self.refusal = (
                f"the host key of {hop.host} is not known ({fingerprint}): compare it, then connect once with ssh, or "
                f"add the output of ssh-keyscan to {known.files[0]}, or set accept_new: true for this node"
            )
            return False
        try:
            path = known.files[0]
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b") as file:
                size = file.seek(0, os.SEEK_END)
                start = b""
                if size:
                    file.seek(size - 1)
                    start = b"" if file.read(1) == b"\n" else b"\n"
                file.write(
                    start
                    + known.entry.encode()
                    + b" "
                    + key.export_public_key("openssh").split(b" #")[0].strip()
                    + b"\n"
                )
        except OSError as failure:
            self.refusal = f"the new host key of {hop.host} cannot be written to {known.files[0]}: {failure.strerror}"
            return False
        return True


def _kind(key: asyncssh.SSHKey) -> str:
    return key.algorithm.decode()


IDLE_SECONDS = 3.0
OPEN_SECONDS = 15.0
NO_PYTHON, NOT_THIS_PYTHON = 97, 98
# The first line of the input is the interpreter that the config names (or nothing), the second those to look for.
# No newline and no `!`, so that it passes every login shell unharmed. The script needs nothing that is installed there,
# and start-up code of packages (-S leaves it out) may take longer than everything else.
COMMAND = (
    "exec /bin/sh -c '"
    "IFS= read -r wanted; IFS= read -r names; "
    f'boot="{BOOT}"; '
    'case $wanted in "~/"*) wanted=$HOME/${wanted#??};; esac; '
    'if [ -n "$wanted" ]; then command -v "$wanted" >/dev/null || exit 98; exec "$wanted" -I -S -c "$boot"; fi; '
    "PATH=$PATH:/usr/local/bin:$HOME/.local/bin; "
    'for name in $names; do if "$name" -I -S -c "" </dev/null >/dev/null 2>&1; '
    'then exec "$name" -I -S -c "$boot"; fi; done; '
    "command -v python3 >/dev/null || exit 97; "
    'exec python3 -I -S -c "$boot"'
    "'"
)


def interpreters() -> list[str]:
    """Interpreters to look for, ours first: packages installed here then fit there."""
    names = [f"python{major}.{minor}" for major, minor in ((3, 13), (3, 12), (3, 11))]
    ours = "python{}.{}".format(*sys.version_info[:2])
    return [ours, *(name for name in names if name != ours)]


class SshScriptSession(ScriptSession):
    """A session with the script on a node, on a channel of an SSH connection."""

    def __init__(self, process: asyncssh.SSHClientProcess[bytes], target: SshTarget) -> None:
        super().__init__(target.grid, target.name)
        self._process = process
        self._python = target.python

    @property
    def streams(self) -> tuple[Any, Any]:
        """Output of the interpreter that runs the script, and its input."""
        return self._process.stdout, self._process.stdin

    async def send_script(self, script: bytes) -> None:
        """Choose the interpreter, and send it the script."""
        await self._write(f"{self._python}\n{' '.join(interpreters())}\n{len(script)}\n".encode() + script)

    def close(self) -> None:
        """End the session; the script ends with it. Safe twice."""
        self._process.close()

    async def _write(self, data: bytes) -> bool:
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except (OSError, asyncssh.Error):
            return False
        return True

    async def _read_line(self) -> bytes:
        try:
            line = await self._process.stdout.readline()
        except (OSError, ValueError, asyncssh.Error) as failure:
            raise NodeOperationFailed(f"the connection was lost: {failure}", final=False) from failure
        if not line:
            raise NodeOperationFailed(await self._last_words())
        return line

    async def _last_words(self) -> str:
        """Reason of a script's end without an answer."""
        lines = (await self._process.stderr.read(64 * 1024)).decode(errors="replace").strip().splitlines()
        done = await self._process.wait()
        if done.exit_status == NO_PYTHON:
            return "it has no Python; install Python 3.11 or newer there, or set `python:` for this node"
        if done.exit_status == NOT_THIS_PYTHON:
            return f"it has no {self._python} (`python:` of this node)"
        if done.exit_status is None:
            return "the connection was lost while it worked"
        return f"its shell ended with {done.exit_status}" + (f": {lines[-1][:300]}" if lines else "")


async def start_session(connection: SshConnection, target: SshTarget, script: bytes | None = None) -> SshScriptSession:
    """A script on a node, running until the session is closed; by default the one for agents."""
    if "\n" in target.python:
        raise NodeOperationFailed("the name of an interpreter has no line breaks")
    try:
        async with asyncio.timeout(OPEN_SECONDS):
            process = await connection.ssh.create_process(
                COMMAND, encoding=None, request_pty=False, env={}, send_env=()
            )
    except TimeoutError:
        raise NodeOperationFailed(f"its shell did not start within {OPEN_SECONDS:g} s", final=False) from None
    except (asyncssh.Error, OSError) as failure:
        raise NodeOperationFailed(f"its shell could not be started: {failure}", final=False) from failure
    session = SshScriptSession(process, target)
    await session.send_script(script or SCRIPT.read_bytes())
    return session


@asynccontextmanager
async def script_session(
    connection: SshConnection, target: SshTarget, script: bytes | None = None
) -> AsyncIterator[SshScriptSession]:
    """A script on a node, running for as long as this lasts."""
    session = await start_session(connection, target, script)
    try:
        yield session
    finally:
        session.close()


class SharedSshConnection(NodeConnection):
    """The one connection to a node: opened at the first use, shared, closed after the last."""

    def __init__(self, target: SshTarget, auth_sock: Callable[[], str]) -> None:
        self._target = target
        self._auth_sock = auth_sock
        self._connection: SshConnection | None = None
        self._opening = asyncio.Lock()
        self._users = 0

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[SshConnection]:
        """The connection, for as long as this lasts; raises NodeOperationFailed where it cannot be made."""
        self._users += 1
        try:
            async with self._opening:
                if self._connection is None or self._connection.is_closed:
                    self._connection = await connect(self._target, self._auth_sock())
                connection = self._connection
            yield connection
        finally:
            self._users -= 1
            if not self._users:
                end = f"the end of an unused connection to {self._target.name}"
                asyncio.get_running_loop().call_later(IDLE_SECONDS, lambda: start_logged(self.close(), end))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[NodeTransport]:
        async with self.connected() as connection:
            yield SshTransport(connection, self._target)

    @asynccontextmanager
    async def session(self, script: bytes | None = None) -> AsyncIterator[SshScriptSession]:
        """Session with the node; a connection that has died silently is found out here, and replaced."""
        was_open = self.is_open
        async with self.connected() as connection:
            try:
                session = await start_session(connection, self._target, script)
            except NodeOperationFailed:
                if not was_open:
                    raise
                await connection.close()
            else:
                try:
                    yield session
                finally:
                    session.close()
                return
        async with self.connected() as connection, script_session(connection, self._target, script) as session:
            yield session

    @property
    def is_open(self) -> bool:
        return self._connection is not None and not self._connection.is_closed

    async def close(self) -> None:
        """Close it now, unless it is in use. Safe twice."""
        if not self._users and self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()


class SshTransport(NodeTransport):
    """SSH connection as the transport of an agent's link."""

    def __init__(self, connection: SshConnection, target: SshTarget) -> None:
        self._connection = connection
        self._target = target

    @property
    def is_closed(self) -> bool:
        return self._connection.is_closed

    async def wait_closed(self) -> None:
        await self._connection.wait_closed()

    def session(self) -> AbstractAsyncContextManager[SshScriptSession]:
        return script_session(self._connection, self._target)

    async def listen(self, path: str, serve: ServeConnection) -> Listener:
        try:
            return await self._connection.ssh.start_unix_server(lambda: serve, path)
        except (asyncssh.ChannelListenError, asyncssh.ChannelOpenError, OSError) as failure:
            raise NodeOperationFailed(
                "its sshd does not forward Unix sockets: allow it there (AllowStreamLocalForwarding yes, "
                f"DisableForwarding no): {failure}"
            ) from failure
