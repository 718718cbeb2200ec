"""Prompts that are the same wherever they are asked for.  Pure."""

from __future__ import annotations

import hashlib
import json
import random

from farm.bench import Prompt


def make_prompt(tokens: int, salt: str, vocab_size: int) -> Prompt:
    """Token ids drawn by a generator that is seeded with salt and length alone: the same in every cell, pin and arm.

    Of a byte-level vocabulary printable bytes, of a real one the middle: special tokens stand at its ends.
    """
    low, high = (32, 127) if vocab_size < 1000 else (1000, int(vocab_size * 0.9))
    rng = random.Random(f"{salt}/{tokens}")
    ids = tuple(rng.randrange(low, high) for _ in range(tokens))
    return Prompt(ids, hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest())
