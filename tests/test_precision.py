"""TF32 and other reduced float32 precisions are off inside, and as the user left them outside."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

import netmoments as nm
from netmoments.precision import full_precision, matmul, matvec
from tests.closeness import assert_close


def settings() -> list[str]:
    return [
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
    ]


@pytest.fixture
def tf32_allowed():
    before = settings()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield settings()
    torch.backends.cuda.matmul.fp32_precision = before[0]


def test_full_precision_restores_what_was_there(tf32_allowed):
    with full_precision():
        assert settings() == ["ieee"] * 3
    assert settings() == tf32_allowed
    with pytest.raises(KeyError), full_precision():
        raise KeyError
    assert settings() == tf32_allowed


def test_functions_are_sampled_in_full_precision(tf32_allowed):
    seen = []

    def function(x):
        seen.append(settings())
        return x

    nm.monte_carlo(function, nm.Gaussian(torch.zeros(2), std=1.0), samples=4)
    assert seen == [["ieee"] * 3]


def test_products_and_their_gradients():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, 1, 3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    b = torch.randn(5, 4, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    v = torch.randn(5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    assert gradcheck(matmul, (a, b), check_forward_ad=True)
    assert gradcheck(matvec, (a, v))
    assert gradcheck(matvec, (a[0, 0], v))
    assert_close(torch.func.vmap(matmul, in_dims=(None, 0))(a[0, 0], b), a[0, 0] @ b, atol=1e-15)
    assert_close(matvec(a[0, 0], v), v @ a[0, 0].mT, atol=1e-15)
