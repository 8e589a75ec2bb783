"""The command line, a thin layer over `report`. Commands import what they need when they run, so help is instant."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Group, Parameter, validators

from netmoments import __version__
from netmoments.files import printable

if TYPE_CHECKING:
    from netmoments.report.arguments import StudyConfig, Subject
    from netmoments.report.noise_study import Study

NOISE = Group("What does noise do to it?", sort_key=1)
NETWORK = Group("What is this network?", sort_key=2)
MACHINE = Group("Is everything here?", sort_key=3)
HELP = """What a trained network does when its input is noisy.

A command takes a network, then images, and has a --help of its own:
  netmoments report digits digits
  netmoments report network.pt2 photos/ --sigma 0.1
  netmoments report mine.py:network images.npz --weights mine.safetensors"""

app = App(
    name="netmoments",
    help=HELP,
    help_format="plaintext",
    version=__version__,
    group_commands=MACHINE,
    suppress_keyboard_interrupt=False,  # `main` says what becomes of the work
)

MOST = 2**31
"""Counts, seconds and noise levels on the command line must be below this."""
Positive = Annotated[int, Parameter(validator=validators.Number(gte=1, lt=MOST))]
AtLeastTwo = Annotated[int, Parameter(validator=validators.Number(gte=2, lt=MOST))]
NotNegative = Annotated[int, Parameter(validator=validators.Number(gte=0, lt=MOST))]
Seed = Annotated[int, Parameter(validator=validators.Number(gte=0, lt=2**63))]


def above_zero(kind: Any, value: float) -> None:
    """Refuse NaN, of which any comparison is false, and what is not above 0."""
    if isinstance(value, float) and value != value:
        raise ValueError("Must be a number.")
    validators.Number(gt=0, lt=MOST)(kind, value)


AboveZero = Annotated[float, Parameter(validator=above_zero)]

Model = Annotated[
    str,
    Parameter(
        help="network.pt2; file.py:factory, which is code and is run; or one of digits, lenet, faces, alexnet, "
        "squeezenet."
    ),
]
Data = Annotated[
    str,
    Parameter(
        help="A folder of images (with a subfolder for each class, or none), IDX files, an .npz, mnist, fer2013 or "
        "digits."
    ),
]
Weights = Annotated[
    Path | None, Parameter(help="Safetensors file with the weights, for file.py:factory or a network of the zoo.")
]
Images = Annotated[Positive, Parameter(help="Use at most this many, evenly spread over the data.")]
Grey = Annotated[bool, Parameter(help="Turn images in colour to grey.", negative="")]
Mean = Annotated[
    str | None,
    Parameter(
        help="What the network's preprocessing subtracts: a number, or one for each channel (0.485,0.456,0.406)."
    ),
]
Std = Annotated[str | None, Parameter(help="What the preprocessing divides by, likewise.")]
Split = Annotated[str, Parameter(help="Which part of a dataset.")]
DataDir = Annotated[Path | None, Parameter(help="Folder with datasets; by default $NETMOMENTS_DATA, else the cache.")]
Size = Annotated[Positive | None, Parameter(help="Resize images to this many pixels a side.")]
Classes = Annotated[Path | None, Parameter(help="Text file with one class name a line.")]
Device = Annotated[str, Parameter(help="cpu, cuda, or auto: a GPU if there is one.")]
Out = Annotated[Path, Parameter(help="Folder for the files.")]
EXPECTED = (ValueError, TypeError, OSError, MemoryError, ImportError, FloatingPointError)
"""Errors whose message is for the user; anything else is a bug and shows where it happened."""


@app.command(group=NOISE, sort_key=0)
def report(
    model: Model,
    data: Data,
    *,
    sigma: AboveZero = 0.05,
    weights: Weights = None,
    images: Images = 500,
    tolerance: Annotated[float, Parameter(validator=validators.Number(gt=0, lt=0.5))] = 0.01,
    samples: AtLeastTwo = 10_000,
    rare: str = "24",
    seconds: AboveZero | None = None,
    method: str = "auto",
    covariance: Path | None = None,
    grey: Grey = False,
    mean: Mean = None,
    std: Std = None,
    split: Split = "test",
    data_dir: DataDir = None,
    size: Size = None,
    classes: Classes = None,
    scores: AtLeastTwo = 10,
    attacks: NotNegative = 4,
    layer: str = "-1",
    seed: Seed = 0,
    device: Device = "auto",
    engine: Literal["local", "ray"] | None = None,
    address: str | None = None,
    out: Out = Path("noise-report"),
) -> None:
    """How often noise changes the answers on your images, and which ones.

    Prints the accuracy over noise, the most fragile images and how rare
    flips are, for every network that runs, and writes report.html, a page to
    play with, report.json and images.csv. Ctrl-C keeps what is known.

    Example: netmoments report digits digits --sigma 0.1 --images 60

    Parameters
    ----------
    sigma
        Standard deviation of the noise on every pixel; pixels are in [0, 1].
    tolerance
        Half-width of the 95 % intervals of flip probabilities: 0.01 for one point.
    samples
        At most this many samples of each image for that.
    rare
        For how many of the images nearest to flipping the probability is found to 10 % of itself, however rare; or all.
    seconds
        Time for all; by default half a minute and a tenth of a second an image. The report says if it was too short.
    method
        Where means and deviations of scores are from: auto for the samples, or layerwise, sketch, two-stage, linear.
    covariance
        An .npy file with the noise's variance at every pixel, or with all its covariances; in place of sigma.
    scores
        How many of the largest scores of an image are shown where there are more than 20 classes.
    attacks
        For how many images noise is made that fools the network; see `netmoments attack`.
    layer
        The ReLU that these attacks keep exactly: its number, from either end, or its name; see `netmoments relus`.
    seed
        Seed of the samples.
    engine
        For large folders: in parts that are kept and resumed, on all GPUs here (local) or on Ray; no limit of time.
    address
        Address of a Ray cluster; without it one is started here.
    """
    _require_extra("report", "netmoments report", "jinja2", "PIL")
    if engine is not None:
        needed = ("pyarrow", "ray") if engine == "ray" else ("pyarrow",)
        _require_extra("sweeps", f"netmoments report --engine {engine}", *needed)
    from rich.console import Console

    from netmoments.files import require_writable_folder
    from netmoments.report import arguments
    from netmoments.report.noise_page import write_report
    from netmoments.report.noise_words import draw
    from netmoments.report.words import Provenance

    place = arguments.device_named(device)
    require_writable_folder(out)
    config = arguments.StudyConfig(
        sigma, tolerance, samples, arguments.count_or_all("--rare", rare), seconds, method,
        arguments.covariance_in(covariance), seed, scores=scores, device=place, attacks=attacks,
        layer=arguments.layer_named(layer),
    )  # fmt: skip
    subject = arguments.Subject(model, data, weights, images, split, data_dir, size, grey, mean, std)
    if engine is None:
        result = _study_at_once(subject, config, classes)
    else:
        result = _study_in_parts(subject, config, classes, out, engine, address)
    Console().print(draw(result))
    _print_paths(write_report(result, Provenance.of_this_run(place, seed), out, subject.title, subject.source))


def _study_at_once(subject: Subject, config: StudyConfig, classes: Path | None) -> Study:
    """The study in this process; what it will take is said on stderr first."""
    from rich.console import Console

    from netmoments.report.arguments import class_names_in
    from netmoments.report.noise_study import study

    network, images = subject.load()
    return study(network, images, config, class_names_in(classes), partial(Console(stderr=True).print, highlight=False))


def _study_in_parts(
    subject: Subject, config: StudyConfig, classes: Path | None, out: Path, engine: str, address: str | None
) -> Study:
    """The study as sweeps that are kept in the folder `out`."""
    from netmoments.report.arguments import class_names_in
    from netmoments.report.noise_sweep import engine_named, study_in_parts

    return study_in_parts(subject, config, class_names_in(classes), out, engine_named(engine, config.device, address))


@app.command(group=NOISE)
def attack(
    model: Model,
    data: Data,
    *,
    kind: Literal["sparse-smooth", "targeted", "pixels"] = "sparse-smooth",
    target: str | None = None,
    label: str | None = None,
    images: Images = 8,
    confidence: Annotated[float, Parameter(validator=validators.Number(gt=0, lt=1))] | None = None,
    gamma: Annotated[float, Parameter(validator=validators.Number(gte=0))] | None = None,
    sigma: AboveZero | None = None,
    beta: AboveZero | None = None,
    percent: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=100))] | None = None,
    rivals: Positive | None = None,
    iterations: Positive | None = None,
    polish: NotNegative = 100,
    samples: AtLeastTwo = 200,
    unbounded: Annotated[bool, Parameter(negative="")] = False,
    grey: Grey = False,
    mean: Mean = None,
    std: Std = None,
    layer: str = "-1",
    split: Split = "test",
    data_dir: DataDir = None,
    weights: Weights = None,
    size: Size = None,
    classes: Classes = None,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = Path("attack-report"),
) -> None:
    """Make noise that fools the network on your images.

    Asks the network what it says to noisy copies, prints the result, and
    writes attack.html, attack.json, images.csv, pictures.png and noise.npz.
    Where images have no labels, the network's own answers stand for them.

    Example: netmoments attack digits digits --kind targeted --target 3 --images 4

    Parameters
    ----------
    kind
        sparse-smooth: least ‖μ‖₁ + TV(μ); targeted: towards a class, every pixel a little; pixels: a few pixels only.
    target
        The class that the images are to be taken for, by number or name. Without it, any class but the label.
    label
        Attack only images of this class, by number or name.
    confidence
        The share of noisy copies that must be fooled; by default 0.95 for sparse-smooth and 0.9 for the others.
    gamma
        For sparse-smooth, in place of confidence: how far below 0 the expected margin must be.
    sigma
        Standard deviation of the noise on pixels in [0, 1]: for sparse-smooth the level itself, by default 1/255; for
        the others the largest that may be chosen, by default √2/255.
    beta
        For targeted and pixels: how much the mean of a pixel may change; by default 30/255 and 75/255.
    percent
        For pixels: the share of the pixels whose mean changes, chosen at random, from 0 to 100.
    rivals
        Without a target: how many of the best other classes are tried, 3 by default.
    iterations
        Steps on the formula, by default 400 for sparse-smooth and 200 for the others.
    polish
        Steps on the network itself, for sparse-smooth always, for the others where the formula is not enough; 0 for
        the formula alone.
    samples
        Noisy copies of each image that the network is asked about.
    unbounded
        Let pixels of image + μ leave [0, 1].
    layer
        The ReLU that is kept exactly: its number, from either end, or its name; see `netmoments relus`.
    seed
        Seed of the samples and of the chosen pixels.
    """
    _require_extra("report", "netmoments attack", "jinja2", "matplotlib", "PIL")
    from rich.console import Console

    from netmoments.files import require_writable_folder
    from netmoments.report.arguments import Subject, class_names_in, device_named, layer_named
    from netmoments.report.attack_page import write_attack
    from netmoments.report.attack_study import AttackOptions, Choice, conduct_attack
    from netmoments.report.attack_words import draw_attack
    from netmoments.report.words import Provenance

    place = device_named(device)
    options = AttackOptions(
        kind=kind, target=target, confidence=confidence, gamma=gamma, sigma=sigma, beta=beta, percent=percent,
        rivals=rivals, iterations=iterations,
    )  # fmt: skip
    bounds = None if unbounded else (0.0, 1.0)
    method = options.attack(bounds=bounds, layer=layer_named(layer), polish=polish, samples=samples, seed=seed)
    require_writable_folder(out)
    subject = Subject(model, data, weights, None, split, data_dir, size, grey, mean, std)
    choice = Choice(images, label, target)
    result = conduct_attack(*subject.load(), method, choice, class_names_in(classes), place)
    Console().print(draw_attack(result))
    _print_paths(write_attack(result, Provenance.of_this_run(place, seed), out, subject.title, subject.source))


@app.command(group=NETWORK)
def relus(
    model: str,
    data: str,
    *,
    weights: Path | None = None,
    split: Split = "test",
    data_dir: DataDir = None,
    size: Size = None,
) -> None:
    """Its ReLUs, by number and name: --layer of an attack takes either.

    Example: netmoments relus digits digits

    Parameters
    ----------
    model
        As for `report`.
    data
        As for `report`; the network is run on the first image.
    weights
        As for `report`.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from netmoments.network.model import relus
    from netmoments.report.arguments import Subject

    network, images = Subject(model, data, weights, None, split, data_dir, size).load()
    found = relus(network, images.images[:1])
    if not found:
        print(f"{printable(model)} has no ReLU (nn.ReLU, relu() and clamp(min=0) were looked for)")
        return
    table = Table("layer", "name", "shape", "units", box=box.SIMPLE_HEAD)
    for relu in found:
        table.add_row(str(relu.index), Text(printable(relu.name)), "×".join(map(str, relu.shape)), f"{relu.size:,}")
    Console().print(table)


