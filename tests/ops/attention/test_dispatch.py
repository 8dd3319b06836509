"""Which implementation is chosen and why, and which calls are refused."""

import jax
import jax.numpy as jnp
import pytest

from maxlib import ops
from maxlib.hardware import current_device, is_ampere_or_later, is_hopper
from maxlib.ops import _dispatch, attention, explain_attention
from maxlib.ops._attention import reference, table
from maxlib.ops._attention.table import ATTENTION, FEATURES, AttentionCall
from maxlib.ops._dispatch import Kernel

f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
Q, K = f32(2, 5, 4, 8), f32(2, 7, 2, 8)
GPU = ("gpu", "NVIDIA H100")


@pytest.fixture(autouse=True)
def _tokamax_is_absent(monkeypatch):
    monkeypatch.setattr(table, "is_installed", lambda least=(): False)
    monkeypatch.setattr(table, "has_triton_attention", lambda: False)


@pytest.fixture
def fast(monkeypatch):
    """A kernel for GPUs, preferred to all but cuDNN, that has no soft-cap and wants heads of 64."""

    def refuses(call):
        return None if call.key_dim == 64 else f"wants heads of 64, not {call.key_dim}"

    kernel = Kernel(
        "fast", reference.reference, "for tests", frozenset({"gpu"}), frozenset(FEATURES) - {"softcap"}, refuses
    )
    cudnn, *others = ATTENTION.kernels
    monkeypatch.setitem(vars(ATTENTION), "kernels", (cudnn, kernel, *others))


TPU = ("tpu", "TPU v5p")


@pytest.mark.parametrize("device", [None, GPU, TPU])
def test_chunked_takes_what_no_kernel_takes(device):
    bias = f32(1, 1, 17, 7)
    assert explain_attention(f32(2, 17, 4, 8), K, K, bias=bias, device=device).chosen == "chunked"
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
    assert "B=2 T=5 S=7 N=4 K=2 Hk=8 Hv=8 float32 (gqa, softcap; mask: full, whole rows) on cpu" in text
    assert "error: fast was requested, but it runs on gpu, not on cpu; chunked can run it" in text
    assert "lacks softcap" in str(explain_attention(Q, K, K, softcap=5.0, device=GPU))
    assert "wants heads of 64, not 8" in str(explain_attention(Q, K, K, device=GPU))


def test_a_name_never_falls_back(fast):
    q, k = jnp.ones(Q.shape), jnp.ones(K.shape)
    with pytest.raises(ValueError, match="fast was requested, but it runs on gpu, not on cpu; chunked can run it"):
        attention(q, k, k, implementation="fast")
    with pytest.raises(ValueError, match="one of cudnn, fast, .*, chunked, reference, got 'quick'"):
        attention(q, k, k, implementation="quick")


def test_the_device_is_that_of_the_mesh_in_context():
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), abstract_device=jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu")
    )
    with jax.sharding.use_abstract_mesh(mesh):
        assert current_device() == ("gpu", "NVIDIA H100")
    assert current_device()[0] == "cpu"


@pytest.mark.parametrize(
    ("short", "kind"),
    [
        (("gpu", "H100"), "NVIDIA H100"),
        (("gpu", "h200"), "NVIDIA H200"),
        (("gpu", "GH200"), "NVIDIA GH200"),
        (("gpu", "nvidia a100"), "NVIDIA A100"),
        (("tpu", "v5e"), "TPU v5 lite"),
        (("tpu", "v5p"), "TPU v5"),
        (("tpu", "TPU v6e"), "TPU v6e"),
        (("tpu", "v6e"), "TPU v6 lite"),
    ],
)
def test_a_device_may_have_its_short_name(short, kind):
    q, bounds = jax.ShapeDtypeStruct((2, 4096, 8, 128), jnp.bfloat16), i32(2, 4096)
    answer = explain_attention(q, q, q, k_start=bounds, k_end=bounds, mask_hint=CAUSAL, device=short)
    assert answer.chosen == ("splash" if short[0] == "tpu" else "cudnn")
    assert answer.call.device_kind == kind


@pytest.mark.parametrize(
    "kind",
    [
        "Tesla T4",
        "Tesla V100-SXM2-16GB",
        "Quadro RTX 6000",
        "NVIDIA GeForce RTX 2080 Ti",
        "NVIDIA T1000 8GB",
        "AMD Instinct MI300X",
    ],
)
def test_kernels_for_ampere_do_not_run_on_older_gpus(kind):
    q = jax.ShapeDtypeStruct((2, 4096, 8, 128), jnp.bfloat16)
    assert not is_ampere_or_later(kind)
    if "AMD" not in kind:
        assert explain_attention(q, q, q, device=("gpu", kind)).chosen == "chunked"


@pytest.mark.parametrize("device", [("gpu", "H1000"), ("tpu", "H100"), ("gpu", "v5p"), ("cuda", "H100"), ("tpu", "v9")])
def test_an_unknown_device_is_refused(device):
    rows, weights = f32(8, 16), f32(2, 4, 16)
    for explain in (
        lambda: explain_attention(Q, K, K, device=device),
        lambda: ops.explain_grouped_matmul(rows, weights, device=device),
        lambda: ops.explain_gated_delta_rule(Q, Q, device=device),
    ):
        with pytest.raises(ValueError, match="no device is known as .*h100, .*v5p, v6e"):
            explain()


