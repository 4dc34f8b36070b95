"""What a URL may name: databases, passwords, Sentinels, clusters whose slots move."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

import redis_servers
from dsv4_tierd.tiering.errors import InvalidRequest, StoreUnavailable
from dsv4_tierd.tiering.store.protocol import ObjectKey
from dsv4_tierd.tiering.store.redis import RedisStore
from redis_cases import assert_refused, eventually, open_redis
from redis_servers import Cluster, Server
from store_cases import chain, page, read


def test_a_slot_that_moved_is_found() -> None:
    """A cluster moves a slot with its keys to another node: reads and writes follow it."""
    cluster = redis_servers.emptied_cluster()
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in cluster.nodes)
    store = open_redis(f"redis+cluster://{hosts}")
    items = chain("a", 6)
    store.put(items)
    for key in (store.shelf.names.cat, _row(store, items[0].key).place.extent):
        _move_slot(cluster, key)
        assert [read(store, item) for item in items] == [item.payload for item in items]
        store.put([page("more" + key.hex()[-4:], size=100)])
    assert store.link.trips == 0
    assert store.verify().bad == ()
    store.delete_tenant("")
    for node in cluster.nodes:
        with node.client as client:
            assert client.keys("tierd:1:x:*") == []
    store.close()


def test_a_cluster_with_a_password_whose_first_node_is_dead() -> None:
    """The next one that the URL names is asked; a wrong password is said, and not shown."""
    cluster = redis_servers.emptied_cluster()
    dead = redis_servers.free_port()
    alive = ",".join(f"127.0.0.1:{node.port}" for node in cluster.nodes)
    hosts = f"127.0.0.1:{dead},{alive}"
    clients = [node.client for node in cluster.nodes]  # open: without the password
    try:
        for client in clients:
            client.config_set("requirepass", "s3:cr@t")
        store = open_redis(f"redis+cluster://:s3%3Acr%40t@{hosts}")
        store.put(chain("a", 6))
        assert read(store, page("a0")) == page("a0").payload
        store.close()
        assert_refused(f"redis+cluster://:nopenope@{alive}", "nopenope")
    finally:
        for client in clients:
            client.execute_command("AUTH", "s3:cr@t")
            client.config_set("requirepass", "")
            client.close()


def _row(store: RedisStore, key: ObjectKey):
    row = store.shelf.mirror.find(key)
    assert row is not None
    return row


def _move_slot(cluster: Cluster, key: bytes) -> None:
    clients = [node.client for node in cluster.nodes]
    slot = clients[0].execute_command("CLUSTER KEYSLOT", key)
    source = next(c for c in clients if _owns(c, key))
    target = next(c for c in clients if c is not source)
    ids = {id(c): c.execute_command("CLUSTER MYID").decode() for c in clients}
    port = cluster.nodes[clients.index(target)].port
    target.execute_command(f"CLUSTER SETSLOT {slot} IMPORTING {ids[id(source)]}")
    source.execute_command(f"CLUSTER SETSLOT {slot} MIGRATING {ids[id(target)]}")
    for each in source.execute_command("CLUSTER GETKEYSINSLOT", slot, 1000):
        source.execute_command("MIGRATE", "127.0.0.1", port, each, 0, 5000)
    for client in (target, source, *clients):
        client.execute_command(f"CLUSTER SETSLOT {slot} NODE {ids[id(target)]}")
    for client in clients:
        client.close()


def _owns(client: redis.Redis, key: bytes) -> bool:
    try:
        client.execute_command("EXISTS", key)
    except redis.ResponseError:
        return False
    return True


def test_a_password_and_a_database() -> None:
    """URLs with credentials and a database number work; a wrong password is said, not retried."""
    with Server(requirepass="s3:cr@t") as server:
        url = f"redis://default:s3%3Acr%40t@127.0.0.1:{server.port}/3"
        store = open_redis(url)
        store.put(chain("a", 3))
        assert read(store, page("a0")) == page("a0").payload
        for shown in (store.link.target.shown, store.link.target, store.config, store.link.config):
            assert "s3" not in f"{shown!r}"
        with server.client as client:
            assert client.dbsize() == 0
        store.close()
        wrong = open_redis(f"redis://:nope@127.0.0.1:{server.port}")
        assert not wrong.usage().up
        with pytest.raises(StoreUnavailable) as caught:
            wrong.put([page("a")])
        assert "nope" not in str(caught.value)
        wrong.close()


def test_a_socket_file(tmp_path: Path) -> None:
    """unix:// works as TCP does."""
    with Server(unixsocket=tmp_path / "s") as server:
        store = open_redis(f"unix://{tmp_path}/s?db=2&deadline_s=3")
        assert store.config.deadline_s == 3
        store.put(chain("a", 3))
        assert read(store, page("a2", "a1")) == page("a2").payload
        with server.client as client:
            assert client.info("keyspace").keys() == {"db2"}
        store.close()


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("http://x", "not a Redis URL"),
        ("redis://x?ttl_s=soon", "ttl_s=soon"),
        ("redis+sentinel://a:1,b:2", "/service"),
        ("redis+sentinel://a:x/service", "port is not a number"),
        ("redis+cluster://a:1/2", "no path"),
        ("redis://x?deadline_s=0", "must be positive"),
        ("redis://:pass#word@x", "%23"),
        ("redis://x?socket_timeout=abc", "socket_timeout"),
    ],
)
def test_a_url_that_cannot_be(url: str, what: str) -> None:
    """What is wrong with a URL is said before anything is connected."""
    with pytest.raises(InvalidRequest, match=what):
        open_redis(url)


def test_sentinel(tmp_path) -> None:
    """The master that a Sentinel names is used; after a failover, the new one."""
    quick = {"repl_diskless_sync_delay": 0}
    with (
        Server(**quick) as first,
        Server(replicaof=f"127.0.0.1 {first.port}", **quick) as second,
    ):
        conf = tmp_path / "sentinel.conf"
        conf.write_text(
            f"sentinel monitor main 127.0.0.1 {first.port} 1\n"
            "sentinel down-after-milliseconds main 60000\n"
        )
        with Server(prefix=[str(conf), "--sentinel"]) as sentinel:
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main/0"
            store = open_redis(url, deadline_s=2)
            items = chain("a", 5)
            store.put(items)
            with second.client as client:
                eventually(lambda: client.info("replication")["master_link_status"] == "up")
                eventually(lambda: client.hlen(store.shelf.names.cat) == 5)
            with sentinel.client as client:
                eventually(lambda: client.sentinel_slaves("main"), 15)
                client.execute_command("SENTINEL FAILOVER main")
                eventually(lambda: _master_port(client) == second.port, 20)
            # What the old master takes while it is being demoted is lost: Redis replicates late.
            with second.client as client:
                eventually(
                    lambda: _puts(store, "b") and client.hlen(store.shelf.names.cat) == 6, 10
                )
            assert [read(store, item) for item in items] == [item.payload for item in items]
            store.close()


def _master_port(client: redis.Redis) -> int:
    reply = client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", "main")
    return int(reply[1])


def _puts(store: RedisStore, name: str) -> bool:
    try:
        store.put([page(name)])
    except StoreUnavailable:
        return False
    return True
