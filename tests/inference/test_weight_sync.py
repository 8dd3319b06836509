"""Whole weights for a running server: the order of its calls, and what may go wrong (a real one: test_vllm.py)."""

import contextlib
import http.server
import json
import threading

import pytest

from maxlib.inference import Engine, ReloadingServerEngine, ServerError

ORDER = ["/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache", "/resume"]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body))
        status, text = self.server.answers.get(self.path, (200, b'{"success": true}'))
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(**answers):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.seen, server.answers = [], {f"/{name}": answer for name, answer in answers.items()}
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", server
        finally:
            server.shutdown()
            thread.join()


def test_weights_are_reloaded_while_nothing_runs(tmp_path):
    with serving() as (url, server):
        engine = ReloadingServerEngine(url, "base", save=lambda weights: tmp_path / weights)
        assert isinstance(engine, Engine)
        engine.update("new")
    assert [path for path, _ in server.seen] == ORDER and engine.updates == 1 and engine.model == "base"
    assert server.seen[1][1] == {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "new")}}


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"collective_rpc": (404, b"not found")}, "collective_rpc answered 404"),
        ({"reset_prefix_cache": (200, b'{"success": false}')}, "kept prefixes of the former weights"),
    ],
)
def test_a_server_that_does_not_reload_goes_on_and_is_an_error(answers, message, tmp_path):
    with serving(**answers) as (url, server):
        engine = ReloadingServerEngine(url, "base", save=lambda weights: tmp_path)
        with pytest.raises(ServerError, match=message):
            engine.update("new")
    assert server.seen[-1][0] == "/resume" and engine.updates == 0