# ------------------------------------------------------------------------------------------------ the table

GPUS = ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA L40S", "NVIDIA B200"]
TPUS = ["TPU v4", "TPU v5 lite", "TPU v5p", "TPU v6 lite"]
CAUSAL = ops.StaticMask("causal", aligned=True)
WINDOW = ops.StaticMask("causal", 1024, aligned=True)
PACKED = ops.StaticMask("causal", segmented=True, aligned=True)
PART = ops.StaticMask("causal")
PREFIX = ops.StaticMask("any", aligned=True)
CHOICES = {
    # what a call needs: what GPUs choose (mosaic_gpu on Hopper only), what TPUs choose
    "causal": (dict(mask_hint=CAUSAL), "cudnn", "splash"),
    "full": (dict(), "cudnn", "splash"),
    "window": (dict(mask_hint=WINDOW), "cudnn", "splash"),
    "packed": (dict(mask_hint=PACKED), "mosaic_gpu", "splash"),
    "part of a ring": (dict(mask_hint=PART, return_lse=True), "mosaic_gpu", "splash"),
    "prefix": (dict(mask_hint=PREFIX), "mosaic_gpu", "splash"),
    "soft-cap": (dict(mask_hint=CAUSAL, softcap=30.0), "mosaic_gpu", "splash"),
    "sinks": (dict(mask_hint=CAUSAL, sinks=f32(32)), "cudnn", "splash"),
    "sinks under a window": (dict(mask_hint=WINDOW, sinks=f32(32)), "cudnn", "splash"),
    "sinks in packed rows": (dict(mask_hint=PACKED, sinks=f32(32)), "mosaic_gpu", "splash"),
    "intervals": (dict(k_start=i32(2, 4096), k_end=i32(2, 4096)), "mosaic_gpu", "chunked"),
    "bias": (dict(mask_hint=CAUSAL, bias=f32(1, 1, 4096, 4096)), "chunked", "chunked"),
}


@pytest.mark.parametrize("need", CHOICES)
def test_each_device_gets_a_proven_kernel_where_one_can(need):
    options, gpu, tpu = CHOICES[need]
    bounds = dict(k_start=i32(2, 4096), k_end=i32(2, 4096)) if "mask_hint" in options else {}
    q, k = (jax.ShapeDtypeStruct((2, 4096, heads, 128), jnp.bfloat16) for heads in (32, 8))
    for kind in GPUS + TPUS:
        device = ("gpu" if kind in GPUS else "tpu", kind)
        want = tpu if kind in TPUS else "chunked" if gpu == "mosaic_gpu" and not is_hopper(kind) else gpu
        assert explain_attention(q, k, k, **(bounds | options), device=device).chosen == want, kind


@pytest.mark.parametrize("kind", GPUS)
@pytest.mark.parametrize(("mask", "queries"), [(PART, 1), (PART, 4), (ops.StaticMask("causal", 1024), 1), (None, 1)])
def test_decoding_on_gpus(kind, mask, queries):
    """One query against a whole cache is cuDNN's; several, a window and a ring (no hint) are maxlib's on Hopper."""
    q, k = (jax.ShapeDtypeStruct((2, length, 8, 128), jnp.bfloat16) for length in (queries, 4096))
    bounds = dict(k_start=i32(2, queries), k_end=i32(2, queries))
    chosen = explain_attention(q, k, k, **bounds, mask_hint=mask, device=("gpu", kind)).chosen
    others = "mosaic_gpu" if is_hopper(kind) else "split_kv"
    assert chosen == ("cudnn" if mask == PART and queries == 1 else others)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("cudnn", dict(kind="NVIDIA A100-SXM4-80GB", width=256), "at most 128 here, not 256"),
        ("cudnn", dict(kind="NVIDIA H200", width=100), "a multiple of 8, at most 256 here, not 100"),
        ("cudnn", dict(kind="Tesla T4"), "is for NVIDIA's GPUs since Ampere, not for Tesla T4"),
        ("cudnn", dict(dtype=jnp.float32), "bfloat16 or float16, not in float32"),
        ("cudnn", dict(mask_hint=PACKED), "a fixed number in every row"),
        ("cudnn", dict(mask_hint=PART), "a KV cache or a split sequence only for one query"),
        ("cudnn", dict(mask_hint=PART, length=1, sinks=f32(4)), "only for one query, without a window or sinks"),
        ("cudnn", dict(mask_hint=ops.StaticMask("causal", 64), length=1), "without a window or sinks"),
        ("cudnn", dict(mask_hint=PREFIX), "not intervals"),
        ("cudnn", dict(mask_hint=ops.StaticMask("full", 8, aligned=True)), "a window only under a causal mask"),
        ("cudnn", dict(softcap=5.0), "lacks softcap"),
        ("cudnn", dict(return_lse=True), "lacks lse"),
        ("tokamax", dict(kind="NVIDIA L40S"), "not for NVIDIA L40S"),
        ("tokamax", dict(kind="NVIDIA B200"), "needs tokamax 0.0.17: pip install 'maxlib[cuda]' on Python 3.12"),
        ("tokamax", dict(kind="NVIDIA B200", width=256), "at most 192 here, not Hk=256"),
        ("tokamax", dict(width=512), "at most 256 here, not Hk=512"),
        ("tokamax", dict(mask_hint=PACKED), "is not installed: pip install 'maxlib[cuda]'"),
        ("tokamax", dict(sinks=f32(4)), "lacks sinks"),
        ("splash", dict(platform="tpu", kind="TPU v5p", dtype=jnp.float16), "bfloat16 or float32, not in float16"),
        ("splash", dict(platform="tpu", kind="TPU v5p", mask_hint=None), "where intervals begin"),
        ("splash", dict(platform="tpu", kind="TPU v5p", length=2**20), "split the sequence"),
        (
            "splash",
            dict(platform="tpu", kind="TPU v5p", mask_hint=ops.StaticMask("full", 8)),
            "a window only under a causal mask",
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values()))[:40] if isinstance(value, dict) else "",
)
def test_refusals_have_reasons(name, change, reason):
    options = dict(
        platform="gpu", kind="NVIDIA H100 80GB HBM3", width=128, length=256, dtype=jnp.bfloat16, mask_hint=CAUSAL
    )
    options |= change
    device = options.pop("platform"), options.pop("kind")
    q = jax.ShapeDtypeStruct((2, options.pop("length"), 4, options.pop("width")), options.pop("dtype"))
    bounds = i32(*q.shape[:2])
    answer = explain_attention(q, q, q, k_start=bounds, k_end=bounds, device=device, implementation=name, **options)
    assert answer.chosen is None and reason in answer.reason


