"""Images with labels, from named datasets or from your own files: `load` is the one door."""

from netmoments.data.download import DEFAULT_MIRROR, DownloadError, download_mnist
from netmoments.data.duplicates import duplicates_of
from netmoments.data.fer2013 import FER2013_CLASSES
from netmoments.data.idx import read_idx
from netmoments.data.images import LabelledImages, Skipped
from netmoments.data.loading import load
from netmoments.data.places import cache_folder, find

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
