"""Prometheus' text format and the health of a run, as its own parser and an HTTP client read them."""

import functools
import json
import math
import socketserver
import urllib.error
import urllib.request

import numpy as np
import pytest

from maxlib import observability


def get(writer, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{writer.port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def writer(monkeypatch):
    serve = functools.partialmethod(
        socketserver.BaseServer.serve_forever, poll_interval=0.01
    )  # each end waits that long
    monkeypatch.setattr(socketserver.BaseServer, "serve_forever", serve)
    recorder = observability.GoodputRecorder()
    with recorder.span("compile"):
        pass
    writer = observability.Prometheus(0, host="127.0.0.1", stalled=60, recorder=recorder)
    yield writer
    writer.close()


VALUES = {"loss": 2.5, "eval/loss": np.float32(0.5), "load": np.array([1.0, 3.0]), "bad": math.nan, "worse": -math.inf}


def test_its_text_is_what_prometheus_reads(writer):
    parser = pytest.importorskip("prometheus_client.parser")
    writer.write(7, VALUES)
    families = list(parser.text_string_to_metric_families(get(writer, "/metrics")[1]))
    samples = {sample.name: sample for family in families for sample in family.samples}
    names = ("loss", "eval_loss", "load_mean", "load_min", "load_max", "step", "worse")
    assert [samples[f"maxlib_{name}"].value for name in names] == [2.5, 0.5, 2.0, 1.0, 3.0, 7.0, -math.inf]
    assert math.isnan(samples["maxlib_bad"].value)
    kinds = {family.name: family.type for family in families}
    assert kinds["maxlib_loss"] == "gauge" and kinds["maxlib_spent_seconds"] == "counter"
    assert {sample.labels["span"] for sample in families[-1].samples} >= {"compile", "startup"}


def test_every_line_has_the_format_and_newer_values_replace_older_ones(writer):
    writer.write(7, VALUES)
    writer.write(8, {"loss": 2.0})
    status, text = get(writer, "/metrics")
    lines = text.splitlines()
    assert status == 200 and "maxlib_loss 2.0" in lines and "maxlib_step 8.0" in lines and "maxlib_bad NaN" in lines
    assert "maxlib_worse -Inf" in lines and "maxlib_eval_loss 0.5" in lines
    assert len(lines) == len(set(lines)) and get(writer, "/other")[0] == 404


def test_a_run_without_metrics_becomes_unhealthy(writer, monkeypatch):
    assert get(writer, "/healthz")[0] == 200  # also before the first step
    writer.write(7, {"loss": 1.0})
    later = writer._alive + 61
    monkeypatch.setattr("maxlib.observability._trackers.time.monotonic", lambda: later)
    status, body = get(writer, "/healthz")
    assert (status, json.loads(body)) == (503, {"healthy": False, "step": 7, "seconds_without_metrics": 61.0})
    writer.write(8, {"loss": 1.0})
    assert get(writer, "/healthz")[0] == 200


def test_it_stops_with_a_fit_and_serves_the_next_one_on_the_same_port(writer):
    port = writer.port
    writer.close()
    with pytest.raises(urllib.error.URLError):
        get(writer, "/healthz")
    writer.resume(3)
    assert writer.port == port and json.loads(get(writer, "/healthz")[1])["step"] == 3
    with pytest.raises(OSError):
        observability.Prometheus(port, host="127.0.0.1")
