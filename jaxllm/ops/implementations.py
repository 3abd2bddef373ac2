"""Which implementation serves which device: the only importer of kernels_pallas and kernels_triton."""

from collections.abc import Callable

from jaxllm.ops.paged_attention.reference import paged_attention_reference
from jaxllm.ops.paged_attention.xla import paged_attention_xla

ATTENTION: dict[str, Callable] = {
    "reference": paged_attention_reference,
    "xla": paged_attention_xla,
}

# Names that users of other engines write; each maps to what serves the same purpose here.
ATTENTION_ALIASES = {
    name: "xla"
    for name in (
        "FLASH_ATTN",
        "FLASHINFER",
        "TRITON_ATTN",
        "FLEX_ATTENTION",
        "CPU_ATTN",
        "TORCH_SDPA",
        "PALLAS",
    )
}


def attention_implementation(name: str) -> Callable:
    """The implementation of that name; unknown names are errors that list the known ones."""
    try:
        return ATTENTION[name]
    except KeyError:
        raise ValueError(f"unknown attention implementation {name!r}; known: {', '.join(ATTENTION)}") from None


def choose_attention(requested: str | None) -> tuple[str, str]:
    """The implementation to use and the reason, for the start-up log.

    `requested` is the user's `--attention-backend`: one of ours, or an alias.
    """
    if requested is None:
        return "xla", "default: the only implementation for serving on this platform"
    if requested in ATTENTION:
        return requested, "asked for"
    alias = requested.upper()
    if alias in ATTENTION_ALIASES:
        return ATTENTION_ALIASES[alias], f"asked for as {requested}"
    known = sorted([*ATTENTION, *ATTENTION_ALIASES])
    raise ValueError(f"unknown attention backend {requested!r}; known: {', '.join(known)}")
