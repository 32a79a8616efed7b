"""A script without a guard: importing it would end the program."""

import sys

sys.exit("goodbye")
