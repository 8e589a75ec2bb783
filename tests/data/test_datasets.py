"""`load`: names, paths, splits and sizes. The datasets: where they are found, what they hold, files that do not belong
together, and MNIST from a server on this machine that can fail in every way a mirror can.
"""

from __future__ import annotations

import gzip
import hashlib
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from netmoments.data import datasets
from netmoments.data.datasets import FER2013_CLASSES, DownloadError, download_mnist, find, load
from netmoments.data.images import duplicates_of
from tests.data.files import FACE, HEADER, TWO, idx_bytes, save_picture, write_idx_pair

USAGES = ("Training", "PublicTest", "PrivateTest")


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "8"])
def test_a_bad_size(size):
    with pytest.raises(ValueError, match="size must be a number of pixels"):
        load("digits", size=size)


def test_size_applies_to_named_datasets_too():
    assert tuple(load("digits", size=16).event_shape) == (1, 16, 16)


@pytest.mark.parametrize(("missing", "source"), [("PIL", "folder"), ("sklearn.datasets", "digits")])
def test_missing_extras_say_how_to_install_them(tmp_path, monkeypatch, missing, source):
    save_picture(tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r'pip install "netmoments\[data\]"'):
        load(tmp_path if source == "folder" else source)


@pytest.mark.parametrize("source", ["mnits", "no/such/folder", Path("nowhere.npz")])
def test_an_unknown_source_lists_the_known_ones(source):
    with pytest.raises(FileNotFoundError, match=r"neither a dataset \(mnist, fer2013, digits\) nor a file"):
        load(source)


@pytest.mark.parametrize("name", ["notes.txt", "weights.pt"])
def test_a_file_of_another_kind(tmp_path, name):
    (tmp_path / name).write_text("something else")
    with pytest.raises(ValueError, match=r"need an IDX file, fer2013\.csv, an \.npz"):
        load(tmp_path / name)


def test_unknown_splits_list_the_known_ones(tmp_path):
    write_idx_pair(tmp_path / "mnist", "t10k", 2, [0, 1])
    (tmp_path / "fer2013.csv").write_text(f"{HEADER}\n0,{FACE},PrivateTest\n")
    cases = {"mnist": "train, test", "fer2013": "train, public-test, private-test", "digits": "train, test"}
    for name, known in cases.items():
        with pytest.raises(ValueError, match=f"has the splits {known}; got 'validation'"):
            load(name, split="validation", data_dir=tmp_path)
    for source in (tmp_path / "mnist" / "t10k-images-idx3-ubyte", save_picture(tmp_path / "a.png")):
        with pytest.raises(ValueError, match="not divided into splits"):
            load(source, split="train")


def test_a_name_is_the_dataset_and_a_path_is_the_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_picture(tmp_path / "digits" / "a.png")
    assert len(load("digits")) == 445
    assert len(load("./digits")) == len(load(Path("digits"))) == 1


