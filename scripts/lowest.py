"""Print, as constraints for pip, the lowest versions that pyproject.toml declares: `python scripts/lowest.py`.

What our dependencies need in turn is left to pip.
"""

import re
import tomllib
from pathlib import Path

FLOOR = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?>=(?P<version>[0-9][0-9.]*)")


def floors(project: dict) -> dict[str, str]:
    """Name -> lowest version over the base dependencies and all extras; the highest where several name one package."""
    found: dict[str, str] = {}
    declared = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    for line in declared:
        if line.startswith(project["name"]):
            continue
        matched = FLOOR.match(line)
        if matched is None:
            raise SystemExit(f"pyproject.toml: {line!r} declares no lowest version; write NAME>=VERSION")
        name, version = matched["name"].lower(), matched["version"]
        if _order(version) > _order(found.get(name, "0")):
            found[name] = version
    return found


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def main() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for name, version in sorted(floors(project).items()):
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
