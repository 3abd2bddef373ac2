"""Linear maps between groups of axes, computed as one matrix product."""

from math import prod

from flax import nnx
from jaxtyping import Array, Float

from jaxllm.layers.param import Axes, param


class Linear(nnx.Module):
    """y[t, out...] = x[t, in...] @ weight[in..., out...] + bias[out...].

    Fused projections are one Linear with a further axis in `outputs`.
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        input_axes: Axes,
        output_axes: Axes,
        *,
        bias: bool = False,
    ):
        self.weight = param((*inputs, *outputs), (*input_axes, *output_axes))
        self.bias = param(outputs, output_axes) if bias else None
        self.outputs = outputs

    def __call__(self, x: Float[Array, " T *inputs"]) -> Float[Array, " T *outputs"]:
        size = prod(self.outputs)
        y = x.reshape(x.shape[0], -1) @ self.weight[...].reshape(-1, size)
        if self.bias is not None:
            y = y + self.bias[...].reshape(1, size)
        return y.reshape(x.shape[0], *self.outputs)
