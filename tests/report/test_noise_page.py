"""The page and the files of a report on noise: self-contained, whole, and shown by a browser."""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.data.images import LabelledImages, Skipped
from netmoments.report import noise_page
from netmoments.report.attack_study import AttackStudy, NotAttacked
from netmoments.report.noise_page import as_record, render_page, write_report
from netmoments.report.noise_study import COPIES, Study, study
from netmoments.report.noise_words import (
    band_in_words,
    chosen_point,
    draw,
    flip_in_words,
    nearest_in_words,
    share_in_words,
)
from netmoments.report.page import TEMPLATES
from netmoments.report.pictures import drawn_noise
from tests.report.shown import PLAIN, SPELT_OUT, STRANGE, STUDIED, in_a_terminal, read_on_the_page, strict_json


def played(page: str) -> dict:
    """What the page's script draws from."""
    return strict_json(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


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
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>.*?</tr>', page)
    assert rows == [found.images.names[number] for number in found.order.tolist()]


def test_answers_that_are_wrong_stand_out(found, provenance):
    labels = found.images.labels.clone()
    number = int(found.order[0])
    labels[number] = (labels[number] + 1) % 10
    wrong = dataclasses.replace(found, images=dataclasses.replace(found.images, labels=labels))
    page = render_page(wrong, provenance, "m", "d")
    assert page.count('class="dot wrong"') == 2 + 1
    assert "answer is wrong even without noise" in page
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
        found, levels=(found.levels[0], found.levels[4]), examples=(), copies=None, stopped="an interruption",
        attacks=None,
    )  # fmt: skip
    write_report(early, provenance, tmp_path, "m", "d")
    said = read_on_the_page((tmp_path / "report.html").read_text())
    assert "An interruption ended the work early" in said
    assert "What do noisy copies look like" not in said
    assert len(played((tmp_path / "report.html").read_text())["levels"]) == 2


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
    assert page.count("<script") == page.count("</script") == 2  # data, and what draws them
    assert played(page)["images"][0]["name"] == evil
    assert played(page)["classes"]["3"] == "<b>3</b>"
    assert "<b>3</b>" not in page
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert "http" not in page.replace("http://www.w3.org", "").replace("http-equiv", "")
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'" in page
    code = page.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert code == (TEMPLATES / "noise.js").read_text(encoding="utf-8")
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


def test_the_script_has_the_words_of_every_level(found, provenance):
    data = played(render_page(found, provenance, "m", "d"))
    assert [level["said"] for level in data["levels"]][:3] == ["σ = 0", "σ = 0.025", "σ = 0.05"]
    assert data["levels"][data["chosen"]]["said"] == "σ = 0.1"
    assert [group["name"] for group in data["groups"]] == ["all images", *map(str, range(10))]
    assert sum(group["count"] for group in data["groups"][1:]) == data["groups"][0]["count"] == 40
    for place, point in enumerate(data["groups"][0]["points"]):
        assert (point["said"], point["band"]) == (
            share_in_words(found.curve[place]),
            band_in_words(found.curve[place]),
        )
        assert data["ranking"][place] == found.at(place).order.tolist()
    number = int(found.order[0])
    one = data["images"][number]
    for place, level in enumerate(one["levels"][1:], 1):
        assert (level["said"], level["known"]) == flip_in_words(found.at(place), number)
    assert one["levels"][0]["said"] == "never"
    assert one["copies"] == found.copies[:, number].tolist()
    three = data["groups"][4]["points"][6]
    mine = found.images.labels == 3
    assert three["share"] == pytest.approx(found.levels[6].point(mine).share, rel=1e-3)
    assert three["never"] == int((found.levels[6].flips[mine] == 0).sum())


def test_attacks_are_over_their_images(found, provenance):
    attacks = found.attacks
    images = played(render_page(found, provenance, "m", "d"))["images"]
    with_noise = [image for image in images if "attack" in image]
    assert [image["name"] for image in with_noise] == [attacks.name(number) for number in range(len(attacks))]
    for row, image in enumerate(with_noise):
        assert torch.equal(found.images.images[image["number"]], attacks.row(row).image)
        assert image["attack"]["over"].startswith("data:image/png")
        assert dict(image["attack"]["facts"])["samples fooled"]


