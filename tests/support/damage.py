"""Changes to bytes, as a bad disk or a careless copy makes them."""

from __future__ import annotations

import random


def damage(rng: random.Random, blob: bytes, n_front: int) -> bytes:
    """One change: bits, bytes, fields, pieces, lengths; half of them in the first bytes."""
    changed = bytearray(blob)
    begin = rng.choice([rng.randrange(len(blob)), rng.randrange(min(n_front, len(blob)))])
    end = min(begin + rng.choice([1, 2, 4, 8, 112, len(blob)]), len(blob))
    kind = rng.randrange(9)
    if kind == 0:
        changed[begin] ^= 1 << rng.randrange(8)
    elif kind == 1:
        changed[begin] = rng.randrange(256)
    elif kind == 2:
        changed[begin:end] = rng.randbytes(end - begin)
    elif kind == 3:
        changed[begin:end] = bytes(end - begin)
    elif kind == 4:
        del changed[begin:end]
    elif kind == 5:
        del changed[begin:]
    elif kind == 6:
        changed += rng.randbytes(rng.choice([1, 8, 1000]))
    elif kind == 7:
        changed[begin:begin] = changed[begin:end]
    else:
        other = rng.randrange(len(blob))
        changed[begin], changed[other] = changed[other], changed[begin]
    return bytes(changed)
