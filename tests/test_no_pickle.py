"""No code that executes what it reads is reachable from the network, from saved state, or from a bundle.

The imports of all programs and of the protocol are walked in their source, those inside functions too.
"""

import ast
import pickle
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from talaria.data.safe_pickle import read_object
from talaria.errors import DataError

ROOT = Path(__file__).parents[1]
SOURCES = [ROOT / name for name in ("sdk", "coordinator", "edge_client", "export", "gateway")]
FORBIDDEN = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle5", "shelve",
    "multiprocessing.connection", "multiprocessing.managers", "xmlrpc", "yaml", "ruamel", "hickle", "klepto", "ZODB",
    "sqlalchemy.ext.serializer", "torch.distributed.rpc", "code", "codeop",
}  # fmt: skip
CALLS = {
    "torch.load", "torch.jit.load", "torch.package.PackageImporter", "torch.hub.load", "torch.export.load",
    "torch.serialization.load", "torch.storage._load_from_bytes", "runpy.run_module",
    "pandas.read_pickle", "runpy.run_path", "importlib.util.spec_from_file_location",
}  # fmt: skip
NUMPY = {"numpy.load", "numpy.lib.npyio.load", "numpy.lib.format.read_array", "numpy.lib.npyio.NpzFile"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
READER = "talaria.data.safe_pickle"
"""The one reader of a pickle: of the smartwatch file, whose sha256 is checked first. It admits data only."""


def modules():
    """All modules of the project: name -> file."""
    found = {}
    for source in SOURCES:
        for file in source.rglob("*.py"):
            parts = file.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


class Running(ast.NodeTransformer):
    """What runs: without `if TYPE_CHECKING`."""

    def visit_If(self, node):
        return None if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else self.generic_visit(node)


@cache
def trees():
    """Their sources, once in the process that looks at them: every test process imports this file."""
    return {name: Running().visit(ast.parse(file.read_text())) for name, file in MODULES.items()}


def imported(tree):
    """Dotted names that a module imports, anywhere in it but for types alone; a name imported from a module comes with
    the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def imports(name):
    """What a module of the project imports."""
    return frozenset(imported(trees()[name]))


def reached(*roots):
    """All modules of the project that the modules below ``roots`` can import."""
    todo = [name for name in MODULES if any(name == root or name.startswith(root + ".") for root in roots)]
    seen = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        names = imports(name)
        parents = {".".join(n.split(".")[:i]) for n in names for i in range(1, n.count(".") + 2)}
        todo += [n for n in parents if n in MODULES]
    return seen


def aliases(tree):
    """Local name -> what it stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return found


def dotted(node, known):
    """The full name of ``a.b.c``, or an empty text."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([known.get(node.id, node.id), *reversed(parts)])


def faults(tree):
    """What a module does that would execute, or let be executed, what it reads."""
    known = aliases(tree)
    for name in imported(tree):
        if any(name == bad or name.startswith(bad + ".") for bad in FORBIDDEN):
            yield f"imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (node.attr == "PickleType" or dotted(node, known) in CALLS):
            yield f"line {node.lineno}: uses {dotted(node, known) or node.attr}"
        if isinstance(node, ast.Name) and known.get(node.id) in CALLS:
            yield f"line {node.lineno}: uses {known[node.id]}"
        if not isinstance(node, ast.Call):
            continue
        plain = any(k.arg == "allow_pickle" and isinstance(k.value, ast.Constant) and k.value.value is False
                    for k in node.keywords)  # fmt: skip
        if dotted(node.func, known) in NUMPY and not plain:
            yield f"line {node.lineno}: {dotted(node.func, known)} without allow_pickle=False"
        if any(k.arg == "allow_pickle" for k in node.keywords) and not plain:
            yield f"line {node.lineno}: allow_pickle is not False"
        if isinstance(node.func, ast.Name) and node.func.id in BUILTINS and node.func.id not in known:
            yield f"line {node.lineno}: calls {node.func.id}"


@cache
def faults_of(name):
    """The faults of a module of the project."""
    return sorted(set(faults(trees()[name])))


def found_in(names):
    return {name: bad for name in sorted(names) if (bad := faults_of(name))}


@pytest.mark.parametrize(
    "roots",
    [
        ("talaria.wire", "talaria.protocol", "talaria_coordinator"),
        (
            "talaria_export.runtime.predictor",
            "talaria_export.bundle.bundle",
            "talaria_export.runtime.verify",
            "talaria_export.convert.quantize",
        ),
        ("talaria.federated.rounds", "talaria.algorithms", "talaria.aggregate", "talaria.model", "talaria.planning"),
    ],
    ids=["network and coordinator", "bundles", "learning"],
)
def test_nothing_reachable_executes_what_it_reads(roots):
    names = reached(*roots)
    assert len(names) > 5
    assert READER not in names
    assert found_in(names) == {}


def test_the_walk_covers_the_store_its_migrations_and_saved_states():
    """Migrations are loaded by their file, so nothing imports them; the walk takes whole packages for that reason."""
    names = reached("talaria_coordinator")
    wanted = {
        "talaria_coordinator.storage.store",
        "talaria_coordinator.storage.blobs",
        "talaria.protocol.state_codec",
        "talaria.wire.codec",
    }
    assert wanted <= names
    on_disk = {
        f.stem
        for f in (ROOT / "coordinator" / "talaria_coordinator").glob("storage/migrations/**/*.py")
        if f.stem != "__init__"
    }
    assert {name.rpartition(".")[2] for name in names if ".migrations." in name} == on_disk
    assert on_disk
    assert {"talaria_edge.storage.state", "talaria_edge.storage.tensor_files"} <= reached("talaria_edge")


def test_a_device_reaches_one_reader_of_a_pickle_which_admits_data_only():
    """`source = "smartwatch"` reads that data set's own file; nothing that came from elsewhere."""
    names = reached("talaria_edge")
    assert "talaria_edge.agent.agent" in names
    assert set(found_in(names)) <= {READER}
    users = {name for name in MODULES if READER in imports(name)}
    assert users == {"talaria.data.smartwatch"}


def test_the_whole_project_has_no_other():
    assert found_in(MODULES) == {READER: ["imports pickle"]}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "import dill as d", "from marshal import loads", "import shelve",
        "import torch\ntorch.load(f)", "from torch import load as quick\nquick(f)", "import torch as t\nt.jit.load(f)",
        "import numpy as np\nnp.load(f)", "import numpy as np\nnp.load(f, allow_pickle=True)",
        "from numpy import load\nload(f)", "def f(flag):\n    g(allow_pickle=flag)", "eval(text)", "__import__(name)",
        "from sqlalchemy.ext import serializer\nserializer.loads(f)", "import yaml\nyaml.safe_load(f)",
        "import torch\ntorch.serialization.load(f)", "from sqlalchemy import types\ntypes.PickleType()",
        "def f():\n    import pickle\n    return pickle",
    ],
)  # fmt: skip
def test_the_walk_finds_what_it_looks_for(line):
    assert list(faults(ast.parse(line)))


@pytest.mark.parametrize("line", ["import json", "import numpy as np\nnp.load(f, allow_pickle=False)", "model.eval()"])
def test_the_walk_finds_nothing_else(line):
    assert not list(faults(ast.parse(line)))


class Bomb:
    """Unpickled by a plain reader, this makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_the_one_reader_runs_nothing(tmp_path):
    path, file = tmp_path / "owned", tmp_path / "data.npy"
    array = np.empty((), object)
    array[()] = Bomb(path)
    np.save(file, array, allow_pickle=True)
    pickle.loads(pickle.dumps(Bomb(path)))
    assert path.exists()  # the bomb works
    path.unlink()
    with pytest.raises(DataError, match="asks for"):
        read_object(file.read_bytes(), "data.npy")
    assert not path.exists()
