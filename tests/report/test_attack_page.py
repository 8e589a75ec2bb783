"""The page and the files of an attack: self-contained, whole, and the noise that was found."""

from __future__ import annotations

import dataclasses
import os
import re

import numpy as np
import pytest
import torch

from netmoments.data.images import Skipped
from netmoments.report.attack_page import render_attack_page, write_attack
from netmoments.report.attack_words import draw_attack
from tests.report.shown import SPELT_OUT, STRANGE, in_a_terminal, read_on_the_page, strict_json


def test_the_noise_that_is_written_is_the_one_that_was_found(attacked, provenance, tmp_path):
    write_attack(attacked, provenance, tmp_path, "digits", "digits")
    with np.load(tmp_path / "noise.npz") as noise:
        assert torch.equal(torch.from_numpy(noise["mu"]), attacked.result.mu)
        assert noise["names"].tolist() == [attacked.name(number) for number in range(len(attacked))]
        assert noise["places"].tolist() == attacked.result.places.tolist()


def test_the_page_is_self_contained_and_escapes_what_users_bring(attacked, provenance):
    evil = "<script>alert(1)</script>"
    images = dataclasses.replace(
        attacked.images, names=(evil,) * len(attacked.images), skipped=(Skipped(evil, "r"),), classes=()
    )
    classes = tuple(f"<b>{k}</b>" for k in range(10))
    bad = dataclasses.replace(attacked, images=images, classes=classes, of_the_target=(evil,))
    page = render_attack_page(bad, provenance, evil, evil)
    assert "<script" not in page
    assert "<b>3</b>" not in page
    assert "&lt;b&gt;" in page
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert "http" not in page.replace("http-equiv", "")
    assert page.index("Content-Security-Policy") < page.index("<style")
    assert page.count("data:image/png") == 5 * len(attacked)
    text = in_a_terminal(draw_attack(dataclasses.replace(bad, classes=tuple(f"[red]{k}" for k in range(10)))))
    assert "[red]" in text


def test_the_page_speaks_in_words_of_the_reader(attacked, provenance):
    said = read_on_the_page(render_attack_page(attacked, provenance, "m", "d"))
    assert "better by at most" in said
    assert "steps on the network itself" in said
    assert not set(re.findall(r"[a-z]+", said.lower())) & {"gap", "followed", "polish", "nan", "inf"}
    printed = in_a_terminal(draw_attack(attacked))
    assert not set(re.findall(r"[a-z]+", printed.lower())) & {"gap", "followed", "polish"}


def test_names_steer_nothing(attacked, provenance, tmp_path):
    images = dataclasses.replace(
        attacked.images, names=(STRANGE,) * len(attacked.images), skipped=(Skipped(STRANGE, STRANGE),), classes=()
    )
    classes = tuple(f"{STRANGE}{k}" for k in range(10))
    strange = dataclasses.replace(attacked, images=images, classes=classes, of_the_target=(STRANGE,))
    written = write_attack(strange, provenance, tmp_path, STRANGE, STRANGE)
    for name in ("attack.html", "attack.json", "images.csv"):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", written[name].read_text()), name
    assert f"'{SPELT_OUT}," in written["images.csv"].read_text()
    said = in_a_terminal(draw_attack(strange))
    assert said.isprintable()
    assert r"\x1b[31mred" in said


def test_what_is_not_a_number_is_null(attacked, provenance, tmp_path):
    nothing = dataclasses.replace(attacked.result, gap=torch.full_like(attacked.result.gap, torch.inf))
    strange = dataclasses.replace(attacked, result=nothing)
    write_attack(strange, provenance, tmp_path, "m", "d")
    record = strict_json((tmp_path / "attack.json").read_text())
    assert [image["gap"] for image in record["images"]] == [None] * len(attacked)
    assert "> 100%" in in_a_terminal(draw_attack(strange))


def test_files_are_whole_or_not_there(attacked, provenance, tmp_path, monkeypatch):
    (tmp_path / "images.csv").write_text("older")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"attack\.html could not be written: No space left"):
        write_attack(attacked, provenance, tmp_path, "m", "d")
    assert [path.name for path in tmp_path.iterdir()] == ["images.csv"]
    assert (tmp_path / "images.csv").read_text() == "older"
