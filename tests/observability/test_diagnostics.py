"""Each diagnostic detects its fault, and does not change the run otherwise."""

import contextlib
import functools
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxlib import checkpoint, nn, observability, sharding, training
from maxlib._command import main
from maxlib.observability import _profile
from maxlib.observability._report import Run, page
from maxlib.training import probes
from maxlib.training.probes import _faults
from maxlib.training.probes import _hooks as hooks
from tests.training import stacked, ticking, tiny

ROOT = Path(__file__).parents[2]
OPTIMIZER = training.adamw(1e-2, mask=training.decay_mask(tiny.model()))


def python(*args, **options):
    return subprocess.Popen([sys.executable, *map(str, args)], cwd=ROOT, text=True, stdout=subprocess.PIPE, **options)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def trainer(**options):
    options = {"optimizer": OPTIMIZER, "loader": tiny.Loader(), "loss": tiny.loss} | options
    return training.Trainer(tiny.model, **options)


# -------------------------------------------------------------------------------------------- goodput


def test_every_second_is_accounted_for_through_a_kill_and_a_wall_clock_that_goes_back(tmp_path):
    begin, truth = time.monotonic(), tmp_path / "truth.jsonl"
    process = python("-m", "tests.training.ticking", tmp_path)
    while not truth.exists() or len(lines(truth)) < 15:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    time.sleep(0.35)  # nothing runs; starts of processes are known to 0.01 s
    out, _ = python("-m", "tests.training.ticking", tmp_path).communicate(timeout=100)
    wall, summary = float(out) - begin, observability.goodput(tmp_path)
    assert summary.wall == pytest.approx(wall, rel=0.02)
    assert summary.sessions == 2 and summary.steps == ticking.STEPS
    assert summary.seconds["down"] > 0.3 and summary.seconds["startup"] > 0
    best, again = {}, []
    for step, seconds in lines(truth):
        (again.append(seconds) if step in best else best.setdefault(step, seconds))
    assert again  # the kill did cost work
    assert summary.seconds["redone"] == pytest.approx(sum(again), abs=0.5)
    assert summary.seconds["step"] == pytest.approx(sum(best.values()), abs=0.5)
    assert summary.goodput == pytest.approx(summary.seconds["step"] / summary.wall)
    assert "steps done again" in str(summary)


