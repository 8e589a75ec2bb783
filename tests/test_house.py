"""The house rules that a machine can check: where things are, what they may import, and how large they get."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import netmoments
from tests.conftest import has_tests_for_a_gpu

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "netmoments"
ORDER = [
    "files", "precision", "checks", "progress", "memory", "normal", "covariances", "gaussian", "relu",
    "affine_relu_affine", "paper", "data", "network", "linearize", "rules", "propagate", "sampling", "moments",
    "flips", "attacks", "report", "doctor", "cli", "__main__",
]  # fmt: skip
"""Data flows one way: a room imports from its left."""
BEFORE_SWEEP = ["files", "progress"]
"""Sweeps stand beside the others; only reports over many images know them."""
CORE = [*ORDER[: ORDER.index("report")], "sweep"]
LONGEST, MOST_FILES = 600, 12

OPTIONAL = {
    "progress": {"rich"},
    "sweep": {"pyarrow", "ray", "rich"},
    "data": {"PIL", "sklearn"},
    "network": {"safetensors"},
    "linearize": {"sklearn"},
}
"""Imported inside a function, and done without or asked for clearly where it is missing."""

NOT_NEEDED = {
    "cyclopts", "rich", "safetensors", "sklearn", "PIL", "jinja2", "matplotlib", "pyarrow", "ray", "pytest",
    "hypothesis", "scipy", "cvxpy", "clarabel",
}  # fmt: skip
WITHOUT = """
import sys
from functools import partial
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_some(name, path=None, target=None):
    return None if name.partition(".")[0] in MISSING else find(name, path, target)
PathFinder.find_spec = partial(find_some)
"""
"""A program's beginning, after which `MISSING` packages are not there, for pytest neither."""

TESTED_ELSEWHERE = {
    "__main__": "tests/test_cli.py starts it",
    "relu/triton/forward_kernels": "tests/relu/triton/test_kernels.py, with the other kernels",
    "relu/triton/quadratic_form": "tests/relu/triton/test_kernels.py, with the kernels it launches",
}
"""Modules whose tests are in another file than the one of their name, and why."""
TESTS_OF_SEVERAL = ["test_house", "test_on_gpu", "test_gpu", "test_readme"]
"""Files of tests that are of no single module: of the package or a room as a whole, on a GPU, of the README."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """relu/triton/launch, say."""
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(path: Path) -> Iterator[tuple[str, str]]:
    """The import, and the room that it is from."""
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "netmoments" and len(parts) > 1 and parts[1] in [*ORDER, "sweep"]:
            yield name, parts[1]


def test_every_room_has_its_place():
    assert {room(path) for path in modules()} == {"__init__", "sweep", *ORDER}


def test_rooms_import_only_from_their_left():
    for path in modules():
        here = room(path)
        if here == "__init__":  # names are imported on first use
            continue
        allowed = [*BEFORE_SWEEP, "sweep"] if here == "sweep" else ORDER[: ORDER.index(here) + 1]
        allowed = [*allowed, "sweep"] if here == "report" else allowed
        for name, there in rooms_imported(path):
            assert there in allowed, f"{name_of(path)} imports {name}, which is not to its left"


def test_the_core_names_only_torch_and_numpy():
    allowed = {"torch", "numpy", "netmoments", *sys.stdlib_module_names}
    for path in modules():
        if room(path) in CORE and "triton" not in path.parts and path.name != "sketch_kernels.py":
            extra = {name.split(".")[0] for name in imports(path)} - allowed - OPTIONAL.get(room(path), set())
            assert not extra, f"{name_of(path)} imports {extra}"


def test_the_core_imports_only_torch_and_numpy_and_the_package_not_even_them():
    """In a process where nothing else can be imported."""
    names = [f"netmoments.{name_of(path).replace('/', '.')}" for path in modules() if room(path) in CORE]
    code = (
        f"MISSING = {NOT_NEEDED}\n{WITHOUT}\nimport importlib, netmoments\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        f"for name in {[name.removesuffix('.__init__') for name in names]}: importlib.import_module(name)\n"
        "for name in netmoments.__all__: getattr(netmoments, name)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr


def test_tests_for_a_gpu_are_collected_where_little_is_installed():
    """A machine that is lent for its GPU may have torch, numpy, pytest and safetensors, and nothing else."""
    missing = NOT_NEEDED - {"pytest", "safetensors", "jinja2"}  # jinja2 comes with torch
    code = (
        f"MISSING = {missing}\n{WITHOUT}\nimport pytest\n"
        "plugins = ['-p', 'no:cacheprovider', '-p', 'no:hypothesispytest']\n"  # the latter would not be there
        "sys.exit(pytest.main(['-m', 'gpu', 'tests', '--collect-only', '-q', *plugins]))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stdout + found.stderr
    files = {line.partition("::")[0] for line in found.stdout.splitlines() if "::" in line}
    marked = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py") if has_tests_for_a_gpu(path)}
    assert files == marked
    assert "tests/test_gpu.py" in files


def test_no_module_is_too_long():
    for path in modules():
        assert path.read_text().count("\n") <= LONGEST, f"{name_of(path)} has more than {LONGEST} lines"


def test_no_room_is_crowded():
    for name, files in Counter(room(path) for path in modules()).items():
        assert files <= MOST_FILES, f"{name} has {files} files"


def test_every_class_name_is_defined_once():
    places = defaultdict(list)
    for path in modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name_of(path))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice, f"classes of one name: {twice}"


def test_no_module_only_forwards():
    """But `__init__`, which is a room's door, and `__main__`."""
    for path in modules():
        if path.stem in ("__init__", "__main__"):
            continue
        body = tree(path).body
        made = [node for node in body if not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr)]
        made = [node for node in made if "__all__" not in ast.unparse(node)]
        assert made, f"{name_of(path)} only forwards names of other modules"


