"""The analytic model: what devices hold, compute and send, without a compiler."""

import dataclasses
import math

import pytest

from maxlib import plan, sharding
from maxlib.plan import _program as programs
from maxlib.plan._memory import _at_once, _Gathered
from maxlib.sharding import ExpertParallel
from tests.plan.jobs import CONFIG, MIXTRAL, layout, moved


def test_activations_of_a_weights_shape_are_counted():
    """With two rows, as many tokens as the model's width: the MLP's activations then look like its weights."""
    cfg = dataclasses.replace(CONFIG, dim=64, mlp_dim=96, num_heads=4, num_kv_heads=4, head_dim=16)
    kept = [
        plan.estimated(
            plan.Job(cfg, "h100", sequence=32, per_device_batch_size=rows, remat="dots")
        ).analytic.activations
        for rows in (1, 2)
    ]
    assert kept[1] == pytest.approx(2 * kept[0], rel=0.02)


def test_where_sequences_are_split_between_matmuls_a_layer_holds_them_whole():
    base = dict(model="llama3.2-1b", target="h100x8", sequence=4096)
    make = lambda strategy: plan.Job(**base, layout=layout(strategy, fsdp=2, tensor=4))
    split, unsplit = (plan.estimated(make(strategy)).analytic for strategy in ("fsdp_tp_sp", "fsdp_tp"))
    rows = 4 * 4096 * 2048 * 2  # of four devices, each with one row
    assert split.activations < 0.3 * unsplit.activations and 3.5 * rows < split.layer < unsplit.layer + 4 * rows


def test_what_waits_on_the_host_takes_time_to_travel():
    base = dict(model="llama3.2-1b", target="h100x8")
    plain, moments, layers, activations = (
        plan.estimated(plan.Job(**base, **more))
        for more in (
            {},
            {"layout": layout("fsdp+offload_optimizer")},
            {"layout": layout("fsdp+offload_optimizer+offload_layers")},
            {"remat": "qkv_offload"},
        )
    )
    assert plain.estimate.host == 0 and "host" not in str(plain)
    assert moments.costs.from_host == moments.costs.to_host == moments.host
    assert moments.estimate.host == moments.host / 6.4e10 and "from the host" in str(moments)
    assert moments.estimate.serial == pytest.approx(plain.estimate.serial + moments.estimate.host, rel=1e-3)
    assert layers.costs.from_host - moments.host == 5 * (layers.host - moments.host)
    assert layers.analytic.temporaries > layers.analytic.gradients + layers.analytic.activations
    assert activations.costs.to_host == 16 * 2048 * 2 * (2048 + 2 * 512)  # q, k, v in bfloat16


def test_remat_and_tensor_parallelism_shrink_the_analytic_model():
    base = dict(model="llama3-8b", target="h100x8", sequence=4096)
    full, none = (plan.estimated(plan.Job(**base, remat=remat)).analytic for remat in ("full", None))
    layer_inputs = 32 * 4096 * 4096 * 2
    assert full.activations == pytest.approx(layer_inputs, rel=0.2) and none.activations > 10 * full.activations
    split = plan.estimated(plan.Job(**base, layout=layout("fsdp_tp_sp", fsdp=2, tensor=4))).analytic
    assert split.parameters == pytest.approx(full.parameters, rel=1e-3) and math.isfinite(split.total)


@pytest.mark.parametrize(
    ("how", "kind", "room"),
    [
        ("", "all-to-all", ExpertParallel.room),
        pytest.param("+exchange_ragged", "ragged-all-to-all", 1, marks=pytest.mark.full),
    ],
)
def test_tokens_are_estimated_to_travel_to_experts_that_stay(how, kind, room):
    """libtpu's program for Mixtral-8x7B, 8 experts x context 2, moved 12 GiB ragged before results travelled once."""
    got = plan.estimated(plan.Job(MIXTRAL, "h100x8", layout=layout("ep" + how, expert=8), sequence=16))
    traffic, experts = moved(got), 4 * 8 * 3 * 32 * 48
    # Out and back, out again, and backward, two bytes a number.
    assert traffic[kind, "expert"] == 5 * 4 * room * 2 * (16 * 32 * 2)
    assert traffic["all-gather", "expert"] == 2 * traffic["reduce-scatter", "expert"]
    assert traffic["all-gather", "expert"] <= 2 * 2 * (got.num_parameters - experts)


