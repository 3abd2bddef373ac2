"""The sampler: everything between logits and tokens, on the device."""
