"""`python -m maxlib.ops check` and `tune`: hangs, crashes and wrong results are detected, and later dispatch follows
the findings.
"""

import dataclasses
import functools
import json
import sys
from importlib.metadata import PackageNotFoundError

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import ops
from maxlib.ops import __main__ as command
from maxlib.ops import _findings
from maxlib.ops._attention.splash import SplashBlock, SplashTiles
from maxlib.ops._attention.table import ATTENTION
from maxlib.ops._check import cases, parent, recurrences, worker

H100 = ("gpu", "NVIDIA H100 80GB HBM3")
Q = jax.ShapeDtypeStruct((1, 256, 8, 64), jnp.bfloat16)


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """The user's own tables, in a directory of this test's."""
    monkeypatch.setenv("MAXLIB_CACHE", str(tmp_path))
    _findings.findings.cache_clear()
    yield tmp_path
    _findings.findings.cache_clear()


@pytest.fixture
def workers(monkeypatch, tmp_path):
    """Makes every worker process run a script of the test's."""

    def install(script: str):
        (tmp_path / "worker.py").write_text(
            "import json, os, sys, time\nsay = lambda **x: print(json.dumps(x), flush=True)\n" + script
        )
        (tmp_path / "python").write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {tmp_path}/worker.py "$@"\n')
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(parent.sys, "executable", str(tmp_path / "python"))

    return install


DESCRIBED = """
if "--describe" in sys.argv:
    say(platform="gpu", device="NVIDIA H100 80GB HBM3", jax="0", implementations={"attention": ["cudnn", "tokamax"]})
    sys.exit()
skip = json.loads(sys.argv[sys.argv.index("--skip") + 1])
"""


def test_what_hangs_crashes_or_is_wrong_has_a_name_and_is_not_run_again(tables, workers):
    workers(
        DESCRIBED
        + """
for case in ("first", "second", "third"):
    if case in skip:
        continue
    say(begins=case)
    if sys.argv[2] == "cudnn" and case == "second":
        time.sleep(60)
    if sys.argv[2] == "tokamax" and case == "second":
        print("an illegal instruction", file=sys.stderr)
        os._exit(3)
    say(case=case, status="right", error=0.001, of="out")
"""
    )
    rows = parent.check(deadline=3, rounds=1)
    found = {(row["implementation"], row["case"]): row["status"] for row in rows}
    assert found == {
        (name, case): "right" if case != "second" else {"cudnn": "hangs", "tokamax": "crashed"}[name]
        for name in ("cudnn", "tokamax")
        for case in ("first", "second", "third")
    }
    assert "illegal instruction" in next(row["why"] for row in rows if row["status"] == "crashed")

    answer = ops.explain_attention(Q, Q, Q, device=H100, mask_hint=ops.StaticMask("causal", aligned=True))
    assert answer.chosen != "cudnn" and "second: no result within 3 s" in answer.refused["cudnn"]
    assert ops.explain_attention(Q, Q, Q, device=("gpu", "NVIDIA A100-SXM4-40GB")).chosen == "cudnn"


def test_one_that_passes_again_may_run_again(tables, workers):
    _findings.write(H100[1], refused={"attention/cudnn": "full-8k: hangs", "attention/tokamax": "hangs"})
    assert ops.explain_attention(Q, Q, Q, device=H100).chosen != "cudnn"
    workers(DESCRIBED + 'say(begins="a")\nsay(case="a", status="right", error=0.0, of="out")\n')
    parent.check(["cudnn"], deadline=30)
    assert ops.explain_attention(Q, Q, Q, device=H100).chosen == "cudnn"
    assert _findings.refused("attention", "tokamax", H100[1])


@pytest.mark.parametrize("package", ["jaxlib", "triton"])
def test_findings_with_other_versions_do_not_count(package, tables, monkeypatch):
    """Of the compiler, or of a package of kernels, which may be upgraded because of what was found."""
    now = {"jax": "1", "jaxlib": "1", "tokamax": "1", "triton": "1"}
    monkeypatch.setattr(_findings, "version", lambda name: now[name] if name in now else absent(name))
    _findings.write(H100[1], refused={"attention/tokamax": "wrong"})
    assert _findings.refused("attention", "tokamax", H100[1])
    now[package] = "2"
    _findings.findings.cache_clear()
    assert _findings.refused("attention", "tokamax", H100[1]) is None


