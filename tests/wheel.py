"""What `make test-wheel` asks of a release: of its two archives, and of an environment with the wheel alone.

python tests/wheel.py files build/dist      the archives, with packaging installed
python -I tests/wheel.py moments            in a fresh environment, without extras
python -I tests/wheel.py report             the same with the extras `data` and `report`: the demo, and docs/start.md
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

START = Path(__file__).parent.parent / "docs" / "start.md"
MOST_LINES = 10
"""Of *Start*, from the installation to the report of a network of one's own."""


def files(folder: str) -> None:
    """One wheel and one sdist, with valid metadata and what each must hold, and no more."""
    from packaging.metadata import Metadata

    (wheel,), (sdist,) = Path(folder).glob("*.whl"), Path(folder).glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (described,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = Metadata.from_email(archive.read(described), validate=True)
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description
    assert {"netmoments/__init__.py", "netmoments/py.typed"} <= set(names), "py.typed is missing"
    roots = {name.partition("/")[0] for name in names}
    assert roots == {"netmoments", described.partition("/")[0]}, roots
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO", "tests/test_house.py"} <= held
    for path in (wheel, sdist):
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")


def moments() -> None:
    """Moments, a flip probability and an attack, from the installed package, with PyTorch and NumPy only."""
    import torch
    from torch import nn

    import netmoments as nm

    assert "site-packages" in nm.__file__, nm.__file__
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    noise = nm.Gaussian(torch.zeros(4), std=0.1)
    for method in ("auto", "layerwise", "sketch", "two-stage", "linear"):
        found = nm.output_moments(network, noise, method)
        assert found.mean.isfinite().all()
        assert found.covariance.shape == (3, 3)
    assert nm.flip_probability(network, noise).probability <= 1
    digits, image = nm.zoo.pretrained("digits"), torch.rand(1, 1, 8, 8)
    attack = nm.attacks.SparseSmooth(samples=100, polish=4)
    assert attack(digits, image, digits(image).argmax(1)).mu.isfinite().all()
    with tempfile.TemporaryDirectory() as folder:
        for command in ("report", "attack"):
            done = netmoments([command, "digits", "digits"], folder)
            assert done.returncode == 1, done.stdout
            assert 'pip install "netmoments[report]"' in done.stderr, done.stderr
        for command in ("--help", "doctor"):
            done = netmoments([command], folder)
            assert done.returncode == 0, done.stderr
    print(f"netmoments {nm.__version__}: moments, flips and attacks, without extras; commands say which they need")


def netmoments(words: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    """The installed command, in a folder."""
    program = Path(sys.executable).with_name("netmoments")
    return subprocess.run([program, *words], check=False, cwd=folder, capture_output=True, text=True)


def report() -> None:
    """The demo, as a command; and *Start*, to the letter."""
    with tempfile.TemporaryDirectory() as folder:
        done = netmoments(["report", "digits", "digits", "--images", "8", "--attacks", "1", "--out", folder], folder)
        assert done.returncode == 0, done.stderr
        page = Path(folder) / "report.html"
        assert page.stat().st_size > 10_000
        print(f"netmoments report digits digits --images 8: {page.stat().st_size / 1e3:.0f} kB")
    with tempfile.TemporaryDirectory() as folder:
        start(folder)


def start(folder: str) -> None:
    """Its programs and commands in their order, with a folder of photographs, up to the report of that network."""
    from PIL import Image

    photos = Path(folder) / "photos"
    photos.mkdir()
    for number in range(6):
        grey = Image.new("L", (8, 8))
        grey.putdata([(37 * number + 11 * place) % 256 for place in range(64)])
        grey.save(photos / f"{number}.png")
    blocks = re.findall(r"^```(python|console)\n(.*?)^```$", START.read_text(), re.M | re.S)
    lines, program, begun = 0, "", time.perf_counter()
    for language, text in blocks:
        lines += sum(bool(line.strip()) for line in text.splitlines())
        program += text if language == "python" else ""
        words = text.removeprefix("$ ").split()
        if language == "console" and words[0] == "netmoments":
            subprocess.run([sys.executable, "-I", "-c", program], check=True, cwd=folder, stdout=subprocess.DEVNULL)
            done = netmoments(words[1:], folder)
            assert done.returncode == 0, done.stderr
            break
    seconds = time.perf_counter() - begun
    assert (Path(folder) / "noise-report" / "report.html").exists(), blocks
    assert lines <= MOST_LINES, lines
    print(f"docs/start.md: {lines} lines and {seconds:.0f} s from an installed wheel to a report of its network")


if __name__ == "__main__":
    _, what, *rest = sys.argv
    {"files": files, "moments": moments, "report": report}[what](*rest)
