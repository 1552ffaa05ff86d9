"""The system under deterministic simulation, on a simulated clock and network. A process that crashes
leaves its files as they are.

`world` is the flow of data: the real services and the real collector; `episodes` has the real
environment-server in it, whose agents (`players`) are stand-ins. `takeover` runs a second trainer
beside the first. `fleet` is the rollout nodes: the real agents, and the trainer's board and
publisher; engines and router are stand-ins.
"""
