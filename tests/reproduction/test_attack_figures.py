"""The figures of attacks at small sizes: outcomes that can be written, rows that say what the results say."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import netmoments as nm
from netmoments.attacks import primal_dual as certificate
from netmoments.attacks.box import PixelSupport
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.data.images import LabelledImages
from netmoments.report import pictures as figures
from netmoments.report.pictures import PictureRow
from reproduction import attack_rows, faces, figure_3, figure_4, figure_5, figure_6, figure_7, figure_9
from reproduction.attack_rows import COLUMNS, Attacked, a_sample, asked_again, grey, listed, right_images, share, taken
from reproduction.experiment import Origin, Outcome, Settings, Unfinished
from reproduction.figure_5 import FewPixelsSweep
from reproduction.image_sweeps import StudiedImages
from reproduction.writing import write_outcome
from tests.reproduction.small import settings_for


def written(outcome: Outcome, folder: Path) -> dict:
    """The summary of an outcome with its first drawing, written and read again; the others are drawn, not written."""
    assert all(one.draw().axes for one in outcome.drawings[1:])
    outcome = replace(outcome, drawings=outcome.drawings[:1])
    paths = write_outcome(outcome, Origin.of_this_run(torch.device("cpu"), 0), folder)
    assert all(path.stat().st_size > 500 for path in paths)
    assert {path.name for path in paths} == {
        "table.md", "summary.json", *(f"{one.name}.{end}" for one in outcome.drawings for end in ("png", "pdf"))
    }  # fmt: skip
    text = "".join((*outcome.reading, *(cell for panel in outcome.panels for row in panel.rows for cell in row)))
    assert "nan" not in text
    return json.loads((folder / outcome.name / "summary.json").read_text())


def test_a_sample_is_seeded():
    centre = torch.full((2, 3), 0.5, dtype=torch.float64)
    assert torch.equal(a_sample(centre, 0.1, 3), a_sample(centre, 0.1, 3))
    assert not torch.equal(a_sample(centre, 0.1, 3), a_sample(centre, 0.1, 4))
    assert torch.equal(a_sample(centre, 0.0, 3), centre)


@pytest.fixture
def hurried(monkeypatch):
    """Few steps and few samples: what comes out is no attack, but all of it comes out."""
    monkeypatch.setattr(attack_rows, "MANY", 20)
    monkeypatch.setattr(certificate, "BOUND_ITERATIONS", 20)
    monkeypatch.setattr(figures, "DPI", 50)
    for module in (figure_3, figure_4, attack_rows, figure_5):
        monkeypatch.setattr(module, "ITERATIONS", 4)
        monkeypatch.setattr(module, "POLISH", 2)
    for module in (figure_3, figure_4):
        monkeypatch.setattr(module, "SURVEYED", 12)
    monkeypatch.setattr(attack_rows, "SAMPLES", 12)
    monkeypatch.setitem(figure_9.SAMPLES, "cpu", 12)
    ways = {way: {**changes, "polish": min(changes["polish"], 2)} for way, changes in figure_4.WAYS.items()}
    monkeypatch.setattr(figure_4, "WAYS", ways)


class Quadrants(nn.Module):
    """Four classes for 3×8×8 images: which quarter is the brightest."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(4)
        self.relu = nn.ReLU()
        self.out = nn.Linear(12, 4)
        with torch.no_grad():
            self.out.weight.copy_(torch.eye(4).repeat(1, 3))
            self.out.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.relu(self.pool(x).flatten(1)))


@pytest.fixture(scope="module")
def quadrants() -> tuple[nn.Module, torch.Tensor]:
    images = 0.5 + 0.02 * torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for label, (row, column) in enumerate(((0, 0), (0, 4), (4, 0), (4, 4))):
        images[label, :, row : row + 4, column : column + 4] += 0.05
    return Quadrants().eval(), images


# what the figures share


