"""The figure of the three frontiers: which entries it takes, and when it is drawn."""

import pytest

from dpscaffold.paper.results import write_tidy
from dpscaffold.paper.summary import FILE, SOURCES, _means, draw_summary


def entry(experiment: str, row: str, column: str, line: str, accuracy: float, **other):
    fields = {"shown": True, "output": "average of the last half", "test_accuracy": accuracy}
    return {"experiment": experiment, "row": row, "column": column, "line": line} | fields | other


ROW = "MNIST, γ = 0 %"
ENTRIES = [
    entry("frontier", ROW, "none", "SCAFFOLD", 0.9),
    entry("frontier", ROW, "none", "FedAvg", 0.95),
    entry("frontier", ROW, "1 poisson", "SCAFFOLD", 0.6),
    entry("frontier", ROW, "1 poisson", "FedAvg", 0.7),
    entry("frontier", ROW, "1 poisson", "FedAvg", 0.8),  # a second seed
    entry("frontier", ROW, "1 poisson", "FedProx", 0.99, shown=False),
    entry("frontier", ROW, "1 poisson", "FedProx", 0.99, output="last iterates"),
    entry("frontier", ROW, "1 fixed", "FedProx", 0.99),
    entry("frontier-secure", ROW, "1 poisson", "FedAvg with secure sums", 0.85),
    entry("frontier-hog", "MNIST, HOG, γ = 0 %", "1 poisson", "SCAFFOLD", 0.88),
]


def test_each_line_is_the_best_algorithm_as_the_mean_of_its_seeds() -> None:
    assert _means(ENTRIES) == {
        ("nobody", ROW, 0.0): 0.95,
        ("paper", ROW, 1.0): 0.6,
        ("uploads", ROW, 1.0): pytest.approx(0.75),
        ("sums", ROW, 1.0): 0.85,
        ("uploads", "MNIST, HOG, γ = 0 %", 1.0): 0.88,
    }


def test_it_is_drawn_once_all_three_are_finished(tmp_path) -> None:
    for name in SOURCES:
        assert draw_summary(tmp_path) == []
        (tmp_path / name).mkdir()
        rows = [
            one | {"row": row}
            for one in ENTRIES
            if one["experiment"] == name
            for row in (ROW, "FEMNIST, γ = 0 %", "synthetic (5, 5), λ = 0")
        ]
        write_tidy(rows, tmp_path / name)
    assert draw_summary(tmp_path) == [FILE]
    assert (tmp_path / SOURCES[0] / FILE).read_bytes().startswith(b"\x89PNG")
