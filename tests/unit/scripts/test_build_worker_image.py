"""`scripts/build_worker_image.py`: the same files make the same archive, wherever and whenever they were written."""

from __future__ import annotations

import importlib.util
import os
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from distributed_grid.config.providers import DockerLocalSettings

SCRIPT = Path(__file__).parents[3] / "scripts" / "build_worker_image.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_worker_image", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def a_tree(root: Path, names: list[str], *, at: float) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
        os.utime(root / name, (at, at))
    (root / "usr/bin/tool").chmod(0o700)
    (root / "tmp").mkdir()
    (root / "bin").symlink_to("usr/bin")
    return root


def test_the_archive_depends_on_names_modes_and_contents_alone(script, tmp_path):
    names = ["usr/bin/tool", "etc/passwd", "usr/lib/a.so", "usr/lib/b.so"]
    first = a_tree(tmp_path / "one", names, at=1_000_000_000)
    second = a_tree(tmp_path / "two", names[::-1], at=1_500_000_000)
    script.pack(first, tmp_path / "one.tar")
    script.pack(second, tmp_path / "two.tar")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
    with tarfile.open(tmp_path / "one.tar") as archive:
        found = {entry.name: (oct(entry.mode), entry.uid, entry.mtime) for entry in archive}
        assert archive.getmember("bin").linkname == "usr/bin"
    assert found["usr/bin/tool"] == ("0o755", 0, 0)
    assert found["etc/passwd"] == ("0o644", 0, 0)
    assert found["tmp"] == ("0o1777", 0, 0)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("/lib/x86_64-linux-gnu/libc.so.6", "usr/lib/x86_64-linux-gnu/libc.so.6"),
        ("/usr/lib/libz.so.1", "usr/lib/libz.so.1"),
        ("/lib64/ld-linux-x86-64.so.2", "usr/lib64/ld-linux-x86-64.so.2"),
        ("/opt/python/lib/libpython3.12.so.1.0", "usr/lib/libpython3.12.so.1.0"),
    ],
)
def test_a_library_is_where_the_loader_finds_it(script, here, there):
    assert script.inside(Path(here)) == Path(there)


def test_an_engine_that_does_not_answer_is_one_line(script, tmp_path, capsys):
    archive = tmp_path / "image.tar"
    archive.write_bytes(b"")
    with pytest.raises(script.CannotBuild, match=r"no answer from the Docker engine at unix://.*/no\.sock"):
        script.give_to_engine(archive, "grid-worker:latest", f"unix://{tmp_path}/no.sock")


def test_image_goes_to_the_engine_of_the_provider_whatever_docker_host_says(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/user/1000/docker.sock")
    options = script.parse_options([])
    assert (options.engine, options.image) == (DockerLocalSettings().endpoint_url, DockerLocalSettings().image)
    assert script.parse_options(["--engine", "unix:///run/other.sock"]).engine == "unix:///run/other.sock"
