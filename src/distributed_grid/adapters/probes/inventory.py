"""What a machine is made of, for people and records: processor, disks. Amounts to lend are in `machine.py`."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed_grid.adapters.probes import procfs


@dataclass(frozen=True, slots=True)
class Disk:
    """A mounted disk; `free_bytes` is what an ordinary user may still write."""

    mountpoint: str
    device: str
    kind: str
    total_bytes: int
    free_bytes: int


def physical_cores(root: Path, cores: Sequence[int]) -> int:
    """How many cores these are when hyper-threads of one core count once; all of them where nobody says."""
    topology = [root / f"sys/devices/system/cpu/cpu{core}/topology" for core in cores]
    whole = {(_text(at / "physical_package_id"), _text(at / "core_id")) for at in topology}
    return len(cores) if ("", "") in whole else len(whole)


def cpu_model(root: Path) -> str:
    """The processor's name, as its maker writes it; the architecture where it has none."""
    named: dict[str, str] = {}
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        named.setdefault(key.strip(), value.strip())
    return next(
        (named[key] for key in ("model name", "Model", "Hardware", "cpu") if named.get(key)), platform.machine()
    )


def cpu_max_mhz(root: Path) -> int | None:
    """The fastest the processor can run, or runs now; None where nobody says, as in many virtual machines."""
    khz = _text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    if khz.isdigit():
        return int(khz) // 1000
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "cpu MHz":
            return round(float(value))
    return None


def disks() -> tuple[Disk, ...]:
    """The disks with a file system on them, and whatever `/` is on, each once. Network file systems are left out."""
    import psutil  # slow to import, and only this needs it

    found: dict[str, Disk] = {}
    mounted = [(part.device, part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=False)]
    for device, place, kind in sorted(mounted, key=lambda one: len(one[1])):
        if device not in found and Path(place).is_dir():  # a file can be mounted on, too: containers do it
            found.update(_disk(device, place, kind))
    if not any(disk.mountpoint == "/" for disk in found.values()):
        found = _disk("/", "/", "") | found
    return tuple(found.values())


def _disk(device: str, place: str, kind: str) -> dict[str, Disk]:
    import psutil

    try:
        usage = psutil.disk_usage(place)
    except OSError:  # unmounted meanwhile, or not ours to see
        return {}
    return {device: Disk(place, device, kind, usage.total, usage.free)}


def _text(file: Path) -> str:
    try:
        return procfs.contents(file).decode(errors="replace").strip()
    except OSError:
        return ""
