"""Python programs, each a process in a folder of its own that need not import torch again: forks of one that has."""

import json
import os
import subprocess
import sys

FORKS = """
import gc, json, os, runpy, sys, traceback
import torch
if "exports" in sys.argv:  # what an export imports and builds once
    from talaria_export.convert import onnx
    onnx.export_onnx(torch.nn.Linear(2, 2), torch.zeros(2, 2))

gc.collect(), gc.freeze()  # what stands here is no program's garbage
for line in sys.stdin:
    said, folder, script, *words = json.loads(line)
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    status = 1
    try:
        into = os.open(said, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(into, 1), os.dup2(into, 2)
        os.chdir(folder)
        sys.argv, sys.path[0], sys.stdin = [script, *words], os.path.dirname(script), open(os.devnull)
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os.write(into, f"\\nended with {status}".encode())
    os._exit(0)
"""


def run(commands, folder, *before, seconds=500):
    """What each of ``commands`` (name to ``(folder, script, *words)``) said, and its status: ``(said, status)`` by
    name. ``folder`` is for their notes; with ``"exports"`` the first process has made an export ``before``."""
    places = {name: folder / f"said-{number}" for number, name in enumerate(commands)}
    lines = [json.dumps([str(places[name]), *map(str, command)]) for name, command in commands.items()]
    done = subprocess.run(
        [sys.executable, "-c", FORKS, *before],
        input="\n".join(lines), capture_output=True, text=True, timeout=seconds, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name, place in places.items():
        said, _, status = place.read_text().rpartition("\nended with ")
        found[name] = said, int(status)
    return found
