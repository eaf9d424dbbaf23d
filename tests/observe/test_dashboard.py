"""The Grafana dashboard asks only for metrics that exist, with labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

from sipipe.observe.live import LivePage, PageHeader
from sipipe.observe.metrics import METRICS, samples
from sipipe.observe.phases import Phase
from sipipe.observe.poll import Poll

DASHBOARD = Path(__file__).parents[2] / "dashboards" / "sipipe.json"


def test_dashboard_matches_the_metrics():
    page = LivePage.create(PageHeader(stages=1, samplers=1, path="sipipe"))
    page.writer("sampler").phase(Phase.SAMPLE, 0, 0, 1, 4, 4)
    shown = {}
    for name, labels, _ in samples(Poll(page)):
        total = "_total" if METRICS[name].kind == "counter" else ""
        shown[name + total] = {label for label, _ in labels}
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
            assert any(labels <= shown[name] | {"instance"} for name in names), expression
    for needed in ("busy", "sampler", "queue", "restarts", "info", "stalled", "idle", "running"):
        assert any(needed in name for name in asked), needed
    shown_at = [p["id"] for p in board["panels"]]
    assert len(shown_at) == len(set(shown_at))
    boxes = [tuple(p["gridPos"].values()) for p in board["panels"]]
    assert len(boxes) == len(set(boxes))
    assert set(METRICS) >= {name.removesuffix("_total") for name in asked}
