"""Named sets of XLA flags by platform and goal, applied from Python before jax starts.

`python -m maxlib.distributed.xla_flags` prints them.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Mapping

from maxlib.hardware import chip_of

VARIABLES = {"cpu": "XLA_FLAGS", "gpu": "XLA_FLAGS", "tpu": "LIBTPU_INIT_ARGS"}
# Without these environment variables, libtpu searches for a TPU and waits.
WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # other processes may hold libtpu's lock file
}


@dataclasses.dataclass(frozen=True)
class FlagSet:
    """Flags for one `platform` (cpu, gpu, tpu) and one `goal`; also accepted by `plan(options=...)` for TPUs."""

    platform: str
    goal: str
    flags: Mapping[str, bool | int | str]

    def __str__(self) -> str:
        return " ".join(_word(name, value) for name, value in self.flags.items())


MIB = 1 << 20
SETS = {
    "cpu-quick-compile": FlagSet(
        "cpu",
        "for tests: programs compile faster and run slower",
        {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
    ),
    "gpu-overlap": FlagSet(
        "gpu",
        "collectives run at the same time as matmuls, and across the iterations of a scan over layers (FSDP, data parallelism); automatic on several GPUs",
        {
            "xla_gpu_enable_latency_hiding_scheduler": True,
            "xla_gpu_enable_pipelined_all_gather": True,
            "xla_gpu_enable_pipelined_reduce_scatter": True,
            "xla_gpu_enable_pipelined_all_reduce": True,
            "xla_gpu_enable_while_loop_double_buffering": True,
            "xla_gpu_all_gather_combine_threshold_bytes": 1024 * MIB,
            "xla_gpu_reduce_scatter_combine_threshold_bytes": 128 * MIB,
            "xla_gpu_all_reduce_combine_threshold_bytes": 1024 * MIB,
        },
    ),
    "gpu-deterministic": FlagSet(
        "gpu",
        "bitwise reproducible runs, somewhat slower; `probes.Recompute` needs it",
        {"xla_gpu_deterministic_ops": True, "xla_gpu_exclude_nondeterministic_ops": True},
    ),
    "gpu-fail-fast": FlagSet(
        "gpu",
        "a process whose peer has died fails with an error instead of waiting in a collective",
        {
            "xla_gpu_nccl_terminate_on_error": True,
            "xla_gpu_nccl_termination_timeout_seconds": 300,
            "xla_gpu_first_collective_call_terminate_timeout_seconds": 600,
        },
    ),
    "tpu-overlap": FlagSet(
        "tpu",
        "all-gathers and reductions run at the same time as matmuls (FSDP within a slice)",
        {
            "xla_tpu_enable_async_collective_fusion": True,
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
            "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
            "xla_tpu_overlap_compute_collective_tc": True,
            "xla_enable_async_all_gather": True,
        },
    ),
    "tpu-memory": FlagSet(
        "tpu",
        "schedules for 90 % of the memory, and does not gather weights during the preceding matmuls: less memory, less overlap",
        {
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
            "xla_tpu_scheduler_percent_shared_memory_limit": 90,
        },
    ),
    "tpu-gather": FlagSet(
        "tpu",
        "gathers weights before their matmuls, not part by part within them: less traffic of memory, less overlap; automatic on v6e without tensor parallelism",
        {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1 << 20},
    ),
    "tpu-vmem": FlagSet(
        "tpu",
        "larger tiles in fast memory for dense models on v6e, whose cores have 128 MiB of it",
        {"xla_tpu_scoped_vmem_limit_kib": 98304},
    ),
}


def apply(*names: str) -> None:
    """Adds the flags of these sets to the environment, for this process and its children.

    Flags that are already set are not changed. Raises RuntimeError when jax has already started its backends, and
    ValueError for unknown sets or sets with conflicting values.
    """
    chosen = {name: _find(name) for name in names}
    if "jax" in sys.modules and _started():
        raise RuntimeError(
            f"too late for the flags {', '.join(names)}: jax has started its devices. Call xla_flags.apply before "
            "anything that computes or lists devices"
        )
    for variable in sorted({VARIABLES[each.platform] for each in chosen.values()}):
        flags = _merged({name: each for name, each in chosen.items() if VARIABLES[each.platform] == variable})
        have = os.environ.get(variable, "").split()
        present = {word.lstrip("-").partition("=")[0] for word in have}
        os.environ[variable] = " ".join(have + [_word(*flag) for flag in flags.items() if flag[0] not in present])


def options(*names: str) -> dict[str, bool | int | str]:
    """Returns sets as compiler options of one program: `lowered.compile(compiler_options=...)`, `plan(options=...)`.

    Leaves out flags that the installed jax accepts in the environment only, without effect.
    """
    flags = _merged({name: _find(name) for name in names})
    return {flag: value for flag, value in flags.items() if not (flag in _ALWAYS and _always_pipelines())}


# Since jax 0.11 XLA always pipelines collectives, and knows these flags no longer as options.
_ALWAYS = {f"xla_gpu_enable_pipelined_{kind}" for kind in ("all_gather", "reduce_scatter", "all_reduce")}


def _always_pipelines() -> bool:
    import jax  # here, so that `apply` can run before jax is imported

    return jax.__version_info__ >= (0, 11)


# Axes of `sharding.make_mesh` over which no matmul is split by its summed or its output width. Any other axis, such as
# "model" or "tp" of a mesh that was made elsewhere, may be one of tensor parallelism.
_NO_TENSOR = {"stage", "data", "fsdp", "expert", "context"}


def automatic(device: tuple[str, str], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the names of the sets that `training.jit_step` compiles a step with.

    These are `gpu-overlap` on several GPUs, and `tpu-gather` on TPU v6e without tensor parallelism, whose matmuls hide
    the exchange of activations by working part by part.

    Args:
        device: Platform and kind, as `hardware.current_device` returns them.
        mesh: Devices along each axis of the mesh.
    """
    platform, kind = device
    if platform == "gpu" and "NVIDIA" in kind and math.prod(mesh.values()) > 1:
        return ("gpu-overlap",)
    is_v6e = platform == "tpu" and (chip := chip_of(kind)) is not None and chip.kind == "TPU v6e"
    split = {axis for axis, size in mesh.items() if size > 1}
    return ("tpu-gather",) if is_v6e and split <= _NO_TENSOR else ()


