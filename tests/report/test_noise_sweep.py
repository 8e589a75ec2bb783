"""A noise study in parts: the same results wherever they are computed, and nothing lost when the work is stopped."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import netmoments as nm
from netmoments.data.images import correct
from netmoments.report import noise_study, noise_sweep
from netmoments.report.arguments import StudyConfig, Subject
from netmoments.report.noise_study import NEAREST, FlippedImage, Study, TimePlan, example_images, survey_of
from netmoments.report.noise_sweep import (
    NOT_IN_PARTS,
    PART,
    Digests,
    NearestSweep,
    RareSweep,
    SurveySweep,
    columns_of,
    engine_named,
    study_in_parts,
)
from netmoments.sweep.item import Finished, Sweep
from netmoments.sweep.local import LocalEngine
from netmoments.sweep.on_ray import RayEngine

SUBJECT = Subject("digits", "digits", images=PART + 10)
CONFIG = StudyConfig(0.1, tolerance=0.1, samples=400, rare=3, attacks=0, examples=2)
FLIPS = dataclasses.replace(CONFIG, examples=0)
DIGESTS = Digests("of the network", "of the images")


class StoppedEngine(LocalEngine):
    """It is interrupted after so many items."""

    def __init__(self, items: int) -> None:
        super().__init__(["cpu"])
        self.left = items

    def results(self, sweep: Sweep, items: Sequence[int]) -> Generator[Finished, None, None]:
        for finished in super().results(sweep, items):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield finished


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of the whole study; only what is copied from it may be changed."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(folder) -> Study:
    return study_in_parts(SUBJECT, CONFIG, (), folder, LocalEngine(["cpu"]))


@pytest.fixture(scope="module")
def flips(whole) -> Study:
    """The same without examples, and so without nearest flips, which take most of the time."""
    return dataclasses.replace(whole, config=FLIPS, examples=(), nearest=())


def assert_same(one: Study, other: Study) -> None:
    """Counts are the same; what was computed is, to rounding, as batches may be of other sizes."""
    for name in ("predicted", "shares", "samples"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.curve == other.curve
    assert one.route == other.route
    torch.testing.assert_close(one.lead, other.lead, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one.scores.mean, other.scores.mean, rtol=1e-4, atol=1e-4)
    counted = one.runs == one.samples
    torch.testing.assert_close(one.flip[counted], other.flip[counted])
    torch.testing.assert_close(one.flip, other.flip, rtol=0.3, atol=0)  # three of its standard errors
    assert [each.image for each in one.nearest] == [each.image for each in other.nearest]
    assert [each.becomes for each in one.nearest] == [each.becomes for each in other.nearest]
    distances = [torch.tensor([each.distance for each in found.nearest]) for found in (one, other)]
    torch.testing.assert_close(*distances, rtol=1e-2, atol=0)


def test_nearest_flips_in_parts_are_those_of_the_whole(whole):
    network, _ = SUBJECT.load()
    with torch.no_grad():
        answers = [
            int(network((whole.images.images[each.image] + each.change).unsqueeze(0)).argmax())
            for each in whole.nearest
        ]
    assert answers == [each.becomes for each in whole.nearest]


def test_parts_from_before_nearest_flips_are_still_used(whole, folder, tmp_path):
    """They have a folder of their own, which is made when it is missing."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    kept = {path: path.stat().st_mtime_ns for name in ("survey", "rare") for path in (tmp_path / name).glob("part*")}
    assert kept
    shutil.rmtree(tmp_path / "nearest")
    assert_same(study_in_parts(SUBJECT, CONFIG, (), tmp_path, LocalEngine(["cpu"])), whole)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_an_image_without_a_flip_has_rows_that_are_left_out(monkeypatch):
    sweep, change = NearestSweep(SUBJECT, CONFIG, DIGESTS, (3, 5), (1, 2)), torch.tensor([[[0.5, -0.25]]])
    monkeypatch.setattr(noise_sweep, "nearest_of", lambda *_: (FlippedImage(3, change, 2.5, 7),))
    noise = nm.Gaussian(torch.zeros(6, 1, 1, 2), std=0.1)
    columns = sweep.columns(None, noise, (3, 5), (1, 2))
    assert {len(values) for values in columns.values()} == {4}
    (one,) = sweep.nearest(columns, noise.event_shape)
    assert (one.image, one.distance, one.becomes, one.change.tolist()) == (3, 2.5, 7, [[[0.5, -0.25]]])