def test_the_network_is_asked_again(quadrants):
    """Shares are those of samples drawn here; the ten are the first of them; cutting matters only near the bounds."""
    network, images = quadrants
    result = SparseSmooth(gamma=0.0, polish=0, iterations=100)(network, images, torch.arange(4))
    found = asked_again(network, result, seed=3, samples=400)
    again = asked_again(network, result, seed=3, samples=400)
    assert torch.equal(found.many, again.many)
    assert torch.equal(found.many, found.clipped)  # pixels stay far from 0 and 1
    assert bool(((found.few * 10).round() == found.few * 10).all())
    assert bool(((found.many - 0.5).abs() < 0.3).all())  # γ = 0: about half of the samples
    assert found.samples == 400
    records = found.records()
    assert [record["success_samples"] for record in records] == found.many.tolist()
    assert [record["success_10"] for record in records] == found.few.tolist()
    json.dumps(records, allow_nan=False)
    part = found.take([2, 0])
    assert part.result.labels.tolist() == [2, 0]
    assert torch.equal(part.result.mu, result.mu[[2, 0]])
    assert torch.equal(part.result.success.rate, result.success.rate[[2, 0]])
    assert part.records() == [records[2], records[0]]


def test_nothing_attacked_is_nothing_asked(quadrants):
    network, images = quadrants
    result = SparseSmooth(gamma=0.0, polish=0, iterations=2)(network, images[:2], torch.tensor([1, 0]))
    assert len(asked_again(network, result, 0).records()) == 0
    assert len(result.skipped) == 2
    both = attack_rows.TwoWays(asked_again(network, result, 0), asked_again(network, result, 0))
    assert "none of the images" in both.comparison_in_words()
    assert "0 (taken for 1)" not in attack_rows.skipped_in_words(both, "abcd")
    assert "b (taken for a) and a (taken for b)" in attack_rows.skipped_in_words(both, "abcd")


def test_a_row_says_what_the_result_says(quadrants):
    network, images = quadrants
    attack = PixelSupport(percent=50, beta=0.2, polish=0, iterations=50)
    found = asked_again(network, attack(network, images, torch.arange(4)), 0, 100)
    row = dict(zip(COLUMNS, attack_rows.row_of(found, 1, "abcd", "name"), strict=True))
    result = found.result
    assert row[""] == "name"
    assert row["towards"] == "abcd"[int(result.towards[1])]
    assert row["answer"] == "abcd"[int(found.answers[1])] == row["towards"]
    assert row["of many"] == "100 %"
    assert row["largest |μ|"] == "51"
    assert row["unchanged"] == f"{100 * float(result.sparsity[1]):.1f} %"
    assert row["fooled"] == row["solved"] == "yes"
    panel = attack_rows.rows_panel("title", found, "abcd")
    assert [line[0] for line in panel.rows] == list("abcd")
    assert panel.columns[4] == "of 100"


def test_the_sample_shown_gets_the_answer_of_most(quadrants):
    network, images = quadrants
    result = SparseSmooth(gamma=0.0, polish=0, iterations=100)(network, images, torch.arange(4))
    found = asked_again(network, result, 0, 200)
    for place in range(4):
        sample = attack_rows.typical_sample(network, found, place, 7)
        assert int(network(sample.unsqueeze(0)).argmax()) == int(found.answers[place])
    rows = attack_rows.picture_rows(network, found, "abcd", 0)
    assert [row.before for row in rows] == list("abcd")
    assert [row.after for row in rows] == ["abcd"[int(answer)] for answer in found.answers]


def test_words():
    assert [share(x) for x in (0.0, 1.0, 0.5, 0.9999, 1e-3)] == ["0 %", "100 %", "50 %", "99.99 %", "0.10 %"]
    assert [grey(x / 255) for x in (0.0, 1.25, 30.2, 12345.0)] == ["0", "1.2", "30", "12,345"]
    assert listed(["x", "y"]) == "x and y"
    assert attack_rows.gap_in_words(0.0) == "0"
    assert attack_rows.gap_in_words(2e-3) == "2e-03"
    assert attack_rows.finite(float("nan")) is None
    assert attack_rows.finite(float("inf")) is None


# figures 3, 4, 6 and 7: digits


class NearestMean(nn.Module):
    """In place of LeNet, which is large: the digit whose mean image is nearest, ⟨m, x⟩ − ‖m‖²/2, by ten ReLUs."""

    def __init__(self, means: torch.Tensor) -> None:
        super().__init__()
        self.first, self.relu, self.second = nn.Linear(784, 10), nn.ReLU(), nn.Linear(10, 10)
        with torch.no_grad():
            self.first.weight.copy_(means.flatten(1))
            self.first.bias.copy_(100 - means.flatten(1).square().sum(1) / 2)
            self.second.weight.copy_(torch.eye(10))
            self.second.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.relu(self.first(x.flatten(1))))


