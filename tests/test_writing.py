"""Every output is written as a file: links are followed, and devices, pipes and folders stay what
they are.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from weft.errors import UserError
from weft.writing import open_file, replace_file, write

SRC = Path(__file__).resolve().parent.parent / "src" / "weft"
WRITES = re.compile(
    r"(?<!disk)(?<!weight_files)\.write_(text|bytes)\(|os\.re(place|name)\(|O_CREAT|"
    r"(?<!partial\.)\bopen\([^()]*[\"'][wax]b?\+?[\"']"
)
# Places that write only into a folder which they have just made, or into another process.
OWN_FOLDERS = {
    "host/verifiers/_isolation.py": (
        "what a process says of itself in /proc, in folders that it alone sees"
    ),
    "writing.py": "the one place",
    "observe/jsonl.py": "asks for the destination",
    "observe/timeline.py": "asks for the destination",
    "observe/memory.py": "/proc, where Linux takes a command",
    "engine/hf/lora.py": "the folder of an unfinished checkpoint",
    "host/_worker.py": "standard output",
    "host/verifiers/_judge_server.py": "asks for the destination",
    "host/verifiers/_sandbox.py": "a temporary folder",
    "runtime/commands.py": "standard output; asks for the destination",
    "runtime/master.py": "the folder of an unfinished recovery point",
    "runtime/checkpoints.py": "the folder of an unfinished recovery point",
    "runtime/machines.py": "a temporary folder",
    "data/encode_worker.py": "standard output",
    "data/named/fetch.py": "a new name beside the copy",
    "data/named/prepare.py": "new names beside the rows",
    "launch/tpu_host.py": "the folder of a run on a pod's host, where torch and weft's data are not",
    "storage/copies.py": "a lock in weft's own cache",
}


def kinds(folder: Path) -> dict[str, Path]:
    """Paths that are no regular files: a pipe, a link to it, a device, a folder, and a link that
    leads to itself.
    """
    os.mkfifo(folder / "pipe")
    (folder / "to_pipe").symlink_to("pipe")
    (folder / "to_device").symlink_to("/dev/full")
    (folder / "folder").mkdir()
    return {name: folder / name for name in ("pipe", "to_pipe", "to_device", "folder")}


@pytest.mark.parametrize("name", ["pipe", "to_pipe", "to_device", "folder"])
def test_what_is_no_file_is_refused_and_stays(tmp_path, name):
    path = kinds(tmp_path)[name]
    before = sorted((p.name, os.lstat(p).st_mode) for p in tmp_path.iterdir())
    with pytest.raises(
        UserError, match=rf"{name}: is a (pipe or a device|folder), and weft writes files"
    ):
        write(path, "text")
    with pytest.raises(UserError, match="weft writes files"):
        open_file(path, "a")
    assert sorted((p.name, os.lstat(p).st_mode) for p in tmp_path.iterdir()) == before
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_links_are_followed_and_stay_links(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "old.txt").write_text("old")
    links = {"to_old": "there/old.txt", "to_new": "there/new.txt", "twice": "to_old"}
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    write(tmp_path / "to_new", "new")
    write(tmp_path / "twice", "changed")
    with open_file(tmp_path / "to_old", "a") as file:
        file.write(" and more")
    assert {name: os.readlink(tmp_path / name) for name in links} == links
    assert {p.name: p.read_text() for p in (tmp_path / "there").iterdir()} == {
        "old.txt": "changed and more",
        "new.txt": "new",
    }


def test_a_file_keeps_its_permissions_and_what_it_held_where_writing_fails(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    path.chmod(0o640)
    with pytest.raises(KeyboardInterrupt), replace_file(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    write(path, b"new")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o640)
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_pipe_in_place_of_the_temporary_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / ".a.txt.tmp")
    write(tmp_path / "a.txt", "text")
    assert (tmp_path / "a.txt").read_text() == "text"


def test_every_output_goes_through_this_module():
    found = {
        str(path.relative_to(SRC))
        for path in SRC.rglob("*.py")
        if WRITES.search(path.read_text()) and "testing" not in path.parts
    }
    assert found <= OWN_FOLDERS.keys(), (
        "write with weft.writing, which refuses devices and follows links"
    )


def test_several_may_write_one_file_at_once(tmp_path):
    path = tmp_path / "state.json"
    with replace_file(path) as one, replace_file(path) as other:
        one.write_text("same")
        other.write_text("same")
    assert path.read_text() == "same" and [each.name for each in tmp_path.iterdir()] == [
        "state.json"
    ]
