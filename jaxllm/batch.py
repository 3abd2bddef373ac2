"""StepBatch: the arrays one step hands the model, and KVLayer: what a layer keeps in the KV cache.

The tokens of a step lie on one flat axis. First come the decode rows, one token each; then the
prefill region, cut into blocks of `block_tokens` tokens, each block wholly of one row:

    tokens  | d0 d1 d2 .. | a a a a | a a - - | b b b - | ...        T = D + blocks * block_tokens
            | decode rows | row D+0 | row D+0 | row D+1 | ...        "-": padding, row R

A sequence has positions 0, 1, 2 ...; position p lives in page `page_table[row, p // page_size]`
at offset `p % page_size`. Page 0 of every group is a trash page: padding writes there.
"""

from dataclasses import dataclass, field

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Int


@dataclass(frozen=True)
class KVLayer:
    """What one attention layer stores per token: `num_kv_heads` keys and values of `head_dim`.

    `window` is None for full attention; else a token sees itself and the `window - 1` before it,
    and older pages are freed. Layers of equal window share their page table (a page group).
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class AttentionPlan:
    """Static facts of a step's attention: which implementation, on which mesh, over which lengths.

    Attributes:
        implementation: name in `jaxllm.ops.implementations`.
        mesh: the devices; KV heads are sharded over its axis "tensor".
        windows: the window of each page group, in the order of `StepBatch.page_tables`.
        page_size: tokens of a page.
        block_tokens: tokens of a prefill block.
        dynamic_length: the loop over KV runs to the longest row of the step (a trip count known only
            on the device: free on CPU and TPU, a host round trip on GPU) instead of over the whole
            width of the page table.
    """

    implementation: str
    mesh: Mesh
    windows: tuple[int | None, ...]
    page_size: int
    block_tokens: int
    dynamic_length: bool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepBatch:
    """One step on the device; models read `tokens` and `positions` and pass the rest on.

    Attributes:
        tokens: token ids.
        positions: position of each token in its sequence; padding repeats its block's last one.
        rows: row of each token; R for padding.
        kv_lengths: tokens of each row's sequence after this step (0 for padding rows).
        block_rows: row of each prefill block; R for padding.
        page_tables: per page group [R + 1, P]; row R is all zeros (the trash page).
        plan: static facts of the attention.
    """

    tokens: Int[Array, " T"]
    positions: Int[Array, " T"]
    rows: Int[Array, " T"]
    kv_lengths: Int[Array, " R"]
    block_rows: Int[Array, " C"]
    page_tables: tuple[Int[Array, "R1 P"], ...]
    plan: AttentionPlan = field(metadata={"static": True})

    @property
    def num_decode_rows(self) -> int:
        return self.tokens.shape[0] - self.block_rows.shape[0] * self.plan.block_tokens

    def page_table(self, window: int | None) -> Int[Array, "R1 P"]:
        """The page table of the group that layers of this window use."""
        return self.page_tables[self.plan.windows.index(window)]
