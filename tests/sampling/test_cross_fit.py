"""Estimates fitted on some folds and used on others: sample by sample."""

from __future__ import annotations

import numpy as np
import torch

from netmoments.sampling.cross_fit import cross_fitted, products_of_means
from tests.closeness import assert_close


def naive(y: np.ndarray, controls: np.ndarray, correlation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The estimates of `cross_fit` sample by sample, for y and controls (n, d)."""
    n, d = y.shape

    def slopes(q: np.ndarray, t: np.ndarray) -> np.ndarray:
        q, t = q - q.mean(0), t - t.mean()
        unexplained = np.sum((t - q @ np.linalg.lstsq(q, t, rcond=None)[0]) ** 2) / np.sum(t**2)
        ridge = np.sqrt(unexplained) * np.eye(q.shape[1])  # (1 − R²)/n for n rows, as rows more
        return np.linalg.lstsq(np.vstack([q, ridge]), np.append(t, np.zeros(q.shape[1])), rcond=None)[0]

    mean, covariance = np.zeros(d), np.zeros((d, d))
    for own in np.array_split(np.arange(n), 5):
        rest = np.setdiff1d(np.arange(n), own)
        r = np.empty_like(y)
        for i in range(d):
            q = np.column_stack([controls[:, i], controls[:, i] ** 2 - 1])
            r[:, i] = y[:, i] - q @ slopes(q[rest], y[rest, i])
        a = r[rest].mean(0)
        mean += r[own].sum(0) / n
        for i in range(d):
            for j in range(d):
                product = controls[:, i] * controls[:, j] - correlation[i, j]
                q = np.column_stack([product, controls[:, i], controls[:, j]])
                t = (y[:, i] - a[i]) * (y[:, j] - a[j])
                z = t - q @ slopes(q[rest], t[rest])
                pairs = [(r[s, i] - a[i]) * (r[u, j] - a[j]) for s in own for u in own if s != u]
                covariance[i, j] += len(own) / n * (z[own].mean() - np.mean(pairs))
    return mean, covariance


def test_estimates_sample_by_sample():
    generator = torch.Generator().manual_seed(6)
    root = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    controls = root @ torch.randn(2, 43, dtype=torch.float64, generator=generator)
    values = 1e3 + torch.relu(controls) + 0.1 * torch.randn(2, 43, dtype=torch.float64, generator=generator)
    found = cross_fitted(values, controls, root @ root.T)
    mean, covariance = naive(values.T.numpy(), controls.T.numpy(), (root @ root.T).numpy())
    assert_close(found.mean, torch.from_numpy(mean), atol=1e-8)  # slopes to the 1e-10 on the diagonal, times 1/smallest
    assert_close(found.covariance, torch.from_numpy(covariance), atol=1e-8)


def test_products_of_means_are_over_pairs():
    r = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    pairs = [torch.outer(r[:, s], r[:, t]) for s in range(5) for t in range(5) if s != t]
    assert_close(products_of_means(r), torch.stack(pairs).mean(0), rtol=1e-12, atol=1e-14)
