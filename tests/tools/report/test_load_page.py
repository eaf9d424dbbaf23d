"""The page of `sipipe bench --output`: one file, with every figure over the load that varies."""

import json
import re

import pytest

from sipipe.tools.report.render import render_load

ENGINES = ("sipipe", "stock")


def result(rates=(1.0, 2.0, 8.0, None), prompts=(None,), goodput="0.50"):
    rows = [
        {"sampling": "chat", "requests": 64, "engine": engine}
        | ({"prompt": prompt} if prompt else {})
        | ({"rate": rate} if rate else {})
        | {"tok/s": "1,234 (1,000-1,300)", "TTFT p50": "5", "TTFT p99": "9,000"}
        | {"TPOT p50": "5", "TPOT p99": "6", "goodput/s": goodput, "draws p": None}
        for prompt in prompts
        for rate in rates
        for engine in ENGINES
    ]
    machine = {"cpu": "a processor", "cores": 2, "date": "2026-11-26", "vllm": "0.32.0"}
    names = {"title": "Served by 1 engine", "note": "ms", "command": "sipipe bench </script><!--m"}
    names |= {"model": "/models/tiny", "answers": ["At 8 requests/s sipipe serves more."]}
    return {**names, "machine": machine, "rows": rows, "engines": {}, "failed": {}}


def test_it_is_one_file_with_the_rows_and_asks_for_nothing():
    page = render_load(result())
    assert "{{" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)[^"']""", page.split("uPlot=")[0])
    assert "default-src 'none'" in page
    assert "Permission is hereby granted" in page  # uPlot's license travels with it
    assert "<title>sipipe bench &lt;/script>&lt;!--m</title>" in page
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["rows"] == result()["rows"]
    assert data["command"] == "sipipe bench </script><!--m"


@pytest.mark.parametrize(
    ("made", "headings"),
    [
        (result(), ["chat, 64 requests; over requests/s sent"]),
        (
            result(prompts=(16, 256)),
            [f"chat, {n} tokens of a prompt, 64 requests; over requests/s sent" for n in (16, 256)],
        ),
        (result((None,), (16, 256)), ["chat, 64 requests; over tokens of a prompt"]),
        (result((None,)), ["chat; over requests"]),
        (result(goodput="0.00"), ["chat, 64 requests; over requests/s sent"]),
    ],
)
def test_a_browser_draws_each_figure_and_shows_every_row(browser, tmp_path, made, headings):
    browser.open(render_load(made), tmp_path / "load.html", 900)
    assert browser.run("[...document.querySelectorAll('#loads h2')].map(h => h.textContent)") == (
        headings
    )
    labels = browser.run(
        "[...document.querySelectorAll('.charts > div')].map(chart =>"
        " [...chart.querySelectorAll('.u-label')].slice(1).map(l => l.textContent))"
    )
    both = [*ENGINES, *(f"{engine} p99" for engine in ENGINES)]
    assert labels == [[*ENGINES], [*ENGINES], both, both] * len(headings)
    assert browser.run(
        "[...document.querySelectorAll('.charts > div')].every(chart =>"
        " chart.querySelector('.u-wrap').offsetWidth === chart.clientWidth)"
    )
    assert browser.run("document.querySelectorAll('#figures tbody tr').length") == len(made["rows"])
    assert ("draws p" in browser.run("document.querySelector('#figures').textContent")) is False
    assert browser.problems() == []


def test_the_page_begins_with_model_versions_and_answer(browser, tmp_path):
    browser.open(render_load(result()), tmp_path / "load.html", 900)
    assert browser.run("document.querySelector('h1').textContent") == "SiPipe bench tiny"
    assert browser.run("document.getElementById('what').textContent").startswith("vLLM 0.32.0")
    answer = "document.getElementById('answers').textContent"
    assert browser.run(answer) == "At 8 requests/s sipipe serves more."


def test_a_dashed_line_has_a_dashed_key(browser, tmp_path):
    browser.open(render_load(result(rates=(1.0, 2.0, 4.0, 8.0))), tmp_path / "load.html", 900)
    styles = browser.run(
        "[...document.querySelectorAll('.charts > div:last-child .u-series + .u-series .u-marker')].map(key =>"
        " getComputedStyle(key).borderTopStyle)"
    )
    assert styles == ["solid", "solid", "dashed", "dashed"]
    assert browser.problems() == []


@pytest.mark.parametrize("width", [1300, 420])
def test_nothing_is_wider_than_the_window_and_the_table_scrolls(browser, tmp_path, width):
    browser.open(render_load(result(goodput=None)), tmp_path / "load.html", 900)
    browser.size(width, 900)
    assert browser.run("document.documentElement.scrollWidth") == width
    charts = (
        "getComputedStyle(document.querySelector('.charts')).gridTemplateColumns.split(' ').length"
    )
    assert browser.run(charts) == (3 if width == 1300 else 1), "three charts leave no quarter empty"
    assert browser.run("getComputedStyle(document.getElementById('figures')).overflowX") == "auto"


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_the_address_chooses_the_colours(browser, tmp_path, theme):
    file = tmp_path / "load.html"
    browser.open(render_load(result()), file, 900)
    browser.size(1300, 900, dark=theme == "light")
    browser.call("Page.navigate", url=f"file://{file}?theme={theme}")
    chosen = """new Promise((done) => {
      const look = () => window.sipipe && location.search ? done(document.documentElement.dataset.theme)
                                                          : setTimeout(look, 20);
      look();
    })"""
    assert browser.run(chosen) == theme