def test_spans_are_exclusive(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    wait = lambda seconds: now.__setitem__(0, now[0] + seconds)
    recorder = observability.GoodputRecorder(age=7.0)
    with recorder.span("restore"):
        wait(1)
    with recorder.step(1):
        wait(2)
        with recorder.span("data"):
            wait(4)
            with recorder.span(None):
                wait(8)
        with contextlib.suppress(ValueError), recorder.span("save"):
            wait(16)
            raise ValueError
        wait(32)
    wait(64)
    recorder.close()
    assert recorder.seconds == {"startup": 7, "restore": 1, "step": 34, "data": 12, "save": 16, "idle": 64}


def test_between_two_machines_the_wall_clock_counts_and_never_backwards(tmp_path):
    def account(*begins):
        rows = []
        for session, begin in enumerate(begins):
            rows += [{"session": session, "time": begin, "at": 5.0, "begin": 5.0, "boot": f"machine {session}"}]
            rows += [{"session": session, "time": begin + 10, "at": 15.0, "step": 3, "seconds": {"step": 10.0}}]
        torn = '{"session": 0, "time": 1.0, "at"\n'
        (tmp_path / "goodput.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
        return observability.goodput(tmp_path)

    assert account(1000.0, 1030.0).seconds == {"step": 20.0, "down": 20.0}
    assert account(1000.0, 900.0).seconds == {"step": 20.0, "down": 0.0}
    with pytest.raises(FileNotFoundError, match="Trainer with directory="):
        observability.goodput(tmp_path / "nowhere")


def test_a_disk_that_is_full_loses_no_seconds(tmp_path, monkeypatch):
    from maxlib.observability import _goodput as module

    recorder = observability.GoodputRecorder(tmp_path, age=0)
    append = module._append
    monkeypatch.setattr(module, "_append", lambda path, text: (_ for _ in ()).throw(OSError("No space left")))
    with recorder.step(1):
        time.sleep(0.05)
    recorder.close()
    monkeypatch.setattr(module, "_append", append)
    recorder.close()
    assert observability.goodput(tmp_path).seconds["step"] >= 0.05


# ------------------------------------------------------------------------------------ with the Trainer


# A loop, in it a fusion, in that a matmul, and what Python did meanwhile, in picoseconds.
TRACE = """
planes { name: "/host:CPU"
  lines { name: "thread"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000 stats { metadata_id: 1 str_value: "while.1" } }
    events { metadata_id: 2 offset_ps: 1000000 duration_ps: 6000000 stats { metadata_id: 1 str_value: "fusion.2" } }
    events { metadata_id: 3 offset_ps: 2000000 duration_ps: 2000000 stats { metadata_id: 1 str_value: "dot.3" } }
    events { metadata_id: 4 offset_ps: 2000000 duration_ps: 2000000 }
  }
  event_metadata { key: 1 value { id: 1 name: "while.1" } }
  event_metadata { key: 2 value { id: 2 name: "fusion.2" } }
  event_metadata { key: 3 value { id: 3 name: "dot.3" } }
  event_metadata { key: 4 value { id: 4 name: "python" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
}
"""


@pytest.mark.full  # a trace holds all programs of the process, thousands in a run of all tests
def test_a_trace_of_steps_has_their_ops(tmp_path, monkeypatch):
    tiny.share_steps(monkeypatch)
    trainer(callbacks=[(1, observability.Profile(tmp_path, after=2, steps=2))]).fit(5)
    ops = observability.top_ops(tmp_path)
    assert 0 < sum(op.share for op in ops) <= 1.0001 and ops[0].seconds >= ops[-1].seconds > 0


@pytest.mark.full
def test_a_trainer_with_everything_attached(tmp_path, monkeypatch, capsys):
    tiny.share_steps(monkeypatch)
    write_trace = lambda: (tmp_path / "profile" / "host.xplane.pb").write_bytes(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(TRACE)
    )
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: Path(directory).mkdir())
    monkeypatch.setattr(jax.profiler, "stop_trace", write_trace)
    ours = trainer(
        directory=tmp_path,
        evaluation=training.Evaluation(tiny.Loader(2), every=4),
        checkpointer=checkpoint.Checkpointer(tmp_path / "checkpoints", every=4),
        callbacks=[
            (1, observability.Profile(tmp_path / "profile", after=2, steps=2)),
            (1, program := observability.DumpProgram(tmp_path / "program")),
            (4, probes.LayerStatistics()),
            (4, probes.Recompute(rows=4)),
            (4, observability.SlowHosts(size=8)),
            (4, observability.Samples(tmp_path, lambda model: f"<{nn.num_parameters(model)}>")),
        ],
    )
    ours.writers.append(observability.SlowSteps(log=ours.log))
    observability.write_config(tmp_path, learning_rate=1e-2, size=jnp.float32)
    ours.fit(6)

    summary = observability.goodput(tmp_path)
    assert {"step", "compile", "restore", "data", "evaluation", "save", "callbacks"} <= summary.seconds.keys()
    rows = observability.read_jsonl(tmp_path / "metrics.jsonl")
    assert all(row["memory/host_bytes"] > 1e6 for row in rows if "tokens_per_second" in row)
    (layers,) = [row for row in rows if "layers/output_rms" in row]
    assert layers["step"] == 4 and len(layers["layers/gradient_norm"]) == 3
    ops = observability.top_ops(tmp_path / "profile")  # without what is inside them
    assert [(op.name, op.calls) for op in ops] == [("fusion.2", 1), ("dot.3", 1)]
    np.testing.assert_allclose([(op.seconds, op.share) for op in ops], [(4e-6, 2 / 3), (2e-6, 1 / 3)])
    assert "profile of 2 steps" in capsys.readouterr().out
    assert "ENTRY" in program.files["hlo"].read_text() and "lambda" in program.files["jaxpr"].read_text()
    assert re.search(r"argument +[\d,]+ bytes", program.files["memory"].read_text())

    assert main(["report", str(tmp_path)]) == 0
    html = (tmp_path / "report.html").read_text()
    samples = f"&lt;{nn.num_parameters(tiny.model())}&gt;"
    for wanted in ("<svg", "points: validation", "goodput", "waiting for data", "By layer", "learning_rate", samples):
        assert wanted.lower() in html.lower(), wanted
    titles = re.findall(r"<figcaption><b>([^<]+)</b>", html)
    assert titles[:2] == ["Loss", "Gradient norm"] and "bold lines are smoothed" in html
    assert "http" not in re.sub(r'xmlns\S*="[^"]*"|<!DOCTYPE[^>]*>', "", html)  # opens without a network


def test_a_report_compares_runs_and_takes_what_there_is(tmp_path, capsys):
    run = lambda name, rows, **config: Run(name, rows, None, config, [{"step": 1, "text": f"<i>{name}</i>"}])
    a = run("<first>", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}], rate=1, depth=2)
    b = run("second", [{"step": 1, "loss": 1.5, "moe/load": [[0.5, 0.5], [1.0, 0.0]]}], rate=3, depth=2)
    html = page([a, b])
    assert '<tr class="differs"><th>rate</th><td>1</td><td>3</td></tr>' in html
    assert "<tr><th>depth</th><td>2</td><td>2</td></tr>" in html
    assert "<i>" not in html and html.count("&lt;first&gt;") == 7 and "&lt;i&gt;second&lt;/i&gt;" in html
    assert html.count("<svg") == 2 and "Busiest expert" in html
    assert main(["report", str(tmp_path)]) == 2 and "has no metrics.jsonl" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------- layers


