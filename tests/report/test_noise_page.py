"""The page and the files of a report on noise: self-contained, whole, and shown by a browser."""

from __future__ import annotations

import csv
import dataclasses
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image
from torch import nn

from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.data.images import LabelledImages, Skipped
from netmoments.report.attack_study import AttackStudy, NotAttacked
from netmoments.report.noise_page import as_record, render_page, write_report
from netmoments.report.noise_study import study
from netmoments.report.noise_words import band_in_words, chosen_point, draw, flip_in_words, share_in_words
from tests.report.shown import PLAIN, SPELT_OUT, STRANGE, STUDIED, in_a_terminal, read_on_the_page, strict_json


def test_every_question_has_its_answer_in_words_of_the_reader(found, provenance):
    page = render_page(found, provenance, "my network", "digits")
    said = read_on_the_page(page)
    chosen = chosen_point(found)
    for part in (
        "What noise of σ = 0.1 does to my network", "100% of the answers are right without noise",
        f"{share_in_words(chosen)} are right at σ = 0.1, {band_in_words(chosen)}", "flip more than one time in ten",
        "How does accuracy fall as noise grows?", "not at 0, to show what changes",
        "How far is each image from flipping?", "Which images are most fragile?",
        "What do noisy copies look like, and what are the scores?", "Noise made to fool it", "How was this made?",
        "not certificates", "not clipped", "--rare all", provenance.device,
    ):  # fmt: skip
        assert part in said
    words = set(re.findall(r"[a-z]+", said.lower()))
    assert not words & {"gap", "followed", "rough", "roughly", "linearized", "surrogate", "nan", "inf"}
    assert "Left out" not in said


def test_images_are_shown_by_fragility(found, provenance):
    page = render_page(found, provenance, "m", "d")
    cards = re.findall(r"<figcaption><b>(.*?)</b><span class=.soft.>(.*?)</span>", page)
    assert len(cards) == 18
    assert cards == [flip_in_words(found, number) for number in found.order[:18].tolist()]
    assert page.count('class="card case"') == STUDIED.examples
    marks = page.count('class="below"') + page.count('class="interval"')
    assert marks == 2 * 40 + 2  # at both widths, and in the legend
    assert page.count('class="wide"') == page.count('class="narrow"') == 2 + STUDIED.examples


def test_answers_that_are_wrong_stand_out(found, provenance):
    labels = found.images.labels.clone()
    number = int(found.order[0])
    labels[number] = (labels[number] + 1) % 10
    wrong = dataclasses.replace(found, images=dataclasses.replace(found.images, labels=labels))
    page = render_page(wrong, provenance, "m", "d")
    assert page.count('class="dot wrong"') == 2 + 1
    assert "answer is wrong without noise, too" in page
    assert "answer is wrong" not in render_page(found, provenance, "m", "d")


def test_images_without_labels(network, found, provenance, tmp_path):
    bare = LabelledImages(found.images.images[:6], None, found.images.names[:6], ())
    result = study(network, bare, dataclasses.replace(PLAIN, attacks=0))
    page = render_page(result, provenance, "m", "d")
    assert "How many answers change as noise grows?" in page
    assert "label" not in read_on_the_page(page).lower()
    write_report(result, provenance, tmp_path, "m", "d")
    record = strict_json((tmp_path / "report.json").read_text())
    assert record["clean_accuracy"] is None
    assert record["curve_of"] == "unchanged"
    assert {image["label"] for image in record["images"]} == {None}


def test_files_hold_the_numbers(found, provenance, tmp_path):
    folder = tmp_path / "new" / "folder"
    written = write_report(found, provenance, folder, "digits", "digits")
    assert sorted(path.name for path in folder.iterdir()) == sorted(written)
    record = strict_json((folder / "report.json").read_text())
    assert record["provenance"]["seed"] == 0
    assert (record["sigma"], record["tolerance"], record["rare"], record["covariance"]) == (0.1, 0.02, 4, None)
    assert (record["stopped"], record["seconds"], record["skipped"]) == ("", found.seconds, [])
    assert record["curve"][0] == {"sigma": 0.0, "share": 1.0, "low": 1.0, "high": 1.0}
    assert len(record["curve"]) == 8
    assert len(record["images"]) == 40
    number = int(found.order[3])
    one = record["images"][number]
    assert one["flip_probability"] == float(found.flip[number])
    assert [one["flip_low"], one["flip_high"]] == found.interval[number].tolist()
    assert one["flip_route"] == found.route[number]
    assert one["flip_runs"] == int(found.runs[number])
    assert one["rival"] == int(found.rivals[number])
    assert one["classes"] == list(range(10))
    assert sum(one["class_probabilities"]) == pytest.approx(1, abs=1e-6)
    for name, values in (
        ("mean", found.scores.mean), ("mean_error", found.scores.mean_error),
        ("standard_deviation", found.scores.deviation), ("standard_deviation_error", found.scores.deviation_error),
    ):  # fmt: skip
        assert one[name] == values[number].tolist()
    rows = list(csv.DictReader((folder / "images.csv").read_text().splitlines()))
    assert list(rows[0]) == [
        "name", "label", "predicted", "flip_probability", "flip_low", "flip_high", "rival", "score",
        "score_standard_deviation",
    ]  # fmt: skip
    assert [float(row["flip_probability"]) for row in rows] == found.flip.tolist()
    assert float(rows[number]["score"]) == one["mean"][one["predicted"]]
    with pytest.raises(NotADirectoryError, match="is a file"):
        write_report(found, provenance, folder / "images.csv", "digits", "digits")


