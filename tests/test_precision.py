"""Inside `full_precision`, TF32 and other reduced float32 precisions are off; outside they are as the user set them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch.autograd import gradcheck

import netmoments as nm
from netmoments.precision import full_precision, matmul, matvec, quietly, row_products, value_and_slope, without_cudnn
from tests.closeness import assert_close

BACKENDS = [torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv, torch.backends.mkldnn.rnn]
if torch.cuda.is_available():
    BACKENDS += [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn]


def settings() -> list[str]:
    return [backend.fp32_precision for backend in BACKENDS]


@pytest.fixture
def reduced():
    """Allows reduced precision in every backend that is there, as a user may."""
    before = settings()
    for backend in BACKENDS:
        backend.fp32_precision = "tf32"
    yield settings()
    for backend, precision in zip(BACKENDS, before, strict=True):
        backend.fp32_precision = precision


def test_full_precision_restores_what_was_there(reduced):
    assert set(reduced) == {"tf32"}
    with full_precision():
        assert set(settings()) == {"ieee"}
        BACKENDS[0].fp32_precision = "tf32"  # somebody changes it meanwhile
        with full_precision():
            assert set(settings()) == {"ieee"}
    assert settings() == reduced
    with pytest.raises(KeyError), full_precision():
        raise KeyError
    assert settings() == reduced


def test_full_precision_leaves_alone_what_needs_no_change():
    before = settings()
    with full_precision():
        for now, was in zip(settings(), before, strict=True):
            assert now == (was if was in ("none", "ieee") else "ieee")
    assert settings() == before


def test_full_precision_across_threads(reduced):
    """Overlapping blocks of several threads: full precision until the last one leaves, then the user's setting."""
    entered, leave, seen = threading.Barrier(4), [threading.Event() for _ in range(3)], []

    def work(event: threading.Event) -> None:
        with full_precision():
            entered.wait()
            event.wait()
            seen.append(set(settings()))

    threads = [threading.Thread(target=work, args=(event,)) for event in leave]
    for thread in threads:
        thread.start()
    entered.wait()
    for thread, event in zip(threads, leave, strict=True):
        event.set()
        thread.join()
    assert seen == [{"ieee"}] * 3
    assert settings() == reduced


def interleaved(block: Callable[[], AbstractContextManager[None]]) -> None:
    """Have a second thread enter a block, if it can, while the first is inside, and leave after the first."""
    entered, left = threading.Event(), threading.Event()

    def second() -> None:
        with block():
            entered.set()
            left.wait(10)

    other = threading.Thread(target=second)
    with block():
        other.start()
        entered.wait(0.5)
    left.set()
    other.join(20)
    assert entered.is_set()


def test_cudnn_is_used_again_after_two_threads_without_it():
    before = torch.backends.cudnn.enabled
    interleaved(without_cudnn)
    assert torch.backends.cudnn.enabled == before
    with without_cudnn():
        assert not torch.backends.cudnn.enabled


def test_warnings_are_shown_again_after_two_quiet_threads():
    with warnings.catch_warnings():
        before = list(warnings.filters)
        interleaved(quietly)
        assert list(warnings.filters) == before


def test_warnings_that_begin_otherwise_are_shown():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with quietly("one"):
            warnings.warn("one thing", stacklevel=1)
            warnings.warn("another thing", stacklevel=1)
    assert [str(each.message) for each in seen] == ["another thing"]


def test_forward_derivatives_in_two_threads():
    """Without the lock, torch would drop the derivatives of both when one ends while the other is at work."""
    ended, inside = threading.Event(), threading.Event()
    slopes: dict[str, float] = {}

    def first(x: torch.Tensor) -> torch.Tensor:
        inside.wait(0.5)  # let the other come inside, if it can
        return 2 * x

    def second(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        ended.wait(10)
        return 3 * x

    one = torch.ones(1)
    other = threading.Thread(target=lambda: slopes.update(second=float(value_and_slope(second, (one,), (one,))[1])))

    def begun(x: torch.Tensor) -> torch.Tensor:
        other.start()
        return first(x)

    slopes["first"] = float(value_and_slope(begun, (one,), (one,))[1])
    ended.set()
    other.join(20)
    assert slopes == {"first": 2.0, "second": 3.0}


def test_functions_are_sampled_in_full_precision(reduced):
    seen = []

    def function(x):
        seen.append(set(settings()))
        return x

    nm.monte_carlo(function, nm.Gaussian(torch.zeros(2), std=1.0), samples=4)
    assert seen == [{"ieee"}]
    assert settings() == reduced


def test_products_and_their_gradients():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, 1, 3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    b = torch.randn(5, 4, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    v = torch.randn(5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    assert gradcheck(matmul, (a, b), check_forward_ad=True)
    assert gradcheck(matvec, (a, v))
    c = torch.randn(5, 3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    assert gradcheck(row_products, (a, c), check_forward_ad=True)
    assert_close(row_products(a, c), (a * c).sum(-1), atol=1e-14)
    assert gradcheck(matvec, (a[0, 0], v))
    assert_close(torch.func.vmap(matmul, in_dims=(None, 0))(a[0, 0], b), a[0, 0] @ b, atol=1e-15)
    assert_close(matvec(a[0, 0], v), v @ a[0, 0].mT, atol=1e-15)
