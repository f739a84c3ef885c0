"""A model without its weights: from a name or a config.json to the shapes of its tensors."""
