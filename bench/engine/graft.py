"""The same pages under other names: sessions that share nothing, without computing them.

A page's bytes do not know whose they are. So a session of equal words under another salt, or of
other words after a shared prefix, is made by copying pages and giving them the names that its
words have: for the time of a step, for memory and for hit rates it is a session like any other.
"""

from __future__ import annotations

from rig import Rig
from texts import Ids

from dsv4_tierd.tiering.blocks import BLOCK_TOKENS, Transcript
from dsv4_tierd.tiering.radix import NO_PAGE


def graft(rig: Rig, words: Ids, twin: Ids, salt: str, first_block: int = 0) -> None:
    """Give ``twin`` under ``salt`` copies of the pages of ``words`` from ``first_block`` on.

    Before that block both must be the same words under the same salt. The pages of ``words``,
    but the last token's, must be in host memory, with a resume point at their end (``touch``).
    """
    tiers, tree = rig.tiers, rig.tiers.tree
    source = Transcript(tiers.root(""), words)
    path = tiers.match(source, "", len(words) - 1)
    assert len(path) == (len(words) - 1) // BLOCK_TOKENS, "pages are missing"
    assert all(node.mirror != NO_PAGE for node in path), "pages are not in host memory"
    assert path[-1].resume != NO_PAGE, "no resume point at the end"
    hashes = Transcript(tiers.root(salt), twin).hashes
    parent = path[first_block - 1] if first_block else tree.root(salt)
    tree.hold(path[-1])
    assert tiers.mirror_pool.reserve(len(path) - first_block), "no room in host memory"
    for block in range(first_block, len(path)):
        page = tiers.evictor.take_mirror()
        tiers.memory.blob(page).copy_(tiers.memory.blob(path[block].mirror))
        parent = tree.add(hashes[block], parent)
        tree.set_mirror(parent, page)
    slot = tiers.points.take()
    assert slot is not None, "no slot for a resume point"
    tiers.points.slot(slot).copy_(tiers.points.slot(path[-1].resume))
    tiers.points.publish(slot, parent)
    tree.release(path[-1])


def touch(rig: Rig, session: str, tokens: int) -> None:
    """Leave a resume point at the last block border of a session's first ``tokens``."""
    twin = rig.fork(session, at=tokens)
    rig.generate(twin, max_tokens=1)
    rig.close_sessions([twin])


def unshared(rig: Rig, words: Ids, count: int) -> list[str]:
    """``count`` sessions of these words that share no page."""
    sessions = []
    for number in range(count):
        salt = f"twin {number}"
        graft(rig, words, words, salt)
        sessions.append(rig.open(words, salt))
    return sessions


def purge_twins(rig: Rig, count: int) -> None:
    """Forget what ``unshared`` made."""
    from dsv4_tierd.engine.messages import PurgeSalt

    for number in range(count):
        rig.op(PurgeSalt, salt=f"twin {number}")
