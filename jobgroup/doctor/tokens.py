"""API_TOKEN, the shared token of a run, and the key of a judge. No value is ever shown."""

from collections.abc import Iterable

from common.errors import ConfigError
from common.security import TOKEN, token
from common.topology import REWARD
from jobgroup.doctor.plan import Plan
from jobgroup.doctor.result import Result, fail, ok, warn

_MEND = "export API_TOKEN=$(openssl rand -hex 32), and --secret API_TOKEN when launching: the same in every task"


def check_api_token(plan: Plan) -> Iterable[Result]:
    """Set where others could reach the services, long enough, the same everywhere, and such that it can be sent."""
    values = {job.env.get("API_TOKEN", "") for job in plan.here or plan.jobs}
    exposed = (plan.topology is not None and not plan.topology.local_hosts) or plan.assumed is not None
    if len(values) > 1:
        yield fail("API_TOKEN", "the tasks have different ones", _MEND)
        return
    try:
        value = token({TOKEN: max(values, default="")})
    except ConfigError as error:
        yield fail("API_TOKEN", error.message, _MEND)
        return
    if value is None and exposed:
        yield warn("API_TOKEN", "not set: whoever reaches the cluster's network can call every service", _MEND)
    elif value is None:
        yield ok("API_TOKEN", "not set; a local run listens on loopback addresses only")
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
