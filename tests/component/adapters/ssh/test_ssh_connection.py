"""Getting to a server that is who it was, with the right key, through others: against a real sshd on loopback."""

import asyncio
import getpass
import os
import subprocess

import pytest

from distributed_grid.adapters.node.installation import inspect
from distributed_grid.adapters.node.node_messages import NodeOperationFailed
from distributed_grid.adapters.ssh.process import Hop, SshTarget, parse_jump
from distributed_grid.adapters.ssh.ssh_connection import connect, script_session

from .conftest import make_key


def visit(hop, *via, auth_sock=""):
    """Connect, look around, hang up; the Python that was found there."""

    async def go():
        target = SshTarget(name="n1", grid="g1", local_socket="/nowhere", hop=hop, via=tuple(via))
        connection = await connect(target, auth_sock)
        try:
            async with script_session(connection, target) as session:
                return (await inspect(session)).python
        finally:
            await connection.close()

    return asyncio.run(go())


def refusal(hop, *via, **options):
    with pytest.raises(NodeOperationFailed) as caught:
        visit(hop, *via, **options)
    return caught.value


# ---------------------------------------------------------------- host keys


def test_a_known_host_is_visited(a_server):
    server = a_server()
    server.known.write_text(server.known_line())
    assert visit(server.hop()).startswith("3.")


def test_a_host_that_nobody_knows_is_refused_with_what_to_do(a_server):
    server = a_server()
    failure = refusal(server.hop())
    shown = subprocess.run(["ssh-keygen", "-lf", server.host_key], capture_output=True, text=True).stdout.split()[1]
    assert failure.final
    assert f"is not known (ssh-ed25519 {shown})" in str(failure)
    assert f"add the output of ssh-keyscan to {server.known}" in str(failure)
    assert not server.known.exists()


def test_accept_new_writes_the_key_down_once(a_server):
    server = a_server()
    server.known.write_text("other ssh-ed25519 AAAA")  # without a line end
    for _ in range(2):
        visit(server.hop(accept_new=True))
    assert server.known.read_text() == f"other ssh-ed25519 AAAA\n{server.known_line()}"
    assert visit(server.hop())


def test_a_changed_key_is_refused_whatever_the_config_says(a_server):
    server = a_server()
    visit(server.hop(accept_new=True))
    known = server.known.read_text()
    server.new_host_key()
    for accept_new in (False, True):
        failure = refusal(server.hop(accept_new=accept_new))
        assert failure.final
        assert "the host key of 127.0.0.1 has changed" in str(failure)
        assert str(failure).count("SHA256:") == 2
        assert f"ssh-keygen -R '[127.0.0.1]:{server.port}' -f {server.known}" in str(failure)
    assert server.known.read_text() == known


def test_a_key_of_another_kind_is_a_changed_key(a_server):
    server = a_server()
    server.known.write_text(server.known_line())
    server.new_host_key("-t", "ecdsa")
    assert "has changed" in str(refusal(server.hop(accept_new=True)))


def test_a_host_known_by_one_of_its_keys_is_asked_for_that_one(a_server, tmp_path):
    server = a_server()
    second = make_key(tmp_path / "second", "-t", "ecdsa")
    server.stop()
    server.extra = f"HostKey {second}\n"
    server.start()
    words = second.with_suffix(".pub").read_text().split()
    server.known.write_text(f"[127.0.0.1]:{server.port} {words[0]} {words[1]}\n")
    assert visit(server.hop())


def test_a_hashed_entry_is_known(a_server):
    server = a_server()
    server.known.write_text(server.known_line())
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", server.known], check=True, capture_output=True)
    assert server.known.read_text().startswith("|1|")
    assert visit(server.hop())


def test_a_revoked_key_is_refused_even_as_a_new_one(a_server):
    server = a_server()
    server.known.write_text(f"@revoked {server.known_line()}")
    assert "cannot be trusted: Host key is revoked" in str(refusal(server.hop(accept_new=True)))


def test_a_host_that_an_authority_vouches_for_is_known(a_server, tmp_path):
    server = a_server()
    authority = make_key(tmp_path / "authority")
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "host", "-h", "-n", "127.0.0.1", f"{server.host_key}.pub"]
    subprocess.run(sign, check=True)
    server.stop()
    server.extra = f"HostCertificate {server.host_key}-cert.pub\n"
    server.start()
    words = authority.with_suffix(".pub").read_text().split()
    server.known.write_text(f"@cert-authority * {words[0]} {words[1]}\n")
    assert visit(server.hop())


def test_without_a_file_of_its_own_the_usual_one_is_used(a_server, tmp_path):
    server = a_server()
    visit(server.hop(known_hosts="", accept_new=True))
    usual = tmp_path / "home" / ".ssh" / "known_hosts"
    assert usual.read_text() == server.known_line()
    assert usual.stat().st_mode & 0o777 == 0o600
    assert usual.parent.stat().st_mode & 0o777 == 0o700


def test_a_configuration_that_knows_no_hosts_does_not_switch_the_check_off(a_server, tmp_path):
    server = a_server()
    (tmp_path / "home" / ".ssh").mkdir()
    (tmp_path / "home" / ".ssh" / "config").write_text(
        "Host *\n  UserKnownHostsFile none\n  StrictHostKeyChecking no\n"
    )
    assert "is not known" in str(refusal(server.hop(known_hosts="")))


# ---------------------------------------------------------------- keys


def test_a_key_that_is_not_accepted_is_named(a_server, tmp_path):
    server = a_server()
    server.known.write_text(server.known_line())
    other = make_key(tmp_path / "other")
    failure = refusal(server.hop(key=str(other)))
    assert failure.final
    assert str(failure).startswith(
        f"permission denied for {getpass.getuser()}@127.0.0.1: the key {other} was not accepted"
    )


