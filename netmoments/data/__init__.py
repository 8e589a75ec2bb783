"""Images with labels, from named datasets or from your own files; `load` reads them all."""

from netmoments.data.datasets import DEFAULT_MIRROR, DownloadError, cache_folder, download_mnist, find, load
from netmoments.data.formats import read_idx
from netmoments.data.images import FER2013_CLASSES, LabelledImages, Skipped, duplicates_of

__all__ = [
    "DEFAULT_MIRROR",
    "FER2013_CLASSES",
    "DownloadError",
    "LabelledImages",
    "Skipped",
    "cache_folder",
    "download_mnist",
    "duplicates_of",
    "find",
    "load",
    "read_idx",
]
