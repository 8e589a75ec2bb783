"""Datasets and image files: what is read, and what is said about files that cannot be."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from netmoments.data.datasets import FER2013_CLASSES, find
from netmoments.data.formats import read_idx
from netmoments.data.images import LabelledImages, duplicates_of, resize_and_crop
from netmoments.data.loading import load

SIDE = 48
USAGES = ("Training", "PublicTest", "PrivateTest")
HEADER = "emotion,pixels,Usage"
FACE = " ".join(["7"] * SIDE * SIDE)


@pytest.fixture(autouse=True)
def _no_datasets_but_the_tests_own(monkeypatch, tmp_path):
    monkeypatch.delenv("NETMOMENTS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def idx_bytes(array: np.ndarray) -> bytes:
    code = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}[array.dtype.str[1:]]
    header = struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_idx_pair(folder: Path, prefix: str, count: int, labels: list[int]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.arange(count * 6, dtype=np.uint8).reshape(count, 2, 3)
    images = folder / f"{prefix}-images-idx3-ubyte"
    images.write_bytes(idx_bytes(pixels))
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_bytes(np.array(labels, np.uint8)))
    return images


def save_picture(path: Path, mode: str = "RGB", size: tuple[int, int] = (6, 4), colour: object = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour if colour is not None else 100 if mode in ("L", "P") else 0).save(path)
    return path


# LabelledImages


def some_images(count: int = 4) -> LabelledImages:
    values = torch.arange(count, dtype=torch.float32).div(count)[:, None, None, None]
    names = tuple(f"test/{index}" for index in range(count))
    return LabelledImages(values.expand(count, 1, 2, 3), torch.arange(count) % 2, names, ("even", "odd"))


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        (slice(1, 3), ["test/1", "test/2"]),
        (slice(None, None, -2), ["test/3", "test/1"]),
        ([2, -1], ["test/2", "test/3"]),
        (np.array([0, 0]), ["test/0", "test/0"]),
        (torch.tensor([3]), ["test/3"]),
        (torch.tensor([True, False, False, True]), ["test/0", "test/3"]),
    ],
)
def test_take_keeps_images_labels_and_names_together(selection, names):
    images = some_images()
    taken = images.take(selection)
    assert list(taken.names) == names
    numbers = [int(name.removeprefix("test/")) for name in names]
    assert taken.labels.tolist() == [number % 2 for number in numbers]
    assert torch.equal(taken.images, images.images[numbers])
    assert taken.classes == images.classes


def test_first_takes_the_first():
    assert some_images().first(2).names == ("test/0", "test/1")
    assert some_images().event_shape == (1, 2, 3)
    assert len(some_images().first(4)) == 4


@pytest.mark.parametrize(
    ("selection", "error", "message"),
    [
        ([4], IndexError, "below 4"),
        ([-5], IndexError, "below 4"),
        ([], ValueError, "at least one image"),
        (slice(0, 0), ValueError, "at least one image"),
        ([True, False], ValueError, "each of 4 images, got 2"),
        ([False] * 4, ValueError, "at least one image"),
        ([0.5], ValueError, "boolean mask"),
        (2, ValueError, "a slice"),
    ],
)
def test_take_says_what_is_wrong(selection, error, message):
    with pytest.raises(error, match=message):
        some_images().take(selection)


@pytest.mark.parametrize("count", [0, -1, 5])
def test_first_says_how_many_there_are(count):
    with pytest.raises(ValueError, match=f"between 1 and 4, the number of images, got {count}"):
        some_images().first(count)


GOOD = {"images": torch.zeros(2, 1, 2, 2), "labels": torch.tensor([0, 1]), "names": ("a", "b"), "classes": ("x", "y")}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"images": torch.zeros(2, 2, 2)}, r"\(N, C, H, W\), got a float32 tensor of shape \(2, 2, 2\)"),
        ({"images": torch.zeros(2, 1, 2, 2, dtype=torch.float64)}, "float32 tensor"),
        ({"images": [[0.0]]}, "got a list"),
        ({"images": torch.full((2, 1, 2, 2), 255.0)}, "divide 8-bit values by 255"),
        ({"images": torch.full((2, 1, 2, 2), -0.1)}, "from -0.1"),
        ({"images": torch.full((2, 1, 2, 2), torch.nan)}, "nan"),
        ({"names": ("a",)}, "each of 2 images, got 1"),
        ({"labels": torch.tensor([0])}, r"shape \(2,\)"),
        ({"labels": torch.tensor([0.0, 1.0])}, "int64"),
        ({"labels": torch.tensor([-1, 0])}, "at least 0, got -1"),
        ({"labels": torch.tensor([0, 2])}, "below 2, the number of classes, got 2"),
    ],
)
def test_labelled_images_are_validated(bad, message):
    with pytest.raises(ValueError, match=message):
        LabelledImages(**{**GOOD, **bad})


def test_labels_have_no_upper_limit_where_classes_are_unknown():
    LabelledImages(**{**GOOD, "labels": torch.tensor([0, 999]), "classes": ()})
    LabelledImages(**{**GOOD, "labels": None})


# IDX


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
        (gzip.compress(WHOLE)[:-3], "gzip file is cut short or damaged"),
        (gzip.compress(WHOLE)[:-8] + b"\x00" * 8, "gzip file is cut short or damaged"),
        (b"\x1f\x8b\x08\x00 this is not gzip", "gzip file is cut short or damaged"),
    ],
)
def test_a_bad_idx_file_is_named(tmp_path, content, message):
    path = tmp_path / "bad-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


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


# FER2013


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


def test_duplicates():
    images = torch.arange(8).div(255).reshape(4, 1, 1, 2)
    assert duplicates_of(images, images[[2, 0]]).tolist() == [True, False, True, False]
    with pytest.raises(ValueError, match="one image shape"):
        duplicates_of(images, images.reshape(4, 1, 2, 1))


# .npz


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


TWO = np.zeros((2, 4, 4), np.uint8)


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


# digits


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


# image folders


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
    assert reasons["bomb.png"].startswith("DecompressionBombError")
    assert reasons["large.png"].startswith("DecompressionBombWarning")
    assert "no known white" in reasons["float.tif"]
    assert "cannot identify image file" in reasons["text.jpg"]
    assert all(reasons.values())
    assert images.take([0]).skipped == images.skipped


def test_sizes(tmp_path):
    save_picture(tmp_path / "a.png", size=(6, 4))
    save_picture(tmp_path / "b.png", size=(9, 12))
    with pytest.raises(ValueError, match=r"a\.png is 4×6 and b\.png is 12×9; pass size="):
        load(tmp_path)
    for size in (1, 3, 4, 20):
        assert tuple(load(tmp_path, size=size).images.shape) == (2, 3, size, size)


def test_resizing_takes_the_centre_and_stays_in_range():
    wide = torch.zeros(1, 1, 8, 32)
    wide[..., 12:20] = 1
    assert torch.equal(resize_and_crop(wide, 8), torch.ones(1, 1, 8, 8))
    steps = resize_and_crop(torch.eye(8).repeat(4, 4)[None, None], 16)
    assert steps.min() >= 0
    assert steps.max() <= 1
    grey = torch.full((1, 3, 40, 30), 0.3)
    torch.testing.assert_close(resize_and_crop(grey, 7), torch.full((1, 3, 7, 7), 0.3))


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "8"])
def test_a_bad_size(size):
    with pytest.raises(ValueError, match="size must be a number of pixels"):
        load("digits", size=size)


def test_size_applies_to_named_datasets_too():
    assert tuple(load("digits", size=16).event_shape) == (1, 16, 16)


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
    with pytest.raises(ValueError, match="not divided into splits, got split='train'"):
        load(tmp_path, split="train")


@pytest.mark.parametrize(("missing", "source"), [("PIL", "folder"), ("sklearn.datasets", "digits")])
def test_missing_extras_say_how_to_install_them(tmp_path, monkeypatch, missing, source):
    save_picture(tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r'pip install "netmoments\[data\]"'):
        load(tmp_path if source == "folder" else source)


# names, places and splits


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


def test_a_name_is_the_dataset_and_a_path_is_the_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_picture(tmp_path / "digits" / "a.png")
    assert len(load("digits")) == 445
    assert len(load("./digits")) == len(load(Path("digits"))) == 1


def test_folders_named_by_numbers_are_those_classes(tmp_path):
    for name in ("0", "2", "10"):
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4)).save(tmp_path / name / "a.png")
    loaded = load(tmp_path)
    assert dict(zip(loaded.names, loaded.labels.tolist(), strict=True)) == {"0/a.png": 0, "2/a.png": 2, "10/a.png": 10}
    assert loaded.classes == ()
