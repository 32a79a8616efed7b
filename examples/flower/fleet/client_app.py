"""What each node runs: it is one wearer, numbered by its partition."""

from talaria.flower import client_app

app = client_app()
