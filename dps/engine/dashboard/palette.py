"""The colours of all pictures: the palette of Okabe and Ito. Colour-blind people can tell them apart on any ground."""

from __future__ import annotations

from dps.engine.telemetry.snapshot import PARTS, TrainerPhase

__all__ = ["LINES", "PART_COLOURS", "SEQUENTIAL", "STATE_COLOURS"]

ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#8C8C8C"

PART_COLOURS = dict(zip(PARTS, (GREEN, SKY, ORANGE, BLUE, PURPLE), strict=True))
STATE_COLOURS = {
    TrainerPhase.RUNNING: GREEN,
    TrainerPhase.WAITING: ORANGE,
    TrainerPhase.LOST: VERMILION,
    TrainerPhase.LEFT: GREY,
    TrainerPhase.EXPECTED: GREY,
}
# Colours of curves whose colour has no meaning.
LINES = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY, YELLOW)
# Colours of viridis, from little to much.
SEQUENTIAL = ("#440154", "#414487", "#2A788E", "#22A884", "#7AD151", "#FDE725")
