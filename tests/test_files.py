"""Files are written whole or not at all, and a folder that cannot be written to is named before the work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from netmoments.files import require_writable_folder, whole_file, write_text_whole


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