def test_nearest_flips_are_on_the_page_and_in_the_record(found, provenance):
    page = render_page(found, provenance, "m", "d")
    images = {image["number"]: image for image in played(page)["images"]}
    record = as_record(found, provenance, "m", "d")["images"]
    assert found.nearest
    for each in found.nearest:
        shown = images[each.image]["nearest"]
        assert shown["to"] == each.becomes
        assert shown["distance"] == pytest.approx(each.distance, rel=1e-3)
        assert shown["picture"].startswith("data:image/png")
        assert shown["over"].startswith("data:image/png")
        kept = record[each.image]["nearest_flip"]
        assert (kept["standard_deviations"], kept["class"]) == (each.distance, each.becomes)
    without = set(images) - {each.image for each in found.nearest}
    assert without
    assert not any("nearest" in images[number] or record[number]["nearest_flip"] for number in without)
    said = read_on_the_page(page)
    for each in found.nearest[: STUDIED.examples]:
        assert nearest_in_words(found, each) in said


def test_a_study_without_nearest_flips_has_a_page(found, provenance):
    page = render_page(dataclasses.replace(found, nearest=()), provenance, "m", "d")
    assert not any("nearest" in image for image in played(page)["images"])
    assert "smallest change found that" not in read_on_the_page(page)


def test_of_thousands_of_images_the_most_fragile_are_played_with(found, provenance, monkeypatch):
    monkeypatch.setattr(noise_page, "PLAYED", 30)
    page = render_page(found, provenance, "m", "d")
    data = played(page)
    assert [image["number"] for image in data["images"]] == sorted(found.order[:30].tolist())
    assert sorted(data["ranking"][0]) == list(range(30))
    assert [data["images"][place]["number"] for place in data["ranking"][4]] == found.order[:30].tolist()
    assert data["groups"][0]["count"] == 40
    assert "The 30 most fragile of 40 images are here." in read_on_the_page(page)


def repeated(found: Study, count: int) -> Study:
    """A study of so many images, which are the same again and again, each without attacks."""
    rows = torch.arange(count) % len(found.images)

    def taken(item: Any) -> dict[str, Any]:
        values = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
        return {name: value[rows] for name, value in values.items() if isinstance(value, torch.Tensor)}

    bare = dataclasses.replace(found, copies=None, attacks=None)
    return dataclasses.replace(
        bare, **taken(bare), copies=found.copies[:, rows], images=found.images.take(rows),
        scores=dataclasses.replace(found.scores, **taken(found.scores)),
        levels=tuple(dataclasses.replace(level, **taken(level)) for level in found.levels),
        route=tuple(found.route[row] for row in rows.tolist()),
    )  # fmt: skip


def test_five_hundred_images_are_a_page_of_a_few_megabytes(found, provenance):
    page = render_page(repeated(found, 500), provenance, "m", "d")
    assert len(played(page)["images"]) == 500
    assert len(page.encode()) < 2.5e6  # and twice that with photographs, of 4 kB each


