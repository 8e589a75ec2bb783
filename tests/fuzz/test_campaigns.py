"""A few hundred cases of the fuzz suite, one after the other of each campaign; all of them by `make test-fuzz`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import netmoments as nm
from tests.fuzz.__main__ import BEGIN, END, PAGE, main, table, write
from tests.fuzz.campaigns import CAMPAIGNS, generator_of, run_piece

SOME = {
    "layers": 100,
    "forms": 60,
    "one unit": 60,
    "Gaussians": 100,
    "any arguments": 60,
    "networks": 8,
    "40 digits": 4,
}


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_some_cases(name):
    assert run_piece(name, 10**6, SOME[name]) == []


@pytest.mark.fuzz
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_all_cases(name):
    """What `python -m tests.fuzz` runs, in this process."""
    assert run_piece(name, 0, CAMPAIGNS[name].cases) == []


def test_there_are_enough():
    assert sum(campaign.cases for campaign in CAMPAIGNS.values()) >= 100_000
    assert CAMPAIGNS["40 digits"].cases >= 500


def test_a_number_is_a_case():
    draws = [generator_of("layers", 5).random(3).tolist() for _ in range(2)]
    assert draws[0] == draws[1]
    assert draws[0] != generator_of("forms", 5).random(3).tolist()
    assert draws[0] != generator_of("layers", 6).random(3).tolist()


numbers = st.floats(-1e3, 1e3, width=32)


@given(arrays.arrays("float64", st.integers(1, 4), elements=numbers), st.floats(0, 1e3), st.floats(-1, 1))
def test_pairs_of_equal_units(heights, std, rho):
    """Shrinks to the simplest layer that fails: equal correlations between all units."""
    mean = torch.tensor(heights)
    rho = max(rho, -1 / max(1, len(mean) - 1))
    matrix = std * std * ((1 - rho) * torch.eye(len(mean)) + rho * torch.ones(len(mean), len(mean))).double()
    found = nm.relu_covariance(mean, matrix)
    assert torch.isfinite(found).all()
    assert torch.equal(found, found.mT)
    assert float(torch.linalg.eigvalsh(found)[0]) >= -1e-13 * std * std * len(mean)


def test_the_table_is_written_between_its_marks(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    monkeypatch.setattr("tests.fuzz.__main__.PAGE", page)
    write(table({"layers": (10, [])}, seed=3))
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n| what was tried")
    assert text.endswith(f"| all, seed 3 | | 10 | 0 |\n{END}\nafter\n")
    assert PAGE.name == "reliability.md"


def test_one_case_again(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fuzz", "one", "one unit", "3"])
    assert main() == 0
    assert capsys.readouterr().out == "holds\n"
