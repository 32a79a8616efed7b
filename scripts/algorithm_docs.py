"""Write docs/algorithms/ from the docstrings: `python scripts/algorithm_docs.py`. A test keeps the pages current."""

import inspect
from dataclasses import fields
from pathlib import Path

from talaria.algorithms import ALGORITHMS, options
from talaria.algorithms.base import Algorithm

DOCS = Path(__file__).parents[1] / "docs" / "algorithms"


def page(cls: type[Algorithm]) -> str:
    """One algorithm's page, Markdown."""
    card, module = cls.card, inspect.getmodule(cls)
    lines = [f"# {card.title}", "", inspect.cleandoc(module.__doc__ or ""), "", inspect.cleandoc(cls.__doc__ or ""), ""]
    lines += ["| | |", "|---|---|"]
    for what, value in (
        ("name", f"`{card.name}`"),
        ("shared", card.shares),
        ("private", card.keeps),
        ("served", card.serves),
        ("source", card.source),
        ("evidence", card.evidence),
        ("engines", "torch" if card.torch_alone else "torch, onnx"),
        ("tasks", f"classification: {card.classes_alone}" if card.classes_alone else "all"),
        ("server", f"`{_server(cls)}`"),
    ):
        lines.append(f"| {what} | {value} |")
    given = options(cls)
    if given:
        lines += ["", "| option | type | default |", "|---|---|---|"]
        lines += [f"| `{name}` | {type(value).__name__} | `{value!r}` |" for name, value in given.items()]
    lines += ["", f"```\ntalaria simulate -a {card.name} -d smartwatch --rounds 30\n```", ""]
    return "\n".join(lines)


def _server(cls: type[Algorithm]) -> str:
    given = {f.name: f.default for f in fields(cls) if f.repr}  # type: ignore[arg-type]
    return type(cls(**given).aggregator).__name__


def index() -> str:
    """The table of all algorithms."""
    lines = ["# Algorithms", "", "| name | shared | private | served | evidence |", "|---|---|---|---|---|"]
    for name, cls in sorted(ALGORITHMS.items()):
        card = cls.card
        lines.append(f"| [{name}]({name}.md) | {card.shares} | {card.keeps} | {card.serves} | {card.evidence} |")
    return "\n".join([*lines, ""])


def pages() -> dict[str, str]:
    """File name -> text of every page."""
    return {"README.md": index(), **{f"{name}.md": page(cls) for name, cls in sorted(ALGORITHMS.items())}}


def main() -> None:
    DOCS.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (DOCS / name).write_text(text)


if __name__ == "__main__":
    main()