def absent(name: str):
    raise PackageNotFoundError(name)


def test_what_the_package_ships_gives_way_to_what_was_measured_here(tables, tmp_path_factory, monkeypatch):
    """Of tiles; that an implementation failed elsewhere counts for nothing."""
    shipped = tmp_path_factory.mktemp("shipped")
    monkeypatch.setattr(_findings, "SHIPPED", shipped)
    table = {"versions": _findings.versions(), "refused": {"attention/cudnn": "hangs"}, "tiles": {"a": 1, "b": 2}}
    _findings.file_of(H100[1], shipped).write_text(json.dumps(table))
    _findings.write(H100[1], tiles={"b": 3})
    assert _findings.findings(H100[1]) == {"refused": {}, "tiles": {"a": 1, "b": 3}}


def test_measured_tiles_are_taken_where_they_were_measured(tables):
    sizes = SplashTiles(SplashBlock(256, 512, 512), None, SplashBlock(512, 1024, 512))
    explain = lambda T, kind="TPU v5p": splash_tiles(T, ("tpu", kind))
    _findings.write("TPU v5p", tiles={explain(4096).key: sizes.to_json()})
    assert (explain(4096).sizes, explain(4096).source) == (sizes, "measured")
    assert explain(3000).sizes == sizes  # the same power of two
    assert {explain(8192).source, explain(4096, "TPU v6e").source} == {"default"}


def splash_tiles(T: int, device):
    q, causal = jax.ShapeDtypeStruct((1, T, 8, 128), jnp.bfloat16), ops.StaticMask("causal", aligned=True)
    return ops.explain_attention(q, q, q, mask_hint=causal, device=device).tiles


@pytest.mark.parametrize("name", sorted({name for op in cases.OPS for name in worker.names(op)}))
def test_tune_tries_every_kernel_that_runs_here(name, monkeypatch):
    """On a CPU in an interpreter; what ended a process before is left out."""
    monkeypatch.setattr(worker, "_tried", lambda case, run, given, truth, rounds: {"status": "right"})
    every = [line["begins"] for line in worker.tune([name], [], 1) if "begins" in line]
    here = {"splash", "chunked", "tiled"}
    assert bool(every) == (name in here)
    assert [line["begins"] for line in worker.tune([name], every[:1], 1) if "begins" in line] == every[1:]


def test_tune_keeps_the_fastest_blocks(tables, workers):
    workers(
        DESCRIBED.replace('"gpu"', '"tpu"').replace("NVIDIA H100 80GB HBM3", "TPU v5p")
        + """
for case, seconds in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
    if case not in skip:
        say(begins=case)
        if case == "c":
            os._exit(1)
        say(case=case, key="k", tiles={"x": case}, status="right", seconds=seconds)
"""
    )
    assert parent.tune(deadline=30) == {"k": {"x": "b"}}
    assert json.loads(_findings.file_of("TPU v5p").read_text())["tiles"] == {"k": {"x": "b"}}


def test_an_implementation_that_is_wrong_is_found(monkeypatch):
    right = cases.Attention(200, heads=2, kv_heads=2, key_dim=16, value_dim=16).small()
    monkeypatch.setitem(cases.CASES, "small", right)
    monkeypatch.setattr(worker, "cases", lambda op: {"small": right})
    assert [row["status"] for row in worker.check("attention", "chunked", [], 1) if "case" in row] == ["right"]
    off = lambda *args, **kwargs: 1.01 * ATTENTION["reference"].run(*args, **kwargs)[0]
    run = lambda q, k, v, *, mask_hint, **more: off(q, k, v, scale=q.shape[-1] ** -0.5, **more)
    monkeypatch.setattr(worker, "_interpreted_splash", run)
    rows = [row for row in worker.check("attention", "splash", [], 1) if "case" in row]
    assert [row["status"] for row in rows] == ["wrong"] and rows[0]["error"] == pytest.approx(0.01, rel=0.2)


