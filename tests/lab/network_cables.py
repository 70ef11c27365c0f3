"""The cable between a host and the lab's bridge: it can be pulled, mended and made slow."""

from __future__ import annotations

import subprocess

BURST_BYTES = 32 * 1024
QUEUE_MS = 400


class Cable:
    """One end hangs on the bridge; the other is `eth0` of whatever process 1 it is plugged into."""

    def __init__(self, bridge: str, name: str, address: str, mac: str) -> None:
        self.name = name
        self._bridge = bridge
        self._address = address
        self._mac = mac
        self._pid: int | None = None
        self._cut = False
        self._kbit: int | None = None

    def plug(self, pid: int) -> None:
        """Give the host of this process its address. A cut stays cut, a slow cable stays slow."""
        self._pid = pid
        ip(
            f"link add {self.name} type veth peer name eth0 address {self._mac} netns {pid}",
            f"link set {self.name} master {self._bridge} {'down' if self._cut else 'up'}",
        )
        ip("link set lo up", f"address add {self._address}/24 dev eth0", "link set eth0 up", inside=pid)
        if self._kbit is not None:
            self.slow(self._kbit)

    def unplug(self) -> None:
        """Take it away as a power cut does: nobody gets to say goodbye. Unplugging twice is harmless."""
        self._pid = None
        subprocess.run(["ip", "link", "delete", self.name], capture_output=True, check=False)

    @property
    def is_cut(self) -> bool:
        return self._cut

    def cut(self) -> None:
        """Nothing passes. Cutting twice is no error."""
        self._cut = True
        ip(f"link set {self.name} down")

    def heal(self) -> None:
        """It passes again; a whole cable may be healed."""
        self._cut = False
        ip(f"link set {self.name} up")

    def slow(self, kbit: int | None) -> None:
        """So many kilobits a second each way; None is full speed."""
        ends: tuple[tuple[str, int | None], ...] = ((self.name, None), ("eth0", self._pid))
        for device, inside in ends:
            if kbit is not None:
                rate = ["tbf", "rate", f"{kbit}kbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"]
                _tc(["replace", "dev", device, "root", *rate], inside)
            elif self._kbit is not None:
                _tc(["delete", "dev", device, "root"], inside)
        self._kbit = kbit

    def mend(self) -> None:
        """Whole and fast, as it was new; costs nothing where it is."""
        if self._cut:
            self.heal()
        if self._kbit is not None:
            self.slow(None)


def ip(*commands: str, inside: int | None = None) -> None:
    """Run commands of `ip` in one go, in the network of this process or of another; the first that fails raises."""
    done = subprocess.run(
        [*_network(inside), "ip", "-batch", "-"],
        input="".join(f"{command}\n" for command in commands),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"ip: {'; '.join(commands)}: {done.stderr.strip()}")


def _tc(words: list[str], inside: int | None) -> None:
    subprocess.run([*_network(inside), "tc", "qdisc", *words], check=True, capture_output=True)


def _network(pid: int | None) -> list[str]:
    return [] if pid is None else ["nsenter", "--target", str(pid), "--net"]
