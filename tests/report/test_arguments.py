"""What the words of the command line mean."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from netmoments.data.images import LabelledImages
from netmoments.network.model import network_of
from netmoments.report.arguments import (
    StudyConfig,
    _takes,
    accuracy_in_words,
    class_names_in,
    class_numbered,
    count_or_all,
    covariance_in,
    device_named,
    grey_of,
    images_for,
    layer_named,
    numbers_in,
    prepared,
    spread,
    with_classes_of,
)


def test_devices():
    assert device_named("cpu") == torch.device("cpu")
    assert device_named("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("tpu9", "meta", ""):
        with pytest.raises(ValueError, match=f"no device '{name}'; give cpu, cuda or auto"):
            device_named(name)


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device is available here; give --device cpu"):
        device_named("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_named("cuda:1").index == 1
    with pytest.raises(ValueError, match="no device 'cuda:2': there are 2 GPUs here, from cuda:0"):
        device_named("cuda:2")


@pytest.mark.parametrize(("text", "layer"), [("-1", -1), ("3", 3), ("relu1", "relu1"), ("block.0#1", "block.0#1")])
def test_layers_are_numbers_or_names(text, layer):
    assert layer_named(text) == layer


def test_folders_are_brought_to_the_size_of_a_network_of_the_zoo(tmp_path):
    for name, size in (("a.png", (30, 40)), ("b.png", (50, 20))):
        Image.new("L", size).save(tmp_path / name)
    assert images_for("lenet", str(tmp_path), "test", None, None).event_shape == (1, 28, 28)
    assert images_for("lenet", str(tmp_path), "test", None, 9).event_shape == (1, 9, 9)
    with pytest.raises(ValueError, match="pass size="):
        images_for("mine.pt2", str(tmp_path), "test", None, None)


def test_some_images_evenly_spread(digits):
    assert spread(digits, 10**6) is digits
    assert spread(digits, 5).names == ("test/0", "test/89", "test/178", "test/267", "test/356")


def test_class_names_are_lines(tmp_path):
    (tmp_path / "names.txt").write_text("cat\n\n  dog \nemu\n")
    assert class_names_in(tmp_path / "names.txt") == ("cat", "dog", "emu")
    assert class_names_in(None) == ()
    with pytest.raises(FileNotFoundError, match=r"no file of class names at .*nothing\.txt"):
        class_names_in(tmp_path / "nothing.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin\.txt must be a text in UTF-8"):
        class_names_in(tmp_path / "latin.txt")
    with (tmp_path / "huge.txt").open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(ValueError, match=r"huge\.txt has 1,099,511,627,776 bytes, more than the 16,777,216"):
        class_names_in(tmp_path / "huge.txt")


def test_labels_are_brought_to_the_networks_classes(digits):
    names = tuple(f"digit {k}" for k in range(10))
    few = digits.first(4)
    assert with_classes_of(few, names, 10, "report")[1] == names
    assert with_classes_of(few, (), 10, "report")[1] == digits.classes
    some = dataclasses.replace(few, labels=torch.tensor([0, 1, 0, 1]), classes=("digit 7", "digit 3"))
    assert with_classes_of(some, names, 10, "report")[0].labels.tolist() == [7, 3, 7, 3]
    for images, classes, message in (
        (few, ("a", "b"), "report: 2 class names for a network with 10 scores"),
        (some, (), r"the images have 2 classes \(digit 7, digit 3\) and the network 10 scores: which is which"),
        (dataclasses.replace(few, labels=few.labels + 9, classes=()), (), "but the network has 10 scores, 0 to 9"),
    ):
        with pytest.raises(ValueError, match=message):
            with_classes_of(images, classes, 10, "report")


def test_a_class_by_name_or_number():
    names = ("3", "1", "cat")
    assert [class_numbered("--target", text, names, 3) for text in ("cat", "2", "3")] == [2, 2, 0]
    for text in ("dog", "4", "-1", "1.0"):
        with pytest.raises(ValueError, match=f"--target '{text}' is no class .* 0 to 2, or a name: 3, 1, cat"):
            class_numbered("--target", text, names, 3)


def test_accuracy_is_told_without_what_was_trained_on(network, digits):
    some = digits.first(20)
    assert accuracy_in_words(network, some, digits.take([40]), torch.device("cpu")) == (
        "test accuracy 100.00% of 20 images"
    )
    wrong = dataclasses.replace(some, labels=torch.cat([some.labels[:15], (some.labels[15:] + 1) % 10]))
    assert accuracy_in_words(network, wrong, digits.first(10), torch.device("cpu")) == (
        "test accuracy 75.00% of 20 images; 50.00% without the 10 that are also in the training set"
    )


def test_numbers_of_channels():
    assert numbers_in("--mean", "0.5") == (0.5,)
    assert numbers_in("--mean", None) is None
    with pytest.raises(ValueError, match=r"--std '0.5;0.5': give a number, or one for each channel"):
        numbers_in("--std", "0.5;0.5")
    for text in ("1e400", "1" + "0" * 400, "nan", "0.5,-inf"):
        with pytest.raises(ValueError, match=r"--std .*: give numbers below 1e\+09"):
            numbers_in("--std", text)


def test_preprocessing_comes_before_the_network():
    images = LabelledImages(torch.rand(2, 3, 4, 4), None, ("a", "b"), ())
    network, given = prepared(nn.Flatten().eval(), images, False, "0.5,0.25,0", "2")
    assert given is images
    expected = (images.images - torch.tensor([0.5, 0.25, 0.0]).reshape(3, 1, 1)) / 2
    torch.testing.assert_close(network(images.images), expected.flatten(1))
    with pytest.raises(ValueError, match="above 0"):
        prepared(nn.Flatten().eval(), images, False, None, "0")


def test_colour_is_brought_to_grey_where_that_is_asked_or_all_that_fits():
    images = LabelledImages(torch.rand(2, 3, 4, 4), None, ("a", "b"), ())
    _, asked = prepared(nn.Flatten().eval(), images, True, None, None)
    assert asked.event_shape == (1, 4, 4)
    one_channel = nn.Conv2d(1, 2, 3).eval()
    with pytest.warns(UserWarning, match="brought to grey"):
        _, fitting = prepared(one_channel, images, False, None, None)
    torch.testing.assert_close(fitting.images, grey_of(images.images))
    white = grey_of(torch.ones(1, 3, 2, 2))
    torch.testing.assert_close(white, torch.ones(1, 1, 2, 2))
    _, kept = prepared(nn.Conv2d(3, 2, 3).eval(), images, False, None, None)
    assert kept is images


def test_a_covariance_from_a_file(tmp_path):
    path = tmp_path / "covariance.npy"
    np.save(path, np.eye(4))
    torch.testing.assert_close(covariance_in(path), torch.eye(4, dtype=torch.float64))
    assert covariance_in(None) is None
    np.save(path, np.array(["no"]))
    with pytest.raises(ValueError, match="floating-point numbers"):
        covariance_in(path)
    path.write_text("no")
    with pytest.raises(ValueError, match=r"no \.npy file"):
        covariance_in(path)
    with pytest.raises(FileNotFoundError, match="no file with a covariance"):
        covariance_in(tmp_path / "none.npy")
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (2**21, 2**19)})
    with pytest.raises(ValueError, match=r"claims the shape \(2097152, 524288\), 8,796,093,022,208 bytes, and has 0"):
        covariance_in(path)


def test_a_number_or_all():
    assert count_or_all("--rare", "24") == 24
    assert count_or_all("--rare", "all") is None
    with pytest.raises(ValueError, match="--rare 'some': give a number, or all"):
        count_or_all("--rare", "some")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sigma": -0.1}, "sigma must be a positive number"),
        ({"samples": 1}, "samples must be at least 2, got 1"),
        ({"tolerance": 0.7}, "tolerance must be between 0 and 0.5"),
        ({"seconds": 0.0}, "seconds must be a positive number, got 0"),
        ({"rare": -1}, "rare must be at least 0, got -1"),
        ({"method": "foo"}, "method must be one of auto, layerwise, "),
        ({"attacks": -1}, "attacks must be at least 0, got -1"),
    ],
)
def test_what_a_report_cannot_be_asked_is_explained(given, message):
    with pytest.raises(ValueError, match=f"report: {message}"):
        StudyConfig(**{"sigma": 0.1, **given})


def test_an_exported_network_that_guards_its_channels_gets_grey_images():
    """A guard of torch.export fails with an AssertionError."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).eval()
    program = torch.export.export(network, (torch.rand(1, 1, 4, 4),))
    assert not _takes(network_of(program, "test"), LabelledImages(torch.rand(2, 3, 4, 4), None, ("0", "1"), ()))


def test_the_numbers_of_a_preprocessing_are_those_of_the_channels():
    images = LabelledImages(torch.rand(2, 1, 4, 4), None, ("0", "1"), ())
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).eval()
    with pytest.raises(ValueError, match=r"--mean 0.1,0.2,0.3: give one number, or one for each channel; .* have 1"):
        prepared(network, images, False, "0.1,0.2,0.3", None)
    with pytest.raises(ValueError, match=r"--std 1,2: give one number"):
        prepared(network, images, False, None, "1,2")
    normalised, _ = prepared(network, images, False, "0.5", "0.25")
    torch.testing.assert_close(normalised(images.images), network((images.images - 0.5) / 0.25))
