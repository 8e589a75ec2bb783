"""Files: written whole or not at all, into folders that are checked before the work, and read if regular and small."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from netmoments import files
from netmoments.files import (
    first_line,
    made_if_needed,
    open_regular,
    printable,
    read_array,
    require_room,
    require_writable_folder,
    whole_file,
    write_files_whole,
    write_text_whole,
    writing_to,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_takes_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "a.txt"
    with whole_file(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
        assert temporary.parent == tmp_path
    assert path.read_text() == "new"
    write_text_whole(path, "ρ → ±1\n")
    assert path.read_text(encoding="utf-8") == "ρ → ±1\n"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_was_there_stays_when_something_fails(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def interrupted() -> None:
        with whole_file(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        interrupted()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_an_error_of_the_system_names_the_file(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"a\.txt could not be written: No space left on device") as caught:
        write_text_whole(tmp_path / "a.txt", "text")
    assert caught.value.errno == 28
    assert names(tmp_path) == []


def test_folders_to_write_to(tmp_path, monkeypatch):
    require_writable_folder(tmp_path)
    require_writable_folder(tmp_path / "not" / "yet" / "there")
    assert names(tmp_path) == []
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match="file is a file; give a folder to write to"):
            require_writable_folder(path)
    monkeypatch.setattr(os, "access", lambda *_: False)  # for whoever may write everywhere
    with pytest.raises(PermissionError, match="cannot be written to; give another folder"):
        require_writable_folder(tmp_path / "new")


OLD = {"a.txt": b"old a", "b.txt": b"old b", "c.txt": b"old c"}
NEW = {"a.txt": b"new a", "b.txt": b"new b" * 1000, "c.txt": b"new c"}


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_are_written_together(tmp_path):
    folder = tmp_path / "a" / "b"
    assert write_files_whole(folder, OLD) == {name: folder / name for name in OLD}
    assert held(folder) == OLD
    write_files_whole(folder, NEW)
    assert held(folder) == NEW
    with pytest.raises(NotADirectoryError, match="is a file"):
        write_files_whole(folder / "a.txt", NEW)


def test_a_full_disk_leaves_all_files_as_they_were(tmp_path, monkeypatch):
    """The second of three files does not fit, so not even the first is replaced."""
    write_files_whole(tmp_path, OLD)
    plain = Path.write_bytes

    def until_full(self: Path, content: bytes) -> int:
        if len(content) > 1000:
            plain(self, content[:1000])
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(self, content)

    monkeypatch.setattr(Path, "write_bytes", until_full)
    with pytest.raises(OSError, match=r"b\.txt could not be written: No space left on device") as caught:
        write_files_whole(tmp_path, NEW)
    assert caught.value.errno == errno.ENOSPC
    assert held(tmp_path) == OLD
    with pytest.raises(OSError, match="No space left"):
        write_files_whole(tmp_path / "new" / "folder", NEW)
    assert not (tmp_path / "new").exists()


def test_a_folder_in_the_place_of_a_file_is_named_before_anything_is_written(tmp_path):
    (tmp_path / "c.txt").mkdir()
    with pytest.raises(IsADirectoryError, match=r"c\.txt is a folder"):
        write_files_whole(tmp_path, NEW)
    assert names(tmp_path) == ["c.txt"]


LIMITED = """
import resource, sys
from pathlib import Path
from netmoments.files import write_files_whole
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    write_files_whole(Path(sys.argv[1]), {"a.txt": b"new a", "b.txt": b"new b" * 1000, "c.txt": b"new c"})
except OSError as error:
    print(error.strerror)
