"""The garbage collector under ``spare_the_old``; in a process of its own, as it is about a process."""

import subprocess
import sys

PROGRAM = """
import gc
from snapd.executor import spare_the_old

class Node:
    pass

spare_the_old()
spare_the_old()
assert sum(type(callback).__name__ == "_Survivors" for callback in gc.callbacks) == 1
seen = []
gc.callbacks.append(lambda phase, info: seen.append((phase, info["generation"], info["collected"])))

# What lives for long is set aside, and a full collection has nothing to look at.
kept = [[number] for number in range(300_000)]
assert len(gc.get_objects(generation=2)) < 50_000, len(gc.get_objects(generation=2))
assert gc.get_freeze_count() > 200_000

# A cycle that is dropped soon is freed all the same.
for _ in range(200_000):
    node = Node()
    node.self = node
assert sum(collected for phase, _, collected in seen if phase == "stop") > 100_000

# What was set aside goes by its reference count.
before = gc.get_freeze_count()
del kept
assert gc.get_freeze_count() < before - 200_000
"""


CYCLES = """
import gc
import weakref
from snapd import executor

class Node:
    pass

executor._SPARED_MIN = 10_000
executor.spare_the_old()
gc.set_threshold(100, 10, 10)
nodes = [Node() for _ in range(10_000)]
for node in nodes:
    node.self = node
kept = [[number] for number in range(20_000)]
refs = [weakref.ref(node) for node in nodes]
del node, nodes
assert all(ref() is not None for ref in refs), "they were set aside"
kept += [[number] for number in range(200_000)]
assert not any(ref() is not None for ref in refs), "they pile up"
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_lives_long_is_not_looked_at_and_goes_all_the_same() -> None:
    run(PROGRAM)


def test_cycles_that_were_set_aside_do_not_pile_up() -> None:
    run(CYCLES)
