"""The Grafana dashboard asks only for metrics that exist, with labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

from sipipe.observe.live import LivePage
from sipipe.observe.metrics import HELP, Reader

DASHBOARD = Path(__file__).parents[2] / "dashboards" / "sipipe.json"


def test_dashboard_matches_the_metrics():
    page = LivePage.create(stages=1, samplers=1)
    shown = {}
    for sample in Reader().samples([page]):
        name = sample.name + ("_total" if sample.kind == "counter" else "")
        shown[name] = {label for label, _ in sample.labels}
    page.close()
    board = json.loads(DASHBOARD.read_text())
    asked = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            names = re.findall(r"sipipe_\w+", expression)
            asked.update(names)
            assert set(names) <= set(shown), expression
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            for group in re.findall(r"by \(([^)]*)\)", expression):
                labels |= {label.strip() for label in group.split(",")}
            for name in names:
                assert "engine" in shown[name]
            assert any(labels <= shown[name] for name in names), expression
    for needed in ("busy", "bubble", "sampler", "queue", "fallbacks", "restarts"):
        assert any(needed in name for name in asked), needed
    boxes = [tuple(p["gridPos"].values()) for p in board["panels"]]
    assert len(boxes) == len(set(boxes))
    assert set(HELP) >= {name.removesuffix("_total") for name in asked}
