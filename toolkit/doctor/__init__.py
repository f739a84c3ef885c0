"""The doctor: checks of this machine before a launch, each with one line that mends it."""
