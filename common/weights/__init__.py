"""Files of weights as the trainer writes and the rollout nodes read them: checksums, deltas, spare
files.
"""