@functools.cache
def small():
    return tiny.llama(num_layers=3), jax.tree.map(jnp.asarray, tiny.batch(rows=2, length=6))


@pytest.mark.full
def test_what_is_observed_is_what_a_model_computes():
    model, batch = small()
    observed = probes.observe(model, batch, tiny.loss)
    assert [name for name in observed.outputs if name.count(".") < 3] == [
        *("embed", "layers.0.attn_norm", "layers.0.attn", "layers.0.mlp_norm", "layers.0.mlp", "layers.0"),
        *("layers.1.attn_norm", "layers.1.attn", "layers.1.mlp_norm", "layers.1.mlp", "layers.1"),
        *("layers.2.attn_norm", "layers.2.attn", "layers.2.mlp_norm", "layers.2.mlp", "layers.2", "norm"),
    ]
    params, rest = nn.partition(model)

    def loss(params):
        model = nn.combine(params, rest)
        hidden = model(batch["tokens"], dtype=jnp.float32).hidden
        return tiny.loss(model, batch)[0] / batch["targets"].size, jnp.sqrt(jnp.mean(hidden**2))

    (value, rms), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert observed.outputs["norm"]["rms"] == pytest.approx(float(rms), rel=1e-4)
    assert observed.loss == pytest.approx(float(value), rel=1e-5)
    rows = {f"layers.{i}.mlp.up.w": grads["layers.groups.0.0.mlp.up.w"][i] for i in range(3)}
    for name, gradient in (rows | {name: grads[name] for name in ("embed.w", "norm.scale")}).items():
        assert observed.gradients[name] == pytest.approx(float(jnp.linalg.norm(gradient)), rel=1e-3), name


