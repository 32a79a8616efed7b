"""The Python programs that the README and the guides show, as they stand there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def programs():
    """By the name of its page and its place there, every program's text."""
    return {
        f"{page.name}-{number}": text
        for page in PAGES
        for number, text in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
    }


def program(page, word):
    """The one program of ``page`` that holds ``word``."""
    (found,) = (text for name, text in programs().items() if name.startswith(page) and word in text)
    return found