@pytest.fixture
def small(mnist, data_dir, tmp_path, hurried, monkeypatch) -> Settings:
    """Settings with MNIST, and a small network for it."""
    settings = settings_for(tmp_path, data_dir=data_dir, images=3)
    network = NearestMean(attack_rows.mean_images(settings)).eval()
    for module in (figure_3, figure_4, figure_6, figure_7):
        monkeypatch.setattr(module, "chosen_network", lambda settings: network)
    return settings


def test_the_first_nines_that_are_right(mnist, data_dir, tmp_path):
    network = nm.zoo.pretrained("lenet").float()
    places, images = right_images(network, settings_for(tmp_path, data_dir=data_dir), 9, 5)
    everything = nm.data.load("mnist", data_dir=data_dir)
    assert everything.labels[places].tolist() == [9] * 5
    assert torch.equal(images, everything.images[places])
    assert places == sorted(places)
    assert places[0] == int((everything.labels == 9).nonzero()[0])  # the first is right


def test_figure_3(small, tmp_path):
    outcome = figure_3.reproduce(small)
    numbers = written(outcome, tmp_path)["numbers"]
    assert len(numbers["nines"]) == 3
    assert numbers["shown"] in numbers["nines"]
    assert {row["target"] for row in numbers["rows"]} == {2, 3, 4, 7, 8}
    assert all(row["linf"] <= 30 / 255 + 1e-6 for row in numbers["rows"])
    for one, row in zip(numbers["targets"], outcome.panels[1].rows, strict=True):
        assert [str(one["target"]), str(sum(one["reached_alone"])), str(sum(one["reached"]))] == list(row[:3])
        assert one["tried_again"] == [place for place, yes in enumerate(one["reached_alone"]) if not yes]
        assert len(one["followed"]) == len(one["tried_again"])
    assert outcome.comparisons[0].paper == 5


def test_the_nine_with_most_targets_is_shown():
    def tried(reached: list[float], again: dict[int, float]) -> figure_3.Try:
        def shares(values: list[float]) -> Attacked:
            few = torch.tensor(values, dtype=torch.float64)
            return Attacked(None, few, few, few, few, 10)

        return figure_3.Try(2, shares(reached), tuple(again), shares(list(again.values())))

    first = tried([1.0, 0.9, 0.0, 0.0], {2: 1.0, 3: 0.0})
    second = tried([0.0, 0.0, 0.9, 0.8], {0: 0.8, 1: 1.0, 3: 0.5})
    assert first.alone_reached() == [True, True, False, False]
    assert second.reached() == [False, True, True, False]
    assert figure_3.most_reached([first, second]) == 1  # as many as others alone, more with the network followed
    assert second.best(1)[1:] == (1, True)
    assert second.best(2)[1:] == (2, False)


def test_figure_4(small, tmp_path):
    outcome = figure_4.reproduce(small)
    numbers = written(outcome, tmp_path)["numbers"]
    assert len(numbers["supports"]) == 4
    for support in numbers["supports"]:
        assert set(support["shown"]) == set(figure_4.WAYS)
        for way in (figure_4.PAPER, figure_4.FOLLOWED):
            assert all(record["l0"] <= 31 and record["linf"] <= 550 / 255 + 1e-5 for record in support["ways"][way])
        assert all(record["linf"] <= 1 for record in support["ways"][figure_4.INSIDE])
    assert len(outcome.panels[0].rows) == 4 * 3
    assert {support["seed"] for support in numbers["supports"]} == {0, 1, 2, 3}


def test_figure_6_of_few_images_has_the_digit_that_the_paper_names(small):
    numbers = figure_6.reproduce(replace(small, images=2)).numbers
    assert [record["label"] for record in numbers["as_the_paper"]] == numbers["shown"] == [0, 3]


def test_figure_6(small, tmp_path):
    outcome = figure_6.reproduce(replace(small, images=10))
    numbers = written(outcome, tmp_path)["numbers"]
    assert [record["label"] for record in numbers["as_the_paper"]] == list(range(10))
    assert numbers["skipped"] == []
    assert len(numbers["shown"]) == 5
    assert 3 in numbers["shown"]
    assert all(record["success_clipped"] is None for record in numbers["as_the_paper"])
    assert all(abs(record["sigma"] * 255 - 1) < 1e-5 for record in numbers["with_confidence"])
    assert [row[1] for row in outcome.panels[0].rows] == [str(record["towards"]) for record in numbers["as_the_paper"]]


