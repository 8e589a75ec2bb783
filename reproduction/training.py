"""Train the networks of the zoo, so that their shipped weights can be made again."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, dropout, grid_sample
from torch.optim import Optimizer

from netmoments import data
from netmoments.data.images import correct
from netmoments.network import zoo
from netmoments.network.weights import read_tensors, write_tensors
from netmoments.progress import progress_bar
from reproduction.expected_loss import expected_cross_entropy, expected_scores

Augmentation = Callable[[Tensor, Generator], Tensor]


def unchanged(images: Tensor, generator: Generator) -> Tensor:
    return images


def random_mirror(images: Tensor, generator: Generator) -> Tensor:
    """Mirror every other image left to right."""
    mirrored = _uniform(images, generator) < 0.5
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


def random_affine(images: Tensor, generator: Generator, *, degrees: float, shift: float, scale: float) -> Tensor:
    """Rotate by up to ±degrees, move by up to ±shift of the side, scale by up to 1 ± scale; borders are repeated."""
    angle, by_x, by_y, size = (2 * _uniform(images, generator) - 1 for _ in range(4))
    angle, size = torch.deg2rad(degrees * angle), 1 + scale * size
    cos, sin = size * angle.cos(), size * angle.sin()
    rows = [torch.stack([cos, -sin, 2 * shift * by_x], -1), torch.stack([sin, cos, 2 * shift * by_y], -1)]
    grid = affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return grid_sample(images, grid, padding_mode="border", align_corners=False)


def random_erasing(images: Tensor, generator: Generator, *, share: float) -> Tensor:
    """Set a square with `share` of the side to the image's mean, in half of the images."""
    side = images.shape[-1]
    corner = [(_uniform(images, generator) * (1 - share) * side)[:, None, None] for _ in range(2)]
    rows = torch.arange(side, device=images.device)[None, :, None] - corner[0]
    columns = torch.arange(side, device=images.device)[None, None, :] - corner[1]
    inside = (rows >= 0) & (rows < share * side) & (columns >= 0) & (columns < share * side)
    inside = inside & (_uniform(images, generator) < 0.5)[:, None, None]
    return torch.where(inside.unsqueeze(1), images.mean((1, 2, 3), keepdim=True), images)


def shifted_digits(images: Tensor, generator: Generator) -> Tensor:
    return random_affine(images, generator, degrees=8, shift=0.06, scale=0.08)


def varied_faces(images: Tensor, generator: Generator) -> Tensor:
    images = random_mirror(images, generator)
    images = random_affine(images, generator, degrees=15, shift=0.08, scale=0.12)
    return random_erasing(images, generator, share=0.3)


def _uniform(images: Tensor, generator: Generator) -> Tensor:
    """One number in [0, 1) per image, drawn on the CPU so that every device sees the same."""
    return torch.rand(len(images), generator=generator).to(images.device)


Schedule = Callable[[float], float]


def constant(done: float) -> float:
    return 1.0


def one_cycle(done: float) -> float:
    """A schedule that rises from 0.05 to 1 over the first fifth, then falls to 0 along a cosine."""
    return 0.05 + 0.95 * done / 0.2 if done < 0.2 else 0.5 * (1 + math.cos(math.pi * (done - 0.2) / 0.8))


def three_steps(done: float) -> float:
    """A schedule that divides the rate by ten after half of the run and again after three quarters."""
    return 1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01


