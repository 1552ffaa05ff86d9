"""What if: questions to a run that has ended, answered from what it recorded.

- `regrade`: what another reward function, or corrected answers, would have said of every answer.
- `grades`: grades the recorded texts again, with the reward-server's own classes.
- `why`: why a run collapsed or jumped. `run_facts`: what it reads; `causes`: the causes that it can
  name; `gradients`: the groups and tokens that made the gradient of a step.
- `fork`: a run from a step with something changed. `forking`: what it begins with.
"""
