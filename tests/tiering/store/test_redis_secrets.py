"""A URL's passwords are in no error, no log and no answer, whatever redis-py says."""

from __future__ import annotations

import logging
from urllib.parse import quote

import pytest
import redis

from dsv4_tierd.tiering.errors import StoreUnavailable
from dsv4_tierd.tiering.store import redis_keeper
from dsv4_tierd.tiering.store.lease_server import LeaseServer
from dsv4_tierd.tiering.store.redis_config import RedisConfig, parse
from dsv4_tierd.tiering.store.redis_doctor import check_server
from redis_cases import eventually, open_hasty
from redis_servers import Server
from store_cases import page

SECRET = "hun:ter2/\\'ä +"  # noqa: S105
SENTINEL = "second&secret"
WRITTEN = quote(SECRET, safe="")
URLS = {
    "server": f"redis://:{WRITTEN}@127.0.0.1:1/0",
    "cluster": f"redis+cluster://:{WRITTEN}@127.0.0.1:1,127.0.0.1:2",
    "sentinel": f"redis+sentinel://:{WRITTEN}@127.0.0.1:1/main"
    f"?sentinel_password={quote(SENTINEL, safe='')}",
}
PARTS = ("hun", "ter2", "second&", "second%26")


def texts(mode: str) -> str:
    """What redis-py says with its connections, and all ways in which a password may stand there."""
    forms = [SECRET, WRITTEN, quote(SECRET), repr(SECRET), repr(SECRET.encode())]
    if mode == "sentinel":
        forms += [SENTINEL, quote(SENTINEL)]
    return f"<Connection(password={', '.join(forms)})> Connection refused."


ERRORS: dict[str, type[Exception]] = {
    "master": redis.sentinel.MasterNotFoundError,
    "connection": redis.ConnectionError,
    "cluster": redis.exceptions.RedisClusterException,
    "bug": KeyError,
    "os": OSError,
}


@pytest.mark.parametrize("mode", URLS)
@pytest.mark.parametrize("error", ERRORS)
def test_no_password_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str, error: str
) -> None:
    """By the doctor, by the store's own errors, in its log, and by the leases' server."""

    def fail(*_: object, **__: object) -> None:
        raise ERRORS[error](texts(mode))

    monkeypatch.setattr(redis_keeper, "BACK_OFF_S", (0.01, 0.01))
    monkeypatch.setattr(redis.Connection, "connect", fail)
    monkeypatch.setattr(redis.sentinel.SentinelManagedConnection, "connect", fail)
    monkeypatch.setattr(redis.Sentinel, "discover_master", fail)
    monkeypatch.setattr(redis.cluster.NodesManager, "initialize", fail)
    caplog.set_level(logging.DEBUG)
    with pytest.raises(StoreUnavailable) as caught:
        check_server(RedisConfig(URLS[mode], 1 << 20))
    store = open_hasty(URLS[mode])
    with pytest.raises(StoreUnavailable) as asked:
        store.put([page("a")])
    leases = LeaseServer(URLS[mode])
    said = [str(caught.value), str(asked.value), store.link.down_reason, leases.link.down_reason]
    eventually(lambda: caplog.text.count("redis at") > 0)
    store.close()
    leases.close()
    for text in (*map(str, said), caplog.text):
        assert not [part for part in PARTS if part in text], text
    assert all("onnection refused" in str(text) for text in said)
    if mode != "server":
        assert all("127.0.0.1:1" in str(text) for text in said)
        assert "<Connection" not in caplog.text + "".join(map(str, said))


def test_an_unforeseen_error_is_logged_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A traceback of the keeper's does not show what redis-py said before."""
    with Server(requirepass=SENTINEL) as server:
        store = open_hasty(f"redis://:{quote(SENTINEL, safe='')}@127.0.0.1:{server.port}")
        seen = []

        def fail() -> bool:
            seen.append(True)
            with store.link._theirs():
                raise redis.ConnectionError(f"password={SENTINEL}")

        monkeypatch.setattr(store.shelf, "in_step", fail)
        eventually(lambda: len(seen) > 1)
        store.close()
    assert "an unforeseen" in caplog.text
    assert SENTINEL not in caplog.text


def test_every_form_is_scrubbed() -> None:
    """One place does it, for every password that a URL has."""
    for mode, url in URLS.items():
        _, target = parse(RedisConfig(url, 1 << 20))
        found = target.scrubbed(texts(mode))
        assert not [part for part in PARTS if part in found], found
        assert target.scrubbed("nothing to hide") == "nothing to hide"
