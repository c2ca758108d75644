from pathlib import Path

import pytest

from tdmpc.telemetry.metrics import METRICS, ROW, Reduce, declaration, markdown

DOCS = Path(__file__).parents[2] / "docs/metrics.md"


def test_every_metric_is_declared_once_with_a_sentence():
    metrics = [*ROW, *METRICS]
    assert len({metric.name for metric in metrics}) == len(metrics)
    for metric in metrics:
        assert metric.sentence[0].isupper(), metric.name
        assert metric.sentence.endswith("."), metric.name
        assert metric.window in Reduce
        assert metric.workers in Reduce


def test_any_path_of_sections_has_the_declaration_of_its_statistic():
    assert declaration("time/update/mean_s").name == "time/<section>/mean_s"
    assert declaration("time/pretrain/update/model/max_s").workers == Reduce.MAX
    for name in ("time/update/median_s", "time/mean_s", "speed"):
        with pytest.raises(KeyError):
            declaration(name)


def test_the_documentation_is_that_of_the_declarations():
    assert DOCS.read_text(encoding="utf-8") == markdown(), "run `make docs`"
