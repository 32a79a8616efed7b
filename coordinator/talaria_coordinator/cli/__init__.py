"""``talaria coordinator`` and ``talaria fleet``: a command reads its words, calls one function, prints the answer."""
