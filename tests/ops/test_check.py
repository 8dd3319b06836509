"""`python -m maxlib.ops check` and `tune`: hangs, crashes and wrong results are detected, and later dispatch follows
the findings.
"""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from maxlib import ops
from maxlib.ops import __main__ as command
from maxlib.ops import _findings
from maxlib.ops._attention import dispatch
from maxlib.ops._attention.splash import Blocks, Passes, tuned_blocks
from maxlib.ops._check import cases, parent, worker

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


def test_findings_of_another_compiler_do_not_count(tables):
    path = _findings.write(H100[1], refused={"attention/cudnn": "wrong"})
    path.write_text(path.read_text().replace(_findings.versions()["jaxlib"], "0.0.1"))
    _findings.findings.cache_clear()
    assert _findings.refused("attention", "cudnn", H100[1]) is None


@pytest.mark.parametrize("text", ["", "[]", '{"tiles": 3}', '{"refused": {"attention/cudnn"'])
def test_a_damaged_table_counts_as_none(tables, text):
    _findings.file_of(H100[1]).write_text(text)
    assert _findings.findings(H100[1]) == {"refused": {}, "tiles": {}}


def test_tuned_blocks_are_taken_where_they_were_measured(tables, monkeypatch):
    sizes = Passes(Blocks(256, 512, 512), None, Blocks(512, 1024, 512))
    key = _findings.tiles_key("splash", 4096, 4096, 128, 128)
    _findings.write("TPU v5p", tiles={key: worker.sizes(sizes)})
    monkeypatch.setattr("maxlib.ops._attention.splash.current_device", lambda: ("tpu", "TPU v5p"))
    assert tuned_blocks(4096, 4096, 128, 128) == sizes
    assert tuned_blocks(4000, 4096, 128, 128) == Passes(*(one and one.fit(4000, 4096) for one in sizes))
    assert tuned_blocks(8192, 8192, 128, 128) is None


def test_tune_begins_where_it_was_ended(monkeypatch):
    """Block sizes that ended a process before are left out, and so are cases that splash does not run."""
    monkeypatch.setattr(worker, "_refusal", lambda case, name, given: None if case is kept else "no")
    monkeypatch.setattr(worker, "_tried", lambda case, passes, given, rounds: {"status": "right", "both_s": 1.0})
    small = {name: case for name, case in cases.CASES.items() if isinstance(case, cases.Attention)}
    kept = next(case for case in small.values() if case.gradients and not case.sinks and not case.softcap)
    monkeypatch.setattr(cases.Attention, "arrays", lambda case, dtype: {})
    every = [line["begins"] for line in worker.tune([], 1) if "begins" in line]
    assert len(every) == len(worker.candidates(kept)) > 1
    assert [line["begins"] for line in worker.tune(every[:1], 1) if "begins" in line] == every[1:]


def test_tune_keeps_the_fastest_blocks(tables, workers):
    workers(
        DESCRIBED.replace('"gpu"', '"tpu"').replace("NVIDIA H100 80GB HBM3", "TPU v5p")
        + """
for case, seconds in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
    if case not in skip:
        say(begins=case)
        if case == "c":
            os._exit(1)
        say(case=case, shape="x", key="k", tiles=[case], status="right", both_s=seconds)
"""
    )
    assert parent.tune(deadline=30) == {"k": ["b"]}
    assert json.loads(_findings.file_of("TPU v5p").read_text())["tiles"] == {"k": ["b"]}


def test_an_implementation_that_is_wrong_is_found(monkeypatch):
    right = cases.Attention(200, heads=2, kv_heads=2, key_dim=16, value_dim=16).small()
    monkeypatch.setitem(cases.CASES, "small", right)
    monkeypatch.setattr(worker, "cases", lambda op: {"small": right})
    assert [row["status"] for row in worker.check("attention", "chunked", [], 1) if "case" in row] == ["right"]
    off = lambda *args, **kwargs: 1.01 * dispatch.by_name("reference").run(*args, **kwargs)[0]
    run = lambda q, k, v, *, mask_hint, **more: off(q, k, v, scale=q.shape[-1] ** -0.5, **more)
    monkeypatch.setitem(worker.INTERPRETED, ("attention", "cudnn"), run)
    rows = [row for row in worker.check("attention", "cudnn", [], 1) if "case" in row]
    assert [row["status"] for row in rows] == ["wrong"] and rows[0]["error"] == pytest.approx(0.01, rel=0.2)


def test_the_command_says_what_is_wrong(capsys, workers):
    workers(DESCRIBED)
    assert command.main(["check", "cudnnn"]) == 2
    assert "unknown implementations ['cudnnn']" in capsys.readouterr().err
    assert command.main(["tune"]) == 2
    assert "measures splash attention's blocks on TPUs" in capsys.readouterr().err


@pytest.mark.full
def test_everything_that_runs_on_a_cpu_passes(capsys):
    rows = parent.check(write=False)
    assert {row["status"] for row in rows} == {"right", "refused"}
    right = {row["implementation"] for row in rows if row["status"] == "right"}
    assert right == {"splash", "mosaic_tpu", "chunked", "tiled", "ragged_dot"}


@pytest.mark.parametrize("sizes", [[1], [[1, 2, 3, 4], None, None], ["a", "b", "c"], [[0, 0, 0]] * 3])
def test_damaged_tiles_count_as_none(sizes, tables, monkeypatch):
    _findings.write("TPU v5p", tiles={_findings.tiles_key("splash", 128, 128, 64, 64): sizes})
    monkeypatch.setattr("maxlib.ops._attention.splash.current_device", lambda: ("tpu", "TPU v5p"))
    assert tuned_blocks(128, 128, 64, 64) is None
