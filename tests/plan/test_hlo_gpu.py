"""Statistics read from the HLO text of GPU programs, against counts by hand."""

import pytest

from maxlib.ops.trip_counts import grouped_matmul_trips, trips_of_loop
from maxlib.plan._hlo import read_costs
from maxlib.plan._hlo_work import custom_flops

# As XLA for CUDA writes it. A layer of 7 gathers its weight and multiplies in a kernel of Triton's; after the loop
# cuBLAS multiplies once more, and gradients are scattered. The small sum in the loop stays in the cache.
PROGRAM = """
HloModule jit_step, is_scheduled=true

%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%x, %y)
}

%gemm_fusion_computation (p.0: bf16[2048,1024], p.1: bf16[4096,1024]) -> bf16[2048,4096] {
  %p.0 = bf16[2048,1024]{1,0} parameter(0)
  %p.1 = bf16[4096,1024]{0,1} parameter(1)
  ROOT %dot.1 = bf16[2048,4096]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%body (state: (s32[], bf16[2048,1024], bf16[4096,128])) -> (s32[], bf16[2048,1024], bf16[4096,128]) {
  %state = (s32[], bf16[2048,1024]{1,0}, bf16[4096,128]{0,1}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %rows = bf16[2048,1024]{1,0} get-tuple-element(%state), index=1
  %mine = bf16[4096,128]{0,1} get-tuple-element(%state), index=2
  %all-gather-start = (bf16[4096,128]{0,1}, bf16[4096,1024]{0,1}) all-gather-start(%mine), channel_id=1, replica_groups=mesh['axis_0'=2,'axis_1'=8] {'axis_1'}, dimensions={1}, use_global_device_ids=true
  %all-gather-done = bf16[4096,1024]{0,1} all-gather-done(%all-gather-start)
  %gemm_fusion = bf16[2048,4096]{1,0} fusion(%rows, %all-gather-done), kind=kCustom, calls=%gemm_fusion_computation, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %small = bf16[64,1024]{1,0} slice(%rows), slice={[0:64], [0:1024]}
  %smaller = bf16[64,1024]{1,0} add(%small, %small)
  ROOT %next = (s32[], bf16[2048,1024]{1,0}, bf16[4096,128]{0,1}) tuple(%i, %rows, %mine)
}

%condition (state.1: (s32[], bf16[2048,1024], bf16[4096,128])) -> pred[] {
  %state.1 = (s32[], bf16[2048,1024]{1,0}, bf16[4096,128]{0,1}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %less = pred[] fusion(%i.1), kind=kLoop, calls=%compare
}

%compare (i.2: s32[]) -> pred[] {
  %i.2 = s32[] parameter(0)
  %limit = s32[] constant(7)
  ROOT %is = pred[] compare(%i.2, %limit), direction=LT
}

%pair (q.1: f32[64,64]) -> ((f32[64], f32[64]), f32[64,64]) {
  %q.1 = f32[64,64]{1,0} parameter(0)
  %both = (f32[64]{0}, f32[64]{0}) reduce(%q.1, %q.1), dimensions={1}, to_apply=%add
  ROOT %nested = ((f32[64]{0}, f32[64]{0}), f32[64,64]{1,0}) tuple(%both, %q.1)
}

ENTRY %main (p: bf16[2048,1024], q: bf16[4096,128], r: f32[64,64]) -> bf16[2048,128] {
  %p = bf16[2048,1024]{1,0} parameter(0)
  %q = bf16[4096,128]{0,1} parameter(1)
  %r = f32[64,64]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %begin = (s32[], bf16[2048,1024]{1,0}, bf16[4096,128]{0,1}) tuple(%zero, %p, %q)
  %loop = (s32[], bf16[2048,1024]{1,0}, bf16[4096,128]{0,1}) while(%begin), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}
  %cublas-gemm.1 = (bf16[2048,2048]{1,0}, s8[4194304]{0}) custom-call(%p, %p), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  %tuples = ((f32[64]{0}, f32[64]{0}), f32[64,64]{1,0}) fusion(%r), kind=kInput, calls=%pair
  %reduce-scatter-start = ((bf16[2048,1024]{1,0}), bf16[2048,128]{1,0}) reduce-scatter-start(%p), channel_id=3, replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}, dimensions={1}, to_apply=%add
  ROOT %reduce-scatter-done = bf16[2048,128]{1,0} reduce-scatter-done(%reduce-scatter-start)
}
"""
MESH = {"data": 2, "fsdp": 8}


def test_loops_matmuls_and_collectives_of_a_gpu_program():
    costs = read_costs(PROGRAM, MESH)
    assert costs.flops == 7 * 2 * 2048 * 1024 * 4096 + 2 * 2048 * 1024 * 2048 and costs.unknown_loops == 0
    collectives = {
        (collective.kind, collective.axes): (collective.written, collective.runs, collective.bytes)
        for collective in costs.collectives
    }
    assert collectives == {
        ("all-gather", ("fsdp",)): (1, 7, 7 * 2 * 4096 * 1024),
        ("reduce-scatter", ("fsdp",)): (1, 1, 2 * 2048 * 1024),
    }


def test_operands_of_eight_bits_count_apart():
    """A matmul of FP8 in cuBLAS; one whose operands differ is computed in the wider dtype."""
    p8 = "%p8 = f8e4m3fn[2048,1024]{1,0} convert(%p)\n  "
    text = PROGRAM.replace("  %cublas-gemm.1", f"  {p8}%cublas-gemm.1").replace(
        'custom-call(%p, %p), custom_call_target="__cublas$gemm"',
        'custom-call(%p8, %p8), custom_call_target="__cublas$lt$matmul$f8"',
    )
    costs = read_costs(text, MESH)
    assert costs.narrow == {"fp8": 2 * 2048 * 1024 * 2048} and costs.flops == read_costs(PROGRAM, MESH).flops
    assert read_costs(text.replace("custom-call(%p8, %p8)", "custom-call(%p8, %p)"), MESH).narrow == {}
    assert read_costs(PROGRAM, MESH).narrow == {}


