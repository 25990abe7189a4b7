"""Files that are either the old ones or the new ones, and what is no file."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from ssfl.errors import CheckpointError, ConfigError
from ssfl.files import expanded, remove_unfinished, replacing, write_bytes


def test_a_path_from_home_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/run", "--out") == tmp_path / "run"
    assert expanded(Path("~"), "--out") == tmp_path
    assert expanded("~root", "--out") == Path(pwd.getpwnam("root").pw_dir)
    assert expanded("here/~/run", "--out") == Path("here/~/run")


def test_a_home_that_nobody_has_is_refused_unless_a_file_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^server.start: ~nosuchuser/enc.pt .* is ~nosuchuser: "):
        expanded("~nosuchuser/enc.pt", "server.start")
    Path("~$letter.png").touch()
    assert expanded("~$letter.png", "images") == Path("~$letter.png")


def test_what_a_link_points_to_is_replaced_and_the_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link, far = (tmp_path / name for name in ("elsewhere/target", "link", "far"))
    target.write_bytes(b"old")
    link.symlink_to("elsewhere/target")
    far.symlink_to("link")
    write_bytes(far, b"new")
    assert far.is_symlink()
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert [*target.parent.iterdir()] == [target]


def test_a_link_to_nothing_yet_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    write_bytes(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_bytes(pipe, b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("before", [True, False])
def test_a_name_as_long_as_may_be_is_written(before: bool, tmp_path: Path) -> None:
    path = tmp_path / ("é" * 125 + ".json")  # 255 bytes
    if before:
        path.touch()
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"


def test_what_is_broken_off_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def broken_off() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_a_folder_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Is a directory; what was there before is intact"):
        write_bytes(tmp_path, b"new")


def test_what_a_killed_process_had_begun_to_write_is_known_by_its_name(tmp_path: Path) -> None:
    command = """
import os, signal, sys
from pathlib import Path
from ssfl.files import replacing
with replacing(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", command, str(tmp_path / "below" / "file")], check=False)
    assert len([*(tmp_path / "below").iterdir()]) == 1
    with replacing(tmp_path / "ours") as file:  # a late client of this process is at it
        remove_unfinished(tmp_path)
        file.write(b"whole")
    assert not [*(tmp_path / "below").iterdir()]
    assert (tmp_path / "ours").read_bytes() == b"whole"
