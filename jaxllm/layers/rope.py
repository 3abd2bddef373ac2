"""Rotary positions (Su et al. 2021) and the scalings that checkpoints ask for."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Tables = tuple[Float[Array, "T half"], Float[Array, "T half"]]


@dataclass(frozen=True)
class Rope:
    """One rotary embedding: frequencies per pair of dimensions, and a factor on cos and sin.

    `frequencies` are decided when the model is configured; nothing of a scaling is left at run time.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0

    def tables(self, positions: Int[Array, " T"]) -> Tables:
        """cos and sin of every position, in float32: made once a step for all layers."""
        frequencies = jnp.asarray(np.asarray(self.frequencies, np.float32))
        angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
        return jnp.cos(angles) * self.factor, jnp.sin(angles) * self.factor


def rotate(x: Float[Array, "T heads H"], tables: Tables) -> Float[Array, "T heads H"]:
    """Rotate the pairs (i, i + half) of the first 2 * half dimensions; the others pass."""
    cos, sin = (table[:, None, :] for table in tables)
    half = cos.shape[-1]
    x32 = x.astype(jnp.float32)
    first, second, rest = x32[..., :half], x32[..., half : 2 * half], x[..., 2 * half :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def make_rope(
    dim: int,
    theta: float,
    scaling: dict | None = None,
    *,
    max_position_embeddings: int,
    max_model_len: int | None = None,
) -> Rope:
    """The rotary embedding of a checkpoint's configuration.

    Args:
        dim: rotated dimensions of a head.
        theta: base of the frequencies.
        scaling: the checkpoint's `rope_scaling` (or `rope_parameters`); None or type "default" is plain.
        max_position_embeddings: of the checkpoint.
        max_model_len: the engine's; "longrope" and "dynamic" choose by it. None: the checkpoint's.

    Raises:
        ValueError: an unknown type of scaling, or one without the numbers that it needs.
    """
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    plain = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is None or kind in ("default", "mrope"):
        return _rope(plain)
    if kind not in _SCALINGS:
        raise ValueError(f"unknown rope scaling {kind!r}; known: {', '.join(('default', *_SCALINGS))}")
    original = scaling.get("original_max_position_embeddings") or max_position_embeddings
    context = _Context(dim, theta, original, max_position_embeddings, max_model_len or max_position_embeddings)
    try:
        return _SCALINGS[kind](plain, scaling, context)
    except KeyError as error:
        raise ValueError(f"rope scaling {kind!r} needs {error.args[0]!r}; it has {sorted(scaling)}") from None


@dataclass(frozen=True)
class _Context:
    dim: int
    theta: float
    original: int
    maximum: int
    wanted: int


def _rope(frequencies: np.ndarray, factor: float = 1.0) -> Rope:
    return Rope(tuple(frequencies.tolist()), float(factor))


def _linear(plain: np.ndarray, scaling: dict, context: _Context) -> Rope:
    return _rope(plain / scaling["factor"])


def _dynamic(plain: np.ndarray, scaling: dict, context: _Context) -> Rope:
    # NTK-aware: a larger base instead of squeezed positions, for contexts beyond the trained length.
    length = max(context.wanted, context.maximum)
    factor = scaling["factor"]
    grown = factor * length / context.maximum - (factor - 1)
    theta = context.theta * grown ** (context.dim / (context.dim - 2))
    return _rope(theta ** (-np.arange(0, context.dim, 2, dtype=np.float64) / context.dim))


def _llama3(plain: np.ndarray, scaling: dict, context: _Context) -> Rope:
    """Low frequencies are slowed by `factor`, high ones kept, those between interpolated."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = context.original * plain / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return _rope((1 - smooth) * plain / scaling["factor"] + smooth * plain)


def _yarn(plain: np.ndarray, scaling: dict, context: _Context) -> Rope:
    """Peng et al. 2023: interpolate by dimension, and temper the attention."""
    factor = scaling["factor"]

    def mscale(scale: float, m: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * m * math.log(scale) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        m, m_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = mscale(factor, m) / mscale(factor, m_all) if m and m_all else mscale(factor)

    def dimension(turns: float) -> float:
        return context.dim * math.log(context.original / (turns * 2 * math.pi)) / (2 * math.log(context.theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, context.dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(context.dim // 2) - low) / (high - low), 0, 1)
    return _rope(plain / factor * ramp + plain * (1 - ramp), attention)


def _longrope(plain: np.ndarray, scaling: dict, context: _Context) -> Rope:
    """Ding et al. 2024: searched factors, one list for short contexts and one for long."""
    is_long = context.wanted > context.original
    factors = np.asarray(scaling["long_factor" if is_long else "short_factor"], np.float64)
    if factors.shape != plain.shape:
        raise ValueError(f"longrope has {factors.size} factors; {plain.size} frequencies need as many")
    attention = scaling.get("attention_factor")
    if attention is None:
        factor = scaling.get("factor") or context.maximum / context.original
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context.original))
    return _rope(plain / factors, attention)


_SCALINGS = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
