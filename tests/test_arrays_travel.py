"""Arrays are what travels: the wire, the protocol and the coordinator have nothing of torch's in their hands."""

import ast
from pathlib import Path

import pytest

import talaria.protocol
import talaria.wire
import talaria_coordinator

ROOMS = [talaria.wire, talaria.protocol, talaria_coordinator]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_no_module_imports_torch(room):
    files = sorted(Path(room.__file__).parent.rglob("*.py"))
    assert len(files) > 5
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "torch" or name == "safetensors.torch"], path
