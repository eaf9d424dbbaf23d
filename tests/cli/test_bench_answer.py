"""What `sipipe bench` says above its table, as CSV, and of two results side by side."""

import csv
import io
import json

import pytest

from sipipe.cli import main
from sipipe.cli.bench_answer import answers, figure
from sipipe.cli.bench_compare import both, compared, read
from sipipe.cli.bench_tables import csv_table
from sipipe.errors import ConfigError
from sipipe.tools.report.render import render_load


def row(engine, rate, tokens, each, **more):
    figures = {"tok/s": f"{tokens:,} ({tokens - 5:,}-{tokens + 5:,})", "TPOT p50": f"{each:,}"}
    return {"sampling": "chat", "requests": 40, "engine": engine, "rate": rate} | figures | more


RATES = [
    row("sipipe", 1.0, 46, 40),
    row("stock", 1.0, 45, 59),
    row("stock-one", 1.0, 46, 38),
    row("sipipe", 16.0, 1_326, 84),
    row("stock", 16.0, 663, 252),
    row("stock-one", 16.0, 663, 168),
]


def test_the_answer_is_of_the_heaviest_load_and_says_where_another_engine_is_as_good():
    heaviest, as_good = answers(RATES)
    assert heaviest == (
        "At 16 requests/s sipipe serves 2.00 × the tokens of stock with 0.33 × its time per token; "
        "2.00 × the tokens of stock-one with 0.50 × its time per token."
    )
    assert as_good == "stock-one is as good or better at 1 requests/s."


def test_requests_at_once_are_heavier_than_any_rate():
    at_once = [row("sipipe", None, 90, 10), row("stock", None, 30, 20)]
    pair = [line for line in RATES if line["engine"] != "stock-one"]
    assert answers([*pair, *at_once])[0].startswith("With 40 requests at once sipipe serves 3.00 ×")


def test_the_answer_has_the_tables_number():
    """Speeds are rounded in the table, where the ratio was made before."""
    rows = [row("sipipe", None, 180, 10, **{"of stock's best": "2.42"}), row("stock", None, 74, 20)]
    assert "serves 2.42 × the tokens of stock" in answers(rows)[0]


def test_each_way_of_sampling_has_a_sentence():
    greedy = [line | {"sampling": "greedy"} for line in RATES]
    begins = [sentence.split(" at ")[0] for sentence in answers([*RATES, *greedy])]
    assert begins[0].startswith("Chat,")
    assert begins[2].startswith("Greedy,")


@pytest.mark.parametrize(
    "rows", [[], RATES[:1], [line for line in RATES if "stock" in line["engine"]]]
)
def test_without_both_engines_there_is_no_answer(rows):
    assert answers(rows) == []


def test_the_highest_rate_within_the_limits_has_all_lower_ones_within_them():
    shares = {("sipipe", 1.0): "100%", ("sipipe", 2.0): "95%", ("sipipe", 4.0): "91%"}
    shares |= {("stock", 1.0): "100%", ("stock", 2.0): "40%", ("stock", 4.0): "95%"}
    shares |= {("stock-one", 1.0): "89%", ("stock-one", 2.0): "30%", ("stock-one", 4.0): "0%"}
    rows = [
        row(engine, rate, 10, 10) | {"within limits": share}
        for (engine, rate), share in shares.items()
    ]
    assert answers(rows, ["ttft:500", "tpot:50"])[-1] == (
        "Nine of ten requests stay within the limits (ttft:500, tpot:50): sipipe up to 4 requests/s, "
        "stock up to 1 requests/s, stock-one at none of these rates."
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [("1,234 (1,000-1,300)", 1234.0), ("0.5", 0.5), ("", None), (None, None), ("93%", 93.0)],
)
def test_the_figure_of_a_cell(text, number):
    assert figure(text) == number


def test_csv_has_plain_numbers_and_a_range_in_columns_of_its_own():
    lines = list(csv.DictReader(io.StringIO(csv_table([*RATES, row("stock", None, 5, 5)]))))
    assert lines[3]["tok/s"] == "1326"
    assert (lines[3]["tok/s low"], lines[3]["tok/s high"]) == ("1321", "1331")
    assert (lines[3]["rate"], lines[-1]["rate"]) == ("16.0", "")


def result(rows):
    machine = {"cpu": "a processor", "cores": 2, "date": "2026-11-29", "vllm": "0.32.0"}
    names = {"title": "t", "note": "ms", "command": "sipipe bench M", "model": "org/model"}
    return {**names, "machine": machine, "rows": rows, "answers": answers(rows)}


def test_two_results_are_compared_load_by_load(tmp_path, capsys):
    faster = [line | {"tok/s": f"{2 * figure(line['tok/s']):,.0f}"} for line in RATES]
    (tmp_path / "before.html").write_text(render_load(result(RATES)))
    (tmp_path / "after.json").write_text(json.dumps(result(faster[:3])))
    page = tmp_path / "both.html"
    files = [str(tmp_path / name) for name in ("before.html", "after.json")]
    assert main(["bench", "compare", *files, "--output", str(page)]) == 0
    said = capsys.readouterr().out
    assert said.count("2.00 ×") == 3, said
    assert "after, in parts of before" in said
    engines = {line["engine"] for line in read(str(page))["rows"]}
    assert engines >= {"sipipe (before)", "sipipe (after)"}


def test_engines_of_both_results_keep_their_names_and_answers():
    made = both(result(RATES), result(RATES), ("a", "b"))
    assert len(made["rows"]) == 2 * len(RATES)
    assert made["answers"][0].startswith("a: At 16 requests/s")
    assert compared(RATES, [line | {"requests": 1} for line in RATES]) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no result of sipipe bench"),
        ('{"rows": []}', "is no result of sipipe bench"),
        ("[1]", "is no result of sipipe bench"),
        ("[" * 100_000, "is no result of sipipe bench"),
        (json.dumps(result([]) | {"rows": [{"engine": [], "sampling": {}}]}), "is no result"),
        (json.dumps(result([]) | {"rows": [row("a", {}, 5, 5)]}), "is no result"),
        (json.dumps(result([]) | {"rows": [row("a", float("nan"), 5, 5)]}), "is no result"),
        (json.dumps(result([]) | {"answers": 5}), "is no result"),
        (json.dumps(result([]) | {"answers": [None]}), "is no result"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path, text, said):
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read(str(tmp_path / "none"))


@pytest.mark.parametrize("text", [",", "-", "-,5", "", None, "fast"])
def test_a_cell_without_a_number_is_no_figure(text):
    assert figure(text) is None
