"""What configs, flags and scripts really ask for, read before anything runs."""
