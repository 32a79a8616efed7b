"""Blocks of the size of an update are mapped one by one, so that freeing them gives their memory back."""

import subprocess
import sys

GIVEN_BACK = """
import ctypes, sys
from talaria_coordinator.server import malloc as heap
if "settle" in sys.argv:
    heap.settle()
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def brk():
    line = next(line for line in open("/proc/self/maps") if "[heap]" in line)
    low, high = (int(part, 16) for part in line.split()[0].split("-"))
    return high - low
size = 4 << 20
for _ in range(3):  # the first ones teach glibc to take such blocks from its heap
    libc.free(libc.malloc(size))
before = brk()
blocks = [libc.malloc(size) for _ in range(8)]
print((brk() - before) >= 4 * size)
"""


def grows(*args, **environment):
    done = subprocess.run(
        [sys.executable, "-c", GIVEN_BACK, *args], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout.strip() == "True"


def test_large_blocks_do_not_grow_the_heap():
    assert grows(), "this machine's malloc no longer needs it"
    assert not grows("settle")


def test_what_the_user_set_stays():
    assert grows("settle", MALLOC_ARENA_MAX="4")