@pytest.mark.full
@pytest.mark.parametrize(
    ("preset", "target", "expert", "batch", "peak"),
    [
        ("nemotron-3-super-120b-a12b", "v5p-128", 64, 1, 36.66),
        ("qwen3.5-397b-a17b", "v5p-256", 128, 4, 63.39),
        ("gemma4-31b", "v5p-64", 1, 4, 32.25),
        ("gemma4-26b-a4b", "v5p-16", 8, 1, 54.51),
    ],
)
def test_the_memory_of_layers_in_long_periods_is_that_of_the_compiler(preset, target, expert, batch, peak):
    """GiB as compiled by libtpu 0.0.51, of Gemma 4 31B and Qwen3.5 by 0.0.48."""
    where = layout("ep", fsdp=-1, expert=expert)
    got = plan.estimated(plan.Job(preset, target, layout=where, sequence=4096, per_device_batch_size=batch))
    assert got.peak / 2**30 == pytest.approx(peak, rel=0.1)


def test_a_period_gathers_two_layers_and_the_experts_of_one():
    """libtpu's peaks of Gemma 4 31B (six dense layers) and Llama 4 Scout (four with experts) are within 2%."""
    experts = [_Gathered(2.0, True, slot, True) for slot in "0011"] + [_Gathered(3.0, True, "2", True)]
    others = [_Gathered(size, True, slot, False) for slot, size in zip("0123", (1.0, 5.0, 7.0, 2.0), strict=True)]
    assert _at_once(experts + others, most=2) == max(4.0, 4.0, 3.0) + 5.0 + 7.0
    assert _at_once(experts + others, most=6) == 4.0 + 15.0 and _at_once(others[:1], most=2) == 1.0


@pytest.mark.full
def test_rows_of_experts_are_estimated_to_pass_through_memory():
    """In libtpu's program of Qwen3.5-397B-A17B, cut to four layers, these rows are a third of the traffic."""
    bytes_of = lambda layout, k: (
        plan.estimated(
            plan.Job(dataclasses.replace(MIXTRAL, top_k=k), "h100x8", layout=layout, sequence=4096)
        ).costs.bytes
    )
    stay, travel = ([bytes_of(split, k) for k in (1, 2, 3)] for split in (layout("fsdp"), layout("ep", expert=8)))
    for sizes in (stay, travel):
        assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0]) and sizes[1] > sizes[0]
    rows = 4096 * 4 * 2  # of a device, in four layers, two bytes a number
    assert stay[1] - stay[0] >= 40 * rows * 32 and travel[1] - travel[0] > 1.2 * (stay[1] - stay[0])


@pytest.mark.parametrize(
    ("preset", "target", "degrees", "mfu"),
    [
        pytest.param("lfm2-8b-a1b", "v5p-8", {"expert": 4}, 0.585, marks=pytest.mark.full),
        ("mixtral-8x7b", "v6e-32", {"fsdp": 4, "expert": 8}, 0.624),
        pytest.param("mixtral-8x22b", "v6e-128", {"fsdp": 16, "expert": 8}, 0.721, marks=pytest.mark.full),
        pytest.param("gpt-oss-20b", "v6e-16", {"expert": 16}, 0.448, marks=pytest.mark.full),
        pytest.param("minimax-m2", "v6e-256", {"fsdp": 2, "expert": 128}, 0.456, marks=pytest.mark.full),
    ],
)
def test_the_memory_traffic_of_experts_is_that_of_the_compiler(preset, target, degrees, mfu):
    """By libtpu's programs, which only the memory bounds; of 56 with experts 43 are within 20%."""
    got = plan.estimated(plan.Job(preset, target, sequence=4096, remat="full", layout=layout("ep", **degrees)))
    assert got.costs.bytes == pytest.approx(moved_by_memory(got, mfu), rel=0.1)


def moved_by_memory(got, mfu):
    """Returns the bytes that the memory moves in the time of a program that it bounds, by its roofline MFU."""
    return got.target.chip.bandwidth * got.model_flops / (mfu * got.target.devices * got.target.chip.flops)


@pytest.mark.parametrize(
    ("preset", "target", "mfu"),
    [
        ("falcon-h1-0.5b", "v5p-8", 0.591),
        pytest.param("qwen3.5-0.8b", "v5p-8", 0.72, marks=pytest.mark.full),
        pytest.param("qwen3.5-0.8b", "v6e-4", 0.499, marks=pytest.mark.full),
        pytest.param("granite-4.0-h-1b", "v6e-4", 0.497, marks=pytest.mark.full),
    ],
)
def test_the_memory_traffic_of_recurrences_is_that_of_the_compiler(preset, target, mfu):
    """By libtpu's programs of models without experts, which only the memory bounds."""
    got = plan.estimated(plan.Job(preset, target, sequence=4096))
    assert got.costs.bytes == pytest.approx(moved_by_memory(got, mfu), rel=0.1)


