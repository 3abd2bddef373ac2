"""Buckets: the padded sizes that are compiled, and which of them a step runs in. Host only."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Bucket:
    """One compiled program of the step.

    Attributes:
        prefill_blocks: blocks of prefill tokens; 0 in a decode-only program.
        decode_rows: rows of one token.
        prefill_rows: rows that own prefill blocks.
        num_steps: decode steps in one launch (1 when there are prefill blocks).
        pages: width of the page tables the step reads, in pages.
        sampler_mode: the compiled sampler branch, or None to choose on the device. A higher mode serves
            the rows of the lower ones, too.
    """

    prefill_blocks: int
    decode_rows: int
    prefill_rows: int
    num_steps: int
    pages: int
    sampler_mode: int | None

    def __str__(self) -> str:
        prefill = f"p{self.prefill_blocks}b{self.prefill_rows}r" if self.prefill_blocks else ""
        steps = f"x{self.num_steps}" if self.num_steps > 1 else ""
        mode = "" if self.sampler_mode is None else f"-m{self.sampler_mode}"
        return f"d{self.decode_rows}{steps}{prefill}-{self.pages}p{mode}"

    def fits(self, need: "Bucket") -> bool:
        """Whether a step that needs `need` can run in this bucket."""
        return (
            self.prefill_blocks >= need.prefill_blocks
            and self.decode_rows >= need.decode_rows
            and self.prefill_rows >= need.prefill_rows
            and self.num_steps == need.num_steps
            and self.pages >= need.pages
            and (self.sampler_mode is None or self.sampler_mode >= (need.sampler_mode or 0))
            and (self.prefill_blocks > 0) == (need.prefill_blocks > 0)
        )

    def cost(self, block_tokens: int) -> int:
        """Orders buckets that fit: padded tokens first, then what attention reads, then the sampler."""
        tokens = self.decode_rows + self.prefill_blocks * block_tokens
        return ((tokens + 4 * self.prefill_rows) * 1_000_000 + self.pages) * 8 + (self.sampler_mode or 0)


def powers_of_two(low: int, high: int) -> list[int]:
    """low, 2 low, 4 low ... and `high` itself."""
    sizes = []
    size = low
    while size < high:
        sizes.append(size)
        size *= 2
    return [*sizes, high]


@dataclass(frozen=True)
class BucketGrid:
    """Every bucket the engine may compile, made from the limits of the engine and the platform.

    Attributes:
        decode_rows: row counts of decode-only programs.
        mixed_decode_rows: decode rows of programs with prefill.
        prefill_blocks: prefill sizes, in blocks.
        max_prefill_rows: prefill rows of the large programs.
        num_steps: 1, and the multi-step count where it is used.
        pages: widths of the page table.
        sampler_modes: ascending; (None,) where the branch is chosen on the device.
    """

    decode_rows: tuple[int, ...]
    mixed_decode_rows: tuple[int, ...]
    prefill_blocks: tuple[int, ...]
    max_prefill_rows: int
    num_steps: tuple[int, ...]
    pages: tuple[int, ...]
    sampler_modes: tuple[int | None, ...]

    def prefill_rows(self, blocks: int) -> int:
        """A row owns at least one block, so few blocks need few rows."""
        return min(blocks, self.max_prefill_rows)

    def buckets(self) -> list[Bucket]:
        """All of the grid, the large ones first (they can serve in place of the others)."""
        found = [
            Bucket(0, rows, 0, steps, pages, mode)
            for rows in self.decode_rows
            for steps in self.num_steps
            for pages in self.pages
            for mode in self.sampler_modes
        ]
        found += [
            Bucket(blocks, rows, self.prefill_rows(blocks), 1, pages, mode)
            for blocks in self.prefill_blocks
            for rows in self.mixed_decode_rows
            for pages in self.pages
            for mode in self.sampler_modes
        ]
        return sorted(found, reverse=True)

    def first(self) -> list[Bucket]:
        """The buckets without which some step could not run: the largest of each kind."""
        pages, rows, mixed = self.pages[-1], self.decode_rows[-1], self.mixed_decode_rows[-1]
        blocks, mode = self.prefill_blocks[-1], self.sampler_modes[-1]
        needed = [Bucket(0, rows, 0, steps, pages, mode) for steps in self.num_steps]
        return [*needed, Bucket(blocks, mixed, self.prefill_rows(blocks), 1, pages, mode)]

    def smallest(self) -> list[Bucket]:
        """The buckets that a lone short request runs in, for every sampler mode."""
        pages, rows = self.pages[0], self.mixed_decode_rows[0]
        blocks = self.prefill_blocks[0]
        found = [
            Bucket(0, self.decode_rows[0], 0, steps, pages, mode)
            for steps in self.num_steps
            for mode in self.sampler_modes
        ]
        found += [Bucket(blocks, rows, self.prefill_rows(blocks), 1, pages, mode) for mode in self.sampler_modes]
        return found

    def start_order(self) -> list[Bucket]:
        """What is loaded before serving, if it is kept."""
        return list(dict.fromkeys([*self.first(), *self.smallest()]))


def max_prefill_blocks(max_num_batched_tokens: int, block_tokens: int, max_prefill_rows: int) -> int:
    """Blocks of prefill tokens in one step: the token budget's, so that full steps carry no padding.

    A budget of few blocks gets one per row instead: short prompts are many.
    """
    return max(-(-max_num_batched_tokens // block_tokens), max_prefill_rows)


def grid_for(
    platform: str,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_pages: int,
    max_prefill_rows: int,
    block_tokens: int,
    num_decode_steps: int,
    sampler_modes: Iterable[int],
    narrow_pages: int,
) -> BucketGrid:
    """The grid of a platform ("cpu", "gpu", "tpu").

    On a CPU the attention loop follows the longest row and the sampler branches at run time, so that
    neither multiplies the programs. On a GPU both cost a host round trip: the sampler branch is compiled
    in, and page tables of up to `narrow_pages` get programs of their own, without such a loop.
    """
    max_blocks = max_prefill_blocks(max_num_batched_tokens, block_tokens, max_prefill_rows)
    steps = (1,) if num_decode_steps == 1 else (1, num_decode_steps)
    if platform == "cpu":
        small = [b for b in (2, 8) if b < max_blocks]
        return BucketGrid(
            decode_rows=tuple(powers_of_two(1, max_num_seqs)),
            mixed_decode_rows=tuple(sorted({min(r, max_num_seqs) for r in (0, 8, max_num_seqs)})),
            prefill_blocks=(*small, max_blocks),
            max_prefill_rows=max_prefill_rows,
            num_steps=steps,
            pages=(max_pages,),
            sampler_modes=(None,),
        )
    # Each program takes long to compile and its launch is the same work whatever the rows: few sizes.
    rows = [r for r in (1, 8, 32, 64, 128, 256, 512) if r < max_num_seqs]
    blocks = [b for b in (4, 32) if b < max_blocks]
    return BucketGrid(
        decode_rows=(*rows, max_num_seqs),
        mixed_decode_rows=(max_num_seqs,),
        prefill_blocks=(*blocks, max_blocks),
        max_prefill_rows=max_prefill_rows,
        num_steps=steps,
        pages=tuple(sorted({min(narrow_pages, max_pages), max_pages})),
        sampler_modes=tuple(sampler_modes),
    )
