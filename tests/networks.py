"""The ordinary networks that tests of several folders build, by the file beside the tests of programs."""

import importlib.util
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent / "sdk" / "programs"


def networks(name: str) -> ModuleType:
    """The file of this name there; its ``NETS`` are input shapes and what makes a network, by the network's name."""
    found = importlib.util.spec_from_file_location(f"talaria_{name}_nets", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
