"""The command line of plans, and the error messages of plans and searches."""

import dataclasses
import functools
import json
import re

import jax
import pytest

from maxlib import adapters, nn, plan
from maxlib._command import main
from maxlib.hardware import GIB
from maxlib.plan import _run as run
from maxlib.plan import _targets as targets
from maxlib.plan._report import remedies
from tests.nn.tiny import LLAMA
from tests.plan import jobs
from tests.plan.jobs import layout

CONFIG = dataclasses.replace(LLAMA, vocab=64, num_layers=4)
JOB = plan.Job(CONFIG, "h100x8", sequence=16)


@pytest.fixture
def asked(monkeypatch):
    """Returns the arguments that the command passes to `search`."""
    calls = []

    def search(job, **settings):
        calls.append((job, settings))
        raise ValueError("seen")

    monkeypatch.setattr(plan, "search", search)
    return calls


def test_a_search_takes_what_the_command_line_fixes(asked):
    words = "llama3-8b --target v5e-16x2 --search --mesh fsdp=4,tensor=4 --dcn data=-1 --strategy fsdp_tp --remat none"
    more = "--per-device-batch-size 2 --attention splash --microbatches 2 --flags tpu-vmem --compile 0"
    assert main(["plan", *words.split(), *more.split()]) == 2
    ((job, got),) = asked
    assert got["layouts"] == [job.layout] == [layout("fsdp_tp", fsdp=4, tensor=4, dcn={"data": -1})]
    assert got["remats"] == [None] and got["batches"] == [2] and got["compile"] == 0
    assert job.attention == "splash" and job.microbatches == 2
    assert job.options == {"xla_tpu_scoped_vmem_limit_kib": 98304}
    main(["plan", "llama3-8b", "--target", "v5e-16", "--search"])
    assert not {"layouts", "remats", "batches", "compile"} & asked[1][1].keys()


@pytest.mark.parametrize("name", ["build", "CONFIG"])
def test_a_model_of_your_own_is_named_as_module_and_function(name, capsys):
    words = f"tests.plan.jobs:{name} --target h100x8 --sequence 16 --optimizer tests.plan.jobs:optimizer --json"
    assert main(["plan", *words.split()]) == 0
    numbers = json.loads(capsys.readouterr().out)
    parameters = nn.num_parameters(jax.eval_shape(jobs.build))
    # float32 weights over eight devices; sgd keeps nothing but a step
    assert numbers["num_parameters"] == parameters and parameters / 2 <= numbers["parameters"] < parameters * 2
    assert numbers["optimizer"] < 100


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.plan.jobs:layout", "Layout is not a Config of a known family"),
        ("tests.plan.jobs:moved", "calling a function without arguments, which <function moved"),
        ("tests.plan.jobs:absent", "model must be named module:name"),
        ("absent", "A function of your own is named module:function."),
    ],
)
def test_a_model_that_is_no_such_function_is_refused(name, said, capsys):
    assert main(["plan", name, "--target", "h100x8"]) == 2
    assert said in capsys.readouterr().err