@dataclass(frozen=True)
class Recipe:
    """How to train: Adam with decoupled weight decay or SGD with momentum, a scheduled rate, and an average of the
    weights.
    """

    network: str
    data: str
    epochs: int
    batch: int
    rate: float
    weight_decay: float = 0.0
    schedule: Schedule = constant
    """The share of `rate` that applies when a given share of the run is over."""
    label_smoothing: float = 0.0
    averaging: float = 0.0
    """Decay of the exponential average of the weights, which is what is kept; 0 keeps the last weights."""
    augmentation: Augmentation = unchanged
    optimizer: str = "adam"
    """adam, or sgd with a momentum of 0.9 and weight decay in the gradient."""
    dropout: float = 0.0
    """Share of the last layer's inputs dropped in training, in addition to the network's own dropout."""
    centre: float = 0.0
    spread: float = 1.0
    """The network sees (x − centre)/spread; the weights that are kept expect that."""
    sigma: float = 0.0
    """Standard deviation of the noise that is trained against, by `folds` or by `moments`."""
    folds: int = 0
    """Noisy copies of each image in a step, beside the image itself."""
    moments: float | None = None
    """λ: use, instead of copies, the loss expected under the noise, with λ times its second-order term."""

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"no optimizer {self.optimizer!r}; there are {', '.join(OPTIMIZERS)}")
        if self.dropout and self.moments is not None:
            raise ValueError("moments go with what the network drops itself; leave out dropout")
        if self.folds and self.moments is not None:
            raise ValueError(f"give folds of noisy copies ({self.folds}) or moments ({self.moments}), not both")
        if bool(self.folds or self.moments is not None) != (self.sigma > 0):
            raise ValueError(
                f"noise to train against has a level, sigma, and folds or moments; got sigma {self.sigma}, folds "
                f"{self.folds}, moments {self.moments}"
            )

    def seen(self, images: Tensor) -> Tensor:
        """Images as the network sees them."""
        return (images - self.centre) / self.spread if self.changes_images else images

    def of_images(self, network: nn.Module) -> nn.Module:
        """Such a network as one for images in [0, 1], in eval mode."""
        if not self.changes_images:
            return network.eval()
        channels = zoo.entry(self.network).input_shape[0]
        first = zoo.Normalised([self.centre] * channels, [self.spread] * channels)
        return nn.Sequential(first, network).eval()

    @property
    def changes_images(self) -> bool:
        return (self.centre, self.spread) != (0.0, 1.0)


OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter], float, float], Optimizer]] = {
    "adam": lambda weights, rate, decay: torch.optim.AdamW(weights, lr=rate, weight_decay=decay),
    "sgd": lambda weights, rate, decay: torch.optim.SGD(weights, lr=rate, momentum=MOMENTUM, weight_decay=decay),
}
MOMENTUM = 0.9
RECIPES = {
    "digits": Recipe(
        "digits", "digits", epochs=60, batch=64, rate=3e-3, weight_decay=1e-3, schedule=one_cycle, label_smoothing=0.05,
        averaging=0.99, augmentation=shifted_digits,
    ),
    "lenet": Recipe(
        "lenet", "mnist", epochs=5, batch=500, rate=3e-3, weight_decay=1.0, schedule=one_cycle, averaging=0.95,
    ),
    "faces": Recipe(
        "faces", "fer2013", epochs=80, batch=256, rate=2e-3, weight_decay=5e-2, schedule=one_cycle, label_smoothing=0.1,
        averaging=0.998, augmentation=varied_faces,
    ),
    "faces-plain": Recipe(
        "faces", "fer2013", epochs=30, batch=128, rate=1e-2, weight_decay=5e-4, schedule=three_steps, optimizer="sgd",
    ),
}  # fmt: skip
"""The recipes of the shipped weights by the network's name, and others for the same networks. `faces-plain` is how a
network of 2019 was trained: SGD with momentum, a rate that is divided by ten twice, and unmodified images."""


