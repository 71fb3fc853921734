"""Training programs: one entry point (`trainer.task`), typed configs, one file per experiment."""
