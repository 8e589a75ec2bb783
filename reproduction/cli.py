"""The command line `python -m reproduction`. Thin: it imports what it needs when it runs, so that help is instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from netmoments import __version__
from netmoments.cli import AboveZero, AtLeastTwo, DataDir, Device, NotNegative, Seed, run

if TYPE_CHECKING:
    from reproduction.training import Epoch

app = App(
    name="python -m reproduction",
    version=__version__,
    suppress_keyboard_interrupt=False,  # `run` says what becomes of the work
)
UNFINISHED = 3
"""The exit status when the time ran out before the work was done."""


@app.default
def reproduce(
    name: str,
    *,
    images: AtLeastTwo | None = None,
    samples: AtLeastTwo | None = None,
    device: str = "auto",
    seed: Seed = 0,
    out: Path = Path("reproduced"),
    engine: str = "local",
    address: str | None = None,
    minutes: AboveZero | None = None,
    data_dir: DataDir = None,
    weights: Path | None = None,
    model: str = "lenet",
    layer: str = "-1",
    gallery: Path | None = None,
) -> None:
    """Make the paper's figures and tables again on real data, beside the published numbers.

    NAME is figure-1, figure-2, table-1, table-2, table-3, table-4, seeds (Table 2 for several trained networks),
    readings-2 (Table 2 by training recipe and reading), frontier (error against time of every method),
    moments-training (training on the expected loss), of the attacks figure-3, figure-4, figure-5, figure-6, figure-7,
    table-5, figure-8, figure-9, readings-5 (Table 5 under every reading), readings-2019 (Table 5 on networks
    trained as in 2019), or all.
    Each prints its table and writes NAME/ (JSON, Markdown, PNG, PDF) and report.html into the output folder, beside the
    raw results as parquet. Stopped at any moment, the same command goes on where it was.

    Parameters
    ----------
    name
        Which experiment.
    images
        How many test images, evenly spread; by default all 10,000 on a GPU and 25 on a CPU. The attacks take as many as
        the paper at most. With fewer than 25 a run only shows that everything works, with less of all.
    samples
        Monte Carlo samples for each image and noise level, by default 10,000, and 1,000 with fewer than 25 images; the
        attacks have numbers of their own.
    device
        cpu, cuda (all GPUs here, or those of the Ray cluster), cuda:N, or auto: a GPU if there is one here.
    seed
        All random numbers derive from it.
    out
        Folder for results; one folder, one configuration.
    engine
        local, or ray: the same work on a Ray cluster.
    address
        Of the Ray cluster; without one, Ray is started here.
    minutes
        Stop after so long, keep what is done, and exit with status 3; the same command goes on.
    weights
        Safetensors file with other weights of the experiment's network: LeNet, the network for faces, or --model.
    model
        The network that figure-1 draws, as for `netmoments report`; for figure-5 alexnet, with --weights.
    layer
        The ReLU that figure-1 keeps: its number from 0 (the paper's l less 1), from the end if negative, or its name.
    gallery
        Folder of other networks for frontier: networks.py with NETWORKS, load(name) and images_for(name, images).
        Its code is run.
    """
    import os
    import time

    import torch
    from rich.console import Console

    from netmoments.report.arguments import device_named, layer_named
    from reproduction.experiment import FEW, FEW_SAMPLES, Settings, Unfinished, engine_named, experiments_named
    from reproduction.writing import draw, reproduce_and_write

    console = Console()
    names = experiments_named(name)
    if (model, layer) != ("lenet", "-1") and "figure-1" not in names and (name, model) != ("figure-5", "alexnet"):
        raise ValueError(f"--model and --layer are for figure-1; {name} has a network and a cut of its own")
    if weights is not None and name in ("seeds", "readings-2", "readings-2019", "moments-training", "all"):
        raise ValueError(f"--weights is for one experiment and its network; {name} trains or uses several")
    if gallery is not None and "frontier" not in names:
        raise ValueError(f"--gallery is for frontier; {name} does not use it")
    place = torch.device("cuda") if (engine, device) == ("ray", "cuda") else device_named(device)
    images = images if images is not None else 10_000 if place.type == "cuda" else 25
    settings = Settings(
        out=out,
        engine=engine_named(engine, place, address),
        device=place,
        images=images,
        samples=samples if samples is not None else 10_000 if images >= FEW else FEW_SAMPLES,
        seed=seed,
        data_dir=data_dir,
        weights=weights,
        model=model,
        layer=layer_named(layer),
        gallery=gallery,
        deadline=None if minutes is None else time.monotonic() + 60 * minutes,
    )
    try:
        page = reproduce_and_write(names, settings, show=lambda outcome: console.print(draw(outcome)))
    except Unfinished as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(UNFINISHED)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; what is finished is kept, the same command goes on") from None
    folders = ", ".join(f"{out / name}{os.sep}" for name in names)
    console.print(f"\nwritten: {page}, {folders}", markup=False, highlight=False)


@app.command
def train(
    network: str,
    *,
    data: str | None = None,
    data_dir: DataDir = None,
    seed: Seed = 0,
    device: Device = "auto",
    out: Path | None = None,
    sigma: AboveZero | None = None,
    folds: NotNegative = 0,
    moments: AboveZero | None = None,
) -> None:
    """Train a network of the zoo as its shipped weights were: lenet, faces or digits. Goes on where it was interrupted.

    Parameters
    ----------
    network
        Which: lenet, faces or digits, or faces-plain, by SGD on images as they are.
    data
        Dataset or path, by default the one of the recipe (mnist, fer2013, digits).
    seed
        Seed of the weights, the order of the images and their changes.
    out
        The weights, NETWORK.safetensors by default.
    sigma
        Of Gaussian noise to train against, by --folds or by --moments.
    folds
        Noisy copies of each image in a step.
    moments
        Train on the loss expected under the noise, with so many times its second-order term; 1 is the expectation.
    """
    import dataclasses

    from rich.console import Console

    from netmoments import data as datasets
    from netmoments.files import require_writable_folder
    from netmoments.report.arguments import accuracy_in_words, device_named
    from reproduction.training import RECIPES, checkpoint_of
    from reproduction.training import train as run_training

    if network not in RECIPES:
        raise ValueError(f"no recipe for {network!r}; there are {', '.join(RECIPES)}")
    recipe = dataclasses.replace(RECIPES[network], sigma=sigma or 0.0, folds=folds, moments=moments)
    place, console = device_named(device), Console()
    weights = Path(f"{network}.safetensors") if out is None else out
    if weights.suffix != ".safetensors" or weights.is_dir():
        raise ValueError(f"the weights are written to a .safetensors file, got --out {weights}")
    require_writable_folder(weights.parent)
    source = recipe.data if data is None else data
    training, held_out = (datasets.load(source, split=split, data_dir=data_dir) for split in ("train", "test"))

    def show(epoch: Epoch) -> None:
        console.print(
            f"epoch {epoch.number:3d} of {recipe.epochs}: loss {epoch.loss:.4f}, test accuracy {epoch.accuracy:.2%}, "
            f"{epoch.seconds:.1f} s"
        )

    if checkpoint_of(weights).exists():
        console.print(f"going on from {checkpoint_of(weights)}", markup=False)
    trained = run_training(recipe, training, held_out, weights=weights, seed=seed, device=place, on_epoch=show)
    console.print(f"written: {weights}", markup=False, highlight=False)
    console.print(accuracy_in_words(trained, held_out, training, place))


@app.command
def verdicts(*, results: Path = Path("results"), out: Path = Path("reproduction/README.md")) -> None:
    """Write what reproduces and what does not: published beside ours, a line for each table and figure.

    And README.md in the folder of results: which run made which.

    Parameters
    ----------
    results
        The folder with the experiments' summaries.
    out
        The page.
    """
    from netmoments.files import write_text_whole
    from reproduction.verdicts import read_records, readme, runs_page

    records = read_records(results)
    write_text_whole(out, readme(records))
    write_text_whole(results / "README.md", runs_page(records))
    print(f"written: {out}, {results / 'README.md'}")


@app.command
def engine(*, samples: AtLeastTwo = 10_000, seed: Seed = 0) -> None:
    """Show the engine: exact moments beside Monte Carlo, and the paper's series beside the exact kernel.

    Parameters
    ----------
    samples
        How many Monte Carlo samples to compare with.
    seed
        Seed of the random network, its input and the samples.
    """
    from rich.console import Console

    from reproduction import engine, figure_2

    console = Console()
    console.print(engine.draw(engine.run(engine.EngineConfig(samples=samples, seed=seed))))
    console.print()
    with console.status("the paper's grid, 441,000 points …"):
        comparison = figure_2.run()
    console.print(figure_2.draw(comparison))


def main() -> None:
    """Entry point of `python -m reproduction`; without arguments it shows its help."""
    if len(sys.argv) == 1:
        app.help_print()
    else:
        run(app)
