"""3, on one stream: what the side streams gain."""

from __future__ import annotations

from part_decode import points
from sizes import Kind
from stage import Stage

from dsv4_tierd.engine.config import EngineConfig

SWITCH = "side_streams"  # of EngineConfig: indexer, window and C128 work on streams of their own


def run(stage: Stage) -> None:
    """The points under HiSparse with the switch off."""
    if SWITCH not in EngineConfig.__struct_fields__:
        stage.sheet.say(f"no setting {SWITCH}: several streams are not compared with one")
        return
    points(stage, Kind.HISPARSE, ", one stream", **{SWITCH: False})
