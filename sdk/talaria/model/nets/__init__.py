"""The networks that come with Talaria, one family a file; :mod:`talaria.model.zoo` knows them by name.

They use torch alone, and torchvision where its networks are asked for.
"""
