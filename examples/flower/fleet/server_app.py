"""What the server runs: the algorithm, the data set and the rounds are in pyproject.toml."""

from talaria.flower import server_app

app = server_app()
