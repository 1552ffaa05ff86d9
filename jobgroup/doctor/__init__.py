"""`python -m jobgroup.doctor`: is this machine, or the cluster around this pod, ready for a job
group?
"""
