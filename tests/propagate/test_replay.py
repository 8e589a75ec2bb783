"""When work is recorded, replayed and forgotten; recording itself needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from netmoments.propagate import replay as module
from netmoments.propagate.replay import recorded, replayed


class Recorded:
    """In place of a recording: it does the work when replayed, and changes the sign."""

    made = 0

    def __init__(self, work) -> None:
        self.work = work

    @classmethod
    def of(cls, work, inputs):
        if inputs[0].isnan().any():
            raise RuntimeError("cannot be recorded")
        cls.made += 1
        return cls(work)

    def replay(self, inputs):
        return tuple(-x for x in self.work(*inputs))


@pytest.fixture
def double(monkeypatch):
    """A function that doubles a number, with recordings of its own; the result is negative if it was replayed."""
    monkeypatch.setattr(module, "_Recording", Recorded)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Recorded, "made", 0)
    recordings: dict = {}

    def call(*shape: int, value: float = 1.0) -> Tensor:
        (result,) = replayed(recordings, lambda x: (2 * x,), torch.full(shape, value))
        return result.flatten()[0]

    return call


def test_done_then_recorded_then_replayed(double):
    assert [float(double(3)) for _ in range(4)] == [2, -2, -2, -2]
    assert float(double(3, value=5.0)) == -10
    assert Recorded.made == 1


def test_some_shapes_are_kept_and_one_more_takes_the_place_of_the_oldest(double):
    sizes = range(1, module.KEPT + 1)
    for _ in range(3):
        for size in sizes:
            double(size)
    assert Recorded.made == module.KEPT
    double(module.KEPT + 1)
    assert [float(double(size)) for size in sizes[1:]] == [-2] * (module.KEPT - 1)
    assert float(double(1)) == 2
    assert Recorded.made == module.KEPT


def test_work_that_is_sure_to_recur_is_recorded_at_once(monkeypatch):
    monkeypatch.setattr(module, "_Recording", Recorded)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Recorded, "made", 0)
    recordings: dict = {}
    results = [float(recorded(recordings, lambda x: (2 * x,), torch.full((3,), 1.0))[0][0]) for _ in range(3)]
    assert results == [2, -2, -2]
    assert Recorded.made == 1


def test_what_cannot_be_recorded_is_done_as_it_is(double):
    assert all(bool(double(3, value=torch.nan).isnan()) for _ in range(3))
    assert float(double(3)) == 2
    assert Recorded.made == 0


def test_nothing_is_recorded_while_it_is_done_for_the_first_time(monkeypatch):
    """Another thread may call while the first is still making what the work keeps, which a recording would spoil."""
    monkeypatch.setattr(module, "_Recording", Recorded)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Recorded, "made", 0)
    recordings: dict = {}
    seen: list[int] = []

    def work(x: Tensor) -> tuple[Tensor, ...]:
        if not seen:
            seen.append(1)
            replayed(recordings, work, x)  # as another thread would
            seen.append(Recorded.made)
        return (x,)

    replayed(recordings, work, torch.ones(2))
    assert seen == [1, 0]
    assert Recorded.made == 0
    replayed(recordings, work, torch.ones(2))
    assert Recorded.made == 1
