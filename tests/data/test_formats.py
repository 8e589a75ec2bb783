"""Files of images: IDX, .npz and folders of pictures; what is read, and what is said about files that cannot be."""

from __future__ import annotations

import gzip
import os
import re
import signal
import socket
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from netmoments import files
from netmoments.data import formats, images
from netmoments.data.datasets import load
from netmoments.data.formats import read_idx
from tests.data.files import HEADER, TWO, claiming_npz, idx_bytes, save_picture


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "f4", "f8"])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 4), (2, 2, 2, 3)])
def test_idx_round_trip(tmp_path, dtype, shape):
    array = (np.arange(np.prod(shape)).reshape(shape) - 2).astype(dtype)
    plain, zipped = tmp_path / "plain.gz", tmp_path / "zipped"  # the suffixes lie
    plain.write_bytes(idx_bytes(array))
    zipped.write_bytes(gzip.compress(idx_bytes(array)))
    for path in (plain, zipped):
        read = read_idx(path)
        assert read.dtype == array.dtype
        assert read.dtype.isnative
        np.testing.assert_array_equal(read, array)


WHOLE = idx_bytes(np.zeros((2, 3), np.uint8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an empty file"),
        (b"hello, world", "begin with 00 00"),
        (b"\x00\x00\x07\x01", "begin with 00 00 and a type"),
        (b"\x00\x00\x08\x00", "the header says 0"),
        (b"\x00\x00\x08\x05" + b"\x00\x00\x00\x01" * 5 + b"\x00", "the header says 5"),
        (b"\x00\x00\x08\x02\x00\x00", "inside its header, after 6 of 12"),
        (WHOLE[:-1], "cut short: .* needs 18 bytes, got 17"),
        (WHOLE + b"\x00", "too long: .* needs 18 bytes, got 19"),
        (b"\x00\x00\x0e\x04" + b"\xff" * 16, "cut short"),
        (gzip.compress(WHOLE, mtime=0)[:-3], "gzip file is cut short or damaged"),
        (gzip.compress(WHOLE, mtime=0)[:-8] + b"\x00" * 8, "gzip file is cut short or damaged"),
        (b"\x1f\x8b\x08\x00 this is not gzip", "gzip file is cut short or damaged"),
    ],
)
def test_a_bad_idx_file_is_named(tmp_path, content, message):
    path = tmp_path / "bad-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


def test_natural_images(data_dir):
    path = data_dir / "natural" / "natural31_256.npz"
    if not path.exists():
        pytest.skip(f"no {path.name} in {data_dir}")
    images = load(path)
    assert tuple(images.images.shape) == (31, 3, 256, 256)
    assert (images.labels, images.classes) == (None, ())
    assert len(set(images.names)) == 31
    small = load(path, size=32)
    assert tuple(small.event_shape) == (3, 32, 32)
    assert small.names == images.names
    averaged = torch.nn.functional.avg_pool2d(images.images, 8)
    assert (small.images - averaged).abs().mean() < 0.02  # bicubic keeps edges a box blurs; a shift would give 0.05