def test_what_fits_the_cache_is_not_moved():
    part = 2 * 64 * 1024
    spared = 7 * (part + 2 * part) + (4 + 4) * 64 * 64 + 2 * 4 * 64  # the sums in the loop, the fusion of two sums
    both = read_costs(PROGRAM, MESH).bytes, read_costs(PROGRAM, MESH, cache=3 * part).bytes
    assert both[0] - both[1] == pytest.approx(spared, rel=0.05)


LOOKUP = """
HloModule jit_step

%rows (table: f32[4096,128], at: s32[16]) -> f32[16,128] {
  %table = f32[4096,128]{1,0} parameter(0)
  %at = s32[16]{0} parameter(1)
  ROOT %row = f32[16,128]{1,0} gather(%table, %at), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,128}
}

ENTRY %main (p: f32[4096,128], i: s32[16]) -> (f32[16,128], f32[16,128]) {
  %p = f32[4096,128]{1,0} parameter(0)
  %i = s32[16]{0} parameter(1)
  %fused = f32[16,128]{1,0} fusion(%p, %i), kind=kLoop, calls=%rows
  %alone = f32[16,128]{1,0} gather(%p, %i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,128}
  ROOT %both = (f32[16,128]{1,0}, f32[16,128]{1,0}) tuple(%fused, %alone)
}
"""


def test_a_gather_reads_its_rows_not_the_table():
    rows = 4 * 16 * 128
    assert read_costs(LOOKUP, MESH).bytes == pytest.approx(2 * (rows + rows), rel=0.01)


def kernel(name: str) -> str:
    return f'custom_call_target="mosaic_gpu_v2", metadata={{op_name="jit(step)/shard_map/{name}/mpmd_map"}}'


@pytest.mark.parametrize(("name", "keys", "values"), [("forward", 1, 1), ("dq", 2, 1), ("dk_dv", 2, 2)])
def test_attention_kernels_count_about_half_the_pairs(name, keys, values):
    shapes = [[2, 4096, 8, 96], [2, 4096, 4, 96], [2, 4096, 4, 64]]
    assert custom_flops(kernel(f"attention_{name}"), shapes, [shapes[0]]) == pytest.approx(
        2 * 2 * 8 * (4096 * 4096 / 2) * (keys * 96 + values * 64), rel=0.04
    )
    staged = [[3, *shape] for shape in shapes]
    assert custom_flops(kernel(f"attention_{name}"), staged, staged) == 3 * custom_flops(
        kernel(f"attention_{name}"), shapes, shapes
    )
    assert custom_flops('custom_call_target="Sharding"', shapes, shapes) == 0


@pytest.mark.parametrize(
    ("name", "operands", "results"),
    [
        ("forward", "bf16[1024,64]{1,0}, bf16[8,64,96]{2,1,0}, s32[9]{0}", [[1024, 96]]),
        ("d_weights", "bf16[1024,64]{1,0}, bf16[1024,96]{1,0}, s32[9]{0}", [[8, 64, 96]]),
    ],
)
def test_kernels_in_triton_name_their_operands(name, operands, results):
    """Also those that the calling computation lacks."""
    target = f'custom_call_target="triton_kernel_call_ffi", operand_layout_constraints={{{operands}}}, '
    rest = f'{target}metadata={{op_name="jit(step)/grouped_matmul_{name}/triton_kernel_call"}}'
    assert custom_flops(rest, [[9]], results) == 2 * 1024 * 64 * 96


@pytest.mark.parametrize(
    ("name", "operands", "results", "matrices"),
    [
        ("forward", [[1024, 64], [8, 96, 64], [12, 2]], [[1024, 96]], 1),
        ("gate_up", [[1024, 64], [8, 96, 64], [8, 96, 64]], [[1024, 96], [1024, 96]], 2),
        ("d_weights", [[1024, 96], [1024, 64], [9]], [[8, 96, 64]], 1),
        ("d_rows", [[8], [1024, 96], [8, 96, 64]], [[1024, 64]], 1),  # JAX's
        ("d_weights", [[8], [8], [96, 1024], [1024, 64]], [[8, 96, 64]], 1),  # tokamax's
    ],
)
def test_grouped_kernels_multiply_each_row_with_one_expert(name, operands, results, matrices):
    assert custom_flops(kernel(f"grouped_matmul_{name}"), operands, results) == matrices * 2 * 1024 * 96 * 64


def test_loops_over_experts_run_as_for_equal_shares():
    call = "func.func private @maxlib.ops.grouped_matmul(%arg0: tensor<8192x64xbf16>, %arg1: tensor<8x96x64xbf16>"
    trips = grouped_matmul_trips(call)
    # Of 1024 rows each, in tiles of 512 to 64, the last of which is half empty on average.
    assert trips["experts"] == 8 and trips["tiles"] * (512 + 256 + 128 + 64) == 1024 + 32
    name = 'op_name="jit(step)/while/body/jit(maxlib.ops.grouped_matmul)/while{}" stack=1'
    assert (
        trips_of_loop(name.format(""), trips) == 8
        and trips_of_loop(name.format("/body/while"), trips) == trips["tiles"]
    )
    assert trips_of_loop('op_name="jit(step)/jit(_attention)/while/body/while"', trips | {"attention": 5}) == 5
    assert grouped_matmul_trips(call, room=2)["tiles"] * 960 == 512 + 32
    assert grouped_matmul_trips("module @jit_step {}") == {}
