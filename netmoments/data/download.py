"""MNIST over HTTP, checked, and all or nothing file by file."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
import warnings
from pathlib import Path

from netmoments.data.datasets import cache_folder
from netmoments.files import made_if_needed
from netmoments.progress import Progress

DEFAULT_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
TIMEOUT = 30.0
CHUNK = 1 << 16


class DownloadError(OSError):
    """A file that did not arrive whole: which one, from where, and what to do."""


def download_mnist(data_dir: str | Path | None = None, *, mirror: str = DEFAULT_MIRROR) -> Path:
    """The four original files in DIR/mnist, and that folder; DIR is the cache unless given.

    Files that are there and have the right checksum are not fetched again; others are replaced, with a warning. A
    file that does not arrive whole leaves nothing behind and is a `DownloadError`; those before it are kept.
    """
    if not mirror.startswith(("http://", "https://")):
        raise ValueError(f"download_mnist: mirror must be an http:// or https:// address, got {mirror!r}")
    folder = Path(data_dir or cache_folder()).expanduser() / "mnist"
    for name, md5 in MNIST_MD5.items():
        path = folder / name
        if path.is_file():
            if _md5(path) == md5:
                continue
            warnings.warn(f"{path} is damaged (its md5 is not {md5}); replacing it", stacklevel=2)
        with made_if_needed(folder):
            _fetch(f"{mirror.rstrip('/')}/{name}", path, md5)
    return folder


def _fetch(url: str, path: Path, md5: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        _stream(url, part)
        received = _md5(part)
        if received != md5:
            raise DownloadError(f"its md5 is {received} instead of {md5}")
        os.replace(part, path)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it is also the server's answer
        raise DownloadError(
            f"{path.name} could not be downloaded from {url}: {error}. Try again, name another mirror, or put the file "
            f"in {path.parent} yourself."
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _stream(url: str, part: Path) -> None:
    with urllib.request.urlopen(url, timeout=TIMEOUT) as response, part.open("wb") as file:
        length = response.headers.get("Content-Length")
        wanted = int(length) if length and length.isdigit() else None
        received = 0
        with Progress(f"downloading {url.rpartition('/')[2]}", wanted or 0) as progress:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                received += len(chunk)
                progress.advance(len(chunk))
    if wanted is not None and received != wanted:
        raise DownloadError(f"the connection ended after {received} of {wanted} bytes")


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
