"""Exported programs give what the modules they came from give, and a stranger's archive runs no code.

Honest archives load, crafted ones are refused, and every refusal says why.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.network import exported as exported_module
from netmoments.network.exported import ExportedNetwork, safe_archive
from netmoments.network.model import network_of
from netmoments.network.relu_calls import Cut
from tests.closeness import assert_close
from tests.network.small import POINT, small
from tests.networks import Block, seeded


@pytest.fixture(autouse=True)
def _torch_as_it_was():
    """Torch's own loading of a crafted archive stops with gradients off."""
    yield
    torch.set_grad_enabled(True)


class ForExport(nn.Module):
    """All kinds of ReLU calls, with a skip connection, for (2, 5, 5) images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.block = nn.Conv2d(2, 3, 3), Block(3)
        self.hidden, self.last = nn.Linear(27, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x)
        z.relu_()
        return self.last(torch.clamp(self.hidden(self.block(z).flatten(1)), min=0))


EXPORTS = {"fixed": (1, None), "dynamic": (3, ({0: torch.export.Dim("batch", min=1, max=64)},))}


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    return seeded(ForExport)


@pytest.fixture(scope="module", params=EXPORTS)
def exported(request, plain) -> torch.export.ExportedProgram:
    batch, dynamic = EXPORTS[request.param]
    example = torch.zeros(batch, 2, 5, 5, dtype=torch.float64)
    return torch.export.export(plain, (example,), dynamic_shapes=dynamic)


def images(count: int) -> Tensor:
    return torch.randn(count, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_an_exported_program_has_the_names_of_its_modules(exported, plain):
    wanted = ["network#0", "block.relu1", "block.relu2", "network#1"]
    for net in (plain, exported, exported.module(), network_of(exported, "test")):
        found = nm.relus(net, images(2))
        assert [relu.name for relu in found] == wanted
        assert [relu.shape for relu in found] == [(3, 3, 3)] * 3 + [(6,)]


def test_an_exported_program_is_cut_and_linearized_as_its_network(exported, plain):
    x = images(3)
    for relu, same in zip(nm.relus(exported, x), nm.relus(plain, x), strict=True):
        cut, expected = Cut(network_of(exported, "test"), relu), Cut(plain, same)
        assert_close(cut.stem(x), expected.stem(x), atol=1e-14)
        y = torch.rand(3, *relu.shape, dtype=torch.float64)
        assert_close(cut.head(x, y), expected.head(x, y), atol=1e-14)
        g, h = nm.two_stage(exported, x, relu.index), nm.two_stage(plain, x, relu.name)
        assert (g.D is None) == (h.D is None) == (relu.name in ("block.relu2", "network#1", "network#0"))
        for part in ("A", "c1", "B", "c2") if g.D is None else ("A", "c1", "B", "c2", "D"):
            assert_close(getattr(g, part), getattr(h, part), atol=1e-13, what=f"{relu.name} {part}")


def test_an_exported_program_inside_a_network(exported, plain):
    x = images(3)
    net = nn.Sequential(nn.Identity(), network_of(exported, "test")).eval()
    assert [relu.name for relu in nm.relus(net, x)] == [f"1#{number}" for number in range(4)]
    for layer in range(4):
        assert_close(nm.two_stage(net, x, layer).A, nm.two_stage(plain, x, layer).A, atol=1e-13)


def test_an_exported_program_is_saved_loaded_and_used(exported, plain, tmp_path):
    torch.export.save(exported, tmp_path / "network.pt2")
    net = nm.load_network(tmp_path / "network.pt2")
    assert isinstance(net, ExportedNetwork)
    assert not net.train().training
    x = images(4)
    assert_close(net(x), plain(x), atol=1e-14)
    noise = nm.Gaussian(x, std=0.05)
    for method in ("two-stage", "linear"):
        found, expected = nm.output_moments(net, noise, method), nm.output_moments(plain, noise, method)
        assert_close(found.mean, expected.mean, atol=1e-13)
        assert_close(found.covariance, expected.covariance, atol=1e-14)
    assert nm.output_moments(net, noise, nm.TwoStage("block.relu1")).cut == "block.relu1"
    sampled, reference = (nm.monte_carlo(which, noise, 500) for which in (net, plain))
    assert_close(sampled.variance, reference.variance, rtol=1e-10)


def test_an_exported_program_for_batches_of_three_is_refused():
    program = torch.export.export(seeded(small, torch.float32), (torch.zeros(3, 4),))
    with pytest.raises(ValueError, match=r"batches of exactly 3; export it with a batch of 1, or with a free one"):
        nm.relus(program, POINT)
    fixed = torch.export.export(seeded(small, torch.float32), (torch.zeros(1, 4),))
    with pytest.raises(ValueError, match=r"cannot take an input of shape \(5,\)"):
        nm.relus(fixed, torch.zeros(1, 5))


def test_an_exported_network_with_a_largest_batch(tmp_path):
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    batch = torch.export.Dim("batch", min=1, max=4)
    program = torch.export.export(net, (torch.rand(2, 6),), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = nm.load_network(tmp_path / "net.pt2")
    for form in (program, program.module(), loaded):
        assert network_of(form, "test").largest == 4
    x = torch.rand(10, 6)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), net(x))
    noise = nm.Gaussian(x, std=0.1)
    found, expected = (nm.output_moments(which, noise, "two-stage") for which in (loaded, net))
    torch.testing.assert_close(found.variance, expected.variance)


def test_an_exported_program_is_propagated_as_its_network(exported, plain, tmp_path):
    torch.export.save(exported, tmp_path / "network.pt2")
    loaded = nm.load_network(tmp_path / "network.pt2")
    inside = nn.Sequential(nn.Identity(), loaded).eval()
    noise = nm.Gaussian(images(2), std=0.1)
    methods = {
        "layerwise": (exported, inside, loaded),
        "sketch": (exported.module(), nm.NetworkModel(exported, images(1)), loaded),
        "auto": (exported.module(), inside, loaded),
    }
    for method, nets in methods.items():
        expected = nm.output_moments(plain, noise, method)
        for net in nets:
            found = nm.output_moments(net, noise, method)
            assert found.method == expected.method
            assert_close(found.mean, expected.mean, atol=1e-12, what=method)
            assert_close(found.covariance, expected.covariance, atol=1e-12, what=method)


Members = dict[str, bytes]
PROGRAM, INPUTS = "models/model.json", "data/sample_inputs/model.pt"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"


class Several(nn.Module):
    """Sizes that are expressions, texts for operators, a part without gradients, a constant, shared weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.table = torch.arange(4.0)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shifted = self.first(x) + self.table
        y = torch.div(self.second(self.relu(shifted)), 2.0, rounding_mode="trunc")
        return torch.einsum("bi,ij->bj", y, self.first.weight) * x.shape[0] ** 2


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("honest") / "network.pt2"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Several().eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(network, (torch.ones(2, 4),), dynamic_shapes=({0: batch},))
    torch.export.save(program, path, extra_files={"notes.txt": 'what "we" did'})
    return path