def test_the_command_says_what_is_wrong(capsys, workers):
    workers(DESCRIBED)
    assert command.main(["check", "cudnnn"]) == 2
    assert "unknown implementations ['cudnnn']" in capsys.readouterr().err
    assert command.main(["tune", "splash "]) == 2
    assert "unknown implementations ['splash ']" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ('say(prepares="a")\nif "a" in skip: sys.exit()\nos._exit(3)', "failed"),
        ('say(prepares="a")\nsay(begins="a")\nos._exit(3)', "crashed"),
        ('say(prepares="a")\nsay(case="a", status="right")\nsay(finished=True)\nos._exit(3)', "right"),
        ('print("{not json}")\nprint("[]")\nsay(case="a", status="right")\nprint("1")', "right"),
    ],
    ids=["before it ran", "while it ran", "after all", "noise"],
)
def test_who_is_to_blame(script, status, tables, workers):
    """An implementation only for what happens while it runs."""
    workers(DESCRIBED + 'if "a" in skip: sys.exit()\n' + script)
    (row,) = parent.check(["cudnn"], deadline=30)
    assert (row["case"], row["status"]) == ("a", status) and row.get("why", "no message").endswith("no message")
    assert bool(_findings.refused("attention", "cudnn", H100[1])) == (status == "crashed")


def test_a_process_that_ends_between_cases_is_an_error(workers, capsys):
    workers(DESCRIBED + "os._exit(3)")
    assert command.main(["check", "--dry"]) == 2
    assert "ended while no case was running: ended with status 3" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--rounds 0", "--rounds -1", "--deadline 0", "--rounds two"])
@pytest.mark.parametrize("order", ["check", "tune"])
def test_numbers_that_make_no_sense_are_refused(order, words, capsys):
    with pytest.raises(SystemExit):
        command.main([order, *words.split()])
    want = "invalid int value: 'two'" if "two" in words else "must be above 0"
    assert want in capsys.readouterr().err


def test_without_an_accelerator_tune_writes_nothing(tables, workers, capsys):
    workers(
        DESCRIBED.replace('"gpu"', '"cpu"').replace("NVIDIA H100 80GB HBM3", "cpu")
        + 'say(begins="a")\nsay(case="a", key="k", tiles={}, status="right")\n'
    )
    assert parent.tune(deadline=30) == {}
    assert "tiles are checked, not timed" in capsys.readouterr().out
    assert not _findings.file_of("cpu").exists()


@pytest.mark.parametrize("name", ["prefill", "prefill in parts", "decode, half full", "decode, window"])
def test_calls_with_a_cache_are_those_of_a_layer(name):
    """Queries come after the cached keys, and no query sees the empty slots behind them."""
    case = cases.CASES[name]
    assert isinstance(case, cases.Attention)
    for one in (case, case.small()):
        start, end, hint = one.intervals()
        index = one.cache + np.arange(one.tokens)
        assert (np.asarray(end) == index + 1).all() and int(end.max()) == one.keys - one.room
        assert (np.asarray(start) == (0 if one.window is None else np.maximum(index + 1 - one.window, 0))).all()
        assert hint is not None and hint.static == ops.StaticMask("causal", one.window)
    assert (case.room > 0) == (case.small().room > 0)


@pytest.mark.parametrize("name", ["chunked", "splash"])
def test_values_may_be_channels_of_the_keys(name, monkeypatch):
    small = cases.CASES["decode latents"].small()
    monkeypatch.setattr(worker, "cases", lambda op: {"small": small})
    (row,) = [row for row in worker.check("attention", name, [], 1) if "case" in row]
    assert row["status"] == "right" and "v" not in small.arrays(jnp.float32)


def test_a_kernel_that_sees_empty_slots_is_found(monkeypatch):
    small = dataclasses.replace(cases.CASES["prefill"].small(), tokens=40, room=20)
    monkeypatch.setattr(worker, "cases", lambda op: {"small": small})
    right = worker.bound
    off = lambda q, k, v, *, k_end, **more: right("attention", "chunked")(q, k, v, k_end=k_end + 1, **more)
    assert [row["status"] for row in worker.check("attention", "chunked", [], 1) if "case" in row] == ["right"]
    monkeypatch.setattr(worker, "bound", lambda op, one: off if one == "chunked" else right(op, one))
    assert [row["status"] for row in worker.check("attention", "chunked", [], 1) if "case" in row] == ["wrong"]


