"""Problems to measure on: random layers, networks and covariances, and SqueezeNet with photographs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import normalize

import netmoments as nm
from netmoments.covariances import Covariance
from netmoments.data.datasets import data_folders

OUTPUTS = 10
SQUEEZENET = "squeezenet_v1.0_deepcompressed.npz"


def random_layer(units: int, rank: int) -> tuple[Tensor, Tensor]:
    """A layer with means of order 1, unit variances and correlations of order 1/√rank; every unit is active."""
    generator = Generator().manual_seed(0)
    factor = normalize(torch.randn(units, rank, generator=generator), dim=1)
    return torch.randn(units, generator=generator).clamp(-5, 5), factor @ factor.T


def random_network(inputs: int, units: int, outputs: int, seed: int, dtype: torch.dtype) -> nm.AffineReluAffine:
    """A network with independent normal weights, scaled so that pre-activations and outputs have variance about 1."""
    generator = Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=generator)

    return nm.AffineReluAffine(
        normal(units, inputs) / inputs**0.5, normal(units), normal(outputs, units) / units**0.5, normal(outputs)
    )


def random_problem(
    units: int, inputs: int, batch: int, dtype: torch.dtype, noise: str = "isotropic"
) -> tuple[nm.AffineReluAffine, nm.Gaussian]:
    """A random network with every unit active, and noise about `batch` points: isotropic, diagonal or dense."""
    network = random_network(inputs, units, OUTPUTS, seed=0, dtype=dtype)
    mean = torch.randn(batch, inputs, dtype=dtype, generator=Generator().manual_seed(1))
    variances = torch.ones(batch, inputs, dtype=dtype)
    covariances: dict[str, Callable[[], float | Covariance]] = {
        "isotropic": lambda: 1.0,
        "diagonal": lambda: nm.Diagonal(variances),
        "dense": lambda: nm.Dense(torch.diag_embed(variances)),
    }
    return network, nm.Gaussian(mean, covariances[noise]())


def random_factor(size: int, generator: Generator) -> Tensor:
    """F, (size, size) in float64, with FFᵀ a random covariance of trace `size`, as in the paper's Tables 2 and 4.

    Its eigenvalues are uniform on (0, 1] but for their scale, its eigenvectors from the QR decomposition of a Gaussian
    matrix. Noise of level σ is N(·, σ²FFᵀ).
    """
    device = generator.device
    values = 1 - torch.rand(size, dtype=torch.float64, device=device, generator=generator)
    gaussian = torch.randn(size, size, dtype=torch.float64, device=device, generator=generator)
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal().sign() * (values * (size / values.sum())).sqrt()


def random_covariance(size: int, sigma: float, generator: Generator) -> Tensor:
    """σ²FFᵀ, (size, size) in float64."""
    factor = random_factor(size, generator)
    return sigma**2 * (factor @ factor.T)


def squeezenet(data_dir: str | None) -> nn.Module:
    """SqueezeNet 1.0 for ImageNet in float32; a FileNotFoundError without its weights."""
    folders = data_folders("squeezenet", data_dir)
    found = [folder / SQUEEZENET for folder in folders if (folder / SQUEEZENET).is_file()]
    if not found:
        raise FileNotFoundError(f"{SQUEEZENET} is in none of {', '.join(map(str, folders))}")
    return nm.zoo.pretrained("squeezenet", found[0]).float()


def photograph(data_dir: str | None) -> Tensor:
    """The first of the natural images, (1, 3, 227, 227) as SqueezeNet takes it; a FileNotFoundError without them."""
    folders = data_folders("natural", data_dir)
    archives = [path for folder in folders if folder.name == "natural" for path in sorted(folder.glob("*.npz"))]
    if not archives:
        raise FileNotFoundError(f"an .npz of natural images is in none of {', '.join(map(str, folders))}")
    return nm.data.load(archives[0], size=nm.zoo.entry("squeezenet").input_shape[-1]).images[:1]
