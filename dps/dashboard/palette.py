"""The colours of all pictures: those of Okabe and Ito, which the colour-blind can tell apart, on white and on black."""

from __future__ import annotations

__all__ = ["LINES", "PARTS", "PART_COLOURS", "SEQUENTIAL", "STATE_COLOURS"]

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#8C8C8C"

PARTS = ("compute", "pull", "wait", "push", "serialise")  # where a trainer's time goes, in the order they are drawn
PART_COLOURS = dict(zip(PARTS, (GREEN, SKY, ORANGE, BLUE, PURPLE), strict=True))
STATE_COLOURS = {"running": GREEN, "waiting": ORANGE, "lost": VERMILION, "left": GREY, "expected": GREY}
LINES = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY, YELLOW)  # of curves that mean nothing by their colour
SEQUENTIAL = ("#440154", "#414487", "#2A788E", "#22A884", "#7AD151", "#FDE725")  # viridis, from little to much
