"""Programs where torch cannot be imported."""

import subprocess
import sys

TORCHLESS = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "functorch"):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Refused())
"""
COMMAND = "from talaria.cli.main import main; main()"


def torchless(*words, **how):
    """``talaria`` with these words, as a process."""
    return subprocess.Popen([sys.executable, "-c", TORCHLESS + COMMAND, *words], text=True, **how)
