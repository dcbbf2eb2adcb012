"""The report of a study: the same numbers in the table, the CSV, the Markdown and the plots."""

import csv
import io

import pytest
from scripted_sampler import result

from areal_jax.experiments.plots import text_plot
from areal_jax.experiments.report import main
from areal_jax.experiments.results import CellResult, save_cell
from areal_jax.experiments.study import Cell
from areal_jax.experiments.tables import as_csv, lines, markdown

VALUES = {("decoupled_ppo", 0): (0.8, 0.9), ("decoupled_ppo", 4): (0.7, 0.9), ("ppo", 4): (0.2,)}


@pytest.fixture
def study():
    cells = {Cell(loss, eta, seed): value for (loss, eta), values in VALUES.items() for seed, value in enumerate(values)}
    return {cell: CellResult(cell, {}, result([0.3, value, value], staleness=float(cell.eta))) for cell, value in cells.items()}


def test_lines_hold_means_intervals_and_extremes(study):
    found = lines(study)
    assert [(line["loss"], line["η"], line["n"]) for line in found] == [("decoupled_ppo", 0, 2), ("decoupled_ppo", 4, 2), ("ppo", 4, 1)]
    assert found[1]["final"].mean == pytest.approx(0.8) and found[1]["final"].half == pytest.approx(12.7062 * 0.1, rel=1e-4)
    assert found[1]["stale"] == 4.0 and found[1]["clipped"] == 8.0 and found[2]["final"].half is None


def test_csv_and_markdown_hold_the_lines(study):
    found = lines(study)
    rows = list(csv.DictReader(io.StringIO(as_csv(found))))
    assert [float(row["late"]) for row in rows] == pytest.approx([0.85, 0.8, 0.2]) and rows[2]["late ±"] == ""
    text = markdown(found).splitlines()
    assert text[0].startswith("| loss | η | n |") and len(text) == 5 and "0.800 ± 1.271" in text[3] and "| 0.200 |" in text[4]


def test_the_text_plot_puts_marks_at_their_heights(study):
    rows = text_plot({cell: r for cell, r in study.items() if cell.seed == 0}, lambda r: r.final, "accuracy").splitlines()
    assert "o decoupled_ppo, d ppo" in rows[0]
    top, bottom = rows[1], rows[16]
    assert top.startswith(" 0.800 ┤") and "o" in top and bottom.startswith(" 0.200 ┤") and "d" in bottom
    assert sum(row.count("o") for row in rows[1:17]) == 2 and rows[-1].split() == ["η", "0", "4"]


def test_a_plot_of_equal_values_has_a_height(study):
    equal = {cell: CellResult(cell, {}, result([0.3, 0.5])) for cell in study}
    assert "0.500" not in text_plot(equal, lambda r: r.final, "accuracy").splitlines()[1]


def test_the_program_writes_every_file(study, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the plots extra is not installed")
    (tmp_path / "cells").mkdir()
    for cell, r in study.items():
        save_cell(tmp_path / "cells" / f"{cell.name}.json", cell, {"a": 1}, r.found)
    assert main([f"--out={tmp_path}"]) == 0
    for name in ("table.csv", "table.md", "verdicts.txt", "accuracy.txt"):
        assert (tmp_path / name).read_text().strip()
    for name in ("accuracy.png", "curves.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    assert "decoupled_ppo at η ≤ 8 lies within" in printed and "ppo: no run at η = 0" in printed
