"""The one thread that keeps a Redis store fresh: it follows the log, tidies, and reconnects."""

from __future__ import annotations

import logging
import random
import threading
import time

from dsv4_tierd.tiering.errors import StoreUnavailable
from dsv4_tierd.tiering.store.identity import StoreIdentity, differences
from dsv4_tierd.tiering.store.redis_link import Link
from dsv4_tierd.tiering.store.redis_mirror import Held
from dsv4_tierd.tiering.store.redis_replies import as_bytes, as_count, as_object
from dsv4_tierd.tiering.store.redis_rows import IDENTITIES, Names
from dsv4_tierd.tiering.store.redis_shelf import Shelf, scan_hash
from dsv4_tierd.tiering.store.resp import ProtocolBroken

log = logging.getLogger(__name__)

FOLLOW_S = 0.5
LOOK_S = 1.0
TELL_S = 5.0
BACK_OFF_S = (0.05, 5.0)
STOP_S = 5.0


class Keeper:
    """Owns the mirror's freshness. ``expired``: objects whose time ran out, a counter."""

    def __init__(self, shelf: Shelf, identity: StoreIdentity | None) -> None:
        self.expired = 0
        self._shelf, self._identity = shelf, identity
        self._link = shelf.link
        self._thread = threading.Thread(target=self._run, name="store-redis", daemon=True)
        self._stopping = self._named_others = False
        self._used: set[Held] = set()
        self._using = threading.Lock()
        self._look_at = self._tell_at = 0.0

    def start(self) -> None:
        """Connect once in the caller's time, then go on in the background."""
        try:
            self._restore()
        except StoreUnavailable as error:
            where = self._link.target.shown
            log.warning("store: redis at %s: %s; trying again in the background", where, error)
            self._link.stays_down(str(error))
        self._thread.start()

    def stop(self) -> None:
        """Tell what was used and end the thread."""
        self._stopping = True
        try:
            if self._link.up:
                self._tell()
        except StoreUnavailable as error:
            log.warning("store: last uses are not told: %s", error)
        self._link.hang_up()
        self._thread.join(STOP_S)

    def used(self, held: Held) -> None:
        """An extent was read; everyone is told within some seconds."""
        with self._using:
            self._used.add(held)

    def _run(self) -> None:
        wait_s = BACK_OFF_S[0]
        while not self._stopping:
            try:
                if not self._link.up:
                    self._restore()
                self._shelf.catch_up(FOLLOW_S)
                self._tidy()
                wait_s = BACK_OFF_S[0]
            except StoreUnavailable as error:
                if self._link.up:
                    self._link.trip(str(error))
                else:
                    self._link.stays_down(str(error))
            except Exception:  # the thread outlives what nobody foresaw
                log.exception("store: following redis at %s failed", self._link.target.shown)
                self._shelf.forget()
                self._link.trip("an unforeseen error")
            if not self._link.up and not self._stopping:
                time.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, BACK_OFF_S[1])

    def _restore(self) -> None:
        self._link.connect()
        anew = self._shelf.load(self._identity)
        self._link.restored()
        self._shelf.sweep()
        if self._identity is not None and not self._named_others:
            log_other_identities(self._link, self._identity)
            self._named_others = True
        if anew:
            mirror = self._shelf.mirror
            log.info("store: %d objects in the catalogue", mirror.count)
            if mirror.passed_over:
                log.warning(
                    "store: %d catalogue rows of another version are passed over: written by"
                    " another release of dsv4-tierd",
                    len(mirror.passed_over),
                )

    def _tidy(self) -> None:
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._link.check_master()
            if not self._shelf.in_step():
                log.warning("store: the catalogue is not what it was; reading it anew")
                self._shelf.forget()
                self._shelf.load(self._identity)
            self.expired += self._shelf.remove(self._shelf.mirror.expired(), erase=False)
        if now >= self._tell_at:
            ttl_s = self._link.config.ttl_s  # telling says whole chains then, so not too often
            self._tell_at = now + (min(max(TELL_S, ttl_s / 10), ttl_s / 4) if ttl_s else TELL_S)
            self._tell()

    def _tell(self) -> None:
        with self._using:
            used, self._used = self._used, set()
        if used and self._link.config.ttl_s:
            used = self._shelf.mirror.chain(used)  # a page lasts as long as what hangs on it
        if used:
            self._shelf.use(used)


def log_other_identities(link: Link, identity: StoreIdentity) -> None:
    """Say what the server holds that this identity cannot use, and which fields are why."""
    for name, text in scan_hash(link, IDENTITIES, as_bytes):
        other = name.decode(errors="replace")
        count = link.call(Names(other).cat, "HLEN", Names(other).cat, read=as_count)
        if other == identity.digest.hex() or not count:
            continue
        try:
            fields = as_object(text)
        except ProtocolBroken:  # anyone may have put it there
            log.warning("store %s: identity %s is not readable", link.target.shown, other[:16])
            continue
        why = "; ".join(differences(fields, identity.as_dict()))
        log.warning(
            "store %s: %s objects of identity %s cannot be used, it differs in %s",
            link.target.shown,
            count,
            other[:16],
            why,
        )