def test_a_search_plans_what_it_was_told():
    """Each setting reaches every plan: one that it cannot be refuses them all."""
    given_layout = layout(dcn={"data": 1})
    take = functools.partial(plan.search, layouts=[given_layout], batches=(1,), remats=("full",), compile=0)
    (best,) = take(dataclasses.replace(JOB, attention="chunked")).plans
    assert best.job == dataclasses.replace(JOB, layout=given_layout, attention="chunked")
    for wrong in ({"attention": "flash"}, {"microbatches": 3}, {"loss": "nowhere"}, {"optimizer": "lion"}):
        with pytest.raises(ValueError, match="layouts can be planned: {'fsdp': -1}, remat full, 1 per chip: "):
            take(dataclasses.replace(JOB, **wrong))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--search --full", "--search takes no --json, --full and --keep"),
        ("--search --compile -3", "compile must be at least 0, the number of layouts to compile; got -3"),
        ("--compile 2", "--compile is for --search"),
        ("--mesh fsdp=2 fsdp=8", "a mesh must name an axis once; got fsdp twice, in fsdp=2 fsdp=8"),
        ("--mesh fdsp=8", "no mesh axis is named 'fdsp' (did you mean 'fsdp'?)"),
        ("--microbatches 0", "at least one microbatch, got 0"),
        ("--microbatches 2 --strategy pp_1f1b", "microbatches=2 cannot be combined with a 1F1B pipeline"),
        ("--lora rank=16,dora=false", "--lora takes rank=16,alpha=32 (numbers) and dora or rslora"),
        ("--mesh fsdp=3", "change a degree, let one be -1"),
        ("--per-device-batch-size 0.3", "change per_device_batch_size or the mesh"),
    ],
)
def test_mistakes_are_named(words, said, capsys):
    assert main(["plan", "llama3.2-1b", "--target", "h100x8", *words.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--search"]])
def test_of_several_slices_it_says_which_option_joins_them(more, capsys):
    assert main(["plan", "llama3.2-1b", "--target", "v5e-8x2", *more]) == 2
    error = capsys.readouterr().err
    assert "v5e-8x2 has 2 slices" in error and error.endswith("--dcn data=-1\n") and "make_mesh" not in error


def test_the_command_prints_a_report(capsys):
    assert main(["plan", "llama3.2-1b", "--target", "h100x8"]) == 0
    out = capsys.readouterr().out
    assert "plan.search (--search) compares" in out and "fits:" in out and "a bound, not a forecast" in out


def test_what_does_not_fit_comes_with_changes_that_do(capsys):
    words = "llama3-70b --target h100x8 --sequence 4096"
    assert main(["plan", *words.split()]) == 1
    out = " ".join(capsys.readouterr().out.split())
    offloaded, lora = r"strategy=fsdp\+offload_optimizer", r"lora=LoRA\(16\)"
    assert "GiB too much" in out and "analytic model only" in out and "not compiled" in out
    both = rf"{offloaded} \(moments on the host\) fits, 7\d\.\d GiB; {lora} \(adapters of a frozen base\) fits, 2\d\.\d GiB"
    assert re.search(both, out)
    assert "sequence=2048" not in out and "nf4" not in out  # the first does not fit, the second is not needed


def test_advice_names_the_closest_change_if_nothing_fits():
    sizes = iter(range(9, 0, -1))
    said = remedies(dataclasses.replace(JOB, sequence=2048, remat=None), 0.5, lambda job: next(sizes) * GIB)
    assert said == "By estimates for 0.0 GiB: remat='full', lora=LoRA(16) base='nf4' (QLoRA) comes closest, 5.0 GiB."
    assert "base='nf4' fits" in remedies(dataclasses.replace(JOB, lora=adapters.LoRA(4, 8)), GIB, lambda job: GIB)


def test_a_layout_that_does_not_compile_does_not_end_a_search(monkeypatch):
    def compiled(job, **_):
        if job.degrees == {"fsdp": -1}:
            raise AssertionError("a bug of the compiler")
        return dataclasses.replace(plan.estimated(job), compiled=True)

    monkeypatch.setattr("maxlib.plan._api.plan", compiled)
    take = functools.partial(plan.search, JOB, batches=(1,), remats=("full",))
    both = [layout(), layout("dp", data=-1)]
    result = take(layouts=both)
    assert [candidate.job.degrees for candidate in result.plans] == [{"data": -1}] and result.best.compiled
    assert result.refused == (("{'fsdp': -1}, remat full, 1 per chip", "a bug of the compiler"),)
    assert "1 refused" in str(result) and "remat full, 1 per chip: a bug of the compiler" in str(result)
    with pytest.raises(ValueError, match="none of 1 layouts can be planned: .*a bug of the compiler"):
        take(layouts=both[:1])


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("kill -9 $$", "code -9: killed, most often by the system when memory runs out, before it had described"),
        ("exit 3", "code 3, before it had described the step"),
    ],
)
def test_a_compiler_that_dies_leaves_its_last_words(last, words, tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\ncat > /dev/null\nyes | head -c 5000 >&2\necho 'terminate: no room' >&2\n{last}\n")
    script.chmod(0o755)
    monkeypatch.setattr(run.sys, "executable", str(script))
    with pytest.raises(RuntimeError) as error:
        run.run(dataclasses.replace(JOB, target="cpu"))
    said = str(error.value)
    assert words in said and said.endswith("y\nterminate: no room") and len(said) < 2200


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        ("Ran out of memory in memory space hbm. Used 107.3G of 95.74G hbm.", 57.3 * GIB),
        ("the total memory required for HLO temporaries (133.84G) exceeds available HBM (95.73G)", 133.84 * GIB),
        ("another reason", None),
    ],
)
def test_temporaries_that_do_not_fit_are_read_from_the_error(message, needed):
    assert run._needed(message, 50.0 * GIB) == (needed and pytest.approx(needed))


def test_a_topology_that_does_not_exist_comes_with_one_that_does():
    pytest.importorskip("libtpu")
    with pytest.raises(ValueError, match="v5p:5x5x5: there is no topology v5p:5x5x5, .* take for example v5p:4x4x4 "):
        targets.devices_of(plan.parse_target("v5p:5x5x5"))


def test_the_environment_of_the_compiler_keeps_the_users_own(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_dump_to=mine")
    env = run._environment("h100")
    assert (env["TPU_WORKER_HOSTNAMES"], env["TPU_SKIP_MDS_QUERY"], env["JAX_PLATFORMS"]) == ("mine", "1", "cpu")
    assert env["XLA_FLAGS"] == "--xla_cpu_use_fusion_emitters=false --xla_dump_to=mine"
    assert (
        run._environment("v5p-8")["XLA_FLAGS"] == "--xla_dump_to=mine"
    )  # libtpu aborts on flags that it does not know