@app.command(group=NETWORK)
def accuracy(
    model: str,
    data: str,
    *,
    weights: Path | None = None,
    data_dir: DataDir = None,
    mean: Mean = None,
    std: Std = None,
    device: Device = "auto",
) -> None:
    """How many test images it gets right.

    With and without those that are also in the training set.

    Example: netmoments accuracy digits digits

    Parameters
    ----------
    model
        As for `report`.
    data
        mnist, fer2013 or digits.
    weights
        As for `report`.
    """
    from netmoments import data as datasets
    from netmoments.network.loading import load_network
    from netmoments.report.arguments import accuracy_in_words, device_named, prepared

    training, held_out = (datasets.load(data, split=split, data_dir=data_dir) for split in ("train", "test"))
    network, held_out = prepared(load_network(model, weights), held_out, False, mean, std)
    print(accuracy_in_words(network, held_out, training, device_named(device)))


@app.command(group=MACHINE)
def download(dataset: str = "mnist", *, data_dir: Path | None = None) -> None:
    """Download MNIST into the cache or --data-dir, and check it.

    Example: netmoments download mnist --data-dir data

    Parameters
    ----------
    dataset
        mnist.
    data_dir
        Where to put it.
    """
    from netmoments.data import download_mnist

    if dataset != "mnist":
        raise ValueError(
            f"only mnist can be downloaded, got {dataset!r}; fer2013 is on Kaggle and needs an account there"
        )
    print(f"MNIST is in {download_mnist(data_dir)}")


