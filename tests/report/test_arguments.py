"""What the words of the command line mean."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from PIL import Image

from netmoments.report.arguments import (
    accuracy_in_words,
    class_names_in,
    class_numbered,
    device_named,
    images_for,
    layer_named,
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
