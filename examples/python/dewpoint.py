"""A client of a Dewpoint node, made of Python's standard library alone.

The API is described at /openapi.yaml of a node and in docs/operate/api.md. Requests and answers are
dictionaries as protobuf's JSON has them: names in lowerCamelCase, 64-bit integers as strings,
durations as "1.5s", and what is zero, false or empty left out.

    node = Node()                                       # the Unix socket, as root
    node = Node("https://node1:7119", ca="ca.crt", token="ci.token")
    node = Node("https://node1:7119", ca="ca.crt", cert="me.crt", key="me.key")

    for step in node.deploy({"image": "docker.io/library/nginx:1", "name": "web"}, key="release-7"):
        print(step)
    print(node.list())

A Node may be used by several threads: each call has a connection of its own.
"""

import base64
import http.client
import json
import socket
import ssl
import struct
import time
import urllib.parse

DEFAULT_HOST = "unix:///run/dewpoint/dewd.sock"
SERVICE = "/dewpoint.v1.Node/"

_COMPRESSED, _LAST = 1, 2  # flags of an envelope


class Error(Exception):
    """A call that failed. code is what programs test: not_found, disk_full, busy, ...; all of
    them are in the node's description. remedy says what to do, and may be empty."""

    def __init__(self, code, message, remedy="", exit=1):
        super().__init__(message + ("; " + remedy if remedy else ""))
        self.code, self.message, self.remedy, self.exit = code, message, remedy, exit


class Cut(Error):
    """The connection broke, or there was none. Whether the node has heard the request is not
    known: ask again, and with a key where asking twice would do things twice."""

    def __init__(self, message):
        super().__init__("no_daemon", message, "see whether dewd runs", 3)


