"""When work is recorded, replayed and forgotten; recording itself needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from netmoments.propagate import replay as module
from netmoments.propagate.replay import recorded, replayed


class Recorded:
    """In place of a CUDA graph: it remembers the work."""

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
def asked(monkeypatch):
    """A call that says whether it was replayed (the sign), with recordings of its own."""
    monkeypatch.setattr(module, "_Recording", Recorded)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Recorded, "made", 0)
    recordings: dict = {}

    def ask(*shape: int, value: float = 1.0) -> Tensor:
        (found,) = replayed(recordings, lambda x: (2 * x,), torch.full(shape, value))
        return found.flatten()[0]

    return ask


def test_done_then_recorded_then_replayed(asked):
    assert [float(asked(3)) for _ in range(4)] == [2, -2, -2, -2]
    assert float(asked(3, value=5.0)) == -10
    assert Recorded.made == 1


def test_some_shapes_are_kept_and_one_more_takes_the_place_of_the_oldest(asked):
    sizes = range(1, module.KEPT + 1)
    for _ in range(3):
        for size in sizes:
            asked(size)
    assert Recorded.made == module.KEPT
    asked(module.KEPT + 1)
    assert [float(asked(size)) for size in sizes[1:]] == [-2] * (module.KEPT - 1)
    assert float(asked(1)) == 2
    assert Recorded.made == module.KEPT


def test_work_that_comes_again_is_recorded_at_once(monkeypatch):
    monkeypatch.setattr(module, "_Recording", Recorded)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Recorded, "made", 0)
    known: dict = {}
    found = [float(recorded(known, lambda x: (2 * x,), torch.full((3,), 1.0))[0][0]) for _ in range(3)]
    assert found == [2, -2, -2]
    assert Recorded.made == 1


def test_what_cannot_be_recorded_is_done_as_it_is(asked):
    assert all(bool(asked(3, value=torch.nan).isnan()) for _ in range(3))
    assert float(asked(3)) == 2
    assert Recorded.made == 0


def test_nothing_is_recorded_while_it_is_done_for_the_first_time(monkeypatch):
    """Another thread may come while the first still makes what the work keeps, which a recording would spoil."""
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
