"""API_TOKEN, the shared token of a run, and the key of a judge. No value is ever shown."""

import re
from collections.abc import Iterable

from common.topology import REWARD
from jobgroup.doctor.plan import Plan
from jobgroup.doctor.result import Result, fail, ok, warn

_SHORTEST = 16
_SAFE = re.compile(r"[A-Za-z0-9._~+/=-]+")  # what RFC 6750 allows behind "Bearer "
_MEND = "export API_TOKEN=$(openssl rand -hex 32), and --secret API_TOKEN when launching: the same in every task"


def check_api_token(plan: Plan) -> Iterable[Result]:
    """Set where others could reach the services, long enough, the same everywhere, and such that it can be sent."""
    values = {job.env.get("API_TOKEN", "") for job in plan.here or plan.jobs}
    exposed = (plan.topology is not None and not plan.topology.local_hosts) or plan.assumed is not None
    value = max(values, default="")
    if len(values) > 1:
        yield fail("API_TOKEN", "the tasks have different ones", _MEND)
    elif not value and exposed:
        yield warn("API_TOKEN", "not set: whoever reaches the cluster's network can call every service", _MEND)
    elif not value:
        yield ok("API_TOKEN", "not set; a local run listens on loopback addresses only")
    elif len(value) < _SHORTEST:
        yield fail("API_TOKEN", f"has {len(value)} characters, at least {_SHORTEST} are needed", _MEND)
    elif not _SAFE.fullmatch(value):
        yield fail("API_TOKEN", "has characters that cannot be sent in a header", _MEND)
    else:
        yield ok("API_TOKEN", f"set, {len(value)} characters")


def check_judge(plan: Plan) -> Iterable[Result]:
    """The key of the endpoint that judges, where there is a judge."""
    job = plan.job(REWARD)
    if job is not None and "judge" in job.config.reward.function_names():
        if job.env.get("JUDGE_API_KEY"):
            yield ok("JUDGE_API_KEY", "set")
        else:
            yield warn("JUDGE_API_KEY", "not set", "give it with --secret JUDGE_API_KEY, unless the endpoint asks for none")
