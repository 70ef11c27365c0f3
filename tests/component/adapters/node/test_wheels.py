"""Shipped wheels: packed from the installation here, downloaded only where that does not fit."""

import os
import platform
import subprocess
import sys
import zipfile
from importlib import metadata
from io import BytesIO

import pytest

from distributed_grid import __version__
from distributed_grid.adapters.node.installation import (
    AGENT_PACKAGES,
    Wheel,
    fits,
    gather_wheels,
    own_wheel,
    platforms_of,
    repack,
    version_name,
)
from distributed_grid.adapters.node.node_messages import NodeFacts, NodeOperationFailed

NO_NETWORK = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
LIKE_US = NodeFacts(
    python=platform.python_version(),
    machine=platform.machine(),
    libc=platform.libc_ver()[0],
    libc_version=platform.libc_ver()[1],
    executable="/usr/bin/python3",
)
DEBIAN = NodeFacts(python="3.11.2", machine="x86_64", libc="glibc", libc_version="2.36")


def test_a_node_like_ours_needs_no_network_at_all(tmp_path):
    wheels = gather_wheels(LIKE_US, tmp_path / "cache", NO_NETWORK)
    names = [wheel.name.split("-")[0] for wheel in wheels]
    assert names == ["distributed_grid", *(name.replace("-", "_") for name in AGENT_PACKAGES)]
    assert not (tmp_path / "cache").exists()


def test_the_same_files_make_the_same_bytes():
    assert own_wheel() == own_wheel()
    installed = metadata.distribution("psutil")
    assert repack(installed, LIKE_US) == repack(installed, LIKE_US)


def test_what_is_shipped_runs_an_agent_and_nothing_else_is_needed(tmp_path):
    for wheel in gather_wheels(LIKE_US, tmp_path / "cache", NO_NETWORK):
        with zipfile.ZipFile(BytesIO(wheel.data)) as archive:
            archive.extractall(tmp_path / "site")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import distributed_grid.agent.agent_process"
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
    assert repack(metadata.distribution("msgspec"), other) is None
    assert repack(metadata.distribution("nvidia-ml-py"), other) is not None


def test_what_fits_no_machine_and_cannot_be_fetched_is_told_in_one_sentence(tmp_path):
    strange = NodeFacts("3.12.0", "riscv64", "glibc", "2.39", "/usr/bin/python3")
    with pytest.raises(
        NodeOperationFailed, match=r"msgspec .* for Python 3.12 on riscv64 \(glibc\) could not be downloaded: ERROR"
    ):
        gather_wheels(strange, tmp_path, NO_NETWORK)
    assert list(tmp_path.iterdir()) == []


def test_what_was_downloaded_before_is_used_again(tmp_path):
    other = NodeFacts("3.12.0", "riscv64", "glibc", "2.39", "/usr/bin/python3")
    for name in AGENT_PACKAGES:
        version, stem = metadata.version(name), name.replace("-", "_")
        (tmp_path / f"{stem}-{version}-cp312-cp312-manylinux_2_39_riscv64.whl").write_bytes(name.encode())
    kept = {wheel.name.split("-")[0]: wheel.data for wheel in gather_wheels(other, tmp_path, NO_NETWORK)}
    assert kept["msgspec"] == b"msgspec"
    assert kept["nvidia_ml_py"] != b"nvidia-ml-py"  # pure Python: ours fits


def test_a_wheel_is_downloaded_where_ours_does_not_fit(tmp_path):
    """From a folder that pip looks in, as it would from an index."""
    version, index, cache = metadata.version("msgspec"), tmp_path / "index", tmp_path / "cache"
    index.mkdir()
    for name in ("msgspec", "psutil", "websockets", "xxhash", "lz4"):
        number = metadata.version(name)
        path = index / f"{name}-{number}-cp312-cp312-manylinux_2_17_aarch64.manylinux2014_aarch64.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(
                f"{name}-{number}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
            )
            archive.writestr(f"{name}-{number}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: cp312-cp312-any\n")
            archive.writestr(f"{name}-{number}.dist-info/RECORD", "")
    arm = NodeFacts("3.12.3", "aarch64", "glibc", "2.36", "/usr/bin/python3")
    found = gather_wheels(arm, cache, {**NO_NETWORK, "PIP_FIND_LINKS": str(index)})
    assert found[1].name == f"msgspec-{version}-cp312-cp312-manylinux_2_17_aarch64.manylinux2014_aarch64.whl"
    assert (cache / found[1].name).read_bytes() == found[1].data
    assert gather_wheels(arm, cache, NO_NETWORK) == found  # the second time without


def test_another_source_another_python_or_another_interpreter_is_another_version():
    wheels = [own_wheel()]
    first = version_name(wheels, LIKE_US)
    assert first.startswith(f"{__version__}-")
    changed = [Wheel("distributed_grid.whl", wheels[0].data + b"x")]
    assert len({first, version_name(changed, LIKE_US), version_name(wheels, NodeFacts("3.12.0", "x86_64"))}) == 3
    moved = NodeFacts(LIKE_US.python, LIKE_US.machine, executable="/opt/python/bin/python3")
    assert version_name(wheels, moved) != first


# ---------------------------------------------------------------- tags


@pytest.mark.parametrize(
    "tag",
    [
        "py3-none-any",
        "py2.py3-none-any",
        "cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64",
        "cp311-cp311-manylinux_2_36_x86_64",
        "cp36-abi3-manylinux2010_x86_64",
        "cp311-abi3-manylinux1_x86_64",
        "cp311-none-linux_x86_64",
    ],
)
def test_a_wheel_that_fits(tag):
    assert fits(tag, DEBIAN)


@pytest.mark.parametrize(
    ("tag", "why"),
    [
        ("cp312-cp312-manylinux_2_17_x86_64", "another Python"),
        ("cp312-abi3-manylinux_2_17_x86_64", "made for a newer Python"),
        ("cp311-cp311d-manylinux_2_17_x86_64", "another build of it"),
        ("py2-none-any", "an ancient Python"),
        ("cp311-cp311-manylinux_2_17_aarch64", "another machine"),
        ("cp311-cp311-manylinux_2_39_x86_64", "a newer C library"),
        ("cp311-cp311-musllinux_1_2_x86_64", "another C library"),
        ("cp311-cp311-macosx_11_0_arm64", "another system"),
        ("cp313-cp313t-manylinux_2_17_x86_64", "free threads"),
    ],
)
def test_a_wheel_that_does_not_fit(tag, why):
    assert not fits(tag, DEBIAN), why


def test_a_node_with_an_old_library_takes_only_old_wheels():
    old = NodeFacts(python="3.11.9", machine="x86_64", libc="glibc", libc_version="2.17")
    assert fits("cp311-cp311-manylinux2014_x86_64", old)
    assert not fits("cp311-cp311-manylinux_2_28_x86_64", old)
    assert "manylinux_2_28_x86_64" not in platforms_of(old)
    assert platforms_of(old)[0] == "manylinux_2_17_x86_64"


def test_musl_nodes_take_musl_wheels():
    alpine = NodeFacts(python="3.12.1", machine="aarch64", libc="musl", libc_version="1.2")
    assert fits("cp312-cp312-musllinux_1_2_aarch64", alpine)
    assert not fits("cp312-cp312-manylinux_2_17_aarch64", alpine)
    assert platforms_of(alpine)[0] == "musllinux_1_2_aarch64"


def test_platforms_are_named_from_the_newest_to_the_oldest():
    names = platforms_of(DEBIAN)
    assert names[0] == "manylinux_2_36_x86_64"
    assert names[-3:] == ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