def test_numbers_that_are_none_are_null(found, provenance):
    nothing = torch.full_like(found.scores.mean_error, float("nan"))
    odd = dataclasses.replace(found, scores=dataclasses.replace(found.scores, mean_error=nothing))
    assert set(as_record(odd, provenance, "m", "d")["images"][0]["mean_error"]) == {None}


def test_work_that_ended_early_is_a_page_too(found, provenance, tmp_path):
    early = dataclasses.replace(
        found, curve=(found.curve[0], chosen_point(found)), examples=(), stopped="an interruption", attacks=None
    )
    write_report(early, provenance, tmp_path, "m", "d")
    said = read_on_the_page((tmp_path / "report.html").read_text())
    assert "An interruption ended the work early" in said
    assert "noisy copies" not in said


def test_when_every_flip_was_found(found, provenance):
    known = dataclasses.replace(
        found, flip=found.flip.clamp(min=2e-9),
        interval=torch.where(found.bounded[:, None], torch.tensor([1.8e-9, 2.3e-9]).double(), found.interval),
    )  # fmt: skip
    said = read_on_the_page(render_page(known, provenance, "m", "d"))
    assert "2.0e-9 how often the most robust image flips, between 1.8e-9 and 2.3e-9" in said
    assert "never seen to flip" not in said


def test_files_left_out_are_named(found, provenance):
    skipped = tuple(Skipped(f"{k}.png", "not an image") for k in range(60))
    page = render_page(
        dataclasses.replace(found, images=dataclasses.replace(found.images, skipped=skipped)), provenance, "m", "d"
    )
    said = read_on_the_page(page)
    assert "60 files could not be read." in said
    assert "49.png not an image" in said
    assert "50.png" not in said
    assert "and 10 more" in said


def test_the_page_is_self_contained_and_escapes_what_users_bring(found, provenance):
    evil = "<script>alert(1)</script>"
    images = dataclasses.replace(found.images, names=(evil,) * 40, skipped=(Skipped(evil, "r"),))
    classes = tuple(f"<b>{k}</b>" for k in range(10))
    attacked = dataclasses.replace(found.attacks.images, names=(evil,) * len(found.attacks.images))
    attacks = dataclasses.replace(found.attacks, images=attacked, classes=classes)
    page = render_page(
        dataclasses.replace(found, images=images, classes=classes, attacks=attacks), provenance, evil, "d"
    )
    assert "<script" not in page
    assert "<b>3</b>" not in page
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert "http" not in page.replace("http://www.w3.org", "").replace("http-equiv", "")
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'" in page
    assert page.index("Content-Security-Policy") < page.index("<style")


def test_two_reports_into_one_folder_leave_the_files_of_one(found, provenance, tmp_path):
    """At once, again and again."""
    few = dataclasses.replace(found, examples=(), attacks=None)
    other = dataclasses.replace(few, config=dataclasses.replace(found.config, tolerance=0.25), flip=found.flip.roll(1))
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            list(pool.map(lambda each: write_report(each, provenance, tmp_path, "m", "d"), (few, other)))
            record = strict_json((tmp_path / "report.json").read_text())
            assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.json", "images.csv"}
            with (tmp_path / "images.csv").open() as file:
                rows = list(csv.DictReader(file))
            wanted = [image["flip_probability"] for image in record["images"]]
            assert [float(row["flip_probability"]) for row in rows] == wanted
            assert (found.flip.tolist() == wanted) == (record["tolerance"] == found.config.tolerance)


