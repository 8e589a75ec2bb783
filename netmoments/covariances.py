"""Structures of covariance matrices, which give products without building the n×n matrix where possible.

`Isotropic`, `Diagonal`, `LowRank`, `Dense` and `Blocks` have the methods of `Covariance`. Each has leading batch
dimensions and acts on n flat coordinates. With Σ the covariance and A any (..., p, n) matrix:

    variances()     diag Σ            (..., n)
    times(A)        A Σ               (..., p, n)
    push(A)         A Σ Aᵀ            (..., p, p)
    push_diagonal(A) diag(A Σ Aᵀ)     (..., p), without the p×p matrix
    factors(A)      U, V and a number c with A Σ Aᵀ = c U Vᵀ, with as few columns as the structure allows
    pushed(A)       A Σ Aᵀ            as a structure
    dense()         Σ                 (..., n, n), for those who really want it
    root()          R with Σ = R Rᵀ   (..., n, r), with as few columns as the structure allows
    draw(...)       samples of N(0, Σ)

A structure of your own is a frozen dataclass with the abstract methods of `Covariance`; the others follow from these.
`kept_dimensions` names its tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Generator, Tensor

from netmoments.normal import standard_deviation
from netmoments.precision import matmul, row_products

FLOOR = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Part of a window's largest variance that is added to all of them, so that tied inputs have a Cholesky factor."""


class Factors(NamedTuple):
    """A p×p covariance scale·left·rightᵀ, with left and right (..., p, r) and scale (...), 1 if None."""

    left: Tensor
    right: Tensor
    scale: Tensor | None = None

    def diagonals(self) -> tuple[Tensor, Tensor]:
        """The diagonal without the scale and with it, (..., p) each."""
        unscaled = row_products(self.left, self.right).clamp(min=0)
        return unscaled, unscaled if self.scale is None else unscaled * self.scale.unsqueeze(-1)


