"""Every implementation of paged attention against the reference, over every named shape."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxllm.ops import paged_attention
from jaxllm.ops.implementations import ATTENTION, choose_attention
from jaxllm.ops.paged_attention.specs import Spec, ci_specs, make_case


def one_device() -> Mesh:
    return Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1), ("data", "expert", "tensor"))


def attend(spec: Spec, mesh: Mesh, implementation: str, **options):
    q, k, v, pages, batch, real = make_case(spec, mesh, implementation=implementation, **options)
    run = jax.jit(
        lambda q, k, v, pages, batch: paged_attention(
            q, k, v, pages, batch, layer=spec.layer, scale=spec.head_dim**-0.5, soft_cap=spec.soft_cap
        )
    )
    out, pages = run(q, k, v, pages, batch)
    return np.asarray(out, np.float32)[real], np.asarray(pages, np.float32)


@pytest.mark.parametrize("dynamic_length", [True, False])
@pytest.mark.parametrize("implementation", [name for name in ATTENTION if name != "reference"])
@pytest.mark.parametrize("spec", ci_specs(), ids=lambda spec: spec.name)
def test_matches_reference(spec, implementation, dynamic_length):
    expected, expected_pages = attend(spec, one_device(), "reference")
    out, pages = attend(spec, one_device(), implementation, dynamic_length=dynamic_length)
    assert not np.isnan(expected).any()
    longest = max([*spec.decode, *(before + count for before, count in spec.chunks)])
    np.testing.assert_allclose(out, expected, atol=4e-7 * longest**0.5, rtol=1e-5)
    # Page 0 is trash: what padding leaves there is nobody's business.
    np.testing.assert_array_equal(pages[1:], expected_pages[1:])


@pytest.mark.parametrize("spec", ci_specs(), ids=lambda spec: spec.name)
def test_bfloat16_is_as_close_as_its_precision(spec):
    expected, _ = attend(spec, one_device(), "reference")
    out, _ = attend(spec, one_device(), "xla", dtype="bfloat16")
    # Inputs, weights and output are each rounded to 8 bits; the weights of a softmax sum to 1.
    np.testing.assert_allclose(out, expected, atol=4 * 2**-8 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("spec", [s for s in ci_specs() if s.num_kv_heads == 2], ids=lambda spec: spec.name)
def test_heads_sharded_over_two_devices(spec):
    mesh = Mesh(np.asarray(jax.devices()[:2]).reshape(1, 1, 2), ("data", "expert", "tensor"))
    expected, expected_pages = attend(spec, one_device(), "xla")
    out, pages = attend(spec, mesh, "xla")
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_array_equal(pages[1:], expected_pages[1:])


def test_backend_names():
    assert choose_attention(None)[0] == "xla"
    assert choose_attention("reference")[0] == "reference"
    assert choose_attention("flash_attn")[0] == "xla"
    with pytest.raises(ValueError, match=r"unknown attention backend 'nope'; known: .*xla"):
        choose_attention("nope")