def test_figure_7(small, tmp_path):
    outcome = figure_7.reproduce(small)
    numbers = written(outcome, tmp_path)["numbers"]
    for way in ("as_the_paper", "with_confidence"):
        assert [(record["label"], record["target"], record["towards"]) for record in numbers[way]] == [
            (4, 5, 5),
            (4, 8, 8),
            (4, 9, 9),
        ]


def test_linearizations_of_other_classes_are_refused():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    images = torch.rand(1, 1, 2, 2)
    attack = attack_rows.SparseSmoothFrom(
        networks=nm.two_stage(network, images, outputs=[0, 1]), own=torch.zeros(1, dtype=torch.int64)
    )
    with pytest.raises(ValueError, match="of the 3 classes that are followed were wanted, got 2"):
        attack(network, images, network(images).argmax(1))


def test_a_class_without_images_has_no_mean(tmp_path):
    pixels = np.zeros((3, 28, 28), dtype=np.uint8)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, 3, 28, 28) + pixels.tobytes())
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(struct.pack(">4BI", 0, 0, 8, 1, 3) + bytes([0, 1, 2]))
    with pytest.raises(ValueError, match="no image of 3, 4, 5, 6, 7, 8 and 9"):
        attack_rows.mean_images(settings_for(tmp_path, data_dir=tmp_path))


@pytest.mark.parametrize("experiment", [figure_3, figure_4, figure_6, figure_7])
def test_no_time_no_work(experiment, small):
    with pytest.raises(Unfinished):
        experiment.reproduce(replace(small, deadline=0.0))


# figure 9


@pytest.fixture
def strangers(tmp_path) -> Path:
    """A stand-in for FER2013: noise that the network takes for something."""
    pixels = np.random.default_rng(0).integers(0, 256, (21, 48, 48), dtype=np.uint8)
    labels = np.arange(21) % 7
    np.savez(tmp_path / "fer2013.npz", images=pixels, labels=labels, usage=np.full(21, 2))
    return tmp_path