def test_mnist(mnist):
    test = load("mnist", data_dir=mnist.parent)
    assert (len(test), tuple(test.event_shape), len(test.classes)) == (10_000, (1, 28, 28), 10)
    assert test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert torch.bincount(test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert test.names[17] == "test/17"
    assert float(test.images.max()) == 1
    assert test.images.mean().item() == pytest.approx(0.1325, abs=5e-5)  # the known mean of the test images


def test_mnist_by_folder_and_by_file_is_the_same(mnist):
    by_name = load("mnist", split="train", data_dir=mnist)  # the folder itself will do
    assert len(by_name) == 60_000
    assert by_name.labels[:5].tolist() == [5, 0, 4, 1, 9]
    for source in (mnist, mnist / "train-images-idx3-ubyte.gz"):
        same = load(source, split="train" if source == mnist else "test")
        assert torch.equal(same.images[:100], by_name.images[:100])
        assert torch.equal(same.labels, by_name.labels)
        assert same.classes == ()  # Fashion-MNIST has the same file names


def test_labels_beside_an_idx_file_may_be_zipped_dotted_or_absent(tmp_path):
    images = write_idx_pair(tmp_path, "train", 2, [3, 1])
    labels = tmp_path / "train-labels-idx1-ubyte"
    assert load(images).labels.tolist() == [3, 1]
    labels.with_name(labels.name + ".gz").write_bytes(gzip.compress(labels.read_bytes()))
    labels.unlink()
    assert load(images).labels.tolist() == [3, 1]
    assert load(tmp_path, split="train").names == ("train/0", "train/1")
    labels.with_name(labels.name + ".gz").unlink()
    assert load(images).labels is None
    dotted = images.rename(tmp_path / "t10k-images.idx3-ubyte")
    (tmp_path / "t10k-labels.idx1-ubyte").write_bytes(idx_bytes(np.array([0, 9], np.uint8)))
    assert load(dotted).labels.tolist() == [0, 9]
    assert load(tmp_path).labels.tolist() == [0, 9]


def test_idx_files_that_do_not_belong_together(tmp_path):
    images = write_idx_pair(tmp_path, "t10k", 3, [0, 1])
    with pytest.raises(ValueError, match=r"each of the 3 images .* do not belong together"):
        load(images)
    with pytest.raises(ValueError, match="are these labels"):
        load(tmp_path / "t10k-labels-idx1-ubyte")
    with pytest.raises(FileNotFoundError, match="no train images: train-images-idx3-ubyte"):
        load(tmp_path, split="train")
    write_idx_pair(tmp_path / "mnist", "t10k", 2, [0, 10])
    with pytest.raises(ValueError, match="below 10"):
        load("mnist", data_dir=tmp_path / "mnist")
    (tmp_path / "empty-images-idx3-ubyte").write_bytes(idx_bytes(np.zeros((0, 2, 2), np.uint8)))
    with pytest.raises(ValueError, match=r"empty-images-idx3-ubyte: .* at least one image"):
        load(tmp_path / "empty-images-idx3-ubyte")


def test_fer2013_splits(fer2013_npz):
    counts = {"train": 28_709, "public-test": 3_589, "private-test": 3_589}
    splits = {split: load(fer2013_npz, split=split) for split in counts}
    assert {split: len(images) for split, images in splits.items()} == counts
    assert sum(torch.bincount(images.labels) for images in splits.values()).tolist() == [
        4953, 547, 5121, 8989, 6077, 4002, 6198,
    ]  # fmt: skip
    test = load("fer2013", data_dir=fer2013_npz.parent)
    assert torch.equal(test.images, splits["private-test"].images)
    assert test.classes == FER2013_CLASSES
    assert test.names[17] == "private-test/17"
    # what the docstring of duplicates_of says
    train = splits["train"].images
    twice = {split: duplicates_of(splits[split].images, train) for split in ("public-test", "private-test")}
    assert {split: int(mask.sum()) for split, mask in twice.items()} == {"public-test": 280, "private-test": 288}
    images = torch.cat([splits[split].images[mask] for split, mask in twice.items()])
    assert len({image.numpy().tobytes() for image in images}) == 531


def test_fer2013_csv_is_the_same_as_npz(fer2013_npz, tmp_path):
    with np.load(fer2013_npz) as file:
        arrays = {key: file[key][np.r_[:20, 28_709:28_724, 32_298:32_313]] for key in ("images", "labels", "usage")}
    np.savez(tmp_path / "small.npz", **arrays)
    rows = [
        f"{label},{' '.join(map(str, image.ravel()))},{USAGES[usage]}"
        for image, label, usage in zip(*arrays.values(), strict=True)
    ]
    for name, newline in (("unix.csv", "\n"), ("dos.csv", "\r\n")):
        (tmp_path / name).write_bytes(newline.join([HEADER, *rows, ""]).encode())
        for split, count in (("train", 20), ("public-test", 15), ("private-test", 15), ("test", 15)):
            from_csv, from_npz = load(tmp_path / name, split=split), load(tmp_path / "small.npz", split=split)
            assert len(from_csv) == count
            assert torch.equal(from_csv.images, from_npz.images)
            assert torch.equal(from_csv.labels, from_npz.labels)
            assert (from_csv.names, from_csv.classes) == (from_npz.names, from_npz.classes)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["emotion,Usage,pixels"], "first line must be emotion,pixels,Usage"),
        ([], "first line must be"),
        ([HEADER], "no rows with Usage PrivateTest"),
        ([HEADER, f"0,{FACE},Training"], "no rows with Usage PrivateTest"),
        ([HEADER, f"0,{FACE},PrivateTest", f"0,{FACE}"], "line 3: need emotion,pixels,Usage"),
        ([HEADER, f"0,{FACE},Test"], "line 2: need .* with Usage Training, PublicTest, PrivateTest"),
        ([HEADER, f"7,{FACE},PrivateTest"], "line 2: need an emotion from 0 to 6, got b'7'"),
        ([HEADER, f"-1,{FACE},PrivateTest"], "line 2: need an emotion"),
        ([HEADER, f"0,{FACE} 7,PrivateTest"], "line 2: need 2304 pixels from 0 to 255, not 2305"),
        ([HEADER, f"0,{FACE[2:]},PrivateTest"], "line 2: need 2304 pixels from 0 to 255, not 2303"),
        ([HEADER, f"0,256{FACE[1:]},PrivateTest"], "line 2: .* up to 256"),
        ([HEADER, f"0,{'9' * 30}{FACE[1:]},PrivateTest"], "line 2: need 2304 pixels"),
        ([HEADER, f"0,x{FACE[1:]},PrivateTest"], "line 2: need 2304 pixels .*, got b'x 7 7"),
        ([HEADER, f"0,-7{FACE[1:]},PrivateTest"], "line 2: need 2304 pixels"),
        ([HEADER, f"0,1.5{FACE[1:]},PrivateTest"], "line 2: need 2304 pixels"),
        ([HEADER, "0,,PrivateTest"], "line 2: need 2304 pixels"),
    ],
)
def test_a_bad_fer2013_csv_is_named_with_its_line(tmp_path, rows, message):
    path = tmp_path / "fer2013.csv"
    path.write_text("\n".join(rows))
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_digits_split():
    train, test = load("digits", split="train"), load("digits")
    assert (len(train), len(test)) == (1352, 445)
    assert tuple(test.event_shape) == (1, 8, 8)
    assert float(test.images.max()) == 1
    assert torch.equal(test.images * 16, (test.images * 16).round())
    assert torch.bincount(test.labels).tolist() == [44, 45, 44, 45, 45, 45, 45, 44, 43, 45]
    assert torch.bincount(train.labels).tolist() == [134, 137, 133, 138, 136, 137, 136, 135, 131, 135]
    assert test.labels[:10].tolist() == [0, 9, 5, 6, 8, 4, 1, 7, 3, 2]  # the split is fixed
    assert not duplicates_of(test.images, train.images).any()


