"""How fast: GPUs, bytes on the wire, FLOPs, and the time of a step."""
