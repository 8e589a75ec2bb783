"""Images with labels and names: selected, validated, resized, compared."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from netmoments.data.images import LabelledImages, correct, duplicates_of, evenly_spread, resize_and_crop


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


def test_duplicates():
    images = torch.arange(8).div(255).reshape(4, 1, 1, 2)
    assert duplicates_of(images, images[[2, 0]]).tolist() == [True, False, True, False]
    with pytest.raises(ValueError, match="one image shape"):
        duplicates_of(images, images.reshape(4, 1, 2, 1))


def test_resizing_takes_the_centre_and_stays_in_range():
    wide = torch.zeros(1, 1, 8, 32)
    wide[..., 12:20] = 1
    assert torch.equal(resize_and_crop(wide, 8), torch.ones(1, 1, 8, 8))
    steps = resize_and_crop(torch.eye(8).repeat(4, 4)[None, None], 16)
    assert steps.min() >= 0
    assert steps.max() <= 1
    grey = torch.full((1, 3, 40, 30), 0.3)
    torch.testing.assert_close(resize_and_crop(grey, 7), torch.full((1, 3, 7, 7), 0.3))


@pytest.mark.parametrize(("total", "count"), [(10, 1), (10, 3), (10, 10), (445, 100)])
def test_some_of_many_are_spread_evenly(total, count):
    chosen = evenly_spread(total, count)
    assert chosen[0] == 0
    assert len(chosen.unique()) == count
    steps = chosen.diff()
    assert count == 1 or int(steps.max() - steps.min()) <= 1


def test_correct_answers_are_counted_in_batches():
    images = some_images(7)
    brighter = nn.Sequential(nn.Flatten(), nn.Linear(6, 2, bias=False)).eval()
    with torch.no_grad():
        brighter[1].weight.copy_(torch.tensor([[0.0], [1.0]]).expand(2, 6))
    # everything but the black image is taken for class 1, that one for the first of equals
    assert correct(brighter, images).tolist() == [True, True, False, True, False, True, False]
