"""Files: read only if they are regular and fit, written whole or not at all, and their names as they may be shown."""

from __future__ import annotations

import math
import os
import stat
import time
import unicodedata
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import numpy as np

KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode's control and format characters, halves of pairs, and separators of lines."""


def printable(text: str) -> str:
    r"""A name as it may be shown: what would steer a terminal, or turn the direction of writing, is spelt out.

    >>> printable("cat\x1b[31m\n.png"), printable("Katze ü 猫.png")
    ('cat\\x1b[31m\\n.png', 'Katze ü 猫.png')
    """
    if text.isprintable():
        return text
    return "".join(repr(c)[1:-1] if unicodedata.category(c) in CONTROLS else c for c in text)


def require_regular(path: Path) -> None:
    """That a path is a regular file, or a link to one: others may never end, or never begin."""
    _require_regular(path, path.stat().st_mode)


def open_regular(path: Path) -> BinaryIO:
    """A regular file, or a link to one, to be read; anything else is an OSError at once, and is not waited for."""
    require_regular(path)
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    file = os.fdopen(number, "rb")
    try:
        _require_regular(path, os.fstat(file.fileno()).st_mode)  # it may be another one by now
    except BaseException:
        file.close()
        raise
    return file


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((words for is_one, words in KINDS if is_one(mode)), "something else")
        raise OSError(f"{path} is {kind}, and not a regular file")


MOST_MEMBERS = 10_000
"""Arrays in an .npz file."""


def most_bytes() -> int:
    """Bytes that what is in one file or folder may take: half of the machine's memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 2**34


def require_room(count: int, what: str) -> None:
    """That so many bytes may be read at once, else a ValueError that names the limit."""
    if count > most_bytes():
        raise ValueError(
            f"{what} would take {count:,} bytes, more than the {most_bytes():,} allowed (half of this machine's memory)"
        )


def read_arrays(file: IO[bytes], wanted: Callable[[str], bool]) -> tuple[dict[str, np.ndarray[Any, Any]], list[str]]:
    """The arrays of an .npz file whose names are wanted, and the names of all; nothing is unpickled.

    What a member claims to be is compared with the bytes it has before anything is allocated. Anything wrong is a
    ValueError, a zipfile.BadZipFile, or an error of the decompression.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if len(entries) > MOST_MEMBERS:
            raise ValueError(f"it has {len(entries):,} members, more than the {MOST_MEMBERS:,} allowed")
        names = [entry.filename.removesuffix(".npy") for entry in entries]
        if len(set(names)) < len(names):
            raise ValueError("two of its members have one name")
        arrays = {}
        for name, entry in zip(names, entries, strict=True):
            if entry.flag_bits & 0x1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{name} is encrypted, or compressed in an unknown way")
            if wanted(name):
                with archive.open(entry) as member:
                    arrays[name] = read_array(member, entry.file_size, name)
        return arrays, names


def read_array(file: IO[bytes], size: int, name: str) -> np.ndarray[Any, Any]:
    """The array of a file of `size` bytes in numpy's own format, .npy; a ValueError if it is something else."""
    import numpy as np

    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"{name} is of the unknown version {version}")
    try:
        shape, backwards, dtype = readers[version](file)
    except Exception as error:  # numpy reads it as a Python expression, which may go wrong in any way
        raise ValueError(f"{name} has a header that is none of numpy's ({first_words(error)})") from error
    if dtype.hasobject or dtype.itemsize == 0:
        raise ValueError(f"{name} holds {dtype}, and not plain numbers or texts")
    count = math.prod(shape) * dtype.itemsize
    if count != size - file.tell() or any(n < 0 for n in shape):
        raise ValueError(f"{name} claims the shape {shape}, {count:,} bytes, and has {size - file.tell():,}")
    require_room(count, name)
    if count == 0:
        return np.empty(shape, dtype)
    content = bytearray(count)
    read_whole(file, content, name)
    flat = np.frombuffer(content, dtype)
    return flat.reshape(shape[::-1]).T if backwards else flat.reshape(shape)


def first_words(error: Exception) -> str:
    """The beginning of what an error says, or its kind."""
    return next(iter(str(error).splitlines()), "")[:100] or type(error).__name__


def read_whole(file: IO[bytes], content: bytearray, name: str) -> None:
    """Fill `content` from a file; a ValueError if it ends before."""
    view, done = memoryview(content), 0
    while done < len(content):
        got = file.readinto(view[done : done + 2**24])  # type: ignore[attr-defined]
        if not got:
            raise ValueError(f"{name} ends after {done:,} of {len(content):,} bytes")
        done += got


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; on leaving, its bytes are on the disk and it takes the name.

    If anything fails, the temporary file is removed and `path` is what it was; an error of the system names `path`.
    """
    temporary = _beside(path)
    try:
        with _named(path):
            yield temporary
            _flush(temporary)
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _beside(path: Path) -> Path:
    """A name that no other process or thread takes."""
    return path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of the system says which file could not be written."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{path} could not be written: {error.strerror or error}") from error


def write_text_whole(path: Path, text: str) -> None:
    """A text file in UTF-8, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_files_whole(folder: Path, contents: Mapping[str, bytes]) -> dict[str, Path]:
    """Files in a folder, which is made if need be: all of them, or none where one does not fit on the disk.

    Everything is on the disk before anything takes its name, in the order given; two writers wait for one another, so
    that the files of a folder are those of one of them.
    """
    require_writable_folder(folder)
    paths = {name: folder / name for name in contents}
    for path in paths.values():
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; remove it, or give another one to write to")
    with made_if_needed(folder), writing_to(folder):
        temporary = {name: _beside(path) for name, path in paths.items()}
        try:
            for name, content in contents.items():
                with _named(paths[name]):
                    temporary[name].write_bytes(content)
                    _flush(temporary[name])
            for name, path in paths.items():
                with _named(path):
                    os.replace(temporary[name], path)
        finally:
            for path in temporary.values():
                with suppress(OSError):
                    path.unlink(missing_ok=True)
    return paths


@contextmanager
def made_if_needed(folder: Path) -> Iterator[None]:
    """A folder that is there; if what follows fails, those that were made for it are removed, unless they are used."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    with _named(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for place in missing:
            with suppress(OSError):
                place.rmdir()
        raise


PATIENCE = 60.0
"""Seconds that one writer waits for another."""


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Alone among those who ask: another process or thread waits its turn, and after a minute is turned away.

    The system gives the turn back when a process ends in whatever way. Where it knows no such locks, nobody waits.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > end:
                    text = f"another process is writing to {folder}; wait until it is done, or give another folder"
                    raise BlockingIOError(error.errno, text) from error
                time.sleep(0.02)
            except OSError:
                break
        yield
    finally:
        os.close(place)


def require_writable_folder(folder: Path) -> None:
    """That a folder is there and can be written to, or can be made; said before the work is done, not after."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is a file; give a folder to write to")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{there} cannot be written to; give another folder")