class Covariance(ABC):
    """What every structure offers. `nm.Gaussian` takes any, also one of your own: a frozen dataclass with the abstract
    methods, from which all others follow, and `kept_dimensions`.

    >>> covariance = LowRank(torch.ones(3, 1))
    >>> isinstance(covariance, Covariance), covariance.size, covariance.variances()
    (True, 3, tensor([1., 1., 1.]))
    """

    kept_dimensions: ClassVar[dict[str, int]] = {}
    """How many trailing dimensions of each tensor belong to one entry, by the name of its field: all tensors of the
    structure must be named, and those before the trailing ones are the batch."""

    @property
    @abstractmethod
    def size(self) -> int:
        """n, the number of coordinates."""

    @property
    @abstractmethod
    def batch_shape(self) -> torch.Size: ...

    @property
    def rank(self) -> int:
        """The number of columns of `root`."""
        return self.size

    @abstractmethod
    def variances(self) -> Tensor: ...

    @abstractmethod
    def times(self, matrix: Tensor) -> Tensor: ...

    @abstractmethod
    def root(self) -> Tensor: ...

    @property
    def normals(self) -> int:
        """How many standard normal numbers one sample takes."""
        return self.size

    @abstractmethod
    def coloured(self, white: Tensor) -> Tensor:
        """Samples of N(0, Σ), (samples, ..., n), from standard normal numbers (samples, ..., `normals`)."""

    def draw(self, shape: tuple[int, ...], generator: Generator | None) -> Tensor:
        """Samples of N(0, Σ), (*shape, n), for a shape (samples, *batch)."""
        like = self.variances()
        shape = (*shape, self.normals)
        return self.coloured(torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator))

    def factors(self, matrix: Tensor) -> Factors:
        """A Σ Aᵀ as a product of factors."""
        return Factors(matrix, self.times(matrix))

    def push(self, matrix: Tensor) -> Tensor:
        factors = self.factors(matrix)
        pushed = matmul(factors.left, factors.right.mT)
        pushed = 0.5 * (pushed + pushed.mT)
        return pushed if factors.scale is None else pushed * factors.scale[..., None, None]

    def push_diagonal(self, matrix: Tensor) -> Tensor:
        return self.factors(matrix).diagonals()[1]

    def pushed(self, matrix: Tensor) -> Covariance:
        """A Σ Aᵀ as a structure: `LowRank` if a thin root is there without a decomposition, else `Dense`."""
        root = self._thin_root(matrix)
        return Dense(self.push(matrix)) if root is None else LowRank(root)

    def _thin_root(self, matrix: Tensor) -> Tensor | None:
        """R with A Σ Aᵀ = R Rᵀ and fewer columns than rows, if the structure gives one without a decomposition."""
        return None

    def dense(self) -> Tensor:
        like = self.variances()
        return self.push(torch.eye(self.size, dtype=like.dtype, device=like.device))

    def flattened(self, batch: torch.Size) -> Self:
        """The same covariance with a batch of that shape as one batch dimension, or none if the batch shares it."""
        if not self.batch_shape:
            return self
        return self._each(lambda x, kept: x.expand(*batch, *x.shape[x.dim() - kept :]).flatten(0, -1 - kept))

    def entries(self, index: Tensor | slice | int) -> Self:
        """Chosen entries of the one batch dimension, which an int removes; a covariance without one stays as it is."""
        return self._each(lambda x, kept: x[index]) if self.batch_shape else self

    def _each(self, change: Callable[[Tensor, int], Tensor]) -> Self:
        """The same structure with `change(tensor, kept)` for each tensor, the last `kept` dimensions being no batch."""
        kept = self.kept_dimensions
        values = {name: getattr(self, name) for name in kept}
        changed = {name: change(value, kept[name]) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **changed)  # type: ignore[type-var]

    def tensors(self) -> list[Tensor]:
        """All numbers of the covariance as tensors, in the order that `with_tensors` takes."""
        return [getattr(self, name) for name in self.kept_dimensions]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """The same structure with other numbers, in the order of `tensors`."""
        return replace(self, **dict(zip(self.kept_dimensions, tensors, strict=False)))  # type: ignore[type-var]

    @property
    def structure(self) -> tuple[Any, ...]:
        """What there is to know besides the tensors: the kind, the size, and all fields that are none."""
        others = [field.name for field in fields(self) if field.name not in self.kept_dimensions]  # type: ignore[arg-type]
        return type(self), self.size, *(getattr(self, name) for name in others)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Every tensor converted as by `Tensor.to`."""
        return self._each(lambda x, kept: x.to(*args, **kwargs))


@dataclass(frozen=True, eq=False)
class Isotropic(Covariance):
    """σ²I on n coordinates: `variance`, one for each batch entry (...), and `dimension`, which is n.

    `Gaussian(mean, std=…)` has one. No n×n matrix is ever made.

    >>> Isotropic(torch.tensor(0.25), 2).dense()
    tensor([[0.2500, 0.0000],
            [0.0000, 0.2500]])
    """

    variance: Tensor
    dimension: int
    kept_dimensions: ClassVar[dict[str, int]] = {"variance": 0}

    @property
    def size(self) -> int:
        return self.dimension

    @property
    def batch_shape(self) -> torch.Size:
        return self.variance.shape

    def variances(self) -> Tensor:
        return self.variance.unsqueeze(-1).expand(*self.variance.shape, self.dimension)

    def times(self, matrix: Tensor) -> Tensor:
        return matrix * self.variance[..., None, None]

    def dense(self) -> Tensor:
        return torch.diag_embed(self.variances())

    def factors(self, matrix: Tensor) -> Factors:
        return Factors(matrix, matrix, self.variance)

    def _thin_root(self, matrix: Tensor) -> Tensor | None:
        if matrix.shape[-2] <= self.size:
            return None
        return matrix * standard_deviation(self.variance)[..., None, None]

    def root(self) -> Tensor:
        return torch.diag_embed(standard_deviation(self.variances()))

    def coloured(self, white: Tensor) -> Tensor:
        return white * self.variance.sqrt().unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class Diagonal(Covariance):
    """Independent coordinates: `variance` (..., n). As an argument of `Gaussian` it may have the event's shape.

    >>> A = torch.tensor([[1.0, 1.0]])
    >>> Diagonal(torch.tensor([1.0, 4.0])).push(A)  # A Σ Aᵀ
    tensor([[5.]])
    """

    variance: Tensor
    kept_dimensions: ClassVar[dict[str, int]] = {"variance": 1}

    @property
    def size(self) -> int:
        return self.variance.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        return self.variance.shape[:-1]

    def variances(self) -> Tensor:
        return self.variance

    def times(self, matrix: Tensor) -> Tensor:
        return matrix * self.variance.unsqueeze(-2)

    def dense(self) -> Tensor:
        return torch.diag_embed(self.variance)

    def _thin_root(self, matrix: Tensor) -> Tensor | None:
        if matrix.shape[-2] <= self.size:
            return None
        return matrix * standard_deviation(self.variance).unsqueeze(-2)

    def root(self) -> Tensor:
        return torch.diag_embed(standard_deviation(self.variance))

    def coloured(self, white: Tensor) -> Tensor:
        return white * self.variance.sqrt()


@dataclass(frozen=True, eq=False)
class LowRank(Covariance):
    """F Fᵀ + diag(d): `factor` (..., n, r), `diagonal` (..., n) or a number (0 for none).

    This is noise with r directions that many coordinates share: a lamp, a slow drift of a sensor, a shift of the
    camera. Products with it take n·r numbers, never n².

    >>> together = LowRank(torch.tensor([[1.0], [1.0]]), 0.5)
    >>> together.dense()
    tensor([[1.5000, 1.0000],
            [1.0000, 1.5000]])
    """

    factor: Tensor
    diagonal: Tensor | float = 0.0
    kept_dimensions: ClassVar[dict[str, int]] = {"factor": 2, "diagonal": 1}

    @property
    def size(self) -> int:
        return self.factor.shape[-2]

    @property
    def rank(self) -> int:
        return self.factor.shape[-1] + (self.size if self._has_diagonal else 0)

    @property
    def batch_shape(self) -> torch.Size:
        batch = self.factor.shape[:-2]
        return batch if not self._has_diagonal else torch.broadcast_shapes(batch, self._diagonal_tensor().shape[:-1])

    @property
    def _has_diagonal(self) -> bool:
        return isinstance(self.diagonal, Tensor) or self.diagonal != 0

    def _diagonal_tensor(self) -> Tensor:
        if isinstance(self.diagonal, Tensor):
            return self.diagonal
        return self.factor.new_full((self.size,), self.diagonal)

    def tensors(self) -> list[Tensor]:
        return [self.factor, self._diagonal_tensor()] if self._has_diagonal else [self.factor]

    def variances(self) -> Tensor:
        return (self.factor * self.factor).sum(-1) + self._diagonal_tensor()

    def times(self, matrix: Tensor) -> Tensor:
        product = matmul(matmul(matrix, self.factor), self.factor.mT)
        return product + matrix * self._diagonal_tensor().unsqueeze(-2) if self._has_diagonal else product

    def dense(self) -> Tensor:
        product = matmul(self.factor, self.factor.mT)
        product = 0.5 * (product + product.mT)  # a product is not symmetric to the last digit
        return product + torch.diag_embed(self._diagonal_tensor()) if self._has_diagonal else product

    def _thin_root(self, matrix: Tensor) -> Tensor | None:
        if matrix.shape[-2] <= self.rank:
            return None
        thin = matmul(matrix, self.factor)
        if not self._has_diagonal:
            return thin
        scaled = matrix * standard_deviation(self._diagonal_tensor()).unsqueeze(-2)
        return torch.cat(_same_batch(thin, scaled), -1)

    def factors(self, matrix: Tensor) -> Factors:
        thin = matmul(matrix, self.factor)
        if not self._has_diagonal:
            return Factors(thin, thin)
        scaled = matrix * self._diagonal_tensor().unsqueeze(-2)
        thin, scaled, plain = _same_batch(thin, scaled, matrix)
        return Factors(torch.cat([thin, scaled], -1), torch.cat([thin, plain], -1))

    def root(self) -> Tensor:
        if not self._has_diagonal:
            return self.factor
        diagonal = torch.diag_embed(standard_deviation(self._diagonal_tensor()))
        return torch.cat(_same_batch(self.factor, diagonal), -1)

    @property
    def normals(self) -> int:
        return self.rank

    def coloured(self, white: Tensor) -> Tensor:
        rank = self.factor.shape[-1]
        sample = _combine(self.factor, white[..., :rank])
        return sample + white[..., rank:] * self._diagonal_tensor().sqrt() if self._has_diagonal else sample


@dataclass(frozen=True, eq=False)
class Dense(Covariance):
    """A full symmetric matrix (..., n, n), singular or not. That it is a covariance is checked by `Gaussian`, not here.

    >>> Dense(torch.tensor([[2.0, 1.0], [1.0, 2.0]])).variances()
    tensor([2., 2.])
    """

    matrix: Tensor
    kept_dimensions: ClassVar[dict[str, int]] = {"matrix": 2}

    @property
    def size(self) -> int:
        return self.matrix.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        return self.matrix.shape[:-2]

    def variances(self) -> Tensor:
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def times(self, matrix: Tensor) -> Tensor:
        return matmul(matrix, self.matrix)

    def dense(self) -> Tensor:
        return self.matrix

    def root(self) -> Tensor:
        return square_root(self.matrix) if self.matrix.requires_grad else self._root

    def coloured(self, white: Tensor) -> Tensor:
        return _combine(self._root, white)

    @cached_property
    def _root(self) -> Tensor:
        return square_root(self.matrix.detach())


@dataclass(frozen=True, eq=False)
class Blocks(Covariance):
    """A block-diagonal covariance: independent groups of coordinates, each with a structure of its own."""

    parts: tuple[Covariance, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def rank(self) -> int:
        return sum(part.rank for part in self.parts)

    @property
    def batch_shape(self) -> torch.Size:
        return torch.broadcast_shapes(*(part.batch_shape for part in self.parts))

    @property
    def normals(self) -> int:
        return sum(part.normals for part in self.parts)

    def _each(self, change: Callable[[Tensor, int], Tensor]) -> Self:
        return type(self)(tuple(part._each(change) for part in self.parts))

    def flattened(self, batch: torch.Size) -> Self:
        return type(self)(tuple(part.flattened(batch) for part in self.parts))

    def entries(self, index: Tensor | slice | int) -> Self:
        return type(self)(tuple(part.entries(index) for part in self.parts))

    def variances(self) -> Tensor:
        return _side_by_side([part.variances() for part in self.parts], 1)

    def times(self, matrix: Tensor) -> Tensor:
        columns = matrix.split([part.size for part in self.parts], -1)
        return _side_by_side([part.times(block) for part, block in zip(self.parts, columns, strict=True)], 2)

    def root(self) -> Tensor:
        roots = [part.root() for part in self.parts]
        result = roots[0].new_zeros(*self.batch_shape, self.size, self.rank)
        row = column = 0
        for root in roots:
            result[..., row : row + root.shape[-2], column : column + root.shape[-1]] = root
            row, column = row + root.shape[-2], column + root.shape[-1]
        return result

    @property
    def structure(self) -> tuple[Any, ...]:
        return tuple(part.structure for part in self.parts)

    def tensors(self) -> list[Tensor]:
        return [x for part in self.parts for x in part.tensors()]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        remaining = iter(tensors)
        return type(self)(tuple(part.with_tensors([next(remaining) for _ in part.tensors()]) for part in self.parts))

    def coloured(self, white: Tensor) -> Tensor:
        blocks = white.split([part.normals for part in self.parts], -1)
        return torch.cat([part.coloured(block) for part, block in zip(self.parts, blocks, strict=True)], -1)


def square_root(matrix: Tensor) -> Tensor:
    """R with R Rᵀ = matrix: Cholesky's, or if that fails from eigenvalues, of which negative ones are cut to 0."""
    root, failed = torch.linalg.cholesky_ex(matrix)
    if not bool((failed != 0).any()):
        return root
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=0).sqrt().unsqueeze(-2)