"""


def test_a_limit_of_the_system_is_as_a_full_disk(tmp_path):
    """A limit on the size of files, in a process of its own."""
    write_files_whole(tmp_path, OLD)
    said = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert said.stdout.strip().endswith("b.txt could not be written: File too large")
    assert held(tmp_path) == OLD


def test_two_writers_leave_the_files_of_one(tmp_path):
    """Eight threads, which share a process number, write many times at once."""
    sets = [{name: f"{name} of {number}".encode() * 500 for name in OLD} for number in range(8)]

    def write(number: int) -> None:
        for _ in range(10):
            write_files_whole(tmp_path, sets[number])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held(tmp_path) in sets


def test_a_writer_that_does_not_end_is_not_waited_for_forever(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", 0.1)
    with writing_to(tmp_path), pytest.raises(BlockingIOError, match="another process is writing to"):
        write_files_whole(tmp_path, NEW)
    write_files_whole(tmp_path, NEW)


def test_where_there_are_no_locks_nobody_waits(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with writing_to(tmp_path):
        write_files_whole(tmp_path, NEW)
    assert held(tmp_path) == NEW


def test_folders_that_were_made_for_nothing_are_removed(tmp_path):
    (tmp_path / "there").mkdir()

    def failing(folder: Path) -> None:
        with made_if_needed(folder):
            assert folder.is_dir()
            raise KeyboardInterrupt

    for folder in (tmp_path / "there", tmp_path / "there" / "new" / "newer"):
        with pytest.raises(KeyboardInterrupt):
            failing(folder)
    assert names(tmp_path) == ["there"]
    assert names(tmp_path / "there") == []


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("cat.png", "cat.png"),
        ("Katze ü 猫 [bold]\u00a0x.png", "Katze ü 猫 [bold]\u00a0x.png"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("a\nb\tc\rd\x7f\x9b", r"a\nb\tc\rd\x7f\x9b"),
        ("\u202egpj.exe\u2028\u200b", r"\u202egpj.exe\u2028\u200b"),
        (os.fsdecode(b"\xff.png"), r"\udcff.png"),
        ("it's", "it's"),
        ("it's\x1b", r"it's\x1b"),
    ],
)
def test_names_as_they_may_be_shown(name, shown):
    assert printable(name) == shown
    printable(name).encode()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  one"), "one"),
        (ValueError(" "), "ValueError"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_what_is_told_of_an_error(error, told):
    assert first_line(error) == told


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("a")
    for name in ("a", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"abc"
    os.mkfifo(tmp_path / "fifo")
    for name, kind in (("fifo", "a FIFO"), (".", "a folder"), ("/dev/zero", "a device")):
        with pytest.raises(OSError, match=f"is {kind}, and not a regular file"):
            open_regular(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


def test_a_file_that_becomes_another_on_the_way(tmp_path, monkeypatch):
    """A file that is replaced between the check and the opening is checked again."""
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr(files, "require_regular", lambda path: None)
    with pytest.raises(OSError, match="is a FIFO"):
        open_regular(tmp_path / "fifo")


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["u1", ">f4", "f8", "U3", "S2", "?"])
def test_arrays_are_read_as_numpy_reads_them(tmp_path, order, dtype):
    wanted = np.asarray(np.arange(24).reshape(2, 3, 4).astype(dtype), order=order)
    path = tmp_path / "a.npy"
    np.save(path, wanted)
    with path.open("rb") as file:
        read = read_array(file, path.stat().st_size, "a")
    np.testing.assert_array_equal(read, wanted)
    assert read.dtype == wanted.dtype
    assert read.flags.writeable


def test_arrays_that_are_not_plain(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.array([{}]), allow_pickle=True)
    with path.open("rb") as file, pytest.raises(ValueError, match="a holds object, and not plain numbers"):
        read_array(file, path.stat().st_size, "a")


@pytest.mark.parametrize("header", [b"(" * 100, b"1" * 100, b"{'descr': '|u1'" + b" " * 85, b"\xff" * 100])
def test_a_header_that_is_no_header(tmp_path, header):
    """Numpy reads the header as a Python expression, and lets through any error of that."""
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n")
    with path.open("rb") as file, pytest.raises(ValueError, match="a has a header that is none of numpy's"):
        read_array(file, path.stat().st_size, "a")


def test_what_fits(monkeypatch):
    monkeypatch.setattr(files, "most_bytes", lambda: 1000)
    require_room(1000, "this")
    with pytest.raises(ValueError, match="this would take 1,001 bytes, more than the 1,000 allowed"):
        require_room(1001, "this")
    monkeypatch.undo()
    assert files.most_bytes() > 2**20
    monkeypatch.delattr(os, "sysconf")
    assert files.most_bytes() == 2**34
