"""The policies let a job group talk to itself; agents outside it can reach only the gateway."""

from typing import Any

import yaml

from common.settings.sections import EnvironmentSection
from tests.support.paths import ROOT

GROUP = {"rlhf-group": "rlhf-math"}
AGENTS = {"rlhf-agents": "rlhf-math"}


def selected(peers: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [peer["podSelector"]["matchLabels"] for peer in peers]


def test_agents_can_reach_only_the_gateway() -> None:
    found = {
        each["metadata"]["name"]: each["spec"]
        for each in yaml.safe_load_all((ROOT / "docs/reference/network-policy.yaml").read_text())
    }
    gateway = [{"port": EnvironmentSection().port}]
    group = found["rlhf-math"]
    agents = found["rlhf-math-agents"]
    door = found["rlhf-math-gateway"]
    assert group["podSelector"]["matchLabels"] == door["podSelector"]["matchLabels"] == GROUP
    assert [selected(rule["from"]) for rule in group["ingress"]] == [[GROUP]]
    assert agents["podSelector"]["matchLabels"] == AGENTS
    assert agents["policyTypes"] == ["Ingress", "Egress"]
    to_group, names = agents["egress"]
    assert (selected(to_group["to"]), to_group["ports"]) == ([GROUP], gateway)
    assert [port["port"] for port in names["ports"]] == [53, 53]
    assert [(selected(rule["from"]), rule["ports"]) for rule in door["ingress"]] == [
        ([AGENTS], gateway)
    ]
    episodes = found["rlhf-math-episodes"]
    assert episodes["podSelector"]["matchLabels"].items() > GROUP.items()
    assert episodes["policyTypes"] == ["Egress"]
    assert selected(episodes["egress"][0]["to"]) == [GROUP, AGENTS]
