"""Pictures of a model partitioned into stages: what each has, and what crosses between them."""
