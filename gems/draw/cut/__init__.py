"""Pictures of a model cut into stages: what each has, and what crosses between them."""
