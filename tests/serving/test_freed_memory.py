"""What was freed is given back, though small blocks lie between the large ones."""

import subprocess
import sys

PROGRAM = """
import os, sys
from serve_app.serving.freed_memory import return_freed_blocks

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20

if sys.argv[1] == "given back":
    return_freed_blocks()
before, small = resident(), []
for _ in range(3):
    bodies = []
    for number in range(30):
        bodies.append(bytearray(b"x") * (4 << 20))
        small.append(bytes([number]) * 2000)
    del bodies
print(resident() - before)
"""


def test_freed_bodies_are_given_back() -> None:
    def left(how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, check=True).stdout)

    assert left("given back") < 10 < left("left alone")