def members_of(path: Path) -> Members:
    with zipfile.ZipFile(path) as file:
        return {name.partition("/")[2]: file.read(name) for name in file.namelist()}


def written(path: Path, members: Members) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(f"network/{name}", content)
    return path


def edited(members: Members, name: str, change: Callable[[Any], None]) -> Members:
    document = json.loads(members[name])
    change(document)
    return {**members, name: json.dumps(document).encode()}


def test_an_honest_archive_gives_the_network_that_was_exported(honest, tmp_path):
    x = torch.rand(5, 4)
    expected = torch.export.load(honest).module()(x)
    assert torch.equal(nm.load_network(honest)(x), expected)
    assert torch.equal(nm.load_network(written(tmp_path / "again.pt2", members_of(honest)))(x), expected)
    assert nm.load_network(honest).largest == 64
    assert [relu.name for relu in nm.relus(nm.load_network(honest), x)] == ["relu"]


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s77', positive=True, integer=True)",
        "Add(Mul(Integer(2), Symbol('s0', integer=True)), Integer(-1))",
        "Pow(Add(Symbol('s0'), Pow(Symbol('u1'), Integer(2))), Rational(1, 2))",
        "FloatPow(ToFloat(Symbol('s0', integer=True)), Float('0.5', precision=53))",
        "PowByNatural(Integer(2), Symbol('s0', positive=True, integer=True))",
        "FloorDiv(Symbol('s0'), Integer(2))",
        "LessThan(Symbol('s0'), Max(Integer(3), Float('0.5', precision=53)))",
        "2*s0 + (s1 - 1)//2 <= 4096",
        "-s0**2",
        "oo",
    ],
)
def test_sizes_that_honest_programs_have(honest, tmp_path, text):
    safe_archive(written(tmp_path / "a.pt2", set_first("expr_str", text)(members_of(honest))))


