"""One writer to a folder at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system gives back when the process ends in whatever way.

    A second writer is turned away with a BlockingIOError.
    """
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = f"another process is writing to {folder}; wait until it is done, or give another --out"
            raise BlockingIOError(error.errno, text) from error
        yield
