"""rediss://: the same store over TLS, and certificates that are not trusted are not accepted."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest

import redis_servers
from dsv4_tierd.tiering.errors import StoreUnavailable
from redis_cases import DEADLINE_S, SLACK_S, assert_refused, eventually, open_hasty, open_redis
from redis_servers import Server
from store_cases import chain, page, present, read
from tls_front import TlsFront, certificate

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not here"
)

SECRET = "s3:cr@t/#%"  # noqa: S105 of servers that end with the test


@pytest.fixture
def front(tmp_path: Path) -> Iterator[tuple[TlsFront, Path]]:
    """TLS before an empty server, and the certificate to trust."""
    key, cert = certificate(tmp_path)
    front = TlsFront(redis_servers.emptied().port, key, cert)
    yield front, cert
    front.close()


def test_it_works_over_tls(front: tuple[TlsFront, Path]) -> None:
    """Objects small and large, notifications, and a server that hangs and comes back."""
    tls, cert = front
    url = f"rediss://127.0.0.1:{tls.port}/0?ssl_ca_certs={cert}"
    store, other = open_hasty(url), open_redis(redis_servers.current().url)
    items = [*chain("a", 20), page("big", size=3_000_000)]
    store.put(items)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    eventually(lambda: all(present(other, items)))
    other.delete([items[10].key])
    eventually(lambda: sum(present(store, items)) == 11)
    server = redis_servers.current()
    server.pause()
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable):
        read(store, items[0])
    assert time.monotonic() - begun < 2 * DEADLINE_S + SLACK_S
    server.go_on()
    eventually(lambda: store.usage().up)
    assert read(store, items[0]) == items[0].payload
    for each in (store, other):
        each.close()


def test_a_password_and_a_database_over_tls(tmp_path: Path) -> None:
    """rediss:// with both: what is stored is in that database, and nowhere else."""
    key, cert = certificate(tmp_path)
    with Server(requirepass=SECRET) as server, closing(TlsFront(server.port, key, cert)) as tls:
        quoted = quote(SECRET, safe="")
        store = open_redis(f"rediss://:{quoted}@127.0.0.1:{tls.port}/3?ssl_ca_certs={cert}")
        store.put(chain("a", 3))
        assert read(store, page("a0")) == page("a0").payload
        with server.client as client:
            assert client.info("keyspace").keys() == {"db3"}
        store.close()


def test_sentinel_over_tls_with_passwords(tmp_path: Path) -> None:
    """One password for the Sentinels and one for the master, which it names by its TLS port."""
    key, cert = certificate(tmp_path)
    conf = tmp_path / "sentinel.conf"
    with Server(requirepass=SECRET) as server, closing(TlsFront(server.port, key, cert)) as tls:
        # It cannot speak TLS itself, and does not mind for that long.
        conf.write_text(
            f"sentinel monitor main 127.0.0.1 {tls.port} 1\n"
            "sentinel down-after-milliseconds main 600000\n"
        )
        with (
            Server(prefix=[str(conf), "--sentinel"], requirepass="second") as sentinel,
            closing(TlsFront(sentinel.port, key, cert)) as front,
        ):
            trusted = f"ssl_ca_certs={cert}&sentinel_ssl_ca_certs={cert}"
            url = f"rediss+sentinel://:{quote(SECRET, safe='')}@127.0.0.1:{front.port}/main/2"
            store = open_redis(f"{url}?sentinel_password=second&{trusted}")
            assert store.link.down_reason is None
            store.put(chain("a", 3))
            assert read(store, page("a0")) == page("a0").payload
            with server.client as client:
                assert client.info("keyspace").keys() == {"db2"}
            store.close()
            assert_refused(f"{url}?sentinel_password=thirds&{trusted}", "thirds")


def test_an_unknown_certificate_is_refused(front: tuple[TlsFront, Path]) -> None:
    """Without the authority that signed it there is no connection, and the reason is said."""
    tls, _ = front
    store = open_redis(f"rediss://127.0.0.1:{tls.port}/0")
    with pytest.raises(StoreUnavailable, match="certificate"):
        store.put([page("a")])
    store.close()
