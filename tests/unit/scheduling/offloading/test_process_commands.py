"""Shape of a process's command: what one consent covers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.scheduling.offloading.process_commands import MAX_SHAPE_CHARS, command_shape


@pytest.mark.parametrize(
    ("command", "shape"),
    [
        ("python train.py --epochs 3 --lr 0.1", "python train.py --epochs --lr"),
        ("/usr/bin/python3.11 -u train.py --lr=0.2 --epochs 9 data.csv", "python train.py --epochs --lr"),
        ("python3 /srv/alice/work/train.py", "python train.py"),
        ("python3 ../other/train.py", "python /srv/alice/other/train.py"),
        ("venv/bin/python -W ignore -X dev train.py -v", "python train.py -v"),
        ("python -m torch.distributed.run --nproc-per-node 4 x.py", "python -m torch.distributed.run --nproc-per-node"),
        ("git clone https://host/x", "git clone"),
        ("sleep 100", "sleep"),
        ("make -j8 all", "make -j"),
        ("java -Xmx4g -jar sim.jar --seed 4", "java -jar sim.jar --seed"),
        ("./solve -n5 -5 --tol=1e-3 -- --not-an-option", "solve --tol -n"),
        ("/home/bob/solve 3", "/home/bob/solve"),
        ("/usr/bin/ffmpeg -i in.mp4 out.mp4", "ffmpeg -i"),
    ],
)
def test_shape(command: str, shape: str) -> None:
    assert command_shape(command.split(), "/srv/alice/work") == shape


def test_code_on_the_command_line_is_part_of_the_shape() -> None:
    one, other = (command_shape(["sh", "-c", code]) for code in ("make data", "rm -r data"))
    assert one != other
    assert "data" not in one
    assert command_shape(["python", "-c", "x"]) != command_shape(["python", "-c", "y"])
    assert command_shape(["sh", "-c", "a\nb"]) != command_shape(["sh", "-c", "a?b"])
    assert command_shape(["./a\nb"]) != command_shape(["./a?b"])
    assert command_shape(["timeout", "9", "make"]) != command_shape(["timeout", "9", "rm"])


def test_no_command_has_no_shape() -> None:
    assert command_shape([]) == ""


@given(st.lists(st.text(max_size=300), max_size=20), st.sampled_from(["", "/", "/srv/alice"]))
def test_every_command_has_a_bounded_shape_that_stays_the_same(words: list[str], cwd: str) -> None:
    shape = command_shape(words, cwd)
    assert len(shape) <= MAX_SHAPE_CHARS
    assert shape == command_shape(words, cwd)
