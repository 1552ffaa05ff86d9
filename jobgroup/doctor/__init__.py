"""`rlhf doctor`: is this machine ready for a job group?"""