def test_logits_and_entropy_of_attention():
    q, k = jax.random.normal(jax.random.key(0), (5, 4, 8)), jax.random.normal(jax.random.key(1), (5, 2, 8))
    index = jnp.arange(5)
    largest, entropy = hooks.logits_seen(q, k, jnp.zeros(5, jnp.int32), index + 1, None)
    logits = np.einsum("tnh,snh->nts", q, np.repeat(k, 2, axis=1)) / 8**0.5
    logits = np.where(np.tri(5, dtype=bool), logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    assert float(largest) == pytest.approx(logits.max(), rel=1e-5)
    assert float(entropy) == pytest.approx(-np.sum(p * np.log(np.where(p > 0, p, 1))) / 20, rel=1e-4)


def test_layers_of_every_group_are_tapped_one_by_one():
    model, _ = hooks.with_hooks(stacked.Model("aaabcbc"))
    rows = {path: v.shape for path, v in nn.variables(model).items() if path.endswith(".0.tap")}
    assert rows == {f"layers.groups.{n}.0.tap": (repeats, len(hooks.FIELDS)) for n, repeats in ((0, 3), (1, 2))}
    order = ["layers.groups.0.0.w", "layers.groups.0.0", "layers.groups.1.0", "layers.groups.1.1", "norm"]
    first = [(f"layers.groups.0.0{name}", row) for row in range(3) for name in (".w", "")]
    second = [(f"layers.groups.1.{slot}", row) for row in range(2) for slot in range(2)]
    assert hooks.in_layer_order(order, nn.tree.groupings(model)) == [*first, *second, ("norm", None)]


@pytest.mark.full
def test_the_first_layer_that_is_not_finite_is_named():
    model, batch = small()
    assert probes.find_nonfinite(model, batch, tiny.loss) is None
    params, rest = nn.partition(model)
    path, down = "layers.groups.0.0.mlp.up.w", "layers.groups.0.0.mlp.down.w"
    huge = nn.combine(params | {path: params[path].at[1].mul(1e25), down: params[down].at[1].mul(1e25)}, rest)
    text = probes.find_nonfinite(huge, batch, tiny.loss)
    assert text.startswith("forward: first the output of layers.1.mlp.down (")
    bad = nn.combine(params | {path: params[path].at[2, 0, 0].set(jnp.nan)}, rest)
    text = probes.find_nonfinite(bad, batch, tiny.loss)
    assert "parameters: layers.2.mlp.up.w is not finite before" in text
    assert "forward: first the output of layers.2.mlp.up (12 values)" in text


def test_what_came_before_the_first_bad_output_is_said():
    seen = {"nonfinite": 0.0, "max": 3.25, "gradient_nonfinite": 0.0}
    outputs = {"a": seen, "b": seen | {"nonfinite": 4.0}, "c": seen | {"nonfinite": 9.0}}
    finite = _faults._forward(probes.Observation({"a": seen}, {}, {}, math.nan))
    assert finite == "forward: the loss is nan, all layers' outputs are finite"
    text = _faults._forward(probes.Observation(outputs, {}, {}, math.nan))
    assert text == "forward: first the output of b (4 values); before it, a has values up to 3.25"
    backward = {name: seen | {"gradient_nonfinite": n} for name, n in (("a", 2.0), ("b", 1.0), ("c", 0.0), ("d", 0.0))}
    assert "created between it and c, which comes next" in _faults._backward(probes.Observation(backward, {}, {}, 1.0))


def test_a_gradient_that_is_not_finite_is_placed():
    model, batch = tiny.model(), jax.tree.map(jnp.asarray, tiny.batch(rows=2, length=6))

    def root(model, batch, key):  # a finite value with an infinite slope
        hidden = model(batch["tokens"], dtype=jnp.float32).hidden
        return jnp.sum(jnp.sqrt(hidden * 0)), training.Stats(jnp.float32(1), {})

    text = probes.find_nonfinite(model, batch, root)
    assert "forward" not in text
    assert "backward: first the gradient of the output of layers.2, created by the loss" in text
    assert re.search(r"gradients: .+ and \d+ more are not finite", text)


# ------------------------------------------------------------------------------------------ corruption


def test_replicas_and_recomputed_gradients_are_compared(monkeypatch):
    mesh = sharding.make_mesh(data=8)
    same = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P()))
    copies = [jax.device_put(jnp.arange(8.0).at[3].add(i == 5), d) for i, d in enumerate(mesh.devices.flat)]
    other = jax.make_array_from_single_device_arrays((8,), same.sharding, copies)
    split = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P("data")))
    assert probes.replicas_that_differ({"same": same, "other": other, "split": split}) == ["other"]

    answers = iter([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}])
    monkeypatch.setattr(_faults, "gradient_digests", lambda *_: next(answers))
    ours = trainer()
    ours.batch = tiny.batch()
    with pytest.raises(_faults.Corrupted, match=r"step 0, .*\['gradient of b'\]"):
        probes.Recompute()(ours)


# ------------------------------------------------------------------------------------- hangs, slowness


def test_slow_steps_are_flagged():
    said, random = [], np.random.default_rng(0)
    slow = observability.SlowSteps(log=said.append)
    for step in range(1, 301):
        slow.write(step, {"seconds": 2.0 if step == 150 else 0.1 + 0.001 * random.standard_normal()})
    slow.write(301, {"eval/loss": 1.0})
    assert slow.flagged == [(150, 2.0)] and said[0].startswith("step 150 took 2 s; the median is 0.1")


def test_slow_hosts_are_named():
    slow = observability.slow_hosts({"compute": np.array([1.0, 1.1, 1.7]), "data": np.array([0.001, 0.009, 0.3])})
    assert [line[:18] for line in slow] == ["process 2: compute", "process 2: data to"]
    assert observability.SlowHosts(size=8, factor=1e9)() == []


def test_live_arrays_are_counted():
    x = jnp.zeros((1234, 7))
    assert f"{x.nbytes:,} bytes" in observability.live_arrays(1000)


def test_memory_is_read_now_and_then(monkeypatch):
    peaks = iter(range(10))
    monkeypatch.setattr(_profile, "_host_memory", lambda: {"memory/host_bytes": next(peaks)})
    ages = [0.0, 0.0, 3600.0, 3600.0]
    assert [observability.memory_use(max_age=age)["memory/host_bytes"] for age in ages] == [0, 1, 1, 1]
