"""Weight sync from the trainer to the engines: one package per transport."""
