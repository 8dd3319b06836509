"""Which implementation runs, why, and what is refused."""

import jax
import jax.numpy as jnp
import pytest

from maxlib.ops._attention import attention, capabilities, dispatch, explain_attention
from maxlib.ops._attention.reference import reference

f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
Q, K = f32(2, 5, 4, 8), f32(2, 7, 2, 8)
GPU = ("gpu", "NVIDIA H100")


@pytest.fixture
def fast(monkeypatch):
    """A kernel for GPUs, preferred to all others, that has no soft-cap and wants heads of 64."""
    monkeypatch.setattr(dispatch, "_implementations", list(dispatch._implementations))
    wants = lambda call: None if call.key_dim == 64 else f"wants heads of 64, not {call.key_dim}"
    features = frozenset(dispatch.FEATURES) - {"softcap"}
    kernel = dispatch.Implementation("fast", reference, "for tests", frozenset({"gpu"}), features, wants)
    dispatch.register(kernel, before="mosaic_gpu")


@pytest.mark.parametrize("device", [None, GPU, ("tpu", "TPU v5p")])
def test_chunked_is_chosen_everywhere(device):
    assert explain_attention(f32(2, 17, 4, 8), K, K, device=device).chosen == "chunked"
    assert explain_attention(Q, K, K, device=device, implementation="reference").chosen == "reference"


@pytest.mark.parametrize("device", [GPU, ("tpu", "TPU v5p")])
def test_few_queries_are_split_over_keys_on_wide_machines(device):
    assert explain_attention(Q, K, K, device=device).chosen == "split_kv"
    assert explain_attention(Q, K, K, device=("cpu", "cpu")).chosen == "chunked"
    many = explain_attention(f32(2, 17, 4, 8), K, K, device=device)
    assert many.refused["split_kv"] == "is for at most 16 queries at a time, not 17"
    assert explain_attention(Q, K, K, bias=f32(2, 4, 5, 7), device=device).chosen == "chunked"


def test_the_best_that_can_is_chosen(fast):
    q, k = f32(2, 20, 4, 64), f32(2, 7, 2, 64)
    assert explain_attention(q, k, k, device=GPU).chosen == "fast"
    assert explain_attention(q, k, k, softcap=5.0, device=GPU).chosen == "chunked"
    assert explain_attention(q, k, k, device=("cpu", "cpu")).chosen == "chunked"
    assert explain_attention(Q, K, K, device=GPU).chosen == "split_kv"


def test_the_explanation_says_why(fast):
    text = str(explain_attention(Q, K, K, softcap=5.0, device=("cpu", "cpu"), implementation="fast"))
    assert "B=2 T=5 S=7 N=4 K=2 Hk=8 Hv=8 float32 (gqa, softcap) on cpu" in text
    assert "error: fast was asked for and runs on gpu, not on cpu; chunked can run it" in text
    assert "lacks softcap" in str(explain_attention(Q, K, K, softcap=5.0, device=GPU))
    assert "wants heads of 64, not 8" in str(explain_attention(Q, K, K, device=GPU))


def test_a_name_never_falls_back(fast):
    q, k = jnp.ones(Q.shape), jnp.ones(K.shape)
    with pytest.raises(ValueError, match="fast was asked for and runs on gpu, not on cpu; chunked can run it"):
        attention(q, k, k, implementation="fast")
    with pytest.raises(ValueError, match=r"one of \['chunked', 'fast', .*'reference', 'split_kv'\], got 'quick'"):
        attention(q, k, k, implementation="quick")


def test_a_second_implementation_of_one_name_is_refused(fast):
    with pytest.raises(ValueError, match="already has an implementation called 'fast'"):
        dispatch.register(dispatch.Implementation("fast", reference, ""))


def test_the_device_is_that_of_the_mesh_in_context():
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), abstract_device=jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu")
    )
    with jax.sharding.use_abstract_mesh(mesh):
        assert dispatch.current_device() == ("gpu", "NVIDIA H100")
    assert dispatch.current_device()[0] == "cpu"


def test_the_table_has_every_implementation_and_feature(fast):
    head, _, *rows = capabilities().splitlines()
    assert all(name in head for name in dispatch.FEATURES)
    assert [row.split("`")[1] for row in rows] == [
        "fast",
        "mosaic_gpu",
        "mosaic_tpu",
        "split_kv",
        "chunked",
        "reference",
    ]
    assert rows[0].count("yes") == rows[4].count("yes") - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=f32(2, 5, 8)), "q must have the axes B T N Hk, got shape"),
        (dict(k=i32(2, 7, 2, 8)), "k must be floating point, got int32"),
        (dict(k=f32(3, 7, 2, 8)), "q, k and v must agree in B, got q"),
        (dict(v=f32(2, 6, 2, 8)), "k and v must agree in S and K, got k"),
        (dict(v=f32(2, 7, 1, 8)), "k and v must agree in S and K, got k"),
        (dict(q=f32(2, 5, 4, 6)), "q and k must agree in Hk, got q"),
        (dict(q=f32(2, 5, 3, 8)), "multiple of the K key heads, got N=3 and K=2"),
        (dict(q=f32(2, 0, 4, 8)), "at least one query and one key, got T=0"),
        (dict(k_start=i32(2, 7)), r"k_start must have the axes B T = \(2, 5\), got shape \(2, 7\)"),
        (dict(k_end=f32(2, 5)), "k_end must hold integer key indices, got float32"),
        (dict(sinks=f32(2)), r"one entry per query head, N=4, got shape \(2,\)"),
        (dict(bias=f32(2, 2, 5, 7)), r"bias must have the axes B N T S = .* got shape \(2, 2, 5, 7\)"),
        (dict(softcap=0.0), "softcap must be positive"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_by_axis_name(change, message):
    with pytest.raises(ValueError, match=message):
        explain_attention(**{"q": Q, "k": K, "v": K, **change})


def test_heads_that_do_not_divide_are_refused_when_called():
    with pytest.raises(ValueError, match="multiple of the K key heads, got N=3 and K=2"):
        attention(jnp.ones((2, 5, 3, 8)), jnp.ones(K.shape), jnp.ones(K.shape))