def test_places_are_searched_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("NETMOMENTS_DATA", str(tmp_path / "environment"))
    folders = [
        tmp_path / "given",
        tmp_path / "given" / "mnist",
        tmp_path / "environment",
        tmp_path / "environment" / "mnist",
        tmp_path / "cache" / "netmoments",
        tmp_path / "cache" / "netmoments" / "mnist",
    ]
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*given to look for mnist in"):
        find("mnist", tmp_path / "given")
    (tmp_path / "given").mkdir()
    with pytest.raises(FileNotFoundError, match="netmoments download mnist") as caught:
        find("mnist", tmp_path / "given")
    assert all(f"\n  {folder}\n" in str(caught.value) for folder in folders)
    for folder in reversed(folders):
        write_idx_pair(folder, "t10k", 2, [0, 1])
        assert find("mnist", tmp_path / "given") == folder
    assert load("mnist", data_dir=str(tmp_path / "given")).labels.tolist() == [0, 1]


def test_fer2013_is_found_as_npz_or_csv(tmp_path):
    with pytest.raises(FileNotFoundError, match="Kaggle"):
        find("fer2013", tmp_path)
    (tmp_path / "fer2013").mkdir()
    (tmp_path / "fer2013" / "fer2013.csv").write_text(f"{HEADER}\n3,{FACE},PrivateTest\n\n")
    assert find("fer2013", tmp_path).name == "fer2013.csv"
    assert load("fer2013", data_dir=tmp_path).labels.tolist() == [3]
    np.savez(tmp_path / "fer2013" / "fer2013.npz", images=TWO, labels=[1, 2], usage=[0, 2])
    assert find("fer2013", tmp_path).name == "fer2013.npz"
    assert load("fer2013", data_dir=tmp_path).labels.tolist() == [2]


@pytest.mark.parametrize("name", ["digits", "cifar10"])
def test_find_knows_only_datasets_in_files(name):
    with pytest.raises(ValueError, match=f"kept in files are mnist, fer2013; got '{name}'"):
        find(name)


CONTENTS = {name: name.encode() * 20_000 for name in datasets.MNIST_MD5}
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
    monkeypatch.setattr(datasets, "MNIST_MD5", md5s)
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
    monkeypatch.setattr(datasets, "TIMEOUT", 0.2 if fault == "silent" else 5.0)
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

    monkeypatch.setattr(datasets, "progress_bar", lambda *_: nullcontext(interrupt))
    with pytest.raises(KeyboardInterrupt):
        download_mnist(tmp_path / "new", mirror=mirror.url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["file:///etc/", "ossci-datasets.s3.amazonaws.com", ""])
def test_a_mirror_is_a_web_address(tmp_path, address):
    with pytest.raises(ValueError, match="mirror must be an http:// or https:// address"):
        download_mnist(tmp_path, mirror=address)


def test_the_checksums_are_those_of_the_original_files(data_dir):
    for name, md5 in datasets.MNIST_MD5.items():
        path = data_dir / "mnist" / name
        if not path.exists():
            pytest.skip(f"no mnist in {data_dir}")
        assert hashlib.md5(path.read_bytes()).hexdigest() == md5
