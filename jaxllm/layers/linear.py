"""Linear maps between groups of axes, computed as one matrix product."""

from math import prod

from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxllm.layers.param import Axes, param


class Linear(nnx.Module):
    """y[t, out...] = sum over in... of x[t, in...] * weight[out..., in...] + bias[out...].

    Fused projections are one Linear with a further axis in `outputs`. The weight has its inputs last, as
    checkpoints store it: loading moves no bytes, and products of few rows read it in order.
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
        self.weight = param((*outputs, *inputs), (*output_axes, *input_axes))
        self.bias = param(outputs, output_axes) if bias else None
        self.outputs = outputs

    def __call__(self, x: Float[Array, " T *inputs"]) -> Float[Array, " T *outputs"]:
        size = prod(self.outputs)
        weight = self.weight[...].reshape(size, -1)
        y = lax.dot_general(x.reshape(x.shape[0], -1), weight, (((1,), (1,)), ((), ())))
        if self.bias is not None:
            y = y + self.bias[...].reshape(1, size)
        return y.reshape(x.shape[0], *self.outputs)