RECURRENCES = {
    "delta": recurrences.GatedDelta(300, key_heads=2, heads=4, key_dim=32, value_dim=64),
    "kimi": recurrences.KimiDelta(300, key_heads=2, heads=2, key_dim=32, value_dim=32),
    "ssd": recurrences.StateSpace(300, key_heads=2, heads=8, key_dim=32, value_dim=32),
}
BY_DEFAULT_DELTA = [
    pytest.param(case, id=name, marks=[pytest.mark.full] * (name != "delta")) for name, case in RECURRENCES.items()
]


@pytest.fixture
def rounded_operands(monkeypatch):
    """Makes `chunked` round the operands of its matmuls to bfloat16, as kernels do."""
    einsum = jnp.einsum

    def rounded(spec, *operands, precision=None):
        narrow = precision == jax.lax.Precision.HIGH  # of inputs in bfloat16; definitions ask for the highest
        return einsum(
            spec, *(x.astype(jnp.bfloat16).astype(x.dtype) if narrow else x for x in operands), precision=precision
        )

    jax.clear_caches()
    monkeypatch.setattr(jnp, "einsum", rounded)
    yield
    jax.clear_caches()


@functools.cache
def given_and_true(case):
    """Its inputs, and what the definition makes of them; computed once."""
    given = case.arrays(jnp.bfloat16)
    return given, worker._truth(case, given)


def compare(case, run):
    return worker._compared(case, run, *given_and_true(case))


@pytest.mark.parametrize("case", BY_DEFAULT_DELTA)
def test_roundings_of_a_recurrence_are_right(case, rounded_operands):
    row = compare(case, cases.bound(case.op, "chunked"))
    assert row["status"] == "right" and 2e-3 < row["error"] < cases.tolerance(case, row["of"], "bfloat16")


def steeper(x):
    """Returns `x`, and of its gradient 3 % too much."""
    wide = x.astype(jnp.float32)
    return (wide + 0.03 * (wide - jax.lax.stop_gradient(wide))).astype(x.dtype)


# By default one gradient of one recurrence.
@pytest.mark.parametrize(
    ("name", "of"),
    [("delta", "k")]
    + [pytest.param(*pair, marks=pytest.mark.full) for pair in (("kimi", "log_decay"), ("ssd", "b"), ("ssd", "a"))],
)
def test_a_gradient_of_a_recurrence_that_is_3_percent_off_is_found(name, of):
    case = RECURRENCES[name]
    right = cases.bound(case.op, "chunked")
    row = compare(case, lambda **given: right(**given | {of: steeper(given[of])}))
    assert (row["status"], row["of"]) == ("wrong", f"d_{of}") and row["error"] == pytest.approx(0.03, rel=0.02)


@pytest.mark.parametrize("case", BY_DEFAULT_DELTA)
def test_an_output_of_a_recurrence_that_is_2_percent_off_is_found(case):
    right = cases.bound(case.op, "chunked")
    row = compare(case, lambda **given: (lambda out, state: ((1.02 * out).astype(out.dtype), state))(*right(**given)))
    assert row["status"] == "wrong" and "more than 1e-02" in row["why"]


@pytest.mark.full
def test_everything_that_runs_on_a_cpu_passes(capsys):
    rows = parent.check(write=False)
    assert {row["status"] for row in rows} == {"right", "refused"}
    right = {row["implementation"] for row in rows if row["status"] == "right"}
    assert right == {"splash", "chunked", "tiled", "ragged_dot"}


@pytest.mark.parametrize(
    "sizes", [[1], {"forward": [1]}, {"forward": 3, "dq": None, "dkv": 3}, {"forward": {"queries": 0, "keys": 0}}, "x"]
)
def test_damaged_tiles_count_as_none(sizes, tables):
    device = ("tpu", "TPU v5p")
    _findings.write(device[1], tiles={splash_tiles(128, device).key: sizes})
    assert splash_tiles(128, device).source == "default"
