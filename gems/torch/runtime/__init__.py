"""Running the stages of one rank."""
