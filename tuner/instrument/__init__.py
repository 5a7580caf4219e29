"""The cold-cache timer: rotation, tape, timed unit, neighbour, gate, self-check."""
