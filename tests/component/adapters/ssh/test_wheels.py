"""What is shipped: packed from what is installed here, downloaded only where that does not fit."""

import os
import platform
import subprocess
import sys
import zipfile
from importlib import metadata
from io import BytesIO

import pytest

from distributed_grid import __version__
from distributed_grid.adapters.node.errors import NodeOperationFailed
from distributed_grid.adapters.node.messages import NodeFacts
from distributed_grid.adapters.node.wheels import NEEDED, Wheel, gather, own_wheel, repacked, version_of

NO_NETWORK = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
LIKE_US = NodeFacts(
    python=platform.python_version(),
    machine=platform.machine(),
    libc=platform.libc_ver()[0],
    libc_version=platform.libc_ver()[1],
    executable="/usr/bin/python3",
)


def test_a_node_like_ours_needs_no_network_at_all(tmp_path):
    wheels = gather(LIKE_US, tmp_path / "cache", NO_NETWORK)
    names = [wheel.name.split("-")[0] for wheel in wheels]
    assert names == ["distributed_grid", *(name.replace("-", "_") for name in NEEDED)]
    assert not (tmp_path / "cache").exists()


def test_the_same_files_make_the_same_bytes():
    assert own_wheel() == own_wheel()
    installed = metadata.distribution("psutil")
    assert repacked(installed, LIKE_US) == repacked(installed, LIKE_US)


def test_what_is_shipped_runs_an_agent_and_nothing_else_is_needed(tmp_path):
    for wheel in gather(LIKE_US, tmp_path / "cache", NO_NETWORK):
        with zipfile.ZipFile(BytesIO(wheel.data)) as archive:
            archive.extractall(tmp_path / "site")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import distributed_grid.agent.process"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_our_own_wheel_has_every_file_and_no_byte_code():
    with zipfile.ZipFile(BytesIO(own_wheel().data)) as archive:
        names = archive.namelist()
        version = archive.read(f"distributed_grid-{__version__}.dist-info/METADATA").decode()
    assert "distributed_grid/agent/execution/shim.py" in names
    assert "distributed_grid/adapters/node/node_script.py" in names
    assert not [name for name in names if name.endswith(".pyc") or "__pycache__" in name]
    assert f"Version: {__version__}" in version


def test_what_was_compiled_for_another_python_is_not_packed_for_it():
    other = NodeFacts("3.13.0" if sys.version_info[:2] != (3, 13) else "3.12.0", LIKE_US.machine, "glibc", "2.36")
    assert repacked(metadata.distribution("msgspec"), other) is None
    assert repacked(metadata.distribution("click"), other) is not None


def test_what_fits_no_machine_and_cannot_be_fetched_is_told_in_one_sentence(tmp_path):
    strange = NodeFacts("3.12.0", "riscv64", "glibc", "2.39", "/usr/bin/python3")
    with pytest.raises(
        NodeOperationFailed, match=r"msgspec .* for Python 3.12 on riscv64 \(glibc\) could not be downloaded: ERROR"
    ):
        gather(strange, tmp_path, NO_NETWORK)
    assert list(tmp_path.iterdir()) == []


def test_what_was_downloaded_before_is_used_again(tmp_path):
    other = NodeFacts("3.12.0", "riscv64", "glibc", "2.39", "/usr/bin/python3")
    for name in NEEDED:
        version, stem = metadata.version(name), name.replace("-", "_")
        (tmp_path / f"{stem}-{version}-cp312-cp312-manylinux_2_39_riscv64.whl").write_bytes(name.encode())
    kept = {wheel.name.split("-")[0]: wheel.data for wheel in gather(other, tmp_path, NO_NETWORK)}
    assert kept["msgspec"] == b"msgspec"
    assert kept["click"] != b"click"  # pure Python: ours fits


def test_a_wheel_is_downloaded_where_ours_does_not_fit(tmp_path):
    """From a folder that pip looks in, as it would from an index."""
    version, shelf, cache = metadata.version("msgspec"), tmp_path / "shelf", tmp_path / "cache"
    shelf.mkdir()
    for name in ("msgspec", "psutil", "websockets", "xxhash", "lz4"):
        number = metadata.version(name)
        path = shelf / f"{name}-{number}-cp312-cp312-manylinux_2_17_aarch64.manylinux2014_aarch64.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(
                f"{name}-{number}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
            )
            archive.writestr(f"{name}-{number}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: cp312-cp312-any\n")
            archive.writestr(f"{name}-{number}.dist-info/RECORD", "")
    arm = NodeFacts("3.12.3", "aarch64", "glibc", "2.36", "/usr/bin/python3")
    found = gather(arm, cache, {**NO_NETWORK, "PIP_FIND_LINKS": str(shelf)})
    assert found[1].name == f"msgspec-{version}-cp312-cp312-manylinux_2_17_aarch64.manylinux2014_aarch64.whl"
    assert (cache / found[1].name).read_bytes() == found[1].data
    assert gather(arm, cache, NO_NETWORK) == found  # the second time without


def test_another_source_another_python_or_another_interpreter_is_another_version():
    wheels = [own_wheel()]
    first = version_of(wheels, LIKE_US)
    assert first.startswith(f"{__version__}-")
    changed = [Wheel("distributed_grid.whl", wheels[0].data + b"x")]
    assert len({first, version_of(changed, LIKE_US), version_of(wheels, NodeFacts("3.12.0", "x86_64"))}) == 3
    moved = NodeFacts(LIKE_US.python, LIKE_US.machine, executable="/opt/python/bin/python3")
    assert version_of(wheels, moved) != first
