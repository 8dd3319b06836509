"""A local emulator of Google Cloud Storage: `gcp-storage-emulator` with missing features added and injected faults.

The service's clients find it by the environment of `clients(port)`. Every n-th request can be answered with 503 or be
dropped, as the service does under load; the environment of the server's process says which and how often.
"""

import itertools
import json
import os
import threading
from http import HTTPStatus
from http.server import ThreadingHTTPServer

MOVE = r"^/storage/v1/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.+)/moveTo/o/(?P<dest_object_id>.+)$"
TOKEN = "SENTINELTOKEN"
FAULT, EVERY = "MAXLIB_TEST_GS_FAULT", "MAXLIB_TEST_GS_EVERY"


def clients(port: int) -> dict[str, str]:
    """Returns the environment in which tensorstore, gcsfs and etils talk to the emulator."""
    place = dict.fromkeys(("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"), f"http://localhost:{port}")
    # gcsfs would ask another service what kind of bucket it is, which the emulator lacks.
    place |= {"GOOGLE_AUTH_TOKEN_FOR_TESTING": TOKEN, "EPATH_USE_TF": "false"}
    return place | {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}


class Faults:
    """Counts requests; of every `EVERY`-th one is "throttled" or "dropped"."""

    def __init__(self):
        self.kind, self.every = os.environ.get(FAULT, ""), int(os.environ.get(EVERY, "0"))
        self.made, self._count = 0, itertools.count(1)

    def next(self) -> str:
        if not self.kind or next(self._count) % self.every:
            return ""
        self.made += 1
        return self.kind


def start(port: int) -> Faults:
    """Serves an empty bucket named "bucket" from memory, in threads of this process; returns its faults."""
    from gcp_storage_emulator import server
    from gcp_storage_emulator.handlers import objects

    faults, one_at_a_time = Faults(), threading.Lock()
    send, read, handle = objects.download, server._read_data, server.Router.handle

    def download(request, response, storage):
        # The generation comes with a download.
        if stored := storage.objects.get(request.params["bucket_name"], {}).get(request.params["object_id"]):
            response["x-goog-generation"] = stored["generation"]
        send(request, response, storage)

    def move(request, response, storage, **_):
        request.params["dest_bucket_name"] = request.params["bucket_name"]
        objects.copy(request, response, storage)
        objects._delete(storage, request.params["bucket_name"], request.params["object_id"])

    def read_data(handler, query):
        # The emulator reads uploads as mail, which changes the ends of lines; a file is bytes.
        kind = handler.headers.get("Content-Type") or ""
        if not kind.startswith("multipart/related"):
            return read(handler, query)
        mark = b"--" + kind.partition("boundary=")[2].strip("\"'").encode()
        parts = server._decode_raw_data(server._read_raw_data(handler), handler).split(mark)[1:3]
        end = b"\r\n" if parts[0].startswith(b"\r\n") else b"\n"
        meta, content = (part.partition(end + end)[2].removesuffix(end) for part in parts)
        return {"meta": json.loads(meta), "content": content, "content-type": "application/octet-stream"}

    def handle_or_fail(router, method):
        if fault := faults.next():
            handler = router._request_handler
            handler.close_connection = True
            server._read_raw_data(handler)  # or the client sees a broken pipe while it writes
            if fault == "throttled":
                handler.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "Please reduce your request rate.")
            return
        with one_at_a_time:  # its storage is not made for threads
            handle(router, method)

    objects.download, server._read_data, server.Router.handle = download, read_data, handle_or_fail
    # A thread for each connection: with one for all, a client that keeps its connection open shuts out the other host.
    server.server.HTTPServer = ThreadingHTTPServer
    server.HANDLERS = ((MOVE, {server.POST: move}), *server.HANDLERS)
    server.create_server("localhost", port, in_memory=True, default_bucket="bucket").start()
    return faults
