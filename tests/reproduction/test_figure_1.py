"""Figure 1: any network is drawn, and its texts stay in their boxes."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from netmoments.memory import gigabytes
from netmoments.network.relu_calls import Relu
from reproduction import figure_1
from reproduction.figure_1 import Anatomy, anatomy_of, draw_anatomy, input_shape, network_to_draw, shown_relus
from tests.networks import FACTORIES, network
from tests.reproduction.small import drawn, settings_for


@pytest.mark.parametrize(("count", "kept", "before", "after"), [
    (3, 2, [0, 1], []),
    (5, 0, [], [1, 2, 3, 4]),
    (26, 25, [0, None, 24], []),
    (26, 0, [], [1, None, 25]),
    (26, 1, [0], [2, None]),
    (26, 12, [None, 11], [13, None]),
    (26, 24, [None, 23], [25]),
])  # fmt: skip
def test_the_middle_of_long_networks_is_left_out(count, kept, before, after):
    assert shown_relus(count, kept) == (before, after)


@pytest.mark.parametrize("name", ["lenet", "residual", "concatenation", "shared", "folded"])
def test_figure_1_draws_any_network(name, tmp_path):
    net = network(name)
    for layer in (0, -1):
        anatomy = anatomy_of(name, net, FACTORIES[name][1], layer)
        figure = draw_anatomy(anatomy)
        said = {text.get_text() for axes in figure.axes for text in axes.texts}
        kept = anatomy.relus[layer]
        assert f"q = {kept.size:,}" in said
        assert f"n = {math.prod(FACTORIES[name][1])}" in said
        assert any("paths around" in text for text in said) == anatomy.around
        assert drawn(figure, tmp_path)
    assert anatomy_of(name, net, FACTORIES[name][1], 0).around == (name == "concatenation")


def test_a_path_around_the_kept_relu_is_seen():
    net = network("residual")
    around = [anatomy_of("residual", net, (2, 6, 6), layer).around for layer in range(5)]
    assert around == [False, True, False, True, False]


def squeezenet() -> Anatomy:
    """SqueezeNet by its names and its longest numbers."""
    fires = [f"1.fire{i}.{part}_relu" for i in range(2, 10) for part in ("squeeze", "expand")]
    relus = [Relu(i, name, torch.Size([384, 111, 111])) for i, name in enumerate(["1.relu1", *fires, "1.relu10"])]
    return Anatomy("squeezenet", tuple(relus), 10, (3, 227, 227), 1000, True)


@pytest.mark.parametrize("model", ["lenet", "faces", "squeezenet"])
def test_texts_of_figure_1_stay_in_their_boxes(model):
    """No text is wider than the smallest box around its middle, and none meets another."""
    if model == "squeezenet":
        anatomy = squeezenet()
    else:
        net = network_to_draw(model, None)
        anatomy = anatomy_of(model, net, input_shape(model, net), -1)
    figure = draw_anatomy(anatomy)
    figure.canvas.draw()
    (axes,) = figure.axes
    texts = [(text.get_text(), text.get_window_extent()) for text in axes.texts]
    boxes = [patch.get_window_extent() for patch in axes.patches if type(patch).__name__ == "FancyBboxPatch"]
    for said, extent in texts:
        x, y = (extent.x0 + extent.x1) / 2, (extent.y0 + extent.y1) / 2
        around = [box for box in boxes if box.x0 <= x <= box.x1 and box.y0 <= y <= box.y1]
        if around:
            smallest = min(around, key=lambda box: box.width)
            assert smallest.x0 <= extent.x0, said
            assert extent.x1 <= smallest.x1, said
    for i, (said, extent) in enumerate(texts):
        for other_said, other in texts[:i]:
            apart = (
                extent.x1 <= other.x0 or other.x1 <= extent.x0 or extent.y1 <= other.y0 + 2 or other.y1 <= extent.y0 + 2
            )
            assert apart, f"{said} meets {other_said}"


def test_figure_1_from_beginning_to_end(tmp_path):
    outcome = figure_1.reproduce(settings_for(tmp_path))
    (panel,) = outcome.panels
    assert [row[3] for row in panel.rows] == ["6,272", "3,136", "1,024"]
    assert panel.rows[2][4:] == (f"{1024 * 794:,}", gigabytes(4 * 1024 * 794))
    assert outcome.numbers["kept"] == "relu3"
    json.dumps(outcome.numbers)
    assert drawn(outcome.drawings[0].draw(), tmp_path)
    by_name = figure_1.reproduce(settings_for(tmp_path, model="digits", layer="relu1"))
    assert by_name.numbers["inputs"] == 64


def test_figure_1_of_a_network_of_the_users(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))\n"
    )
    with pytest.raises(ValueError, match=r"given an image of MNIST's shape, \(1, 28, 28\).*\.pt2"):
        figure_1.reproduce(settings_for(tmp_path, model=f"{path}:make"))
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    torch.export.save(torch.export.export(net, (torch.zeros(1, 5),)), tmp_path / "mine.pt2")
    outcome = figure_1.reproduce(settings_for(tmp_path, model=str(tmp_path / "mine.pt2")))
    assert (outcome.numbers["inputs"], outcome.numbers["outputs"], outcome.numbers["model"]) == (5, 2, "mine")
