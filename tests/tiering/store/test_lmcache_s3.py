"""LMCache's S3 adapter against moto's server. ``pip install 'moto[s3,server]'`` beside LMCache."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from importlib.util import find_spec

import pytest

from dsv4_tierd.tiering.errors import StoreUnavailable
from lmcache_cases import needs_lmcache, open_adapter
from redis_cases import eventually
from store_cases import chain, present, read, resume, tail

pytestmark = [
    needs_lmcache,
    pytest.mark.skipif(find_spec("moto") is None, reason="moto is not installed"),
]
# The adapter names its bucket by the host alone; moto finds it there.
SERVE = """
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
moto = DomainDispatcherApplication(create_backend_app)
def app(environ, start):
    return moto(environ | {"HTTP_HOST": "tierd.s3.amazonaws.com"}, start)
server = make_server("127.0.0.1", 0, app, threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextlib.contextmanager
def bucket() -> Iterator[tuple[subprocess.Popen[bytes], dict[str, object]]]:
    """A server with an empty bucket, and the adapter's specification."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            connection.request("PUT", "/")
            assert connection.getresponse().status == 200
        endpoint = {"s3_endpoint": f"127.0.0.1:{port}", "s3_region": "us-east-1"}
        keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
        plain = {"s3_prefer_http2": False, "disable_tls": True, "s3_num_io_threads": 2}
        yield process, {"type": "s3"} | endpoint | keys | plain
    finally:
        process.kill()
        process.communicate()


def test_two_daemons_share_a_bucket() -> None:
    """One's objects are the other's; all are checked; what one deletes is gone for both."""
    items = [*chain("a", 5), resume("a4"), tail("s", "a4")]
    with bucket() as (_, spec):
        one, two = open_adapter(spec), open_adapter(spec)
        one.put(items)
        eventually(lambda: all(present(two, items)))
        assert [read(two, item) for item in items] == [item.payload for item in items]
        report = two.verify()
        assert (report.objects, report.bad) == (len(items), ())
        two.delete([items[-1].key])
        eventually(lambda: present(one, items) == [True] * 6 + [False])
        one.close()
        two.close()


# awscrt's own: it answers a future that the adapter's end has cancelled.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_bucket_that_stalls_costs_one_deadline() -> None:
    """Then calls fail at once, and it is used again when it answers."""
    items = chain("a", 5)
    with bucket() as (process, spec):
        store = open_adapter(spec)
        store.put(items)
        process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        for item in items:
            with pytest.raises(StoreUnavailable):
                read(store, item)
        assert time.monotonic() - begun < 8, "and not five deadlines of two seconds"
        process.send_signal(signal.SIGCONT)
        eventually(lambda: store.usage().up)
        assert [read(store, item) for item in items] == [item.payload for item in items]
        store.close()
