"""What is known of a model from its name and its `config.json`, without loading it."""