def test_copies_that_a_page_cannot_draw_are_in_it(network, digits, provenance):
    config = dataclasses.replace(PLAIN, attacks=0, covariance=torch.full((1, 8, 8), 0.01))
    given = study(network, digits.first(4), config)
    data = played(render_page(given, provenance, "m", "d"))
    assert not data["drawn"]
    stored = {image["number"]: image["stored"] for image in data["images"] if image["stored"]}
    assert set(stored) == {example.image for example in given.examples}
    first = given.examples[0]
    assert [answer for _, answer in stored[first.image]] == first.noisy_classes.tolist()
    assert data["levels"][1]["said"] == "0.25 × the noise"


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium to look at the page with")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture
def opened(browser, found, provenance, tmp_path) -> Iterator[Any]:
    """A page as a function of how it is looked at: no error, and nothing but the file itself is asked for."""
    wrong, asked, contexts = [], [], []

    def open_page(shown: Study = found, **options: Any) -> Any:
        path = write_report(shown, provenance, tmp_path, "digits", "digits")["report.html"]
        contexts.append(browser.new_context(viewport={"width": options.pop("width", 1000), "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request", lambda request: wrong.append(request.url) if request.url[:5] not in ("data:", "file:") else 0
        )
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []
    assert [url for url in asked if not url.startswith(("data:", "file:"))] == []


def names_in(page: Any) -> list[str]:
    return page.locator("#ranking .caption > :last-child").all_inner_texts()


def test_the_slider_moves_curve_facts_and_ranking(opened, found):
    page = opened()
    assert page.inner_text("#level-said") == "σ = 0.1"
    before = page.locator("#curve .chosen").get_attribute("x1")
    page.focus("#level")
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#level-said") == "σ = 0.2"
    assert page.locator("#level").get_attribute("aria-valuetext") == "σ = 0.2"
    assert float(page.locator("#curve .chosen").get_attribute("x1")) > float(before)
    assert page.inner_text("#fact-share b") == share_in_words(found.curve[6])
    assert page.inner_text("#said").startswith("σ = 0.2, all images: ")
    there = found.at(6)
    assert names_in(page) == [found.images.names[number] for number in there.order[:18].tolist()]
    assert page.locator("#strip circle").count() == int((there.flip > 0).sum())
    page.keyboard.press("Home")
    assert "Without noise no answer changes" in page.inner_text("#strip")
    box = page.locator("#curve svg").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 20, box["y"] + 40)
    assert page.inner_text("#level-said") == "σ = 0.3"


def test_classes_and_orders(opened, found):
    page = opened()
    page.select_option("#sort", "robust")
    assert names_in(page)[0] == found.images.names[int(found.order[-1])]
    page.select_option("#sort", "name")
    assert names_in(page)[:3] == ["test/0", "test/1", "test/2"]
    page.select_option("#sort", "fragile")
    page.select_option("#class", label="3 (4)")
    threes = [number for number in found.order.tolist() if int(found.images.labels[number]) == 3]
    assert names_in(page) == [found.images.names[number] for number in threes]
    assert page.locator("#curve .line.behind").count() == 1
    assert "of 3" in page.inner_text("#fact-fragile span")
    page.select_option("#class", "0")
    page.click("#more")
    assert page.locator("#ranking button").count() == 36
    assert page.evaluate("document.activeElement === document.querySelectorAll('#ranking button')[18]")


def test_an_image_opens_by_mouse_and_keyboard(opened, found):
    page = opened(reduced_motion="reduce")
    page.locator("#ranking button").nth(1).focus()
    page.keyboard.press("Enter")
    number = int(found.order[1])
    assert page.inner_text("#panel-name") == found.images.names[number]
    assert page.inner_text("#panel-flip") == flip_in_words(found, number)[0]
    assert page.locator("#panel-scores circle").count() == 10
    page.wait_for_selector("#panel-copies canvas")
    page.locator("#panel-level").fill("7")
    page.wait_for_function("document.querySelector('#panel-copies-said').textContent.includes('0.3')")
    answers = page.locator("#panel-copies span").all_inner_texts()
    assert answers == [str(int(answer)) for answer in found.copies[7, number]]
    page.keyboard.press("Escape")
    assert not page.locator("#panel").is_visible()
    assert page.inner_text("#level-said") == "σ = 0.3"
    page.locator("#ranking button").first.click()
    page.focus("#panel-close")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#panel-name") == found.images.names[int(found.at(7).order[1])]
    page.keyboard.press("Enter")
    assert not page.locator("#panel").is_visible()


def test_the_copies_that_are_drawn_are_those_the_network_was_asked_about(opened, found):
    page = opened()
    page.locator("#ranking button").first.click()
    page.wait_for_selector("#panel-copies canvas")
    number = int(found.order[0])
    drawn = page.evaluate(
        """[...document.querySelectorAll("#panel-copies canvas")].map((canvas) =>
            [...canvas.getContext("2d").getImageData(0, 0, 8, 8).data].filter((_, place) => place % 4 === 0))"""
    )
    eight_bit = (255 * found.images.images[number]).round() / 255
    noisy = eight_bit + found.config.sigma * drawn_noise(number, COPIES, (1, 8, 8))
    wanted = (255 * noisy.clamp(0, 1)).round()
    assert bool(((torch.tensor(drawn).reshape_as(wanted) - wanted).abs() <= 1).all())


def test_the_nearest_flip_of_an_image_goes_with_the_slider(opened, found):
    page = opened()
    nearest = {each.image: each for each in found.nearest}
    page.locator("#ranking button").first.click()
    each = nearest[int(found.order[0])]
    assert page.inner_text("#panel-nearest-said").startswith(
        f"The smallest change found that makes it {each.becomes} is {each.distance:.2g} standard deviations"
    )
    assert page.locator("#panel-flipped-picture").is_visible()
    assert page.inner_text("#panel-flipped-to") == str(each.becomes)
    page.locator("#panel-level").fill("6")
    assert f"is {each.distance / 2:.2g} standard deviations of the noise away at σ = 0.2," in page.inner_text(
        "#panel-nearest-said"
    )
    page.keyboard.press("Escape")
    page.select_option("#sort", "robust")
    page.locator("#ranking button").first.click()
    assert int(found.at(6).order[-1]) not in nearest
    assert not page.locator("#panel-flipped").is_visible()
    assert page.inner_text("#panel-nearest-said")


def test_noise_that_was_made_is_over_its_image(opened, found):
    page = opened()
    page.select_option("#sort", "name")
    name = found.attacks.name(0)
    page.locator("#ranking button", has=page.get_by_text(name, exact=True)).click()
    assert page.inner_text("#panel-name") == name
    assert page.locator("#panel-attack").is_visible()
    assert page.locator("#panel-attack-picture").get_attribute("src").startswith("data:image/png")
    assert "samples fooled" in page.inner_text("#panel-attack-facts")
    page.click("#panel-after")
    assert not page.locator("#panel-attack").is_visible()


def test_names_are_text_to_the_script_too(opened, found):
    evil = "<img src=x onerror=alert(1)>"
    images = dataclasses.replace(found.images, names=(evil,) * 40)
    page = opened(dataclasses.replace(found, images=images, classes=(evil, *"123456789")))
    assert set(names_in(page)) == {evil}
    assert page.locator("#class option").nth(1).inner_text().startswith(evil)
    page.locator("#ranking button").first.click()
    assert page.inner_text("#panel-name") == evil
    assert page.locator("[onerror]").count() == 0


@pytest.mark.parametrize("width", [420, 1600])
@pytest.mark.parametrize("color_scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen(opened, width, color_scheme):
    page = opened(width=width, color_scheme=color_scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.locator("#ranking button").first.click()
    assert page.evaluate(
        "(() => { const p = document.getElementById('panel'); return p.scrollWidth <= p.clientWidth; })()"
    )
    ground = "rgb(246, 247, 249)" if color_scheme == "light" else "rgb(18, 21, 28)"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground


def test_the_page_without_scripts_has_the_same_facts(opened, found):
    page = opened(java_script_enabled=False)
    assert not page.locator("#controls").is_visible()
    assert not page.locator("#panel").is_visible()
    assert page.locator("#curve svg .line").first.is_visible()
    assert page.locator("#ranking figure").count() == 18
    page.locator("summary").click()
    assert page.locator("details tbody tr").count() == 40


@pytest.mark.parametrize("width", [420, 1280])
def test_a_browser_shows_the_page(found, provenance, tmp_path, width):
    """The curve is there, and nothing is wider than the screen: the right edge is all background."""
    if CHROMIUM is None:
        pytest.skip("no Chromium to look at the page with")
    write_report(found, provenance, tmp_path, "digits", "digits")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
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
