"""Table 5 and Figure 8: which faces are chosen, the rows of their attacks, and what is made of them."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from netmoments.attacks import base
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.checks import random_seed
from netmoments.data.images import LabelledImages
from netmoments.sweep.local import LocalEngine
from reproduction import attack_rows, figure_8, published, table_5
from reproduction import faces as face_attacks
from reproduction.experiment import Origin, Settings, Unfinished
from reproduction.faces import POLISH, Faces, TargetedSweep, chosen_faces, chosen_rows, most_fooled
from reproduction.writing import summary_of

ROOT = Path(__file__).parents[2]
CLASSES = ("one", "two", "three")
QUICK = {"iterations": 30, "samples": 20}
ATTACKS = {
    table_5.PAPER: SparseSmooth(gamma=0.0, polish=0, bounds=None, **QUICK),
    table_5.CONFIDENT: SparseSmooth(confidence=0.9, polish=20, **QUICK),
}
KINDS = {
    figure_8.FORMULA: SparseSmooth(gamma=0.0, polish=0, bounds=None, **QUICK),
    figure_8.FOLLOWED: SparseSmooth(gamma=0.0, polish=20, **QUICK),
}


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
    return nn.Sequential(*layers).eval()


@pytest.fixture(scope="module")
def everything(network) -> LabelledImages:
    """Random images of which the network gets two thirds right by construction, with all classes among them."""
    images = torch.rand(240, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        scores = network(images)
        centred = scores - scores.mean(0)  # a bias that gives every class its share
        network[-1].bias -= scores.mean(0)
    labels = centred.argmax(1)
    labels[::3] = (labels[::3] + 1) % 3
    return LabelledImages(images, labels, tuple(str(k) for k in range(240)), CLASSES)


@pytest.fixture(scope="module")
def faces(network, everything) -> Faces:
    return chosen_faces(network, everything, {0: 2, 1: 2, 2: 2}, 0, "table-5")


def settings(out: Path, **others) -> Settings:
    return Settings(out, LocalEngine(["cpu"]), torch.device("cpu"), **others)


def require_plain(value) -> None:
    """What JSON can hold without NaN."""
    json.dumps(value, allow_nan=False)


class TestPublished:
    def test_the_table_is_that_of_the_paper(self):
        path = ROOT.parent / "shared" / "paper" / "tables.json"
        if not path.exists():
            pytest.skip(f"no {path}")
        table = json.loads(path.read_text())["table5"]
        assert [list(row) for row in published.TABLE_5] == table["misclassification_rate_source_by_target"]
        assert [name.lower() for name in table["classes"]] == list(published.TABLE_5_CLASSES)

    def test_its_average_is_the_mean_of_its_entries(self):
        entries = [rate for row in published.TABLE_5 for rate in row if rate is not None]
        assert len(entries) == 42
        assert abs(sum(entries) / 42 - published.TABLE_5_AVERAGE) < 5e-4  # rounded to three digits
        assert table_5.average_published() == pytest.approx(sum(entries) / 42)

    def test_the_pair_of_figure_8_is_its_lowest(self):
        assert table_5.lowest_published_pair() == (figure_8.SOURCE, figure_8.TARGET, 0.6)

    def test_its_classes_are_those_of_the_dataset(self):
        from netmoments.data.datasets import FER2013_CLASSES

        assert published.TABLE_5_CLASSES == FER2013_CLASSES


class TestChosen:
    def test_only_images_that_the_network_gets_right_are_chosen(self, network, everything, faces):
        assert faces.labels.tolist() == [0, 0, 1, 1, 2, 2]
        assert torch.equal(network(faces.images).argmax(1), faces.labels)
        assert torch.equal(everything.images[faces.numbers], faces.images)
        assert len(set(faces.numbers.tolist())) == 6

    def test_the_choice_follows_seed_and_purpose_and_grows(self, network, everything, faces):
        def numbers(count, seed, purpose):
            return chosen_faces(network, everything, {1: count}, seed, purpose).numbers.tolist()

        assert numbers(2, 0, "table-5") == faces.numbers[2:4].tolist()
        assert numbers(5, 0, "table-5")[:2] == numbers(2, 0, "table-5")
        assert numbers(5, 1, "table-5") != numbers(5, 0, "table-5")
        assert numbers(5, 0, "figure-8") != numbers(5, 0, "table-5")

    def test_too_few_are_all_of_them(self, network, everything):
        right = (network(everything.images).argmax(1) == everything.labels) & (everything.labels == 2)
        chosen = chosen_faces(network, everything, {2: 1000}, 0, "table-5")
        assert sorted(chosen.numbers.tolist()) == right.nonzero().flatten().tolist()

    def test_a_class_that_is_never_right_is_named(self, network, everything):
        wrong = replace(everything, labels=(network(everything.images).argmax(1) + 1) % 3)
        with pytest.raises(ValueError, match=r"none of the .* images of class two right"):
            chosen_faces(network, wrong, {1: 1}, 0, "table-5")

    def test_images_without_labels_are_refused(self, network, everything):
        with pytest.raises(ValueError, match="need labels"):
            chosen_faces(network, replace(everything, labels=None), {1: 1}, 0, "table-5")


TARGETS = {0: [1, 2], 1: [0, 2], 2: [0, 1]}


@pytest.fixture(scope="module")
def three(network, everything) -> Faces:
    """One of each class."""
    return chosen_faces(network, everything, {0: 1, 1: 1, 2: 1}, 0, "table-5")


@pytest.fixture(scope="module")
def rows(three):
    sweep = TargetedSweep("table-5", three, TARGETS, ATTACKS, 1)
    work = sweep.prepare("cpu")
    parts = [work(item) for item in range(len(sweep.counts))]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class TestRows:
    def test_every_image_has_every_target_by_every_attack(self, three, rows):
        assert len(rows["image"]) == 3 * 2 * 2
        seen = set(zip(rows["image"].tolist(), rows["target"].tolist(), rows["variant"].tolist(), strict=True))
        wanted = {
            (number, target, variant)
            for number, label in zip(three.numbers.tolist(), three.labels.tolist(), strict=True)
            for target in TARGETS[label]
            for variant in ATTACKS
        }
        assert seen == wanted
        labels = dict(zip(three.numbers.tolist(), three.labels.tolist(), strict=True))
        assert [labels[image] for image in rows["image"].tolist()] == rows["source"].tolist()

    def test_rows_agree_with_themselves(self, rows):
        paper = rows["variant"] == table_5.PAPER
        assert np.isnan(rows["success_clipped"][paper]).all()
        assert np.isfinite(rows["success_clipped"][~paper]).all()
        assert (rows["asked"][paper] == 0).all()
        assert np.isnan(rows["asked"][~paper]).all()
        assert (rows["polished"][paper] == 0).all()
        assert (rows["polished"][~paper] > 0).all()
        assert (rows["outside"][~paper] == 0).all()
        assert (rows["answer"][most_fooled(rows)] == rows["target"][most_fooled(rows)]).all()
        held = paper & rows["feasible"]
        assert (rows["margin"][held] <= 0).all()

    def test_followed_noise_fools_the_toy_network(self, rows):
        followed = rows["variant"] == table_5.CONFIDENT
        assert rows["success"][followed].mean() > 0.7

    def test_an_images_rows_do_not_depend_on_the_others(self, three, rows):
        alone = Faces(three.network, three.images[1:2], three.labels[1:2], three.numbers[1:2], CLASSES, three.seed)
        found = TargetedSweep("table-5", alone, TARGETS, ATTACKS, 1).prepare("cpu")(0)
        there = chosen_rows(rows, rows["image"] == int(three.numbers[1]))
        for name, values in found.items():
            np.testing.assert_array_equal(values, there[name], err_msg=name)

    def test_an_image_is_linearized_once_and_the_rows_are_those_of_the_attacks(self, three, monkeypatch):
        """In float64: the iterations enlarge a difference in rounding."""
        faces = replace(three, network=copy.deepcopy(three.network).double(), images=three.images.double())
        points, original = [], face_attacks.two_stage
        monkeypatch.setattr(face_attacks, "two_stage", lambda *given: points.append(len(given[1])) or original(*given))
        with monkeypatch.context() as inside:
            inside.setattr(base, "linearized_at", lambda *given: pytest.fail("linearized again"))
            rows = TargetedSweep("table-5", faces, TARGETS, ATTACKS, 3).prepare("cpu")(0)
        assert points == [3]
        seed = random_seed(faces.seed, "table-5", int(faces.numbers[0])) % face_attacks.SEEDS
        sources = [place for place, label in enumerate(faces.labels.tolist()) for _ in TARGETS[label]]
        targets = torch.tensor([target for label in faces.labels.tolist() for target in TARGETS[label]])
        for name, attack in ATTACKS.items():
            plain = replace(attack, seed=seed)(faces.network, faces.images[sources], faces.labels[sources], targets)
            own = chosen_rows(rows, rows["variant"] == name)
            np.testing.assert_allclose(own["l1"], plain.l1, rtol=1e-6)
            np.testing.assert_allclose(own["margin"], plain.margin, rtol=1e-6, atol=1e-9)
            np.testing.assert_allclose(own["success"], plain.success.rate)

    def test_the_configuration_tells_attacks_apart(self, three):
        here = TargetedSweep("table-5", three, TARGETS, ATTACKS, 1).configuration
        require_plain(here)
        others = {name: replace(attack, iterations=31) for name, attack in ATTACKS.items()}
        assert here != TargetedSweep("table-5", three, TARGETS, others, 1).configuration


@pytest.mark.parametrize(
    ("error", "words"), [(None, "solved nowhere"), (0.05, "agrees"), (2.0, "2.00 above"), (-0.3, "0.30 below")]
)
def test_what_is_said_of_the_linearization(error, words):
    assert words in face_attacks.on_linearization({"formula_error_where_feasible": error})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("table-5")


class TestTable5:
    def test_it_stops_and_goes_on(self, three, rows, folder):
        with pytest.raises(Unfinished, match="table-5: 1 of 3 images done"):
            table_5.study(settings(folder, deadline=0.0), three, ATTACKS)
        again = settings(folder)
        found = again.run(TargetedSweep("table-5", three, TARGETS, ATTACKS, table_5.BLOCK["cpu"])).columns
        for name, values in rows.items():
            np.testing.assert_array_equal(found[name], values, err_msg=name)

    def test_with_fewer_images_than_classes_it_has_the_first_classes(self, network, everything, tmp_path, monkeypatch):
        monkeypatch.setattr(face_attacks, "network_and_faces", lambda _: (network, everything))
        monkeypatch.setattr(table_5, "ATTACKS", ATTACKS)
        outcome = table_5.reproduce(settings(tmp_path, images=2))
        require_plain(outcome.numbers)
        assert outcome.numbers["images"] == 2
        attacked = [pair for pair in outcome.numbers["pairs"] if pair[table_5.PAPER]["attacks"]]
        assert [(pair["source"], pair["target"]) for pair in attacked] == [(0, 1), (1, 0)]
        assert not any("nan" in cell for panel in outcome.panels for row in panel.rows for cell in row)
        assert outcome.drawings[0].draw().axes

    def test_its_outcome(self, three, rows, folder):
        outcome = table_5.study(settings(folder), three, ATTACKS)
        require_plain(outcome.numbers)
        assert len(outcome.numbers["pairs"]) == 6
        for name in ATTACKS:
            overall, own = outcome.numbers["overall"][name], chosen_rows(rows, rows["variant"] == name)
            assert overall["samples_fooled"] == pytest.approx(own["success"].mean())
            assert overall["images_fooled"] == pytest.approx((own["success"] > 0.5).mean())
            pairs = [pair[name] for pair in outcome.numbers["pairs"]]
            assert np.mean([pair["samples_fooled"] for pair in pairs]) == pytest.approx(overall["samples_fooled"])
            assert sum(pair["fooled_as_asked"] for pair in pairs) == overall["fooled_as_asked"]
        assert "ReLU 2 of 2, 4, 12 units" in outcome.reading[0]
        assert not any("nan" in cell for panel in outcome.panels for row in panel.rows for cell in row)
        assert len(outcome.details[0].rows) == 6
        summary_of(outcome, Origin.of_this_run(torch.device("cpu"), 0))
        assert len(outcome.drawings[0].draw().axes) == 4

    def test_the_matrix_has_sources_in_rows(self):
        columns = {"source": np.array([0, 0, 1]), "target": np.array([1, 1, 0])}
        found = table_5.matrix(columns, np.array([0.0, 1.0, 0.25]), 2)
        np.testing.assert_array_equal(found, [[math.nan, 0.5], [0.25, math.nan]])

    def test_how_many_images_are_asked_for(self, network, everything, tmp_path, monkeypatch):
        monkeypatch.setattr(face_attacks, "network_and_faces", lambda _: (network, everything))
        asked = []
        monkeypatch.setattr(table_5, "study", lambda _, faces, __: asked.append(len(faces.images)))
        monkeypatch.setattr(figure_8, "study", lambda _, faces, *__: asked.append(len(faces.images)))
        monkeypatch.setattr(figure_8, "SOURCE", 1)
        for images in (2, 7, 10_000):
            table_5.reproduce(settings(tmp_path, images=images))
            figure_8.reproduce(settings(tmp_path, images=images))
        assert asked == [2, 1, 6, 3, 30, 30]


@pytest.mark.parametrize(("images", "steps"), [(2, attack_rows.FEW_STEPS), (25, POLISH)])
def test_few_images_are_followed_for_fewer_steps(images, steps, tmp_path):
    attacks = [SparseSmooth(polish=POLISH), SparseSmooth(gamma=0.0, polish=0)]
    asked = [attack_rows.in_time(attack, settings(tmp_path, images=images)).polish for attack in attacks]
    assert asked == [steps, 0]


class TestFigure8:
    def test_its_outcome(self, network, everything, tmp_path):
        faces = chosen_faces(network, everything, {2: 2}, 0, "figure-8")
        gammas = (0.0, 0.3)
        outcome = figure_8.study(settings(tmp_path), faces, KINDS, gammas, target=0)
        require_plain(outcome.numbers)
        for curve in outcome.numbers["curves"].values():
            assert [one["gamma"] for one in curve] == list(gammas)
            assert all(one["attacks"] == 2 for one in curve)
        followed = outcome.numbers["curves"][figure_8.FOLLOWED]
        assert followed[-1]["separation_sampled"] > followed[0]["separation_sampled"]
        assert followed[-1]["samples_fooled"] > followed[0]["samples_fooled"]
        assert "5 → 4 is the lowest, 0.6" in outcome.reading[1]
        assert not any("nan" in cell for panel in outcome.panels for row in panel.rows for cell in row)
        summary_of(outcome, Origin.of_this_run(torch.device("cpu"), 0))
        assert len(outcome.drawings[0].draw().axes) == 2

    @pytest.mark.parametrize(("last", "words"), [(0.9, "rises from 50.0 %"), (0.505, "stays at"), (0.1, "falls from")])
    def test_a_course_in_words(self, last, words):
        assert words in figure_8._course("x", {"rate": 0.5}, {"rate": last}, "rate")