@pytest.mark.parametrize(
    ("pixels", "shape"),
    [
        (np.full((2, 4, 5), 51, np.uint8), (2, 1, 4, 5)),
        (np.full((2, 4, 5, 3), 51, np.uint8), (2, 3, 4, 5)),
        (np.full((2, 4, 5, 1), 51, np.uint8), (2, 1, 4, 5)),
        (np.full((2, 3, 4, 5), 0.2), (2, 3, 4, 5)),
        (np.full((2, 4, 5), 0.2, ">f4"), (2, 1, 4, 5)),
    ],
)
def test_npz_layouts(tmp_path, pixels, shape):
    np.savez(tmp_path / "own.npz", images=pixels, labels=[0, 1], classes=["cat", "dog"], other=np.zeros(7))
    images = load(tmp_path / "own.npz")
    torch.testing.assert_close(images.images, torch.full(shape, 0.2))
    assert images.labels.tolist() == [0, 1]
    assert (images.names, images.classes) == (("own/0", "own/1"), ("cat", "dog"))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pictures": TWO}, "need an array called images, the file holds pictures"),
        ({"images": TWO.astype(np.int32)}, "uint8, or floats in .*, got int32"),
        ({"images": np.zeros((2, 3, 4, 4), np.uint8)}, "uint8 images must be .*np.moveaxis"),
        ({"images": np.zeros((2, 4, 4, 3))}, "float images must be .*np.moveaxis"),
        ({"images": np.zeros((4, 4), np.uint8)}, r"got shape \(4, 4\)"),
        ({"images": np.uint8(3)}, r"got shape \(\)"),
        ({"images": np.full((2, 1, 4, 4), 255.0)}, "divide 8-bit values by 255"),
        ({"images": TWO[:0]}, "at least one image"),
        ({"images": TWO, "labels": [0]}, r"labels must have shape \(2,\)"),
        ({"images": TWO, "labels": [0.0, 1.0]}, "labels must be whole numbers"),
        ({"images": TWO, "labels": [0, 2], "classes": ["a", "b"]}, "below 2"),
        ({"images": TWO, "names": ["a"]}, r"names must have shape \(2,\)"),
        ({"images": TWO, "names": np.array([None, 1])}, "plain arrays"),
        ({"images": TWO, "classes": "cat"}, "classes must be a list"),
        ({"images": TWO, "classes": [b"\xff\xfe"]}, "classes must be texts, in UTF-8"),
        ({"images": TWO, "labels": [0, 0], "usage": [0, 0]}, "no image has usage 2"),
        ({"images": TWO, "labels": [0, 0], "usage": [0, 5]}, "usage must be 0"),
        ({"images": TWO, "labels": [0, 0], "usage": ["Training", "PrivateTest"]}, "usage must be 0"),
        ({"images": TWO, "labels": [7, 7], "usage": [2, 2]}, "below 7"),
    ],
)
def test_a_bad_npz_is_named(tmp_path, arrays, message):
    path = tmp_path / "own.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no zip at all", b"PK\x03\x04 cut"])
def test_an_npz_that_is_none(tmp_path, content):
    path = tmp_path / "own.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"own\.npz: cannot be read as an \.npz file"):
        load(path)


def test_a_damaged_npz(tmp_path):
    path = tmp_path / "own.npz"
    np.savez_compressed(path, images=np.random.default_rng(0).integers(0, 256, (2, 50, 50), np.uint8))
    whole = bytearray(path.read_bytes())
    for place in (0, 60, 1000, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:place] + bytes(byte ^ 0xFF for byte in whole[place : place + 20]) + whole[place + 20 :])
        with pytest.raises(ValueError, match=r"own\.npz: "):
            load(path)


def test_subfolders_are_classes(tmp_path):
    save_picture(tmp_path / "dog" / "b.png", colour=(255, 0, 0))
    save_picture(tmp_path / "dog" / "a.JPG", colour=(0, 0, 0))
    save_picture(tmp_path / "cat" / "c.bmp", colour=(0, 0, 255))
    (tmp_path / "eel").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "dog" / ".b.png").write_bytes(b"a resource fork")
    (tmp_path / "dog" / "notes.txt").write_text("good dogs")
    images = load(tmp_path)
    assert images.classes == ("cat", "dog", "eel")
    assert images.names == ("cat/c.bmp", "dog/a.JPG", "dog/b.png")
    assert images.labels.tolist() == [0, 1, 1]
    assert images.images[:, :, 0, 0].tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]
    assert [(Path(path).name, reason) for path, reason in images.skipped] == [("eel", "no images in this class folder")]


@pytest.mark.parametrize("suffix", ["png", "jpg", "jpeg", "bmp", "webp", "ppm", "tif", "tiff", "pgm"])
def test_formats(tmp_path, suffix):
    mode, colour = ("L", 128) if suffix == "pgm" else ("RGB", (128, 128, 128))
    save_picture(tmp_path / f"a.{suffix}", mode, (6, 4), colour)
    images = load(tmp_path)
    assert tuple(images.event_shape) == (1 if suffix == "pgm" else 3, 4, 6)
    assert (images.labels, images.classes, images.names) == (None, (), (f"a.{suffix}",))
    torch.testing.assert_close(images.images, torch.full_like(images.images, 128 / 255), atol=1.5 / 255, rtol=0)
    assert torch.equal(load(tmp_path / f"a.{suffix}").images, images.images)


