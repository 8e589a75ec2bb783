"""Networks from `torch.export`: archives checked before torch sees them, and programs as networks.

`torch.export.save` writes a zip archive: the program as JSON, weights as plain bytes, example inputs as a pickle.
`torch.export.load` trusts all of it: it unpickles, evaluates sizes as Python expressions, looks operators up by any
name below `torch`, and makes Python source from the names of arguments and weights. A stranger's file could run any
code that way, so it is checked here first. Whatever is unknown is refused, pickles are read as plain tensors and
written anew, and torch gets an archive made here from what passed, never the file itself.
"""

from __future__ import annotations

import ast
import io
import itertools
import json
import math
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from netmoments.files import first_line, most_bytes, open_regular
from netmoments.precision import quietly


def load_exported(path: Path) -> ExportedNetwork:
    """The network in an archive of `torch.export.save`; nothing in it can run but operators on tensors."""
    archive = safe_archive(path)
    try:
        with quietly("The given buffer is not writable"):  # torch's own reading
            program = torch.export.load(archive).module()
    except Exception as error:
        raise ValueError(f"{path} could not be read as an exported network: {first_line(error)}") from error
    return ExportedNetwork(program)


MOST_MEMBERS = 100_000
"""Members that a zip archive may have."""
ADVICE = (
    "such a network can be given as file.py:factory, with its weights in a safetensors file, if you trust who made it"
)
"""What to do with a network that is refused."""

WEIGHTS, CONSTANTS = "data/weights/", "data/constants/"
PROGRAM, INPUTS = "models/model.json", "data/sample_inputs/model.pt"
CONFIGURATIONS = {f"{WEIGHTS}model_weights_config.json": WEIGHTS, f"{CONSTANTS}model_constants_config.json": CONSTANTS}
"""Members that list the files of a folder, with the folder."""
PAYLOAD = re.compile(r"data/weights/weight_\d+|data/constants/tensor_\d+")
"""Names of members that hold one tensor."""
SIGNS = ("archive_format", "archive_version", ".data/version", "byteorder", ".data/serialization_id")
"""Small members that say what kind of archive it is."""
EXTRA = "extra/"
"""The folder of texts that whoever exported the network added; they are left out."""


class RefusedArchiveError(ValueError):
    """An archive is refused. The message continues "{path} is refused: ", since the path is not known here."""


def safe_archive(path: Path) -> io.BytesIO:
    """The archive of an exported network, written anew from what was checked; a ValueError says what was refused."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = _members(archive, path.stat().st_size)
        return _written_anew(_checked(members))
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is not an archive written by torch.export.save, or is damaged: {error}") from None
    except (RefusedArchiveError, RecursionError) as error:
        raise ValueError(f"{path} is not a plain archive of torch.export.save, and is refused: {error}") from None


def _members(archive: zipfile.ZipFile, size: int) -> dict[str, bytes]:
    """The contents of the archive's members, by names without the folder that all of them are in."""
    require_plain_zip(archive, size)
    names = [entry.filename for entry in archive.infolist()]
    folder = names[0].partition("/")[0] + "/" if names else ""
    for name in names:
        if not name.startswith(folder):
            raise RefusedArchiveError(f"its member {name!r} is not in a folder with the others")
    short = {name.removeprefix(folder): name for name in names}
    return {key: archive.read(name) for key, name in short.items() if not key.startswith(EXTRA)}


def require_plain_zip(archive: zipfile.ZipFile, size: int) -> None:
    """Require that a zip file of `size` bytes holds uncompressed files, each once, with paths that stay inside it."""
    entries = archive.infolist()
    if len(entries) > MOST_MEMBERS:
        raise RefusedArchiveError(f"it has {len(entries):,} members, more than the {MOST_MEMBERS:,} allowed")
    name, times = Counter(entry.filename for entry in entries).most_common(1)[0] if entries else ("", 0)
    if times > 1:
        raise RefusedArchiveError(f"it has the member {name!r} {times} times")
    for entry in entries:
        name = entry.orig_filename
        if name != entry.filename or not name.isprintable() or re.search(r"^/|^\w:|\\|(^|/)\.\.?(/|$)|//", name):
            raise RefusedArchiveError(f"it has a member with the name {name!r}, which is no plain path inside it")
        if entry.is_dir():
            raise RefusedArchiveError(f"it has a folder as a member, {name!r}")
        if entry.flag_bits & 0x1:
            raise RefusedArchiveError(f"its member {name!r} is encrypted")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise RefusedArchiveError(f"its member {name!r} is compressed, which torch never does")
    total = sum(entry.file_size for entry in entries)
    if total > size:
        raise RefusedArchiveError(f"its members are {total:,} bytes together, in a file of {size:,}: they overlap")
    if size > most_bytes():
        raise RefusedArchiveError(
            f"it has {size:,} bytes, more than the {most_bytes():,} allowed (half of this machine's memory)"
        )