def test_without_any_key_it_is_told_where_they_come_from(a_server):
    server = a_server()
    server.known.write_text(server.known_line())
    assert "there is no SSH agent" in str(refusal(server.hop(key="")))


def test_a_key_that_cannot_be_read_is_told(a_server, tmp_path):
    server = a_server()
    server.known.write_text(server.known_line())
    assert "cannot be read: No such file" in str(refusal(server.hop(key=str(tmp_path / "none"))))
    (tmp_path / "rubbish").write_text("rubbish")
    assert "cannot be used" in str(refusal(server.hop(key=str(tmp_path / "rubbish"))))


@pytest.fixture
def ssh_agent(tmp_path):
    """A real ssh-agent; the path of its socket."""
    path = tmp_path / "agent.sock"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    for _ in range(500):
        if path.exists():
            break
        subprocess.run(["sleep", "0.01"], check=True)
    yield str(path)
    process.terminate()
    process.wait()


def load(agent, key, **env):
    subprocess.run(["ssh-add", "-q", key], env=os.environ | {"SSH_AUTH_SOCK": agent, **env}, check=True)


def test_the_keys_of_an_agent_open_the_door(a_server, ssh_agent):
    server = a_server()
    server.known.write_text(server.known_line())
    assert refusal(server.hop(key=""), auth_sock=ssh_agent).final
    load(ssh_agent, server.key)
    assert visit(server.hop(key=""), auth_sock=ssh_agent)
    assert "permission denied" in str(refusal(server.hop(key="")))  # it was the agent's


def test_a_key_with_a_passphrase_comes_from_the_agent(a_server, ssh_agent, tmp_path):
    server = a_server()
    server.known.write_text(server.known_line())
    locked = make_key(tmp_path / "locked", passphrase="secret")
    with open(server.folder / "authorized", "a") as file:
        file.write(locked.with_suffix(".pub").read_text())
    message = str(refusal(server.hop(key=str(locked))))
    assert message == f"the key {locked} has a passphrase: load it with ssh-add, then type the command again"
    (tmp_path / "ask").write_text("#!/bin/sh\necho secret\n")
    (tmp_path / "ask").chmod(0o700)
    load(ssh_agent, locked, SSH_ASKPASS=str(tmp_path / "ask"), SSH_ASKPASS_REQUIRE="force", DISPLAY=":0")
    assert visit(server.hop(key=str(locked)), auth_sock=ssh_agent)


# ---------------------------------------------------------------- the way


def test_a_port_where_nobody_listens_is_told(a_server):
    server = a_server()
    server.stop()
    failure = refusal(server.hop())
    assert not failure.final
    assert str(failure) == f"127.0.0.1 port {server.port} refused the connection: is sshd running there?"


def test_a_name_that_cannot_be_resolved_is_told():
    failure = refusal(Hop("no-such-host.invalid", key=""))
    assert "the name no-such-host.invalid cannot be resolved" in str(failure)


def test_a_server_behind_another_is_reached_through_it(a_server):
    gate, server = a_server(), a_server()
    for each in (gate, server):
        each.known.write_text(each.known_line())
    assert visit(server.hop(), gate.hop())
    assert "Accepted publickey" in (gate.folder / "log").read_text()
    gate.stop()
    assert f"port {gate.port} refused" in str(refusal(server.hop(), gate.hop()))


def test_a_gate_that_is_not_who_it_was_is_refused(a_server):
    gate, server = a_server(), a_server()
    gate.known.write_text(gate.known_line())
    server.known.write_text(server.known_line())
    gate.new_host_key()
    assert f"ssh-keygen -R '[127.0.0.1]:{gate.port}'" in str(refusal(server.hop(), gate.hop()))


def test_what_is_behind_a_gate_and_does_not_listen_is_told(a_server):
    gate, server = a_server(), a_server()
    gate.known.write_text(gate.known_line())
    server.stop()
    assert f"127.0.0.1 port {server.port} cannot be reached from the host before it" in str(
        refusal(server.hop(), gate.hop())
    )


def test_sshs_own_configuration_is_read(a_server, tmp_path):
    gate, server = a_server(), a_server()
    ssh = tmp_path / "home" / ".ssh"
    ssh.mkdir()
    (ssh / "hosts").write_text(gate.known_line() + server.known_line())
    (ssh / "config").write_text(
        f"Host box\n  HostName 127.0.0.1\n  Port {server.port}\n  ProxyJump gate\n"
        f"Host gate\n  HostName 127.0.0.1\n  Port {gate.port}\n"
        f"Host *\n  IdentityFile {server.key}\n  UserKnownHostsFile {ssh / 'hosts'}\n"
    )
    assert visit(Hop("box"))
    gate.stop()
    assert f"{gate.port} refused" in str(refusal(Hop("box")))


@pytest.mark.parametrize(
    ("text", "hop"),
    [
        ("gate", Hop("gate", 0, "", "k", "f")),
        ("ana@gate", Hop("gate", 0, "ana", "k", "f")),
        ("ana@gate:2222", Hop("gate", 2222, "ana", "k", "f")),
        ("[fe80::1]:2222", Hop("fe80::1", 2222, "", "k", "f")),
        ("fe80::1", Hop("fe80::1", 0, "", "k", "f")),
    ],
)
def test_a_jump_is_read_as_ssh_reads_it(text, hop):
    assert parse_jump(text, Hop("last", 0, "", "k", "f")) == hop
