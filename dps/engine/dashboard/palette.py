"""The colours of all pictures: the palette of Okabe and Ito. Colour-blind people can tell them apart on any ground."""

from __future__ import annotations

from dps.engine.telemetry.snapshot import PARTS, TrainerPhase

__all__ = ["LINES", "PART_COLOURS", "SEQUENTIAL", "STATE_COLOURS"]

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#8C8C8C"

PART_COLOURS = dict(zip(PARTS, (GREEN, SKY, ORANGE, BLUE, PURPLE), strict=True))
STATE_COLOURS = {
    TrainerPhase.RUNNING: GREEN,
    TrainerPhase.WAITING: ORANGE,
    TrainerPhase.LOST: VERMILION,
    TrainerPhase.LEFT: GREY,
    TrainerPhase.EXPECTED: GREY,
}
LINES = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY, YELLOW)  # for curves whose colour has no meaning
SEQUENTIAL = ("#440154", "#414487", "#2A788E", "#22A884", "#7AD151", "#FDE725")  # viridis, from little to much
