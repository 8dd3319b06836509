"""Plans end to end, on this machine's devices and from shapes only: jobs, reports, mistakes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest

from maxlib import nn, ops, plan, sharding, training
from maxlib._command import main
from maxlib.distributed import xla_flags
from maxlib.models import llama
from maxlib.ops.trip_counts import attention_trips
from maxlib.plan import _job as jobs
from maxlib.plan._program import mesh_of
from maxlib.plan._roofline import link_speeds
from maxlib.sharding import preset_name
from tests.plan.jobs import CONFIG, layout, moved
from tests.training import tiny


def bigram():
    return tiny.Bigram(rngs=tiny.nnx.Rngs(0))


@functools.cache
def compiled():
    return plan.plan(plan.Job(CONFIG, "cpu", layout=layout(data=2, fsdp=4), sequence=16, dtype="float32"))


def test_a_compiled_plan_counts_what_training_holds():
    got = compiled()
    ours = sharding.Layout(sharding.make_mesh(data=2, fsdp=4), sharding.FSDP)
    build = lambda: llama.Llama(CONFIG, rngs=tiny.nnx.Rngs(0))
    optimizer = training.adamw(1e-4, mask=training.decay_mask(jax.eval_shape(build)))
    state = training.abstract_state(build, optimizer, layout=ours)
    local = lambda tree: sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
    assert got.compiled and got.fits and got.num_parameters == nn.num_parameters(state.trainable)
    assert got.parameters == local((state.trainable, state.rest))
    assert got.optimizer == local(state.opt_state) + local(state.step) + 4
    assert got.gradients == local(state.trainable) and got.rows == 8 and got.tokens == 8 * 16


def test_the_program_gathers_weights_and_sums_gradients_over_the_right_axes():
    costs = compiled().costs
    assert costs is not None
    collectives = {(collective.kind, collective.axes) for collective in costs.collectives}
    assert ("all-gather", ("fsdp",)) in collectives and any(axes == ("data",) for _, axes in collectives)
    assert not any("tensor" in axes for _, axes in collectives)
    assert 1.0 < costs.flops * 8 / compiled().model_flops < 2.0  # one more forward pass, and masked tiles


def test_the_report_reads():
    text = str(compiled())
    for words in (
        "5.",
        "on cpu: 8 x",
        "mesh: data 2, fsdp 4; strategy: fsdp; remat: full",
        "gradients",
        "fits:",
        "all-gather",
        "A larger batch",
        "MFU is",
        "assumes",
    ):
        assert words in text


@pytest.mark.parametrize(("heads", "visited"), [(8, (2048 / 256 + 1) / 2), (16, (2048 / 128 + 1) / 2)])
def test_a_causal_mask_leaves_about_half_the_blocks_that_a_device_cuts(heads, visited):
    staged = jax.vmap(ops.attention)
    for attention, more in ((ops.attention, ()), (staged, (2,)), (jax.vmap(staged), (2, 2))):  # stages, parts of data
        x = jax.ShapeDtypeStruct((*more, 1, 2048, heads, 8), jnp.bfloat16)
        assert attention_trips(jax.jit(attention).lower(x, x, x).as_text()) == visited
    assert attention_trips("module @jit_step {}") == 1


def test_attention_that_is_no_loop_has_no_trips():
    few, many = (jax.ShapeDtypeStruct((1, tokens, 8, 8), jnp.bfloat16) for tokens in (512, 2048))

    def both(few, many):
        return ops.attention(few, few, few, implementation="reference"), ops.attention(many, many, many)

    assert attention_trips(jax.jit(both).lower(few, many).as_text()) == (2048 / 256 + 1) / 2


def test_jobs_travel_as_text():
    strategy = sharding.FSDP | sharding.SP | {"vocab": None}
    strategy |= sharding.PP_1F1B
    loss = training.NextToken(z_loss=1e-4)
    job = plan.Job(CONFIG, "cpu", layout=layout(strategy, dcn={"data": 2}), remat=("attn", "mlp"), loss=loss)
    again = jobs.from_json(jobs.to_json(job))
    assert again.model == CONFIG and again.remat == job.remat and again.layout == job.layout and again.loss == loss
    assert jobs.from_json(jobs.to_json(dataclasses.replace(job, model=bigram))).model is bigram
    with pytest.raises(ValueError, match="cannot be found by name in another process"):
        jobs.to_json(dataclasses.replace(job, model=lambda: None))


MISTAKES = {
    "preset": (dict(model="gemma2b"), r"no preset is called 'gemma2b'; did you mean 'gemma-2b'\?"),
    "degree": (dict(layout=layout(fsdp=3)), "needs 3 devices, but there are 8"),
    "heads": (dict(layout=layout("tp", tensor=8)), r"\(size [24]\) is not divisible by mesh axis 'tensor'"),
    "batch": (dict(per_device_batch_size=0.5), "4 in all, which must be a multiple of the 8 parts"),
    "attention": (dict(attention="flash"), "attention on h100x8 must be one of .*cudnn, .*; got 'flash'"),
    "remat": (dict(remat="some"), "remat must be None, one of"),
    "name": (dict(remat=("latent", "queue")), "names 'queue', which no layer marks; this model's layers mark q, k, v"),
    "optimizer": (dict(optimizer="lion"), "optimizer must be 'adamw', 'muon', 'sgd'"),
    "target": (dict(target="v5p-9"), "counts cores"),
    "none": (dict(target="h100x0"), "no hardware of 0 chips or slices"),
    "two axes": (
        dict(layout=layout({"embed": "fsdp", "mlp": "fsdp"})),
        "put .embed. and .mlp. both on the mesh axis .fsdp.",
    ),
    "experts": (
        dict(model="mixtral-8x7b", target="h100x16", layout=layout("ep", expert=16)),
        "'expert' .size 8. is not divisible",
    ),
    "layers": (dict(layout=layout("pp:8", stage=8)), "4 repeats of layers cannot be split into 8 stages"),
    "sequence": (
        dict(layout=layout("fsdp+cp_ring", fsdp=2, context=4), sequence=18),
        "of 18 tokens does not divide",
    ),
    "length": (dict(sequence=0), r"must be positive; got \{'sequence': 0\}"),
    "too many hosts": (dict(layout=layout(dcn={"data": 3}), target="h100x16"), "needs 3 hosts, but there are 2"),
    "microbatches": (
        dict(layout=layout("fsdp+pp:3", stage=4, fsdp=2)),
        "cannot be split into the pipeline's 3 micro",
    ),
    "around": (dict(layout=layout("fsdp+pp:2x2", stage=4, fsdp=2)), "groups of 4 stages"),
    "kernel": (dict(attention="splash"), "attention on h100x8 must be one of .*; got 'splash'"),
    "options": (dict(options=xla_flags.options("tpu-overlap")), "the compiler for h100x8 has no option xla_tpu_"),
    "gpu options": (dict(options=xla_flags.options("gpu-overlap"), target="v5e-16"), "v5e-16 has no option xla_gpu_"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_named(case):
    changes, words = MISTAKES[case]
    with pytest.raises(ValueError, match=words):
        plan.estimated(plan.Job(**({"model": CONFIG, "target": "h100x8", "sequence": 16} | changes)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: layout(fdsp=8),
            r"mesh: no mesh axis is named 'fdsp' \(did you mean 'fsdp'\?\); the axes are stage, data",
        ),
        (lambda: layout(dcn={"dat": 2}), r"dcn: no mesh axis is named 'dat' \(did you mean 'data'\?\)"),
        (
            lambda: layout({"embed": "fdsp"}),
            r"no mesh axis is named 'fdsp' \(did you mean 'fsdp'\?\)",
        ),
        (lambda: layout("zero9"), "a strategy must be one of dp, zero1"),
        (lambda: layout().mesh.shape, "has no devices yet: call layout.on"),
        (lambda: sharding.use(layout()).__enter__(), "has no devices yet: call layout.on"),
        (lambda: layout(fsdp=8).on(jax.devices()).on(jax.devices()), "already has a mesh"),
    ],
)
def test_mistakes_in_a_layout_are_named_before_there_is_a_job(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_the_layout_of_a_trainer_is_planned_on_other_devices_of_that_number():
    placed = layout("fsdp_tp", fsdp=-1, tensor=2).on(jax.devices())
    assert placed == sharding.Layout(sharding.make_mesh(fsdp=4, tensor=2), sharding.FSDP_TP)
    job = plan.Job(CONFIG, "h100x8", layout=placed, sequence=16)
    want = dataclasses.replace(job, layout=layout("fsdp_tp", fsdp=4, tensor=2))
    assert moved(plan.estimated(jobs.from_json(jobs.to_json(job)))) == moved(plan.estimated(want))


@pytest.mark.parametrize("name", [*sharding.PRESETS, "fsdp_tp_sp+cp_ring+pp:16x2", "ep+exchange_ragged+pp:4"])
def test_a_report_names_a_strategy_as_the_command_line_does(name):
    assert sharding.preset(preset_name(sharding.preset(name))) == sharding.preset(name)


def test_the_command_says_what_is_wrong(capsys):
    assert main(["plan", "llama9", "--target", "h100x8"]) == 2
    assert "no preset is called 'llama9'" in capsys.readouterr().err
    assert main(["plan", "llama3.2-1b", "--target", "h100x8", "--mesh", "fsdp=x"]) == 2
    assert "expected axis=number, such as fsdp=-1; got 'fsdp=x'" in capsys.readouterr().err


def test_an_estimate_says_that_nothing_was_compiled():
    text = str(plan.estimated(plan.Job(model=CONFIG, target="h100x8", sequence=16)))
    assert "as nothing was compiled" in text and "not counted are" in text and "every fusion" not in text
    assert "written" not in text and "every fusion" in str(compiled()) and "nothing was compiled" not in str(compiled())


def test_a_mesh_of_gpus_spreads_over_hosts_as_dcn_says():
    def estimated(**degrees):
        return plan.estimated(plan.Job(CONFIG, "h100x16", layout=layout("dp", **degrees), sequence=16))

    got = estimated(fsdp=8, dcn={"data": -1})
    assert (got.mesh["data"], got.mesh["fsdp"]) == (2, 8)
    inner = estimated(data=2, fsdp=4, dcn={"fsdp": 2})
    assert (inner.mesh["data"], inner.mesh["fsdp"]) == (2, 8)
    words = "data 450 GB/s, fsdp 200 GB/s"  # four ways out of a host
    assert words in str(inner) and "data 50 GB/s, fsdp 450 GB/s" in str(got)


def test_gpus_are_linked_within_a_host_and_each_has_a_way_out_of_it():
    def speeds(**mesh):
        job = plan.Job(CONFIG, "h100x16", layout=layout("dp", **mesh), sequence=16)
        return mesh_of(job), plan.parse_target("h100x16")

    near, out = 4.5e11, 5e10
    all_hosts = link_speeds(*speeds(fsdp=16))
    assert all_hosts["fsdp"] == 8 * out and all_hosts["tensor"] == near
    mixed = link_speeds(*speeds(data=4, tensor=4))
    assert mixed["data"] == 2 * out and mixed["tensor"] == near
    assert link_speeds(*speeds(data=2, fsdp=8))["data"] == out
