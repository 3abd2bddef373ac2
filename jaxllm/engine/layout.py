"""The one int32 vector a step sends to the device: where each piece lies, for both sides.

One host-to-device copy a step instead of a dozen: numpy arguments cost microseconds each.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from jaxllm.engine.buckets import Bucket


@dataclass(frozen=True)
class StepLayout:
    """Named int32 pieces of the vector: name -> (offset, shape)."""

    pieces: dict[str, tuple[int, tuple[int, ...]]]
    size: int

    def unpack(self, vector: Any) -> dict[str, Any]:
        """Views (numpy) or slices (jax) of the pieces."""
        return {
            name: vector[offset : offset + prod(shape)].reshape(shape) for name, (offset, shape) in self.pieces.items()
        }

    def empty(self) -> np.ndarray:
        return np.zeros(self.size, np.int32)


def step_layout(bucket: Bucket, *, block_tokens: int, page_size: int, num_groups: int, param_words: int) -> StepLayout:
    """The layout of a bucket's vector.

    Decode rows need at most one new page a step and group; prefill rows one per page of tokens.
    More (the pages of a long prefix-cache hit) go ahead in launches of their own.
    """
    D, Rp, C = bucket.decode_rows, bucket.prefill_rows, bucket.prefill_blocks
    pages_per_row = 1 + (bucket.num_steps + page_size - 2) // page_size
    updates = num_groups * (D * pages_per_row + Rp + -(-C * block_tokens // page_size))
    shapes: dict[str, tuple[int, ...]] = {
        "sampler_mode": (1,),
        "decode_slots": (D,),
        "decode_positions": (D,),
        "decode_steps": (D,),
        "page_updates": (updates, 2),
    }
    if C:
        shapes |= {
            "prefill_slots": (Rp,),
            "prefill_lengths": (Rp,),
            "prefill_last": (Rp,),
            "prefill_samples": (Rp,),
            "block_rows": (C,),
            "block_starts": (C,),
            "block_counts": (C,),
            "prefill_tokens": (C * block_tokens,),
            "param_slots": (Rp,),
            "params": (Rp, param_words),
        }
    pieces: dict[str, tuple[int, tuple[int, ...]]] = {}
    offset = 0
    for name, shape in shapes.items():
        pieces[name] = (offset, shape)
        offset += prod(shape)
    return StepLayout(pieces, offset)
