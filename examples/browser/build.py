"""One HTML file that classifies recorded windows with a personal model, in the browser, without a server.

    python examples/browser/build.py me.talaria recorded.npy -o page.html

``recorded.npy`` holds windows (N, channels, size), or, for a bundle made with ``--stride``, one raw recording (time,
channels) of any length, which the model cuts and normalizes by itself. Needs npm, once, to fetch onnxruntime-web. The
page opens from the disk: the runtime, the model and the recording are inside it. It can load other bundles too, and
checks the SHA-256 of all that they hold.
"""

import argparse
import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from talaria import durable, npz
from talaria.errors import BundleError, DataError, so_that_it_can_be_written
from talaria_export import open_bundle
from talaria_export.bundle.preprocess import inputs_of

HERE = Path(__file__).parent


def runtime(cache: Path) -> Path:
    """The folder of onnxruntime-web's files, fetched into ``cache`` where they are not there yet."""
    dist = cache / "node_modules" / "onnxruntime-web" / "dist"
    if not (dist / "ort.wasm.bundle.min.mjs").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "package.json").write_bytes((HERE / "package.json").read_bytes())
        command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(cache)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            sys.exit("npm is not installed; on Debian: apt install npm")
        except subprocess.CalledProcessError as problem:
            sys.exit(f"npm could not fetch onnxruntime-web:\n{problem.stderr}")
    return dist


def page(bundle: Path, recorded: np.ndarray, dist: Path) -> str:
    """The HTML text. ``recorded`` is what the bundle takes: windows (N, ...), or one recording (time, channels)."""
    try:
        given = inputs_of(open_bundle(bundle).steps, recorded)
    except DataError as problem:
        sys.exit(f"{bundle}: {problem}")
    data = {
        "wasm": _base64((dist / "ort-wasm-simd-threaded.wasm").read_bytes()),
        "bundle": _base64(bundle.read_bytes()),
        "recorded": _base64(given.astype("<f4").tobytes()),
    }
    parts = {
        "data": json.dumps(data),
        "runtime": (dist / "ort.wasm.bundle.min.mjs").read_text("utf-8"),
        "reader": (HERE / "bundle.mjs").read_text("utf-8"),
    }
    text = (HERE / "page.html").read_text("utf-8")
    for name, part in parts.items():
        text = text.replace("{{" + name + "}}", part.replace("</script", "<\\/script"))
    return text


def save(out: Path, text: str) -> None:
    """Write the page, whole or not at all."""
    try:
        durable.write(out, text.encode(), mode=0o644)
    except OSError as why:
        sys.exit(f"--out {out}: cannot be written ({why.strerror}); {so_that_it_can_be_written(why)}")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="the personal model, a .talaria file")
    parser.add_argument("recorded", type=Path, help="windows (N, ...) or a recording (time, channels), as .npy")
    parser.add_argument("-o", "--out", type=Path, default=Path("page.html"), help="the page to write")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "talaria" / "browser-example"
    parser.add_argument("--cache", type=Path, default=cache, help="where npm keeps onnxruntime-web")
    options = parser.parse_args()
    if not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: there is no folder {options.out.parent}; make it first")
    try:
        recorded = npz.read_npy(options.recorded)
        save(options.out, page(options.bundle, recorded, runtime(options.cache)))
    except (DataError, BundleError) as problem:
        sys.exit(f"{problem}")
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.0f} MB; open it in a browser")


if __name__ == "__main__":
    main()
