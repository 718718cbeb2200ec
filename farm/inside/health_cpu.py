"""A quick probe of a CPU slot: memory keeps what is written to it, and arithmetic comes out as it must.

Run by path on the slot's cores; standard library only.  The last line is one
JSON object: {"passed": what was done} or {"failed": what came out wrong}.
"""

import hashlib
import json
import os
import sys

MEMORY_BYTES = 32 * 2**20
PATTERNS = (b"\x5a\xa5", b"\xff\x00", b"\x00\xff")
SIZE, PRIME = 96, 1_000_003
# sha256 of a million times the byte a (FIPS 180-2, appendix B.3)
MILLION_A = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"


def memory():
    for pattern in PATTERNS:
        held = bytearray(pattern * (MEMORY_BYTES // len(pattern)))
        if held.count(pattern) != MEMORY_BYTES // len(pattern):
            return f"{MEMORY_BYTES} bytes of memory do not hold the pattern {pattern.hex()}"
    return None


def hashing():
    found = hashlib.sha256(b"a" * 1_000_000).hexdigest()
    return None if found == MILLION_A else f"SHA-256 of a million letters a is {found}"


def arithmetic():
    """A product of matrices of whole numbers, checked by Freivalds' rule: A·(B·x) = (A·B)·x."""
    a = [[(i * 31 + j * 17 + 7) % PRIME for j in range(SIZE)] for i in range(SIZE)]
    b = [[(i * 13 + j * 29 + 3) % PRIME for j in range(SIZE)] for i in range(SIZE)]
    columns = [[row[j] for row in b] for j in range(SIZE)]
    product = [[sum(map(int.__mul__, row, column)) for column in columns] for row in a]
    x = [(i * i + 1) % PRIME for i in range(SIZE)]
    y = [sum(map(int.__mul__, row, x)) for row in b]
    wrong = [i for i in range(SIZE) if sum(map(int.__mul__, product[i], x)) != sum(map(int.__mul__, a[i], y))]
    return f"row {wrong[0]} of a product of two {SIZE} x {SIZE} matrices is wrong" if wrong else None


def main():
    for question in (memory, hashing, arithmetic):
        wrong = question()
        if wrong:
            print(json.dumps({"failed": wrong}))
            return 1
    print(json.dumps({"passed": f"{MEMORY_BYTES >> 20} MiB read back, SHA-256 and a matrix product right, "
                                f"on cores {sorted(os.sched_getaffinity(0))}"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
