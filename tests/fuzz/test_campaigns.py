"""A few hundred cases of the fuzz suite, one after the other of each campaign; all of them by `make test-fuzz`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import netmoments as nm
from tests.fuzz.__main__ import BEGIN, END, PAGE, Store, Tally, main, run_all, table, works, write
from tests.fuzz.campaigns import CAMPAIGNS, Failure, Piece, generator_of, run_piece

SOME = {
    "layers": 100,
    "forms": 60,
    "one unit": 60,
    "Gaussians": 100,
    "any arguments": 60,
    "networks": 8,
    "kinds of layers": 8,
    "40 digits": 4,
}


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_some_cases(name):
    assert run_piece(name, 10**6, SOME[name]).failures == []


@pytest.mark.fuzz
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_all_cases(name):
    """What `python -m tests.fuzz` runs, in this process."""
    assert run_piece(name, 0, CAMPAIGNS[name].cases).failures == []


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
    matrix = std * std * ((1 - rho) * torch.eye(len(mean)).double() + rho)
    found = nm.relu_covariance(mean, matrix)
    assert torch.isfinite(found).all()
    assert torch.equal(found, found.mT)
    assert float(torch.linalg.eigvalsh(found)[0]) >= -1e-13 * std * std * len(mean)


def test_the_table_is_written_between_its_marks(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    monkeypatch.setattr("tests.fuzz.__main__.PAGE", page)
    write(table({"layers": Tally(10, [], 90.0)}, seed=3))
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n| what was tried")
    assert text.endswith(f"| all, seed 3, 2 minutes of a processor | | 10 | 0 |\n{END}\nafter\n")
    assert PAGE.name == "reliability.md"


def test_pieces_are_all_cases_once():
    for share, total in ((1.0, sum(campaign.cases for campaign in CAMPAIGNS.values())), (1e-9, len(CAMPAIGNS))):
        every = works(2, share)
        numbers = [(work.name, number) for work in every for number in range(work.first, work.first + work.count)]
        assert len(numbers) == len(set(numbers)) == total
        assert min(number for _, number in numbers) == 2 * 10**7


def test_a_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    """Finished pieces are kept, a line that was cut short is not one, and other code begins anew."""
    monkeypatch.setattr("tests.fuzz.__main__.KEPT", tmp_path)
    assert run_all(0, 1e-9, processes=1, minutes=0) == ({name: Tally() for name in CAMPAIGNS}, False)
    every = works(0, 1e-9)
    for number, work in enumerate(every):
        Store(0, 1e-9).add(work, Piece([Failure(0, "too bad")] if number == 3 else [], 2.0))
    results, whole = run_all(0, 1e-9, processes=1, minutes=0)
    assert whole
    assert [tally.seconds for tally in results.values()] == [2.0] * len(CAMPAIGNS)
    assert [len(tally.failures) for tally in results.values()] == [int(n == 3) for n in range(len(CAMPAIGNS))]
    assert f"{len(every)} of {len(every)} pieces were done before" in capsys.readouterr().out
    path = Store(0, 1e-9).path
    path.write_text(path.read_text()[:-10])
    assert not run_all(0, 1e-9, processes=1, minutes=0)[1]
    monkeypatch.setattr("tests.fuzz.__main__.code_now", lambda: "other code")
    assert Store(0, 1e-9).read() == {}


def test_one_case_again(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fuzz", "one", "one unit", "3"])
    assert main() == 0
    assert capsys.readouterr().out == "holds\n"
