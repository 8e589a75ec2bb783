"""Safe work with files: only regular ones of a fitting size are read, and files are written whole or not at all.

`printable` makes names of files safe to show on a terminal, and `first_line` is what is told of an error.
"""

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
"""What a path may be besides a regular file, by the test that recognizes it."""
CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of control and format characters, surrogates, and line and paragraph separators."""


def printable(text: str) -> str:
    r"""A name that is safe to show: characters that control a terminal or the direction of writing are escaped.

    >>> printable("cat\x1b[31m\n.png"), printable("Katze ü 猫.png")
    ('cat\\x1b[31m\\n.png', 'Katze ü 猫.png')
    """
    if text.isprintable():
        return text
    return "".join(repr(c)[1:-1] if unicodedata.category(c) in CONTROLS else c for c in text)


def require_regular(path: Path) -> None:
    """Require that a path is a regular file, or a link to one: reading others may block, or never end."""
    _require_regular(path, path.stat().st_mode)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading; anything else is an OSError at once."""
    require_regular(path)
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    file = os.fdopen(number, "rb")
    try:
        _require_regular(path, os.fstat(file.fileno()).st_mode)  # the path may have changed in between
    except BaseException:
        file.close()
        raise
    return file


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((words for is_kind, words in KINDS if is_kind(mode)), "something else")
        raise OSError(f"{path} is {kind}, and not a regular file")


MOST_MEMBERS = 10_000
"""Arrays that an .npz file may hold."""


def most_bytes() -> int:
    """The bytes that the contents of one file or folder may take: half of the machine's memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 2**34


def require_room(count: int, what: str) -> None:
    """Require that `count` bytes may be read at once, else raise a ValueError that names the limit."""
    if count > most_bytes():
        raise ValueError(
            f"{what} would take {count:,} bytes, more than the {most_bytes():,} allowed (half of this machine's memory)"
        )


def read_arrays(file: IO[bytes], wanted: Callable[[str], bool]) -> tuple[dict[str, np.ndarray[Any, Any]], list[str]]:
    """The arrays of an .npz file for which `wanted(name)` is true, and the names of all; nothing is unpickled.

    The size that a member claims is compared with its bytes before anything is allocated. A bad file raises a
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
    """The array in a file of `size` bytes in numpy's own format, .npy; a ValueError if it is something else."""
    import numpy as np

    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"{name} is of the unknown version {version}")
    try:
        shape, fortran_order, dtype = readers[version](file)
    except Exception as error:  # numpy reads the header as a Python expression, which may fail in any way
        raise ValueError(f"{name} has a header that is none of numpy's ({first_line(error)[:100]})") from error
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
    return flat.reshape(shape[::-1]).T if fortran_order else flat.reshape(shape)


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type where it has none; of torch's failed assertions, what it is."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return "an assertion inside torch fails" if "INTERNAL ASSERT FAILED" in line else line


def read_whole(file: IO[bytes], content: bytearray, name: str) -> None:
    """Fill `content` from a file; a ValueError if the file ends too early."""
    view, done = memoryview(content), 0
    while done < len(content):
        count = file.readinto(view[done : done + 2**24])  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"{name} ends after {done:,} of {len(content):,} bytes")
        done += count


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; at the end of the block the file is flushed to disk and renamed.

    If anything fails, the temporary file is removed and `path` is what it was; an OSError names `path`.
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
    """A temporary path beside `path` that no other process or thread uses."""
    return path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Inside this block, an OSError says which file could not be written."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{path} could not be written: {error.strerror or error}") from error


def write_text_whole(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_files_whole(folder: Path, contents: Mapping[str, bytes]) -> dict[str, Path]:
    """Write files into a folder, which is made if need be: all of them, or none if one does not fit on the disk.

    All contents are on disk before the first file takes its name, in the order given. Two writers wait for each other,
    so that the files in a folder come from one of them.
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
    """Make a folder with its parents for this block. If the block fails, the empty ones of these are removed."""
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
"""Seconds that one writer waits for another at most."""


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Inside this block no other process or thread is in a block for the same folder: others wait, a minute at most.

    The system releases the lock when a process ends, in whatever way. Where it has no such locks, nobody waits.
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
    """Require that a folder can be written to, or can be made, so that the user learns it before the work is done."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"{existing} is a file; give a folder to write to")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"{existing} cannot be written to; give another folder")