def test_all_images_are_studied(whole):
    assert len(whole.flip) == len(whole.images) == PART + 10
    assert [point.sigma for point in whole.curve] == [0.0, *CONFIG.levels]
    assert all(point.low <= point.share <= point.high for point in whole.curve)
    assert bool((whole.interval[:, 0] <= whole.flip).all())
    assert bool((whole.flip <= whole.interval[:, 1]).all())
    assert len(whole.examples) == 2
    assert len(whole.nearest) == len({*whole.order[:NEAREST].tolist(), *example_images(whole)})
    assert whole.scores.mean.shape == whole.shares.shape == (PART + 10, 10)


@pytest.mark.parametrize("items", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_was_done_before_an_interruption_is_kept(flips, tmp_path, items):
    with pytest.raises(KeyboardInterrupt):
        study_in_parts(SUBJECT, FLIPS, (), tmp_path, StoppedEngine(items))
    kept = list((tmp_path / "survey").glob("*.parquet"))
    assert kept
    assert_same(study_in_parts(SUBJECT, FLIPS, (), tmp_path, LocalEngine(["cpu"])), flips)


@pytest.mark.slow
def test_processes_give_the_same(flips, tmp_path):
    assert_same(study_in_parts(SUBJECT, FLIPS, (), tmp_path, LocalEngine(["cpu", "cpu"])), flips)


def test_every_sweep_can_be_sent_to_a_process():
    for sweep in (
        SurveySweep(SUBJECT, CONFIG, DIGESTS, 9),
        *(kind(SUBJECT, CONFIG, DIGESTS, (3,), (1,)) for kind in (RareSweep, NearestSweep)),
    ):
        assert pickle.loads(pickle.dumps(sweep)) == sweep


@pytest.mark.slow
def test_a_ray_of_its_own_gives_the_same(whole, tmp_path):
    pytest.importorskip("ray")
    assert_same(study_in_parts(SUBJECT, CONFIG, (), tmp_path, engine_named("ray", torch.device("cpu"), None)), whole)


@pytest.mark.usefixtures("whole")
def test_another_configuration_needs_another_folder(folder):
    other = dataclasses.replace(CONFIG, sigma=0.2)
    with pytest.raises(ValueError, match="sigma"):
        study_in_parts(SUBJECT, other, (), folder, LocalEngine(["cpu"]))


@pytest.mark.parametrize("raises_in", ["_levels", "surveyed"])
def test_an_interruption_inside_a_part_is_none_of_its_results(tmp_path, monkeypatch, raises_in):
    """An incomplete part would be kept, and the work would go on."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(noise_study, raises_in, interrupted)
    with pytest.raises(KeyboardInterrupt):
        study_in_parts(dataclasses.replace(SUBJECT, images=3), FLIPS, (), tmp_path, LocalEngine(["cpu"]))
    assert not list(tmp_path.glob("*/*.parquet"))


def test_parts_with_other_columns_need_another_folder(tmp_path):
    """Of an earlier version, say, which did not write their names either."""
    brief = dataclasses.replace(FLIPS, rare=0)
    subject = dataclasses.replace(SUBJECT, images=3)
    study_in_parts(subject, brief, (), tmp_path, LocalEngine(["cpu"]))
    path = tmp_path / "survey" / "_configuration.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in written.items() if key != "columns"}))
    with pytest.raises(ValueError, match=r"  columns: wanted .*, there nothing"):
        study_in_parts(subject, brief, (), tmp_path, LocalEngine(["cpu"]))


def test_every_setting_is_in_the_configuration_of_parts_or_named_as_not():
    """A new option that parts depend on must not be resumed over."""
    settings = {field.name for field in dataclasses.fields(CONFIG)} - NOT_IN_PARTS - {"samples"} | {"samples_at_most"}
    configuration = SurveySweep(SUBJECT, CONFIG, DIGESTS, 130).configuration
    assert settings <= configuration.keys()
    assert not NOT_IN_PARTS & configuration.keys()
    assert {field.name for field in dataclasses.fields(CONFIG)} >= NOT_IN_PARTS
    json.dumps(configuration)


def test_other_weights_under_the_same_name_need_another_folder(tmp_path):
    """Parts of the one network beside answers of the other would be a report of neither."""
    weights = tmp_path / "weights.safetensors"
    network = nm.zoo.pretrained("digits")
    save_file(network.state_dict(), weights)
    subject, brief = dataclasses.replace(SUBJECT, weights=weights, images=3), dataclasses.replace(FLIPS, rare=0)
    study_in_parts(subject, brief, (), tmp_path / "out", LocalEngine(["cpu"]))
    before = Digests.of(subject, *subject.load())
    with torch.no_grad():
        next(network.parameters()).neg_()
    save_file(network.state_dict(), weights)
    with pytest.raises(ValueError, match="network_digest"):
        study_in_parts(subject, brief, (), tmp_path / "out", LocalEngine(["cpu"]))
    with pytest.raises(ValueError, match="this report began with other contents of the network"):
        SurveySweep(subject, brief, before, 3).prepare("cpu")


def test_parts_are_as_many_as_are_needed():
    assert SurveySweep(SUBJECT, CONFIG, DIGESTS, 130).counts == [64, 64, 2]
    assert RareSweep(SUBJECT, CONFIG, DIGESTS, tuple(range(20)), (0,) * 20).counts == [8, 8, 4]


def test_the_curve_of_parts_is_that_of_all_images_together():
    """Near 100 %, too, where the bands of parts are cut."""
    network, images = SUBJECT.load()
    images, plan = images.take(correct(network, images)).first(20), TimePlan.without_limit(20)
    parts = [columns_of(survey_of(network, images.take(place), CONFIG, plan)) for place in (slice(10), slice(10, 20))]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    joined = SurveySweep(SUBJECT, CONFIG, DIGESTS, 20).study(columns | {"item": np.repeat([0, 1], 10)}, images, (), 10)
    assert joined.curve[1].high == 1
    assert joined.curve == survey_of(network, images, CONFIG, plan).curve


def test_an_image_is_sampled_alike_in_any_part():
    network, images = SUBJECT.load()
    plan = TimePlan.without_limit(6)
    few, more = (survey_of(network, images.first(count), CONFIG, plan) for count in (2, 6))
    assert torch.equal(few.samples, more.samples[:2])
    assert torch.equal(few.flip, more.flip[:2])
    assert all(torch.equal(one.right, other.right[:2]) for one, other in zip(few.levels, more.levels, strict=True))
    torch.testing.assert_close(few.scores.mean, more.scores.mean[:2], rtol=1e-4, atol=1e-4)


BAD = {
    "seconds": (dataclasses.replace(CONFIG, seconds=5.0), "leave out --seconds"),
    "method": (dataclasses.replace(CONFIG, method="sketch"), "leave out --method"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_has_no_meaning_in_parts_is_refused(name, tmp_path: Path):
    config, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        study_in_parts(SUBJECT, config, (), tmp_path, LocalEngine(["cpu"]))


def test_an_address_is_for_ray():
    with pytest.raises(ValueError, match="--engine ray"):
        engine_named("local", torch.device("cpu"), "10.0.0.1:6379")


ROOT = Path(__file__).parent.parent.parent
WAIT = 240.0


def first_item(folder: Path, seconds: float = WAIT) -> bool:
    """Whether a result lies in the folder, within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if list(folder.glob("*/*.parquet")):
            return True
        time.sleep(0.02)
    return False


def workers(of: int) -> list[int]:
    """Processes below this one that compute: Ray's, or those of `multiprocessing`."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (OSError, ValueError):
                continue
    below, found = {of}, []
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    for pid in sorted(below - {of}):
        name = names.get(pid, "")
        of_ray = name.startswith("ray::") and "IDLE" not in name and "Agent" not in name
        if of_ray or "spawn_main" in name:
            found.append(pid)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engine", [LocalEngine(["cpu", "cpu"]), RayEngine("cpu")], ids=["local", "ray"])
def test_a_killed_worker_changes_nothing(whole, tmp_path, engine):
    pytest.importorskip("ray")
    killed: list[int] = []

    def kill_one() -> None:
        end = time.monotonic() + WAIT
        first_item(tmp_path)
        while not killed and time.monotonic() < end:
            for pid in workers(os.getpid())[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            time.sleep(0.02)

    helper = threading.Thread(target=kill_one)
    helper.start()
    try:
        found = study_in_parts(SUBJECT, CONFIG, (), tmp_path, engine)
    finally:
        helper.join()
    assert killed
    assert_same(found, whole)


def report(out: Path, engine: str) -> list[str]:
    return [
        *(sys.executable, "-m", "netmoments", "report", "digits", "digits", "--images", str(PART + 10)),
        *("--sigma", "0.1", "--tolerance", "0.1", "--samples", "400", "--rare", "3"),
        *("--engine", engine, "--out", str(out)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_killed_report_goes_on_where_it_was(tmp_path, engine):
    """Killed with SIGKILL once, as soon as something is done; what was done is not computed again."""
    pytest.importorskip("ray")
    out = tmp_path / "report"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        report(out, engine), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    ) as child:
        assert first_item(out)
        os.killpg(child.pid, signal.SIGKILL)
    assert not (out / "index.html").exists()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("survey/item-*.parquet")}
    again = subprocess.run(report(out, engine), cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert all(not path.exists() or path.stat().st_mtime_ns == when for path, when in kept.items())
    with next(out.glob("*.csv")).open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == PART + 10