@dataclass
class TrainingState:
    """A network in training, with its optimizer, the average of its weights, and the epochs done."""

    network: nn.Module
    average: nn.Module
    optimizer: Optimizer
    epoch: int = 0
    history: list[dict[str, float]] = field(default_factory=list)

    def save(self, path: Path, run: dict[str, str]) -> None:
        """Save the state; `run` says which run this is (recipe, seed), so that no other run continues from it."""
        tensors = {f"network.{name}": x for name, x in self.network.state_dict().items()}
        tensors |= {f"average.{name}": x for name, x in self.average.state_dict().items()}
        for number, entries in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": torch.as_tensor(x) for name, x in entries.items()}
        progress = {"epoch": str(self.epoch), "history": json.dumps(self.history)}
        write_tensors(path, {name: x.clone() for name, x in tensors.items()}, run | progress)

    def resume(self, path: Path, run: dict[str, str]) -> None:
        """Continue from a saved state of the same run."""
        tensors, saved = read_tensors(path)
        changed = {key: value for key, value in run.items() if saved.get(key) != value}
        different = [f"{key} {saved.get(key)!r} there, {value!r} now" for key, value in changed.items()]
        if different:
            raise ValueError(
                f"{path} is of another run ({'; '.join(different)}); repeat that run's settings, or delete the file"
            )
        self.network.load_state_dict(_under("network.", tensors))
        self.average.load_state_dict(_under("average.", tensors))
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in _under("optimizer.", tensors).items():
            number, key = name.split(".", 1)
            state.setdefault(int(number), {})[key] = value
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})
        self.epoch = int(saved["epoch"])
        self.history = json.loads(saved["history"])


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Epoch:
    """The result of one epoch."""

    number: int
    loss: float
    accuracy: float
    """On the data's test split."""
    seconds: float


def train(
    recipe: Recipe,
    training: data.LabelledImages,
    held_out: data.LabelledImages,
    *,
    weights: Path,
    seed: int = 0,
    device: torch.device | str = "cpu",
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
) -> nn.Module:
    """Train a network of the zoo, write its weights in float16 to `weights`, and return the network as written.

    After every epoch the whole state is saved to a file beside `weights`, from which a run of the same recipe and seed
    goes on as if it had never stopped; the file is removed at the end. The same seed and device give the same bits.
    """
    checkpoint = checkpoint_of(weights)
    run = training_facts(recipe, training, seed)
    with _reproducible(device):
        state = fresh_state(recipe, seed, torch.device(device))
        if checkpoint.exists():
            state.resume(checkpoint, run)
        images, labels = _on(device, training)
        images = recipe.seen(images)
        while state.epoch < recipe.epochs:
            start = time.monotonic()
            loss = _one_epoch(recipe, state, images, labels, seed)
            score = accuracy(recipe.of_images(state.average), held_out, device=device)
            epoch = Epoch(state.epoch, loss, score, time.monotonic() - start)
            state.history.append(asdict(epoch))
            state.save(checkpoint, run)
            on_epoch(epoch)
        averaged = state.average.state_dict()
        kept = {name: x.half() if x.is_floating_point() else x for name, x in averaged.items()}
        took = sum(epoch["seconds"] for epoch in state.history)
        facts = {"network": recipe.network, "data": recipe.data, "torch": torch.__version__, "seconds": f"{took:.1f}"}
        write_tensors(weights, kept, run | facts | {"device": _device_name(device)})
    checkpoint.unlink()
    return zoo.pretrained(recipe.network, weights)


def training_facts(recipe: Recipe, training: data.LabelledImages, seed: int) -> dict[str, str]:
    """The facts that identify a training run; they are written into the checkpoint and the weights."""
    return {"recipe": repr(_described(recipe)), "seed": str(seed), "images": str(len(training))}


def checkpoint_of(weights: Path) -> Path:
    """The file in which the state of a run that writes these weights is kept until it is done."""
    return weights.with_name(f"{weights.stem}.checkpoint.safetensors")


@torch.no_grad()
def accuracy(network: nn.Module, held_out: data.LabelledImages, *, device: torch.device | str = "cpu") -> float:
    """The share of images whose largest score is their label's."""
    return float(correct(network, held_out, device=device).double().mean())


