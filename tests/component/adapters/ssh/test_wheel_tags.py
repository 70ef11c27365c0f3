"""Which wheels fit which node."""

import pytest

from distributed_grid.adapters.node.messages import NodeFacts
from distributed_grid.adapters.node.wheel_tags import fits, platforms_of

DEBIAN = NodeFacts(python="3.11.2", machine="x86_64", libc="glibc", libc_version="2.36")


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
