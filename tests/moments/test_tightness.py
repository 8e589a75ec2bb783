METHODS = {
    "layerwise", "sketch", "two-stage", "sampling, 10,000", "sampling, 1,000",
    "sampling, 1,000, control sketch", "sampling, 1,000, control two-stage", "sampling, 1,000, control linear",
    "linear (delta method)", "ADF (diagonal)", "unscented", "series, 4 terms",
}  # fmt: skip


def deep() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)
    return nn.Sequential(*layers).double().eval()


def noise(std: float = 0.3) -> nm.Gaussian:
    mean = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return nm.Gaussian(mean, std=std)


@pytest.fixture(scope="module")
def table() -> nm.Tightness:
    return nm.tightness(deep(), noise(), samples=50_000)


def test_every_method_is_in_the_table(table):
    assert {row.method for row in table.rows} == METHODS
    assert all(row.note == "" and row.seconds >= 0 for row in table.rows)
    for row in table.rows:
        assert row.method in str(table)


def test_the_errors_are_as_they_must_be(table):
    assert table["layerwise"].variance_error < 0.5 * table["linear (delta method)"].variance_error
    assert table["sampling, 1,000, control sketch"].variance_error < table["sampling, 1,000"].variance_error
    assert table["ADF (diagonal)"].variance_error > 5 * table["layerwise"].variance_error


def test_the_floor_is_that_of_the_samples(table):
    """Gaussian scores would have 2|δ|/… ≈ √(2/n)·√(2/π) on average; these are near that."""
    assert table.variance_floor == pytest.approx((2 / 50_000) ** 0.5 * (2 / torch.pi) ** 0.5, rel=0.3)


def test_what_cannot_be_done_has_a_note():
    network = nn.Sequential(nn.Linear(6, 5), nn.Softmax(1), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2)).double().eval()
    with pytest.warns(UserWarning, match="smooth"):
        found = nm.tightness(network, noise(), samples=2000)
    assert "no rule for softmax" in found["layerwise"].note
    assert found["sketch"].note == ""
    assert "no rule for softmax" in str(found)
    with pytest.raises(KeyError, match="is not among"):
        found["two stages"]
    with pytest.raises(TypeError, match=r"noise must be a netmoments\.Gaussian"):
        nm.tightness(network, torch.zeros(6))
