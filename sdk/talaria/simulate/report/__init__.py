"""What a run came to: :func:`write_html` for a browser, :func:`print_table` for a terminal."""

from talaria.simulate.report.overlap import mask_overlap, pair_overlap
from talaria.simulate.report.page import html, write_html
from talaria.simulate.report.table import print_table

__all__ = ["html", "mask_overlap", "pair_overlap", "print_table", "write_html"]
