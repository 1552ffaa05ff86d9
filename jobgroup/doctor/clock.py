"""The clock of another machine against ours, from the Date header of its answer."""

from email.utils import parsedate_to_datetime

import httpx

from jobgroup.doctor.result import Result, fail, ok, warn

_TOLERATED_S = 2.0
_BROKEN_S = 60.0
_MEND = "set the clocks by NTP: timedatectl set-ntp true, or chrony, on the node (a pod has the clock of its node)"


def offset(response: httpx.Response, sent: float) -> tuple[float, float] | None:
    """(their clock minus ours, how far that may be wrong) in seconds; None without a Date header that can be read.

    Args:
        sent: our time (`time.time()`) when the request was sent. `response.elapsed` is the round trip.

    The header has whole seconds, cut off, and servers renew it once a second: one second is added, and is uncertain, as is
    half of the round trip.
    """
    trip = response.elapsed.total_seconds()
    try:
        theirs = parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return None
    return theirs + 1 - (sent + trip / 2), 1 + trip / 2


def judged(name: str, measured: tuple[float, float] | None) -> Result:
    """Whether that clock and ours agree as far as can be told."""
    if measured is None:
        return warn(name, "unknown: the answer has no Date", "compare `date -u` there and here")
    difference, uncertainty = measured
    text = f"{difference:+.1f} ± {uncertainty:.1f} s against ours"
    certain = abs(difference) - uncertainty
    if certain > _BROKEN_S:
        return fail(name, text, _MEND)
    return warn(name, text, _MEND) if certain > _TOLERATED_S else ok(name, text)
