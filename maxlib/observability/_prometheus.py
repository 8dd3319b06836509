"""The newest metrics for Prometheus, and the health of a run, over HTTP."""

import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

from maxlib.observability._goodput import GoodputRecorder
from maxlib.observability._metrics import Values
from maxlib.observability._trackers import numbers


class Prometheus:
    """Writer that serves `/metrics` for Prometheus and `/healthz` for probes of Kubernetes and load balancers.

        writer = Prometheus(0)  # a free port; in training, trainer.writers.append(writer)
        writer.write(3, {"loss": 2.5})
        writer.close()

    `/metrics` has the newest value of each metric as a gauge, `maxlib_loss`, `maxlib_grad_norm`, ..., with the mean,
    minimum and maximum of arrays; the step; the time of the newest step; and, with a recorder, the seconds by what they
    were spent on. `/healthz` answers 200, or 503 after `stalled` seconds without metrics, with a JSON object in both
    cases. Every process serves its own: give processes on one host different ports. It serves from its creation on,
    so that a probe also sees a run that hangs before its first step, until `close`; the next `resume` or `write`
    serves again.

    Args:
        port: Port to listen on; 0 takes a free one.
        host: Address to listen on; "" for all interfaces.
        stalled: Seconds without metrics after which the run is unhealthy; must exceed start-up with compilation, the
            longest evaluation and the longest save. None for always healthy.
        recorder: The run's recorder of goodput, `trainer.clock`.

    Attributes:
        port: The port it listens on.

    Raises:
        OSError: When the port is in use.
    """

    def __init__(
        self, port: int, *, host: str = "", stalled: float | None = 1800.0, recorder: GoodputRecorder | None = None
    ):
        self.port, self._host, self._stalled, self._recorder = port, host, stalled, recorder
        self._server: http.server.ThreadingHTTPServer | None = None
        self._lock, self._values = threading.Lock(), {}
        self._step, self._time, self._alive = 0, 0.0, time.monotonic()
        self._serve()

    def resume(self, step: int) -> None:
        """Sets the step from which training continues."""
        self._serve()
        self._step, self._alive = step, time.monotonic()

    def write(self, step: int, values: Values) -> None:
        """Replaces the values of these metrics."""
        self._serve()
        with self._lock:
            self._values |= numbers(values)
        self._step, self._time, self._alive = step, time.time(), time.monotonic()

    def close(self) -> None:
        """Stops serving, so that an ended run is not taken for a running one."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def text(self) -> str:
        """Returns the metrics in Prometheus' text format (version 0.0.4)."""
        return "".join(f"{line}\n" for line in self._lines())

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Returns whether the run is healthy, with its step and the seconds since its newest metrics."""
        silent = time.monotonic() - self._alive
        healthy = self._stalled is None or silent <= self._stalled
        return healthy, {"healthy": healthy, "step": self._step, "seconds_without_metrics": round(silent, 1)}

    def _lines(self) -> Iterator[str]:
        with self._lock:
            values = dict(self._values)
        values |= {"step": self._step, "step_timestamp_seconds": self._time}
        gauges = {_name(name): value for name, value in values.items()}  # "a/b" and "a_b" would be one name twice
        for name, value in gauges.items():
            yield f"# TYPE {name} gauge"
            yield f"{name} {_number(value)}"
        if self._recorder is not None:
            name = "maxlib_spent_seconds_total"
            yield f"# HELP {name} Seconds of this process, by what they were spent on."
            yield f"# TYPE {name} counter"
            for span, seconds in dict(self._recorder.seconds).items():
                yield f'{name}{{span="{span}"}} {_number(seconds)}'

    def _serve(self) -> None:
        if self._server is not None:
            return
        server = http.server.ThreadingHTTPServer((self._host, self.port), _handler(self))
        server.daemon_threads = True
        self._server, self.port = server, server.server_port
        threading.Thread(target=server.serve_forever, name="maxlib-prometheus", daemon=True).start()


def _handler(metrics: Prometheus) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            match self.path.partition("?")[0]:
                case "/metrics":
                    self._answer(200, "text/plain; version=0.0.4; charset=utf-8", metrics.text())
                case "/healthz":
                    healthy, status = metrics.health()
                    self._answer(200 if healthy else 503, "application/json", json.dumps(status) + "\n")
                case _:
                    self.send_error(404, "there are /metrics and /healthz")

        def _answer(self, status: int, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Prints nothing."""

    return Handler


def _name(name: str) -> str:
    return "maxlib_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _number(value: float) -> str:
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text := repr(float(value)), text)
