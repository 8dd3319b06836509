"""Statistics read from HLO text, against counts by hand."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxlib import sharding
from maxlib.kernels.vector_memory import vmem_of
from maxlib.ops._attention import splash
from maxlib.plan._hlo import read_costs
from maxlib.plan._roofline import estimate
from maxlib.plan._targets import parse_target
from tests.training.tiny import QUICKLY


def test_a_scanned_matmul_counts_as_often_as_it_runs():
    mesh = sharding.make_mesh(fsdp=4, tensor=2)
    place = lambda *axes: NamedSharding(mesh, P(*axes))
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=place("fsdp"))
    w = jax.ShapeDtypeStruct((5, 64, 64), jnp.float32, sharding=place(None, "fsdp", "tensor"))

    def layers(x, w):
        step = lambda x, w: (jax.lax.with_sharding_constraint(jnp.tanh(x @ w), place("fsdp")), None)
        return jax.lax.scan(step, x, w)[0]

    compiled = jax.jit(layers).lower(x, w).compile(compiler_options=QUICKLY)
    costs = read_costs(compiled.as_text(), dict(mesh.shape))
    assert costs.flops == 5 * 2 * (16 / 4) * 64 * (64 / 2)
    assert costs.bytes > 5 * 4 * 64 * 32
    collectives = {
        (collective.kind, collective.axes): (collective.runs, collective.bytes) for collective in costs.collectives
    }
    assert collectives[("all-gather", ("fsdp",))] == (5, 5 * 4 * 64 * 32)
    assert collectives[("all-gather", ("tensor",))] == (5, 5 * 4 * 4 * 64)


HEADS = 2 * 2048 * 32 * 128 * 4096  # every head's output meets one element of the window: the rest is padding
BATCHED = 2 * 32 * 128 * 128 * 128
TPU = """
HloModule jit_step

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(256)} parameter(0)
  %y = f32[]{:T(256)} parameter(1)
  ROOT %sum = f32[]{:T(256)} add(%x, %y)
}

%all-reduce-scatter.1 (input: bf16[32,4096]) -> bf16[32,1024] {
  %input = bf16[32,4096]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.1 = bf16[32,4096]{1,0:T(8,128)(2,1)} all-reduce(%input), channel_id=1, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, to_apply=%add
  %at = u32[] constant(0)
  ROOT %slice = bf16[32,1024]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.1, %at, %at), dynamic_slice_sizes={32,1024}
}