def cholesky_root(covariance: Tensor) -> Tensor:
    """Cholesky's R with RRᵀ = S, (..., w, w), after `FLOOR` of a window's largest variance is added to its diagonal."""
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    floor = FLOOR[covariance.dtype] * variance.detach().amax(-1, keepdim=True) + 1e-30
    if variance.shape[-1] == 1:
        return (variance + floor).sqrt().unsqueeze(-1)
    return torch.linalg.cholesky(covariance + torch.diag_embed(floor.expand_as(variance)))


def whitened(covariance: Tensor, curvature: Tensor, present: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """R with RRᵀ = S, and R⁻¹, (n, w, w) each; if w > first, units bend most along the first columns of R.

    R is Cholesky's R', or for w > first R' times the eigenvectors of R'ᵀHR' in the order of their eigenvalues' size.
    Any rotation of a root is a root, so nothing is differentiated through the eigenvectors.
    """
    root = cholesky_root(covariance)
    if root.shape[-1] > first:
        with torch.no_grad():
            pair_present = present.unsqueeze(-1) & present.unsqueeze(-2)
            bend = root.mT @ torch.where(pair_present, curvature, 0.0) @ root
            size = bend.abs().amax((-2, -1), keepdim=True)
            values, vectors = torch.linalg.eigh((bend / torch.where(size > 0, size, 1.0)).double())
            order = values.abs().argsort(-1, descending=True).unsqueeze(-2).expand_as(vectors)
            rotation = vectors.gather(-1, order).to(root.dtype)
        root = root @ rotation
    return root, torch.linalg.inv(root)


def _same_batch(*matrices: Tensor) -> tuple[Tensor, ...]:
    """Matrices expanded to their common batch."""
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in matrices))
    return tuple(x.expand(*batch, *x.shape[-2:]) for x in matrices)


def _combine(root: Tensor, weights: Tensor) -> Tensor:
    """root · weights for weights (samples, ..., r), as one product for each batch entry."""
    samples = weights.movedim(0, -2)
    return matmul(samples, root.mT).movedim(-2, 0)


def _side_by_side(parts: list[Tensor], kept: int) -> Tensor:
    """Tensors joined along the last dimension; but for their last `kept` dimensions they are batches that broadcast."""
    batch = torch.broadcast_shapes(*(part.shape[: part.dim() - kept] for part in parts))
    return torch.cat([part.expand(*batch, *part.shape[part.dim() - kept :]) for part in parts], -1)
