"""Talaria inside Flower: any algorithm as a Strategy and a ClientApp (``pip install 'talaria[flower]'``).

A Flower app of two files::

    # server_app.py                                     # client_app.py
    from talaria.flower import server_app               from talaria.flower import client_app

    app = server_app("hermes", "smartwatch", rounds=3)  app = client_app("smartwatch")

The seeds and the bytes are those of ``talaria simulate``. This room alone imports Flower.
"""

from talaria import lazy

__all__ = ["TalariaStrategy", "client_app", "server_app"]

_HOMES = {
    "TalariaStrategy": "talaria.flower.strategy",
    "client_app": "talaria.flower.client",
    "server_app": "talaria.flower.server",
}

__getattr__, __dir__ = lazy.attach(__name__, _HOMES)
