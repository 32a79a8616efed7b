"""What a run came to: :func:`write_html` for a browser, :func:`print_table` for a terminal."""

from talaria.simulation.reporting.overlap import mask_overlap, pair_overlap
from talaria.simulation.reporting.page import html, write_html
from talaria.simulation.reporting.table import print_table

__all__ = ["html", "mask_overlap", "pair_overlap", "print_table", "write_html"]