def call(device_kind="NVIDIA B200", platform="gpu", mask=PACKED, features=frozenset()):
    return AttentionCall(
        batch=1,
        queries=64,
        keys=64,
        heads=4,
        kv_heads=4,
        key_dim=64,
        value_dim=64,
        dtype="bfloat16",
        features=features,
        platform=platform,
        device_kind=device_kind,
        mask=mask,
    )


def test_an_accelerator_says_each_reason_once_why_it_has_no_fused_kernel(monkeypatch, caplog):
    monkeypatch.setattr(_dispatch, "_warned", set())
    for _ in range(2):
        assert ATTENTION.choose(call()).kernel == "chunked"
        assert ATTENTION.choose(call(mask=CAUSAL)).kernel == "cudnn"
        assert ATTENTION.choose(call("cpu", "cpu")).kernel == "chunked"
    assert ATTENTION.choose(call(features=frozenset({"bias"}))).kernel == "chunked"  # another reason
    packed, bias = caplog.records
    assert "because cudnn takes packed documents only with a fixed number" in packed.message
    assert "and mosaic_gpu is for NVIDIA's Hopper (H100, H200, GH200, H800, H20), not for NVIDIA B200" in packed.message
    assert "and tokamax_triton needs tokamax 0.0.17: pip install 'maxlib[cuda]' on Python 3.12" in packed.message
    assert "because cudnn lacks bias" in bias.message and "pip install" not in bias.message  # no package has it


def test_a_plan_takes_a_kernel_that_compiles_without_the_gpu():
    assert table.without_device(call("NVIDIA H200", mask=CAUSAL)) == "mosaic_gpu"
    assert table.without_device(call("NVIDIA B200", mask=CAUSAL)) == "chunked"
    q = jnp.ones(Q.shape)
    assert attention(q, jnp.ones(K.shape), jnp.ones(K.shape), implementation="offline").shape == Q.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=f32(2, 5, 8)), "q must have the axes B T N Hk, got shape"),
        (dict(k=i32(2, 7, 2, 8)), "k must be floating point, got int32"),
        (dict(k=f32(3, 7, 2, 8)), r"k must have the axes B S K Hk with B=2, Hk=8, got shape \(3, "),
        (dict(v=f32(2, 6, 2, 8)), "v must have the axes B S K Hv with B=2, S=7, K=2, got"),
        (dict(v=f32(2, 7, 1, 8)), "v must have the axes B S K Hv with B=2, S=7, K=2, got"),
        (dict(q=f32(2, 5, 4, 6)), "k must have the axes B S K Hk with B=2, Hk=6, got"),
        (dict(q=f32(2, 5, 3, 8)), "multiple of the K key heads, got N=3 and K=2"),
        (dict(q=f32(2, 0, 4, 8)), "at least one row, one query and one key, got B=2, T=0"),
        (
            dict(q=f32(0, 8, 4, 8), k=f32(0, 8, 2, 8), v=f32(0, 8, 2, 8)),
            "at least one row, one query and one key, got B=0",
        ),
        (dict(k_start=i32(2, 7)), r"k_start must have the axes B T with B=2, T=5, got shape \(2, 7\)"),
        (dict(k_end=f32(2, 5)), "k_end must hold integer key indices, got float32"),
        (dict(sinks=f32(2)), r"sinks must have the axes N with N=4, got shape \(2,\)"),
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
