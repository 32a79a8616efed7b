"""Blocks of the size of an update have the pages of those before them; what is free beyond a bound goes back."""

import json
import subprocess
import sys

COUNTED = """
import ctypes, json, resource, sys
from talaria import malloc as heap
if "settle" in sys.argv:
    heap.settle()
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def filled(size):
    block = libc.malloc(size)
    libc.memset(block, 1, size)
    return block
def brk():
    line = next(line for line in open("/proc/self/maps") if "[heap]" in line)
    low, high = (int(part, 16) for part in line.split()[0].split("-"))
    return high - low
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
size = 4 << 20
for block in [filled(size) for _ in range(4)]:
    libc.free(block)
before = faults()
for _ in range(16):  # four at a time, as many updates are in memory at once
    for block in [filled(size) for _ in range(4)]:
        libc.free(block)
again = faults() - before
for block in [filled(size) for _ in range(64)]:
    libc.free(block)
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
pieces = [filled(1 << 20) for _ in range(48)]
for block in pieces[:-1:2]:  # what is free lies between what is used
    libc.free(block)
full = rss()
heap.give_back()
print(json.dumps({"faults": again, "heap_mib": brk() / 2**20, "given_mib": (full - rss()) / 2**20}))
"""
PAGES = 4 * 16 * 1024
"""Of all blocks together."""


def counted(*args, **environment):
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, *args], capture_output=True, text=True, check=True, env=environment
    )
    return json.loads(done.stdout)


def test_large_blocks_have_the_pages_of_those_before_them_and_the_rest_goes_back():
    mapped = counted("settle", MALLOC_MMAP_THRESHOLD_="262144")
    assert mapped["faults"] > PAGES / 2, "what the user set did not stay"
    found = counted("settle")
    assert found["faults"] < PAGES / 100
    assert found["heap_mib"] < 64 + 64
    assert found["given_mib"] > 20
