"""The trainer's end of the weights' way to the engines, and what stands at the other end.

    here                            on the rollout nodes
    publisher, versions (files)  ►  services.rollout.weights.store fetches, verifies and keeps them
    board (newest version)       ►  services.rollout.weights.follow asks for it and reports
    broadcast, transfer          ►  services.rollout.weights.receive; services.engine.distributed
    comparison, layouts          ◄  the checksums of an engine (`/weights_checker`)
    adapters                     ►  services.rollout.engine_client.load_adapter

`common.weights` has what both ends do with files, `learning.weight_group` what both do with groups.
"""
