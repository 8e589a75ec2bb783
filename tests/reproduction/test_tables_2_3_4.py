"""Tables 2, 3 and 4 and the seeds, with very few images and samples: that everything comes together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import netmoments as nm
from netmoments.covariances import LowRank
from netmoments.gaussian import Gaussian
from netmoments.network.weights import write_tensors
from reproduction import seeds, table_2, table_3, table_4, trained
from reproduction.experiment import Settings
from reproduction.image_sweeps import StudiedImages, cube
from reproduction.lenet_on_mnist import TightnessSweep
from reproduction.table_4 import ClusterPoints, PointsSweep, pieces, round_robin
from reproduction.training import training_facts
from tests.closeness import assert_close
from tests.reproduction.small import settings_for, shown, small_images, small_lenet


@pytest.fixture(scope="module")
def studied() -> StudiedImages:
    return small_images()


class TestPoints:
    def test_round_robin_takes_labels_in_turn_until_they_run_out(self):
        labels = torch.tensor([1, 1, 0, 0, 0, 2])
        assert labels[round_robin(labels)].tolist() == [0, 1, 2, 0, 1, 0]
        assert sorted(round_robin(labels).tolist()) == list(range(6))

    @pytest.mark.parametrize("block", [1, 3, 100])
    def test_pieces_hold_whole_clusters_and_every_image_once(self, block):
        cluster = torch.tensor([5, 0, 5, 2, 2, 2, 0, 7])
        bank = ClusterPoints(9, False, torch.rand(9, 1, 2, 2), cluster)
        found = pieces(bank, block)
        assert sorted(torch.cat([piece.places for piece in found]).tolist()) == list(range(8))
        for piece in found:
            assert torch.equal(piece.points[piece.point_of], cluster[piece.places])
        used = [number for piece in found for number in piece.points.tolist()]
        assert len(used) == len(set(used)), "a cluster was linearized twice"
        assert all(len(piece.places) >= block for piece in found[:-1])

    def test_with_every_image_its_own_point_it_is_the_tightness_sweep(self, studied):
        bank = ClusterPoints(8, False, studied.images, torch.arange(8))
        at_points = PointsSweep("points", studied, [bank], 8).prepare("cpu")(0)
        at_images = TightnessSweep("tightness", studied, 8).prepare("cpu")(0)
        for name in ("image", "mean", "variance", "authors_old"):
            np.testing.assert_allclose(at_points[name], at_images[name], rtol=1e-6)

    def test_an_image_is_answered_by_its_clusters_point(self, studied):
        cluster = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
        sweep = PointsSweep("points", studied, [ClusterPoints(2, True, studied.images[[3, 6]], cluster)], 1)
        found = sweep.prepare("cpu")(1)
        assert found["image"][:: 4 * 5].tolist() == studied.numbers[4:].tolist()
        noise = Gaussian(studied.images[4:], LowRank(0.1 * torch.stack([studied.factor(k) for k in range(4, 8)])))
        expected = nm.two_stage(studied.network, studied.images[6]).mean(noise)
        assert_close(torch.from_numpy(cube(found, "mean", studied.numbers)[4:, 3]).float(), expected, rtol=1e-5)

    def test_clusters_are_kept_and_of_another_seed_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(table_4, "COUNTS", (3, 5))
        monkeypatch.setattr(table_4, "FARTHEST", (3,))
        images = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        labels = torch.arange(40) % 10
        cache = tmp_path / "clusters.safetensors"
        made = table_4.banks(images, labels, images[::4], 0, cache)
        assert [(bank.count, bank.farthest, len(bank.points)) for bank in made] == [
            (3, False, 3), (3, True, 3), (5, False, 5),
        ]  # fmt: skip
        assert torch.equal(made[0].cluster, made[1].cluster)
        again = table_4.banks(images, labels, images[::4], 0, cache)
        assert torch.equal(again[2].points, made[2].points)
        with pytest.raises(ValueError, match=r"clusters\.safetensors.*another run"):
            table_4.banks(images, labels, images[::4], 1, cache)


@pytest.fixture(scope="module")
def settings(tmp_path_factory, few) -> Settings:
    return settings_for(tmp_path_factory.mktemp("reproduced"), images=3, samples=40, data_dir=few)


def share_the_sampling(settings: Settings) -> None:
    """Tables 2 and 3 come together, and the second computes nothing again."""
    two = table_2.reproduce(settings)
    written = sorted(path.stat().st_mtime_ns for path in settings.out.rglob("*.parquet"))
    three = table_3.reproduce(settings)
    assert sorted(path.stat().st_mtime_ns for path in settings.out.rglob("*.parquet")) == written
    assert len(two.comparisons) == 16
    assert "nan" not in shown(two) + shown(three)
    assert two.numbers["levels"][3]["variance"]["average"] < 1.0
    for drawing in (*two.drawings, *three.drawings[:1]):
        assert drawing.draw().axes


@pytest.mark.slow
def test_tables_2_and_3_of_lenet_on_mnist(tmp_path, data_dir, mnist):
    share_the_sampling(settings_for(tmp_path, images=3, samples=40, data_dir=data_dir))


@pytest.mark.usefixtures("little_lenet")
class TestTables:
    """With very few images and samples of a small network: that everything comes together, not its accuracy."""

    def test_tables_2_and_3_share_the_sampling(self, settings):
        share_the_sampling(settings)

    def test_all_folders_of_another_run_are_named_before_anything_is_computed(self, settings):
        table_3.reproduce(settings)
        with pytest.raises(ValueError, match="seed: wanted 5, there 0") as caught:
            table_2.reproduce(replace(settings, seed=5))
        for folder in ("monte-carlo", "tightness"):
            assert str(settings.out / folder / "_configuration.json") in str(caught.value)

    def test_the_papers_own_order_is_as_it_says(self):
        """The questions asked of our Table 4, asked of the published one: the mean and the new variance fall with k."""
        answers = {(what.split(",")[0], question): [] for what, question, _ in table_4.published_orderings()}
        for what, question, answer in table_4.published_orderings():
            answers[what.split(",")[0], question].append(answer)
        assert answers["mean", "falls with every step in k"] == [True] * 4
        assert answers["new variance", "falls with every step in k"] == [True] * 4
        assert answers["new variance", "farthest members are worse than centres"] == [True] * 4

    def test_table_4(self, settings, monkeypatch):
        """Clusters of 30 images: 4 and 10 of them in place of the paper's 250 and 500."""
        printed = {
            (sigma, {250: 4, 500: 10}.get(count, count), farthest): row
            for (sigma, count, farthest), row in table_4.TABLE_4.items()
        }
        monkeypatch.setattr(table_4, "TABLE_4", printed)
        monkeypatch.setattr(table_4, "COUNTS", (4, 10))
        monkeypatch.setattr(table_4, "FARTHEST", (4,))
        outcome = table_4.reproduce(settings)
        assert len(outcome.panels[0].rows) == 4 * 4
        means = {(row["points"], row["farthest"]): row["mean"][0] for row in outcome.numbers["rows"][:4]}
        assert set(means) == {(4, False), (4, True), (10, False), (10_000, False)}
        assert means[10_000, False] < means[4, False]
        assert outcome.drawings[0].draw().axes
        assert (settings.out / "clusters.safetensors").exists()

    def test_seeds(self, settings, monkeypatch):
        def quickly(recipe, training, held_out, *, weights, seed, device, on_epoch):
            weight = small_lenet().state_dict()
            torch.manual_seed(seed + 10 * recipe.epochs)
            changed = {name: value + 0.1 * torch.randn_like(value) for name, value in weight.items()}
            write_tensors(weights, changed, training_facts(recipe, training, seed) | {"seconds": "1.5"})

        everything = nm.data.load("mnist", data_dir=settings.data_dir)
        monkeypatch.setattr(nm.data, "load", lambda *_, **__: everything)
        monkeypatch.setattr(trained, "train", quickly)
        monkeypatch.setattr(seeds, "SEEDS", (0, 1))
        few_samples = replace(settings, images=2, samples=10)
        outcome = seeds.reproduce(few_samples)
        assert len(outcome.numbers["trials"]) == 4
        assert "nan" not in shown(outcome)
        assert len(list((settings.out / "trained").iterdir())) == 4
        assert len({trial["mean"][0] for trial in outcome.numbers["trials"]}) == 4
        assert outcome.seconds > 4 * 1.5
        stranger = settings.out / "trained" / "the-papers-recipe-1.safetensors"
        (settings.out / "trained" / "the-shipped-recipe-0.safetensors").replace(stranger)
        with pytest.raises(
            ValueError, match=r"the-papers-recipe-1\.safetensors was trained otherwise \(recipe: wanted"
        ):
            seeds.reproduce(few_samples)
