"""What `make test-wheel` asks of a release: of its two archives, and of an environment with the wheel alone.

python tests/wheel.py files build/dist      the archives, with packaging installed
python -I tests/wheel.py moments            in a fresh environment, without extras
python -I tests/wheel.py report             the same with the extras `data` and `report`
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path


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
    print(f"netmoments {nm.__version__}: moments, flips and attacks, without extras")


def report() -> None:
    """The demo, as a command."""
    import subprocess

    program = Path(sys.executable).with_name("netmoments")
    with tempfile.TemporaryDirectory() as folder:
        command = [str(program), "report", "digits", "digits", "--images", "8", "--attacks", "1", "--out", folder]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        page = Path(folder) / "report.html"
        assert page.stat().st_size > 10_000
        print(f"netmoments report digits digits --images 8: {page.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    _, what, *rest = sys.argv
    {"files": files, "moments": moments, "report": report}[what](*rest)
