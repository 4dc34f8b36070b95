"""Leases for a process that has no store of its own: a link to the servers, kept connected."""

from __future__ import annotations

import logging
import random
import threading

from dsv4_tierd.tiering.errors import StoreUnavailable
from dsv4_tierd.tiering.store.lease import RedisLeases
from dsv4_tierd.tiering.store.open import parse_spec
from dsv4_tierd.tiering.store.protocol import WritePolicy
from dsv4_tierd.tiering.store.redis_config import RedisConfig
from dsv4_tierd.tiering.store.redis_link import Link

log = logging.getLogger(__name__)

LOOK_S = 0.2
BACK_OFF_MAX_S = 5.0


class LeaseServer:
    """``leases`` on a link that one thread reconnects, for as long as this is open."""

    def __init__(self, url: str) -> None:
        """Connect once, or start down and go on trying. Raises InvalidRequest (the URL)."""
        self.link = Link(RedisConfig(url, 0))
        self.leases = RedisLeases(self.link)
        self._closing = threading.Event()
        self._connect()
        self._thread = threading.Thread(target=self._run, name="lease-link", daemon=True)
        self._thread.start()

    @property
    def up(self) -> bool:
        """Whether calls are made at all."""
        return self.link.up

    def close(self) -> None:
        """End the thread and the connections."""
        self._closing.set()
        self.link.hang_up()
        self._thread.join()
        self.link.close()

    def _connect(self) -> None:
        try:
            self.link.connect()
            self.link.restored()
        except StoreUnavailable as error:
            self.link.stays_down(str(error))

    def _run(self) -> None:
        wait_s = LOOK_S
        while not self._closing.wait(wait_s):
            try:
                if self.link.up:
                    self.link.check_master()
                else:
                    self._connect()
            except Exception:  # the thread outlives what nobody foresaw
                log.exception("leases: connecting to %s failed", self.link.target.shown)
                self.link.trip("an unforeseen error")
            back_off_s = min(2 * wait_s, BACK_OFF_MAX_S) * random.uniform(0.5, 1.0)
            wait_s = LOOK_S if self.link.up else max(LOOK_S, back_off_s)


def open_leases(spec: str) -> LeaseServer | None:
    """Leases on the server that a ``--store`` names; None: it names none that daemons share.

    Raises InvalidRequest.
    """
    for tier in parse_spec(spec):
        if tier.redis_url is not None and tier.policy is not WritePolicy.NEVER:
            return LeaseServer(tier.redis_url)
    return None