@pytest.mark.parametrize(
    ("mode", "colour", "pixel"),
    [
        ("L", 51, [0.2]),
        ("1", 1, [1.0]),
        ("I;16", 13107, [0.2]),
        ("LA", (51, 0), [0.2]),
        ("RGB", (0, 51, 255), [0.0, 0.2, 1.0]),
        ("RGBA", (0, 51, 255, 7), [0.0, 0.2, 1.0]),
        ("P", 0, [0.0, 0.0, 0.0]),
    ],
)
def test_modes(tmp_path, mode, colour, pixel):
    save_picture(tmp_path / "a.png", mode, (3, 2), colour)
    images = load(tmp_path).images
    assert tuple(images.shape) == (1, len(pixel), 2, 3)
    torch.testing.assert_close(images[0, :, 1, 2], torch.tensor(pixel))


def test_grey_becomes_rgb_where_one_image_is_rgb(tmp_path):
    save_picture(tmp_path / "a.png", "L", colour=51)
    assert tuple(load(tmp_path).event_shape) == (1, 4, 6)
    save_picture(tmp_path / "b.png", "RGB")
    with pytest.warns(UserWarning, match=r"1 of 2 images are in colour \(b.png\) and the others grey"):
        images = load(tmp_path)
    assert tuple(images.event_shape) == (3, 4, 6)
    torch.testing.assert_close(images.images[0], torch.full((3, 4, 6), 0.2))


def test_exif_orientation(tmp_path):
    image = Image.new("L", (6, 4))
    image.putpixel((0, 0), 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    image.save(tmp_path / "a.png", exif=exif)
    images = load(tmp_path).images
    assert tuple(images.shape) == (1, 1, 6, 4)
    assert images[0, 0].nonzero().tolist() == [[0, 3]]


def test_unreadable_files_are_skipped_with_a_reason(tmp_path, monkeypatch):
    save_picture(tmp_path / "good.png")
    whole = save_picture(tmp_path / "cut.png", size=(300, 300), colour=(1, 2, 3)).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.jpg").write_text("not an image")
    (tmp_path / "empty.webp").write_bytes(b"")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    Image.new("F", (6, 4)).save(tmp_path / "float.tif")
    save_picture(tmp_path / "bomb.png", size=(2000, 2000))
    save_picture(tmp_path / "large.png", size=(1200, 1000))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000_000)
    images = load(tmp_path)
    assert images.names == ("good.png",)
    reasons = {Path(path).name: reason for path, reason in images.skipped}
    assert list(reasons) == ["bomb.png", "cut.png", "empty.webp", "float.tif", "gone.png", "large.png", "text.jpg"]
    assert re.match(r"DecompressionBombError: .*exceeds limit of 2000000 pixels", reasons["bomb.png"])
    assert reasons["large.png"] == "ValueError: 1000×1200 pixels, more than the 1,000,000 allowed"
    assert "no known white" in reasons["float.tif"]
    assert "cannot identify image file" in reasons["text.jpg"]
    assert all(reasons.values())
    assert images.take([0]).skipped == images.skipped


def test_sizes(tmp_path):
    save_picture(tmp_path / "a.png", size=(6, 4))
    save_picture(tmp_path / "b.png", size=(9, 12))
    with pytest.raises(ValueError, match=r"a\.png is 4×6 and b\.png is 12×9; pass size= \(--size in a command\)"):
        load(tmp_path)
    for size in (1, 3, 4, 20):
        assert tuple(load(tmp_path, size=size).images.shape) == (2, 3, size, size)


