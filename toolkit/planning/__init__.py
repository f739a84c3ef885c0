"""Will it fit, how fast, what does it cost: answered before a GPU is rented."""
