"""The training loop: seeded, deterministic, resumable, on a GPU where there is one."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from netmoments import data
from netmoments.network import zoo
from netmoments.network.training.checkpoint import TrainingState
from netmoments.network.training.recipe import Recipe
from netmoments.network.weights import half_precision, write_tensors
from netmoments.progress import Progress


@dataclass(frozen=True)
class Epoch:
    """What one epoch did."""

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
    """Train a network of the zoo and write its weights, in float16, to `weights`; the network is returned as written.

    After every epoch the whole state goes to a file beside `weights`, from which a run of the same recipe and seed goes
    on as if it had never stopped; the file is removed at the end. The same seed on the same device gives the same bits.
    """
    checkpoint = checkpoint_of(weights)
    run = training_facts(recipe, training, seed)
    with _reproducible(device):
        state = _fresh_state(recipe, seed, torch.device(device))
        if checkpoint.exists():
            state.resume(checkpoint, run)
        images, labels = _on(device, training)
        while state.epoch < recipe.epochs:
            start = time.monotonic()
            loss = _one_epoch(recipe, state, images, labels, seed)
            score = accuracy(state.average, held_out, device=device)
            epoch = Epoch(state.epoch, loss, score, time.monotonic() - start)
            state.history.append(asdict(epoch))
            state.save(checkpoint, run)
            on_epoch(epoch)
        kept = half_precision(state.average.state_dict())
        took = sum(epoch["seconds"] for epoch in state.history)
        facts = {"network": recipe.network, "data": recipe.data, "torch": torch.__version__, "seconds": f"{took:.1f}"}
        write_tensors(weights, kept, run | facts | {"device": _device_name(device)})
    checkpoint.unlink()
    return zoo.pretrained(recipe.network, weights)


def training_facts(recipe: Recipe, training: data.LabelledImages, seed: int) -> dict[str, str]:
    """What a run of training is told by; written into the checkpoint and the weights."""
    return {"recipe": repr(_described(recipe)), "seed": str(seed), "images": str(len(training))}


def checkpoint_of(weights: Path) -> Path:
    """Where the state of a run that writes these weights is kept until it is done."""
    return weights.with_name(f"{weights.stem}.checkpoint.safetensors")


@torch.no_grad()
def accuracy(network: nn.Module, held_out: data.LabelledImages, *, device: torch.device | str = "cpu") -> float:
    """The share of images whose largest score is their label's."""
    return float(correct(network, held_out, device=device).double().mean())


@torch.no_grad()
def correct(network: nn.Module, held_out: data.LabelledImages, *, device: torch.device | str = "cpu") -> Tensor:
    """Which images the network gets right, (N,) booleans."""
    if held_out.labels is None:
        raise ValueError("accuracy: the images have no labels")
    network = network.to(device).eval()
    scores = [network(batch.to(device)).argmax(-1).cpu() for batch in held_out.images.split(1000)]
    return torch.cat(scores) == held_out.labels


def _fresh_state(recipe: Recipe, seed: int, device: torch.device) -> TrainingState:
    torch.manual_seed(seed)
    network = zoo.entry(recipe.network).network().to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=recipe.rate, weight_decay=recipe.weight_decay)
    return TrainingState(network, copy.deepcopy(network).eval(), optimizer)


def _one_epoch(recipe: Recipe, state: TrainingState, images: Tensor, labels: Tensor, seed: int) -> float:
    """One pass over the images in a random order that depends on seed and epoch only; the mean loss."""
    torch.manual_seed(_mixed(seed, state.epoch))  # dropout
    generator = Generator().manual_seed(_mixed(seed, state.epoch))
    order = torch.randperm(len(images), generator=generator).to(images.device)
    batches = order.split(recipe.batch)
    state.network.train()
    total = torch.zeros((), device=images.device)
    with Progress(f"epoch {state.epoch + 1} of {recipe.epochs}", len(images)) as progress:
        for step, chosen in enumerate(batches):
            done = (state.epoch + step / len(batches)) / recipe.epochs
            for group in state.optimizer.param_groups:
                group["lr"] = recipe.rate * recipe.schedule(done)
            inputs = recipe.augmentation(images[chosen], generator)
            loss = cross_entropy(state.network(inputs), labels[chosen], label_smoothing=recipe.label_smoothing)
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
            _average(state, recipe.averaging)
            total += loss.detach() * len(chosen)
            progress.advance(len(chosen))
    state.epoch += 1
    mean = float(total) / len(images)
    if not math.isfinite(mean):
        raise FloatingPointError(f"training diverged in epoch {state.epoch}: the loss is {mean}; lower the rate")
    return mean


@torch.no_grad()
def _average(state: TrainingState, decay: float) -> None:
    """Move the averaged weights towards the current ones; counts and statistics too."""
    for kept, current in zip(state.average.state_dict().values(), state.network.state_dict().values(), strict=True):
        if kept.is_floating_point() and decay > 0:
            kept.lerp_(current, 1 - decay)
        else:
            kept.copy_(current)


@contextmanager
def _reproducible(device: torch.device | str) -> Iterator[None]:
    """Deterministic kernels, and the caller's random state left as it was."""
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
    """A seed for one epoch, unrelated to that of the next."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:7], "big")
