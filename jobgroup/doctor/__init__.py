"""`python -m jobgroup.doctor`: is this machine ready for a job group?"""