@app.command(group=MACHINE)
def doctor() -> None:
    """What is installed, which device is used, what is slow and why.

    Example: netmoments doctor
    """
    from netmoments.doctor import installed_in_words, machine_in_words, speed_in_words

    for line in (*installed_in_words(EXTRAS), *machine_in_words(), *speed_in_words()):
        print(line)


EXTRAS = {
    "data": (("scikit-learn", "pillow"), "the digits, image files, k-means"),
    "report": (("jinja2", "matplotlib", "pillow"), "pages and pictures"),
    "sweeps": (("pyarrow", "ray"), "reports of many images in parts, Ray clusters"),
}
"""The packages that each extra brings, and what they are for."""


def _require_extra(extra: str, command: str, *packages: str) -> None:
    """Refuse a command whose packages are missing, before its work begins."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ImportError(
            f'{command} needs {" and ".join(missing)} for {EXTRAS[extra][1]}: pip install "netmoments[{extra}]"'
        )


def _print_paths(written: Mapping[str, Path]) -> None:
    """Say which files were written."""
    from rich.console import Console

    paths = printable(", ".join(map(str, written.values())))
    Console().print(f"\nwritten: {paths}", markup=False, highlight=False)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    _tell(f"warning: {message}")


def _tell(message: str) -> None:
    """Print to stderr line by line, with control characters (in names of files, say) spelt out."""
    print(*(printable(line) for line in message.split("\n")), sep="\n", file=sys.stderr)


def _in_words(error: Exception) -> str:
    """The message of an error; without the system's error number where the message is this library's."""
    ours = isinstance(error, OSError) and error.filename is None and error.strerror
    message = error.strerror if ours else str(error)  # type: ignore[attr-defined]
    return message or ("there is not enough memory" if isinstance(error, MemoryError) else type(error).__name__)


def main() -> None:
    """Entry point of the `netmoments` command."""
    run(app)


def run(app: App) -> None:
    """Run a command line; warnings, and errors that are for the user, are a line each, without a traceback."""
    warnings.showwarning = _show_warning
    try:
        app(sys.argv[1:])
    except KeyboardInterrupt as stopped:
        _tell(" ".join(map(str, stopped.args)) or "interrupted")
        sys.exit(130)
    except EXPECTED as error:
        _tell(f"error: {_in_words(error)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