def _checked(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """The members that torch gets, after their contents were checked and cleaned."""
    _require_known(members)
    checked = {name: members[name] for name in SIGNS if name in members}
    for name, folder in CONFIGURATIONS.items():
        checked[name] = json.dumps(_checked_payloads(_parsed(members, name), folder, members, checked)).encode()
    checked[PROGRAM] = json.dumps(checked_program(_parsed(members, PROGRAM))).encode()
    checked[INPUTS] = _plain_pickle(members[INPUTS], "its example inputs")
    return checked


def _require_known(members: Mapping[str, bytes]) -> None:
    """Require that there are exactly the members that torch 2.11 writes, in this machine's byte order."""
    for name in members:
        if name.startswith((f"{CONSTANTS}custom_obj_", f"{CONSTANTS}opaque_obj_")):
            raise RefusedArchiveError(f"it holds a custom object ({name}), which runs code when it is loaded; {ADVICE}")
        if name in (f"{WEIGHTS}model.pt", f"{CONSTANTS}model.pt", "serialized_exported_program.json"):
            raise RefusedArchiveError(
                "it was written by an older torch, with pickled weights; export the network again"
            )
        if name not in (*SIGNS, *CONFIGURATIONS, PROGRAM, INPUTS) and not PAYLOAD.fullmatch(name):
            raise RefusedArchiveError(f"it has an unknown member {name!r}")
    for name in (*CONFIGURATIONS, PROGRAM, INPUTS, "archive_format"):
        if name not in members:
            raise RefusedArchiveError(f"it has no {name}; was it written by torch.export.save of torch 2.11 or later?")
    if members["archive_format"] != b"pt2":
        raise RefusedArchiveError(f"it says that its format is {members['archive_format'][:20]!r} instead of pt2")
    order = members.get("byteorder", sys.byteorder.encode())
    if order != sys.byteorder.encode():
        raise RefusedArchiveError(f"its byte order is {order[:20]!r}, that of this machine {sys.byteorder}")


def _parsed(members: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The JSON object in a member."""
    try:
        value = json.loads(members[name])
    except (ValueError, RecursionError) as error:
        raise RefusedArchiveError(f"its {name} is no JSON ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise RefusedArchiveError(f"its {name} is no JSON object")
    return value


def _written_anew(members: Mapping[str, bytes]) -> io.BytesIO:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(f"network/{name}", content)
    buffer.seek(0)
    return buffer


def _checked_payloads(
    configuration: dict[str, Any], folder: str, members: Mapping[str, bytes], checked: dict[str, bytes]
) -> dict[str, Any]:
    """The list of a folder's weights or constants, checked; their files are added to `checked`."""
    entries = configuration.get("config")
    if not isinstance(entries, dict):
        raise RefusedArchiveError(f"the list of files in {folder} has no config")
    for weight, entry in entries.items():
        _require_text(weight, "the name of a weight")
        name = f"{folder}{entry.get('path_name') if isinstance(entry, dict) else None}"
        if not PAYLOAD.fullmatch(name) or name not in members:
            raise RefusedArchiveError(f"{weight} is said to be in {name!r}, which is no file of weights in it")
        if entry.get("use_pickle"):
            checked[name] = _plain_pickle(members[name], f"the pickled tensor {weight}")
        elif not members[name] and math.prod(_sizes(weight, entry)) > 0:
            raise RefusedArchiveError(f"{weight} has no bytes for its shape {_sizes(weight, entry)}")
        else:
            checked.setdefault(name, members[name])
    return {"config": _walked(entries, "config")}


def _sizes(weight: str, entry: Mapping[str, Any]) -> list[int]:
    try:
        return [int(size["as_int"]) for size in entry["tensor_meta"]["sizes"]]
    except (KeyError, TypeError, ValueError):
        raise RefusedArchiveError(f"{weight} has no shape") from None


def _plain_pickle(content: bytes, what: str) -> bytes:
    """A pickle of plain tensors, numbers and containers of them, read as such and written anew."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            require_plain_zip(archive, len(content))
        value = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:
        reason = "" if not isinstance(error, RefusedArchiveError) else f" ({error})"
        raise RefusedArchiveError(
            f"{what} cannot be read as plain tensors (weights_only=True){reason}: a pickle can run code; {ADVICE}"
        ) from None
    _require_plain(value, what, itertools.count(1))
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


MOST_PARTS = 100_000
"""Parts that a pickle may have, counted each time they are met: n lists that each hold the next one twice have 2ⁿ."""


def _require_plain(value: Any, what: str, numbers: Iterator[int]) -> None:
    """Require tensors, numbers, texts and containers of these; `numbers` counts the parts that are met."""
    if next(numbers) > MOST_PARTS:
        raise RefusedArchiveError(f"{what} have more than the {MOST_PARTS:,} parts allowed")
    if isinstance(value, tuple | list):
        for part in value:
            _require_plain(part, what, numbers)
    elif type(value) is dict:
        for key, part in value.items():
            _require_text(key, f"a key in {what}")
            _require_plain(part, what, numbers)
    elif isinstance(value, str):
        _require_text(value, f"a text in {what}", TEXT)
    elif isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
            raise RefusedArchiveError(f"{what} hold a tensor that is not a plain one: {type(value).__name__}")
    elif value is not None and not isinstance(value, bool | int | float | complex):
        raise RefusedArchiveError(f"{what} hold {type(value).__name__}, which is neither a tensor nor a number")


WORD = re.compile(r"[\w.@+ -]*")
"""Names of weights and modules, versions, kinds of devices: nothing that could end a string in Python source."""
TEXT = re.compile(r"[\w.@ ,:;<>=+*/()\[\]-]*")
"""Texts that are arguments of operators, such as "bi,bj->bij"."""
NAMED = {"name", "as_name", "forward_arg_names"}
"""Keys of the program's JSON whose texts become variables in Python source."""
TEXTS = {"as_string", "as_strings"}
"""Keys whose texts are arguments of operators."""
EXPRESSIONS = {"expr_str"}
"""Keys whose texts torch evaluates as sizes."""
OPERATORS = {"target", "as_operator"}
"""Keys whose texts name an operator."""
TREES = {"in_spec", "out_spec"}
"""Keys whose texts say how arguments or outputs are nested."""
CUSTOM = {"as_custom_obj", "custom_obj", "custom_obj_values"}
"""Keys of custom objects, which are refused."""
DROPPED = {"guards_code"}
"""Keys that are left out: Python source that checks the sizes of inputs. The sizes themselves stay."""
KEPT = {"nn_module_stack"}
"""The only metadata of an operation that is kept: the modules that it was called in."""


def checked_program(program: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a program, with every text checked by what torch does with it, and without most metadata.

    Torch makes Python source from the names in it, evaluates its sizes, and calls its operators: names must be names,
    sizes expressions of whole numbers, and operators those that compute with tensors.
    """
    return _walked(program, "")


def _walked(value: Any, key: str) -> Any:
    """A copy of JSON that stands under this key, with its texts checked."""
    if isinstance(value, dict):
        if key == "metadata" and all(isinstance(text, str) for text in value.values()):
            return {name: _module_stack(text) for name, text in value.items() if name in KEPT}
        return {_checked_key(name, part): _walked(part, name) for name, part in value.items() if name not in DROPPED}
    if isinstance(value, list):
        return [_walked(part, key) for part in value]
    if isinstance(value, str):
        _require_by_key(value, key)
    return value


def _checked_key(key: str, value: Any) -> str:
    if key in CUSTOM and value:
        raise RefusedArchiveError(f"its program uses custom objects ({key}), which run code of their own; {ADVICE}")
    return _require_text(key, "a key of its program")


def _require_by_key(text: str, key: str) -> None:
    if key in NAMED:
        if text and not text.isidentifier():
            raise RefusedArchiveError(f"{text[:60]!r} is no name of a variable")
    elif key in OPERATORS:
        _require_operator(text)
    elif key in EXPRESSIONS:
        _require_expression(text)
    elif key in TREES:
        _require_tree(text)
    else:
        _require_text(text, f"{key} of its program", TEXT if key in TEXTS else WORD)


def _require_text(text: Any, what: str, allowed: re.Pattern[str] = WORD) -> str:
    if not isinstance(text, str) or not allowed.fullmatch(text):
        raise RefusedArchiveError(f"{what} is {str(text)[:60]!r}, which is more than plain words")
    return text


def _module_stack(text: Any) -> str:
    """The modules an operation was called in, as text: torch only splits it at commas and semicolons."""
    if not isinstance(text, str) or not text.isprintable():
        raise RefusedArchiveError("the modules of an operation are no text")
    return text


OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims)\.[a-zA-Z_]\w*\.\w+"
    r"|torch\.ops\.higher_order\.(wrap_with_set_grad_enabled|wrap_with_autocast|cond|while_loop|map_impl|scan"
    r"|associative_scan)"
    r"|torch\._functorch\.predispatch\.(lazy_load_decompositions|_vmap_increment_nesting|_vmap_decrement_nesting"
    r"|_add_batch_dim|_remove_batch_dim)"
    r"|torch\.(sym_[a-z_]+|_sym_[a-z]+)|math\.[a-z][a-z0-9]*"
    r"|_operator\.(add|sub|mul|truediv|floordiv|mod|pow|neg|pos|and_|or_|not_|lshift|rshift|eq|ne|lt|le|gt|ge|getitem)"
)
"""Operators that compute with tensors and sizes, and those that run a part of the program itself."""
SIDE_EFFECTS = {"from_file", "save", "_print", "warn", "Delete", "set_grad_enabled", "manual_seed", "seed"}
"""Operators among these that are refused, since they touch files or the state of the whole process."""


def _require_operator(target: str) -> None:
    if not OPERATOR.fullmatch(target) or target.split(".")[-2] in SIDE_EFFECTS:
        raise RefusedArchiveError(
            f"its program calls {target[:80]!r}, none of the operators that only compute with tensors; {ADVICE}"
        )


SIZES = {
    "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Mod", "Max", "Min", "Abs", "floor", "ceiling",
    "Piecewise", "ExprCondPair", "And", "Or", "Not", "Xor", "ITE", "Equality", "Unequality", "LessThan", "GreaterThan",
    "StrictLessThan", "StrictGreaterThan", "Eq", "Ne", "Le", "Lt", "Ge", "Gt", "FloorDiv", "ModularIndexing", "Where",
    "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv", "LShift", "RShift", "PowByNatural", "FloatPow",
    "FloatTrueDiv", "IntTrueDiv", "IsNonOverlappingAndDenseIndicator", "TruncToFloat", "TruncToInt", "RoundToInt",
    "RoundDecimal", "ToFloat", "Identity",
}  # fmt: skip
"""Functions that may occur in expressions of sizes."""
LONGEST = 10_000
"""Characters that such an expression may have."""
SYNTAX = (
    ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare,
    ast.Tuple, ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip
"""Python syntax that may occur in them."""


def _require_expression(text: str) -> None:
    """Require an expression of sizes, such as Mul(Integer(2), Symbol('s77', positive=True)), and no other Python."""
    try:
        tree = ast.parse(text, mode="eval") if len(text) <= LONGEST else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if tree is None or not all(map(_is_of_sizes, ast.walk(tree))) or _depth_of_powers(tree) > 2:
        raise RefusedArchiveError(f"{text[:80]!r} is no expression of sizes")


def _is_of_sizes(node: ast.AST) -> bool:
    """Whether one node of Python's syntax tree may stand in an expression of sizes."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in SIZES
    if isinstance(node, ast.Name):
        return node.id in SIZES or re.fullmatch(r"[a-z]{1,3}\d+|oo|int_oo|true|false", node.id) is not None
    if isinstance(node, ast.keyword):
        return node.arg is not None
    if isinstance(node, ast.Constant):
        text = node.value
        return isinstance(text, bool | int | float) or (isinstance(text, str) and bool(re.fullmatch(r"[\w.+-]+", text)))
    return isinstance(node, SYNTAX)


POWERS = {"Pow", "PowByNatural", "FloatPow", "LShift"}
"""Functions whose results grow exponentially with an argument."""
LARGEST_EXPONENT = 64
"""The largest number that may stand in an exponent."""


def _depth_of_powers(node: ast.AST) -> int:
    """How deeply powers are nested, since 9**9**9 takes forever; one with a large exponent counts as three."""
    deepest = max(map(_depth_of_powers, ast.iter_child_nodes(node)), default=0)
    exponent = None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift):
        exponent = node.right
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in POWERS:
        exponent = node.args[-1] if node.args else node
    if exponent is None:
        return deepest
    pieces = list(ast.walk(exponent))
    large = len(pieces) > 12 or any(_is_large(piece.value) for piece in pieces if isinstance(piece, ast.Constant))
    return deepest + (3 if large else 1)


def _is_large(exponent: Any) -> bool:
    try:
        return abs(float(exponent)) > LARGEST_EXPONENT
    except ValueError:  # the name of a symbol
        return False


CONTAINERS = {"builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"}
"""Containers that arguments and outputs may be nested in: those that need no other class."""


def _require_tree(text: str) -> None:
    """Require that arguments or outputs are nested in tuples, lists and dictionaries only."""
    try:
        version, tree = json.loads(text)
        plain = version == 1 and _is_plain_tree(tree)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        plain = False
    if not plain:
        raise RefusedArchiveError(
            f"its arguments or outputs are nested in something else than tuples, lists and dictionaries; {ADVICE}"
        )


def _is_plain_tree(node: dict[str, Any]) -> bool:
    if node["type"] is None:
        return node["context"] is None and node["children_spec"] == []
    keys = json.loads(node["context"])
    plain = keys is None or (isinstance(keys, list) and all(isinstance(k, str) and WORD.fullmatch(k) for k in keys))
    return node["type"] in CONTAINERS and plain and all(_is_plain_tree(child) for child in node["children_spec"])


class ExportedNetwork(nn.Module):
    """An exported program as a network that takes batches of any size.

    A program exported with a batch of 1 is mapped over the images, and larger batches than a program takes are split.
    """

    largest: int | None
    """The largest batch that the program takes; None if it has no bound."""

    def __init__(self, program: fx.GraphModule) -> None:
        super().__init__()
        self.program = program
        self.training = False
        batch = _batch_dimension(program)
        self.largest = _largest_value(batch) if isinstance(batch, torch.SymInt) else None
        self.batch = batch if isinstance(batch, int) else None
        if self.batch is not None and self.batch != 1:
            raise ValueError(
                f"the exported network takes batches of exactly {self.batch}; export it with a batch of 1, or with a "
                f"free one: torch.export.export(network, (example,), dynamic_shapes=({{0: torch.export.Dim.AUTO}},))"
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.largest is not None and len(x) > self.largest:
            return torch.cat([self.program(part) for part in x.split(self.largest)])
        if self.batch is None or x.shape[0] == 1:
            return self.program(x)
        return torch.func.vmap(lambda image: self.program(image.unsqueeze(0)).squeeze(0))(x)

    def train(self, mode: bool = True) -> Self:
        """Do nothing: the mode of a program was settled when it was exported."""
        return self


def _batch_dimension(program: fx.GraphModule) -> int | torch.SymInt | None:
    """The first dimension of a program's input: a symbol, or the only number that the program takes."""
    for node in program.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
            return node.meta["val"].shape[0] if node.meta["val"].dim() else None
    return None


def _largest_value(symbol: torch.SymInt) -> int | None:
    """The upper end of the range that a symbol was exported with; None if there is none."""
    bounds = symbol.node.shape_env.var_to_range.get(symbol.node.expr)
    return int(bounds.upper) if bounds is not None and getattr(bounds.upper, "is_Integer", False) else None