class Node:
    """A node, reached at unix:///PATH, https://HOST:PORT or, on a loopback address, http://HOST:PORT.

    ca is the file of who signs the node's certificate, cert and key those of this client,
    token the file of its token. timeout is that of a connection and of short calls, in seconds."""

    def __init__(self, host=DEFAULT_HOST, *, ca=None, cert=None, key=None, token=None, timeout=30):
        self._url = urllib.parse.urlsplit(host)
        self._timeout = timeout
        self._token = None
        if token:
            with open(token, encoding="ascii") as f:
                self._token = f.readline().strip()
        self._tls = None
        if self._url.scheme == "https":
            self._tls = ssl.create_default_context(cafile=ca)
            self._tls.minimum_version = ssl.TLSVersion.TLSv1_3
            if cert:
                self._tls.load_cert_chain(cert, key)
        elif self._url.scheme == "http":
            if self._url.hostname not in ("localhost", "127.0.0.1", "::1"):
                raise ValueError("in clear to this machine only: use https://")
        elif self._url.scheme != "unix":
            raise ValueError("want unix:///PATH, https://HOST:PORT or http://localhost:PORT, not " + host)

    # --- what is asked and answered once

    def list(self, all=False):
        """The containers that run, or all."""
        return self.call("List", all=all).get("containers", [])

    def images(self):
        return self.call("Images").get("images", [])

    def version(self):
        return self.call("Version")

    def deployments(self, all=False):
        """What is queued and under way, and with all what has ended lately."""
        return self.call("ListDeployments", all=all).get("deployments", [])

    def stop(self, name, timeout=None):
        """Asks a container to end; it is killed after timeout seconds. Returns when it has ended."""
        fields = {"name": name}
        if timeout is not None:
            fields["timeout"] = duration(timeout)
        self.call("Stop", _within=600, **fields)

    def remove(self, name, force=False):
        self.call("Remove", _within=600, name=name, force=force)

    # --- streams

    def deploy(self, spec, key=None, deadline=None, tries=10):
        """Deploys a container and yields the steps: {"stage": ...}, {"layers": ...} and at the end
        {"record": ...}. Closing the generator before it is ready cancels the deployment.

        With a key the deployment is made once, however often it is asked for: when the connection
        breaks, it is asked for again, up to tries times, and the steps go on where the node is then.
        deadline is in seconds, and for all of it, the time in the queue included."""
        request = {"spec": spec}
        if key:
            request["key"] = key
        if deadline:
            request["deadline"] = duration(deadline)
        for left in range(tries if key else 1, 0, -1):
            try:
                yield from self.stream("Deploy", request)
                return
            except Cut:
                if left == 1:
                    raise
                time.sleep(0.5)

    def logs(self, name, follow=False, tail=0):
        """Yields (stream, bytes): "stdout" or "stderr", and what the container has written there.
        tail is the number of lines to begin with: 0 is all, below 0 none."""
        for m in self.stream("Logs", {"name": name, "follow": follow, "tail": tail}):
            out = m["output"]
            yield ("stderr" if out.get("stream") == "STREAM_STDERR" else "stdout", base64.b64decode(out.get("data", "")))

    def events(self, after=None, epoch=None, patience=60):
        """Yields what happens on the node, from the event after number after on (0: all that is
        still known), or from now on. epoch is that event's: each dewd numbers its events anew. When the
        connection breaks it is made again, and goes on behind the last event that came. If events were
        missed meanwhile, one of kind "resync" comes first: ask list() and deployments() anew then.
        After patience seconds without a node it gives up."""
        since = None  # when the node went away
        while True:
            try:
                request = {} if after is None else {"after": str(after)}
                if epoch:
                    request["epoch"] = epoch
                for m in self.stream("Events", request):
                    since = None
                    if "event" in m:
                        after, epoch = int(m["event"].get("seq", 0)), m["event"].get("epoch")
                        yield m["event"]
                raise Cut("the node has ended the stream")
            except Error as e:
                if e.code not in ("no_daemon", "stopping"):
                    raise
                since = since or time.monotonic()
                if time.monotonic() - since > patience:
                    raise
                time.sleep(0.2)

    # --- Connect (connectrpc.com/docs/protocol)

    def call(self, method, _within=None, **request):
        """Any call that has one answer."""
        connection = self._connect(_within or self._timeout)
        try:
            response = self._ask(connection, method, "application/json", json.dumps(request).encode())
            answer = self._read(response)
        finally:
            connection.close()
        if response.status != 200:
            raise _error(_object(answer), f"the node answered with status {response.status}")
        return _object(answer)

    def stream(self, method, request):
        """Any call whose answers are a stream. Closing the generator cancels the call."""
        body = json.dumps(request).encode()
        connection = self._connect(None)
        try:
            response = self._ask(connection, method, "application/connect+json", struct.pack(">BI", 0, len(body)) + body)
            if response.status != 200:
                raise _error(_object(self._read(response)), f"the node answered with status {response.status}")
            while True:
                flags, size = struct.unpack(">BI", self._read(response, 5))
                message = _object(self._read(response, size))
                if flags & _COMPRESSED:
                    raise Error("internal", "the node compresses, and was not asked to")
                if flags & _LAST:
                    if "error" in message:
                        raise _error(message["error"], "the call failed")
                    return
                yield message
        finally:
            connection.close()

    def _connect(self, timeout):
        if self._url.scheme == "unix":
            return _UnixConnection(self._url.path, timeout)
        if self._tls:
            return http.client.HTTPSConnection(self._url.hostname, self._url.port, timeout=timeout, context=self._tls)
        return http.client.HTTPConnection(self._url.hostname, self._url.port, timeout=timeout)

    def _ask(self, connection, method, kind, body):
        headers = {"Content-Type": kind, "Connect-Protocol-Version": "1"}
        if self._token:
            headers["Authorization"] = "Bearer " + self._token
        try:
            connection.request("POST", SERVICE + method, body, headers)
            return connection.getresponse()
        except ssl.SSLCertVerificationError as e:
            raise Error("unauthorized", str(e), "name who signs the node's certificate with ca") from e
        except (OSError, http.client.HTTPException) as e:
            raise Cut(f"dewd at {self._url.geturl()}: {e}") from e

    def _read(self, response, size=None):
        try:
            b = response.read(size)
        except (OSError, http.client.HTTPException) as e:
            raise Cut(f"the connection to dewd broke: {e}") from e
        if size is not None and len(b) < size:
            raise Cut("the connection to dewd broke")
        return b


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path, timeout):
        super().__init__("dewd", timeout=timeout)
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def duration(seconds):
    """Seconds as protobuf's JSON has them."""
    return f"{seconds:.3f}s"


def _object(b):
    try:
        v = json.loads(b or b"{}")
    except ValueError:
        v = None
    if not isinstance(v, dict):
        raise Error("internal", "what answers is no dewd: " + repr(b[:80]))
    return v


def _error(e, otherwise):
    for d in e.get("details", []):
        if d.get("type") == "dewpoint.v1.Error" and "debug" in d:
            d = d["debug"]
            return Error(d.get("code", "internal"), d.get("message", ""), d.get("remedy", ""), d.get("exit", 1))
    return Error(e.get("code", "internal"), e.get("message", otherwise))