@pytest.mark.full
def test_a_search_knows_that_larger_tiles_move_less():
    """libtpu's program of Mixtral-8x22B has 72.1% MFU at the roofline with expert 8 on v6e-128, with expert 4 59.2%."""
    mfu = lambda **degrees: (
        plan.estimated(
            plan.Job("mixtral-8x22b", "v6e-128", sequence=4096, remat="full", layout=layout("ep", **degrees))
        ).estimate.mfu
    )
    assert mfu(fsdp=16, expert=8) > mfu(fsdp=32, expert=4)


def test_tiles_with_rows_of_two_experts_are_estimated_to_be_computed_twice():
    """libtpu's program of Qwen3-30B-A3B on v5p-32 has 21.5% more arithmetic for them, the estimate 21.9%."""
    repeated = lambda target: plan.estimated(plan.Job(MIXTRAL, target, sequence=16, remat="full")).costs.repeated
    # Two forward passes, of down only one, and the gradients of rows and weights.
    rows, matmuls = 16 * 2, 3 * (2 + 1 + 1) - 1
    # All rows are in one tile, which is computed once for each of the experts: seven times too often for eight.
    assert repeated("v5p-8") == 4 * matmuls * 7 * 2 * rows * 32 * 48
    assert repeated("h100x8") == 0


def test_what_remat_computes_again_is_estimated():
    """libtpu's program of GPT-2 XL with "minimal" and eight sequences on v6e-4 has 1.06 times the model's FLOPs."""
    factor = lambda remat, cfg=CONFIG, split=layout(): (
        plan.estimated(plan.Job(cfg, "h100x8", sequence=16, remat=remat, layout=split)).flops_factor
    )
    factors = [factor(remat) for remat in ("full", "qkv", "minimal", None)]
    assert factors == sorted(factors, reverse=True) and factors[-1] == 1 and len({*factors}) == 4
    queries = 2 * CONFIG.dim * CONFIG.num_heads * CONFIG.head_dim * CONFIG.num_layers  # FLOPs of a token
    got = plan.estimated(plan.Job(CONFIG, "h100x8", sequence=16))
    saved = (factor({"moe": "keep"}) - factor({"q": "keep"})) * got.model_flops / got.tokens
    assert saved == pytest.approx(queries, rel=0.1)
    # Where tokens travel to experts, their gates and ups are always computed again.
    gates = 2 * 2 * 2 * MIXTRAL.dim * MIXTRAL.expert_dim * MIXTRAL.num_layers
    again = factor(None, MIXTRAL, layout("ep", expert=8)) - factor(None, MIXTRAL)
    mixture = plan.estimated(plan.Job(MIXTRAL, "h100x8", sequence=16))
    assert again * mixture.model_flops / mixture.tokens == pytest.approx(gates)


def test_activations_that_are_kept_pass_through_memory():
    """libtpu's programs of GPT-2 with eight sequences on v6e-4 move 23 GB with "minimal", 36 without remat."""
    job = plan.Job("gpt2", "v6e-4", sequence=1024, per_device_batch_size=8, layout=layout(fsdp=4))
    minimal, none = (plan.estimated(dataclasses.replace(job, remat=remat)) for remat in ("minimal", None))
    kept = none.analytic.activations - minimal.analytic.activations
    assert minimal.costs.bytes + kept < none.costs.bytes < minimal.costs.bytes + 2 * kept


def test_a_pipeline_that_idles_is_estimated_to():
    """libtpu counts 1.59 times the model's arithmetic for Llama3.2-1B in pp:8 on 4 stages, the estimate 1.67."""
    base, piped = dict(per_device_batch_size=2, sequence=16), lambda name: layout(name, stage=4, fsdp=2)
    long, short, early = (
        plan.estimated(plan.Job(CONFIG, "h100x8", layout=piped(name), **base))
        for name in ("fsdp+pp:8", "fsdp+pp:1", "fsdp+pp_1f1b:8")
    )
    head = 6 * 64 * 32 * (16 * 16) / 8
    assert (short.costs.flops - head) / (long.costs.flops - head) == pytest.approx(4 / (11 / 8))
    assert early.costs.flops == long.costs.flops
    hidden = 8 * 16 * 32 * 2
    for got, ticks in ((long, 11 / 8), (short, 4)):
        assert moved(got)["collective-permute", "stage"] == 2 * ticks * hidden
    gathered = [moved(got)["all-gather", "fsdp"] for got in (long, short)]
    outside = 2 * 2 * (64 * 32 * 2)  # embedding and head, once in each pass
    assert (gathered[0] - outside) / (gathered[1] - outside) == pytest.approx(11 / 4, rel=0.02)


