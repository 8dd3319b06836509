"""`python -m maxlib.ops check`: what hangs, crashes or is wrong has a name, and no longer runs here."""

import dataclasses
import functools
import json
import os
import time
from importlib.metadata import PackageNotFoundError

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import ops
from maxlib._utils.timed_process import TimedProcess
from maxlib.ops import __main__ as command
from maxlib.ops import _findings
from maxlib.ops._check import cases, compare, run

H100 = ("gpu", "NVIDIA H100 80GB HBM3")
Q = jax.ShapeDtypeStruct((1, 256, 8, 64), jnp.bfloat16)
SMALL = cases.Attention(40, heads=4, kv_heads=2, key_dim=16, value_dim=16, cache=20, room=20)


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """The user's own tables, in a directory of this test's."""
    monkeypatch.setenv("MAXLIB_CACHE", str(tmp_path))
    _findings.failures.cache_clear()
    yield tmp_path
    _findings.failures.cache_clear()


class Answers(TimedProcess):
    """Stands in for the process: answers with what the test says of an implementation and a case."""

    idle = True

    def __init__(self, prepares, compares):
        self.answers = [(H100, None), prepares, compares]

    def start(self, job, number, argument, timeout):
        answer = self.answers[number]
        self.answer = answer if isinstance(answer, tuple) else answer[argument[0]]

    def result(self):
        return "call", *self.answer

    def end(self):
        pass


@pytest.fixture
def answers(monkeypatch):
    def install(compares, prepares=(None, None)):
        monkeypatch.setattr(run, "TimedProcess", lambda functions: Answers(prepares, compares))
        monkeypatch.setattr(run, "wait_for_any", lambda processes: processes)

    return install


RIGHT = {"status": "right", "error": 0.001, "of": "out"}


def test_what_hangs_crashes_or_is_wrong_is_not_chosen_again(tables, answers, capsys):
    wrong = {"status": "wrong", "error": 0.1, "of": "out", "why": "out is off"}
    answers(
        {"cudnn": (None, "timeout"), "mosaic_gpu": (None, "ended"), "tokamax": (wrong, None), "chunked": (RIGHT, None)}
    )
    rows = run.check(["cudnn", "mosaic_gpu", "tokamax", "chunked"], cases={"call": SMALL}, deadline=3)
    status = {row["implementation"]: row["status"] for row in rows}
    assert status == {"cudnn": "hangs", "mosaic_gpu": "crashed", "tokamax": "wrong", "chunked": "right"}
    assert "attention/chunked" in capsys.readouterr().out

    answer = ops.explain_attention(Q, Q, Q, device=H100, mask_hint=ops.StaticMask("causal", aligned=True))
    assert "call: no result within 3 s" in answer.refused["cudnn"] and "ended" in answer.refused["mosaic_gpu"]
    assert answer.chosen not in ("cudnn", "mosaic_gpu", "tokamax")
    assert ops.explain_attention(Q, Q, Q, device=("gpu", "NVIDIA A100-SXM4-40GB")).chosen == "cudnn"

    answers((RIGHT, None))
    run.check(["cudnn"], cases={"call": SMALL})
    assert ops.explain_attention(Q, Q, Q, device=H100).chosen == "cudnn"
    assert _findings.refused("attention", "tokamax", H100[1])


@pytest.mark.parametrize(
    ("prepares", "compares", "status"),
    [
        ((None, "ended"), (RIGHT, None), "failed"),
        (({"status": "refused", "why": "is for others"}, None), (RIGHT, None), "refused"),
        ((None, None), ({"status": "out of memory", "why": "full"}, None), "out of memory"),
    ],
)
def test_an_implementation_is_to_blame_only_for_what_it_does(prepares, compares, status, tables, answers):
    answers(compares, prepares)
    (row,) = run.check(["cudnn"], cases={"call": SMALL})
    assert row["status"] == status and _findings.refused("attention", "cudnn", H100[1]) is None


@dataclasses.dataclass(frozen=True)
class Ends(cases.Attention):
    """Ends the process that runs `chunked`, or keeps it waiting."""

    waits: bool = False

    def call(self, run, arrays):
        if run.keywords["implementation"] == "chunked":
            time.sleep(60) if self.waits else os._exit(3)
        return super().call(run, arrays)


