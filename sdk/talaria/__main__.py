"""``python -m talaria``: the command, where its folder is not on the path."""

from talaria.cli.main import main

main()
