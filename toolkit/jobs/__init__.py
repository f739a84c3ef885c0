"""What is trained, and how: the types that the planner and the backends share."""
