"""GPUs that are not here, described to XLA's compiler, which compiles Triton's kernels for them to machine code."""

import functools
from typing import Any

import jax
import numpy as np

GPUS = {  # compute capability, bytes of shared memory that a block of threads may have, jax's name
    "A100": ("major: 8", 166_912, "NVIDIA A100-SXM4-80GB"),
    "L40": ("major: 8 minor: 9", 101_376, "NVIDIA L40"),  # an L40S has the same chip, and no name in JAX's list
    "H100": ("major: 9 feature_extension: ACCELERATED_FEATURES", 232_448, "NVIDIA H100 80GB HBM3"),
    "B200": ("major: 10 feature_extension: ACCELERATED_FEATURES", 232_448, "NVIDIA B200"),
}
# A kernel that stores registers in memory is an error. Tests turn LLVM's optimizations off, users do not.
STRICT = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True, "xla_backend_optimization_level": 3}
_ABOUT = """
gpu_device_info {{
  cuda_compute_capability {{ {capability} }}
  core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.4
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 1536
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 1000000000000 l2_cache_size: 40000000 device_memory_size: 40000000000
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{kind}"
"""


@functools.cache
def mesh(gpu: str) -> jax.sharding.Mesh:
    """Returns a mesh of one GPU of this kind."""
    from jax.experimental import topologies

    capability, shared, kind = GPUS[gpu]
    about = _ABOUT.format(capability=capability, shared=shared, kind=kind)
    devices = topologies.get_topology_desc(gpu, "cuda", target_config=about, topology="1x1x1").devices
    return jax.sharding.Mesh(np.array(devices), ("data",))


def compile_for(gpu: str, run: Any, *arrays: jax.ShapeDtypeStruct) -> Any:
    """Compiles a function for a GPU.

    Raises:
      Exception: XLA's, when a kernel does not fit into registers or shared memory.
    """
    here = jax.sharding.NamedSharding(mesh(gpu), jax.sharding.PartitionSpec())
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for x in arrays]
    with jax.sharding.use_abstract_mesh(mesh(gpu).abstract_mesh):
        lowered = jax.jit(run).trace(*placed).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=STRICT)
