"""Amazon's S3 on this machine: a proxy that ends the encryption of `https://*.amazonaws.com` and hands the requests to
moto's server.

Neither tensorstore nor others need to be told of another endpoint; the real names go to the proxy (`HTTPS_PROXY`) and
an authority made here signs for them. Every n-th request can be answered with 503 or be dropped, as the service does
under load.
"""

import datetime as dt
import itertools
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAMES = ("*.s3.us-east-1.amazonaws.com", "*.s3.amazonaws.com", "s3.us-east-1.amazonaws.com", "s3.amazonaws.com")
_REASON = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
SLOW_DOWN = b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(_REASON) + _REASON


class Faults:
    """Throttles every `throttled`-th request and drops the connection of every `dropped`-th one; 0 for none."""

    def __init__(self):
        self.throttled = self.dropped = 0
        self.seen = self.made = 0
        self._count, self._lock = itertools.count(1), threading.Lock()

    def next(self) -> str | None:
        """Returns "throttle", "drop", or None for a request that is served."""
        with self._lock:
            self.seen = next(self._count)
            fault = None
            if self.throttled and self.seen % self.throttled == 0:
                fault = "throttle"
            elif self.dropped and self.seen % self.dropped == 0:
                fault = "drop"
            self.made += fault is not None
            return fault


@contextmanager
def emulate(directory: Path) -> Iterator[tuple[dict[str, str], Faults]]:
    """Runs the emulator and yields the environment of its clients, and the faults to switch on."""
    from moto.server import ThreadedMotoServer

    authority, certificate, key = _certificates(directory)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
    port = server.get_host_and_port()[1]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    faults, proxy = Faults(), socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(proxy, context, port, faults), daemon=True).start()
    address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
    environment = dict.fromkeys(("HTTPS_PROXY", "https_proxy"), address)
    environment |= dict.fromkeys(
        ("NO_PROXY", "no_proxy"), "localhost,127.0.0.1"
    )  # where jax.distributed has its service
    environment |= {name: str(authority) for name in ("AWS_CA_BUNDLE", "TENSORSTORE_CA_BUNDLE")}
    try:
        yield environment, faults
    finally:
        proxy.close()
        server.stop()


def _accept(proxy: socket.socket, context: ssl.SSLContext, port: int, faults: Faults) -> None:
    while True:
        try:
            client, _ = proxy.accept()
        except OSError:  # closed: the test is over
            return
        threading.Thread(target=_serve, args=(client, context, port, faults), daemon=True).start()


def _serve(client: socket.socket, context: ssl.SSLContext, port: int, faults: Faults) -> None:
    """Serves one tunnel, request after request."""
    try:
        _head(client)  # CONNECT bucket.s3.amazonaws.com:443
        client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        with context.wrap_socket(client, server_side=True) as tunnel:
            while head := _head(tunnel):
                fault = faults.next()
                if fault == "drop":
                    return
                body = _body(tunnel, head)
                if fault == "throttle":
                    tunnel.sendall(SLOW_DOWN)
                    return
                tunnel.sendall(_answer(port, head, body))
                return  # one request a connection: moto's server closes it, too
    except OSError:  # the client has gone
        client.close()


def _head(connection) -> bytes:
    """Reads up to the empty line that ends the headers; nothing if the client has closed."""
    received = b""
    while not received.endswith(b"\r\n\r\n"):
        piece = connection.recv(1)
        if not piece:
            return b""
        received += piece
    return received


def _body(connection, head: bytes) -> bytes:
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
    if headers.get(b"expect") == b"100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    if headers.get(b"transfer-encoding") == b"chunked":
        return _chunks(connection)
    left, received = int(headers.get(b"content-length", 0)), b""
    while len(received) < left:
        piece = connection.recv(left - len(received))
        if not piece:
            break
        received += piece
    return received


def _chunks(connection) -> bytes:
    """Reads pieces, each behind a line with its length, to the empty one; as they are."""
    received = b""
    while not received.endswith(b"\r\n0\r\n\r\n") and received != b"0\r\n\r\n":
        piece = connection.recv(1)
        if not piece:
            break
        received += piece
    return received


def _answer(port: int, head: bytes, body: bytes) -> bytes:
    """Returns the server's whole answer, with a line that says that the connection ends."""
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith((b"connection:", b"expect:"))]
    request = b"\r\n".join([lines[0], b"Connection: close", *lines[1:]])
    with socket.create_connection(("127.0.0.1", port)) as server:
        server.sendall(request + body)
        received = b""
        while piece := server.recv(1 << 16):
            received += piece
    return received


def _certificates(directory: Path) -> tuple[Path, Path, Path]:
    """Makes an authority and a certificate of Amazon's names that it has signed; returns the three files."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = dt.datetime.now(dt.UTC)
    named = lambda name: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def signed(subject: str, key, issuer: str, issuer_key, extension, critical):
        builder = x509.CertificateBuilder().subject_name(named(subject)).issuer_name(named(issuer))
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - dt.timedelta(days=1)).not_valid_after(now + dt.timedelta(days=2))
        return builder.add_extension(extension, critical).sign(issuer_key, hashes.SHA256())

    root_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = signed(
        "maxlib tests", root_key, "maxlib tests", root_key, x509.BasicConstraints(ca=True, path_length=None), True
    )
    names = x509.SubjectAlternativeName([x509.DNSName(name) for name in NAMES])
    leaf = signed("amazonaws.com", key, "maxlib tests", root_key, names, False)
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files = {"ca.pem": root.public_bytes(pem), "certificate.pem": leaf.public_bytes(pem), "key.pem": secret}
    for name, text in files.items():
        (directory / name).write_bytes(text)
    return directory / "ca.pem", directory / "certificate.pem", directory / "key.pem"
