"""Strict JAX for every test: eight virtual CPU devices, no silent promotion of dtypes or ranks."""

import os

# Before jax is imported anywhere: the CPU client reads it once.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