def test_folders_of_splits(tmp_path):
    save_picture(tmp_path / "train" / "cat" / "a.png")
    save_picture(tmp_path / "val" / "cat" / "b.png")
    assert load(tmp_path, split="val").names == ("cat/b.png",)
    with pytest.raises(ValueError, match="has the splits train, val; got 'test'"):
        load(tmp_path)


def test_bad_folders(tmp_path):
    with pytest.raises(ValueError, match="has no images"):
        load(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(ValueError, match="nor have its subfolders"):
        load(tmp_path)
    for name in ("a.png", "b.png"):
        (tmp_path / "cat" / name).write_bytes(b"no")
    with pytest.raises(ValueError, match=r"none of 2 image files can be read: a\.png: .*; b\.png: "):
        load(tmp_path)
    save_picture(tmp_path / "c.png")
    with pytest.raises(ValueError, match=r"both beside and inside its subfolders \(c\.png, cat/a\.png\)"):
        load(tmp_path)
    with pytest.raises(ValueError, match="not divided into splits, so it has no 'train'; take mnist"):
        load(tmp_path, split="train")


def test_folders_named_by_numbers_are_those_classes(tmp_path):
    for name in ("0", "2", "10"):
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4)).save(tmp_path / name / "a.png")
    loaded = load(tmp_path)
    assert dict(zip(loaded.names, loaded.labels.tolist(), strict=True)) == {"0/a.png": 0, "2/a.png": 2, "10/a.png": 10}
    assert loaded.classes == ()