class ByLabel(nn.Module):
    """Seven classes for 48×48 images, by the brightness of seven rows."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.out = nn.Linear(7, 7, bias=False)
        with torch.no_grad():
            self.out.weight.copy_(torch.eye(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.relu(x[:, 0, :7].mean(2)))


def test_figure_9(strangers, tmp_path, hurried, monkeypatch):
    path = strangers / "fer2013.npz"
    with np.load(path) as file:
        images, labels = file["images"].copy(), file["labels"]
    images[np.arange(21), labels] = 255  # what the network looks at
    images[7, 0], images[7, 3] = 0, 255  # but for one of the angry, which it gets wrong
    np.savez(path, images=images, labels=labels, usage=np.full(21, 2))
    monkeypatch.setattr(figure_9, "faces_network", lambda: ByLabel().eval())
    settings = settings_for(tmp_path, data_dir=strangers)
    outcome = figure_9.reproduce(settings)
    numbers = written(outcome, tmp_path)["numbers"]
    assert [record["label"] for record in numbers["as_the_paper"]] == list(range(7))
    assert [labels[place] for place in numbers["places"]] == list(range(7))
    assert 7 not in numbers["places"]
    assert [drawing.name for drawing in outcome.drawings] == ["figure-9", "figure-9-paper", "figure-9-faces"]
    assert faces.one_face_a_class(ByLabel(), settings)[0] == numbers["places"]
    assert faces.one_face_a_class(ByLabel(), replace(settings, images=2))[0] == numbers["places"][:2]


def test_faces_that_are_all_wrong_are_said(strangers, tmp_path, monkeypatch):
    monkeypatch.setattr(figure_9, "faces_network", lambda: ByLabel().eval())
    with pytest.raises(ValueError, match=r"faces of FER2013's test split with \w+ the network gets none"):
        figure_9.reproduce(settings_for(tmp_path, data_dir=strangers))


def test_noise_alone_has_nothing_of_the_photograph(quadrants):
    """The pictures of μ are the same for another photograph, and only they are drawn."""
    mu = torch.rand(1, 8, 8) - 0.5
    one, other = (PictureRow(torch.full((1, 8, 8), grey), mu, torch.full((1, 8, 8), grey), "", "") for grey in (0, 1))
    parts = figure_9._parts(one)
    assert len(parts) == 3
    assert all(torch.equal(a, b) for a, b in zip(parts, figure_9._parts(other), strict=True))


# figure 5


@pytest.fixture
def toy(quadrants, monkeypatch) -> nn.Module:
    network, images = quadrants
    model = figure_5.PhotographNetwork("a toy", network, 8, ("first", "second", "third"))
    monkeypatch.setattr(figure_5, "chosen_model", lambda settings: model)
    natural = LabelledImages(images, None, tuple("wxyz"), ())
    monkeypatch.setattr(figure_5, "natural_images", lambda settings, side: natural)
    monkeypatch.setitem(figure_5.IMAGES, "cpu", 3)
    monkeypatch.setitem(figure_5.SAMPLES, "cpu", 12)
    return network


def test_figure_5_is_resumed(toy, tmp_path, hurried, monkeypatch):
    outcome = figure_5.reproduce(settings_for(tmp_path))
    numbers = written(outcome, tmp_path)["numbers"]
    assert [(row["image"], row["name"], row["label"]) for row in numbers["images"]] == [
        (0, "w", 0),
        (1, "x", 1),
        (2, "y", 2),
    ]
    assert outcome.panels[0].rows[0][0] == "w: first"
    monkeypatch.setattr(FewPixelsSweep, "rows_of", None)  # nothing is computed again
    assert figure_5.reproduce(settings_for(tmp_path)).numbers == outcome.numbers


def test_rows_of_few_pixels_are_the_attack(quadrants, monkeypatch):
    network, images = quadrants
    monkeypatch.setattr(figure_5, "PERCENT", 10)
    on = StudiedImages(network, images, torch.tensor([5, 0, 9, 2]), 1)
    sweep = FewPixelsSweep("few-pixels", on, 1, 30)
    assert sweep.counts == [1, 1, 1, 1]
    compute = sweep.prepare("cpu")
    columns = compute(1)
    assert 0 < len(columns["pixel"]) <= round(64 * 0.1) * 3
    assert set(columns["image"]) == {0}
    assert float(np.abs(columns["mu"]).max()) <= 75 / 255 + 1e-6
    assert all(len(column) == len(columns["pixel"]) for column in columns.values())
    parts = [compute(item) for item in range(4)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in columns}
    found = figure_5.rows_from(joined, on, list("abcd"))
    assert [row.number for row in found] == [5, 0, 9, 2]
    for place, row in enumerate(found):
        assert int((row.mu != 0).any(0).sum()) <= 6
        assert row.summary["label"] == place
        answer = int(network((images[place] + row.mu).unsqueeze(0)).argmax())
        assert (answer != place) == (row.summary["success_samples"] > 0.5)
    supports = {tuple(np.unique(part["pixel"] % 64)) for part in parts}
    assert len(supports) == 4  # every image has pixels of its own


def test_where_to_put_what_figure_5_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NETMOMENTS_DATA", raising=False)
    settings = settings_for(tmp_path, data_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"squeezenet_v1.0_deepcompressed.npz into one of\n(.|\n)*squeezenet\n"):
        figure_5.chosen_model(settings)
    with pytest.raises(FileNotFoundError, match=r"photographs: put image files.*\n.*natural"):
        figure_5.natural_images(settings, 8)
    with pytest.raises(ValueError, match="--weights, a safetensors file for AlexNet"):
        figure_5.chosen_model(settings_for(tmp_path, model="alexnet"))
    (tmp_path / "natural").mkdir()
    np.savez(tmp_path / "natural" / "mine.npz", images=np.zeros((2, 16, 16, 3), dtype=np.uint8))
    assert figure_5.natural_images(settings, 8).images.shape == (2, 3, 8, 8)


def test_figure_5_has_squeezenet_and_its_words(data_dir, tmp_path):
    if not (data_dir / "squeezenet").is_dir():
        pytest.skip(f"no SqueezeNet in {data_dir}")
    model = figure_5.chosen_model(settings_for(tmp_path, data_dir=data_dir))
    assert (model.name, model.side) == ("SqueezeNet", 227)
    assert model.called(0) == "tench"
    assert model.called(1000) == "class 1000"


def test_some_of_a_result(quadrants):
    network, images = quadrants
    result = SparseSmooth(iterations=3, polish=1, samples=5)(
        network, images, torch.arange(4), torch.tensor([1, 2, 3, 0])
    )
    part = taken(result, torch.tensor([3]))
    assert part.targets.tolist() == [0]
    assert len(part) == 1
    assert part.success_clipped.rate.shape == (1,)
    assert part.bounds == result.bounds
