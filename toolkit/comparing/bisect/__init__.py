"""The first thing that differs between two runs of one training, named with numbers."""
