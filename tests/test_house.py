"""The house rules that a machine can check: data flows one way, the core needs only torch and numpy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "netmoments"
ORDER = [
    "files", "precision", "checks", "progress", "sweep", "normal", "gaussian", "relu", "affine_relu_affine", "paper",
    "data", "network", "linearize", "propagate", "sampling", "moments", "attacks", "experiments", "report", "cli",
    "__main__",
]  # fmt: skip
CORE = ORDER[: ORDER.index("experiments")]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_modules_import_only_from_their_left():
    for path in sorted(PACKAGE.rglob("*.py")):
        if path == PACKAGE / "__init__.py":
            continue
        here = ORDER.index(room(path))
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "netmoments" and parts[1] in ORDER:
                assert ORDER.index(parts[1]) <= here, (
                    f"{path.relative_to(PACKAGE)} imports {name}, which is to its right"
                )


def test_the_core_needs_only_torch_and_numpy():
    allowed = {"torch", "numpy", "netmoments", *sys.stdlib_module_names}
    # imported inside a function, and done without or asked for clearly where it is missing
    optional = {
        "progress": {"rich"},
        "sweep": {"pyarrow", "ray", "rich"},
        "data": {"PIL", "sklearn"},
        "network": {"safetensors"},
        "linearize": {"sklearn"},
    }
    for path in sorted(PACKAGE.rglob("*.py")):
        if room(path) in CORE:
            extra = {name.split(".")[0] for name in imports(path)} - allowed - optional.get(room(path), set())
            assert not extra, f"{path.relative_to(PACKAGE)} imports {extra}"


def test_importing_the_package_does_not_import_torch():
    code = "import sys, netmoments; sys.exit('torch' in sys.modules or netmoments.Gaussian is None)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_exists_and_is_documented():
    import netmoments

    for name in netmoments.__all__:
        assert getattr(netmoments, name).__doc__, name
    assert set(netmoments.__all__) <= set(dir(netmoments))