%body (state: (s32[], f32[32,128,128])) -> (s32[], f32[32,128,128]) {
  %state = (s32[]{:T(128)}, f32[32,128,128]{2,1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %a = f32[32,128,128]{2,1,0:T(8,128)S(1)} get-tuple-element(%state), index=1
  %batched = f32[32,128,128]{2,1,0:T(8,128)S(1)} convolution(%a, %a), window={size=32 stride=31 lhs_dilate=32}, dim_labels=0bf_0oi->0bf
  ROOT %next = (s32[]{:T(128)}, f32[32,128,128]{2,1,0:T(8,128)}) tuple(%i, %batched)
}

%condition (state.1: (s32[], f32[32,128,128])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, f32[32,128,128]{2,1,0:T(8,128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%i.1, %i.1), direction=LT
}

ENTRY %main (p: bf16[32,4096], q: f32[32,128,128]) -> bf16[32,1024] {
  %p = bf16[32,4096]{1,0:T(8,128)(2,1)} parameter(0)
  %q = f32[32,128,128]{2,1,0:T(8,128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, f32[32,128,128]{2,1,0:T(8,128)}) tuple(%zero, %q)
  %loop = (s32[]{:T(128)}, f32[32,128,128]{2,1,0:T(8,128)}) while(%start), condition=%condition, body=%body
  %x = bf16[2048,4096,1]{1,0,2} bitcast(%p)
  %w = bf16[32,128,4096]{2,1,0} bitcast(%p)
  %heads = bf16[2048,32,128]{0,2,1:T(8,128)(2,1)} convolution(%x, %w), window={size=32 pad=31_31 rhs_reversal=1}, dim_labels=bf0_0oi->b0f
  %near = bf16[32,4096]{1,0:T(8,128)(2,1)S(1)} copy(%p)
  %sent = bf16[32,4096]{1,0:T(8,128)(2,1)S(1)} collective-permute(%near), source_target_pairs={{0,4},{1,5},{4,0},{5,1}}
  %turned = bf16[32,4096]{1,0:T(8,128)(2,1)} all-to-all(%p), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  ROOT %mine = bf16[32,1024]{1,0:T(8,128)(2,1)} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_what_only_the_tpu_compiler_writes():
    text = TPU.replace("convolution(%p, %p)", "convolution(%x3, %w3)").replace(
        "  %heads",
        "  %x3 = bf16[2048,4096,1]{1,0,2} bitcast(%p)\n  %w3 = bf16[32,128,4096]{2,1,0} bitcast(%p)\n  %heads",
    )
    costs = read_costs(text, {"data": 2, "fsdp": 4}, trips={"attention": 3})
    assert costs.flops == HEADS + 3 * BATCHED and costs.unknown_loops == 1
    collectives = {
        collective.kind: (collective.axes, collective.written, collective.bytes) for collective in costs.collectives
    }
    array_bytes = 32 * 4096 * 2
    assert collectives == {
        "reduce-scatter": (("fsdp",), 1, array_bytes),
        "collective-permute": (("data",), 1, array_bytes),
        "all-to-all": (("data",), 1, array_bytes),
    }


LIMITED = TPU.replace("compare(%i.1, %i.1)", "compare(%i.1, %eight)").replace(
    "  ROOT %less", "  %eight = s32[]{:T(128)} constant(8)\n  ROOT %less"
)
UNROLLED = LIMITED.replace("tuple(%i, %batched)", "tuple(%raised, %batched)").replace(
    "  ROOT %next", "  %two = s32[]{:T(128)} constant(2)\n  %raised = s32[]{:T(128)} add(%i, %two)\n  ROOT %next"
)


def test_unrolled_loops_step_further():
    assert read_costs(LIMITED, {"fsdp": 8}).flops == HEADS + 8 * BATCHED
    assert read_costs(UNROLLED, {"fsdp": 8}).flops == HEADS + 4 * BATCHED


def test_elements_of_tuples_may_be_named_in_place():
    """libtpu 0.0.48 writes `%state#1` where other versions have an instruction `get-tuple-element`."""
    text = UNROLLED.replace(
        "f32[32,128,128]{2,1,0:T(8,128)}) parameter", "/*index=1*/f32[32,128,128]{2,1,0:S(1)}) parameter"
    )
    for name, tuple_name, index in re.findall(r"  %(\S+) = .* get-tuple-element\(%(\S+)\), index=(\d)", text):
        text = re.sub(rf"\n  %{name} = .*", "", text)
        text = re.sub(rf"%{re.escape(name)}(?=[,)])", f"%{tuple_name}#{index}", text)
    assert "get-tuple-element" not in text and "add(%state#0, %two)" in text
    assert read_costs(text, {"fsdp": 8}) == read_costs(UNROLLED, {"fsdp": 8})


def test_groups_whose_devices_are_counted_in_another_order():
    named = "replica_groups=mesh['axis_0'=1,'axis_1'=2,'axis_2'=2,'axis_3'=2], device_ids=([2,2,2]T(1,0,2)) {'axis_2'}"
    text = TPU.replace("replica_groups=[4,2]<=[2,4]T(1,0)", named).replace("{{0,4},{1,5},{4,0},{5,1}}", "{{0,0},{4,4}}")
    collectives = {
        collective.kind: collective.axes
        for collective in read_costs(text, {"fsdp": 2, "context": 2, "tensor": 2}).collectives
    }
    assert collectives["all-to-all"] == ("fsdp",) and collectives["collective-permute"] == ()


KERNEL = """
HloModule jit_step

ENTRY %main (q: bf16[8,64]) -> bf16[8,64] {
  %q = bf16[8,64]{1,0} parameter(0)
  ROOT %out = bf16[8,64]{1,0} custom-call(%q, %q), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"TUzv","cost_estimate":{"bytes_accessed":"5000","flops":"700","remote_bytes_transferred":"0","transcendentals":"30"},"needs_layout_passes":true}}
}
"""


def test_a_kernel_counts_as_it_says():
    costs = read_costs(KERNEL, {"fsdp": 1})
    assert (costs.flops, costs.bytes) == (700, 5000)
    silent = read_costs(KERNEL.replace("cost_estimate", "no_estimate"), {"fsdp": 1})
    assert (silent.flops, silent.bytes) == (0, 3 * 8 * 64 * 2)


# Of 32 layers on the host one at a time comes and goes; the loop carries its limit along. Then one copy of all comes.
HOST = """
HloModule jit_step

%fetched (all: f32[32,8,128], i: s32[]) -> f32[1,8,128] {
  %all = f32[32,8,128]{2,1,0:T(8,128)S(5)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  ROOT %one = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice(%all, %i), dynamic_slice_sizes={1,8,128}
}

%stored (all.1: f32[32,8,128], new: f32[1,8,128], i.1: s32[]) -> f32[32,8,128] {
  %all.1 = f32[32,8,128]{2,1,0:T(8,128)S(5)} parameter(0)
  %new = f32[1,8,128]{2,1,0:T(8,128)} parameter(1)
  %i.1 = s32[]{:T(128)} parameter(2)
  ROOT %whole = f32[32,8,128]{2,1,0:T(8,128)S(5)} dynamic-update-slice(%all.1, %new, %i.1)
}

%body (state: (s32[], f32[32,8,128], s32[])) -> (s32[], f32[32,8,128], s32[]) {
  %state = (s32[]{:T(128)}, f32[32,8,128]{2,1,0:T(8,128)S(5)}, s32[]{:T(128)}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%state), index=0
  %moments = f32[32,8,128]{2,1,0:T(8,128)S(5)} get-tuple-element(%state), index=1
  %limit = s32[]{:T(128)} get-tuple-element(%state), index=2
  %slice-start = ((f32[32,8,128]{2,1,0:T(8,128)S(5)}, s32[]{:T(128)}), f32[1,8,128]{2,1,0:T(8,128)}, u32[]{:S(2)}) async-start(%moments, %at), calls=%fetched
  %slice-update = ((f32[32,8,128]{2,1,0:T(8,128)S(5)}, s32[]{:T(128)}), f32[1,8,128]{2,1,0:T(8,128)}, u32[]{:S(2)}) async-update(%slice-start)
  %slice-done = f32[1,8,128]{2,1,0:T(8,128)} async-done(%slice-update)
  %update-start = ((f32[32,8,128]{2,1,0:T(8,128)S(5)}, f32[1,8,128]{2,1,0:T(8,128)}, s32[]{:T(128)}), f32[32,8,128]{2,1,0:T(8,128)S(5)}, u32[]{:S(2)}) async-start(%moments, %slice-done, %at), calls=%stored
  %update-done = f32[32,8,128]{2,1,0:T(8,128)S(5)} async-done(%update-start)
  ROOT %next = (s32[]{:T(128)}, f32[32,8,128]{2,1,0:T(8,128)S(5)}, s32[]{:T(128)}) tuple(%at, %update-done, %limit)
}

%condition (state.1: (s32[], f32[32,8,128], s32[])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, f32[32,8,128]{2,1,0:T(8,128)S(5)}, s32[]{:T(128)}) parameter(0)
  %to = s32[]{:T(128)} get-tuple-element(%state.1), index=2
  %from = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%from, %to), direction=LT
}

ENTRY %main (p: f32[32,8,128]) -> f32[32,8,128] {
  %p = f32[32,8,128]{2,1,0:T(8,128)S(5)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %all.2 = s32[]{:T(128)} constant(32)
  %begin = (s32[]{:T(128)}, f32[32,8,128]{2,1,0:T(8,128)S(5)}, s32[]{:T(128)}) tuple(%zero, %p, %all.2)
  %loop = (s32[]{:T(128)}, f32[32,8,128]{2,1,0:T(8,128)S(5)}, s32[]{:T(128)}) while(%begin), condition=%condition, body=%body
  %held = f32[32,8,128]{2,1,0:T(8,128)S(5)} get-tuple-element(%loop), index=1
  %copy-start = (f32[32,8,128]{2,1,0:T(8,128)}, f32[32,8,128]{2,1,0:T(8,128)S(5)}, u32[]{:S(2)}) copy-start(%held)
  ROOT %copy-done = f32[32,8,128]{2,1,0:T(8,128)} copy-done(%copy-start)
}
"""


def test_copies_between_device_and_host_count_as_often_as_they_run():
    costs = read_costs(HOST, {"fsdp": 1}, trips={"attention": 7})
    array_bytes = 32 * 8 * 128 * 4
    assert (costs.from_host, costs.to_host, costs.unknown_loops) == (2 * array_bytes, array_bytes, 0)
    assert costs.bytes == 3 * array_bytes  # the device's own memory is written twice and read once
    here = read_costs(HOST.replace("S(5)", ""), {"fsdp": 1})
    assert (here.from_host, here.to_host) == (0, 0) and here.bytes == 6 * array_bytes


BRANCHES = """
HloModule jit_step

%usual (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %few = f32[8,8]{1,0} all-to-all(%a), replica_groups={{0,1}}, dimensions={0}
}

%worst (b: f32[8,8]) -> f32[8,8] {
  %b = f32[8,8]{1,0} parameter(0)
  %more = f32[8,8]{1,0} all-to-all(%b), replica_groups={{0,1}}, dimensions={0}
  ROOT %most = f32[8,8]{1,0} all-to-all(%more), replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (p: f32[8,8], q: pred[]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %q = pred[] parameter(1)
  ROOT %made = f32[8,8]{1,0} conditional(%q, %p, %p), true_computation=%worst, false_computation=%usual
}
"""


def test_of_branches_the_cheapest_counts():
    costs = read_costs(BRANCHES, {"expert": 2})
    (collective,) = costs.collectives
    assert (collective.written, collective.runs, collective.bytes) == (1, 1, 8 * 8 * 4)
    assert costs.bytes == 2 * 8 * 8 * 4  # of the branch; the choice itself moves nothing
    assert "of 1 choices that data makes the one that computes and moves least" in costs.assumes[-1]
    same = read_costs(BRANCHES.replace("true_computation=%worst", "true_computation=%usual"), {"expert": 2})
    assert len(same.assumes) == 1


RAGGED = """
HloModule jit_step

ENTRY %main (rows: bf16[64,256], room: bf16[128,256], at: s32[8]) -> bf16[128,256] {
  %rows = bf16[64,256]{1,0} parameter(0)
  %room = bf16[128,256]{1,0} parameter(1)
  %at = s32[8]{0} parameter(2)
  ROOT %there = bf16[128,256]{1,0} ragged-all-to-all(%rows, %room, %at, %at, %at, /*index=5*/%at), replica_groups={{0,1}}
}
"""


def test_a_ragged_exchange_reads_and_writes_rows_and_not_the_buffer_around_them():
    costs = read_costs(RAGGED, {"expert": 2})
    assert costs.bytes == 2 * 64 * 256 * 2 and costs.collectives[0].bytes == 64 * 256 * 2


SLICED = """
HloModule jit_step

%part (weights: s8[12288]) -> s8[4096] {
  %weights = s8[12288]{0} parameter(0)
  ROOT %slice = s8[4096]{0:S(1)} slice(%weights), slice={[4096:8192]}
}

ENTRY %main (weights.1: s8[12288]) -> s8[4096] {
  %weights.1 = s8[12288]{0} parameter(0)
  %slice-start = ((s8[12288]{0}), s8[4096]{0:S(1)}, s32[]{:S(2)}) async-start(%weights.1), calls=%part
  ROOT %slice-done = s8[4096]{0:S(1)} async-done(%slice-start)
}
"""


def test_a_slice_that_is_fetched_ahead_reads_its_own_bytes_only():
    """Its result lies in another memory; the same slice within main memory is also written."""
    assert read_costs(SLICED, {"fsdp": 1}).bytes == 4096
    assert read_costs(SLICED.replace(":S(1)", ""), {"fsdp": 1}).bytes == 2 * 4096


def test_text_without_a_program():
    with pytest.raises(ValueError, match="no ENTRY"):
        read_costs("HloModule empty", {"fsdp": 1})


# One gather of 8 x 1024 numbers into 32 x 1024, begun in one fusion, carried on beside a matmul, ended in a third. The
# matmul reads one layer of ten, through a fusion within the fusion, in a loop from 1 to 9; slices sum over `data`.
SPREAD = """
HloModule jit_step

%begun (s: bf16[8,1024]) -> (bf16[8,1024], bf16[32,1024]) {
  %s = bf16[8,1024]{1,0} parameter(0)
  %gather.1 = bf16[32,1024]{1,0} all-gather(%s), channel_id=5, replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="4"}
  ROOT %started = (bf16[8,1024]{1,0}, bf16[32,1024]{1,0}) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%layer (stacked: bf16[10,128,128], at: s32[]) -> bf16[128,128] {
  %stacked = bf16[10,128,128]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %one = bf16[1,128,128]{2,1,0} dynamic-slice(%stacked, %at, %zero.1, %zero.1), dynamic_slice_sizes={1,128,128}
  ROOT %flat = bf16[128,128]{1,0} bitcast(%one)
}

%beside (s.1: bf16[8,1024], g: bf16[32,1024], w: bf16[10,128,128], i.1: s32[], x: bf16[64,128]) -> (bf16[64,128], bf16[32,1024]) {
  %s.1 = bf16[8,1024]{1,0} parameter(0)
  %g = bf16[32,1024]{1,0} parameter(1)
  %gather.2 = bf16[32,1024]{1,0} all-gather(%s.1), channel_id=5, replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="4"}
  %w = bf16[10,128,128]{2,1,0} parameter(2)
  %i.1 = s32[] parameter(3)
  %x = bf16[64,128]{1,0} parameter(4)
  %w.1 = bf16[128,128]{1,0} fusion(%w, %i.1), kind=kLoop, calls=%layer
  %product = bf16[64,128]{1,0} dot(%x, %w.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %both = (bf16[64,128]{1,0}, bf16[32,1024]{1,0}) tuple(%product, %gather.2)
}

%ended (s.2: bf16[8,1024], g.1: bf16[32,1024]) -> bf16[32,1024] {
  %s.2 = bf16[8,1024]{1,0} parameter(0)
  %g.1 = bf16[32,1024]{1,0} parameter(1)
  %gather.3 = bf16[32,1024]{1,0} all-gather(%s.2), channel_id=5, replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="4"}
  ROOT %done = bf16[32,1024]{1,0} custom-call(%s.2, %g.1, %gather.3), custom_call_target="AsyncCollectiveDone"
}

%body (state: (s32[], bf16[8,1024], bf16[10,128,128], bf16[64,128])) -> (s32[], bf16[8,1024], bf16[10,128,128], bf16[64,128]) {
  %state = (s32[], bf16[8,1024]{1,0}, bf16[10,128,128]{2,1,0}, bf16[64,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %mine = bf16[8,1024]{1,0} get-tuple-element(%state), index=1
  %all = bf16[10,128,128]{2,1,0} get-tuple-element(%state), index=2
  %rows = bf16[64,128]{1,0} get-tuple-element(%state), index=3
  %start = (bf16[8,1024]{1,0}, bf16[32,1024]{1,0}) fusion(%mine), kind=kCustom, calls=%begun
  %whole = bf16[32,1024]{1,0} get-tuple-element(%start), index=1
  %step = (bf16[64,128]{1,0}, bf16[32,1024]{1,0}) fusion(%mine, %whole, %all, %i, %rows), kind=kOutput, calls=%beside
  %next = bf16[64,128]{1,0} get-tuple-element(%step), index=0
  %end = bf16[32,1024]{1,0} fusion(%mine, %whole), kind=kCustom, calls=%ended
  ROOT %out = (s32[], bf16[8,1024]{1,0}, bf16[10,128,128]{2,1,0}, bf16[64,128]{1,0}) tuple(%i, %mine, %all, %next)
}

%condition (state.1: (s32[], bf16[8,1024], bf16[10,128,128], bf16[64,128])) -> pred[] {
  %state.1 = (s32[], bf16[8,1024]{1,0}, bf16[10,128,128]{2,1,0}, bf16[64,128]{1,0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%state.1), index=0
  %ten = s32[] constant(10)
  ROOT %less = pred[] compare(%i.2, %ten), direction=LT
}

ENTRY %main (p: bf16[8,1024], q: bf16[10,128,128], r: bf16[64,128]) -> (s32[], bf16[8,1024], bf16[10,128,128], bf16[64,128]) {
  %p = bf16[8,1024]{1,0} parameter(0)
  %q = bf16[10,128,128]{2,1,0} parameter(1)
  %r = bf16[64,128]{1,0} parameter(2)
  %first = s32[] constant(1)
  %first.1 = s32[] copy(%first)
  %begin = (s32[], bf16[8,1024]{1,0}, bf16[10,128,128]{2,1,0}, bf16[64,128]{1,0}) tuple(%first.1, %p, %q, %r)
  %token = token[] after-all()
  %sent = (bf16[64,128]{1,0}, u32[]{:S(2)}, token[]) send(%r, %token), channel_id=9, is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  ROOT %loop = (s32[], bf16[8,1024]{1,0}, bf16[10,128,128]{2,1,0}, bf16[64,128]{1,0}) while(%begin), condition=%condition, body=%body
}
"""


def test_a_collective_spread_over_fusions_counts_once():
    costs = read_costs(SPREAD, {"data": 2, "fsdp": 4}, across=("data",))
    collectives = {
        (collective.kind, collective.axes): (collective.written, collective.runs, collective.bytes)
        for collective in costs.collectives
    }
    gathered, rows = 2 * 32 * 1024, 2 * 64 * 128
    assert collectives == {("all-gather", ("fsdp",)): (1, 9, 9 * gathered), ("all-reduce", ("data",)): (1, 1, rows)}
    assert costs.flops == 9 * 2 * 64 * 128 * 128


def test_what_slices_send_each_other_is_a_permutation_or_what_it_says():
    for said, kind in (("ONE_TO_ONE", "collective-permute"), ("ALL_GATHER", "all-gather")):
        costs = read_costs(SPREAD.replace("ALL_REDUCE", said), {"stage": 2, "fsdp": 4}, across=("stage",))
        sizes = {collective.kind: collective.bytes for collective in costs.collectives if collective.axes == ("stage",)}
        assert sizes.keys() == {kind} and sizes[kind] >= 2 * 64 * 128


def test_fusions_move_the_slices_they_look_at_and_not_what_they_hand_on():
    costs = read_costs(SPREAD, {"data": 2, "fsdp": 4}, across=("data",))
    rows, layer, part, gathered = 2 * 64 * 128, 2 * 128 * 128, 2 * 8 * 1024, 2 * 32 * 1024
    begun, beside, small = part + gathered, 2 * rows + layer, 100
    assert costs.bytes == pytest.approx(9 * (begun + beside) + 2 * rows, abs=small)


GROUPED = """
HloModule jit_step

ENTRY %main (rows: bf16[1024,256], weights: bf16[4,512,256]) -> bf16[1024,512] {
  %rows = bf16[1024,256]{1,0:T(8,128)(2,1)} parameter(0)
  %weights = bf16[4,512,256]{2,1,0:T(8,128)(2,1)} parameter(1)
  ROOT %gmm.1 = bf16[1024,512]{1,0:T(8,128)(2,1)} custom-call(%rows, %weights), custom_call_target="tpu_custom_call", operand_layout_constraints={s32[], s32[5]{0}, s32[5]{0}, s32[5]{0}, s32[1]{0}, bf16[1024,256]{1,0}, bf16[4,512,256]{2,1,0}}, metadata={op_name="jit(step)/jit(gmm)/pallas_call" id=1}, backend_config={"custom_call_config":{"cost_estimate":{"flops":"268435456","transcendentals":"0","bytes_accessed":"999999999"}}}
}
"""


def test_a_grouped_matmul_reads_an_experts_matrix_once():
    """Whatever its own estimate says; with one tile along K and N, all else is read and written once, too."""
    costs = read_costs(GROUPED, {"fsdp": 1})
    assert costs.flops == 2 * 1024 * 256 * 512
    visited = (
        1024 // 512 + 3
    ) * 512  # tiles of 512 rows; where an expert's rows begin inside a tile, both neighbours read it
    assert costs.bytes == 2 * (visited * 256 + 4 * 512 * 256 + 1024 * 512)


def test_tiles_with_rows_of_two_experts_are_computed_twice():
    """1024 rows fill two tiles of 512; with the borders of four experts inside of tiles, five are computed."""
    costs = read_costs(GROUPED, {"fsdp": 1})
    assert costs.repeated == 3 * 2 * 512 * 256 * 512
    v5p, model = parse_target("v5p-8"), costs.flops
    roofline = estimate(costs, v5p, {"fsdp": 1}, {"fsdp": 1e9}, tokens=1024, model_flops=model)
    assert roofline.compute == pytest.approx((costs.flops + costs.repeated) / v5p.chip.flops)
    assert any("150.0% more arithmetic" in sentence for sentence in roofline.assumptions)


def test_a_grouped_matmul_visits_only_the_rows_of_its_buffer_that_arrive():
    costs = read_costs(GROUPED, {"expert": 8}, trips={"room": 2})
    assert costs.flops == 2 * 512 * 256 * 512
    assert costs.bytes == 2 * ((512 // 512 + 3) * 512 * 256 + 4 * 512 * 256 + 512 * 512)


def test_with_more_vector_memory_a_grouped_matmul_reads_its_rows_less_often():
    """Of wide experts: as many columns of tiles as the kernel has on the chip."""
    wide = GROUPED.replace("256]", "4096]").replace("512", "8192")
    less, more = (read_costs(wide, {"fsdp": 1}, vmem=vmem_of(chip)) for chip in ("TPU v6e", "TPU v5p"))
    assert less.bytes < 0.8 * more.bytes and less.flops == more.flops


WINDOW = """
HloModule jit_step

ENTRY %main (q: bf16[4,1024,512], k: bf16[1,1024,512]) -> bf16[4,1024,512] {
  %q = bf16[4,1024,512]{2,1,0} parameter(0)
  %k = bf16[1,1024,512]{2,1,0} parameter(1)
  ROOT %out = bf16[4,1024,512]{2,1,0} custom-call(%q, %k, %k), custom_call_target="tpu_custom_call", operand_layout_constraints={bf16[4,1024,512]{2,1,0}, bf16[1,1024,512]{2,1,0}, bf16[1,1024,512]{2,1,0}}, metadata={op_name="jit(step)/splash_causal_128/splash_mha_fwd_residuals/pallas_call"}
}
"""


def test_a_narrow_window_counts_the_blocks_that_the_kernel_visits():
    block, index = splash.splash_tiles(1024, 1024, 512, 512, 128).forward, jnp.arange(1024)[None]
    visited = splash._visited(block, jnp.maximum(index - 127, 0), index + 1, 1024, 1024, 1024)
    assert block.queries == block.keys == 256 and visited.sum() == 7
    assert read_costs(WINDOW, {"fsdp": 1}).flops == 2 * 4 * 7 * 256**2 * (512 + 512)
