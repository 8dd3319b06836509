"""`maxlib doctor`: describes the machine and the installation. Include its output in bug reports."""

import argparse
import importlib.metadata
import json
import platform
from typing import Any

REQUIRED = (
    "maxlib",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "safetensors",
    "tokenizers",
)
EXTRAS = {
    "cuda": "jax-cuda13-plugin",
    "eval": "lm-eval",
    "examples": "matplotlib",
    "gcs": "gcsfs",
    "gguf": "gguf",
    "grammar": "llguidance",
    "hf": "datasets",
    "hub": "huggingface_hub",
    "images": "pillow",
    "linear-attention": "jax-linear-attention",
    "math": "math-verify",
    "mlflow": "mlflow-skinny",
    "notebooks": "jupyterlab",
    "parquet": "pyarrow",
    "s3": "s3fs",
    "serve": "uvicorn",
    "tensorboard": "tensorboardX",
    "tests": "transformers",
    "tpu": "libtpu",
    "trackio": "trackio",
    "video": "av",
    "wandb": "wandb",
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one object")


def run(args: argparse.Namespace) -> int:
    sections = {"versions": versions(), "extras": extras(), "devices": devices(), "kernels": kernels()}
    if args.json:
        print(json.dumps(sections, indent=1))
        return 0
    for title, entries in sections.items():
        print(f"{title}\n" + "\n".join(f"  {name:<18}{value}" for name, value in entries.items()))
    return 0


def show_versions() -> None:
    """Prints the versions of maxlib, its dependencies, Python and the platform."""
    print("\n".join(f"{name:<18}{value}" for name, value in versions().items()))


def versions() -> dict[str, str]:
    here = {"python": platform.python_version(), "platform": platform.platform()}
    return {name: _version(name) or "not installed" for name in REQUIRED} | here


def extras() -> dict[str, str]:
    """Lists which extras are installed, and how to install the others."""
    return {name: _version(package) or f'pip install "maxlib[{name}]"' for name, package in EXTRAS.items()}


def _version(package: str) -> str | None:
    if package == "maxlib":
        import maxlib

        return maxlib.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> dict[str, str]:
    import jax

    device, processes = jax.devices()[0], jax.process_count()
    count = f"{jax.device_count()} in {processes} process{'es' if processes > 1 else ''}"
    about = {"platform": device.platform, "kind": device.device_kind, "number": count}
    about["data sheet"] = data_sheet(device.platform, device.device_kind)
    slow = slow_code(device.device_kind, jax.__version__)
    return about | ({"kernels": slow} if slow else {})


def slow_code(kind: str, version: str) -> str | None:
    """Says what makes kernels in Mosaic GPU slow: from 0.12 on, jax assembles them in a mode that gives warpgroups no
    registers of others (docs/kernels.md).
    """
    from maxlib.hardware import is_hopper

    if not is_hopper(kind) or tuple(map(int, version.split(".")[:2])) < (0, 12):
        return None
    return f"jax {version} makes slow code of those for Hopper: pip install 'jax[cuda13]<0.12'"


def data_sheet(platform: str, kind: str) -> str:
    """Says what the maker's data sheet promises of one device, by which MFU and plans are computed."""
    from maxlib.hardware import GIB, chip_of

    if platform == "cpu":
        return "none for CPUs, so no MFU is shown"
    if (chip := chip_of(kind)) is None:
        return "unknown here, so no MFU is shown; maxlib.hardware.CHIPS has those that are known"
    return f"{chip.flops / 1e12:,.0f} bfloat16 TFLOP/s, {chip.memory / GIB:.1f} GiB a device"


def kernels(device: tuple[str, str] | None = None) -> dict[str, str]:
    """Names the implementations of usual calls in bfloat16, forward and backward.

    Args:
        device: Platform and kind, as in `ops.explain_attention`; default: the device in use.
    """
    import jax
    import jax.numpy as jnp

    from maxlib import ops

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype)

    causal = ops.StaticMask("causal", aligned=True)
    calls = {
        "causal": (2048, causal, {}),
        "packed rows": (2048, ops.StaticMask("causal", aligned=True, segmented=True), {}),
        "soft-cap": (2048, causal, {"softcap": 50.0}),
        "decoding": (1, ops.StaticMask("causal"), {}),
    }
    chosen, keys = {}, shape(4, 2048, 8, 128)
    for name, (length, mask, more) in calls.items():
        bounds = shape(4, length, dtype=jnp.int32)
        more |= {"k_start": bounds, "k_end": bounds, "mask_hint": mask, "device": device}
        chosen[name] = ops.explain_attention(shape(4, length, 32, 128), keys, keys, **more)
    heads = shape(4, 2048, 8, 128)
    chosen |= {
        "grouped matmul": ops.explain_grouped_matmul(shape(4096, 2048), shape(8, 1024, 2048), device=device),
        "gated delta rule": ops.explain_gated_delta_rule(heads, heads, device=device),
        "Kimi delta": ops.explain_gated_delta_rule(heads, heads, by_channel=True, device=device),
        "Mamba-2": ops.explain_ssd(heads, heads, device=device),
    }
    return {name: _chosen(answer) for name, answer in chosen.items()}


def _chosen(answer: Any) -> str:
    """Names what runs a call; if that is plain XLA, also the first package that has a kernel for it."""
    lacking = (f"; {kernel} {why}" for kernel, why in answer.refused.items() if "pip install" in why)
    return str(answer.chosen) + (next(lacking, "") if answer.chosen in ("chunked", "tiled") else "")
