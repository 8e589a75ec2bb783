"""Downloading MNIST from a server on this machine that can fail in every way a mirror can."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from netmoments.data import download
from netmoments.data.download import DownloadError, download_mnist

CONTENTS = {name: name.encode() * 20_000 for name in download.MNIST_MD5}
FIRST, SECOND, *_ = CONTENTS


class Mirror:
    """Serves CONTENTS; `faults[name]` is "truncated", "corrupted", "404", "dropped", "silent" or "unsized"."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.faults: dict[str, str] = {}
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.removeprefix("/files/")
                mirror.requests.append(name)
                fault, content = mirror.faults.get(name), CONTENTS[name]
                if fault == "404":
                    return self.send_error(404)
                if fault == "dropped":
                    return None
                if fault == "silent":
                    mirror.closing.wait(5)
                    return None
                self.send_response(200)
                if fault != "unsized":
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                sent = content[: len(content) // 2] if fault == "truncated" else content
                self.wfile.write(b"!" + sent[1:] if fault == "corrupted" else sent)
                return None

            def log_message(self, *_: object) -> None:
                pass

        self.closing = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/files/"


@pytest.fixture
def mirror(monkeypatch) -> Iterator[Mirror]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    md5s = {name: hashlib.md5(content).hexdigest() for name, content in CONTENTS.items()}
    monkeypatch.setattr(download, "MNIST_MD5", md5s)
    mirror = Mirror()
    thread = threading.Thread(target=mirror.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield mirror
    mirror.closing.set()
    mirror.server.shutdown()
    thread.join()
    mirror.server.server_close()


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_four_files_arrive_once(mirror, tmp_path):
    folder = download_mnist(tmp_path / "new" / "place", mirror=mirror.url)
    assert folder == tmp_path / "new" / "place" / "mnist"
    assert held(folder) == CONTENTS
    assert mirror.requests == list(CONTENTS)
    assert download_mnist(tmp_path / "new" / "place", mirror=mirror.url.rstrip("/")) == folder
    assert len(mirror.requests) == 4  # none the second time


def test_the_default_place_is_the_cache(mirror, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert download_mnist(mirror=mirror.url) == tmp_path / "netmoments" / "mnist"


def test_without_a_length_the_checksum_decides(mirror, tmp_path):
    mirror.faults = dict.fromkeys(CONTENTS, "unsized")
    assert held(download_mnist(tmp_path, mirror=mirror.url)) == CONTENTS


FAULTS = [
    ("truncated", r"after \d+ of \d+ bytes|IncompleteRead"),
    ("corrupted", "its md5 is [0-9a-f]{32} instead of [0-9a-f]{32}"),
    ("404", "HTTP Error 404"),
    ("dropped", "without response|reset"),
    ("silent", "timed out"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_failure_leaves_nothing_behind(mirror, tmp_path, monkeypatch, fault, message):
    monkeypatch.setattr(download, "TIMEOUT", 0.2 if fault == "silent" else 5.0)
    mirror.faults[FIRST] = fault
    with pytest.raises(DownloadError, match=message) as caught:
        download_mnist(tmp_path / "new", mirror=mirror.url)
    for said in (FIRST, mirror.url + FIRST, "Try again", str(tmp_path / "new" / "mnist")):
        assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", [fault for fault, _ in FAULTS if fault != "silent"])
def test_what_arrived_before_a_failure_is_kept(mirror, tmp_path, fault):
    mirror.faults[SECOND] = fault
    with pytest.raises(DownloadError, match=SECOND):
        download_mnist(tmp_path, mirror=mirror.url)
    assert held(tmp_path / "mnist") == {FIRST: CONTENTS[FIRST]}
    mirror.faults.clear()
    mirror.requests.clear()
    assert held(download_mnist(tmp_path, mirror=mirror.url)) == CONTENTS
    assert FIRST not in mirror.requests


def test_a_refused_connection(tmp_path, mirror):
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        port = closed_soon.getsockname()[1]
    with pytest.raises(DownloadError, match=r"refused.*name another mirror"):
        download_mnist(tmp_path, mirror=f"http://127.0.0.1:{port}/")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_reported_and_replaced(mirror, tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / SECOND).write_bytes(b"half a file")
    with pytest.warns(UserWarning, match=f"{SECOND} is damaged .* replacing it"):
        download_mnist(tmp_path, mirror=mirror.url)
    assert held(tmp_path / "mnist") == CONTENTS


def test_a_folder_that_was_there_stays(mirror, tmp_path):
    (tmp_path / "mnist").mkdir()
    mirror.faults[FIRST] = "404"
    with pytest.raises(DownloadError):
        download_mnist(tmp_path, mirror=mirror.url)
    assert held(tmp_path / "mnist") == {}


def test_an_interruption_leaves_nothing_behind(mirror, tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(download.Progress, "advance", interrupt)
    with pytest.raises(KeyboardInterrupt):
        download_mnist(tmp_path / "new", mirror=mirror.url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["file:///etc/", "ossci-datasets.s3.amazonaws.com", ""])
def test_a_mirror_is_a_web_address(tmp_path, address):
    with pytest.raises(ValueError, match="mirror must be an http:// or https:// address"):
        download_mnist(tmp_path, mirror=address)


def test_the_checksums_are_those_of_the_original_files(data_dir):
    for name, md5 in download.MNIST_MD5.items():
        path = data_dir / "mnist" / name
        if not path.exists():
            pytest.skip(f"no mnist in {data_dir}")
        assert hashlib.md5(path.read_bytes()).hexdigest() == md5