def test_names_steer_nothing(found, provenance, tmp_path):
    images = dataclasses.replace(found.images, names=(STRANGE,) * 40, skipped=(Skipped(STRANGE, STRANGE),))
    classes = tuple(f"{STRANGE}{k}" for k in range(10))
    attacked = dataclasses.replace(found.attacks.images, names=(STRANGE,) * len(found.attacks.images))
    attacks = dataclasses.replace(found.attacks, images=attacked, classes=classes)
    strange = dataclasses.replace(found, images=images, classes=classes, attacks=attacks)
    written = write_report(strange, provenance, tmp_path, STRANGE, STRANGE)
    for path in written.values():
        text = path.read_text()
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text), path.name
    assert SPELT_OUT in read_on_the_page(written["report.html"].read_text())
    with written["images.csv"].open() as file:
        assert {row["name"] for row in csv.DictReader(file)} == {f"'{SPELT_OUT}"}
    assert strict_json(written["report.json"].read_text())["images"][0]["name"] == STRANGE
    said = in_a_terminal(draw(strange))
    assert said.isprintable()
    assert SPELT_OUT[:12] in said


@pytest.mark.parametrize("width", [420, 1280])
def test_a_browser_shows_the_page(found, provenance, tmp_path, width):
    """The curve is there, and nothing is wider than the screen: the right edge is all background."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium to look at the page with")
    write_report(found, provenance, tmp_path, "digits", "digits")
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-quic", "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}",
        "--hide-scrollbars", f"--window-size={width},8000", f"--screenshot={tmp_path / 'page.png'}",
        (tmp_path / "report.html").as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(tmp_path / "page.png") as picture:
        assert picture.size == (width, 8000)
        shown = picture.convert("RGB")
    assert (36, 88, 211) in {colour for _, colour in shown.getcolors(2**24)}  # the curve
    assert {colour for _, colour in shown.crop((width - 8, 0, width, 8000)).getcolors(2**24)} == {(246, 247, 249)}


def test_a_report_has_noise_made_to_fool(reported, provenance, tmp_path):
    attacks = reported.attacks
    assert isinstance(attacks, AttackStudy)
    assert attacks.attack == SparseSmooth()
    assert [attacks.name(number) for number in range(2)] == ["test/0", "test/120"]
    write_report(reported, provenance, tmp_path, "digits", "digits")
    record = strict_json((tmp_path / "report.json").read_text())["attacks"]
    assert [image["name"] for image in record["images"]] == ["test/0", "test/120"]
    page = (tmp_path / "report.html").read_text()
    assert "Noise made to fool it" in page
    assert page.count('class="five"') == 2
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert "Noise made to fool it" in in_a_terminal(draw(reported))


def test_a_report_without_attacks(network, digits, provenance, tmp_path):
    quiet = study(network, digits.first(3), dataclasses.replace(PLAIN, attacks=0))
    assert quiet.attacks is None
    write_report(quiet, provenance, tmp_path, "m", "d")
    assert strict_json((tmp_path / "report.json").read_text())["attacks"] is None
    assert "fool" not in render_page(quiet, provenance, "m", "d")
    assert "fool" not in in_a_terminal(draw(quiet))


@pytest.mark.parametrize(
    "error", [MemoryError("too large for here"), ValueError("no ReLU"), RuntimeError("CUDA\nlong")]
)
def test_a_report_survives_an_attack_that_fails(network, digits, provenance, tmp_path, monkeypatch, error):
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(SparseSmooth, "_solved", fails)
    failed = study(network, digits.first(3), PLAIN)
    assert failed.attacks == NotAttacked(f"No noise could be made: {str(error).splitlines()[0]}")
    write_report(failed, provenance, tmp_path, "m", "d")
    record = strict_json((tmp_path / "report.json").read_text())["attacks"]
    assert record == {"not_attacked": failed.attacks.reason}
    assert failed.attacks.reason in render_page(failed, provenance, "m", "d")
    assert failed.attacks.reason in in_a_terminal(draw(failed))


def test_a_report_on_coloured_images_without_labels(provenance):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 12), nn.ReLU(), nn.Linear(12, 30)).eval()
    generator = torch.Generator().manual_seed(0)
    images = LabelledImages(torch.rand(3, 3, 4, 4, generator=generator), None, tuple("abc"), ())
    coloured = study(network, images, PLAIN)
    assert isinstance(coloured.attacks, AttackStudy)
    assert coloured.attacks.labels_are_answers
    assert render_page(coloured, provenance, "m", "d").count('class="five"') == 3