def test_what_torch_gets_is_made_anew(honest):
    """It has neither the file's pickle, nor stack traces, nor the texts that were put beside the program."""
    before, after = members_of(honest), members_of(safe_archive(honest))
    assert "extra/notes.txt" in before
    assert "extra/notes.txt" not in after
    assert b"stack_trace" in before[PROGRAM]
    assert b"stack_trace" not in after[PROGRAM]
    assert b"nn_module_stack" in after[PROGRAM]
    for name in before:
        if "/weight_" in name:
            assert after[name] == before[name]


class Touching:
    """An object in a stranger's pickle, whose unpickling makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def doubled(times: int) -> list[Any]:
    """A list that holds one list twice, which holds one list twice, and so on: few bytes and 2ⁿ parts."""
    found: list[Any] = []
    for _ in range(times):
        found = [found, found]
    return found


def first_with(document: Any, key: str) -> dict[str, Any]:
    """The first object in JSON that has a key."""
    if isinstance(document, dict) and key in document:
        return document
    parts = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    for part in parts:
        try:
            return first_with(part, key)
        except LookupError:
            continue
    raise LookupError(key)


def in_inputs(members: Members, proof: Path) -> Members:
    return {**members, INPUTS: saved(((torch.ones(2, 4), Touching(proof)), {}))}


def in_a_weight(members: Members, proof: Path) -> Members:
    def pickled(document: Any) -> None:
        next(iter(document["config"].values())).update(path_name="weight_99", use_pickle=True)

    return {**edited(members, WEIGHTS, pickled), "data/weights/weight_99": saved(Touching(proof))}


def in_a_constant(members: Members, proof: Path) -> Members:
    def pickled(document: Any) -> None:
        next(iter(document["config"].values())).update(path_name="tensor_99", use_pickle=True)

    return {**edited(members, CONSTANTS, pickled), "data/constants/tensor_99": saved(Touching(proof))}


def as_an_object(members: Members, proof: Path) -> Members:
    def custom(document: Any) -> None:
        next(iter(document["config"].values())).update(path_name="opaque_obj_0", use_pickle=True)

    return {**edited(members, CONSTANTS, custom), "data/constants/opaque_obj_0": pickle.dumps(Touching(proof))}


def in_a_size(members: Members, proof: Path) -> Members:
    code = f"__import__('os').mkdir({str(proof)!r})"
    return edited(members, PROGRAM, lambda document: first_with(document, "expr_str").update(expr_str=code))


def in_an_operator(members: Members, proof: Path) -> Members:
    """An operator of torch itself that maps a file, and makes it if need be."""

    def mapped(document: Any) -> None:
        nodes = document["graph_module"]["graph"]["nodes"]
        node = next(node for node in nodes if node["target"] == "torch.ops.aten.relu.default")
        arguments = {"filename": {"as_string": str(proof)}, "shared": {"as_bool": True}, "size": {"as_int": 8}}
        inputs = [{"name": name, "arg": value, "kind": 1} for name, value in arguments.items()]
        node.update(target="torch.ops.aten.from_file.default", inputs=inputs)

    return edited(members, PROGRAM, mapped)


def in_a_name(members: Members, proof: Path) -> Members:
    """torch puts the names of weights into Python source, between quotation marks."""
    code = f'training"),getattr(__import__("os"),"mkdir")("{proof}"),getattr(self,"training'
    assert "." not in code
    old, new = b'"first.bias"', json.dumps(code).encode()
    return {name: content.replace(old, new) for name, content in members.items()}


CRAFTED = {
    "example inputs": (in_inputs, "its example inputs cannot be read as plain tensors"),
    "weight": (in_a_weight, "the pickled tensor first.weight cannot be read as plain tensors"),
    "constant": (in_a_constant, "the pickled tensor table cannot be read as plain tensors"),
    "object": (as_an_object, "a custom object"),
    "size": (in_a_size, "is no expression of sizes"),
    "operator": (in_an_operator, "its program calls 'torch.ops.aten.from_file.default'"),
    "name": (in_a_name, "the name of a weight is"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_archive_runs_nothing(honest, tmp_path, case):
    """Torch itself runs the code in each of them, which shows that the refusal matters."""
    craft, message = CRAFTED[case]
    proof = tmp_path / "proof"
    path = written(tmp_path / "crafted.pt2", craft(members_of(honest), proof))
    with pytest.raises(ValueError, match=rf"crafted\.pt2 is not a plain archive .*refused: .*{re.escape(message)}"):
        nm.load_network(path)
    assert not proof.exists()
    with suppress(Exception):  # whether it then works is not the point
        torch.export.load(path).module()(torch.ones(2, 4))
    assert proof.exists(), "this archive would not run code: the test shows nothing"


def with_json(name: str, change: Callable[[Any], None]) -> Callable[[Members], Members]:
    return lambda members: edited(members, name, change)


def set_first(key: str, value: Any) -> Callable[[Members], Members]:
    return with_json(PROGRAM, lambda document: first_with(document, key).update({key: value}))


def tree(kind: str, context: Any) -> str:
    leaf = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": kind, "context": json.dumps(context), "children_spec": [leaf]}])


REFUSED: dict[str, tuple[Callable[[Members], Members], str]] = {
    "unknown member": (lambda m: {**m, "data/other.bin": b""}, "an unknown member 'data/other.bin'"),
    "compiled code": (lambda m: {**m, "data/aotinductor/model/a.so": b""}, "an unknown member"),
    "second program": (lambda m: {**m, "models/other.json": m[PROGRAM]}, "an unknown member 'models/other.json'"),
    "older": (lambda m: {**m, "data/weights/model.pt": b""}, "by an older torch"),
    "no program": (lambda m: {k: v for k, v in m.items() if k != PROGRAM}, r"no models/model\.json"),
    "another format": (lambda m: {**m, "archive_format": b"pt3"}, "format is b'pt3' instead of pt2"),
    "byte order": (lambda m: {**m, "byteorder": b"middle"}, "its byte order is b'middle'"),
    "no JSON": (lambda m: {**m, PROGRAM: b"{"}, "is no JSON"),
    "a list": (lambda m: {**m, PROGRAM: b"[]"}, "is no JSON object"),
    "deep": (lambda m: {**m, PROGRAM: b"[" * 100_000}, "RecursionError"),
    "deep trees": (set_first("graph_module", json.loads('{"a":' * 900 + "1" + "}" * 900)), "recursion"),
    "inputs": (lambda m: {**m, INPUTS: pickle.dumps(1)}, "example inputs cannot be read as plain tensors"),
    "inputs with keys": (lambda m: {**m, INPUTS: saved(((), {'a"b': torch.ones(1)}))}, "a key in its example inputs"),
    "endless inputs": (lambda m: {**m, INPUTS: saved(((doubled(40),), {}))}, "more than the 100,000 parts allowed"),
    "sparse inputs": (lambda m: {**m, INPUTS: saved(((torch.ones(2, 2).to_sparse(),), {}))}, "not a plain one"),
    "module": (set_first("target", "torch.os.mkdir"), "none of the operators that only compute"),
    "loader": (set_first("target", "torch.ops.load_library"), "none of the operators"),
    "other operators": (set_first("target", "torch.ops.mylib.do.default"), "none of the operators"),
    "any function": (set_first("target", "torch.load"), "none of the operators"),
    "attribute": (set_first("target", "_operator.methodcaller"), "none of the operators"),
    "attribute of a size": (set_first("expr_str", "s0.__class__"), "no expression of sizes"),
    "text in a size": (set_first("expr_str", "Add('print(1)', 1)"), "no expression of sizes"),
    "comprehension": (set_first("expr_str", "[s0 for s0 in (1,)]"), "no expression of sizes"),
    "endless size": (set_first("expr_str", "9**9**9**9"), "no expression of sizes"),
    "large power": (set_first("expr_str", "Pow(Integer(9), Integer(999999999))"), "no expression of sizes"),
    "large shift": (set_first("expr_str", "LShift(Integer(1), Integer(99999999999))"), "no expression of sizes"),
    "keywords": (set_first("expr_str", "Symbol('s0', **s1)"), "no expression of sizes"),
    "long size": (set_first("expr_str", "1+" * 9000 + "1"), "no expression of sizes"),
    "argument": (set_first("forward_arg_names", ["x=print()"]), "no name of a variable"),
    "text": (set_first("as_string", "x'+print()+'"), "as_string of its program is"),
    "weight's name": (
        with_json(WEIGHTS, lambda d: d["config"].update({'a"b': d["config"].pop("first.weight")})),
        "the name of a weight",
    ),
    "place": (
        with_json(WEIGHTS, lambda d: d["config"]["first.weight"].update(path_name="../../etc/passwd")),
        "no file of weights",
    ),
    "absent weight": (
        with_json(WEIGHTS, lambda d: d["config"]["first.weight"].update(path_name="weight_77")),
        "no file of weights",
    ),
    "shape without bytes": (
        lambda m: {
            **edited(m, WEIGHTS, lambda d: d["config"]["first.bias"].update(path_name="weight_88")),
            "data/weights/weight_88": b"",
        },
        r"first\.bias has no bytes for its shape \[4\]",
    ),
    "class of outputs": (set_first("out_spec", tree("collections.defaultdict", [])), "nested in something else"),
    "key of outputs": (set_first("out_spec", tree("builtins.dict", ["a'b"])), "nested in something else"),
    "import": (
        set_first("out_spec", tree("builtins.dict", {"__enum__": True, "fqn": "antigravity:x", "name": "y"})),
        "nested in something else",
    ),
    "objects": (set_first("custom_obj_values", {"a": {"name": "b", "class_fqn": "c"}}), "uses custom objects"),
    "key": (set_first("tensor_values", {"a'b": 1}), "a key of its program"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_does_not_write_is_refused(honest, tmp_path, case):
    change, message = REFUSED[case]
    path = written(tmp_path / "odd.pt2", change(members_of(honest)))
    with pytest.raises(ValueError, match=rf"odd\.pt2 is not a plain archive .*{message}"):
        safe_archive(path)


def test_a_plain_pickled_tensor_is_taken_for_what_it_is(honest, tmp_path):
    """Torch would unpickle it without restrictions; what it gets was pickled here."""
    members = members_of(honest)
    wanted = torch.export.load(honest).state_dict["first.bias"].clone()
    members = edited(
        members, WEIGHTS, lambda d: d["config"]["first.bias"].update(path_name="weight_5", use_pickle=True)
    )
    path = written(tmp_path / "a.pt2", {**members, "data/weights/weight_5": saved(nn.Parameter(wanted.detach()))})
    x = torch.rand(3, 4)
    assert torch.equal(nm.load_network(path)(x), nm.load_network(honest)(x))


def zip_of(path: Path, names: list[str], **options: Any) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            entry = zipfile.ZipInfo(name)
            for key, value in options.items():
                setattr(entry, key, value)
            file.writestr(entry, b"a" * 1000)
    return path


@pytest.mark.parametrize("name", ["/a", "../a", "n/../../a", "n/./a", "n\\a", "C:/a", "n//a", "n/a\x1b[2J", "n/a\n"])
def test_odd_names_in_an_archive(tmp_path, name):
    path = zip_of(tmp_path / "odd.pt2", ["n/ok", name])
    with pytest.raises(ValueError, match="which is no plain path inside it") as caught:
        safe_archive(path)
    assert str(caught.value).isprintable()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_odd_members_of_an_archive(tmp_path):
    def refused(path: Path, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            safe_archive(path)

    refused(zip_of(tmp_path / "twice.pt2", ["n/a", "n/a"]), "the member 'n/a' 2 times")
    refused(zip_of(tmp_path / "small.pt2", ["n/a"], compress_type=zipfile.ZIP_DEFLATED), "is compressed")
    refused(zip_of(tmp_path / "folders.pt2", ["n/a", "other/b"]), "'other/b' is not in a folder with the others")
    refused(zip_of(tmp_path / "folder.pt2", ["n/a/"]), "a folder as a member")
    encrypted = bytearray(zip_of(tmp_path / "locked.pt2", ["n/a"]).read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        encrypted[encrypted.index(mark) + place] |= 1
    (tmp_path / "locked.pt2").write_bytes(encrypted)
    refused(tmp_path / "locked.pt2", "is encrypted")
    (tmp_path / "cut.pt2").write_bytes(zip_of(tmp_path / "whole.pt2", ["n/a"]).read_bytes()[:-40])
    refused(tmp_path / "cut.pt2", "is not an archive written by torch.export.save, or is damaged")
    refused(zip_of(tmp_path / "empty.pt2", []), "it has no data/weights")


def test_members_that_share_their_bytes(tmp_path):
    """A small file whose directory names the same bytes a thousand times."""
    path = zip_of(tmp_path / "bomb.pt2", ["n/a000"])
    content = path.read_bytes()
    start = content.index(b"PK\x01\x02")
    end = content.index(b"PK\x05\x06")
    entry = content[start:end]
    directory = b"".join(entry.replace(b"n/a000", b"n/a%03d" % number) for number in range(999))
    tail = bytearray(content[end:])
    tail[8:12] = (999).to_bytes(2, "little") * 2
    tail[12:16] = len(directory).to_bytes(4, "little")
    path.write_bytes(content[:start] + directory + bytes(tail))
    with pytest.raises(ValueError, match=r"999,000 bytes together, in a file of .*: they overlap"):
        safe_archive(path)


def test_limits_of_an_archive(honest, tmp_path, monkeypatch):
    monkeypatch.setattr(exported_module, "MOST_MEMBERS", 3)
    with pytest.raises(ValueError, match="members, more than the 3 allowed"):
        safe_archive(honest)
    monkeypatch.undo()
    monkeypatch.setattr(exported_module, "most_bytes", lambda: 1000)
    with pytest.raises(ValueError, match="bytes, more than the 1,000 allowed"):
        safe_archive(honest)


def test_an_archive_that_is_a_fifo(tmp_path):
    os.mkfifo(tmp_path / "network.pt2")
    with pytest.raises(OSError, match="is a FIFO, and not a regular file"):
        safe_archive(tmp_path / "network.pt2")
    with pytest.raises(FileNotFoundError, match="no exported network at"):
        nm.load_network(tmp_path / "network.pt2")
