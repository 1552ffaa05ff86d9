"""Re-executes a step of a run that was recorded with `trainer.audit`, and compares every stage.

    weights of version N-1 ─► completions, rewards ─► advantages ─► gradient ─► weights of version N

- `reexecution`: the stages in order, on every rank.
- `history`: the models at a step, from a checkpoint and the recorded updates after it.
- `completions`: what the engine samples again. `episodes`: episodes that are played again.
- `grading`: what the reward functions say again.
- `certify`: drawn steps, and the record that others can check.
- `waits`: how far a command is.
- `comparison`: the outcome of a stage, and what counts as equal.
"""
