"""`load`: names, paths, splits and sizes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from netmoments.data.loading import load
from tests.data.files import FACE, HEADER, save_picture, write_idx_pair


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "8"])
def test_a_bad_size(size):
    with pytest.raises(ValueError, match="size must be a number of pixels"):
        load("digits", size=size)


def test_size_applies_to_named_datasets_too():
    assert tuple(load("digits", size=16).event_shape) == (1, 16, 16)


@pytest.mark.parametrize(("missing", "source"), [("PIL", "folder"), ("sklearn.datasets", "digits")])
def test_missing_extras_say_how_to_install_them(tmp_path, monkeypatch, missing, source):
    save_picture(tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r'pip install "netmoments\[data\]"'):
        load(tmp_path if source == "folder" else source)


@pytest.mark.parametrize("source", ["mnits", "no/such/folder", Path("nowhere.npz")])
def test_an_unknown_source_lists_the_known_ones(source):
    with pytest.raises(FileNotFoundError, match=r"neither a dataset \(mnist, fer2013, digits\) nor a file"):
        load(source)


@pytest.mark.parametrize("name", ["notes.txt", "weights.pt"])
def test_a_file_of_another_kind(tmp_path, name):
    (tmp_path / name).write_text("something else")
    with pytest.raises(ValueError, match=r"need an IDX file, fer2013\.csv, an \.npz"):
        load(tmp_path / name)


def test_unknown_splits_list_the_known_ones(tmp_path):
    write_idx_pair(tmp_path / "mnist", "t10k", 2, [0, 1])
    (tmp_path / "fer2013.csv").write_text(f"{HEADER}\n0,{FACE},PrivateTest\n")
    cases = {"mnist": "train, test", "fer2013": "train, public-test, private-test", "digits": "train, test"}
    for name, known in cases.items():
        with pytest.raises(ValueError, match=f"has the splits {known}; got 'validation'"):
            load(name, split="validation", data_dir=tmp_path)
    for source in (tmp_path / "mnist" / "t10k-images-idx3-ubyte", save_picture(tmp_path / "a.png")):
        with pytest.raises(ValueError, match="not divided into splits"):
            load(source, split="train")


def test_a_name_is_the_dataset_and_a_path_is_the_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_picture(tmp_path / "digits" / "a.png")
    assert len(load("digits")) == 445
    assert len(load("./digits")) == len(load(Path("digits"))) == 1
