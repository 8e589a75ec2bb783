"""The README's picture of a report: `python docs/images/report.py`. Needs Chromium and Pillow."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

PICTURE = Path(__file__).with_suffix(".png")
WIDTH, HEIGHT = 1080, 1420
REPORT = ["-m", "netmoments", "report", "digits", "digits", "--sigma", "0.05"]


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("install Chromium, which takes the picture")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        subprocess.run([sys.executable, *REPORT, "--out", str(out)], check=True)
        subprocess.run(
            [
                chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--user-data-dir={out / 'profile'}", f"--window-size={WIDTH},{HEIGHT}",
                f"--screenshot={out / 'page.png'}", (out / "report.html").as_uri(),
            ],
            check=True,
        )  # fmt: skip
        with Image.open(out / "page.png") as picture:
            colours = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            colours.save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