def automatic_options(device: tuple[str, str], mesh: Mapping[str, int]) -> dict[str, bool | int | str]:
    """Returns the sets of `automatic` as compiler options, without flags that the environment sets."""
    words = " ".join(os.environ.get(name, "") for name in set(VARIABLES.values())).split()
    taken = {word.lstrip("-").partition("=")[0] for word in words}
    return {flag: value for flag, value in options(*automatic(device, mesh)).items() if flag not in taken}


def _find(name: str) -> FlagSet:
    if name not in SETS:
        raise ValueError(f"no set of XLA flags is named {name!r}; known sets are {', '.join(SETS)}")
    return SETS[name]


def _merged(sets: Mapping[str, FlagSet]) -> dict[str, bool | int | str]:
    flags: dict[str, bool | int | str] = {}
    for name, each in sets.items():
        for flag, value in each.flags.items():
            if flags.setdefault(flag, value) != value:
                raise ValueError(
                    f"{name} sets {flag}={value}, another of {list(sets)} sets {flags[flag]}: choose one of them"
                )
    return flags


def _started() -> bool:
    from jax._src import xla_bridge  # as jax.distributed.initialize does; there is no public function

    return xla_bridge.backends_are_initialized()


def _word(name: str, value: bool | int | str) -> str:
    return f"--{name}={str(value).lower() if isinstance(value, bool) else value}"


def main() -> None:
    for name, chosen in SETS.items():
        print(f"{name}: {chosen.goal}\n  {VARIABLES[chosen.platform]}='{chosen}'")


if __name__ == "__main__":
    main()
