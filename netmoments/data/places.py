"""Where datasets are kept."""

from __future__ import annotations

import os
from pathlib import Path

from netmoments.data.mnist import holds_idx_images

HOW_TO_GET = {
    "mnist": "`netmoments download mnist` fetches it",
    "fer2013": "get fer2013.csv from Kaggle (Facial Expression Recognition Challenge) and put it, or an .npz of it "
    "called fer2013.npz, in one of these folders",
}


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/netmoments, or ~/.cache/netmoments."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "netmoments"


def find(name: str, data_dir: str | Path | None = None) -> Path:
    """Where a dataset is: the folder of MNIST's IDX files, or fer2013.npz or fer2013.csv.

    Looks in `data_dir`, then $NETMOMENTS_DATA, then the cache; in each, directly and in a subfolder called `name`.
    """
    if name not in HOW_TO_GET:
        raise ValueError(f"find: the datasets kept in files are {', '.join(HOW_TO_GET)}; got {name!r}")
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FileNotFoundError(f"there is no folder {data_dir} to look for {name} in")
    given = [Path(place) for place in (data_dir, os.environ.get("NETMOMENTS_DATA")) if place]
    folders = [folder for place in (*given, cache_folder()) for folder in (place, place / name)]
    for folder in folders:
        found = _held(name, folder)
        if found is not None:
            return found
    listed = "".join(f"\n  {folder}" for folder in folders)
    raise FileNotFoundError(
        f"{name} is not in any of{listed}\n{HOW_TO_GET[name]}; or name the folder it is in (data_dir, --data-dir)"
    )


def _held(name: str, folder: Path) -> Path | None:
    if name == "mnist":
        return folder if holds_idx_images(folder) else None
    files = (folder / "fer2013.npz", folder / "fer2013.csv")
    return next((path for path in files if path.is_file()), None)
