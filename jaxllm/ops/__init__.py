"""Ops: one signature, one reference, many implementations chosen by name."""

from jaxllm.ops.paged_attention import paged_attention

__all__ = ["paged_attention"]
