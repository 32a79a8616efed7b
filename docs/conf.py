"""How `make docs` builds the site: Sphinx reads the Markdown pages, and the reference from the docstrings.

Nothing is fetched: no theme font, script or inventory comes from elsewhere, and a warning is an error.
"""

from collections.abc import Iterator
from importlib.metadata import version as version_of

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

project = "Talaria"
author = "The Talaria maintainers"
project_copyright = "The Talaria maintainers, Apache-2.0"
release = version_of("talaria")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
exclude_patterns = ["figures/README.md"]
highlight_language = "none"

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
autodoc_preserve_defaults = True
# An error's bare name leads to its entry under talaria or under talaria.errors: one class, so either is right.
suppress_warnings = ["ref.python"]

html_theme = "furo"
html_title = f"Talaria {release}"
html_show_sourcelink = False
html_copy_source = False


class Commands(Directive):
    """What ``--help`` says of the command in the arguments and of all below it, as literal text."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        import typer

        from talaria.cli.main import app

        command, context = typer.main.get_command(app()), None
        for name in ("talaria", *self.arguments[0].split()):
            below = command if context is None else command.get_command(context, name)
            context = below.context_class(below, info_name=name, parent=context, max_content_width=100)
            command = below
        return [*self._shown(command, context)]

    def _shown(self, command, context) -> Iterator[nodes.Node]:
        yield nodes.rubric(text=context.command_path)
        yield nodes.literal_block(text=command.get_help(context), language="none")
        for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
            below = command.get_command(context, name)
            if not below.hidden:
                inner = below.context_class(below, info_name=name, parent=context, max_content_width=100)
                yield from self._shown(below, inner)


def _leave_colons(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon in an attribute's first line for its type; ours are annotated."""
    if what in ("attribute", "data", "property") and lines:
        lines.insert(0, "")


def setup(app: Sphinx) -> None:
    """Sphinx calls this when it begins."""
    app.connect("autodoc-process-docstring", _leave_colons, priority=400)
    app.add_directive("commands", Commands)