def test_keys_and_values_of_a_split_sequence_are_estimated():
    """libtpu's programs hold the same permutes: two bfloat16 arrays in each pass, and two float32 ones backward."""
    base = dict(model=CONFIG, target="h100x8", per_device_batch_size=1 / 4, sequence=64)
    split = lambda way: layout(f"fsdp+cp_{way}", fsdp=2, context=4)
    by_scheme = {
        way: moved(plan.estimated(plan.Job(**base, layout=split(way)))) for way in ("ring", "gather", "ulysses")
    }
    keys, queries = 4 * (2 * 2 * 12) * 16 * 2, 4 * (2 * 4 * 12) * 16 * 2  # layers, numbers of a token, tokens, bytes
    assert by_scheme["ring"]["collective-permute", "context"] == (3 + 2) * 4 * keys
    assert (
        by_scheme["gather"]["all-gather", "context"]
        == 2 * by_scheme["gather"]["reduce-scatter", "context"]
        == 2 * 4 * keys
    )
    assert by_scheme["ulysses"]["all-to-all", "context"] == 3 * (queries + keys)
    for traffic in by_scheme.values():
        assert (
            traffic["all-reduce", "context"] == traffic["reduce-scatter", "fsdp"] / 2
        )  # their own part of the gradients


@pytest.mark.parametrize(
    ("strategy", "degrees"),
    [
        ("fsdp_tp+cp_ring", {"fsdp": 2, "tensor": 2, "context": 2}),
        pytest.param("dp+cp_gather", {"data": 2, "context": 4}, marks=pytest.mark.full),
        pytest.param("fsdp_tp+cp_ulysses", {"fsdp": 2, "tensor": 2, "context": 2}, marks=pytest.mark.full),
    ],
)
def test_plain_rules_cost_what_the_strategies_do_that_write_them(strategy, degrees):
    """The costs of `DataParallel`, `FullyShard`, `TensorParallel` and of a split sequence follow from the rules."""
    ours = layout(strategy, **degrees)
    job = plan.Job(CONFIG, "h100x8", layout=ours, per_device_batch_size=1 / 2, sequence=64)
    plain = dataclasses.replace(job, layout=layout(dict(ours.rules), **degrees))
    assert moved(plan.estimated(job)) == moved(plan.estimated(plain)) != {}


def test_a_strategy_that_states_no_costs_leaves_those_of_its_rules():
    @dataclasses.dataclass(frozen=True)
    class Own(sharding.Strategy):
        kind = "sequence"

        def apply(self, rules):
            return {**rules, "seq": "context", "q_seq": "context", "kv_seq": "context"}

    @dataclasses.dataclass(frozen=True)
    class Stated(Own):
        def traffic(self, step):
            yield "all-to-all", ("context",), 3.0 * step.tokens

        def host_copies(self, step):
            return 5.0, 7.0

    def estimated(strategy):
        custom = layout(sharding.FSDP | strategy, fsdp=2, context=4)
        return plan.estimated(plan.Job(CONFIG, "h100x8", layout=custom, per_device_batch_size=1 / 4, sequence=64))

    ring, rules, stated = map(estimated, (sharding.CP_RING, Own(), Stated()))
    assert moved(rules) == moved(ring) and moved(stated)["all-to-all", "context"] == 3 * 16
    assert ("collective-permute", "context") not in moved(stated)
    assert (stated.costs.to_host, stated.costs.from_host) == (5.0, 7.0)


def test_what_gpus_send_to_the_host_is_estimated(monkeypatch):
    monkeypatch.setattr(programs, "has_gpu_compiler", lambda: True)
    for change in (
        dict(layout=layout("fsdp+offload_optimizer")),
        dict(remat={"q": "offload"}),
        dict(remat="qkv_offload"),
    ):
        assert "without the host's memory" in programs.refused(plan.Job(model=CONFIG, target="h100x8", **change))
    assert programs.refused(plan.Job(model=CONFIG, target="h100x8", remat={"q": "keep"})) is None