def test_only_rules_ask_which_rule_one_is():
    asked = re.compile(r"isinstance\([^()]*\b(PiecewiseLinear|Largest|Elementwise|BlackBox)\b")
    for path in modules():
        if room(path) != "rules":
            found = asked.search(path.read_text())
            assert found is None, f"{name_of(path)}: {found.group(0)}; give the rule a method instead"


def test_every_module_has_its_tests():
    for path in modules():
        name = name_of(path)
        if path.stem == "__init__" or name in TESTED_ELSEWHERE:
            continue
        tests = ROOT / "tests" / Path(name).parent / f"test_{path.stem}.py"
        assert tests.exists(), f"netmoments/{name}.py has no {tests.relative_to(ROOT)}"
    for name in TESTED_ELSEWHERE:
        assert (PACKAGE / f"{name}.py").exists(), f"TESTED_ELSEWHERE names {name}, which is gone"


def test_every_test_of_a_room_is_of_one_of_its_modules():
    rooms = [path for path in PACKAGE.rglob("*") if path.is_dir() and (path / "__init__.py").exists()]
    for folder in [PACKAGE, *rooms]:
        for tests in (ROOT / "tests" / folder.relative_to(PACKAGE)).glob("test_*.py"):
            module = folder / f"{tests.stem.removeprefix('test_')}.py"
            assert module.exists() or tests.stem in TESTS_OF_SEVERAL, (
                f"{tests.relative_to(ROOT)}: there is no {module.relative_to(ROOT)}"
            )


def test_the_wheel_holds_the_package_alone():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert build["wheel"] == {"packages": ["netmoments"]}
    for name in ("reproduction", "benchmarks", "tests"):
        assert name in build["sdist"]["include"]
        assert name not in {module.name for module in pkgutil.iter_modules([str(PACKAGE)])}
    for path in modules():
        outside = {name.split(".")[0] for name in imports(path)} & {"reproduction", "benchmarks", "tests"}
        assert not outside, f"{name_of(path)} imports {outside}, which is not installed"


@pytest.mark.parametrize("door", ["", ".attacks", ".data", ".propagate", ".rules", ".sweep"])
def test_every_public_name_exists_and_is_documented(door):
    module = importlib.import_module(f"netmoments{door}")
    assert module.__doc__
    for name in module.__all__:
        assert getattr(module, name).__doc__, name
    if not door:
        assert set(netmoments.__all__) <= set(dir(netmoments))