@pytest.fixture
def soon() -> Iterator[None]:
    """What would wait forever is an error after ten seconds."""

    def late(*_: object) -> None:
        raise TimeoutError("this waits for something that does not come")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 10)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def make_odd(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make something at this path that is no regular file."""
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        monkeypatch.chdir(path.parent)  # names of sockets must be short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, monkeypatch, kind):
    folder = tmp_path / "images"
    save_picture(folder / "cat" / "good.png")
    make_odd(folder / "cat" / "odd.png", kind, monkeypatch)
    make_odd(folder / "cat" / "odd.txt", kind, monkeypatch)
    loaded = load(folder)
    assert loaded.names == ("cat/good.png",)
    assert [Path(path).name for path, _ in loaded.skipped] == ["odd.png"]
    assert f"is a {kind}, and not a regular file" in loaded.skipped[0].reason
    for name in ("odd.png", "odd.npz", "fer2013.csv", "train-images-idx3-ubyte", "odd.gz", "odd"):
        make_odd(tmp_path / name, kind, monkeypatch)
        with pytest.raises(OSError, match=rf"{name} is a {kind}, and not a regular file"):
            load(tmp_path / name)
    with pytest.raises(OSError, match=rf"is a {kind}, and not a regular file"):
        load(tmp_path, split="train")
    with pytest.raises(OSError, match=rf"is a {kind}, and not a regular file"):
        read_idx(tmp_path / "odd.gz")


def test_a_gzip_file_is_followed_to_the_size_it_declares(tmp_path, monkeypatch):
    """A small gzip file that unpacks to 64 MiB more than its IDX header declares."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    header = idx_bytes(np.zeros((2, 28, 28), np.uint8))
    path = tmp_path / "a-idx3-ubyte.gz"
    with path.open("wb") as file:
        file.write(packer.compress(header))
        for _ in range(64):
            file.write(packer.compress(bytes(2**20)))
        file.write(packer.flush())
    read = []
    plain = gzip.GzipFile.read

    def counted(self: gzip.GzipFile, size: int = -1) -> bytes:
        part = plain(self, size)
        read.append(len(part))
        return part

    monkeypatch.setattr(gzip.GzipFile, "read", counted)
    with pytest.raises(ValueError, match=r"too long: shape \(2, 28, 28\) needs 1584 bytes, got more than 1584"):
        read_idx(path)
    assert sum(read) <= 1585


def test_a_size_that_does_not_fit_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "a-idx3-ubyte"
    whole = idx_bytes(np.zeros((50, 28, 28), np.uint8))
    monkeypatch.setattr(files, "most_bytes", lambda: 10_000)
    for content in (whole, gzip.compress(whole)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"would take 39,216 bytes, more than the 10,000 allowed"):
            read_idx(path)
    np.savez(tmp_path / "a.npz", images=np.zeros((50, 28, 28), np.uint8))
    with pytest.raises(ValueError, match=r"images would take 39,200 bytes, more than the 10,000 allowed"):
        load(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", images=np.zeros((10, 28, 28), np.uint8))
    with pytest.raises(ValueError, match=r"as float32, would take 31,360 bytes, more than the 10,000 allowed"):
        load(tmp_path / "b.npz")
    for number in range(3):
        save_picture(tmp_path / "many" / f"{number}.png", size=(20, 20))
    with pytest.raises(ValueError, match=r"many: its images would take 14,400 bytes, more than the 10,000 allowed"):
        load(tmp_path / "many")


@pytest.mark.parametrize("shape", [(10_000_000, 1000, 1000), (2**62, 2**62), (-1, -16), (17,), ()])
def test_an_npz_that_claims_what_it_does_not_have(tmp_path, shape):
    path = claiming_npz(tmp_path / "own.npz", images=shape)
    with pytest.raises(ValueError, match=r"own\.npz: .*claims the shape .* and has 16"):
        load(path)


def test_counts_that_nobody_has(tmp_path, monkeypatch):
    header = b"\x00\x00\x08\x03" + b"\xff\xff\xff\xff" + bytes(8)
    (tmp_path / "a-images-idx3-ubyte").write_bytes(header)
    with pytest.raises(ValueError, match="has 4,294,967,295 images, more than the 10,000,000 allowed"):
        load(tmp_path / "a-images-idx3-ubyte")
    np.savez(tmp_path / "a.npz", images=np.zeros((10**12, 0, 4), np.uint8))
    with pytest.raises(ValueError, match="has 1,000,000,000,000 images, more than the 10,000,000 allowed"):
        load(tmp_path / "a.npz")
    monkeypatch.setattr(images, "MOST_IMAGES", 2)
    for number in range(3):
        save_picture(tmp_path / "many" / f"{number}.png")
    with pytest.raises(ValueError, match="many has 3 images, more than the 2 allowed"):
        load(tmp_path / "many")
    monkeypatch.setattr(files, "MOST_MEMBERS", 2)
    np.savez(tmp_path / "c.npz", images=TWO, a=TWO, b=TWO)
    with pytest.raises(ValueError, match="it has 3 members, more than the 2 allowed"):
        load(tmp_path / "c.npz")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_of_an_npz_that_are_odd(tmp_path):
    np.savez(tmp_path / "a.npz", images=TWO)
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as file:
        file.writestr("images.npy", file.read("images.npy"))
    with pytest.raises(ValueError, match="two of its members have one name"):
        load(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "b.npz", "w", zipfile.ZIP_LZMA) as file:
        file.writestr("images.npy", b"a" * 100)
    with pytest.raises(ValueError, match="compressed in an unknown way"):
        load(tmp_path / "b.npz")


def test_pictures_that_become_too_large(tmp_path, monkeypatch):
    """A line of pixels that would be huge before it is cropped to a square."""
    save_picture(tmp_path / "line.png", size=(20_000, 1))
    save_picture(tmp_path / "good.png")
    loaded = load(tmp_path, size=100)
    assert loaded.names == ("good.png",)
    assert "1×20000 pixels become 100×2000000" in loaded.skipped[0].reason
    with pytest.raises(ValueError, match="size must be at most 10,000 pixels a side, got 1,000,000,000"):
        load(tmp_path, size=10**9)
    monkeypatch.setattr(formats, "MOST_PIXELS", 20)
    with pytest.raises(ValueError, match=r"none of 2 image files .* 4×6 pixels, more than the 20 allowed"):
        load(tmp_path)


def test_a_line_without_an_end(tmp_path):
    path = tmp_path / "fer2013.csv"
    with path.open("wb") as file:
        file.write(HEADER.encode() + b"\n")
        file.truncate(2**36)  # takes no room on the disk
    with pytest.raises(ValueError, match="line 2: need emotion,pixels,Usage"):
        load(path)
