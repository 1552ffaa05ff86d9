"""Headers by which a client learns whether a service works on a request that stays unanswered."""

ATTEMPT = "x-attempt"
"""Id of an attempt: a call that is sent again has another one."""
ASKED_ATTEMPT = "x-asked-attempt"
"""In a request for `/health`: the attempt that is asked for. In its answer: `WORKING` or `LOST`."""
WORKING = "working"
LOST = "lost"
"""The request has not arrived, or its answer was sent."""
