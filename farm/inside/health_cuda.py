"""A quick probe of one GPU: allocate, compute, compare with the CPU, read back.

Run by path in the interpreter of a pin's environment, which has torch; the
card is the only one in CUDA_VISIBLE_DEVICES.  The last line is one JSON object:
{"passed": what was done}, {"failed": what came out wrong}, or {"unknown": why
it could not be carried out, which says nothing of the card}.
"""

import json
import re
import sys

MEMORY_BYTES = 256 * 2**20
SIZE, ROUNDS = 1024, 20
LARGEST = 7  # entries are whole numbers up to here: each sum stays far below 2**24, so even TF32 is exact
NO_DRIVER = re.compile("driver on your system is too old|no NVIDIA driver", re.I)  # for this torch: the environment's fault


def probe(torch):
    card = torch.device("cuda:0")
    generator = torch.Generator().manual_seed(20)
    a, b = (torch.randint(0, LARGEST + 1, (SIZE, SIZE), generator=generator).float() for _ in range(2))
    right = a @ b
    on_card = [m.to(card) for m in (a, b)]
    for number in range(ROUNDS):
        wrong = int((torch.matmul(*on_card).cpu() != right).sum())
        if wrong:
            return {"failed": f"{wrong} of {SIZE * SIZE} entries of matrix product {number + 1} of {ROUNDS} "
                              "differ from the CPU's"}
    count = MEMORY_BYTES // 4
    for pattern in (0x5A5A5A5A, -1, 0):
        held = torch.full((count,), pattern, dtype=torch.int32, device=card)
        held += torch.arange(count, dtype=torch.int32, device=card)
        back = held.cpu() - torch.arange(count, dtype=torch.int32)
        wrong = int((back != pattern).sum())
        if wrong:
            return {"failed": f"{wrong} of {count} words of the pattern {pattern & 0xFFFFFFFF:08x} came back changed"}
    return {"passed": f"{ROUNDS} products of {SIZE} x {SIZE} matrices as on the CPU, {MEMORY_BYTES >> 20} MiB read back, "
                      f"on {torch.cuda.get_device_name(0)}"}


def main():
    try:
        import torch
    except ImportError as error:
        said = {"unknown": f"torch cannot be imported here: {error}"}
    else:
        if torch.version.cuda is None:
            said = {"unknown": "torch is built without CUDA here"}
        else:
            try:
                said = probe(torch)
            except torch.cuda.OutOfMemoryError as error:  # somebody else's memory is no fault of the card
                said = {"unknown": str(error).splitlines()[0]}
            except RuntimeError as error:  # CUDA's own errors
                line = str(error).splitlines()[0]
                said = {"unknown" if NO_DRIVER.search(line) else "failed": line}
    print(json.dumps(said))
    return 1 if "failed" in said else 0


if __name__ == "__main__":
    sys.exit(main())
