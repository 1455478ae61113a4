"""What a model is and what it costs, without the framework that it is written in."""
