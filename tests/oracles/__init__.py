"""What GEMS gave at one moment, frozen: `python -m tests.oracles.freeze` writes it anew.

A change that is to change no numbers leaves these files as they are. One that changes them on
purpose freezes them again, and its commit lists what changed and why.

schedules.txt.gz   lowered schedules of drawn plans, as text
simulated.json     step seconds, peak bytes and bytes per link of the same plans, by unit costs
plans.json         what the planner answers for ten models
checkpoint/        a checkpoint with its next losses, for ever to be read
"""
