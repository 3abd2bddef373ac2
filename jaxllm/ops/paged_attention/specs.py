"""Named shapes of paged attention: tests, benchmarks and tuning walk this one list."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxllm.batch import AttentionPlan, KVLayer, StepBatch


@dataclass(frozen=True)
class Spec:
    """One case.

    Attributes:
        name: what it stands for.
        decode: sequence lengths (this step's token included) of the decode rows.
        chunks: (tokens before, tokens in this step) of the prefill rows.
        num_heads, num_kv_heads, head_dim: of the layer.
        window, soft_cap: of the layer.
        page_size, block_tokens: of the engine.
        ci: small enough for every test run.
    """

    name: str
    decode: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    window: int | None = None
    soft_cap: float | None = None
    page_size: int = 16
    block_tokens: int = 16
    ci: bool = True

    @property
    def layer(self) -> KVLayer:
        return KVLayer(self.num_kv_heads, self.head_dim, self.window)


_MIXED = Spec("mixed", decode=(1, 17, 200, 300), chunks=((0, 20), (130, 16), (5, 1)))
_LLAMA_8B = Spec("llama_8b", num_heads=32, num_kv_heads=8, head_dim=128, page_size=64, block_tokens=64, ci=False)

SPECS = (
    _MIXED,
    Spec("one_token", decode=(1,)),
    Spec("page_border", decode=(16, 17, 32, 33), chunks=((16, 16), (15, 17))),
    Spec("prefill_only", chunks=((0, 100), (0, 3))),
    Spec("multi_head", decode=(5, 9), chunks=((0, 9),), num_heads=3, num_kv_heads=3, head_dim=80),
    Spec("smollm2_135m", decode=(7, 130), chunks=((0, 33),), num_heads=9, num_kv_heads=3, head_dim=64),
    replace(_MIXED, name="window", window=37),
    replace(_MIXED, name="window_below_page", window=3),
    Spec("window_long", decode=(1500, 40), chunks=((1200, 20),), window=40),
    replace(_MIXED, name="soft_cap", soft_cap=5.0),
    replace(_MIXED, name="gemma2", window=64, soft_cap=50.0, head_dim=32),
    replace(_MIXED, name="large_pages", page_size=64, block_tokens=8),
    replace(_LLAMA_8B, name="llama_8b_decode_64x2048", decode=(2048,) * 64),
    replace(_LLAMA_8B, name="llama_8b_decode_8x32k", decode=(32768,) * 8),
    replace(_LLAMA_8B, name="llama_8b_decode_256x640", decode=tuple(range(128, 1152, 4))),
    replace(_LLAMA_8B, name="llama_8b_prefill_4k", chunks=((0, 4096),)),
    replace(_LLAMA_8B, name="llama_8b_prefill_32k", chunks=((24576, 8192),)),
)


def make_case(
    spec: Spec,
    mesh: Mesh,
    *,
    dtype: str = "float32",
    implementation: str = "xla",
    dynamic_length: bool = True,
    seed: int = 0,
) -> tuple[
    Float[Array, "T N H"],
    Float[Array, "T K H"],
    Float[Array, "T K H"],
    Float[Array, "pages 2 K page_size H"],
    StepBatch,
    np.ndarray,
]:
    """Random inputs of a spec: q, k, v, pages, batch, and which tokens are real.

    Whatever no sequence owns, whole pages and the ends of last pages, is NaN, so that a kernel that
    reads it cannot pass.
    """
    rng = np.random.default_rng(seed)
    size, block = spec.page_size, spec.block_tokens
    lengths = [*spec.decode, *(before + count for before, count in spec.chunks)]
    D, R = len(spec.decode), len(lengths)
    blocks = [-(-count // block) for _, count in spec.chunks]
    T = D + sum(blocks) * block
    width = -(-max(lengths) // size)
    page_counts = [-(-length // size) for length in lengths]
    num_pages = sum(page_counts) + 3
    free = list(rng.permutation(np.arange(1, num_pages)))

    table = np.zeros((R + 1, width), np.int32)
    owned = np.zeros((num_pages, size), bool)
    owned[0] = True
    for row, length in enumerate(lengths):
        for index in range(page_counts[row]):
            page = free.pop()
            table[row, index] = page
            owned[page, : length - index * size] = True

    positions, rows = np.zeros(T, np.int32), np.full(T, R, np.int32)
    positions[:D] = np.asarray(spec.decode, np.int32) - 1
    rows[:D] = np.arange(D)
    token, block_rows = D, []
    for i, ((before, count), num_blocks) in enumerate(zip(spec.chunks, blocks, strict=True)):
        last = before + count - 1
        positions[token : token + num_blocks * block] = np.minimum(np.arange(before, before + num_blocks * block), last)
        rows[token : token + count] = D + i
        block_rows += [D + i] * num_blocks
        token += num_blocks * block

    shape = (num_pages, 2, spec.num_kv_heads, size, spec.head_dim)
    pages = np.where(owned[:, None, None, :, None], rng.standard_normal(shape, np.float32), np.nan)
    plan = AttentionPlan(implementation, mesh, (spec.window,), size, block, dynamic_length)
    batch = StepBatch(
        tokens=jnp.zeros((T,), jnp.int32),
        positions=jnp.asarray(positions),
        rows=jnp.asarray(rows),
        kv_lengths=jnp.asarray(np.asarray(lengths, np.int32)),
        block_rows=jnp.asarray(np.asarray(block_rows, np.int32)),
        page_tables=(jnp.asarray(table),),
        plan=plan,
    )
    q, k, v = (
        jnp.asarray(rng.standard_normal((T, heads, spec.head_dim), np.float32)).astype(dtype)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    return q, k, v, jnp.asarray(pages).astype(dtype), batch, rows < R


def ci_specs() -> list[Spec]:
    """The specs of every test run."""
    return [spec for spec in SPECS if spec.ci]