def fresh_state(recipe: Recipe, seed: int, device: torch.device) -> TrainingState:
    """A network with random weights and its optimizer, before the first step."""
    torch.manual_seed(seed)
    network = zoo.entry(recipe.network).network().to(device)
    optimizer = OPTIMIZERS[recipe.optimizer](network.parameters(), recipe.rate, recipe.weight_decay)
    state = TrainingState(network, copy.deepcopy(network).eval(), optimizer)
    if recipe.dropout:
        last = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
        last.register_forward_pre_hook(lambda module, args: (dropout(args[0], recipe.dropout, module.training),))
    return state


def _one_epoch(recipe: Recipe, state: TrainingState, images: Tensor, labels: Tensor, seed: int) -> float:
    """Make one pass over the images, in a random order that depends only on seed and epoch; return the mean loss."""
    torch.manual_seed(_mixed(seed, state.epoch))  # dropout
    generator = Generator().manual_seed(_mixed(seed, state.epoch))
    order = torch.randperm(len(images), generator=generator).to(images.device)
    batches = order.split(recipe.batch)
    state.network.train()
    total = torch.zeros((), device=images.device)
    with progress_bar(f"epoch {state.epoch + 1} of {recipe.epochs}", len(images)) as show:
        for step, chosen in enumerate(batches):
            show(step * recipe.batch)
            done = (state.epoch + step / len(batches)) / recipe.epochs
            for group in state.optimizer.param_groups:
                group["lr"] = recipe.rate * recipe.schedule(done)
            inputs = recipe.augmentation(images[chosen], generator)
            loss = one_step(recipe, state, inputs, labels[chosen])
            total += loss * len(chosen)
    state.epoch += 1
    mean = float(total) / len(images)
    if not math.isfinite(mean):
        raise FloatingPointError(f"training diverged in epoch {state.epoch}: the loss is {mean}; lower the rate")
    return mean


def one_step(recipe: Recipe, state: TrainingState, images: Tensor, labels: Tensor) -> Tensor:
    """Take a step on one batch; return the loss before it."""
    loss = loss_of(recipe, state.network, images, labels)
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    _average(state, recipe.averaging)
    return loss.detach()


def loss_of(recipe: Recipe, network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of the images, of the images and noisy copies, or expected under the noise."""
    sigma = recipe.sigma / recipe.spread
    if recipe.moments is not None:
        scores = expected_scores(network, images, sigma)
        return expected_cross_entropy(scores, labels, recipe.moments, recipe.label_smoothing)
    if recipe.folds:
        copies = images.repeat(recipe.folds, 1, 1, 1)
        images = torch.cat([images, copies + sigma * torch.randn_like(copies)])
        labels = labels.repeat(recipe.folds + 1)
    return cross_entropy(network(images), labels, label_smoothing=recipe.label_smoothing)


@torch.no_grad()
def _average(state: TrainingState, decay: float) -> None:
    """Move the averaged weights towards the current ones, including counts and statistics."""
    for kept, current in zip(state.average.state_dict().values(), state.network.state_dict().values(), strict=True):
        if kept.is_floating_point() and decay > 0:
            kept.lerp_(current, 1 - decay)
        else:
            kept.copy_(current)


@contextmanager
def _reproducible(device: torch.device | str) -> Iterator[None]:
    """Use deterministic kernels, and leave the caller's random state as it was."""
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def _on(device: torch.device | str, images: data.LabelledImages) -> tuple[Tensor, Tensor]:
    if images.labels is None:
        raise ValueError("train: the images have no labels")
    return images.images.to(device), images.labels.to(device)


def _described(recipe: Recipe) -> dict[str, object]:
    names = {key: getattr(recipe, key).__name__ for key in ("schedule", "augmentation")}
    return {f.name: getattr(recipe, f.name) for f in fields(recipe)} | names


def _device_name(device: torch.device | str) -> str:
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _mixed(seed: int, epoch: int) -> int:
    """A seed for one epoch that is unrelated to that of the next."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:7], "big")