@pytest.mark.full
def test_a_process_that_ends_is_replaced(tables):
    sizes = dataclasses.asdict(SMALL)
    calls = {"crash": Ends(**sizes), "hang": Ends(**sizes, waits=True), "right": SMALL}
    rows = run.check(["chunked"], cases=calls, deadline=20)
    assert {row["case"]: row["status"] for row in rows} == {"crash": "crashed", "hang": "hangs", "right": "right"}
    assert "hang: no result" in str(_findings.refused("attention", "chunked", jax.devices()[0].device_kind))


@pytest.mark.parametrize("package", ["jaxlib", "triton"])
def test_findings_with_other_versions_do_not_count(package, tables, monkeypatch):
    """Of the compiler, or of a package of kernels, which may be upgraded because of what was found."""
    now = {"jax": "1", "jaxlib": "1", "tokamax": "1", "triton": "1"}
    monkeypatch.setattr(_findings, "version", lambda name: now[name] if name in now else absent(name))
    _findings.write(H100[1], {"attention/tokamax": "wrong"})
    assert _findings.refused("attention", "tokamax", H100[1])
    now[package] = "2"
    _findings.failures.cache_clear()
    assert _findings.refused("attention", "tokamax", H100[1]) is None


def absent(name: str):
    raise PackageNotFoundError(name)


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"refused": {"attention/cudnn": "hangs"}}), '{"versions": 1}'])
def test_a_damaged_table_counts_as_none(text, tables):
    _findings.file_of(H100[1]).write_text(text)
    assert _findings.failures(H100[1]) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [(["check", "cudnnn"], "unknown implementations ['cudnnn']"), (["check", "chunked"], "needs a GPU or a TPU")],
)
def test_the_command_says_what_is_wrong(words, message, answers, capsys, monkeypatch):
    answers((RIGHT, None))
    monkeypatch.setitem(globals(), "H100", ("cpu", "cpu"))
    assert command.main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["prefill", "prefill in parts", "decode, half full", "decode, window"])
def test_calls_with_a_cache_are_those_of_a_layer(name):
    """Queries come after the cached keys, and no query sees the empty slots behind them."""
    case = cases.CASES[name]
    assert isinstance(case, cases.Attention)
    start, end, hint = case.intervals()
    index = case.cache + np.arange(case.tokens)
    assert (np.asarray(end) == index + 1).all() and int(end.max()) == case.keys - case.room
    assert (np.asarray(start) == (0 if case.window is None else np.maximum(index + 1 - case.window, 0))).all()
    assert hint is not None and hint.static == ops.StaticMask("causal", case.window)


@functools.cache
def arrays_and_truth(case, dtype):
    arrays = case.arrays(dtype)
    return arrays, compare.truth_of(case, arrays)


def status(case, implementation, dtype=jnp.float32):
    return compare.compared(case, implementation, *arrays_and_truth(case, dtype))


LATENTS = cases.Attention(3, heads=4, kv_heads=1, key_dim=24, value_dim=16, cache=20, latents=True, gradients=False)


@pytest.mark.parametrize("case", [SMALL, LATENTS], ids=["cache", "values are channels of the keys"])
def test_a_kernel_that_sees_another_key_is_wrong(case):
    chunked = cases.bound("attention", "chunked")
    assert status(case, chunked)["status"] == "right"

    def off(q, k, v, *, k_end, **options):
        return chunked(q, k, v, k_end=k_end - 1, **options)

    assert status(case, off)["status"] == "wrong"


RECURRENCES = {
    "delta": cases.GatedDelta(300, key_heads=2, heads=4, key_dim=32, value_dim=64),
    "kimi": cases.KimiDelta(300, key_heads=2, heads=2, key_dim=32, value_dim=32),
    "ssd": cases.StateSpace(300, key_heads=2, heads=8, key_dim=32, value_dim=32),
}


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


@pytest.mark.full
@pytest.mark.parametrize("case", RECURRENCES.values(), ids=RECURRENCES)
def test_roundings_of_a_recurrence_are_right(case, rounded_operands):
    row = status(case, cases.bound(case.op, "chunked"), jnp.bfloat16)
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
def test_a_gradient_of_a_recurrence_that_is_3_percent_off_is_wrong(name, of):
    case = RECURRENCES[name]
    right = cases.bound(case.op, "chunked")
    row = status(case, lambda **arrays: right(**arrays | {of: steeper(arrays[of])}), jnp.bfloat16)
    assert (row["status"], row["of"]) == ("wrong", f"d_{of}") and row["error"] == pytest.approx(0.03, rel=0.02)
